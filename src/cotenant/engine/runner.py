"""Runs a batch through the decoder: what comes out are logits for the rows that choose a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from cotenant.device.readback import Interval
from cotenant.engine.assemble import HostBatch, send
from cotenant.engine.batcher import Limits
from cotenant.engine.sampler import Sampler
from cotenant.models.decoder import Decoder
from cotenant.models.lora_stacks import LoraStacks
from cotenant.models.paged_attention import is_supported


class Forwarded(NamedTuple):
    """``logits`` [sampled rows, vocab] in the decoder's dtype, None without such rows; they may be overwritten.
    ``hidden`` [tokens, hidden] before the final norm, if it was kept."""

    logits: torch.Tensor | None
    hidden: torch.Tensor | None


class Runner(Protocol):
    """One way to run batches. Nothing in it waits for the device."""

    def forward(self, host: HostBatch, interval: Interval, *, keep_hidden: bool) -> Forwarded:
        """Run all layers. ``interval`` is begun with the first of them. ``keep_hidden``: the caller needs the hidden
        states of all tokens."""

    def warm_up(
        self, graph_sizes: Sequence[int], lanes: Sequence[int], also: Callable[[], None], *, enforce_eager: bool
    ) -> None:
        """Compile, and unless ``enforce_eager`` capture decode steps of these batch sizes (none named: as fits).
        ``lanes``: how many SMs each has that ``capture_lane`` will be called for. ``also`` is run for the sake of its
        kernels, which are compiled with the others."""

    def capture_lane(self, num_sms: int, *, with_prompts: bool) -> bool:
        """Capture decode steps of one more batch size, or then batches with prompts of one more size, for the current
        lane, which has so many SMs, beside the one of ``warm_up``, if they are captured at all; whether that was the
        last one."""

    def drop_lanes(self) -> None:
        """Forget what ``capture_lane`` has captured."""

    def compile_the_rest(self) -> None:
        """Begin to compile in the background what serving is faster with and can do without."""

    def wait_for_kernels(self) -> None:
        """Block until nothing more is compiled in the background."""


class EagerRunner:
    """Operation by operation, on any device."""

    def __init__(self, decoder: Decoder, kv_cache: torch.Tensor, last_tokens: torch.Tensor) -> None:
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._last_tokens = last_tokens

    def warm_up(
        self, graph_sizes: Sequence[int], lanes: Sequence[int], also: Callable[[], None], *, enforce_eager: bool
    ) -> None:
        also()

    def capture_lane(self, num_sms: int, *, with_prompts: bool) -> bool:
        return True

    def drop_lanes(self) -> None:
        return

    def compile_the_rest(self) -> None:
        return

    def wait_for_kernels(self) -> None:
        return

    def forward(self, host: HostBatch, interval: Interval, *, keep_hidden: bool) -> Forwarded:
        batch = send(host, self._decoder.device, self._last_tokens)
        interval.begin()
        hidden = self._decoder.forward(batch, self._kv_cache)
        return Forwarded(sampled_logits(self._decoder, host, hidden), hidden)


def create_runner(
    decoder: Decoder,
    kv_cache: torch.Tensor,
    sampler: Sampler,
    stacks: LoraStacks | None,
    limits: Limits,
    max_model_len: int,
) -> Runner:
    """The fastest runner for this decoder on its device."""
    if not is_supported(decoder.spec, decoder.device, decoder.dtype):
        return EagerRunner(decoder, kv_cache, sampler.last_tokens)
    # Here and not above: it needs packages that a machine without a GPU lacks.
    from cotenant.engine.cuda_runner import CudaRunner

    max_pages = limits.num_pages(max_model_len)
    most_seqs, most_tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    return CudaRunner(decoder, kv_cache, sampler.last_tokens, stacks, most_seqs, most_tokens, max_pages)


def sampled_logits(decoder: Decoder, host: HostBatch, hidden: torch.Tensor) -> torch.Tensor | None:
    """The logits of the batch's sampled rows, given ``hidden`` [at least the batch's tokens, hidden]."""
    rows = host.sampled_rows()
    if not rows:
        return None
    if rows == list(range(len(rows))):
        return decoder.raw_logits(hidden[: len(rows)])
    index = torch.tensor(rows)
    if hidden.is_cuda:
        index = index.pin_memory().to(hidden.device, non_blocking=True)
    return decoder.raw_logits(hidden[index])
