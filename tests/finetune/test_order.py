from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cotenant.finetune.order import DataOrder, pack
from finetune.support import HYPER

lengths_strategy = st.lists(st.integers(1, 60), min_size=1, max_size=80)


@given(lengths_strategy, st.integers(1, 50))
def test_pack_keeps_every_item_once_within_the_capacity(lengths: list[int], capacity: int) -> None:
    bins = pack(lengths, capacity)
    assert sorted(item for members in bins for item in members) == list(range(len(lengths)))
    for members in bins:
        assert sum(lengths[item] for item in members) <= capacity or len(members) == 1


@given(lengths_strategy, st.integers(1, 50))
def test_pack_leaves_no_two_bins_that_fit_in_one(lengths: list[int], capacity: int) -> None:
    loads = sorted(sum(lengths[item] for item in members) for members in pack(lengths, capacity))
    assert len(loads) < 2 or loads[0] + loads[1] > capacity


def test_pack_takes_the_best_fit() -> None:
    assert pack([6, 5, 4, 3, 2], 10) == [[0, 2], [1, 3, 4]]


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=80),
    st.integers(1, 9),
    st.booleans(),
    st.integers(0, 3),
)
def test_an_epoch_has_every_example_once(lengths: list[int], batch_size: int, packing: bool, epoch: int) -> None:
    order = DataOrder(lengths, replace(HYPER, batch_size=batch_size, packing=packing, max_length=40))
    batches = order.batches(epoch)
    assert len(batches) == order.steps_per_epoch
    assert sorted(example for batch in batches for example in batch) == list(range(len(lengths)))
    assert [order.step(epoch * order.steps_per_epoch + index) for index in range(len(batches))] == list(batches)
    if packing:
        assert all(sum(lengths[example] for example in batch) <= batch_size * 40 for batch in batches)
    else:
        assert all(len(batch) == batch_size for batch in batches[:-1])


def test_order_is_a_function_of_seed_and_epoch() -> None:
    lengths = [1 + index % 37 for index in range(100)]
    assert DataOrder(lengths, HYPER).batches(1) == DataOrder(lengths, HYPER).batches(1)
    assert DataOrder(lengths, HYPER).batches(1) != DataOrder(lengths, HYPER).batches(0)
    assert DataOrder(lengths, HYPER).batches(1) != DataOrder(lengths, replace(HYPER, seed=8)).batches(1)


def test_a_batch_groups_similar_lengths_without_a_trend() -> None:
    lengths = list(range(1, 401))
    order = DataOrder(lengths, replace(HYPER, batch_size=4))
    spreads = [max(batch) - min(batch) for batch in order.batches(0)]
    assert sum(spreads) / len(spreads) < 110  # 240 for random batches of 4
    longest = [max(batch) for batch in order.batches(0)]
    assert longest != sorted(longest, reverse=True)


def test_steps() -> None:
    order = DataOrder([10] * 10, replace(HYPER, batch_size=4, n_epochs=3))
    assert (order.steps_per_epoch, order.total_steps) == (3, 9)
    assert [step for step in range(1, 10) if order.ends_epoch(step)] == [3, 6, 9]
    capped = DataOrder([10] * 10, replace(HYPER, batch_size=4, max_steps=4))
    assert capped.total_steps == 4
    assert [step for step in range(1, 5) if capped.ends_epoch(step)] == [3, 4]
    assert order.mean_step_tokens == 100 / 3
