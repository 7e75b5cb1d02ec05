"""Events and checkpoints: reported twice, stored once, always in the same order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy.exc import IntegrityError

from cotenant.core.errors import InvalidInputError
from cotenant.store import NewEvent, Store
from store.rows import add_file, add_running_job, metrics_event

# What a worker may send: batches of consecutive steps, from anywhere at or before where it was (after a crash).
_BATCHES = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 5)), max_size=8)


def test_steps_are_stored_once_however_often_they_are_reported(store: Store) -> None:
    @settings(max_examples=40, deadline=None)
    @given(_BATCHES)
    def check(batches: list[tuple[int, int]]) -> None:
        job = add_running_job(store)
        expected: dict[int, float] = {}
        for number, (start, length) in enumerate(batches):
            steps = range(start, start + length)
            num_new = store.events.add_metrics(
                job.id, [metrics_event(step, float(number)) for step in steps], start + length, None
            )
            assert num_new == len(set(steps) - expected.keys())
            for step in steps:
                expected.setdefault(step, float(number))

        assert {data["step"]: data["train_loss"] for data in store.events.metrics(job.id)} == expected
        recorded = store.events.recorded_step(job.id)
        assert set(range(1, recorded + 1)) <= expected.keys()
        assert recorded + 1 not in expected
        tokens = max((start + length for start, length in batches), default=None)
        assert store.jobs.get(job.id).trained_tokens == tokens

    check()


def test_pages_put_together_are_the_whole_list_newest_first(store: Store) -> None:
    job, other = add_running_job(store), add_running_job(store)
    for number in range(1, 8):  # all within the same second
        store.events.add(job.id, [NewEvent(f"event {number}")])
        store.events.add(other.id, [NewEvent("noise")])

    messages: list[str] = []
    after = None
    while True:
        page = store.events.page(job.id, after=after, limit=3)
        messages += [event.message for event in page.items]
        if not page.has_more:
            break
        after = page.items[-1].id
    assert messages == [*(f"event {number}" for number in range(7, 0, -1)), f"Created fine-tuning job: {job.id}"]
    with pytest.raises(InvalidInputError, match="'after'"):
        store.events.page(job.id, after="ftevent-none")


def test_a_change_and_its_events_happen_together_or_not_at_all(store: Store) -> None:
    job, existing = add_running_job(store), add_file(store)
    with pytest.raises(IntegrityError):
        store.jobs.succeed(
            job.id,
            adapter_path="/nowhere",
            trained_tokens=1,
            total_steps=1,
            result_file=existing,  # its id is taken
            events=[NewEvent("The job has successfully completed")],
        )
    assert store.jobs.get(job.id) == job
    assert [event.message for event in store.events.page(job.id).items] == [f"Created fine-tuning job: {job.id}"]


def test_a_checkpoint_is_stored_once_with_its_event(store: Store) -> None:
    job = add_running_job(store)
    path = str(store.jobs.folder(job.id) / "checkpoints" / "step-00000008")
    for expected in (True, False):
        added = store.events.add_checkpoint(job.id, 8, "ft:x:ckpt-step-8", path, {"step": 8}, NewEvent("Checkpoint"))
        assert added is expected
    page = store.events.checkpoint_page(job.id)
    assert [(checkpoint.step, checkpoint.path, checkpoint.metrics) for checkpoint in page.items] == [
        (8, path, {"step": 8})
    ]
    assert [event.message for event in store.events.page(job.id).items].count("Checkpoint") == 1
