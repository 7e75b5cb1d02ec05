"""The online engine: live sequences, their pages, and one batch at a time.

``schedule`` decides and prepares a batch, the caller runs it through the decoder, ``finish`` samples from the result. A
step that is discarded instead has changed no sequence: the next ``schedule`` picks the same work again, and discards a
step that was left unfinished.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from cotenant.config import BatchConfig, LoraConfig
from cotenant.core.errors import CotenantError, InvalidInputError
from cotenant.core.plan import BatchShape, RequestView
from cotenant.core.request import AdapterRef, FinishReason, Request, SequenceOutput, TokenLogprobs
from cotenant.engine.adapters import AdapterSlots
from cotenant.engine.assemble import Entry, assemble
from cotenant.engine.batcher import BatchPlan, Limits, plan_batch
from cotenant.engine.block_table import BlockTables
from cotenant.engine.logprobs import score_prompt, token_logprobs
from cotenant.engine.queue import SequenceQueue
from cotenant.engine.sampler import NOT_FINITE, sample
from cotenant.engine.sampling_state import SamplingState
from cotenant.engine.sequence import Sequence
from cotenant.memory.pages import PagePool
from cotenant.models.batch import Batch
from cotenant.models.decoder import Decoder
from cotenant.models.lora import LoraAdapter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class OnlineStep:
    """A batch that is ready to run, its shape, and whose rows are whose."""

    batch: Batch
    shape: BatchShape
    entries: tuple[Entry, ...]


class OnlineEngine:
    """Generates for all live requests together.

    ``max_model_len`` is cut to what ``num_pages`` can hold, so that every sequence that is taken fits when it is alone.
    ``kv_cache``: [num_pages, layers, 2, page_tokens, kv_heads, head_dim], zeros at first; a row is read only by the
    sequence that owns its page. ``clock`` is the wall clock that ``Request.arrival_s`` is on.
    """

    def __init__(
        self,
        decoder: Decoder,
        num_pages: int,
        page_tokens: int,
        batch_config: BatchConfig,
        max_model_len: int,
        lora_config: LoraConfig,
        eos_token_ids: Iterable[int],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        spec = decoder.spec
        self.max_model_len = min(max_model_len, num_pages * page_tokens)
        self.num_preemptions = 0
        self.kv_cache = torch.zeros(
            (num_pages, spec.num_layers, 2, page_tokens, spec.num_kv_heads, spec.head_dim),
            dtype=decoder.dtype,
            device=decoder.device,
        )
        self._decoder = decoder
        self._limits = Limits(
            batch_config.max_num_seqs, batch_config.max_num_batched_tokens, lora_config.max_loras, page_tokens
        )
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        self._pool = PagePool(num_pages)
        self._tables = BlockTables(
            self._limits.max_num_seqs, self._limits.num_pages(self.max_model_len), self._limits.page_tokens
        )
        self._adapters = AdapterSlots(spec, decoder.device, decoder.dtype, lora_config)
        self._live: dict[str, Sequence] = {}
        self._running = SequenceQueue()
        self._waiting = SequenceQueue()
        self._leaving: list[Sequence] = []  # aborted while their step was in flight; pages are freed after it
        self._failures: list[tuple[str, CotenantError]] = []
        self._plan: BatchPlan | None = None  # what schedule() would do, until something changes
        self._step: OnlineStep | None = None
        self._num_added = 0

    # What the worker looks at.

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_cache_usage(self) -> float:
        """Share of pages in use, 0 to 1."""
        return self._pool.num_used / self._pool.num_pages

    def views(self) -> tuple[RequestView, ...]:
        """All live requests in the order in which they are served."""
        order = heapq.merge(self._running, self._waiting, key=lambda sequence: sequence.key)
        return tuple(sequence.view() for sequence in order)

    def next_shape(self) -> BatchShape:
        """The shape of the batch that ``schedule`` would return now. Changes nothing."""
        return self._next_plan().shape

    def take_failures(self) -> list[tuple[str, CotenantError]]:
        """Requests that ended in ``schedule`` because their adapter could not be read again, each with the reason."""
        failures, self._failures = self._failures, []
        return failures

    # Requests and adapters.

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidInputError if it can never run; nothing else is disturbed then."""
        self._check(request)
        if request.adapter is not None:
            self._adapters.validate(request.adapter, self._adapters_in_use())
        sequence = Sequence(
            request=request,
            number=self._num_added,
            max_length=self.max_model_len,
            eos_token_ids=self._eos_token_ids,
            sampling_state=SamplingState(request.sampling, request.prompt),
            tokens=list(request.prompt),
        )
        self._num_added += 1
        self._live[request.request_id] = sequence
        self._waiting.add(sequence)
        self._plan = None

    def _check(self, request: Request) -> None:
        prompt, vocab_size = request.prompt, self._decoder.spec.vocab_size
        if request.request_id in self._live:
            raise InvalidInputError(f"request id '{request.request_id}' is in use", param="request_id")
        if not prompt:
            raise InvalidInputError("the prompt is empty: it needs at least one token", param="prompt")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise InvalidInputError(f"the prompt has token ids outside 0 to {vocab_size - 1}", param="prompt")
        wanted = len(prompt) + min(1, request.sampling.max_tokens)
        if wanted > self.max_model_len:
            raise InvalidInputError(
                f"the prompt has {len(prompt)} tokens; with room for an answer at most "
                f"{self.max_model_len - min(1, request.sampling.max_tokens)} fit the context and its KV cache",
                code="context_length_exceeded",
                param="prompt",
            )
        if any(not 0 <= token < vocab_size for token in request.sampling.logit_bias):
            raise InvalidInputError(f"logit_bias has token ids outside 0 to {vocab_size - 1}", param="logit_bias")

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget these requests and free their pages; ids that are not live are ignored.

        The pages of a request whose batch is in flight are freed when that batch is finished or discarded.
        """
        for request_id in request_ids:
            sequence = self._live.pop(request_id, None)
            if sequence is None:
                continue
            self._plan = None
            if sequence.seat is None:
                self._waiting.remove(sequence)
                continue
            self._running.remove(sequence)
            if self._step is not None and any(entry.sequence is sequence for entry in self._step.entries):
                sequence.aborted = True
                self._leaving.append(sequence)
            else:
                self._vacate(sequence)

    def register_adapter(self, ref: AdapterRef, adapter: LoraAdapter) -> None:
        """Serve a frozen copy of ``adapter`` as ``ref`` without reading it from disk.

        When running sequences hold all slots, no copy is kept and the folder is read on first use.
        """
        self._adapters.register(ref, adapter, self._adapters_in_use())
        self._plan = None

    def drop_adapter(self, name: str) -> None:
        """Forget the adapter of this name. Requests that run on it keep it until they end."""
        self._adapters.drop(name)
        self._plan = None

    def _adapters_in_use(self) -> set[AdapterRef]:
        return {sequence.request.adapter for sequence in self._running if sequence.request.adapter is not None}

    # One iteration.

    def step(self) -> list[SequenceOutput]:
        """Schedule, run and finish one batch; for tests and calibration."""
        step = self.schedule()
        if step is None:
            return []
        with torch.inference_mode():
            hidden = self._decoder.forward(step.batch, self.kv_cache)
        return self.finish(step, hidden)

    def schedule(self) -> OnlineStep | None:
        """The next batch, with pages for all its tokens; None when nothing is live."""
        self.discard()
        plan = self._next_plan()
        while not self._apply(plan):
            plan = self._next_plan()
        if not plan.decodes and not plan.chunks:
            return None
        shape = plan.shape
        batch, entries = assemble(plan, self._tables, self._decoder.device)
        self._step = OnlineStep(batch, shape, entries)
        return self._step

    def discard(self) -> None:
        """Give up the step that is in flight, if there is one: its work will be scheduled again."""
        self._step = None
        self._release_leaving()

    def _next_plan(self) -> BatchPlan:
        if self._plan is None:
            self._plan = plan_batch(self._running, self._waiting, self._pool, self._limits)
        return self._plan

    def _apply(self, plan: BatchPlan) -> bool:
        """Carry the plan out. False if a request failed on the way and another plan is needed."""
        self._plan = None
        for sequence in plan.preempted:
            self._preempt(sequence)
        for sequence in plan.admitted:
            if not self._admit(sequence):
                return False
        for sequence in plan.decodes:
            if sequence.num_computed == self._pool.count(sequence.number) * self._limits.page_tokens:
                assert sequence.seat is not None
                self._tables.extend(sequence.seat, self._pool.allocate(sequence.number, 1))
        return True

    def _admit(self, sequence: Sequence) -> bool:
        request = sequence.request
        if request.adapter is not None:
            try:
                sequence.adapter = self._adapters.acquire(request.adapter, self._adapters_in_use())
            except InvalidInputError as error:
                logger.warning("request %s: %s", request.request_id, error)
                self._waiting.remove(sequence)
                del self._live[request.request_id]
                self._failures.append((request.request_id, error))
                return False
        pages = self._pool.allocate(sequence.number, self._limits.num_pages(len(sequence.tokens)))
        sequence.seat = self._tables.open(pages)
        if not sequence.was_admitted:
            sequence.was_admitted = True
            sequence.queue_s = max(0.0, self._clock() - request.arrival_s)
        self._waiting.remove(sequence)
        self._running.add(sequence)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue; its tokens stay, what the KV cache held of them is computed again later."""
        logger.info("request %s gives its pages up and will be recomputed", sequence.request.request_id)
        self._running.remove(sequence)
        self._vacate(sequence)
        sequence.num_computed = 0
        sequence.adapter = None
        self._waiting.add(sequence)
        self.num_preemptions += 1

    def _vacate(self, sequence: Sequence) -> None:
        assert sequence.seat is not None
        self._tables.close(sequence.seat)
        sequence.seat = None
        self._pool.free(sequence.number)

    def _release_leaving(self) -> None:
        if self._leaving:
            self._plan = None
        for sequence in self._leaving:
            self._vacate(sequence)
        self._leaving.clear()

    @torch.inference_mode()
    def finish(self, step: OnlineStep, hidden: torch.Tensor) -> list[SequenceOutput]:
        """Sample from the batch's last rows and update its sequences; outputs in the batch's order.

        ``hidden``: [tokens, hidden_size] after all layers; rows after the batch's own (a fused segment's) are ignored.
        A request whose numbers are not finite ends with ``FinishReason.ABORT``; the others are not touched by it.
        """
        assert step is self._step, "a step is finished once, and before the next one is scheduled"
        self._step = None
        self._plan = None
        outputs: list[SequenceOutput] = []
        ready: list[Entry] = []
        broken = self._find_broken(step, hidden)
        for entry in step.entries:
            sequence = entry.sequence
            if sequence in broken:
                outputs += self._end_broken(sequence)
            elif not sequence.aborted:
                score_prompt(self._decoder, hidden[entry.start : entry.start + entry.count], sequence)
                sequence.num_computed += entry.count
                if sequence.num_left == 0 and sequence.request.sampling.max_tokens == 0:
                    outputs.append(self._output(sequence, finish_reason=FinishReason.LENGTH))
                elif sequence.num_left == 0:
                    ready.append(entry)
        if ready:
            outputs += self._sample(ready, hidden)
        self._release_leaving()
        return outputs

    def _find_broken(self, step: OnlineStep, hidden: torch.Tensor) -> set[Sequence]:
        """Sequences of which a row of ``hidden`` is not finite. Decodes are left to the sampler, which sees it too."""
        suspects = [entry for entry in step.entries if entry.count > 1 or not entry.sequence.is_decoding]
        suspects += [entry for entry in step.entries if entry.sequence.aborted]
        if not suspects:
            return set()
        finite: list[bool] = hidden[: step.batch.num_tokens].isfinite().all(dim=-1).tolist()
        return {entry.sequence for entry in suspects if not all(finite[entry.start : entry.start + entry.count])}

    def _end_broken(self, sequence: Sequence) -> list[SequenceOutput]:
        """End a sequence whose numbers are not finite, and clean its pages: masked rows are multiplied by 0, and
        0 * NaN would carry on into their next owner."""
        self.kv_cache[list(self._pool.pages(sequence.number))] = 0
        if sequence.aborted:
            return []
        logger.error("request %s ended: the model's output for it is not finite", sequence.request.request_id)
        sequence.prompt_logprobs = None
        return [self._output(sequence, finish_reason=FinishReason.ABORT)]

    def _sample(self, ready: list[Entry], hidden: torch.Tensor) -> list[SequenceOutput]:
        rows = [entry.start + entry.count - 1 for entry in ready]
        if rows == list(range(len(rows))):
            last = hidden[: len(rows)]
        else:
            last = hidden[torch.tensor(rows, device=hidden.device)]
        logits = self._decoder.logits(last)  # [ready, vocab]
        sequences = [entry.sequence for entry in ready]
        scored = [row for row, sequence in enumerate(sequences) if sequence.request.sampling.logprobs is not None]
        # Of the raw logits, which the sampler may overwrite.
        raw = logits[scored].log_softmax(dim=-1) if scored else None
        token_ids = sample(logits, [sequence.sampling_state for sequence in sequences])
        logprobs: dict[int, TokenLogprobs] = {}
        if raw is not None:
            tokens = [max(token_ids[row], 0) for row in scored]
            num_top = [sequences[row].request.sampling.logprobs or 0 for row in scored]
            logprobs = dict(zip(scored, token_logprobs(raw, tokens, num_top), strict=True))
        now_s = self._clock()
        outputs: list[SequenceOutput] = []
        for row, (sequence, token_id) in enumerate(zip(sequences, token_ids, strict=True)):
            if token_id == NOT_FINITE:
                outputs += self._end_broken(sequence)
                continue
            reason = sequence.append(token_id, now_s)
            outputs.append(self._output(sequence, (token_id,), logprobs.get(row), reason))
        return outputs

    def _output(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...] = (),
        logprobs: TokenLogprobs | None = None,
        finish_reason: FinishReason | None = None,
    ) -> SequenceOutput:
        """What the sequence puts out now; it leaves the engine if that is its last."""
        prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
        queue_s, sequence.queue_s = sequence.queue_s, None
        if finish_reason is not None:
            del self._live[sequence.request.request_id]
            self._running.remove(sequence)
            self._vacate(sequence)
        return SequenceOutput(
            request_id=sequence.request.request_id,
            token_ids=token_ids,
            logprobs=() if logprobs is None else (logprobs,),
            prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
            finish_reason=finish_reason,
            stop_token_id=token_ids[-1] if finish_reason is FinishReason.STOP else None,
            queue_s=queue_s,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError if pages, sequences and block tables disagree."""
        self._pool.check_integrity()
        self._running.check_integrity()
        self._waiting.check_integrity()
        self._adapters.check_integrity(self._adapters_in_use())
        live = [*self._running, *self._waiting]
        assert {sequence.number for sequence in live} == {sequence.number for sequence in self._live.values()}
        assert len(live) == len(self._live), "a sequence is both running and waiting"
        seated = [*self._running, *self._leaving]
        assert len({sequence.seat for sequence in seated}) == len(seated), "two sequences share a seat"
        assert self._tables.num_free_seats == self._limits.max_num_seqs - len(seated), "a seat was lost"
        assert self._pool.owners() == {sequence.number for sequence in seated}, "pages belong to nobody who runs"
        for sequence in seated:
            assert sequence.seat is not None
            pages = self._pool.pages(sequence.number)
            assert self._tables.pages(sequence.seat) == pages, "a block table disagrees with the pool"
            assert self._limits.num_pages(sequence.num_computed) <= len(pages), "tokens were computed without a page"
            assert sequence.num_left >= 1, "a live sequence has nothing to compute"
        for sequence in self._waiting:
            assert sequence.seat is None, "a waiting sequence has a seat"
            assert sequence.num_computed == 0, "a waiting sequence has computed tokens"
