"""The engine against transformers' greedy generation, and how requests end."""

from __future__ import annotations

import pytest

from cotenant.core.errors import InvalidInputError
from cotenant.core.request import FinishReason


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
