"""One plan at a time: what is shared, what is gained, who gives way. ``Simulation`` carries out and checks each."""

import pytest

from cotenant.core.plan import BatchShape
from cotenant.engine.batcher import BatchPlan
from cotenant.engine.sequence import PENDING, Sequence
from engine.simulation import Simulation

PAGE_TOKENS = 4


def admitted(plan: BatchPlan) -> list[Sequence]:
    return [admission.sequence for admission in plan.admitted]


def cached(num_pages: int) -> Simulation:
    """A pool in which the first four pages of text 0 are cached and nobody lives."""
    simulation = Simulation(num_pages, PAGE_TOKENS)
    simulation.add(17, 1, text=0)
    simulation.run()
    assert simulation.pool.num_cached == 4
    return simulation


def test_a_prefill_starts_after_the_cached_pages() -> None:
    simulation = cached(20)
    sequence = simulation.add(22, 4, text=0)
    plan = simulation.iterate()
    assert plan.chunks == ((sequence, 6),)
    assert plan.shape == BatchShape(prefill_tokens=6, prefill_context_tokens=22, prefill_pairs=sum(range(17, 23)))
    simulation.run()


def test_a_prompt_that_is_cached_whole_still_computes_a_token() -> None:
    simulation = cached(20)
    sequence = simulation.add(16, 4, text=0)
    assert simulation.iterate().chunks == ((sequence, 4),)
    simulation.run()


@pytest.mark.parametrize(("num_pages", "num_admitted"), [(6, 1), (7, 2)])
def test_idle_pages_that_two_sequences_match_are_taken_once(num_pages: int, num_admitted: int) -> None:
    """4 cached pages, a new one for each sequence, and a free one left for the first when the second comes."""
    simulation = cached(num_pages)
    both = [simulation.add(17, 1, text=0) for _ in range(2)]
    assert admitted(simulation.iterate()) == both[:num_admitted]
    simulation.run()


@pytest.mark.parametrize(("num_pages", "fits"), [(6, False), (7, True)])
def test_pages_that_another_uses_cost_nothing(num_pages: int, fits: bool) -> None:
    simulation = cached(num_pages)
    simulation.add(17, 3, text=0)
    simulation.iterate()
    second = simulation.add(17, 1, text=0)
    assert admitted(simulation.iterate()) == ([second] if fits else [])
    simulation.run()


@pytest.mark.parametrize(("num_pages", "fits"), [(5, False), (6, True)])
def test_an_admission_leaves_a_free_page_for_each_who_runs(num_pages: int, fits: bool) -> None:
    simulation = Simulation(num_pages, PAGE_TOKENS)
    simulation.add(5, 3)
    simulation.iterate()
    second = simulation.add(9, 1)
    assert admitted(simulation.iterate()) == ([second] if fits else [])
    simulation.run()


def test_pages_that_victims_share_are_gained_with_the_last_of_them() -> None:
    simulation = Simulation(8, PAGE_TOKENS)
    old = simulation.add(17, 3, priority=1, text=0)
    simulation.iterate()
    young = simulation.add(17, 3, priority=1, text=0)
    simulation.iterate()
    assert simulation.pool.num_used == 6
    urgent = simulation.add(20, 3)  # 5 pages; 2 are free, and ``young`` shares 4 of its 5 with ``old``
    plan = simulation.iterate()
    assert plan.preempted == (young, old)
    assert admitted(plan) == [urgent]
    simulation.run()


def test_the_first_in_order_takes_what_the_others_share() -> None:
    simulation = Simulation(10, PAGE_TOKENS)
    first = simulation.add(4, 30)
    simulation.iterate()
    for _ in range(2):
        simulation.add(9, 30, priority=1, text=0)
        simulation.iterate()
    simulation.run()
    assert simulation.num_preemptions >= 2
    assert simulation.finished[0] is first


def test_pages_that_an_admission_keeps_are_not_gained_from_their_victim() -> None:
    simulation = Simulation(7, PAGE_TOKENS)
    simulation.add(3, 2)
    simulation.add(17, 3, priority=1, text=0)
    simulation.iterate()
    simulation.add(25, 3, text=0)  # 4 pages are the victim's, 3 are new: 1 is free, and the victim has 1 of its own
    plan = simulation.iterate()
    assert plan.preempted == ()
    assert plan.admitted == ()
    simulation.run()


def test_a_victims_pages_are_not_for_those_behind_it() -> None:
    simulation = Simulation(7, PAGE_TOKENS)
    first, victim = simulation.add(8, 12), simulation.add(16, 12)
    simulation.iterate()
    short = simulation.add(2, 1)
    while not (plan := simulation.iterate()).preempted:
        assert plan.admitted == ()
    assert plan.preempted == (victim,)
    assert plan.decodes == (first,)
    assert plan.admitted == ()
    simulation.run()
    assert simulation.finished[0] is first
    assert {victim, short} == set(simulation.finished[1:])


def test_a_decode_waits_for_the_pages_of_a_sequence_that_is_about_to_leave() -> None:
    simulation = Simulation(4, PAGE_TOKENS, overlap=True)
    leaving, waits = simulation.add(4, 5), simulation.add(4, 12)
    for _ in range(5):
        simulation.iterate()
    assert leaving.is_spent
    plan = simulation.iterate()
    assert plan.decodes == plan.preempted == ()
    assert simulation.iterate().decodes == (waits,)
    simulation.run()
    assert simulation.num_preemptions == 0


def test_nobody_is_admitted_before_all_its_tokens_are_known_and_nobody_overtakes_it() -> None:
    simulation = Simulation(20, PAGE_TOKENS)
    first, second = simulation.add(5, 3), simulation.add(5, 3)
    first.tokens.append(PENDING)
    first.num_pending = 1
    assert simulation.plan().admitted == ()
    first.tokens[-1], first.num_pending = 1, 0
    assert admitted(simulation.plan()) == [first, second]


def test_a_sequence_whose_adapter_is_being_read_is_passed_over() -> None:
    simulation = Simulation(20, PAGE_TOKENS, max_loras=2, load_iterations=3)
    simulation.add(5, 1, name="a")
    simulation.run()
    reading, other, base = simulation.add(5, 9, name="b"), simulation.add(5, 9, name="a"), simulation.add(5, 9)
    assert admitted(simulation.iterate()) == [other, base]
    assert [admitted(simulation.iterate()) for _ in range(3)] == [[], [], [reading]]
    simulation.run()


def test_a_sequence_that_waits_for_a_slot_is_overtaken_by_the_base_model_only() -> None:
    simulation = Simulation(20, PAGE_TOKENS, max_loras=1)
    simulation.add(5, 3, name="a")
    simulation.iterate()
    waits, _, base = simulation.add(5, 3, name="b"), simulation.add(5, 3, name="a"), simulation.add(5, 3)
    assert admitted(simulation.iterate()) == [base]
    assert [admitted(simulation.iterate()) for _ in range(2)] == [[], [waits]]
    simulation.run()


def test_a_higher_class_takes_the_slot_of_the_last_in_order() -> None:
    simulation = Simulation(40, PAGE_TOKENS, max_loras=2, max_num_seqs=6)
    held = [simulation.add(5, 9, priority=1, name=name) for name in ("a", "b", "a", None)]
    simulation.iterate()
    urgent = simulation.add(5, 3, name="c")
    plan = simulation.iterate()
    assert plan.preempted == (held[1],), "two use the other slot, and one of them came first of all"
    assert admitted(plan) == [urgent]
    simulation.run()


def test_a_slot_is_not_taken_from_an_adapter_that_ones_own_class_uses() -> None:
    simulation = Simulation(40, PAGE_TOKENS, max_loras=1)
    simulation.add(5, 5, priority=0, name="a")
    simulation.add(5, 5, priority=1, name="a")
    simulation.iterate()
    simulation.add(5, 3, name="b")
    plan = simulation.iterate()
    assert plan.preempted == ()
    assert plan.admitted == ()
    simulation.run()


def test_a_slot_is_not_taken_from_an_adapter_that_was_just_admitted() -> None:
    simulation = Simulation(40, PAGE_TOKENS, max_loras=1)
    simulation.add(5, 5, priority=1, name="a")
    simulation.iterate()
    joins, _ = simulation.add(5, 3, name="a"), simulation.add(5, 3, name="b")
    plan = simulation.iterate()
    assert plan.preempted == ()
    assert admitted(plan) == [joins]
    simulation.run()


def test_a_slot_is_not_taken_from_an_adapter_whose_last_token_is_on_the_way() -> None:
    simulation = Simulation(40, PAGE_TOKENS, max_loras=1, overlap=True)
    leaving, stays = (simulation.add(5, max_tokens, priority=1, name="a") for max_tokens in (1, 9))
    simulation.iterate()
    assert leaving.is_spent
    urgent = simulation.add(5, 3, name="b")
    plan = simulation.iterate()
    assert (plan.preempted, plan.admitted) == ((), ())
    plan = simulation.iterate()
    assert plan.preempted == (stays,)
    assert admitted(plan) == [urgent]
    simulation.run()


def test_the_pages_of_the_slots_holder_count() -> None:
    simulation = Simulation(9, PAGE_TOKENS, max_loras=1)
    holder = simulation.add(20, 9, priority=1, name="a")
    base = simulation.add(4, 9, priority=1)
    simulation.iterate()
    urgent = simulation.add(24, 3, name="b")
    plan = simulation.iterate()
    assert plan.preempted == (holder,)
    assert plan.decodes == (base,)
    assert admitted(plan) == [urgent]
    simulation.run()


def test_a_lower_class_that_gets_no_budget_does_not_keep_its_slot_from_a_higher_one() -> None:
    """Prompts of the base model come without a pause, so the slot's holder does not get on; but it is in the way."""
    simulation = Simulation(60, PAGE_TOKENS, max_loras=1, max_num_seqs=4, max_num_batched_tokens=4)
    simulation.add(40, 2, priority=1, name="a")
    simulation.iterate()
    waits = simulation.add(5, 3, name="b")
    for _ in range(60):
        while len(simulation.waiting) < 4:
            simulation.add(20, 1)
        simulation.iterate()
        if waits in simulation.finished:
            break
    assert waits in simulation.finished


def test_prompts_that_are_put_off_come_behind_the_others_of_their_class() -> None:
    """Whether they wait or have begun; what is left of the budget is theirs, and a lower class comes behind them."""
    simulation = Simulation(60, PAGE_TOKENS, max_num_seqs=8, max_num_batched_tokens=20)
    begun = simulation.add(50, 2)
    assert simulation.iterate().chunks == ((begun, 20),)
    waiting, short, lower = simulation.add(9, 2), simulation.add(6, 2), simulation.add(4, 2, priority=1)
    simulation.put_off = frozenset({begun.request.request_id, waiting.request.request_id})
    plan = simulation.iterate()
    assert plan.chunks == ((short, 6), (begun, 14))
    assert admitted(plan) == [short]
    plan = simulation.iterate()
    assert plan.decodes == (short,)
    assert plan.chunks == ((begun, 16), (waiting, 3))
    simulation.put_off = frozenset()
    assert simulation.iterate().chunks == ((waiting, 6), (lower, 4))
    simulation.run()


def test_of_a_higher_class_even_who_is_put_off_comes_before_a_lower_one() -> None:
    simulation = Simulation(60, PAGE_TOKENS, max_num_seqs=8, max_num_batched_tokens=10)
    lower = simulation.add(30, 2, priority=1)
    simulation.iterate()
    put_off = simulation.add(10, 2)
    simulation.put_off = frozenset({put_off.request.request_id})
    assert simulation.iterate().chunks == ((put_off, 10),)
    simulation.put_off = frozenset({put_off.request.request_id, lower.request.request_id})
    simulation.run()


def test_nobody_who_waits_for_pages_is_overtaken_but_by_those_it_is_put_off_for() -> None:
    simulation = Simulation(8, PAGE_TOKENS, max_num_seqs=8)
    first = simulation.add(9, 20)
    simulation.iterate()
    long, short = simulation.add(24, 2), simulation.add(4, 2)
    assert admitted(simulation.iterate()) == []
    simulation.put_off = frozenset({long.request.request_id})
    assert admitted(simulation.iterate()) == [short]
    assert first in simulation.running
    simulation.run()


def test_who_is_put_off_takes_the_pages_of_a_lower_class_before_that_decodes() -> None:
    simulation = Simulation(6, PAGE_TOKENS, max_num_seqs=8)
    lower = simulation.add(13, 8, priority=1)
    simulation.iterate()
    urgent = simulation.add(16, 2)
    simulation.put_off = frozenset({urgent.request.request_id})
    plan = simulation.iterate()
    assert (plan.preempted, plan.decodes, admitted(plan)) == ((lower,), (), [urgent])
    simulation.run()


def test_nobody_who_is_put_off_is_admitted_behind_a_preemption() -> None:
    """A victim's pages are for who took them."""
    simulation = Simulation(10, PAGE_TOKENS, max_num_seqs=2)
    put_off, first, victim = simulation.add(3, 1), simulation.add(15, 20), simulation.add(17, 20)
    simulation.put_off = frozenset({put_off.request.request_id})
    while not simulation.plan().preempted:
        simulation.iterate()
    assert put_off in simulation.waiting
    plan = simulation.iterate()
    assert (plan.preempted, plan.decodes, admitted(plan)) == ((victim,), (first,), [])
    simulation.run()
