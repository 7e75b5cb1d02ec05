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
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu_queue import CUT_OFF, Work, gpus_to_use, run


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--gpus", type=int, required=True, help="how many, each for one target at a time")
    parser.add_argument("--slo-tpot-ms", default="10,15,25,40")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--html", type=Path)
    parser.add_argument("--trace-file", type=Path, help="one for each target, with its name in it")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop then")
    arguments, rest = parser.parse_known_args()
    try:
        gpus = gpus_to_use(arguments.gpus)
    except ValueError as error:
        parser.error(f"--gpus: {error}")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    targets = dict.fromkeys(part.strip() for part in arguments.slo_tpot_ms.split(",") if part.strip())
    paths = {each: arguments.json.with_name(f"{arguments.json.stem}-{each}.json") for each in targets}
    parts = [_part(tpot_ms, path, rest, arguments.trace_file) for tpot_ms, path in paths.items()]
    is_whole = run(parts, gpus, arguments.seconds)  # each cell is in its part's file as soon as it is measured
    for part in parts:
        if part.failed:
            print(f"{part.name} ms failed: {part.log} says why", file=sys.stderr)
    code = _join([path for path in paths.values() if path.exists()], arguments.json, arguments.html)
    if not is_whole:
        print("cut off: start it again to go on", file=sys.stderr)
        return CUT_OFF
    return code or int(any(part.failed for part in parts))


def _part(tpot_ms: str, path: Path, rest: Sequence[str], trace_file: Path | None) -> Work:
    """The cells of one target, in ``path``."""
    command = [sys.executable, "-m", "cotenant", "bench", "colocate", *rest, "--slo-tpot-ms", tpot_ms]
    if trace_file is not None:
        command += ["--trace-file", str(trace_file.with_stem(f"{trace_file.stem}-{tpot_ms}"))]
    return Work(tpot_ms, [*command, "--json", str(path), "--resume"], path.with_suffix(".log"))


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
