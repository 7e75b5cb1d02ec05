"""The grid of `cotenant bench colocate` on several GPUs: a process for each TPOT target, each with a GPU and a share of
the cores to itself, and one report of all.

    python bench/colocate_grid.py --gpus 4 --slo-tpot-ms 10,15,25,40 --json grid.json --html grid.html llama-3.1-8b \
        --load-format dummy --trace conv.csv --time-scale 0.5,1,2,4

What it does not know goes to `bench colocate`. Beside grid.json it keeps grid-10.json, grid-10.log and so on. Cells
that those files have are not measured again: a run that was cut off goes on when it is started again. `--seconds` cuts
it off with exit code 3.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_CUT_OFF = 3
_POLL_S = 0.2
_ENDING_S = 20.0  # for a process that is told to end


@dataclass
class _Part:
    """The cells of one target."""

    tpot_ms: str
    path: Path
    process: subprocess.Popen[bytes] | None = None
    was_ended: bool = False

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def failed(self) -> bool:
        return self.process is not None and not self.was_ended and self.process.poll() not in (None, 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, required=True, help="how many, each for one target at a time")
    parser.add_argument("--slo-tpot-ms", default="10,15,25,40")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--html", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop then")
    arguments, rest = parser.parse_known_args()
    if arguments.gpus < 1:
        parser.error("--gpus: at least one")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    targets = [part.strip() for part in arguments.slo_tpot_ms.split(",") if part.strip()]
    parts = [_Part(each, arguments.json.with_stem(f"{arguments.json.stem}-{each}")) for each in targets]
    is_whole = _run(parts, arguments.gpus, rest, arguments.seconds)
    for part in parts:
        if part.failed:
            print(f"{part.tpot_ms} ms failed: {part.path.with_suffix('.log')} says why", file=sys.stderr)
    code = _join([part.path for part in parts if part.path.exists()], arguments.json, arguments.html)
    if not is_whole:
        print("cut off: start it again to go on", file=sys.stderr)
        return _CUT_OFF
    return code or int(any(part.failed for part in parts))


def _run(parts: Sequence[_Part], num_gpus: int, rest: Sequence[str], seconds: float) -> bool:
    """Whether all parts ended by themselves."""
    end_s = time.monotonic() + seconds
    waiting, gpus = list(parts), list[_Part | None]([None] * num_gpus)
    try:
        while waiting or any(part is not None and part.running for part in gpus):
            for gpu, part in enumerate(gpus):
                if waiting and (part is None or not part.running):
                    gpus[gpu] = waiting.pop(0)
                    _start(gpus[gpu], gpu, num_gpus, rest)
            if time.monotonic() > end_s:
                return False
            time.sleep(_POLL_S)
    finally:
        _end([part for part in parts if part.running])
    return True


def _start(part: _Part | None, gpu: int, num_gpus: int, rest: Sequence[str]) -> None:
    assert part is not None
    cores = sorted(os.sched_getaffinity(0))
    share = cores[gpu * len(cores) // num_gpus : (gpu + 1) * len(cores) // num_gpus] or cores
    command = [sys.executable, "-m", "cotenant", "bench", "colocate", *rest, "--slo-tpot-ms", part.tpot_ms]
    command += ["--json", str(part.path), "--resume"]
    with part.path.with_suffix(".log").open("ab") as log:
        part.process = subprocess.Popen(
            ["taskset", "-c", ",".join(map(str, share)), *command],
            stdout=log,
            stderr=log,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": _visible(gpu)},
        )


def _visible(gpu: int) -> str:
    """The GPU with this number among those that this process may use."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in allowed.split(",")] if allowed else []
    return names[gpu] if gpu < len(names) else str(gpu)


def _end(running: Sequence[_Part]) -> None:
    """Each cell is in its part's file as soon as it is measured."""
    for part in running:
        assert part.process is not None
        part.was_ended = True
        part.process.send_signal(signal.SIGINT)
    end_s = time.monotonic() + _ENDING_S
    for part in running:
        assert part.process is not None
        try:
            part.process.wait(max(0.0, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            part.process.kill()
            part.process.wait()


def _join(paths: Sequence[Path], json_path: Path, html_path: Path | None) -> int:
    if not paths:
        print("nothing was measured", file=sys.stderr)
        return 1
    command = [sys.executable, "-m", "cotenant", "bench", "colocate-report", *map(str, paths), "--json", str(json_path)]
    return subprocess.run(
        [*command, *(["--html", str(html_path)] if html_path is not None else [])], check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
