"""A server of our own to measure: started as a user would start it, stopped with SIGTERM, and gone with its starter."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cotenant.bench.client import ServerError
from cotenant.processes import die_with_parent

_STOP_TIMEOUT_S = 30.0
_HOLDERS: list[socket.socket] = []  # of ports, which are theirs while they are open


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on. Until this process ends the kernel gives it to nobody else who
    asks for any; a server, which sets SO_REUSEADDR, can listen on it."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _HOLDERS.append(holder)
    return int(holder.getsockname()[1])


@dataclass(frozen=True, slots=True)
class RunningServer:
    """``url``: its base URL."""

    url: str
    process: subprocess.Popen[bytes]

    def has_ended(self) -> bool:
        return self.process.poll() is not None


@contextlib.contextmanager
def running_server(model: str, flags: Sequence[str], log_path: Path) -> Iterator[RunningServer]:
    """Run `cotenant serve` for the time of a `with` block. Its output goes to ``log_path``.

    Where this process is killed, so is the server: nobody would know of it, and it would keep the device."""
    port = free_port()
    command = [sys.executable, "-m", "cotenant.cli.main", "serve", model, "--port", str(port), *flags]
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        try:
            yield RunningServer(f"http://127.0.0.1:{port}", process)
        except ServerError as error:
            if process.poll() is not None:
                raise ServerError(
                    f"{error}\nthe server ended with code {process.returncode}; see {log_path}"
                ) from error
            raise
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """With SIGTERM, and if that takes too long with SIGKILL."""
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
