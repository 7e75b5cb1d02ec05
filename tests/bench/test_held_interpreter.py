"""bench/held_interpreter.py: that it runs, and that it sees who keeps the interpreter."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from undisturbed import until_undisturbed

BENCH = Path(__file__).parents[2] / "bench"


def test_it_says_how_much_later_a_thread_wakes_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import held_interpreter

    interval, threads = sys.getswitchinterval(), torch.get_num_threads()
    for name, value in (("_LEAST_S", 0.2), ("_NUM_WEIGHTS", 1_000_000), ("_NUM_OBJECTS", 1000)):
        monkeypatch.setattr(held_interpreter, name, value)

    def measured(_: int) -> str | None:
        try:
            held_interpreter.main()
        finally:
            sys.setswitchinterval(interval)
            torch.set_num_threads(threads)
        head, *lines = capsys.readouterr().out.splitlines()
        assert ", safetensors " in head
        late = {line[:48].strip(): re.search(r"late by p50 ([\d.]+), p99", line) for line in lines[:-2]}
        p50 = {name: float(found[1]) for name, found in late.items() if found is not None}
        assert len(p50) == len(late) == 8
        assert all(re.search(r"freed +took +[\d.]+ ms, [\d.]+ to [\d.]+$", line) for line in lines[-2:])
        return None if p50["Python, with Python's own switch interval"] > 2 * p50["Python"] else str(p50)

    until_undisturbed(measured)
