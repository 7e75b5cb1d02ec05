"""Dropout by counting in one pass, without a mask. See ``models.dropout``, whose bits these are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


# Compiled once for all probabilities and modules: what is a multiple of 16 would else be compiled where it first comes.
@triton.jit(do_not_specialize=["dropped_below", "module_key"])
def _dropout_kernel(
    values,
    token_keys,
    column_keys,
    out,
    num_columns,
    module_key,
    dropped_below,
    scale,
    multiplier,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    at = row.to(tl.int64) * num_columns + columns
    # int32 throughout: products wrap around, and shifts keep the sign.
    hashes = tl.load(token_keys + row) * module_key * tl.load(column_keys + columns, inside, other=0)
    hashes = (hashes ^ (hashes >> 15)) * multiplier
    factor = tl.where(hashes >= dropped_below, scale, 0.0)
    result = tl.load(values + at, inside).to(tl.float32) * factor
    if ADDS:
        result += tl.load(out + at, inside).to(tl.float32)
    tl.store(out + at, result.to(out.dtype.element_ty), inside)


def drop(
    values: torch.Tensor,
    token_keys: torch.Tensor,
    column_keys: torch.Tensor,
    module_key: int,
    dropped_below: int,
    scale: float,
    multiplier: int,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """``values`` [tokens, columns] times the mask, a new tensor; or added to ``add_to``, of the same shape. All keys,
    ``dropped_below`` and ``multiplier`` are int32; ``scale`` is what is kept is multiplied by, as the dtype of
    ``values`` has it."""
    values = values.contiguous()
    out = torch.empty_like(values) if add_to is None else add_to
    assert out.is_contiguous(), "rows lie one behind the other"
    num_rows, num_columns = values.shape
    _dropout_kernel[(num_rows, triton.cdiv(num_columns, _BLOCK))](
        values,
        token_keys,
        column_keys,
        out,
        num_columns,
        module_key,
        dropped_below,
        scale,
        multiplier,
        ADDS=add_to is not None,
        BLOCK=_BLOCK,
    )
    return out
