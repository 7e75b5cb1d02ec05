"""Whatever arrives, leaves and grows in however small a pool: every request ends, with the tokens it gets alone."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from cotenant.core.request import FinishReason
from cotenant.engine.sequence import Sequence
from engine.simulation import Simulation

PAGE_TOKENS = 4
LONGEST = 36  # tokens of a simulated sequence at its end: 9 pages

arrivals = st.tuples(
    st.just("add"),
    st.integers(1, 30),  # prompt length
    st.integers(0, 24),  # max_tokens
    st.integers(0, 2),  # priority
)
aborts = st.tuples(st.just("abort"), st.integers(0, 20))
turns = st.tuples(st.just("put_off"), st.sets(st.integers(0, 20), max_size=6))
lost_steps = st.tuples(st.just("lose"), st.integers(0, 5))  # and which live request is aborted meanwhile, if any
steps = st.tuples(st.just("step"), st.integers(1, 4))


@given(
    num_pages=st.integers(14, 22),
    max_num_seqs=st.integers(1, 6),
    extra_budget=st.integers(0, 12),
    events=st.lists(
        st.one_of(arrivals, arrivals, arrivals, aborts, turns, lost_steps, steps, steps), min_size=8, max_size=30
    ),
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
        views = engine.views()
        assert list(views) == sorted(views, key=lambda view: (view.priority, view.arrival_s)), "not as they are served"
        have_prompts = [view for view in views if view.num_prompt_tokens_left > 0]
        assert len(have_prompts) >= engine.num_waiting, "who waits computes its last token at least"
        scheduled = engine.schedule()
        engine.check_integrity()
        assert (scheduled is not None) == engine.has_work, "live requests, and nothing to run"
        if scheduled is None:
            return
        assert scheduled.shape == expected
        assert 0 < scheduled.host.num_tokens <= max_num_seqs + extra_budget
        assert scheduled.host.num_tokens == expected.num_decode + expected.prefill_tokens
        engine.launch(scheduled)
        for output in engine.collect().outputs:
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

    def put_off(numbers: set[int]) -> None:
        engine.put_off(frozenset(request_id for number, request_id in enumerate(requests) if number in numbers))

    actions: dict[str, Callable[..., object]] = {
        "put_off": put_off,
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


@dataclass(frozen=True)
class Load:
    """A kind of sequence, of which there are always some that wait."""

    priority: int
    name: str | None
    num_prompt: tuple[int, int]
    max_tokens: tuple[int, int]
    num_waiting: int

    def add(self, simulation: Simulation, draw: random.Random) -> Sequence:
        return simulation.add(
            draw.randint(*self.num_prompt),
            draw.randint(*self.max_tokens),
            priority=self.priority,
            name=self.name,
            text=draw.choice([None, None, 0, 1]),
        )


loads = st.builds(
    Load,
    priority=st.integers(0, 2),
    name=st.sampled_from([None, None, "a", "b", "c"]),
    num_prompt=st.sampled_from([(1, 4), (1, 24), (16, 24)]),
    max_tokens=st.sampled_from([(1, 2), (1, 12), (8, 12)]),
    num_waiting=st.integers(1, 3),
)


@given(
    spare_pages=st.integers(0, 5),
    max_num_seqs=st.integers(1, 5),
    extra_budget=st.integers(0, 10),
    max_loras=st.integers(1, 2),
    overlap=st.booleans(),
    load_iterations=st.integers(0, 4),
    kinds=st.lists(loads, min_size=1, max_size=4),
    patience=st.sampled_from([0, 0, 5, 40]),
    seed=st.integers(0, 2**32 - 1),
)
@example(0, 5, 10, 1, False, 0, [Load(0, None, (16, 24), (8, 12), 1), Load(0, None, (1, 4), (8, 12), 3)], 0, 0)
@example(0, 1, 0, 1, False, 1, [Load(0, "a", (16, 24), (8, 12), 1), Load(0, None, (1, 4), (1, 12), 1)], 0, 0)
@settings(max_examples=80, deadline=None)
def test_nobody_starves_however_many_arrive_later(
    spare_pages: int,
    max_num_seqs: int,
    extra_budget: int,
    max_loras: int,
    overlap: bool,
    load_iterations: int,
    kinds: list[Load],
    patience: int,
    seed: int,
) -> None:
    """Sequences arrive without end, of all classes, and more than can be served. Each of the highest class is done
    within a number of iterations that follows from who lived when it came, and not from those who came later; or in
    ``patience`` iterations, for which it may be put off now and then."""
    simulation = Simulation(
        LONGEST // PAGE_TOKENS + spare_pages,
        PAGE_TOKENS,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + extra_budget,
        max_loras=max_loras,
        overlap=overlap,
        load_iterations=load_iterations,
    )
    draw = random.Random(seed)
    highest = min(kind.priority for kind in kinds)
    waiting: dict[Load, list[Sequence]] = {kind: [] for kind in kinds}
    due: dict[Sequence, int] = {}
    came: dict[Sequence, int] = {}
    for iteration in range(1000):
        for kind, sequences in waiting.items():
            sequences[:] = [sequence for sequence in sequences if sequence in simulation.waiting]
            while len(sequences) < kind.num_waiting:
                num_live = len(simulation.running) + len(simulation.waiting)
                # Those who come while its adapter is read may pass it and take all seats once.
                num_before = num_live + (max_num_seqs if load_iterations else 0)
                sequences.append(kind.add(simulation, draw))
                came[sequences[-1]] = iteration
                if kind.priority == highest:
                    due[sequences[-1]] = iteration + (num_before + 1) * LONGEST + load_iterations + patience
        live = [*simulation.running, *simulation.waiting]
        patient = [sequence for sequence in live if came[sequence] + patience > iteration]
        simulation.put_off = frozenset(each.request.request_id for each in patient if draw.random() < 0.5)
        simulation.iterate()
        for sequence in simulation.finished:
            due.pop(sequence, None)
        simulation.finished.clear()
        late = [sequence.request.request_id for sequence, end in due.items() if end < iteration]
        assert not late, f"{late} should be done by iteration {iteration}"
    event("preempted" if simulation.num_preemptions else "not preempted")
    event("pages from the cache" if simulation.num_cached_pages else "no pages from the cache")
    simulation.run(5000)
