"""Requests for adapters, run to some point: what they said, and what became of them."""

from __future__ import annotations

import time
from collections.abc import Callable

from cotenant.core.errors import InvalidInputError
from cotenant.core.request import AdapterRef, SequenceOutput


def until(engine, done: Callable[[], bool], most_steps: int | None = None) -> list[SequenceOutput]:
    """Step until ``done``: a step gives nothing while all that waits for is being read. After ``most_steps``, just
    wait."""
    outputs: list[SequenceOutput] = []
    for turn in range(60_000):
        if done():
            return outputs
        if most_steps is None or turn < most_steps:
            outputs += engine.step()
            engine.check_integrity()
        time.sleep(0.001)
    raise AssertionError("it did not come to pass")


def run(small, engine, requests=()) -> dict[str, list[SequenceOutput]]:
    for request in requests:
        engine.add(request)
    outputs: dict[str, list[SequenceOutput]] = {}
    for output in until(engine, lambda: not engine.has_work):
        outputs.setdefault(output.request_id, []).append(output)
    return outputs


def warm(small, engine, refs: list[AdapterRef]) -> None:
    """Bring adapters into host memory."""
    run(small, engine, [small.request(small.prompt(3), 1, adapter=ref) for ref in refs])


def alone(small, prompt: tuple[int, ...], adapter: AdapterRef | None, num_tokens: int) -> list[int]:
    (outputs,) = run(small, small.engine(), [small.request(prompt, num_tokens, adapter=adapter)]).values()
    return small.tokens(outputs)


def fails(small, engine, prompt: tuple[int, ...], ref: AdapterRef) -> bool:
    """Whether a request for the adapter ends because there is no such adapter."""
    request = small.request(prompt, 2, adapter=ref)
    engine.add(request)
    failures: list[str] = []

    def told() -> bool:
        failures.extend(request_id for request_id, _ in engine.take_failures())
        return bool(failures)

    until(engine, told)
    return failures == [request.request_id]


def load(engine, ref: AdapterRef) -> tuple[InvalidInputError | None, list[SequenceOutput]]:
    """Why the adapter could not be read, and what was put out meanwhile: a few tokens, however slow the disk is."""
    told: list[tuple[AdapterRef, InvalidInputError | None]] = []

    def is_told() -> bool:
        told.extend(engine.take_loaded())
        return bool(told)

    engine.load_adapter(ref)
    outputs = until(engine, is_told, most_steps=5)
    ((loaded, error),) = told
    assert loaded == ref
    return error, outputs
