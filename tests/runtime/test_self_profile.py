"""What a server measures while nobody wants anything, and that nobody notices."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cotenant.config import BatchConfig, LoraConfig
from cotenant.core.plan import IterationRecord, Partition, Slo
from cotenant.device import Device, create_device
from cotenant.device.cpu.device import CpuDevice
from cotenant.engine.engine import OnlineEngine
from cotenant.predictor import records
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.runtime import loop as loop_module
from cotenant.runtime import self_profile
from cotenant.runtime.executor import Executor
from cotenant.runtime.loop import WorkerLoop
from cotenant.runtime.self_profile import SelfProfile
from cotenant.runtime.training import TrainingTenant
from cotenant.scheduler import create_policy
from cotenant.wire.messages import (
    AbortRequests,
    AddRequest,
    CancelJob,
    Drain,
    FromWorker,
    LoadAdapter,
    Outputs,
    StartJob,
    Stats,
    ToWorker,
    UnloadAdapter,
)
from finetune import support
from finetune.conftest import save_llama
from runtime.cotenancy import request

PROMPT = [5 + 7 * place % 90 for place in range(41)]
SHAPES = [(1, 256), (2, 256), (4, 256)]


class Worker:
    """A loop of its own, driven iteration by iteration; ``inbox``: what the API process sends next."""

    def __init__(
        self,
        folder: Path,
        device: Device,
        partitions: tuple[Partition, ...] = (),
        num_pages: int = 512,
        policy: str = "adaptive",
    ) -> None:
        save_llama(folder / "model", max_positions=512)
        decoder = self.decoder = support.load(folder / "model")
        self.engine = OnlineEngine(
            decoder, num_pages, 4, BatchConfig(4, 64), 512, LoraConfig(), (), device=device
        )  # 512 tokens: one context of those that are measured
        self.predictor = LatencyPredictor("test", "test")
        self.training = TrainingTenant(device, decoder, None, support.TASKLET_TOKENS, self.send)
        self.profile = SelfProfile(self.engine, self.predictor, partitions, support.VOCAB_SIZE)
        self.inbox: list[ToWorker] = []
        self.sent: list[FromWorker] = []
        self.num_waits = 0
        self.loop = WorkerLoop(
            self,
            self.engine,
            self.training,
            create_policy(policy, self.predictor),
            Executor(device, decoder, self.engine, self.training),
            self.predictor,
            Slo(1000.0, 100.0),
            can_fuse=False,
            partitions=partitions,
            sizes_chunks=device.overlaps,
            self_profile=self.profile,
        )

    # The loop's channel.

    def send(self, message: FromWorker) -> None:
        self.sent.append(message)

    def receive(self) -> list[ToWorker]:
        messages, self.inbox = self.inbox, []
        return messages

    def pending(self) -> bool:
        return bool(self.inbox)

    def wait(self, timeout_s: float) -> bool:
        self.num_waits += 1
        time.sleep(1e-4)
        return False

    # What tests do.

    def iterate_until(self, is_there: Callable[[], bool]) -> None:
        deadline_s = time.perf_counter() + 60  # threads may have to wait for a slow disk
        while time.perf_counter() < deadline_s:
            self.loop.iterate()
            if is_there():
                return
        raise AssertionError("a minute of iterations and it is not there")

    def rest(self) -> None:
        """Until there is nothing more to do."""
        before = self.num_waits
        self.iterate_until(lambda: self.num_waits > before)

    def answer(self, name: str, prompt: list[int] = PROMPT, max_tokens: int = 9) -> list[int]:
        self.inbox.append(AddRequest(request(name, prompt, max_tokens)))
        self.iterate_until(lambda: len(self.tokens(name)) == max_tokens)
        return self.tokens(name)

    def tokens(self, name: str) -> list[int]:
        outputs = (output for message in self.sent if isinstance(message, Outputs) for output in message.outputs)
        return [token for output in outputs if output.request_id == name for token in output.token_ids]

    def has_measured(self, shape: tuple[int, int], partition: Partition | None = None) -> bool:
        size, context = shape
        return self.predictor.has_measured_decode(size, size * context, int(1.5 * size * context), partition)

    def check_idle(self) -> None:
        self.engine.check_integrity()
        assert (self.engine.num_running, self.engine.num_waiting, self.engine.kv_cache_usage) == (0, 0, 0.0)


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
