"""What is sent and when."""

from __future__ import annotations

import json
import math
import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.bench.generator import split
from cotenant.bench.schedule import PlannedRequest, PromptMaker, from_trace, request_body, synthetic
from cotenant.bench.traces import Trace, TraceRequest
from cotenant.core.errors import InvalidInputError


def arrivals(count: int, rate: float, burstiness: float, seed: int = 0) -> list[float]:
    planned = synthetic(count, rate, burstiness, input_len=5, output_len=3, models=["m"], seed=seed)
    return [one.due_s for one in planned]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_gamma_distributed_at_the_rate_that_was_asked_for(burstiness: float) -> None:
    times = arrivals(20_000, 50.0, burstiness)
    assert times == arrivals(20_000, 50.0, burstiness) != arrivals(20_000, 50.0, burstiness, seed=1)
    assert times[-1] == pytest.approx(400.0)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    variation = statistics.pstdev(gaps) / statistics.mean(gaps)
    assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_infinite_burstiness_is_even_and_an_infinite_rate_is_all_at_once() -> None:
    assert arrivals(4, 2.0, math.inf) == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert arrivals(3, math.inf, 1.0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("count", "burstiness"), [(4, 1e-5), (1000, 1e-9), (1, 1e-300)])
def test_a_burstiness_that_leaves_no_gaps_is_refused(count: int, burstiness: float) -> None:
    with pytest.raises(InvalidInputError, match="is too small") as caught:
        arrivals(count, 2.0, burstiness)
    assert f"--burstiness {burstiness:g}" in caught.value.message
    assert arrivals(count, 2.0, 0.01)[-1] == pytest.approx(count / 2)


def test_a_trace_is_replayed_faster_with_its_own_lengths() -> None:
    trace = Trace("mooncake", [TraceRequest(0.0, 7, 3), TraceRequest(10.0, 600, 4, (8, 9))])
    planned = from_trace(trace, 4.0, ["a", "b"], seed=0)
    assert [(one.due_s, one.input_len, one.output_len, one.hash_ids) for one in planned] == [
        (0.0, 7, 3, ()),
        (2.5, 600, 4, (8, 9)),
    ]
    many = from_trace(Trace("azure", [TraceRequest(0.0, 1, 1)] * 300), 1.0, ["a", "b", "c"], seed=0)
    assert {one.model for one in many} == {"a", "b", "c"}


def planned(index: int, input_len: int, *hash_ids: int) -> PlannedRequest:
    return PlannedRequest(index, 0.0, input_len, 3, "m", hash_ids)


@given(
    st.integers(1, 3000),
    st.lists(st.integers(0, 2**64), max_size=5),
    st.integers(2, 200_000),
    st.integers(0, 2**32),
)
def test_prompts_have_their_exact_length_and_ids_of_the_vocabulary(
    input_len: int, hash_ids: list[int], vocab_size: int, seed: int
) -> None:
    prompt = PromptMaker(vocab_size, seed, nonce=1).make(planned(0, input_len, *hash_ids))
    assert len(prompt) == input_len
    assert min(prompt) >= min(100, vocab_size // 2)
    assert max(prompt) < vocab_size


def test_equal_hash_ids_are_equal_blocks_and_nothing_else_is_shared() -> None:
    maker = PromptMaker(1100, 0, nonce=1)
    first = maker.make(planned(0, 1500, 7, 8, 9))
    second = maker.make(planned(1, 1536, 7, 8, 10))
    assert first[:1024] == second[:1024]
    assert first[1024:1100] != second[1024:1100]
    plain = [maker.make(planned(index, 100)) for index in range(2)]
    assert plain[0] != plain[1]


def test_the_same_seed_gives_the_same_prompts_but_not_in_another_run() -> None:
    def make(seed: int, nonce: int, *hash_ids: int) -> list[int]:
        return PromptMaker(1100, seed, nonce).make(planned(3, 200, *hash_ids))

    assert make(0, 1) == make(0, 1)
    assert make(0, 1) != make(0, 2) != make(1, 1)
    assert make(0, 1, 5) != make(0, 2, 5)


def test_the_body_asks_for_exactly_so_many_tokens() -> None:
    body = json.loads(request_body(planned(0, 2), [101, 102]))
    assert body["prompt"] == [101, 102]
    assert (body["max_tokens"], body["ignore_eos"], body["temperature"]) == (3, True, 0)
    assert body["stream_options"] == {"include_usage": True}


@given(st.integers(0, 50), st.integers(1, 8))
def test_processes_share_the_schedule_without_loss(count: int, num_parts: int) -> None:
    requests = [planned(index, 1) for index in range(count)]
    parts = split(requests, num_parts)
    assert sorted(one.index for part in parts for one in part) == list(range(count))
    assert all(part == sorted(part, key=lambda one: one.index) for part in parts)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
