"""Kernels compiled side by side: what several threads may do, and what they may not. With a stand-in for Triton; with
itself in tests/gpu/test_kernels.py."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

MODULE = "cotenant.models.kernels.together"


class Triton:
    """As much of it as is looked at, and in which thread it was asked for what."""

    def __init__(self) -> None:
        self.knobs = SimpleNamespace(runtime=SimpleNamespace(jit_cache_hook=None))
        self.seen: list[tuple[str, str, bool]] = []  # what, of which kernel, whether by the thread that waits for all
        self._main = threading.get_ident()
        self._lock = threading.Lock()

    def note(self, what: str, name: str) -> None:
        with self._lock:
            self.seen.append((what, name, threading.get_ident() == self._main))

    def launcher_cls(self, src: str, metadata: object) -> None:
        assert metadata is not None
        self.note("launcher", src)
        if src == "no launcher":
            raise OSError("no compiler")


class Kernel:
    def __init__(self, triton: Triton, name: str) -> None:
        self.src, self.metadata, self._triton = name, object(), triton

    def __getitem__(self, grid: tuple[int, ...]) -> None:
        self._triton.note("ready", self.src)


class Function:
    def __init__(self, triton: Triton, name: str) -> None:
        self.name, self._triton = name, triton

    def preload(self, specialization: str) -> Kernel:
        self._triton.note("compile", self.name)
        if self.name == "does not compile":
            raise RuntimeError("cannot be compiled")
        return Kernel(self._triton, self.name)

    def launch(self) -> None:
        hook = self._triton.knobs.runtime.jit_cache_hook
        fn = SimpleNamespace(name=self.name, jit_function=self)
        assert hook(key="key", repr="", fn=fn, compile={"specialization_data": "data"}, is_manual_warmup=False)


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[Triton]:
    triton = Triton()
    top, runtime = ModuleType("triton"), ModuleType("triton.runtime")
    top.__dict__.update(knobs=triton.knobs, runtime=runtime)
    runtime.__dict__.update(driver=SimpleNamespace(active=triton))
    monkeypatch.setitem(sys.modules, "triton", top)
    monkeypatch.setitem(sys.modules, "triton.runtime", runtime)
    sys.modules.pop(MODULE, None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    yield triton
    sys.modules.pop(MODULE, None)  # the one that knows the stand-in


def test_what_launches_kernels_is_taken_by_one_thread_when_all_of_it_is_compiled(
    triton: Triton, caplog: pytest.LogCaptureFixture
) -> None:
    """Python gives a module that is loaded again, by a thread, to another that loads one of the same name just then."""
    together: Any = importlib.import_module(MODULE)
    names = [f"kernel {index}" for index in range(12)]
    functions = [Function(triton, name) for name in (*names, "does not compile", "no launcher")]
    with together.compiled_together():
        for function in (*functions, *functions):
            function.launch()
        assert not triton.seen
    assert triton.knobs.runtime.jit_cache_hook is None
    stages = [what for what, _, _ in triton.seen]
    assert stages == sorted(stages, key=("compile", "launcher", "ready").index), "one after the other"
    by_stage = {
        stage: {name for what, name, _ in triton.seen if what == stage} for stage in ("compile", "launcher", "ready")
    }
    assert by_stage["compile"] == {*names, "does not compile", "no launcher"}
    assert by_stage["launcher"] == by_stage["ready"] == {*names, "no launcher"}
    assert len(triton.seen) == 14 + 13 + 13, "each once"
    assert {(what, is_main) for what, _, is_main in triton.seen} == {
        ("compile", False), ("launcher", False), ("ready", True)
    }  # fmt: skip
    assert [record.getMessage() for record in caplog.records] == [
        "a kernel is compiled where it is launched: cannot be compiled",
        "a kernel is compiled where it is launched: no compiler",
    ]
