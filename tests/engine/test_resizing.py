"""A cache that shrinks while more is live than will fit."""

from __future__ import annotations

from dataclasses import replace

import pytest


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
