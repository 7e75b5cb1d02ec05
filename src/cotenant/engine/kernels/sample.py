"""The sampler's choice as Triton kernels: one program for a row, and no sort.

top_k and top_p each keep the tokens that are at least as likely as some token. That token's weight is found by
bisection over the weights that the row has, compared as the integers that their bits are: exact, ties included, and for
logits of 16 bits about ten passes over the row. Every sum is taken in an order that depends on the vocabulary's size
alone, so a row's token is the same bit for bit whatever else is in the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from cotenant.engine.sampler import SamplingPlan

BLOCK = 4096
NUM_WARPS = 16
NUM_FIGURES = 5

_ONE = tl.constexpr(0x3F800000)  # the bits of 1.0, the weight of a row's likeliest token
_NO_KEY = tl.constexpr(0x7FFFFFFF)
_NOT_FINITE = tl.constexpr(-1)
_COUNT_MASK = tl.constexpr((1 << 24) - 1)


def choose(
    logits: torch.Tensor, plan: SamplingPlan, counts: torch.Tensor | None, last_tokens: torch.Tensor
) -> torch.Tensor:
    """The next token of each row, int64 [rows], and that of each seat in ``last_tokens``: see ``Sampler.sample``."""
    logits = _aligned(logits)
    chosen = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    num_plain = len(logits) - plan.num_adjusted
    if num_plain:
        order = plan.order[:num_plain]
        _launch(logits, order, plan, last_tokens, chosen, gathered=False, draws=plan.drawn is not None)
    if plan.num_adjusted:
        values = adjust(logits, plan.adjusted, plan.seats, plan.penalties, counts)
        if plan.biased is not None and plan.bias is not None:
            values[plan.biased[0], plan.biased[1]] += plan.bias
        _launch(values, plan.adjusted, plan, last_tokens, chosen, gathered=True, draws=True)
    return chosen


def adjust(
    logits: torch.Tensor,
    rows: torch.Tensor,
    seats: torch.Tensor,
    penalties: torch.Tensor | None,
    counts: torch.Tensor | None,
) -> torch.Tensor:
    """These rows of the logits with their penalties, fp32 [adjusted, vocab]."""
    if penalties is None or counts is None:
        return logits.index_select(0, rows).float()
    vocab_size = logits.shape[-1]
    values = torch.empty((len(rows), vocab_size), dtype=torch.float32, device=logits.device)
    grid = (len(rows), triton.cdiv(vocab_size, BLOCK))
    _adjust_kernel[grid](logits, rows, seats, penalties, counts, values, vocab_size, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return values


def _launch(
    logits: torch.Tensor,
    order: torch.Tensor,
    plan: SamplingPlan,
    last_tokens: torch.Tensor,
    chosen: torch.Tensor,
    gathered: bool,
    draws: bool,
) -> None:
    _choose_kernel[(len(order),)](
        logits,
        order,
        plan.figures if draws else None,
        plan.seats,
        last_tokens,
        chosen,
        logits.shape[-1],
        GATHERED=gathered,
        DRAWS=draws,
        NUM_FIGURES=NUM_FIGURES,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )


def _aligned(logits: torch.Tensor) -> torch.Tensor:
    """Rows side by side from an address that vectors of 16 bytes can be read from: the kernels are compiled for that,
    and compiled otherwise would add in another order."""
    if logits.is_contiguous() and logits.data_ptr() % 16 == 0:
        return logits
    return logits.clone(memory_format=torch.contiguous_format)


@triton.jit(do_not_specialize_on_alignment=["order", "seats"])
def _adjust_kernel(logits, order, seats, penalties, counts, values, vocab, BLOCK: tl.constexpr):
    """One block of one row: repetition over all its tokens, frequency and presence over the generated ones."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(order + place)
    seat = tl.load(seats + row)
    repetition = tl.load(penalties + 3 * place)
    frequency = tl.load(penalties + 3 * place + 1)
    presence = tl.load(penalties + 3 * place + 2)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = index < vocab
    value = tl.load(logits + row * vocab + index, mask=inside, other=0.0).to(tl.float32)
    entry = tl.load(counts + seat * vocab + index, mask=inside, other=0)
    times = (entry & _COUNT_MASK).to(tl.float32)
    repeated = tl.where(value > 0, value / repetition, value * repetition)
    value = tl.where(entry > 0, repeated, value)
    value = value - frequency * times - tl.where(times > 0, presence, 0.0)
    tl.store(values + place * vocab + index, value, mask=inside)


@triton.jit
def _weights(logits, index, vocab, peak, temperature):
    """Of these tokens, relative to the likeliest one's: 1 at most, and 0 outside the vocabulary. fp32 [BLOCK]"""
    value = tl.load(logits + index, mask=index < vocab, other=-float("inf")).to(tl.float32)
    return tl.exp((value - peak) / temperature)


@triton.jit
def _survey(logits, vocab, peak, temperature, key, BLOCK: tl.constexpr):
    """Tokens whose weight is above the key's: their number, their mass, the least key; and the greatest key at or
    below it."""
    offsets = tl.arange(0, BLOCK)
    number = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    least = tl.full([BLOCK], _NO_KEY, tl.int32)
    greatest = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        weight = _weights(logits, start + offsets, vocab, peak, temperature)
        bits = weight.to(tl.int32, bitcast=True)
        above = bits > key
        number += above.to(tl.int32)
        mass += tl.where(above, weight, 0.0)
        least = tl.minimum(least, tl.where(above, bits, _NO_KEY))
        greatest = tl.maximum(greatest, tl.where(above, 0, bits))
    return tl.sum(number, 0), tl.sum(mass, 0), tl.min(least, 0), tl.max(greatest, 0)


@triton.jit
def _search(logits, vocab, peak, temperature, lowest, limit, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The least key, ``lowest`` or more, of a token such that what is above it is under the limit; the number and mass
    of what is above it.

    Invariant: what is above ``low`` is not under the limit, what is above ``high`` is; ``high`` is a token's key.
    """
    low = lowest - 1
    high = lowest * 0 + _ONE
    high_number = lowest * 0
    high_mass = peak * 0.0
    while low + 1 < high:
        middle = (low + high) // 2
        number, mass, least, greatest = _survey(logits, vocab, peak, temperature, middle, BLOCK)
        if BY_MASS:
            under = mass < limit
        else:
            under = number < limit
        # No key is between middle and least, nor between greatest and middle.
        high = tl.where(under, tl.maximum(greatest, low + 1), high)
        high_number = tl.where(under, number, high_number)
        high_mass = tl.where(under, mass, high_mass)
        low = tl.where(under, low, least - 1)
    return high, high_number, high_mass


@triton.jit
def _threshold(logits, vocab, peak, temperature, min_p, top_p, top_k, BLOCK: tl.constexpr):
    """The least key that min_p, top_k of what it left, and top_p of what both left, let pass."""
    key = tl.maximum(min_p.to(tl.int32, bitcast=True), 1)
    if (top_k < vocab) | (top_p < 1.0):
        number, mass, _least, _greatest = _survey(logits, vocab, peak, temperature, key - 1, BLOCK)
        if top_k < number:
            key, above, mass_above = _search(logits, vocab, peak, temperature, key, top_k, False, BLOCK)
            # The mass of exactly top_k tokens, however many share the last one's weight.
            mass = mass_above + (top_k - above) * key.to(tl.float32, bitcast=True)
        if top_p < 1.0:
            key, _above, _mass = _search(logits, vocab, peak, temperature, key, top_p * mass, True, BLOCK)
    return key


@triton.jit
def _kept(logits, index, vocab, peak, temperature, key):
    weight = _weights(logits, index, vocab, peak, temperature)
    return tl.where(weight.to(tl.int32, bitcast=True) >= key, weight, 0.0)


@triton.jit
def _draw(logits, vocab, peak, temperature, key, uniform, BLOCK: tl.constexpr):
    """The first token whose cumulative weight exceeds ``uniform`` of the whole: its block first, then its place."""
    offsets = tl.arange(0, BLOCK)
    total = peak * 0.0
    for start in range(0, vocab, BLOCK):
        total += tl.sum(_kept(logits, start + offsets, vocab, peak, temperature, key), 0)
    target = uniform * total  # below the total also when rounded: uniform is at most 1 - 2**-24
    first = vocab * 0
    before = peak * 0.0
    after = tl.sum(_kept(logits, offsets, vocab, peak, temperature, key), 0)
    while (after <= target) & (first + BLOCK < vocab):
        first += BLOCK
        before = after
        after += tl.sum(_kept(logits, first + offsets, vocab, peak, temperature, key), 0)
    index = first + offsets
    weight = _kept(logits, index, vocab, peak, temperature, key)
    hit = (before + tl.cumsum(weight, 0) > target) & (weight > 0)
    token = tl.min(tl.where(hit, index, _NO_KEY), 0)
    # The scan adds in another order than the sum: where it falls short of the target, the block's last token.
    last = tl.max(tl.where(weight > 0, index, 0), 0)
    return tl.minimum(token, last)


@triton.jit(do_not_specialize_on_alignment=["order", "figures", "seats", "chosen"])
def _choose_kernel(
    logits,
    order,
    figures,
    seats,
    last_tokens,
    chosen,
    vocab,
    GATHERED: tl.constexpr,  # the logits' rows are in the order's order
    DRAWS: tl.constexpr,  # not all rows are greedy
    NUM_FIGURES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(order + place)
    if GATHERED:
        logits += place * vocab
    else:
        logits += row * vocab
    offsets = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        index = start + offsets
        value = tl.load(logits + index, mask=index < vocab, other=-float("inf")).to(tl.float32)
        broken |= (value != value).to(tl.int32)
        better = value > top
        top = tl.where(better, value, top)
        where = tl.where(better, index, where)
    peak = tl.max(top, 0)
    token = tl.min(tl.where(top == peak, where, _NO_KEY), 0)
    finite = (tl.max(broken, 0) == 0) & (tl.abs(peak) < float("inf"))
    if DRAWS:
        temperature = tl.load(figures + row * NUM_FIGURES)
        if finite & (temperature > 0):
            min_p = tl.load(figures + row * NUM_FIGURES + 1)
            top_p = tl.load(figures + row * NUM_FIGURES + 2)
            top_k = tl.load(figures + row * NUM_FIGURES + 3)
            uniform = tl.load(figures + row * NUM_FIGURES + 4)
            key = _threshold(logits, vocab, peak, temperature, min_p, top_p, top_k, BLOCK)
            token = _draw(logits, vocab, peak, temperature, key, uniform, BLOCK)
    tl.store(chosen + row, tl.where(finite, token, _NOT_FINITE).to(tl.int64))
    tl.store(last_tokens + tl.load(seats + row), tl.where(finite, token, 0).to(tl.int64))
