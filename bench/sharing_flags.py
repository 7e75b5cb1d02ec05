"""The flags of bench/compare_sharing.py."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cotenant.cli.colocate_figures import MIN_VALUES_FOR_P99
from cotenant.cli.options import MOST_ALONE_S
from cotenant.config import require_target
from cotenant.core.errors import InvalidInputError

ALL_SMS = 100  # percent


def parse(description: str | None) -> argparse.Namespace:
    """What was asked for. Ends the program for what cannot be."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", type=list_of(str), default=["separate", "mps"], help="separate, mps")
    parser.add_argument("--mps-shares", type=list_of(int), default=[100], help="the server's percent of the SMs")
    parser.add_argument("--no-mps", action="store_true", help="side by side without MPS instead")
    parser.add_argument("--server-memory", type=float, default=0.45, help="--gpu-memory-utilization beside training")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--config", type=Path, help="another config.json of a Llama than Llama-3.1-8B's")
    parser.add_argument("--cotenant-args", default="", help="more flags for cotenant serve")
    of_load = parser.add_argument_group("the load, as for cotenant bench colocate")
    of_load.add_argument("--slo-tpot-ms", type=list_of(float), default=[10.0, 15.0, 25.0, 40.0])
    of_load.add_argument("--slo-ttft-ms", type=float, default=500.0)
    of_load.add_argument("--slo-attainment", type=float, default=0.99)
    of_load.add_argument("--steady-batch-sizes", type=list_of(int), default=[32], help="its --batch-sizes; '' for none")
    of_load.add_argument("--context", type=int, default=1024)
    of_load.add_argument("--num-tokens", type=int, default=512)
    of_load.add_argument("--trace", type=Path, action="append", default=[])
    of_load.add_argument("--window", metavar="START:END")
    of_load.add_argument("--busiest", type=float)
    of_load.add_argument("--min-requests", type=int, default=MIN_VALUES_FOR_P99)
    of_load.add_argument("--cell-seconds", type=float)
    of_load.add_argument("--time-scale", type=list_of(float), default=[1.0])
    of_load.add_argument("--max-model-len", type=int, default=0)
    of_training = parser.add_argument_group("training, by PEFT")
    of_training.add_argument("--site", default="", help="a folder of packages for it, before all others")
    of_training.add_argument("--liger", choices=["none", "cross-entropy", "all"], default="cross-entropy")
    of_training.add_argument("--no-compile", action="store_true")
    of_training.add_argument(
        "--batch-sizes", type=list_of(int), default=[1, 2, 4], help="sequences; the fastest is kept"
    )
    of_training.add_argument("--seq-len", type=int, default=2048)
    of_training.add_argument("--tokens-per-step", type=int, default=16384)
    of_training.add_argument("--r", type=int, default=16)
    of_training.add_argument("--alone-seconds", type=float, default=10.0)
    of_training.add_argument("--timeout", type=float, default=400.0, help="seconds for its start, or for a step")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--append-to", type=Path, help="a file of `cotenant bench colocate --json`")
    parser.add_argument("--logs", type=Path, help="a folder; else beside the file, with its name")
    arguments = parser.parse_args()
    check(parser, arguments)
    return arguments


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End the program for flags that do not go together."""
    file = arguments.json or arguments.append_to
    if file is None:
        parser.error("--json or --append-to: where are the figures to go?")
    if not arguments.modes or not set(arguments.modes) <= {"separate", "mps"}:
        parser.error(f"--modes: separate and mps there are, got {','.join(arguments.modes)}")
    try:
        for tpot_ms in arguments.slo_tpot_ms:
            require_target(tpot_ms, "slo-tpot-ms")
        require_target(arguments.slo_ttft_ms, "slo-ttft-ms")
    except InvalidInputError as error:
        parser.error(error.message)
    if not arguments.slo_tpot_ms:
        parser.error("--slo-tpot-ms: which targets?")
    if not 0 < arguments.slo_attainment < 1:
        parser.error("--slo-attainment: expected a share above 0 and below 1")
    if not 0 < arguments.alone_seconds <= MOST_ALONE_S:
        parser.error(f"--alone-seconds: expected seconds above 0, at most {MOST_ALONE_S:g}")
    if not all(0 < share <= ALL_SMS for share in arguments.mps_shares):
        parser.error("--mps-shares: expected percent, like 100,60")
    if arguments.device == "cpu" and needs_mps(arguments):
        parser.error("--device cpu: MPS shares a GPU; add --no-mps")
    arguments.logs = (arguments.logs or file.with_name(file.stem + "-logs")).resolve()


def list_of(kind: type) -> Any:
    def read(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",") if part.strip()]

    read.__name__ = f"list of {kind.__name__}"
    return read


def needs_mps(arguments: argparse.Namespace) -> bool:
    return "mps" in arguments.modes and not arguments.no_mps


def config_name(arguments: argparse.Namespace) -> str:
    return "llama-3.1-8b" if arguments.config is None else arguments.config.stem


def peer_label(arguments: argparse.Namespace) -> str:
    liger = {"none": "", "cross-entropy": ", Liger cross-entropy", "all": ", Liger"}[arguments.liger]
    return f"peft{liger}{'' if arguments.no_compile else ', compiled'}"
