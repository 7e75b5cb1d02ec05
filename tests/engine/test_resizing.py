"""A cache that grows and shrinks under live sequences, also where more is live than will fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotenant.core.errors import InvalidInputError
from engine.limited_memory import LimitedDevice


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_a_cache_shrinks_although_those_who_make_room_come_again_at_once(num_ahead: int, small) -> None:
    """Some find their prompts in the cache, so they have the pages that they gave up in the next batch."""
    engine = small.engine(num_pages=1600, max_model_len=400)
    requests = [small.request(small.prompt(150, seed), 60) for seed in range(6)]
    requests[3:] = [replace(request, uses_prefix_cache=False) for request in requests[3:]]
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}

    def iterate() -> None:
        for output in engine.iterate(num_ahead).outputs:
            outputs[output.request_id] += output.token_ids
        engine.check_integrity()

    for request in requests:
        engine.add(request)
    while engine.num_running < len(requests):
        iterate()
    for _ in range(5):
        iterate()
    engine.resize(100)
    for _ in range(20):
        iterate()
    assert (engine.is_resizing, engine.num_pages) == (False, 100)
    assert engine.num_preemptions <= len(requests)
    while engine.has_work:
        iterate()
    for request in requests:
        assert outputs[request.request_id] == small.greedy(request.prompt, 60)


def test_the_cache_grows_and_shrinks_under_live_sequences(small) -> None:
    engine = small.engine(num_pages=400, max_model_len=64)
    requests = [small.request(small.prompt(5 + seed, seed), 30) for seed in range(6)]
    for request in requests:
        engine.add(request)
    outputs = {request.request_id: [] for request in requests}
    sizes = iter([100, 400, 16, 200, 20, 400] * 3)
    while engine.has_work:
        if not engine.is_resizing and (size := next(sizes, None)) is not None:
            engine.resize(size)
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.check_integrity()
    for request in requests:
        assert small.tokens(outputs[request.request_id]) == small.greedy(request.prompt, 30)
    with pytest.raises(InvalidInputError, match="pages"):
        engine.resize(3)


def test_a_device_without_memory_for_more_pages_goes_on_with_those_it_has(small, caplog) -> None:
    engine = small.engine(num_pages=20, max_pages=400, max_model_len=64, device=LimitedDevice(num_chunks=4))
    num_pages = engine.num_pages
    requests = [small.request(small.prompt(5 + seed, seed), 30) for seed in range(6)]
    engine.add(requests[0])
    outputs = engine.step()
    engine.resize(400)
    outputs += engine.step()
    assert not engine.is_resizing
    assert engine.num_pages == num_pages
    assert caplog.text.count("does not grow to 400") == 1
    by_id = small.run(engine, requests[1:])
    by_id[requests[0].request_id] = [*outputs, *by_id[requests[0].request_id]]
    for request in requests:
        assert small.tokens(by_id[request.request_id]) == small.greedy(request.prompt, 30)
    assert caplog.text.count("does not grow to 400") == 1
