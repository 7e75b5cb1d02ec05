"""What a server measures while nobody wants anything, and that nobody notices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cotenant.core.plan import IterationRecord, Partition
from cotenant.device import create_device
from cotenant.device.cpu.device import CpuDevice
from cotenant.predictor import records
from cotenant.runtime import loop as loop_module
from cotenant.runtime import self_profile, signs_of_life
from cotenant.wire.messages import (
    AbortRequests,
    AddRequest,
    CancelJob,
    Drain,
    LoadAdapter,
    Outputs,
    StartJob,
    Stats,
    UnloadAdapter,
)
from finetune import support
from runtime.cotenancy import request
from runtime.driven_worker import PROMPT, Worker

SHAPES = [(1, 256), (2, 256), (4, 256)]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_profile, "_QUIET_S", 0.0)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_all_that_lacks_is_measured_and_nothing_is_said_of_it(
    is_ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "_STATS_EVERY_S", 0.0)
    # Where something else had the machine for a while, a record begins anew, and a shape is measured once.
    monkeypatch.setattr(records, "_OUTLIER_RATIO", math.inf)
    worker = Worker(tmp_path, SplitDevice() if is_ahead else create_device("cpu"))
    margin = worker.loop.margin
    worker.rest()
    assert worker.loop.margin == margin, "its prompts are nobody's"
    assert all(worker.has_measured(shape) for shape in SHAPES)
    assert not worker.has_measured((8, 256)), "there are no more than 4 in a batch"
    assert not worker.has_measured((1, 1024)), "the model takes no more than 512"
    worker.check_idle()
    assert {type(message) for message in worker.sent} == {Stats}
    for message in worker.sent:
        assert isinstance(message, Stats)
        assert (message.num_running, message.num_waiting, message.kv_cache_usage) == (0, 0, 0.0)
        assert (message.online_busy_s, message.prefix_cache_queries, message.slack_ms) == (0.0, 0, {})
        assert message.step_gap_us is None
    num_records = worker.predictor.num_records
    for _ in range(20):
        worker.loop.iterate()
    assert worker.predictor.num_records == num_records, "what is known is not measured again"


def test_meanwhile_the_loop_says_that_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "_STATS_EVERY_S", 0.0)
    monkeypatch.setattr(signs_of_life, "REPEAT_EVERY_S", 0.0)
    worker = Worker(tmp_path, create_device("cpu"))
    worker.iterate_until(lambda: worker.profile.is_active)
    last = worker.sent.pop()
    worker.sent.clear()
    worker.loop.iterate()
    assert worker.sent == [last]


def test_a_request_ends_it_and_it_goes_on_later(tmp_path: Path) -> None:
    expected = Worker(tmp_path / "alone", create_device("cpu"))
    worker = Worker(tmp_path / "profiled", create_device("cpu"))
    answers: list[list[int]] = []
    while not all(worker.has_measured(shape) for shape in SHAPES):  # each time it gets further
        worker.iterate_until(lambda: worker.profile.is_active)
        for _ in range(2 * len(answers)):
            worker.loop.iterate()
        answers.append(worker.answer(f"r{len(answers)}", PROMPT[len(answers) :]))
        worker.check_idle()
    assert 5 < len(answers) < 30
    expected.profile.begin = lambda: False  # type: ignore[method-assign]
    for index, tokens in enumerate(answers):
        assert tokens == expected.answer(f"r{index}", PROMPT[index:])


def test_pages_that_requests_left_stay(tmp_path: Path) -> None:
    """What is measured leaves the prompts in the cache alone: in this one, there is no room for the largest shape."""
    worker = Worker(tmp_path, create_device("cpu"), num_pages=330)
    prompts = {f"r{start}": [3 + (start + place) % 97 for place in range(61)] for start in range(0, 20, 5)}
    for name, prompt in prompts.items():
        worker.answer(name, prompt)
    worker.rest()
    assert [worker.has_measured(shape) for shape in SHAPES] == [True, True, False]
    for name, prompt in prompts.items():
        hits = worker.engine.num_hit_tokens
        worker.answer(f"{name} again", prompt)
        assert worker.engine.num_hit_tokens == hits + 60


def test_without_room_nothing_is_measured(tmp_path: Path) -> None:
    worker = Worker(tmp_path, create_device("cpu"), num_pages=160)
    worker.rest()
    assert worker.has_measured((1, 256))
    assert not worker.has_measured((4, 256)), "that takes 300 pages"


def test_not_while_there_is_a_job(tmp_path: Path) -> None:
    """One that waits, too: it may go on at any moment."""
    worker = Worker(tmp_path, create_device("cpu"), policy="inference-only")
    worker.inbox.append(StartJob(support.make_spec(tmp_path / "job")))
    for _ in range(30):
        worker.loop.iterate()
        assert not worker.profile.is_active
    assert worker.num_waits > 20, "there was nothing to do"
    assert worker.training.job_id is not None
    worker.inbox.append(CancelJob(worker.training.job_id))
    worker.iterate_until(lambda: worker.profile.is_active)
    worker.inbox.append(StartJob(support.make_spec(tmp_path / "another")))
    worker.loop.iterate()
    assert not worker.profile.is_active
    worker.inbox.append(CancelJob(worker.training.job_id or ""))
    worker.iterate_until(lambda: worker.profile.is_active)
    worker.inbox.append(Drain())
    worker.loop.run()
    worker.check_idle()


def test_numbers_that_are_not_finite_are_logged_of_requests_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(tmp_path, create_device("cpu"))
    worker.decoder.weights.final_norm.fill_(math.nan)
    worker.iterate_until(lambda: worker.profile.is_active)
    worker.iterate_until(lambda: not worker.profile.is_active)
    worker.inbox.append(AddRequest(request("theirs", PROMPT, 9)))
    worker.iterate_until(lambda: any(isinstance(message, Outputs) for message in worker.sent))
    lines = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert lines == ["request theirs ended: the model's output for it is not finite"]


def test_messages_without_work_do_not_end_it(tmp_path: Path) -> None:
    worker = Worker(tmp_path, create_device("cpu"))
    worker.iterate_until(lambda: worker.profile.is_active)
    path = str(tmp_path / "none")
    worker.inbox += [AbortRequests(("gone",)), UnloadAdapter("none", path), LoadAdapter("none", path)]
    worker.loop.iterate()
    assert worker.profile.is_active


def test_what_is_always_cut_off_lets_others_have_their_turn_and_comes_less_often(tmp_path: Path) -> None:
    worker = Worker(tmp_path, create_device("cpu"))
    sizes, waits = [], []
    for index in range(6):
        worker.profile.quiet_s = 0.0 if index == 0 else worker.profile.quiet_s
        worker.iterate_until(lambda: worker.profile.is_active)
        sizes.append(worker.engine.num_waiting + worker.engine.num_running)
        worker.profile.quiet_s = max(worker.profile.quiet_s, 0.001)
        worker.answer(f"r{index}")
        waits.append(worker.profile.quiet_s)
    assert sizes == [1, 2, 4, 1, 2, 4]
    assert waits == [0.002 * 2**index for index in range(6)]
    worker.iterate_until(lambda: worker.has_measured(SHAPES[0]))
    worker.iterate_until(lambda: worker.profile.quiet_s == 0.0)


def test_a_prompt_that_comes_is_not_cut_into_the_chunks_of_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_profile, "_BATCH_TOKENS", 16)
    monkeypatch.setattr(self_profile, "_LEAST_CHUNK", 4)
    worker = Worker(tmp_path, create_device("cpu"))
    worker.iterate_until(lambda: worker.profile.is_active)
    worker.loop.iterate()
    assert worker.engine.num_running == 1
    assert worker.engine.next_shape().prefill_tokens == 16
    worker.inbox.append(AddRequest(request("r", PROMPT, 2)))
    worker.loop.iterate()
    assert len(worker.tokens("r")) == 1, "all 41 tokens in a batch"


def test_a_stall_in_a_step_does_not_end_a_shape_unmeasured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records begin anew where the first measurement was an outlier."""
    worker = Worker(tmp_path, create_device("cpu"))
    observe, count = worker.predictor.observe, 0

    def stalled(record: IterationRecord) -> None:
        nonlocal count
        count += not record.batch.empty
        online_ms = 500.0 if count % 3 == 0 else 1.0
        observe(replace(record, online_ms=online_ms, total_ms=online_ms))

    monkeypatch.setattr(worker.predictor, "observe", stalled)
    worker.rest()
    assert all(worker.has_measured(shape) for shape in SHAPES)


class SplitDevice(CpuDevice):
    """Batches are launched a step ahead, and on parts of its SMs, which it notes."""

    overlaps = True
    partitions = (Partition(48, 84), Partition(96, 36))

    def __init__(self) -> None:
        super().__init__()
        self.had: list[Partition | None] = []

    @contextmanager
    def online(self, partition: Partition | None = None) -> Iterator[None]:
        self.had.append(partition)
        yield


def test_each_partition_is_measured_alone(tmp_path: Path) -> None:
    device = SplitDevice()
    worker = Worker(tmp_path, device, device.partitions)
    worker.rest()
    for shape in SHAPES:
        assert all(worker.has_measured(shape, partition) for partition in (None, *device.partitions))
    assert set(device.had) == {None, *device.partitions}
    worker.check_idle()
    worker.answer("r")
    worker.check_idle()
