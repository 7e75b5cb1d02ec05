"""Measure again what docs/benchmarks.md shows of a GPU: the commands of bench/measurements.toml, several at a time.

    python bench/measure.py --list
    python bench/measure.py --gpus 2 --out measured finetune-cut colocate-grid [--seconds 560] [--keep]

Each command has a GPU and a share of the cores to itself, and a file and a log in --out, where the folder results/ has
what came of a measurement's commands. One that has its file is not run again, and those that can go on where they were
cut off do: start it again when --seconds were too few (exit code 3). --keep puts what is complete into bench/results/,
grids as far as they came, and renders the page.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_queue import CUT_OFF, Work, gpus_to_use, run

ROOT = Path(__file__).parent.parent
CATALOGUE = ROOT / "bench" / "measurements.toml"
RESULTS = ROOT / "bench" / "results"


@dataclass(frozen=True, slots=True)
class Measurement:
    """An entry of the catalogue; ``values``: names and what they stand for, one command each; without them there is
    one."""

    name: str
    result: str
    seconds: float
    command: str
    values: tuple[tuple[str, str], ...] = ()
    join: str = ""

    @property
    def is_text(self) -> bool:
        return self.result.endswith(".txt")

    def works(self, out: Path) -> list[Work]:
        """Its commands, each with a name of its own in this folder."""
        named = [(f"{self.name}-{name}", value) for name, value in self.values] or [(self.name, "")]
        return [self._work(name, value, out) for name, value in named]

    def _work(self, name: str, value: str, out: Path) -> Work:
        command = self.command.replace("{json}", f"{name}.json").replace("{value}", value)
        stdout = out / f"{name}.txt" if self.is_text else None
        return Work(name, _argv(command), out / f"{name}.log", out, stdout, self.seconds)

    def file(self, work: Work) -> Path:
        """What a command leaves."""
        return work.folder / f"{work.name}{'.txt' if self.is_text else '.json'}"


def main() -> int:
    arguments, catalogue = parse()
    if arguments.list:
        for each in catalogue.values():
            print(
                f"{each.name}: {each.result}, {len(each.values) or 1} x about {each.seconds:.0f} s\n    {each.command}"
            )
            for name, value in each.values:
                print(f"    {{value}} of {name}: {value}")
        return 0
    out = arguments.out.resolve()
    results = out / "results"
    results.mkdir(parents=True, exist_ok=True)
    chosen = {catalogue[name]: catalogue[name].works(out) for name in dict.fromkeys(arguments.names)}
    done = {work.name for each, works in chosen.items() for work in works if _is_done(each, work)}
    waiting = [work for works in chosen.values() for work in works if work.name not in done]
    is_whole = run(waiting, arguments.gpus, arguments.seconds, _mark)
    for each, works in chosen.items():
        if _is_there(each, works):
            _gather(each, works, results / each.result)
            print(f"{each.name}: {results / each.result}")
            if arguments.keep:
                shutil.copy(results / each.result, RESULTS / each.result)
    if arguments.keep:
        subprocess.run([sys.executable, str(ROOT / "bench" / "render.py")], check=True)
    if not is_whole:
        print("cut off: start it again to go on", file=sys.stderr)
        return CUT_OFF
    return int(any(work.failed for work in waiting))


def parse() -> tuple[argparse.Namespace, dict[str, Measurement]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; they begin in this order")
    parser.add_argument("--list", action="store_true", help="say which there are")
    parser.add_argument("--gpus", type=int, default=1, help="how many")
    parser.add_argument("--out", type=Path, default=Path("measured"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop then")
    parser.add_argument("--keep", action="store_true", help="put the results into bench/results/ and render them")
    parser.add_argument("--catalogue", type=Path, default=CATALOGUE)
    arguments = parser.parse_args()
    entries = tomllib.loads(arguments.catalogue.read_text(encoding="utf-8"))["measurement"]
    named = [{**entry, "values": _named(entry.get("values", []))} for entry in entries]
    catalogue = {entry["name"]: Measurement(**entry) for entry in named}
    unknown = [name for name in arguments.names if name not in catalogue]
    if unknown or not (arguments.names or arguments.list):
        parser.error(f"{', '.join(unknown) or 'no name'}: expected some of {', '.join(catalogue)}")
    try:
        arguments.gpus = gpus_to_use(arguments.gpus)
    except ValueError as error:
        parser.error(f"--gpus: {error}")
    return arguments, catalogue


def _named(values: list[str] | dict[str, str]) -> tuple[tuple[str, str], ...]:
    """Values of the catalogue with their names: in a list each is its own."""
    return tuple(values.items()) if isinstance(values, dict) else tuple((value, value) for value in values)


def _argv(command: str) -> list[str]:
    """With this Python, and scripts wherever they lie: the command runs in another folder."""
    program, *rest = shlex.split(command)
    if program == "cotenant":
        return [sys.executable, "-m", "cotenant", *rest]
    return [sys.executable, str(ROOT / rest[0]), *rest[1:]]


def _mark(work: Work) -> None:
    """Beside a file that is whole lies a mark: some are written bit by bit."""
    if work.failed:
        print(f"{work.name} failed: {work.log} says why", file=sys.stderr)
    else:
        work.log.with_suffix(".done").touch()


def _is_done(measurement: Measurement, work: Work) -> bool:
    return work.log.with_suffix(".done").exists() and measurement.file(work).exists()


def _is_there(measurement: Measurement, works: Sequence[Work]) -> bool:
    """Whether its result can be put together: of a grid as far as it came."""
    if measurement.join == "grid":
        return any(measurement.file(work).exists() for work in works)
    return all(_is_done(measurement, work) for work in works)


def _gather(measurement: Measurement, works: Sequence[Work], target: Path) -> None:
    """The one file of a measurement."""
    files = [measurement.file(work) for work in works if measurement.file(work).exists()]
    if measurement.join == "grid":
        command = [sys.executable, "-m", "cotenant", "bench", "colocate-report", *map(str, files), "--json"]
        subprocess.run([*command, str(target)], check=True, stdout=subprocess.DEVNULL)
    elif len(files) == 1:
        shutil.copy(files[0], target)
    else:
        results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        target.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
