"""Kernels in CUDA C++, where nothing can be compiled."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cotenant.device.cuda import compiled


def test_what_the_compiler_says_is_told_without_its_zeros_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    log = b"a.cu(1): error: no\n\0\0"  # two with what ptxas says

    def get_log(program: Any, to: bytes) -> None:
        assert len(to) == len(log)
        ctypes.memmove(to, log, len(log))  # as the bindings do

    nvrtc = SimpleNamespace(
        nvrtcResult=SimpleNamespace(NVRTC_SUCCESS=0),
        nvrtcCreateProgram=lambda *_: (0, "program"),
        nvrtcCompileProgram=lambda *_: (6,),
        nvrtcGetProgramLogSize=lambda program: (0, len(log)),
        nvrtcGetProgramLog=get_log,
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", nvrtc)
    monkeypatch.setattr(compiled, "Driver", lambda: SimpleNamespace(call=None))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    with pytest.raises(RuntimeError) as caught:
        compiled.CompiledKernel("", "a", {"B": 1}, 0)
    assert str(caught.value) == "a does not compile with -arch=sm_90 -DB=1: a.cu(1): error: no"
