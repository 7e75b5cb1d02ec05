"""From the worker's tokens to pieces of text: one choice, several side by side, streamed or collected."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from cotenant.api.schemas.sampling import for_choice
from cotenant.core.errors import INVALID_ADAPTER, CotenantError, OverloadedError, WorkerLostError
from cotenant.core.request import AdapterRef, FinishReason, Request, SamplingParams, SequenceOutput, TokenLogprobs
from cotenant.text.detokenizer import IncrementalDetokenizer
from cotenant.text.stop import StopChecker
from cotenant.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from cotenant.api.metrics import RequestClock
    from cotenant.api.state import AppState

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A request that nobody has seen a token of is run again when the worker dies, but not for ever: it may be the reason.
MAX_COLLECT_RUNS = 2


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How tokens become text. ``continues_prompt``: the text goes on where the prompt's ends (not in a chat)."""

    stop_strings: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    continues_prompt: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """One sequence of an HTTP request."""

    request: Request
    options: TextOptions


def make_choices(
    answer_id: str,
    prompt: Sequence[int],
    sampling: SamplingParams,
    num_choices: int,
    *,
    options: TextOptions,
    adapter: AdapterRef | None,
    priority: int,
    cache_salt: str,
    arrival_s: float,
    first_index: int = 0,
) -> list[Choice]:
    """``num_choices`` sequences that answer the same prompt, each with a seed of its own if one was given."""
    return [
        Choice(
            Request(
                request_id=f"{answer_id}-{first_index + number}",
                prompt=tuple(prompt),
                sampling=for_choice(sampling, number),
                arrival_s=arrival_s,
                adapter=adapter,
                priority=priority,
                cache_salt=cache_salt,
            ),
            options,
        )
        for number in range(num_choices)
    ]


class Piece(msgspec.Struct, frozen=True):
    """What one output of the worker adds to a choice.

    ``logprobs`` has an entry per token if they were asked for, and ``offsets`` the number of generated characters
    before each of them. The first piece has ``num_cached_tokens``, those of the prompt that the KV cache held. The last
    piece has a ``finish_reason``; ``stop_reason`` is the stop string or the stop token's id that ended it, None for the
    model's own end. A struct, because there is one per token and it is made faster.
    """

    text: str
    num_tokens: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    offsets: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int | None = None


class ChoiceText:
    """The text of one growing sequence, with its stop strings cut off."""

    def __init__(self, tokenizer: Tokenizer, request: Request, options: TextOptions) -> None:
        self._request = request
        self._options = options
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            skip_special_tokens=options.skip_special_tokens,
            prompt_ids=request.prompt if options.continues_prompt else (),
        )
        self._stop = StopChecker(options.stop_strings) if options.stop_strings else None
        # Tokens to come that no stop string may end in.
        self._num_spared = request.sampling.min_tokens if options.stop_strings else 0
        self._num_characters = 0

    def add(self, output: SequenceOutput) -> Piece:
        """Take the worker's next output."""
        if self._stop is None and output.finish_reason is None and not output.logprobs:
            text = self._detokenizer.add(output.token_ids)
            return Piece(
                text,
                len(output.token_ids),
                prompt_logprobs=output.prompt_logprobs,
                num_cached_tokens=output.num_cached_tokens,
            )
        shown = output.token_ids
        by_token = output.finish_reason is FinishReason.STOP
        if by_token and not self._options.include_stop:
            shown = shown[:-1]  # the token that says stop is the last one, and no text
        spared = ""
        offsets: tuple[int, ...] = ()
        if self._num_spared:
            first, shown = shown[: self._num_spared], shown[self._num_spared :]
            self._num_spared -= len(first)
            spared, offsets = self._decode(first, with_offsets=bool(output.logprobs))
        text, more_offsets = self._decode(shown, with_offsets=bool(output.logprobs))
        if output.finish_reason is not None:
            text += self._detokenizer.flush()
        offsets += more_offsets
        offsets += (self._num_characters,) * (len(output.logprobs) - len(offsets))
        text = self._cut(spared, text, is_last=output.finish_reason is not None)
        reason, stop_reason = self._end_of(output)
        return Piece(
            text,
            len(output.token_ids),
            output.logprobs,
            offsets,
            output.prompt_logprobs,
            reason,
            stop_reason,
            output.num_cached_tokens,
        )

    def _decode(self, token_ids: tuple[int, ...], with_offsets: bool) -> tuple[str, tuple[int, ...]]:
        if not with_offsets:
            return self._detokenizer.add(token_ids), ()
        texts: list[str] = []
        offsets: list[int] = []
        for token_id in token_ids:
            offsets.append(self._num_characters)
            texts.append(self._detokenizer.add((token_id,)))
            self._num_characters += len(texts[-1])
        return "".join(texts), tuple(offsets)

    def _cut(self, spared: str, text: str, is_last: bool) -> str:
        """What is safe to emit of both, of which the first stops nothing."""
        if self._stop is None:
            return text
        emitted = self._stop.feed(spared, may_stop=False)[0] if spared else ""
        more, stopped = self._stop.feed(text, may_stop=self._num_spared == 0)
        emitted += more
        if stopped and self._options.include_stop:
            return emitted + (self._stop.matched or "")
        return emitted + self._stop.flush() if is_last and not stopped else emitted

    def _end_of(self, output: SequenceOutput) -> tuple[str | None, str | int | None]:
        if self._stop is not None and self._stop.matched is not None:
            return FinishReason.STOP.value, self._stop.matched
        if output.finish_reason is None:
            return None, None
        is_asked_for = output.stop_token_id in self._request.sampling.stop_token_ids
        return output.finish_reason.value, output.stop_token_id if is_asked_for else None


async def stream_choice(
    state: AppState,
    choice: Choice,
    index: int = 0,
    shared_clock: RequestClock | None = None,
    *,
    is_collected: bool = False,
) -> AsyncGenerator[tuple[int, Piece], None]:
    """The pieces of one choice as they come, each with the choice's index. Closing the generator, or a stop string,
    frees the sequence at once. ``shared_clock``: of a choice that may be run again, whose end the caller counts.
    ``is_collected``: it is if the worker dies.

    Raises what ``WorkerClient.generate`` raises, before the first piece unless the worker dies in between.
    """
    clock = state.metrics.clock(choice.request.arrival_s) if shared_clock is None else shared_clock
    text = ChoiceText(state.tokenizer, choice.request, choice.options)
    is_first = True
    try:
        async with aclosing(state.worker.generate(choice.request, is_collected=is_collected)) as outputs:
            async for output in outputs:
                if output.finish_reason is FinishReason.ABORT:
                    raise _not_a_number(choice.request.adapter)
                clock.tokens(len(output.token_ids))
                if is_first:
                    is_first = False
                    clock.begin(len(choice.request.prompt), output.queue_s)
                piece = text.add(output)
                if piece.finish_reason is None:
                    yield index, piece
                    continue
                clock.reason = piece.finish_reason
                clock.finish()
                yield index, piece
                return
    except OverloadedError:
        clock.reason = "error" if clock.has_begun else None
        raise
    except Exception as error:
        clock.reason = "error"
        if isinstance(error, CotenantError) and error.code == INVALID_ADAPTER and choice.request.adapter is not None:
            await state.models.check_served(choice.request.adapter)
        raise
    finally:
        if shared_clock is None:
            clock.count_end()


def _not_a_number(adapter: AdapterRef | None) -> CotenantError:
    whose = "The model's output" if adapter is None else f"The output of the adapter '{adapter.name}'"
    return CotenantError(f"{whose} for this request is not a number.", code="model_failed")


def stream_choices(state: AppState, choices: Sequence[Choice]) -> AsyncGenerator[tuple[int, Piece], None]:
    """The pieces of all choices as they come, each with its choice's index. The first error ends them all."""
    return stream_choice(state, choices[0]) if len(choices) == 1 else _stream_several(state, choices)


def next_piece_is_here(state: AppState, choices: Sequence[Choice]) -> bool:
    """Whether ``stream_choices`` has another piece without waiting. Never said of several choices."""
    return len(choices) == 1 and state.worker.has_results(choices[0].request.request_id)


async def _stream_several(state: AppState, choices: Sequence[Choice]) -> AsyncGenerator[tuple[int, Piece], None]:
    queue: asyncio.Queue[tuple[int, Piece] | Exception | None] = asyncio.Queue()

    async def pump(index: int, choice: Choice) -> None:
        try:
            async with aclosing(stream_choice(state, choice, index)) as pieces:
                async for item in pieces:
                    queue.put_nowait(item)
            queue.put_nowait(None)
        except Exception as error:  # handed to the consumer, who raises it
            queue.put_nowait(error)

    pumps = [asyncio.create_task(pump(index, choice)) for index, choice in enumerate(choices)]
    try:
        num_left = len(choices)
        while num_left:
            item = await queue.get()
            if item is None:
                num_left -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        await _cancel(pumps)


async def collect_choice(state: AppState, choice: Choice) -> list[Piece]:
    """All pieces of one choice, for a client that sees nothing before the end: run again if the worker dies.

    Not if it died before the first piece: then the worker's client has run the request often enough.
    """
    clock = state.metrics.clock(choice.request.arrival_s)
    try:
        return await _collect(state, choice, clock)
    finally:
        clock.count_end()


async def _collect(state: AppState, choice: Choice, clock: RequestClock) -> list[Piece]:
    for run in range(1, MAX_COLLECT_RUNS + 1):
        collected: list[Piece] = []
        again = run < MAX_COLLECT_RUNS
        try:
            async with aclosing(stream_choice(state, choice, shared_clock=clock, is_collected=again)) as pieces:
                async for _, piece in pieces:
                    collected.append(piece)
            return collected
        except WorkerLostError as error:
            if not collected or state.worker.failed is not None:
                raise
            if not again:
                tried = f"The request was begun {run} times and is not run again."
                raise WorkerLostError(f"{error.message} {tried}", code=error.code) from error
            logger.debug("%s: the worker died, running the request again", choice.request.request_id)
            clock.begin_again()
            choice = replace(choice, request=replace(choice.request, request_id=f"{choice.request.request_id}-again"))
    raise AssertionError("unreachable")


async def collect_choices(state: AppState, choices: Sequence[Choice]) -> list[list[Piece]]:
    """All pieces of each choice. The first error ends them all."""
    if len(choices) == 1:
        return [await collect_choice(state, choices[0])]
    return await _gather([collect_choice(state, choice) for choice in choices])


async def _gather(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    tasks = [asyncio.create_task(item) for item in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _cancel(tasks)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
