"""What work should take by a device's two rates: the prior where nothing like it was measured.

LLMStation section 4.2: a latency is a learned function of computation / peak FLOP rate and memory access / peak
bandwidth. Here each product and attention takes the longer of the two, and one ratio for each kind of work is learned.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from cotenant.core.plan import BatchShape
from cotenant.core.tasklet import TaskletKind, TaskletShape

# Of H200's 132 SMs, and of its copies' bandwidth that they reach: copies of 628 to 4,190 GB/s on 8 to 120 SMs, of
# 4,250 on all. Matrix products on the same SMs were close to proportional.
_SMS = (0.0, 8 / 132, 16 / 132, 24 / 132, 32 / 132, 48 / 132, 64 / 132, 80 / 132, 96 / 132, 112 / 132, 120 / 132, 1.0)
_BANDWIDTH = (0.0, 0.148, 0.281, 0.412, 0.531, 0.723, 0.855, 0.902, 0.927, 0.970, 0.986, 1.0)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """A decoder's sizes. ``bytes_per_element``: of a KV entry's numbers, and of activations."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    bytes_per_weight: float
    bytes_per_element: float


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Peak rates of matrix products (FLOP/s) and of memory (bytes/s), on all ``num_sms``."""

    flops: float
    bytes_per_s: float
    num_sms: int


# H200: measured, products of 8192 x 8192 matrices in bf16, and copies (read and written). H100 (SXM) has the same SMs;
# of its data sheet's 3.35 TB/s it is taken to reach the share that H200 reaches of its 4.8.
RATES = {
    "NVIDIA H200": DeviceRates(800e12, 4.25e12, 132),
    "NVIDIA H100 80GB HBM3": DeviceRates(800e12, 2.97e12, 132),
}


# Operations of bf16 matrix products in a clock cycle of an SM, by compute capability; that of GeForce cards is half as
# much, of which the ratio learned for each kind of work makes up.
_FLOPS_PER_CYCLE = {(8, 0): 2048, (8, 6): 1024, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192, (10, 3): 8192, (12, 0): 1024}
# What H200 reaches of its clocks' product: 132 SMs at 1.98 GHz, and 6,144 bits at twice 3.2 GHz.
_REACHED_FLOPS, _REACHED_BANDWIDTH = 0.75, 0.86


def rates_by_clocks(
    capability: tuple[int, int], num_sms: int, clock_hz: float, peak_bytes_per_s: float
) -> DeviceRates | None:
    """Of a device that was not measured: what it should reach at its highest clocks. None where it is not known how
    much its SMs do in a cycle."""
    flops_per_cycle = _FLOPS_PER_CYCLE.get(capability)
    if flops_per_cycle is None or min(num_sms, clock_hz, peak_bytes_per_s) <= 0:
        return None
    flops = _REACHED_FLOPS * flops_per_cycle * num_sms * clock_hz
    return DeviceRates(flops, _REACHED_BANDWIDTH * peak_bytes_per_s, num_sms)


def bandwidth_share(sm_share: float) -> float:
    """The share of a device's bandwidth that a share of its SMs reaches; it saturates, other than computation."""
    if sm_share >= 1.0:
        return 1.0
    above = max(1, bisect_left(_SMS, sm_share))
    left, right = _SMS[above - 1], _SMS[above]
    part = (sm_share - left) / (right - left)
    return _BANDWIDTH[above - 1] + part * (_BANDWIDTH[above] - _BANDWIDTH[above - 1])


class Roofline:
    """Milliseconds at peak rates, on ``num_sms`` SMs or on all."""

    def __init__(self, sizes: ModelSizes, rates: DeviceRates) -> None:
        self._sizes = sizes
        self._rates = rates
        query, key_value = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        hidden, intermediate = sizes.hidden_size, sizes.intermediate_size
        # Products as (in, out) features; the first of the MLP's is gate and up together.
        self._attention_products = ((hidden, query + 2 * key_value), (query, hidden))
        self._up, self._down = (hidden, 2 * intermediate), (intermediate, hidden)
        self._head = (hidden, sizes.vocab_size)
        self._flops_per_pair = 4 * query  # of a token and one that it attends to, in one layer
        self._bytes_per_entry = 2 * key_value * sizes.bytes_per_element  # of a token in one layer's KV cache

    def batch_ms(self, batch: BatchShape, num_sms: int | None = None) -> float:
        """An online batch."""
        layers = self._sizes.num_layers
        rows = batch.num_decode + batch.prefill_tokens
        products = (*self._attention_products, self._up, self._down)
        in_layers = sum(self._product_ms(rows, product, num_sms) for product in products)
        if batch.num_decode:
            in_layers += self._attention_ms(batch.context_tokens, batch.context_tokens, num_sms)
        if batch.prefill_tokens:
            in_layers += self._attention_ms(batch.prefill_pairs, batch.prefill_context_tokens, num_sms)
        chosen = batch.num_decode + (1 if batch.prefill_tokens else 0)
        return layers * in_layers + self._product_ms(chosen, self._head, num_sms)

    def tasklet_ms(self, shape: TaskletShape, num_sms: int | None = None) -> float:
        """A tasklet, over frozen weights: a backward computes gradients of inputs, and those of an adapter count as
        nothing. 0 for the optimizer's, whose size is the adapter's."""
        tokens = shape.num_tokens
        attention = sum(self._product_ms(tokens, product, num_sms) for product in self._attention_products)
        up, down = (self._product_ms(tokens, product, num_sms) for product in (self._up, self._down))
        pairs = tokens * shape.max_length / 2
        attending = self._attention_ms(pairs, tokens, num_sms)
        head = self._product_ms(tokens, self._head, num_sms)
        forward_attention = attention + attending
        backward_attention = attention + 2.5 * attending  # five products where the forward has two
        by_kind = {
            TaskletKind.FORWARD: forward_attention + up + down,
            TaskletKind.FORWARD_ATTENTION: forward_attention,
            TaskletKind.FORWARD_MLP: up + down,
            TaskletKind.LOSS: 2 * head,
            TaskletKind.RECOMPUTE: forward_attention + up + down,
            TaskletKind.RECOMPUTE_ATTENTION: forward_attention,
            TaskletKind.RECOMPUTE_UP: up,
            TaskletKind.BACKWARD: backward_attention + up + down,
            TaskletKind.BACKWARD_DOWN: down,
            TaskletKind.BACKWARD_UP: up,
            TaskletKind.BACKWARD_ATTENTION: backward_attention,
            TaskletKind.OPTIMIZER: 0.0,
            TaskletKind.EVAL_FORWARD: forward_attention + up + down,
            TaskletKind.EVAL_LOSS: head,
        }
        return by_kind[shape.kind]

    def _product_ms(self, rows: int, product: tuple[int, int], num_sms: int | None) -> float:
        inputs, outputs = product
        moved = inputs * outputs * self._sizes.bytes_per_weight
        moved += rows * (inputs + outputs) * self._sizes.bytes_per_element
        return self._longer_ms(2.0 * rows * inputs * outputs, moved, num_sms)

    def _attention_ms(self, pairs: float, entries: int, num_sms: int | None) -> float:
        return self._longer_ms(self._flops_per_pair * pairs, self._bytes_per_entry * entries, num_sms)

    def _longer_ms(self, flops: float, moved_bytes: float, num_sms: int | None) -> float:
        rates = self._rates
        sm_share = 1.0 if num_sms is None else min(1.0, num_sms / rates.num_sms)
        computing = flops / (rates.flops * sm_share)
        moving = moved_bytes / (rates.bytes_per_s * bandwidth_share(sm_share))
        return 1e3 * max(computing, moving)
