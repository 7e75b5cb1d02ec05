"""Kernels in CUDA C++, where nothing can be compiled: for which GPUs they would be, and what is said."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cotenant.core.errors import InvalidInputError
from cotenant.device.cuda import compiled

LOG = b"a.cu(1): error: no\n\0\0"  # two zeros with what ptxas says


def _get_log(program: Any, to: bytes) -> None:
    assert len(to) == len(LOG)
    ctypes.memmove(to, LOG, len(LOG))  # as the bindings do


def _nvrtc(archs: Sequence[int]) -> Any:
    """One that compiles nothing."""
    return SimpleNamespace(
        nvrtcResult=SimpleNamespace(NVRTC_SUCCESS=0),
        nvrtcVersion=lambda: (0, 12, 8),
        nvrtcGetSupportedArchs=lambda: (0, archs),
        nvrtcCreateProgram=lambda *_: (0, "program"),
        nvrtcCompileProgram=lambda *_: (6,),
        nvrtcGetProgramLogSize=lambda program: (0, len(LOG)),
        nvrtcGetProgramLog=_get_log,
    )


def _compile(nvrtc: Any, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> str:
    """What is said."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", nvrtc)
    monkeypatch.setattr(compiled, "Driver", lambda: SimpleNamespace(call=None))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    with pytest.raises((RuntimeError, InvalidInputError)) as raised:
        compiled.CompiledKernel("", "a", {"B": 1}, 0)
    return str(raised.value)


@pytest.mark.parametrize(
    ("capability", "archs", "found"),
    [
        ((9, 0), [80, 86, 89, 90, 100, 120], 90),
        ((8, 9), [80, 86, 90], 86),
        ((10, 3), [90, 100, 120], 100),
        ((12, 1), [90, 100, 103, 120, 121], 121),
    ],
)
def test_code_is_for_the_device_or_an_earlier_one_of_its_generation(
    capability: tuple[int, int], archs: list[int], found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what the compiler says is told without its zeros at the end."""
    said = _compile(_nvrtc(archs), capability, monkeypatch)
    assert said == f"a does not compile with -arch=sm_{found} -DB=1: a.cu(1): error: no"


@pytest.mark.parametrize(("capability", "archs"), [((12, 0), [90, 121]), ((13, 0), [90, 100, 120])])
def test_a_gpu_that_nvrtc_does_not_know_is_named(
    capability: tuple[int, int], archs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = _compile(_nvrtc(archs), capability, monkeypatch)
    assert f"NVRTC 12.8 has no code for a GPU (compute capability {capability[0]}.{capability[1]})" in said


def _fail() -> None:
    raise RuntimeError('Failure finding "libnvrtc.so.13":\nNo such file\n')


@pytest.mark.parametrize(
    ("cuda", "package"),
    [("12.8", "nvidia-cuda-nvrtc-cu12"), ("13.0", "nvidia-cuda-nvrtc"), (None, "nvidia-cuda-nvrtc")],
)
def test_where_nvrtc_is_missing_one_line_says_what_to_install(
    cuda: str | None, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    for module, reason in ((None, "cuda.bindings.nvrtc"), (SimpleNamespace(nvrtcVersion=_fail), ": No such file)")):
        said = _compile(module, (9, 0), monkeypatch)
        assert reason in said
        assert f"pip install {package}, " in said
        assert "\n" not in said
