"""Cross entropy over a large vocabulary that leaves its gradient where the logits were.

One program reads a row twice and writes it once; nothing of the logits' size is made besides. (As Liger's fused linear
cross entropy does, Hsu et al., section 3.2.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 8192


@triton.jit
def _cross_entropy_kernel(logits, targets, scales, losses, correct, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    target = tl.load(targets + row).to(tl.int32)
    target_logit = tl.load(logits + target).to(tl.float32)  # before any of the row is overwritten
    highest = float("-inf")
    total = 0.0
    best = 0
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(logits + columns, columns < vocab, other=float("-inf")).to(tl.float32)
        block_highest, block_best = tl.max(values, 0, return_indices=True)
        best = tl.where(block_highest > highest, start + block_best, best)  # the first of equals
        new_highest = tl.maximum(highest, block_highest)
        total = total * tl.exp(highest - new_highest) + tl.sum(tl.exp(values - new_highest), 0)
        highest = new_highest
    log_total = highest + tl.log(total)
    tl.store(losses + row, log_total - target_logit)
    tl.store(correct + row, (best == target).to(tl.int8))
    scale = tl.load(scales + row)
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(logits + columns, columns < vocab, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(values - log_total) * scale
        gradient = tl.where(columns == target, gradient - scale, gradient)
        tl.store(logits + columns, gradient.to(logits.dtype.element_ty), columns < vocab)


def cross_entropy_in_place(
    logits: torch.Tensor, targets: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's loss [rows], float32, and whether its target is the most likely token [rows], bool. ``logits``
    [rows, vocab] becomes the gradient of sum(``scales`` * losses). ``targets`` [rows]; ``scales`` [rows], float32."""
    num_rows, vocab = logits.shape
    losses = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    correct = torch.empty(num_rows, dtype=torch.int8, device=logits.device)
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    _cross_entropy_kernel[(num_rows,)](
        logits, targets, scales, losses, correct, vocab, BLOCK=block, num_warps=16 if block >= 4096 else 4
    )
    return losses, correct.bool()
