"""Jobs: changes that cannot cross, filters, and which adapters are served."""

from __future__ import annotations

import shutil
import threading

import pytest

from cotenant.core.errors import InvalidInputError
from cotenant.core.job import Hyperparameters
from cotenant.store import JobError, JobStatus, NewEvent, Pending, Store
from store.rows import add_file, add_job, add_running_job, make_adapter, metrics_event


def test_a_job_comes_back_as_it_was_stored(store: Store) -> None:
    file = add_file(store)
    job = add_job(store, file, {"team": "blue"})
    settings = Hyperparameters(n_epochs=2, target_modules=("q_proj", "v_proj"), lora_alpha=8.5)
    store.jobs.change(job.id, [JobStatus.VALIDATING], {"status": JobStatus.QUEUED, "hyperparameters": settings})

    found = store.jobs.get(job.id)
    assert (found.training_file, found.metadata, found.requested) == (file.id, {"team": "blue"}, job.requested)
    assert found.hyperparameters == settings
    assert found.status is JobStatus.QUEUED


def test_a_job_whose_file_is_gone_is_not_created(store: Store) -> None:
    file = add_file(store)
    store.files.delete(file.id)
    with pytest.raises(InvalidInputError, match=file.id) as refused:
        add_job(store, file)
    assert (refused.value.code, refused.value.param) == ("file_not_found", "training_file")
    assert store.jobs.page().items == []


def test_jobs_are_counted_by_status(store: Store) -> None:
    assert store.jobs.counts() == dict.fromkeys(JobStatus, 0)
    for _ in range(2):
        add_job(store)
    running = add_running_job(store)
    expected = {**dict.fromkeys(JobStatus, 0), JobStatus.VALIDATING: 2, JobStatus.RUNNING: 1}
    assert store.jobs.counts() == expected
    store.jobs.change(running.id, [JobStatus.RUNNING], {"status": JobStatus.FAILED})
    assert store.jobs.counts() == {**expected, JobStatus.RUNNING: 0, JobStatus.FAILED: 1}


def test_only_one_of_two_crossing_changes_happens(store: Store) -> None:
    job = add_job(store)
    outcomes = []
    barrier = threading.Barrier(8)

    def change(number: int) -> None:
        barrier.wait()
        status = JobStatus.CANCELLED if number % 2 else JobStatus.PAUSED
        changed = store.jobs.change(job.id, [JobStatus.VALIDATING], {"status": status}, [NewEvent(f"to {status}")])
        outcomes.append(changed)

    threads = [threading.Thread(target=change, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    won = [job for job in outcomes if job is not None]
    assert len(won) == 1
    assert store.jobs.get(job.id).status is won[0].status
    assert [event.message for event in store.events.page(job.id).items][:-1] == [f"to {won[0].status}"]


def test_leaving_the_running_state_clears_what_belongs_to_it(store: Store) -> None:
    job = add_running_job(store)
    store.events.add_metrics(job.id, [metrics_event(1)], trained_tokens=64, estimated_finish=2_000_000_000)
    store.jobs.change(job.id, [JobStatus.RUNNING], {"pending": Pending.PAUSE})
    assert store.jobs.get(job.id).estimated_finish == 2_000_000_000

    paused = store.jobs.change(job.id, [JobStatus.RUNNING], {"status": JobStatus.PAUSED})
    assert paused is not None
    assert (paused.pending, paused.estimated_finish, paused.finished_at) == (None, None, None)

    failed = store.jobs.fail(job.id, [JobStatus.PAUSED], JobError("disk_full", "The disk is full.", None))
    assert failed is not None
    assert failed.error == JobError("disk_full", "The disk is full.", None)
    assert failed.finished_at is not None
    assert store.events.page(job.id, limit=1).items[0].level == "error"


def test_the_queue_is_in_order_of_creation_whatever_happened_since(store: Store) -> None:
    jobs = [add_job(store) for _ in range(3)]
    queued = {"status": JobStatus.QUEUED, "hyperparameters": Hyperparameters()}
    for job in reversed(jobs):
        store.jobs.change(job.id, [JobStatus.VALIDATING], queued)
    first = store.jobs.first(JobStatus.QUEUED, "base")
    assert first is not None
    assert first.id == jobs[0].id
    assert store.jobs.first(JobStatus.RUNNING, "base") is None


def test_jobs_are_found_by_metadata(store: Store) -> None:
    blue = add_job(store, metadata={"team": "blue", "a\"b'c]": "%_"})
    red = add_job(store, metadata={"team": "red"})
    plain = add_job(store)

    def ids(**metadata: str) -> list[str]:
        return [job.id for job in store.jobs.page(metadata=metadata).items]

    assert ids() == [plain.id, red.id, blue.id]
    assert ids(team="blue") == [blue.id]
    assert ids(**{"a\"b'c]": "%_", "team": "blue"}) == [blue.id]
    assert ids(**{"a\"b'c]": "xx"}) == []
    assert ids(team="blue", other="x") == []
    assert [job.id for job in store.jobs.page(metadata=None).items] == [plain.id]

    odd = add_job(store, metadata={"part\0of": "two\0three"})
    assert ids(**{"part\0of": "two\0three"}) == [odd.id]
    assert ids(part="two") == ids(**{"part\0of": "two"}) == ids(part="two\0three") == []


def test_served_adapters_are_results_and_checkpoints_that_are_on_disk(store: Store) -> None:
    done, cancelled, failed = (add_running_job(store) for _ in range(3))
    for job in (done, cancelled):
        path = make_adapter(store, job, "checkpoints", "step-00000002")
        name = f"{job.adapter_name}:ckpt-step-2"
        assert store.events.add_checkpoint(job.id, 2, name, path, {"step": 2}, NewEvent("Checkpoint"))
    result = make_adapter(store, done, "adapter")
    make_adapter(store, failed, "adapter")
    store.jobs.succeed(
        done.id, adapter_path=result, trained_tokens=10, total_steps=2, result_file=None, events=[NewEvent("done")]
    )
    store.jobs.change(cancelled.id, [JobStatus.RUNNING], {"status": JobStatus.CANCELLED})
    store.jobs.fail(failed.id, [JobStatus.RUNNING], JobError("x", "y"))

    served = store.served_adapters()
    assert [adapter.name for adapter in served] == [
        f"{done.adapter_name}:ckpt-step-2",
        done.adapter_name,
        f"{cancelled.adapter_name}:ckpt-step-2",
    ]
    assert served[1].path == result
    assert served[1].parent == "tiny"
    assert [store.find_adapter(adapter.name) for adapter in served] == served
    assert store.find_adapter(failed.adapter_name) is None
    assert store.find_adapter("tiny") is None

    shutil.rmtree(result)
    assert store.find_adapter(done.adapter_name) is None
    assert len(store.served_adapters()) == 2
