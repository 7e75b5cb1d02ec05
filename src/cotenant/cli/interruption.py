"""Commands that take minutes and keep what they have when they are told to end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED_EXIT_CODE = 130  # as of a program that SIGINT ended


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM, which `timeout`, containers and batch systems send, raises KeyboardInterrupt as Ctrl-C does: else the
    program would be gone at once, with what it has measured, and leave its temporary folder. Also a decorator."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)  # None: not Python's own
