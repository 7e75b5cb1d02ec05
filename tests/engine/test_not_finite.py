"""Numbers that are not finite end their own request and no other."""

from __future__ import annotations

import torch

from cotenant.core.request import FinishReason
from engine.launches import ran


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
