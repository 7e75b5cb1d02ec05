"""Processes that need not import torch again, which takes seconds: forked from one that has, and has done nothing with
it."""

from __future__ import annotations

import functools
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path

import cotenant
from cotenant.cli.main import main

_TESTS = Path(__file__).parent


@functools.cache
def context() -> ForkServerContext:
    """Where to make processes and pipes."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["preloaded"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_TESTS), before]))
    try:
        first = processes.Process(target=int)  # which starts the server
        first.start()
        first.join()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return processes


def run_command(*arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """``python -m cotenant`` with these arguments."""
    return _run(_be_command, arguments, timeout_s)


def run_script(
    script: Path, *arguments: str, timeout_s: float = 120.0, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """``python script`` with these arguments, and ``environment`` beside this process's own."""
    return _run(_be_script, (str(script), *arguments), timeout_s, {**os.environ, **(environment or {})})


def _run(
    become: Callable[..., None],
    arguments: tuple[str, ...],
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        process = context().Process(target=_with_outputs, args=(become, arguments, environment, *outputs))
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(arguments, timeout_s)
        return subprocess.CompletedProcess(arguments, process.exitcode, *(path.read_text() for path in outputs))


def _with_outputs(
    become: Callable[..., None],
    arguments: tuple[str, ...],
    environment: Mapping[str, str] | None,
    stdout: Path,
    stderr: Path,
) -> None:
    for number, path in enumerate((stdout, stderr), 1):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    become(*arguments)


def _be_command(*arguments: str) -> None:
    sys.argv = [str(Path(cotenant.__file__).with_name("__main__.py")), *arguments]
    main()


def _be_script(script: str, *arguments: str) -> None:
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
