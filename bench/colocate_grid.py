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

from cotenant.processes import die_with_parent

_CUT_OFF = 3
_POLL_S = 0.2
_ENDING_S = 20.0  # for a process that is told to end


@dataclass
class _Part:
    """The cells of one target, in ``path``."""

    tpot_ms: str
    path: Path
    process: subprocess.Popen[bytes] | None = None
    was_ended: bool = False

    @property
    def log(self) -> Path:
        return self.path.with_name(f"{self.path.name.removesuffix('.json')}.log")

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def failed(self) -> bool:
        return self.process is not None and not self.was_ended and self.process.poll() not in (None, 0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--gpus", type=int, required=True, help="how many, each for one target at a time")
    parser.add_argument("--slo-tpot-ms", default="10,15,25,40")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--html", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop then")
    arguments, rest = parser.parse_known_args()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = list(map(str, range(arguments.gpus))) if visible is None else visible.split(",")[: arguments.gpus]
    if not 1 <= arguments.gpus == len(gpus):
        parser.error(f"--gpus: {arguments.gpus} of CUDA_VISIBLE_DEVICES={visible}")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    targets = dict.fromkeys(part.strip() for part in arguments.slo_tpot_ms.split(",") if part.strip())
    parts = [_Part(each, arguments.json.with_name(f"{arguments.json.stem}-{each}.json")) for each in targets]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the parts end, too
    is_whole = _run(parts, gpus, rest, arguments.seconds)
    for part in parts:
        if part.failed:
            print(f"{part.tpot_ms} ms failed: {part.log} says why", file=sys.stderr)
    code = _join([part.path for part in parts if part.path.exists()], arguments.json, arguments.html)
    if not is_whole:
        print("cut off: start it again to go on", file=sys.stderr)
        return _CUT_OFF
    return code or int(any(part.failed for part in parts))


def _run(parts: Sequence[_Part], gpus: Sequence[str], rest: Sequence[str], seconds: float) -> bool:
    """Whether all parts ended by themselves."""
    end_s = time.monotonic() + seconds
    cores = sorted(os.sched_getaffinity(0))
    waiting, busy = list(parts), dict[str, _Part]()
    try:
        while waiting or any(part.running for part in busy.values()):
            for index, gpu in enumerate(gpus):
                if waiting and not (gpu in busy and busy[gpu].running):
                    share = cores[index * len(cores) // len(gpus) : (index + 1) * len(cores) // len(gpus)]
                    busy[gpu] = waiting.pop(0)
                    busy[gpu].process = _start(busy[gpu], gpu, share or cores, rest)
            if time.monotonic() > end_s:
                return False
            time.sleep(_POLL_S)
    finally:
        _end([part for part in parts if part.running])
    return True


def _start(part: _Part, gpu: str, cores: Sequence[int], rest: Sequence[str]) -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C is this process's to handle."""
    parent = os.getpid()

    def prepare() -> None:
        die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.sched_setaffinity(0, cores)

    command = [sys.executable, "-m", "cotenant", "bench", "colocate", *rest, "--slo-tpot-ms", part.tpot_ms]
    command += ["--json", str(part.path), "--resume"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
    with part.log.open("ab") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True, preexec_fn=prepare
        )


def _end(running: Sequence[_Part]) -> None:
    """Each cell is in its part's file as soon as it is measured."""
    processes = [part.process for part in running if part.process is not None]
    for part in running:
        part.was_ended = True
    for process in processes:
        process.send_signal(signal.SIGINT)
    end_s = time.monotonic() + _ENDING_S
    for process in processes:
        try:
            process.wait(max(0.0, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


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
