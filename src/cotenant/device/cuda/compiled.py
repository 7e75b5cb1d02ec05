"""Kernels that are written in CUDA C++: NVRTC, which torch's CUDA builds bring along, compiles them for the device that
they run on."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cotenant.core.errors import InvalidInputError
from cotenant.device.cuda.driver import Driver
from cotenant.device.cuda.graphs import current_lane

Argument = tuple[Any, Any]
"""(value, its type in ctypes)"""


class CompiledKernel:
    """The ``extern "C"`` kernel ``name`` of ``source``, which includes nothing. ``constants``: macros that it is
    compiled with. ``shared_bytes``: that each of its programs takes besides what it declares."""

    def __init__(self, source: str, name: str, constants: Mapping[str, int], shared_bytes: int) -> None:
        """Raises InvalidInputError without an NVRTC for the device, RuntimeError for a source that does not compile."""
        self._driver = Driver()
        self._shared_bytes = shared_bytes
        options = [f"-D{key}={value}" for key, value in constants.items()]
        torch.cuda.current_stream().synchronize()  # this thread has the device's context from here on
        self._module = self._driver.call("cuModuleLoadData", _compile(source, name, options))
        self._function = self._driver.call("cuModuleGetFunction", self._module, name.encode())
        attribute = self._driver.api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._driver.call("cuFuncSetAttribute", self._function, attribute, shared_bytes)

    def launch(
        self, num_programs: int, num_threads: int, arguments: Sequence[Argument], *, begins_early: bool = False
    ) -> None:
        """On the current stream. ``begins_early``: before the kernel before it has ended, for which it waits itself."""
        api = self._driver.api
        config = api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = num_programs, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = num_threads, 1, 1
        config.sharedMemBytes = self._shared_bytes
        config.hStream = current_lane()
        if begins_early:
            attribute = api.CUlaunchAttribute()
            attribute.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        values, types = zip(*arguments, strict=True)
        self._driver.call("cuLaunchKernelEx", config, self._function, (values, types), 0)


def pointer(tensor: torch.Tensor) -> Argument:
    return tensor.data_ptr(), ctypes.c_void_p


def _compile(source: str, name: str, options: Sequence[str]) -> bytes:
    """Machine code."""
    nvrtc = _nvrtc()
    options = [f"-arch=sm_{_architecture(nvrtc)}", *options]
    succeeded = nvrtc.nvrtcResult.NVRTC_SUCCESS
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], [])
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if result != succeeded:
        log = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
        nvrtc.nvrtcGetProgramLog(program, log)
        said = log.rstrip(b"\0").decode(errors="replace").strip()
        raise RuntimeError(f"{name} does not compile with {' '.join(options)}: {said}")
    code: bytes = b" " * nvrtc.nvrtcGetCUBINSize(program)[1]
    (result,) = nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(program)
    if result != succeeded:
        raise RuntimeError(f"{name} has no machine code: {result}")
    return code


def _nvrtc() -> Any:
    """The module. Raises InvalidInputError if there is none, or no library behind it."""
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        package = "nvidia-cuda-nvrtc-cu12" if str(torch.version.cuda).startswith("12.") else "nvidia-cuda-nvrtc"
        raise InvalidInputError(
            "--device cuda needs NVRTC, which torch's CUDA builds install, but it cannot be used "
            f"({' '.join(str(error).split())}): pip install {package}, of the same major version as "
            f"torch.version.cuda ({torch.version.cuda})",
            param="device",
        ) from error
    return nvrtc


def _architecture(nvrtc: Any) -> int:
    """The newest that NVRTC knows and whose code runs on the device: the device's own, or an earlier one of its
    generation. Raises InvalidInputError if there is none."""
    major, minor = torch.cuda.get_device_capability()
    archs: list[int] = nvrtc.nvrtcGetSupportedArchs()[1]
    usable = [arch for arch in archs if arch // 10 == major and arch % 10 <= minor]
    if not usable:
        version = ".".join(map(str, nvrtc.nvrtcVersion()[1:]))
        raise InvalidInputError(
            f"NVRTC {version} has no code for {torch.cuda.get_device_name()} (compute capability {major}.{minor}): "
            "install a torch that is built for a later CUDA",
            param="device",
        )
    return max(usable)
