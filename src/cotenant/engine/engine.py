"""The online engine: requests come in, batches go out to the device, and what they produced comes back.

``schedule`` decides and prepares a batch, ``launch`` puts it and the choice of its next tokens on the device,
``collect`` waits for the oldest launched batch and says what it produced. On a device that runs behind the host a
batch can be launched while the one before it is still running: its inputs are the tokens that the device itself has
chosen. A step that is scheduled and not launched has changed no token; the next ``schedule`` discards it.

``schedule``, ``launch`` and ``collect`` are called with the device's online lane current.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch

from cotenant.config import BatchConfig, LoraConfig
from cotenant.core.errors import CotenantError, InvalidInputError
from cotenant.core.plan import BatchShape, RequestView
from cotenant.core.request import AdapterRef, Request, SequenceOutput
from cotenant.device import Device, create_device
from cotenant.engine.adapter_desk import AdapterDesk
from cotenant.engine.adapters import AdapterCache
from cotenant.engine.admission import check_request
from cotenant.engine.assemble import assemble, send
from cotenant.engine.batcher import BatchPlan, Limits, plan_batch
from cotenant.engine.block_table import BlockTables
from cotenant.engine.flight import Collected, Iterated, OnlineStep, RanLayers
from cotenant.engine.flights import Flights
from cotenant.engine.kv_cache import KvCache
from cotenant.engine.live import LiveSequences
from cotenant.engine.outputs import advance
from cotenant.engine.runner import create_runner
from cotenant.engine.sampler import Sampler
from cotenant.engine.sampling_state import SamplingState
from cotenant.engine.sequence import Sequence
from cotenant.models.batch import Batch
from cotenant.models.decoder import Decoder
from cotenant.models.lora import LoraAdapter
from cotenant.models.paged_attention import cache_head_dim

logger = logging.getLogger(__name__)

# What one iteration moves at most while the cache grows or shrinks: a GiB takes the host 2 to 3 ms, longer while others
# call the driver too, and no step shall be 5 ms late for it.
_RESIZE_BYTES = 1 << 28
_MOMENT_S = 0.0005


class OnlineEngine:
    """Generates for all live requests together.

    ``max_model_len`` is cut to what ``num_pages`` can hold, so that every sequence that is taken fits when it is alone.
    ``clock`` is the one that ``Request.arrival_s`` is on. ``max_pages``: what the cache may grow to.
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
        device: Device | None = None,
        max_pages: int | None = None,
        enable_prefix_caching: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        spec = decoder.spec
        device = device or create_device(decoder.device.type)
        self.max_model_len = min(max_model_len, num_pages * page_tokens)
        self._decoder = decoder
        batch_config = batch_config.resolved(decoder.device.type)
        self._limits = Limits(
            batch_config.max_num_seqs, batch_config.max_num_batched_tokens, lora_config.max_loras, page_tokens
        )
        self._max_num_batched_tokens = batch_config.max_num_batched_tokens
        self._eos_token_ids = frozenset(token for token in eos_token_ids if 0 <= token < spec.vocab_size)
        self._clock = clock
        head_dim = cache_head_dim(spec, decoder.device, decoder.dtype)
        self._cache = KvCache(spec, decoder.dtype, device, page_tokens, num_pages, max_pages, head_dim=head_dim)
        self._resizing = False
        self._tables = BlockTables(
            self._limits.max_num_seqs, self._limits.num_pages(self.max_model_len), self._limits.page_tokens
        )
        self._sampler = Sampler(self._limits.max_num_seqs, spec.vocab_size, decoder.device)
        adapters = AdapterCache(
            spec, decoder.device, decoder.dtype, lora_config, use_stacks=decoder.device.type == "cuda"
        )
        self._adapters = AdapterDesk(adapters)
        self._runner = create_runner(
            decoder, self._cache.tensor, self._sampler, adapters.stacks, self._limits, self.max_model_len
        )
        self._flights = Flights(decoder, self._runner, self._sampler)
        self._live = LiveSequences(
            self._cache, self._tables, self._sampler, self._adapters, clock, enable_prefix_caching=enable_prefix_caching
        )
        self._failures: list[tuple[str, CotenantError]] = []
        self._put_off: frozenset[str] = frozenset()
        self._plan: BatchPlan | None = None  # what schedule() would do, until something changes
        self._step: OnlineStep | None = None
        self._num_added = 0

    # What the worker looks at.

    @property
    def kv_cache(self) -> torch.Tensor:
        """[max_pages, layers, 2, page_tokens, kv_heads, width]; a row is read only by sequences that own its
        page."""
        return self._cache.tensor

    @property
    def num_pages(self) -> int:
        return self._cache.num_pages

    @property
    def has_work(self) -> bool:
        return len(self._live) > 0 or len(self._flights) > 0

    @property
    def num_in_flight(self) -> int:
        """Batches that were launched and not collected."""
        return len(self._flights)

    @property
    def has_landed(self) -> bool:
        """Whether ``collect`` would not wait."""
        return self._flights.has_landed

    @property
    def num_running(self) -> int:
        return len(self._live.running)

    @property
    def num_waiting(self) -> int:
        return len(self._live.waiting)

    @property
    def num_preemptions(self) -> int:
        return self._live.num_preemptions

    @property
    def num_queried_tokens(self) -> int:
        """Tokens of prompts that were looked up in the cache as they were admitted; a preempted one's not again."""
        return self._live.num_queried_tokens

    @property
    def num_hit_tokens(self) -> int:
        """Those of ``num_queried_tokens`` that were found in the cache."""
        return self._live.num_hit_tokens

    @property
    def kv_cache_usage(self) -> float:
        """Share of pages in use, 0 to 1."""
        return self._cache.pool.num_used / self._cache.pool.num_pages

    def has_blank_pages(self, num_sequences: int, length: int) -> bool:
        """Whether so many sequences of this length would take no page whose content is known."""
        return num_sequences * self._limits.num_pages(length) <= self._cache.pool.num_blank

    def views(self) -> tuple[RequestView, ...]:
        """All live requests in the order in which they are served."""
        return self._live.views()

    def decodes(self) -> BatchShape:
        """Of the next batch what decodes, without planning it; fewer if pages run out."""
        return self._live.decodes()

    def next_shape(self) -> BatchShape:
        """The shape of the batch that ``schedule`` would return now. Changes nothing."""
        self._look_for_adapters()
        return self._next_plan().shape

    @property
    def num_ending(self) -> int:
        """Prompts that would end with the batch of ``next_shape``."""
        return self._next_plan().num_ending

    def limit_tokens(self, num_tokens: int) -> None:
        """Let batches have at most so many tokens from now on, and never more than ``max_num_batched_tokens``."""
        num_tokens = min(num_tokens, self._max_num_batched_tokens)
        if num_tokens != self._limits.max_num_batched_tokens:
            self._limits = replace(self._limits, max_num_batched_tokens=num_tokens)
            self._plan = None

    def put_off(self, request_ids: frozenset[str]) -> None:
        """From now on, let the prompts of these requests come behind the others of their class."""
        if request_ids != self._put_off:
            self._put_off = request_ids
            self._plan = None

    @property
    def max_num_batched_tokens(self) -> int:
        return self._max_num_batched_tokens

    @property
    def max_num_seqs(self) -> int:
        return self._limits.max_num_seqs

    def take_failures(self) -> list[tuple[str, CotenantError]]:
        """Requests that ended because their adapter could not be read, each with the reason."""
        failures, self._failures = self._failures, []
        return failures

    def warm_up(
        self, graph_sizes: tuple[int, ...] = (), lanes: tuple[int, ...] = (), *, enforce_eager: bool = False
    ) -> None:
        """Compile and capture what can be before the first request. Called once, on the online lane. ``lanes``: how
        many SMs each of the other lanes has that batches will be launched on."""
        self._runner.warm_up(
            graph_sizes, lanes, lambda: self._sampler.warm_up(self._decoder.dtype), enforce_eager=enforce_eager
        )

    def capture_lane(self, num_sms: int, *, with_prompts: bool) -> bool:
        """Capture decode steps again for the lane that is current, which has so many SMs, and ``with_prompts`` batches
        with prompts: one size at a time; True when there is none left. Called after ``warm_up``, with nothing in flight
        on the device. Without this, batches that are launched in a partition run on all SMs, or operation by
        operation."""
        return self._runner.capture_lane(num_sms, with_prompts=with_prompts)

    def drop_lanes(self) -> None:
        """Forget what ``capture_lane`` has captured; nothing of it is in flight."""
        self._runner.drop_lanes()

    def compile_the_rest(self) -> None:
        """Begin to compile in the background what serving is faster with and can do without."""
        self._runner.compile_the_rest()

    def forget_counts(self) -> None:
        """Begin to count prompt tokens and preemptions anew."""
        self._live.num_preemptions = self._live.num_queried_tokens = self._live.num_hit_tokens = 0

    def wait_for_kernels(self) -> None:
        """Block until nothing more is compiled in the background; for measurements."""
        self._runner.wait_for_kernels()

    # Requests and adapters.

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidInputError if it can never run; nothing else is disturbed then.

        Whether its adapter is one is known later: see ``take_failures``.
        """
        if self._live.get(request.request_id) is not None:
            raise InvalidInputError(f"request id '{request.request_id}' is in use", param="request_id")
        check_request(request, self._decoder.spec.vocab_size, self.max_model_len)
        sequence = Sequence(
            request=request,
            number=self._num_added,
            max_length=self.max_model_len,
            sampling_state=SamplingState(request.sampling, self._eos_token_ids),
            tokens=list(request.prompt),
        )
        self._num_added += 1
        if request.adapter is not None:
            self._want(request.adapter)
        self._live.add(sequence)
        self._plan = None

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget these requests and free their pages; ids that are not live are ignored.

        A batch in flight may still write to their pages: whoever gets them next is launched behind it.
        """
        for request_id in request_ids:
            sequence = self._live.get(request_id)
            if sequence is not None:
                self._leave(sequence)
                self.discard()

    def register_adapter(self, ref: AdapterRef, adapter: LoraAdapter) -> None:
        """Serve a frozen copy of ``adapter`` as ``ref`` without reading it from disk."""
        self._adapters.register(ref, adapter)
        self._plan = None

    def wait_for_adapters(self, refs: Iterable[AdapterRef]) -> None:
        """Block until adapters that were registered or asked for have been read, for measurements. Raises
        InvalidInputError for one that cannot be."""
        self._adapters.wait(refs)

    def load_adapter(self, ref: AdapterRef) -> None:
        """Read an adapter that may have changed on disk. Until ``take_loaded`` says that it is there, the one before of
        its name serves."""
        self._adapters.load(ref)

    def take_loaded(self) -> list[tuple[AdapterRef, InvalidInputError | None]]:
        """Put in place what ``load_adapter`` asked for and was read since the last call: each adapter with None, or
        with the reason why the one before goes on serving. Requests that have begun keep theirs until they end, and so
        do those that wait for one of another folder, if it is in host memory or being read."""
        loaded = self._adapters.take_loaded(self._before_replacing)
        if any(error is None for _, error in loaded):
            self._plan = None
        return loaded

    def drop_adapter(self, ref: AdapterRef) -> None:
        """Forget this adapter, and no other of its name. Requests that run on it keep it until they end, and those that
        wait for it, if it is in host memory or being read. If ``load_adapter`` has asked for it, it fails."""
        self._live.hold_waiting(lambda other: other == ref)
        self._adapters.drop(ref)
        self._plan = None

    def _want(self, ref: AdapterRef) -> None:
        """Have an adapter read for a request that has come. Of a reading that failed before, who waited for it hears:
        the folder may have been mended since."""
        if self._adapters.cache.has_failed(ref):
            self._live.hold_waiting(lambda other: other == ref)
            self._adapters.cache.set_apart(ref)
        self._adapters.want(ref)

    def _before_replacing(self, ref: AdapterRef) -> None:
        self._live.hold_waiting(lambda other: other.name == ref.name and other != ref)

    def _look_for_adapters(self) -> None:
        """Have the adapters read that waiting sequences want; end the requests of those that cannot be."""
        failures, has_changed = self._adapters.look(self._live.waiting)
        if has_changed:
            self._plan = None
        for sequence in list(self._live.waiting) if failures else ():
            if sequence.adapter_ref in failures:
                self._fail(sequence, failures[sequence.adapter_ref])

    def _fail(self, sequence: Sequence, error: InvalidInputError) -> None:
        logger.warning("request %s: %s", sequence.request.request_id, error)
        self._failures.append((sequence.request.request_id, error))
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self._live.remove(sequence)
        self._plan = None

    # The cache's size.

    def resize(self, num_pages: int) -> None:
        """Let the cache grow or shrink to about ``num_pages``, by whole chunks, a part of the way at each ``schedule``.

        When the device runs out of memory on the way, the cache stays at what it has and the rest is given up, which
        the log says; ``is_resizing`` is then False and ``num_pages`` tells how far it came.
        Raises InvalidInputError for less than one sequence of full length needs, or more than was reserved.
        """
        least = self._limits.num_pages(self.max_model_len)
        if not least <= num_pages <= self._cache.max_pages:
            raise InvalidInputError(
                f"the KV cache can have from {least} to {self._cache.max_pages} pages, not {num_pages}"
            )
        self._cache.resize(num_pages)
        self._resizing = True

    @property
    def is_resizing(self) -> bool:
        return self._resizing

    # One iteration.

    def iterate(self, num_ahead: int = 0) -> Iterated:
        """What the worker does in an iteration without best-effort work, for measurements and tests: launch the next
        batch, and collect until ``num_ahead`` batches are in flight, or all if there was none to launch. What waits for
        an adapter is given a moment."""
        step = self.schedule()
        if step is not None:
            self.launch(step)
        elif self.num_in_flight == 0:
            time.sleep(_MOMENT_S)  # the thread that loads it needs the interpreter
        collected = []
        while self.num_in_flight > (num_ahead if step is not None else 0):
            collected.append(self.collect())
        return Iterated(step, collected)

    def step(self) -> list[SequenceOutput]:
        """An iteration that launches nothing ahead: what it put out."""
        return self.iterate().outputs

    def schedule(self) -> OnlineStep | None:
        """The next batch, with pages for all its tokens; None when there is nothing to launch now."""
        self.discard()
        if self._resizing:
            self._resizing = not self._live.resize_a_little(_RESIZE_BYTES)
            self._plan = None
        self._look_for_adapters()
        plan, self._plan = self._next_plan(), None
        self._live.apply(plan)
        if not plan.decodes and not plan.chunks:
            return None
        self._step = OnlineStep(assemble(plan, self._tables), plan.shape)
        return self._step

    def discard(self) -> None:
        """Give up the step that is scheduled and not launched, if there is one: its work will be scheduled again."""
        self._step = None
        self._flights.discard()

    def _next_plan(self) -> BatchPlan:
        if self._plan is None:
            self._plan = plan_batch(
                self._live.running,
                self._live.waiting,
                self._cache.pool,
                self._limits,
                ready=self._adapters.cache.is_ready,
                match=self._live.match,
                put_off=self._put_off,
            )
        return self._plan

    def batch_of(self, step: OnlineStep) -> Batch:
        """The step's batch on the device, for a caller that runs the layers itself."""
        return send(step.host, self._decoder.device, self._sampler.last_tokens)

    @torch.inference_mode()
    def launch(self, step: OnlineStep, ran: RanLayers | None = None, behind: torch.cuda.Event | None = None) -> None:
        """Put the batch on the device, and behind it the choice of the next tokens.

        ``ran``: if the caller has run all layers itself. ``behind``: when the device gets to the batch, if it has other
        work than batches to do before. After torch.OutOfMemoryError it may be called again with the same arguments:
        what has read or changed the tokens on the device is not done twice.
        """
        assert step is self._step, "a step is launched once, and before the next one is scheduled"
        self._flights.launch(step, ran, behind)
        self._step = self._plan = None

    @torch.inference_mode()
    def collect(self) -> Collected:
        """Wait for the oldest batch in flight and update its sequences.

        A request whose numbers are not finite ends with ``FinishReason.ABORT``; the others are not touched by it.
        """
        flight = self._flights.take_oldest()
        results = flight.results()
        self._plan = None
        now_s = self._clock()  # of the tokens: they are here
        outputs: list[SequenceOutput] = []
        for entry, token_id, logprobs in results:
            if not entry.sequence.has_left:
                outputs += advance(self._live, entry, token_id, logprobs, now_s)
        shape, begun_s = flight.step.shape, flight.interval.begun_s
        took_ms, gap_ms = flight.device_ms(), flight.gap_ms()
        return Collected(outputs, shape, took_ms, gap_ms, flight.overtook, flight.waited, begun_s)

    def check_integrity(self) -> None:
        """Raise AssertionError if pages, sequences and block tables disagree."""
        for _ in self.integrity_checks():
            pass

    def integrity_checks(self) -> Iterator[None]:
        """``check_integrity`` in parts of a moment each; nothing may change until it has ended. The first takes no
        longer the more pages there are, the others are of them."""
        self._live.check_integrity()
        yield
        yield from self._cache.integrity_checks()
