"""Whatever arrives, leaves and grows in however small a pool: every request ends with the tokens it gets alone."""

from collections.abc import Callable

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from cotenant.core.request import FinishReason

PAGE_TOKENS = 4

arrivals = st.tuples(
    st.just("add"),
    st.integers(1, 30),  # prompt length
    st.integers(0, 24),  # max_tokens
    st.integers(0, 2),  # priority
)
aborts = st.tuples(st.just("abort"), st.integers(0, 20))
lost_steps = st.tuples(st.just("lose"), st.integers(0, 5))  # and which live request is aborted meanwhile, if any
steps = st.tuples(st.just("step"), st.integers(1, 4))


@given(
    num_pages=st.integers(14, 22),
    max_num_seqs=st.integers(1, 6),
    extra_budget=st.integers(0, 12),
    events=st.lists(st.one_of(arrivals, arrivals, arrivals, aborts, lost_steps, steps, steps), min_size=8, max_size=30),
)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_request_ends_with_its_own_tokens(
    small, num_pages: int, max_num_seqs: int, extra_budget: int, events: list[tuple]
) -> None:
    engine = small.engine(
        num_pages=num_pages,
        page_tokens=PAGE_TOKENS,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + extra_budget,
    )
    requests = {}
    aborted: set[str] = set()
    tokens: dict[str, list[int]] = {}
    ended: dict[str, FinishReason] = {}

    def step() -> None:
        expected = engine.next_shape()
        usage, preemptions = engine.kv_cache_usage, engine.num_preemptions
        engine.check_integrity()
        assert engine.next_shape() == expected
        assert (engine.kv_cache_usage, engine.num_preemptions) == (usage, preemptions), "next_shape changed something"
        scheduled = engine.schedule()
        engine.check_integrity()
        assert (scheduled is not None) == engine.has_work, "live requests, and nothing to run"
        if scheduled is None:
            return
        assert scheduled.shape == expected
        assert 0 < scheduled.batch.num_tokens <= max_num_seqs + extra_budget
        assert scheduled.batch.num_tokens == expected.num_decode + expected.prefill_tokens
        for output in engine.finish(scheduled, small.decoder.forward(scheduled.batch, engine.kv_cache)):
            assert output.request_id not in ended
            assert output.request_id not in aborted
            tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                ended[output.request_id] = output.finish_reason
        engine.check_integrity()

    def add(length: int, max_tokens: int, priority: int) -> None:
        request = small.request(small.prompt(length, len(requests) % 3), max_tokens, priority=priority)
        engine.add(request)
        requests[request.request_id] = request
        tokens[request.request_id] = []

    def abort(index: int) -> None:
        for request_id in [one for one in requests if one not in ended and one not in aborted][index : index + 1]:
            engine.abort([request_id])
            aborted.add(request_id)

    def repeat(count: int) -> None:
        for _ in range(count):
            step()

    def lose(index: int) -> None:
        engine.schedule()
        abort(index)
        engine.check_integrity()
        engine.discard()

    actions: dict[str, Callable[..., object]] = {
        "add": add,
        "abort": abort,
        "lose": lose,
        "step": repeat,
    }
    for name, *arguments in events:
        actions[name](*arguments)
        engine.check_integrity()
    for _ in range(3000):
        if not engine.has_work:
            break
        step()
    event("preempted" if engine.num_preemptions else "not preempted")
    assert not engine.has_work
    assert engine.schedule() is None
    assert engine.kv_cache_usage == 0.0
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    for request_id, request in requests.items():
        max_tokens = request.sampling.max_tokens
        expected = small.greedy(request.prompt, 24)[:max_tokens]
        if request_id in aborted:
            assert tokens[request_id] == expected[: len(tokens[request_id])]
        else:
            assert ended[request_id] is FinishReason.LENGTH
            assert tokens[request_id] == expected
