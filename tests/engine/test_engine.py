"""The engine against transformers' greedy generation, and how requests end."""

import itertools
from dataclasses import replace

import pytest
import torch

from cotenant.core.errors import InvalidInputError
from cotenant.core.plan import BatchShape
from cotenant.core.request import FinishReason
from cotenant.device.readback import Interval, Readback
from cotenant.engine import flight
from engine.limited_memory import LimitedDevice


def test_staggered_arrivals_give_the_tokens_of_transformers(small) -> None:
    engine = small.engine(max_num_seqs=4, max_num_batched_tokens=16)
    requests = [small.request(small.prompt(3 + 5 * index), max_tokens=12) for index in range(9)]
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
    pending = list(requests)
    while pending or engine.has_work:
        for request in pending[:1]:
            engine.add(request)
        del pending[:1]
        for _ in range(3):
            for output in engine.step():
                outputs[output.request_id] += output.token_ids
            engine.check_integrity()
    for request in requests:
        assert outputs[request.request_id] == small.greedy(request.prompt, 12)


def test_chunks_of_one_token_are_no_decodes(small) -> None:
    """A back end keeps one plan of attention for a batch's decodes and one for its chunks; and not every chunk
    chooses a token."""
    engine = small.engine()
    requests = [small.request(small.prompt(9, seed), max_tokens=20) for seed in range(3)]
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    for _ in range(4):
        for output in engine.step():
            outputs[output.request_id] += output.token_ids
    cached = small.prompt(9)[:8] + small.prompt(1, seed=3)  # two pages and one token more
    for late in ([small.prompt(1)], [small.prompt(1, seed=1), small.prompt(9)[:8] + small.prompt(1, seed=2)], [cached]):
        requests += [small.request(prompt, max_tokens=20) for prompt in late]
        for request in requests[-len(late) :]:
            outputs[request.request_id] = []
            engine.add(request)
        step = engine.schedule()
        assert [segment.is_decode for segment in step.host.segments] == [True, False]
        assert step.host.segments[1].counts == (1,) * len(late)
        engine.launch(step)
        for output in engine.collect().outputs:
            outputs[output.request_id] += output.token_ids
    for request_id, found in small.run(engine).items():
        outputs[request_id] += small.tokens(found)
    for request in requests:
        assert outputs[request.request_id] == small.greedy(request.prompt, 20)
    engine.add(small.request(small.prompt(1), max_tokens=0))
    engine.add(small.request(small.prompt(1, seed=1), max_tokens=2))
    assert not engine.schedule().host.is_decode


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
@pytest.mark.parametrize("budget", [3, 7, 256])
def test_chunked_prefill(small, page_tokens: int, budget: int) -> None:
    engine = small.engine(page_tokens=page_tokens, max_num_seqs=3, max_num_batched_tokens=budget, num_pages=300)
    requests = [small.request(small.prompt(length), max_tokens=6) for length in (41, 1, 16, 7, 30)]
    outputs = small.run(engine, requests)
    for request in requests:
        assert small.tokens(outputs[request.request_id]) == small.greedy(request.prompt, 6)


def test_preemption_loses_and_repeats_nothing(small) -> None:
    engine = small.engine(num_pages=20, page_tokens=2, max_num_seqs=6, max_num_batched_tokens=12)
    requests = [small.request(small.prompt(4, seed), max_tokens=25) for seed in range(6)]
    outputs = small.run(engine, requests)
    assert engine.num_preemptions > 3
    for request in requests:
        assert all(len(output.token_ids) == 1 for output in outputs[request.request_id])
        assert small.tokens(outputs[request.request_id]) == small.greedy(request.prompt, 25)


def test_seeded_text_survives_neighbours_and_preemption(small) -> None:
    def request(seed: int):
        return small.request(
            small.prompt(5, seed), 25, temperature=1.5, seed=seed, top_p=0.95, repetition_penalty=1.1, logprobs=0
        )

    alone = [small.tokens(*small.run(small.engine(), [request(seed)]).values()) for seed in range(6)]
    engine = small.engine(num_pages=20, page_tokens=2, max_num_seqs=6, max_num_batched_tokens=12)
    together = small.run(engine, [request(seed) for seed in range(6)])
    assert engine.num_preemptions > 3
    assert sorted(map(small.tokens, together.values())) == sorted(alone)


def test_stop_tokens(small) -> None:
    prompt = small.prompt(6)
    text = small.greedy(prompt, 20)
    third = text.index(text[3])
    cases = [
        (small.request(prompt, 20, stop_token_ids=(text[3],)), (), third + 1, FinishReason.STOP),
        (small.request(prompt, 20), (text[3],), third + 1, FinishReason.STOP),
        (small.request(prompt, 20, ignore_eos=True), (text[3],), 20, FinishReason.LENGTH),
        (
            small.request(prompt, 20, ignore_eos=True, stop_token_ids=(text[3],)),
            (text[3],),
            third + 1,
            FinishReason.STOP,
        ),
        (small.request(prompt, third + 1, stop_token_ids=(text[3],)), (), third + 1, FinishReason.STOP),
    ]
    for request, eos_token_ids, length, reason in cases:
        (outputs,) = small.run(small.engine(eos_token_ids=eos_token_ids), [request]).values()
        assert small.tokens(outputs) == text[:length]
        assert [output.finish_reason for output in outputs] == [None] * (length - 1) + [reason]
        assert outputs[-1].stop_token_id == (text[3] if reason is FinishReason.STOP else None)


def test_the_context_ends_a_sequence(small) -> None:
    prompt = small.prompt(10)
    for engine in (small.engine(max_model_len=16), small.engine(num_pages=4, page_tokens=4)):
        assert engine.max_model_len == 16
        (outputs,) = small.run(engine, [small.request(prompt, 1000)]).values()
        assert small.tokens(outputs) == small.greedy(prompt, 6)
        assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_requests_that_can_never_run_are_refused(small) -> None:
    engine = small.engine(max_model_len=16)
    neighbour = small.request(small.prompt(5), 5)
    engine.add(neighbour)
    refused = [
        (small.request(small.prompt(16), 1), "the prompt has 16 tokens; .* at most 15 fit"),
        (small.request(small.prompt(17), 0), "the prompt has 17 tokens; .* at most 16 fit"),
        (small.request((), 1), "empty"),
        (small.request((1, 97), 1), "outside 0 to 96"),
        (small.request((-1, 2), 1), "outside 0 to 96"),
        (small.request((1,), 1, logit_bias={97: 1.0}), "logit_bias"),
        (small.request((1,), 1, request_id=neighbour.request_id), "in use"),
    ]
    for request, message in refused:
        with pytest.raises(InvalidInputError, match=message):
            engine.add(request)
        engine.check_integrity()
    outputs = small.run(engine, [small.request(small.prompt(16), 0), small.request(small.prompt(15), 5)])
    assert small.tokens(outputs[neighbour.request_id]) == small.greedy(neighbour.prompt, 5)
    assert [small.tokens(one) for one in outputs.values()].count([]) == 1


def test_abort_frees_at_once_and_is_silent(small) -> None:
    engine = small.engine(max_num_seqs=2)
    running, kept, waiting = (small.request(small.prompt(9, seed), 9) for seed in range(3))
    for request in (running, kept, waiting):
        engine.add(request)
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (2, 1)
    usage = engine.kv_cache_usage
    engine.abort([running.request_id, waiting.request_id, "unknown", running.request_id])
    engine.check_integrity()
    assert engine.kv_cache_usage == usage / 2
    assert [view.request_id for view in engine.views()] == [kept.request_id]
    outputs = small.run(engine)
    assert list(outputs) == [kept.request_id]
    assert small.tokens(outputs[kept.request_id]) == small.greedy(kept.prompt, 9)[1:]


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


def ran(hidden: torch.Tensor) -> flight.RanLayers:
    interval = Interval(hidden.device)
    interval.begin()
    return flight.RanLayers(hidden, interval)


def test_each_batch_is_timed_from_the_end_of_what_it_waited_for(small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Interval, "milliseconds", lambda interval, behind=None: {None: 9.0, "its end": 5.0}[behind])
    monkeypatch.setattr(Interval, "overtook", lambda interval, behind: behind == "its end")
    engine = small.engine()
    engine.add(small.request(small.prompt(6), 3))
    for behind, expected_ms in ((None, 9.0), ("its end", 5.0), (None, 9.0)):
        engine.launch(engine.schedule(), behind=behind)
        collected = engine.collect()
        assert (collected.device_ms, collected.overtook) == (expected_ms, behind is not None)


def test_a_decode_that_is_not_finite_ends_its_request_only(small) -> None:
    engine = small.engine()
    requests = [small.request(small.prompt(6, seed), 8, logprobs=1, temperature=float(seed)) for seed in range(3)]
    kept = requests[0]
    for request in requests:
        engine.add(request)
    outputs = engine.step() + engine.step()
    step = engine.schedule()
    hidden = small.decoder.forward(engine.batch_of(step), engine.kv_cache).clone()
    rows = {entry.sequence.request.request_id: entry.start for entry in step.host.entries}
    hidden[rows[requests[1].request_id]] = float("nan")
    hidden[rows[requests[2].request_id], 0] = float("inf")
    engine.launch(step, ran(hidden))
    finished = engine.collect().outputs
    engine.check_integrity()
    assert [output.request_id for output in finished if output.finish_reason is FinishReason.ABORT] == [
        request.request_id for request in requests[1:]
    ]
    outputs += [output for output in finished if output.request_id == kept.request_id]
    outputs += small.run(engine)[kept.request_id]
    assert small.tokens([one for one in outputs if one.request_id == kept.request_id]) == small.greedy(kept.prompt, 8)


def test_one_that_is_not_finite_and_makes_way_leaves_the_prefix_that_others_share(small, monkeypatch) -> None:
    """Its first chunk was finite, and is a prefix of who takes its place, while its second is in flight."""
    poison, embed = 96, small.decoder.embed

    def poisoned(ids: torch.Tensor) -> torch.Tensor:
        return torch.where((ids == poison)[..., None], torch.nan, embed(ids))

    monkeypatch.setattr(small.decoder, "embed", poisoned)
    head = tuple(range(1, 9))
    broken = small.request((*head, *range(10, 17), poison, *range(20, 28)), 4, priority=5)
    other = small.request((*head, *range(40, 60)), 4, priority=0)
    (alone,) = small.run(small.engine(num_pages=10, max_num_batched_tokens=8, max_model_len=40), [other]).values()
    engine = small.engine(num_pages=10, max_num_batched_tokens=8, max_model_len=40)
    engine.add(broken)
    engine.step()
    engine.launch(engine.schedule())
    other = small.request(other.prompt, 4, priority=0)
    engine.add(other)
    outputs = []
    step = engine.schedule()
    engine.launch(step)
    while engine.num_in_flight:
        outputs += engine.collect().outputs
    while engine.has_work:
        outputs += engine.step()
    tokens = [token for output in outputs if output.request_id == other.request_id for token in output.token_ids]
    assert tokens == [token for output in alone for token in output.token_ids]
    assert [each.finish_reason for each in outputs if each.request_id == broken.request_id] == [FinishReason.ABORT]


def test_a_prompt_that_is_not_finite_is_noticed_where_nothing_is_generated(small, monkeypatch) -> None:
    """Also where hidden states are kept only on request, as on a GPU."""
    engine = small.engine()
    forward = engine._runner.forward

    def forward_fast(host, interval, *, keep_hidden):
        forwarded = forward(host, interval, keep_hidden=keep_hidden)
        return forwarded if keep_hidden else forwarded._replace(hidden=None)

    monkeypatch.setattr(engine._runner, "forward", forward_fast)
    embedding = small.decoder.weights.embedding
    row = embedding[7].clone()
    embedding[7] = float("nan")
    try:
        engine.add(small.request((7,) * 9, max_tokens=0))
        (output,) = engine.step()
    finally:
        embedding[7] = row
    assert output.finish_reason is FinishReason.ABORT
    assert not engine.kv_cache.isnan().any()


def test_rows_of_a_fused_segment_are_ignored(small) -> None:
    engine = small.engine()
    request = small.request(small.prompt(7), 4)
    engine.add(request)
    outputs = []
    while engine.has_work:
        step = engine.schedule()
        hidden = small.decoder.forward(engine.batch_of(step), engine.kv_cache)
        engine.launch(step, ran(torch.cat((hidden, torch.full((5, hidden.shape[1]), float("nan"))))))
        outputs += engine.collect().outputs
    assert small.tokens(outputs) == small.greedy(request.prompt, 4)


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


def run_ahead(engine, requests, arrive) -> dict[str, list]:
    """Launch each batch before the one before it is collected. ``arrive`` [requests]: in which iteration each comes."""
    outputs = {request.request_id: [] for request in requests}
    iteration = 0
    while engine.has_work or iteration <= max(arrive):
        for request, when in zip(requests, arrive, strict=True):
            if when == iteration:
                engine.add(request)
        for output in engine.iterate(num_ahead=1).outputs:
            outputs[output.request_id].append(output)
        engine.check_integrity()
        iteration += 1
    return outputs


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
