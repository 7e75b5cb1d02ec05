"""Prompts that begin alike share pages, and what is cached of one is no work."""

from __future__ import annotations

from dataclasses import replace

import pytest


def test_prompts_that_begin_alike_share_pages(small) -> None:
    engine = small.engine(page_tokens=4)
    prompt = small.prompt(18)
    first = small.run(engine, [small.request(prompt, 6)])
    again = small.request((*prompt[:14], *small.prompt(5, 2)), 6)
    scored = small.request(prompt, 3, prompt_logprobs=0)
    outputs = small.run(engine, [again, scored])
    assert engine.num_hit_tokens == 12  # three full pages, and none for the prompt that is scored
    assert small.tokens(outputs[again.request_id]) == small.greedy(again.prompt, 6)
    assert small.tokens(outputs[scored.request_id]) == small.greedy(prompt, 3)
    assert len(outputs[scored.request_id][0].prompt_logprobs) == 18
    assert first


def test_what_is_cached_of_a_waiting_prompt_is_no_work(small) -> None:
    """It is looked up anew as pages come and go; of a running one, what was computed is none either."""
    engine = small.engine(num_pages=16, max_num_seqs=1, max_num_batched_tokens=16)
    prompt = small.prompt(30)  # seven pages and two tokens more
    first, second, own = (small.request(prompt, 2, request_id=name) for name in ("first", "second", "own"))
    engine.add(first)
    engine.add(second)
    engine.add(replace(own, uses_prefix_cache=False))

    def num_left() -> dict[str, int]:
        views = engine.views()
        assert all(view.num_computed == 30 - view.num_prompt_tokens_left for view in views if not view.num_generated)
        return {view.request_id: view.num_prompt_tokens_left for view in views}

    assert num_left() == {"first": 30, "second": 30, "own": 30}
    engine.step()
    assert num_left() == {"first": 14, "second": 14, "own": 30}
    while num_left().get("first") is not None:
        engine.step()
    assert num_left() == {"second": 2, "own": 30}
    pool = engine._cache.pool
    pool.allocate(999, pool.num_free - 6)  # one of the seven is evicted
    assert num_left() == {"second": 6, "own": 30}
    pool.free(999)
    assert small.tokens(small.run(engine)["second"]) == small.greedy(prompt, 2)
    repeated = [small.request(prompt, 2)]
    assert small.tokens(small.run(engine, repeated)[repeated[0].request_id]) == small.greedy(prompt, 2)


@pytest.mark.parametrize("length", [32, 33, 64, 70, 97])
def test_all_that_is_cached_of_a_long_prompt_is_no_work(small, length: int) -> None:
    engine = small.engine(page_tokens=1, num_pages=200)
    small.run(engine, [small.request(small.prompt(length), 1)])
    engine.add(small.request((*small.prompt(length), 1, 2, 3), 1))
    assert engine.views()[0].num_prompt_tokens_left == 3


def test_a_request_may_leave_the_prefix_cache_alone(small) -> None:
    """It finds nothing there, leaves nothing there, and is not counted."""
    engine = small.engine(page_tokens=4)
    prompt = small.prompt(18)
    requests = [small.request(prompt, 6) for _ in range(5)]
    for request, uses_it in zip(requests, [False, True, False, True, True], strict=True):
        outputs = small.run(engine, [replace(request, uses_prefix_cache=uses_it)])
        assert small.tokens(outputs[request.request_id]) == small.greedy(prompt, 6)
    assert engine.num_hit_tokens == 2 * 16
    assert engine.num_queried_tokens == 3 * 18


def test_prompts_count_that_are_looked_up_and_once_each(small) -> None:
    """None is without a cache, nor one that is scored, and what was preempted finds its own pages."""
    prompt = small.prompt(18)
    engine = small.engine(page_tokens=4, enable_prefix_caching=False)
    small.run(engine, [small.request(prompt, 2), small.request(prompt, 2)])
    assert (engine.num_queried_tokens, engine.num_hit_tokens) == (0, 0)
    engine = small.engine(page_tokens=4)
    for scored in (None, 1):
        small.run(engine, [small.request(prompt, 2, prompt_logprobs=scored)])
        assert (engine.num_queried_tokens, engine.num_hit_tokens) == (18, 0)
    engine = small.engine(num_pages=16, page_tokens=4, max_num_seqs=4, max_model_len=60)
    small.run(engine, [small.request(small.prompt(12, seed), 40) for seed in (1, 2)])
    assert engine.num_preemptions > 0
    assert (engine.num_queried_tokens, engine.num_hit_tokens) == (24, 0)


def test_requests_share_pages_with_those_of_the_same_salt(small) -> None:
    engine = small.engine(page_tokens=4)
    prompt = small.prompt(18)
    hits = []
    for salt in ("", "a", "b", "a", "", "b"):
        request = replace(small.request(prompt, 6), cache_salt=salt)
        outputs = small.run(engine, [request])
        assert small.tokens(outputs[request.request_id]) == small.greedy(prompt, 6)
        hits.append(engine.num_hit_tokens)
    assert hits == [0, 0, 0, 16, 32, 48]
