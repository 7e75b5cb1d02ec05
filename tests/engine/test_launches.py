"""Batches one by one: what is planned, lost, launched ahead or again, and what is told of their time."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from cotenant.core.plan import BatchShape
from cotenant.device.readback import Interval, Readback
from cotenant.engine import flight
from engine.launches import run_ahead


def test_a_first_token_came_when_it_was_there(small, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the host began to wait for it: policies count slack from then on."""
    now_s = itertools.count()
    engine = small.engine(clock=lambda: float(next(now_s)))
    wait, landed_s = Readback.wait, []

    def land(readback: Readback) -> list[torch.Tensor]:
        landed_s.append(float(next(now_s)))
        return wait(readback)

    monkeypatch.setattr(Readback, "wait", land)
    engine.add(small.request(small.prompt(9), max_tokens=4))
    engine.step()
    first_s = engine.views()[0].first_token_s
    assert first_s is not None
    assert first_s > landed_s[-1]


def test_abort_while_the_batch_is_in_flight(small) -> None:
    engine = small.engine()
    gone, kept, late = (small.request(small.prompt(9, seed), 5) for seed in range(3))
    engine.add(gone)
    engine.add(kept)
    engine.launch(engine.schedule())
    used = engine.kv_cache_usage
    engine.abort([gone.request_id])
    engine.add(late)
    engine.check_integrity()
    assert engine.kv_cache_usage == used / 2
    engine.launch(engine.schedule())  # may take its pages: behind the batch that used them
    outputs = engine.collect().outputs
    assert [output.request_id for output in outputs] == [kept.request_id]
    outputs += engine.collect().outputs
    rest = small.run(engine, [small.request(gone.prompt, 5, request_id=gone.request_id)])
    early = [output for output in outputs if output.request_id == late.request_id]
    assert small.tokens(early + rest[late.request_id]) == small.greedy(late.prompt, 5)
    assert small.tokens(rest[gone.request_id]) == small.greedy(gone.prompt, 5)


def test_a_step_that_is_never_launched_changes_nothing(small) -> None:
    engine = small.engine(max_num_batched_tokens=8)
    request = small.request(small.prompt(21), 6)
    engine.add(request)
    outputs = []
    while engine.has_work:
        lost = engine.schedule()
        engine.check_integrity()
        assert engine.next_shape() == lost.shape
        step = engine.schedule()
        assert step.shape == lost.shape
        engine.next_shape()  # may be asked at any time
        with pytest.raises(AssertionError):
            engine.launch(lost)
        engine.launch(step)
        outputs += engine.collect().outputs
    assert small.tokens(outputs) == small.greedy(request.prompt, 6)


def test_pages_of_a_lost_step_are_free_for_the_next(small) -> None:
    engine = small.engine(num_pages=4, page_tokens=4)
    engine.add(small.request(small.prompt(13), 3, request_id="gone"))
    assert engine.schedule() is not None
    engine.abort(["gone"])
    late = small.request(small.prompt(14), 2)
    engine.add(late)
    engine.next_shape()
    first = engine.step()
    assert first
    assert small.tokens(first + small.run(engine)[late.request_id]) == small.greedy(late.prompt, 2)


def test_each_batch_is_timed_from_the_end_of_what_it_waited_for(small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Interval, "milliseconds", lambda interval, behind=None: {None: 9.0, "its end": 5.0}[behind])
    monkeypatch.setattr(Interval, "overtook", lambda interval, behind: behind == "its end")
    engine = small.engine()
    engine.add(small.request(small.prompt(6), 3))
    for behind, expected_ms in ((None, 9.0), ("its end", 5.0), (None, 9.0)):
        engine.launch(engine.schedule(), behind=behind)
        collected = engine.collect()
        assert (collected.device_ms, collected.overtook) == (expected_ms, behind is not None)


def test_shapes_and_views(small) -> None:
    engine = small.engine(max_num_batched_tokens=12)
    assert engine.schedule() is None
    assert engine.next_shape() == BatchShape()
    first, second = small.request(small.prompt(10), 5), small.request(small.prompt(20), 5)
    engine.add(first)
    assert engine.next_shape() == BatchShape(prefill_tokens=10, prefill_context_tokens=10, prefill_pairs=55)
    engine.step()
    engine.add(second)
    assert engine.next_shape() == BatchShape(
        num_decode=1, context_tokens=11, prefill_tokens=11, prefill_context_tokens=11, prefill_pairs=66
    )
    engine.step()
    assert engine.next_shape() == BatchShape(
        num_decode=1, context_tokens=12, prefill_tokens=9, prefill_context_tokens=20, prefill_pairs=9 * 11 + 45
    )
    views = engine.views()
    assert [(view.request_id, view.num_generated, view.num_prompt_tokens_left) for view in views] == [
        (first.request_id, 2, 0),
        (second.request_id, 0, 9),
    ]
    assert views[0].first_token_s is not None
    assert views[1].first_token_s is None
    assert views[1].arrival_s == second.arrival_s


def test_the_time_in_the_queue_is_reported_once_with_the_first_output(small) -> None:
    now = [100.0]
    engine = small.engine(max_num_seqs=1, clock=lambda: now[0])
    first, second = (replace(small.request(small.prompt(3), max_tokens=3), arrival_s=99.5) for _ in range(2))
    engine.add(first)
    engine.add(second)
    waited: list[tuple[str, float | None]] = []
    while engine.has_work:
        waited += [(output.request_id, output.queue_s) for output in engine.step()]
        now[0] += 1.0
    assert [queue_s for name, queue_s in waited if name == first.request_id] == [0.5, None, None]
    assert [queue_s for name, queue_s in waited if name == second.request_id] == [3.5, None, None]


@pytest.mark.parametrize("num_pages", [200, 14])
def test_batches_that_are_launched_ahead_give_the_same_tokens(small, num_pages) -> None:
    engine = small.engine(num_pages=num_pages, max_num_batched_tokens=16, eos_token_ids=())
    stops = [small.greedy(small.prompt(7 + seed, seed), 9)[4] for seed in range(3)]
    requests = [
        small.request(
            small.prompt(7 + seed % 3, seed % 3), 4 + 3 * seed, stop_token_ids=(stops[seed % 3],) if seed > 5 else ()
        )
        for seed in range(9)
    ]
    outputs = run_ahead(engine, requests, [0, 0, 0, 0, 1, 1, 2, 3, 3])
    assert num_pages > 100 or engine.num_preemptions > 0
    for request in requests:
        expected = small.greedy(request.prompt, request.sampling.max_tokens)
        for stop in request.sampling.stop_token_ids:
            expected = expected[: expected.index(stop) + 1] if stop in expected else expected
        assert small.tokens(outputs[request.request_id]) == expected
        assert sum(output.finish_reason is not None for output in outputs[request.request_id]) == 1
    assert engine.kv_cache_usage == 0


def test_a_prompt_that_generates_nothing_keeps_its_pages_while_it_is_in_flight(small) -> None:
    engine = small.engine(num_pages=12, page_tokens=1, max_model_len=12)
    text = small.request(small.prompt(3), 8)
    engine.add(text)
    engine.step()
    scored = small.request(small.prompt(5), 0, prompt_logprobs=0)
    engine.add(scored)
    for _ in range(4):
        engine.iterate(num_ahead=4)
        engine.check_integrity()
    assert engine.kv_cache_usage == 1.0
    found = small.run(engine)  # the text wants one more page
    assert engine.num_preemptions == 0
    assert len(found[scored.request_id]) == 1
    assert len(found[scored.request_id][0].prompt_logprobs) == 5
    assert small.tokens(found[text.request_id]) == small.greedy(text.prompt, 8)[1:]


def test_seeds_and_penalties_are_the_same_when_batches_are_launched_ahead(small) -> None:
    requests = [
        small.request(
            small.prompt(6, seed),
            12,
            temperature=1.0,
            seed=seed,
            top_p=0.9,
            frequency_penalty=0.7,
            repetition_penalty=1.2,
        )
        for seed in range(4)
    ]
    alone = {}
    for request in requests:
        alone |= small.run(small.engine(), [request])
    ahead = run_ahead(small.engine(max_num_batched_tokens=8), requests, [0, 1, 2, 2])
    for request in requests:
        assert small.tokens(ahead[request.request_id]) == small.tokens(alone[request.request_id])


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_what_will_decode_is_known_before_the_batch_is_planned(small, num_ahead: int) -> None:
    engine = small.engine(max_num_batched_tokens=16)
    waiting = [small.request(small.prompt(3 + 7 * seed, seed), 12 + seed) for seed in range(9)]
    most = 0
    while waiting or engine.has_work:
        if waiting:
            engine.add(waiting.pop())
        decodes = engine.decodes()
        engine.limit_tokens(9 + decodes.context_tokens % 7)
        shape = engine.next_shape()
        assert (decodes.num_decode, decodes.context_tokens) == (shape.num_decode, shape.context_tokens)
        most = max(most, shape.num_decode)
        engine.iterate(num_ahead)
    assert most > 3


@pytest.mark.parametrize("place", ["sampler", "scores"])
def test_a_launch_that_ran_out_of_memory_may_be_repeated(small, monkeypatch, place: str) -> None:
    """Behind a batch in flight too, whose tokens only the device knows; and no token counts twice for penalties."""

    def requests():
        return [
            small.request(small.prompt(7, seed), 12, frequency_penalty=1.5, repetition_penalty=1.3, logprobs=1)
            for seed in range(3)
        ]

    expected = [small.tokens(outputs) for outputs in small.run(small.engine(), requests()).values()]
    engine = small.engine()
    owner, name = (engine._sampler, "plan") if place == "sampler" else (flight, "score")
    wrapped, calls = getattr(owner, name), itertools.count()

    def short_of_memory(*arguments):
        if next(calls) % 2 == 0:
            raise torch.OutOfMemoryError("no memory")
        return wrapped(*arguments)

    monkeypatch.setattr(owner, name, short_of_memory)
    launch = engine.launch

    def launch_twice(step) -> None:
        with pytest.raises(torch.OutOfMemoryError):
            launch(step)
        launch(step)

    monkeypatch.setattr(engine, "launch", launch_twice)
    outputs = run_ahead(engine, requests(), [0, 1, 1])
    assert [small.tokens(one) for one in outputs.values()] == expected
