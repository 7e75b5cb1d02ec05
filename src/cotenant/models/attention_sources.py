"""What is compiled of FlashInfer's attention, and in which pieces.

FlashInfer compiles a module whole: also for keys that lie in no pages, for masks that callers bring along and for none,
seven of eight files of kernels, which nothing here calls. Each file that is left takes the longer, the more functions
it exports or the more kernels it has, so they are compiled one by one, on as many cores.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cotenant.durable import write_atomically

# In the names of source files. Masks: 0 is none, 1 causal, 2 a caller's own, 3 that of several items in a prompt.
_UNUSED = ("ragged_kernel", "kernel_mask_0", "kernel_mask_2", "kernel_mask_3")
# A function that a file exports, or a kernel of those that it has.
_PART = re.compile(r"^(?:TVM_FFI_DLL_EXPORT_TYPED_FUNC|template cudaError_t )[^;]*;\n", re.MULTILINE)
# Functions without code may be named in the library as long as nobody calls them.
_LINKER_FLAGS = ("-Wl,-z,lazy",)
_replacing = threading.Lock()


def paged_only(spec: Any) -> Any:
    """``spec``, a ``flashinfer.jit.JitSpec`` of prompts, without what ``PagedAttention`` never calls, under a name of
    its own; the same if it is compiled already."""
    if spec.is_compiled:
        return spec
    used = [source for source in spec.sources if not any(name in source.name for name in _UNUSED)]
    sources = [part for source in used for part in _parts(source)]
    flags = [*(spec.extra_ldflags or ()), *_LINKER_FLAGS]
    return dataclasses.replace(spec, name=f"{spec.name}_paged_only", sources=sources, extra_ldflags=flags)


def _parts(source: Path) -> list[Path]:
    """The file once for each of its parts, with that one alone; as it is, if it has none."""
    text = source.read_text()
    parts = [match[0] for match in _PART.finditer(text)]
    paths = [source.with_name(f"{source.stem}_part_{number}{source.suffix}") for number in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        only = _PART.sub(lambda match, part=part: match[0] if match[0] == part else "", text)  # type: ignore[misc]
        if not path.exists() or path.read_text() != only:  # a newer file is compiled again
            _replace(path, only)
    return paths or [source]


def _replace(path: Path, text: str) -> None:
    """At once: another process may be compiling it."""

    def write(temporary: Path) -> None:
        temporary.write_text(text)

    write_atomically(path, write)


@contextmanager
def building_paged_only() -> Iterator[None]:
    """``flashinfer.prefill`` builds modules cut down by ``paged_only`` inside."""
    from flashinfer import prefill

    with _replacing:
        whole = prefill.gen_batch_prefill_module
        prefill.gen_batch_prefill_module = lambda *arguments: paged_only(whole(*arguments))
        try:
            yield
        finally:
            prefill.gen_batch_prefill_module = whole
