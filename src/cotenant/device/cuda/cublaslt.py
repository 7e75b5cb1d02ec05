"""cuBLASLt, which torch brings along: a matrix product by any of the algorithms that the library has for it.

torch takes the one that the library holds for the fastest on all of a device's SMs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch

# Of cublasLt.h and library_types.h: numbers that no version of the library changes.
_TYPES = {torch.bfloat16: 14, torch.float16: 2}  # cudaDataType_t
_FLOAT32, _COMPUTE_FLOAT32 = 0, 68
_TRANSPOSE_A, _SM_COUNT_TARGET = 3, 15  # cublasLtMatmulDescAttributes_t
_MOST_WORKSPACE = 1  # cublasLtMatmulPreferenceAttributes_t
_NUM_SPLITS, _REDUCTION = 2, 3  # cublasLtMatmulAlgoConfigAttributes_t
_ALIGNMENT = 256  # bytes, which algorithms are asked for if nothing else is said
WORKSPACE_BYTES = 32 << 20  # as much as torch gives the library on Hopper
_MOST_NAMED = 8  # algorithms, for all SMs and for some
_ONE = c_float(1.0)
_Layouts: TypeAlias = tuple[c_void_p, c_void_p, c_void_p]


class _Algorithm(ctypes.Structure):
    _fields_ = [("data", c_uint64 * 8)]


class _Found(ctypes.Structure):
    _fields_ = [
        ("algorithm", _Algorithm),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("num_waves", c_float),
        ("reserved", c_int * 4),
    ]


class Operands(NamedTuple):
    """Of ``out += x @ matrix``, with x [rows, in] and out [rows, out], both contiguous. ``is_transposed``: the matrix
    [in, out] is the transpose of one that lies in memory so; otherwise it does itself."""

    num_rows: int
    num_out: int
    num_in: int
    is_transposed: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, out: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor) -> Operands | None:
        """None: they do not lie as the library's algorithms are asked for, or are of no type that is known here."""
        is_transposed = not matrix.is_contiguous()
        tensors = (out, x, matrix.T if is_transposed else matrix)
        if out.dtype not in _TYPES or any(each.dtype != out.dtype or not _lies_well(each) for each in tensors):
            return None
        return cls(len(x), matrix.shape[1], matrix.shape[0], is_transposed, out.dtype)


def _lies_well(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0 and tensor.shape[1] % 8 == 0


class Product:
    """``out += x @ matrix`` of one shape, as the library's algorithms compute it: those that add each element's
    products up in one go, so that all have the same bits; first those that it names for all SMs, then others for
    ``num_sms``. There are none where the first that it names, which is what torch takes, does not. All products of a
    device share their ``WORKSPACE_BYTES``, so one runs at a time.

    The sum in float32, and that with what was in ``out``, are rounded once. Raises RuntimeError where the library is
    not found, or refuses the shape.
    """

    def __init__(self, operands: Operands, num_sms: int, device: torch.device) -> None:
        rows, out, inner = operands.num_rows, operands.num_out, operands.num_in
        library = self._library = _library()
        _workspace(device)  # takes memory, which no capture may
        # The library counts by columns: out.T += matrix.T @ x.T.
        kind, shape = _TYPES[operands.dtype], (inner, out) if operands.is_transposed else (out, inner)
        self._layouts = (
            library.layout(kind, *shape),
            library.layout(kind, inner, rows),
            library.layout(kind, out, rows),
        )
        self._descriptions = [library.description(operands.is_transposed, count) for count in (None, num_sms)]
        self.algorithms: list[tuple[int, _Algorithm]] = []
        known: set[bytes] = set()
        for index, description in enumerate(self._descriptions):
            found = library.algorithms(description, self._layouts)
            if index == 0 and not (found and library.adds_in_one_go(found[0])):
                break
            for algorithm in filter(library.adds_in_one_go, found):
                if bytes(algorithm) not in known:
                    known.add(bytes(algorithm))
                    self.algorithms.append((index, algorithm))

    def add(self, algorithm: int, out: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor) -> None:
        """On the current stream, by one of ``algorithms``. Raises RuntimeError if it cannot."""
        self._add(algorithm, self._layouts, out, x, matrix)

    def load(self, out: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor) -> Iterator[None]:
        """Run each of ``algorithms`` on other numbers of rows, as few as they may be, with a pause behind each: the
        library loads a kernel as it is first launched, which keeps all launches waiting for some milliseconds."""
        library, kind = self._library, _TYPES[out.dtype]
        few = (library.layout(kind, x.shape[1], len(x)), library.layout(kind, out.shape[1], len(out)))
        for algorithm in range(len(self.algorithms)):
            with suppress(RuntimeError):
                self._add(algorithm, (self._layouts[0], *few), out, x, matrix)
            yield

    def _add(
        self,
        algorithm: int,
        layouts: _Layouts,
        out: torch.Tensor,
        x: torch.Tensor,
        matrix: torch.Tensor,
    ) -> None:
        index, chosen = self.algorithms[algorithm]
        self._library.multiply(self._descriptions[index], layouts, chosen, out, x, matrix)


class _Library:
    def __init__(self) -> None:
        major = (torch.version.cuda or "").split(".")[0]
        try:
            self._calls = ctypes.CDLL(f"libcublasLt.so.{major}")  # torch has loaded it
        except OSError as error:
            raise RuntimeError(f"cuBLASLt is not where the loader looks: {error}") from error
        self._handle = c_void_p()
        self._call("cublasLtCreate", byref(self._handle))
        self._preference = c_void_p()
        self._call("cublasLtMatmulPreferenceCreate", byref(self._preference))
        size = c_size_t(WORKSPACE_BYTES)
        set_attribute = "cublasLtMatmulPreferenceSetAttribute"
        self._call(set_attribute, self._preference, c_int(_MOST_WORKSPACE), byref(size), c_size_t(8))

    def _call(self, name: str, *arguments: Any) -> None:
        call = getattr(self._calls, name, None)
        if call is None:
            raise RuntimeError(f"this version of cuBLASLt has no {name}")
        status = call(*arguments)
        if status != 0:
            raise RuntimeError(f"{name}: status {status}")

    def description(self, is_transposed: bool, num_sms: int | None) -> c_void_p:
        made = c_void_p()
        self._call("cublasLtMatmulDescCreate", byref(made), c_int(_COMPUTE_FLOAT32), c_int(_FLOAT32))
        numbers = {_TRANSPOSE_A: int(is_transposed)} | ({} if num_sms is None else {_SM_COUNT_TARGET: num_sms})
        for attribute, number in numbers.items():
            value = c_int32(number)
            self._call("cublasLtMatmulDescSetAttribute", made, c_int(attribute), byref(value), c_size_t(4))
        return made

    def layout(self, kind: int, num_rows: int, num_columns: int) -> c_void_p:
        made, size = c_void_p(), (c_uint64(num_rows), c_uint64(num_columns), c_int64(num_rows))
        self._call("cublasLtMatrixLayoutCreate", byref(made), c_int(kind), *size)
        return made

    def algorithms(self, description: c_void_p, layouts: _Layouts) -> list[_Algorithm]:
        """The first is the one that the library holds for the fastest."""
        found, count = (_Found * _MOST_NAMED)(), c_int()
        name, (matrix, x, out) = "cublasLtMatmulAlgoGetHeuristic", layouts
        operands = (self._handle, description, matrix, x, out, out)
        self._call(name, *operands, self._preference, c_int(_MOST_NAMED), found, byref(count))
        return [_Algorithm.from_buffer_copy(each.algorithm) for each in found[: count.value] if each.state == 0]

    def adds_in_one_go(self, algorithm: _Algorithm) -> bool:
        """Whether the input features are not divided between thread blocks, whose sums are added up then."""
        return self._configured(algorithm, _NUM_SPLITS) == 1 and self._configured(algorithm, _REDUCTION) == 0

    def _configured(self, algorithm: _Algorithm, attribute: int) -> int:
        value, written = c_int32(), c_size_t()
        name, size = "cublasLtMatmulAlgoConfigGetAttribute", c_size_t(4)
        self._call(name, byref(algorithm), c_int(attribute), byref(value), size, byref(written))
        return value.value

    def multiply(
        self,
        description: c_void_p,
        layouts: _Layouts,
        algorithm: _Algorithm,
        out: torch.Tensor,
        x: torch.Tensor,
        matrix: torch.Tensor,
    ) -> None:
        matrix_at, x_at, out_at = (c_void_p(each.data_ptr()) for each in (matrix, x, out))
        stream = c_void_p(torch._C._cuda_getCurrentRawStream(x.device.index))
        a, b, c = layouts
        self._call(
            "cublasLtMatmul",
            self._handle,
            description,
            *(byref(_ONE), matrix_at, a, x_at, b),
            *(byref(_ONE), out_at, c, out_at, c),
            *(byref(algorithm), c_void_p(_workspace(x.device).data_ptr()), c_size_t(WORKSPACE_BYTES), stream),
        )


@cache
def _workspace(device: torch.device) -> torch.Tensor:
    """For good: graphs hold its address."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@cache
def _library() -> _Library:
    return _Library()
