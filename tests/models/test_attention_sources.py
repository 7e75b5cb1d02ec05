"""What is compiled of FlashInfer's attention: only what is called, cut into files that take about as long."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cotenant.models.attention_sources import paged_only

KERNELS = """#include "config.inc"
namespace flashinfer {
template cudaError_t Dispatched<
    /*CTA_TILE_Q=*/16, Params>(Params params, cudaStream_t stream);
template cudaError_t Dispatched<
    /*CTA_TILE_Q=*/64, Params>(Params params, cudaStream_t stream);
};  // namespace flashinfer
"""
EXPORTS = """void Plan(int64_t rows);
void Run(TensorView q);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, Plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(paged_run, Run);
"""


@dataclass
class Spec:
    """As much of flashinfer.jit.JitSpec as is looked at."""

    name: str
    sources: list[Path]
    extra_ldflags: list[str] | None = None
    is_compiled: bool = False
    others: dict[str, str] = field(default_factory=dict)


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    texts = {f"paged_kernel_mask_{mask}.cu": KERNELS for mask in range(4)}
    texts |= {f"ragged_kernel_mask_{mask}.cu": KERNELS for mask in range(4)}
    texts |= {"prefill.cu": "int whole;\n", "prefill_jit_binding.cu": EXPORTS}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return Spec("module", [tmp_path / name for name in texts], ["-lm"], others={"kept": "yes"})


def test_what_is_not_called_is_left_out_and_the_rest_is_cut_up(spec: Spec) -> None:
    cut = paged_only(spec)
    assert [source.name for source in cut.sources] == [
        "paged_kernel_mask_1_part_0.cu", "paged_kernel_mask_1_part_1.cu",
        "prefill.cu", "prefill_jit_binding_part_0.cu", "prefill_jit_binding_part_1.cu",
    ]  # fmt: skip
    texts = {source.name: source.read_text() for source in cut.sources}
    assert "CTA_TILE_Q=*/16" in texts["paged_kernel_mask_1_part_0.cu"]
    assert "CTA_TILE_Q=*/64" not in texts["paged_kernel_mask_1_part_0.cu"]
    assert texts["paged_kernel_mask_1_part_1.cu"].startswith('#include "config.inc"\n')
    assert texts["prefill_jit_binding_part_1.cu"] == EXPORTS.replace("TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, Plan);\n", "")
    assert cut.name != spec.name, "the whole module is not to be taken for it"
    assert cut.others == spec.others
    assert cut.extra_ldflags is not None
    assert cut.extra_ldflags[0] == "-lm"


def test_files_that_are_there_are_not_written_again(spec: Spec) -> None:
    """Or they would be compiled again."""
    before = [source.stat().st_mtime_ns for source in paged_only(spec).sources]
    assert [source.stat().st_mtime_ns for source in paged_only(spec).sources] == before
    part = paged_only(spec).sources[0]
    part.write_text("another version's")
    assert paged_only(spec).sources[0].read_text() != "another version's"


def test_a_module_that_is_compiled_is_taken_whole(spec: Spec) -> None:
    spec.is_compiled = True
    assert paged_only(spec) is spec
