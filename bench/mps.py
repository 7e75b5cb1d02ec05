"""NVIDIA's Multi-Process Service for the time of a `with` block, in folders of its own.

What a process needs to be its client is in ``Mps.environment``. A process that finds no daemon runs without MPS and
says nothing, so ask for ``Mps.clients`` once they have begun.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
_ANSWER_TIMEOUT_S = 30.0
_QUIT_TIMEOUT_S = 20.0


class MpsError(Exception):
    """MPS cannot be had here; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Mps:
    """A running control daemon."""

    pipes: Path
    logs: Path

    def environment(self, sm_percent: int | None = None) -> dict[str, str]:
        """For its clients. ``sm_percent``: of the SMs, that they may use at most; None: all."""
        limit = {} if sm_percent is None else {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(sm_percent)}
        return {"CUDA_MPS_PIPE_DIRECTORY": str(self.pipes), "CUDA_MPS_LOG_DIRECTORY": str(self.logs), **limit}

    def ask(self, command: str) -> str:
        """The daemon's answer. Raises MpsError if there is none."""
        try:
            answer = subprocess.run(
                [CONTROL],
                input=command + "\n",
                env={**os.environ, **self.environment()},
                capture_output=True,
                text=True,
                timeout=_ANSWER_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MpsError(f"the MPS daemon does not answer {command!r}: {error}") from error
        if answer.returncode != 0:
            said = f"{answer.stdout} {answer.stderr}".strip()
            raise MpsError(f"the MPS daemon does not answer {command!r}: {said or f'exit code {answer.returncode}'}")
        return answer.stdout

    def clients(self) -> list[str]:
        """Process ids, as the daemon knows them, of those who use the GPU through it."""
        servers = [word for word in self.ask("get_server_list").split() if word.isdigit()]
        return [word for server in servers for word in self.ask(f"get_client_list {server}").split() if word.isdigit()]


@contextlib.contextmanager
def running_mps(kept_logs: Path) -> Iterator[Mps]:
    """Start the daemon, and end it whatever happens. Its logs are copied to ``kept_logs`` at the end.

    End the clients before. Raises MpsError where there is no GPU or no MPS, or where the daemon does not start.
    """
    _check_gpu()
    if shutil.which(CONTROL) is None:
        raise MpsError(f"there is no {CONTROL} on the PATH: it comes with the NVIDIA driver's compute utilities")
    folder = Path(tempfile.mkdtemp(prefix="mps-"))  # short: a socket's path has at most 107 characters
    mps = Mps(folder / "pipes", folder / "logs")
    mps.pipes.mkdir()
    mps.logs.mkdir()
    try:
        _start(mps)
        yield mps
    finally:
        try:
            _quit(mps)
        finally:
            shutil.copytree(mps.logs, kept_logs, dirs_exist_ok=True)
            shutil.rmtree(folder, ignore_errors=True)


def _check_gpu() -> None:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        raise MpsError("MPS needs an NVIDIA GPU and its driver: there is no nvidia-smi on the PATH") from None
    except subprocess.TimeoutExpired:
        raise MpsError("nvidia-smi does not answer: is the driver well?") from None
    if listed.returncode != 0 or "GPU" not in listed.stdout:
        said = f"{listed.stdout} {listed.stderr}".strip()
        raise MpsError(f"MPS needs an NVIDIA GPU, and nvidia-smi lists none: {said}")


def _start(mps: Mps) -> None:
    environment = {**os.environ, **mps.environment()}
    # Devices chosen for the daemon are numbered anew for its clients, which choose by themselves.
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    # Its output goes to a file: the daemon would hold a pipe open.
    with (mps.logs / "start.log").open("wb") as log:
        try:
            started = subprocess.run(
                [CONTROL, "-d"], env=environment, stdout=log, stderr=log, timeout=_ANSWER_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise MpsError(f"{CONTROL} -d did not return within {_ANSWER_TIMEOUT_S:g} s") from None
    if started.returncode != 0:
        said = (mps.logs / "start.log").read_text(errors="replace").strip()
        raise MpsError(f"{CONTROL} -d failed with exit code {started.returncode}: {said or 'no message'}")
    mps.ask("get_server_list")


def _quit(mps: Mps) -> None:
    """With `quit`; by a signal if it has not ended then."""
    with contextlib.suppress(MpsError):
        mps.ask("quit -t 5")
    try:
        pid = int((mps.pipes / f"{CONTROL}.pid").read_text().strip("\0 \n"))
    except (OSError, ValueError):
        return
    deadline = time.monotonic() + _QUIT_TIMEOUT_S
    while _is_daemon(pid):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.1)


def _is_daemon(pid: int) -> bool:
    """Whether this process lives and is not another that has got its number."""
    try:
        return CONTROL in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return False
