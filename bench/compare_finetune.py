"""`cotenant bench finetune` beside PEFT and torchtune, one after the other on the same device.

python bench/compare_finetune.py --json bench/results/finetune_h200.json [--site DIR]

Shapes of Llama-3.1-8B, random weights, LoRA on all linear layers, full sequences. Every variant runs in a process of
its own for each batch size (sequences of a micro-batch); the result is the list of all runs, the fastest of each
variant marked ``best``. Variants: PEFT (bench/peft_finetune.py) without Liger kernels, with Liger's cross-entropy and
with all of them, and torchtune's single-device recipe (bench/torchtune_finetune.py), each with torch.compile and
without.

Packages come from the environment and from the folder that --site names; fill it with `pip install --target DIR
--no-deps`, lest another torch comes too. torchtune's are in a folder of their own, --torchtune-site, for PEFT refuses
the torchao that it needs: torchtune==0.6.1 torchao==0.15.0 torchdata==0.11.0 omegaconf antlr4-python3-runtime==4.9.3
datasets tiktoken sentencepiece kagglehub, and what those import. What cannot be imported is named and skipped, and so
is a run that fails, as one for which memory does not suffice.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare_servers import CONFIG, make_model_folder

OURS = "cotenant"


@dataclass(frozen=True, slots=True)
class Variant:
    """A script of this folder with its flags, and the modules without which it cannot run."""

    label: str
    script: str
    flags: tuple[str, ...]
    modules: tuple[str, ...]

    @property
    def is_torchtune(self) -> bool:
        return self.script == "torchtune_finetune.py"


def peers() -> list[Variant]:
    variants = []
    for liger, name in (("none", "peft"), ("cross-entropy", "peft, Liger cross-entropy"), ("all", "peft, Liger")):
        # Liger first: it is the one that may well lack, and the others take seconds.
        modules = (*(() if liger == "none" else ("liger_kernel.transformers",)), "peft", "transformers")
        variants.append(Variant(name, "peft_finetune.py", ("--liger", liger), modules))
    variants.append(
        Variant("torchtune", "torchtune_finetune.py", (), ("torchtune.models.llama3_1", "torchtune.training"))
    )
    compiled = [
        Variant(f"{variant.label}, compiled", variant.script, (*variant.flags, "--compile"), variant.modules)
        for variant in variants
    ]
    return [variant for pair in zip(variants, compiled, strict=True) for variant in pair]


def main() -> None:
    arguments = parse()
    work = Path(tempfile.mkdtemp())
    folder = work / ("llama-3.1-8b" if arguments.config is None else arguments.config.stem)
    make_model_folder(folder, CONFIG if arguments.config is None else json.loads(arguments.config.read_text()))
    report = work / "report.json"
    runs = []
    if arguments.only is None or OURS in arguments.only:
        runs += [(OURS, our_command(folder, size, report, arguments), None) for size in arguments.batch_sizes]
    for variant in peers():
        if arguments.only is not None and variant.label not in arguments.only:
            continue
        environment = peer_environment(arguments.torchtune_site if variant.is_torchtune else arguments.site)
        problem = why_not_importable(variant.modules, environment)
        if problem is not None:
            print(f"{variant.label}: skipped: {problem}", flush=True)
            continue
        runs += [
            (variant.label, peer_command(variant, folder, size, report, arguments), environment)
            for size in arguments.batch_sizes
        ]
    results: list[dict[str, Any]] = []
    for label, command, own_environment in runs:
        result = measure(label, command, own_environment, report, arguments.timeout)
        if result is not None:
            results.append(result)
            mark_best(results)
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")  # so that a cut run keeps what it has
    if not results:
        raise SystemExit("no run succeeded")
    print_best(results)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--site", default="", help="a folder of packages for the peers, before all others")
    parser.add_argument("--torchtune-site", default="", help="the same for torchtune")
    parser.add_argument("--only", action="append", help="the label of a variant, or cotenant; can be repeated")
    parser.add_argument("--config", type=Path, help="another config.json of a Llama than Llama-3.1-8B's")
    parser.add_argument("--batch-sizes", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--tokens-per-step", type=int, default=16384)
    parser.add_argument("--r", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup-steps", type=int, default=3)
    parser.add_argument("--samples", type=int, default=50, help="suspensions and discards of ours")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--timeout", type=float, default=400, help="seconds for one run")
    return parser.parse_args()


def common_flags(arguments: argparse.Namespace) -> list[str]:
    flags = ["--seq-len", arguments.seq_len, "--tokens-per-step", arguments.tokens_per_step, "--r", arguments.r]
    flags += ["--steps", arguments.steps, "--warmup-steps", arguments.warmup_steps, "--dtype", arguments.dtype]
    return [*map(str, flags), *(["--gradient-checkpointing"] if arguments.gradient_checkpointing else [])]


def our_command(folder: Path, batch_size: int, report: Path, arguments: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "cotenant", "bench", "finetune", str(folder), "--load-format", "dummy"]
    command += [*common_flags(arguments), "--tasklet-tokens", str(batch_size * arguments.seq_len)]
    return [*command, "--samples", str(arguments.samples), "--label", OURS, "--json", str(report)]


def peer_command(
    variant: Variant, folder: Path, batch_size: int, report: Path, arguments: argparse.Namespace
) -> list[str]:
    command = [sys.executable, str(Path(__file__).parent / variant.script), str(folder), *variant.flags]
    command += [*common_flags(arguments), "--batch-size", str(batch_size)]
    return [*command, "--label", variant.label, "--json", str(report)]


def peer_environment(site: str) -> dict[str, str]:
    folders = [folder for folder in (site, os.environ.get("PYTHONPATH")) if folder]
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(folders)}


def why_not_importable(modules: tuple[str, ...], environment: dict[str, str]) -> str | None:
    """The last line of the import's error, None if there is none."""
    names = ", ".join(modules)
    run = subprocess.run(
        [sys.executable, "-c", f"import {names}"], env=environment, capture_output=True, text=True, check=False
    )
    return None if run.returncode == 0 else f"{names} cannot be imported ({last_line(run.stderr)})"


def measure(
    label: str, command: list[str], environment: dict[str, str] | None, report: Path, timeout_s: float
) -> dict[str, Any] | None:
    """The report of one run; None, with the reason printed, if it failed."""
    report.unlink(missing_ok=True)
    try:
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        print(f"{label}: failed: not done within {timeout_s:g} s", flush=True)
        return None
    if run.returncode != 0:
        print(f"{label}: failed: {last_line(run.stderr)}", flush=True)
        return None
    result: dict[str, Any] = json.loads(report.read_text())
    result["model"] = Path(result["model"]).name
    print(f"{label}, {result['micro_batch_tokens']} tokens a micro-batch: {speed(result):,.0f} tokens/s", flush=True)
    return result


def mark_best(results: list[dict[str, Any]]) -> None:
    best: dict[str, dict[str, Any]] = {}
    for result in results:
        best[result["label"]] = max(best.get(result["label"], result), result, key=speed)
    for result in results:
        result["best"] = result is best[result["label"]]


def print_best(results: list[dict[str, Any]]) -> None:
    """The best of each variant, fastest first, with ours by theirs."""
    best = sorted((result for result in results if result["best"]), key=speed, reverse=True)
    ours = next((speed(result) for result in best if result["label"] == OURS), None)
    for result in best:
        memory = result["memory"]
        peak = memory.get("peak_allocated_bytes", memory.get("peak_resident_bytes")) / 2**30
        ratio = f", cotenant is {ours / speed(result):.3f} times it" if ours and result["label"] != OURS else ""
        print(f"best of {result['label']}: {speed(result):,.0f} tokens/s, peak memory {peak:.1f} GiB{ratio}")


def speed(result: dict[str, Any]) -> float:
    return float(result["tokens_per_s"]["mean"])


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no message"


if __name__ == "__main__":
    main()
