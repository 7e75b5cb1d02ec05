"""Requests and job messages across everything that can happen to the worker process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from api_worker import stand_in_worker as stand_in
from api_worker.clients import CONFIG, kill_worker, make_client, run, running, until
from cotenant.api import supervisor
from cotenant.api.supervisor import CrashWindow, describe_exit
from cotenant.api.worker_client import MAX_RUNS, WorkerClient
from cotenant.core.errors import CotenantError, NotFoundError, OverloadedError, WorkerLostError
from cotenant.core.job import Hyperparameters, JobSpec
from cotenant.core.request import FinishReason, Request, SamplingParams, SequenceOutput
from cotenant.wire.messages import FromWorker, JobFailed, JobPaused, JobStarted, StartJob


class RecordedJobs:
    """Writes down what it is told; refuses one kind of message as a broken handler would."""

    def __init__(self) -> None:
        self.messages: list[FromWorker | str] = []

    async def on_worker_message(self, message: FromWorker) -> None:
        await asyncio.sleep(0)
        self.messages.append(message)
        if isinstance(message, JobStarted):
            raise RuntimeError("the handler is broken")

    def on_worker_ready(self) -> None:
        self.messages.append("ready")


def make_request(behaviour: int, request_id: str = "r", max_tokens: int = 3) -> Request:
    return Request(request_id, (behaviour, 9), SamplingParams(max_tokens=max_tokens), arrival_s=time.monotonic())


async def outputs_of(client: WorkerClient, request: Request) -> list[SequenceOutput]:
    return [output async for output in client.generate(request)]


def test_outputs_come_in_order_and_the_last_has_a_reason() -> None:
    async def scenario() -> None:
        async with running(make_client()) as client:
            outputs = await outputs_of(client, make_request(stand_in.COUNT, max_tokens=5))
            assert [output.token_ids for output in outputs] == [(0,), (1,), (2,), (3,), (4,)]
            assert [output.finish_reason for output in outputs] == [None] * 4 + [FinishReason.LENGTH]
            assert client.num_live == 0

    run(scenario)


def test_nothing_is_taken_before_the_worker_is_ready() -> None:
    async def scenario() -> None:
        async with running(make_client("slow"), ready=False) as client:
            with pytest.raises(OverloadedError, match="being loaded"):
                await outputs_of(client, make_request(stand_in.COUNT))
            assert client.ready is None

    run(scenario)


def test_more_live_requests_than_the_queue_holds_are_refused() -> None:
    async def scenario() -> None:
        async with running(make_client()) as client:
            tasks = [asyncio.create_task(outputs_of(client, make_request(stand_in.SILENT, str(i)))) for i in range(4)]
            await until(lambda: client.num_live == 4)
            with pytest.raises(OverloadedError, match="4 requests"):
                await outputs_of(client, make_request(stand_in.COUNT, "one more"))
            tasks[0].cancel()
            await until(lambda: client.num_live == 3)
            assert len(await outputs_of(client, make_request(stand_in.COUNT, "one more"))) == 3
            for task in tasks:
                task.cancel()

    run(scenario)


def test_closing_early_and_cancelling_free_the_sequence() -> None:
    async def scenario() -> None:
        async with running(make_client()) as client:
            closed = client.generate(make_request(stand_in.FIRST_ONLY, "closed"))
            await anext(closed)
            cancelled = asyncio.create_task(outputs_of(client, make_request(stand_in.SILENT, "cancelled")))
            await until(lambda: client.stats.num_running == 2)
            await closed.aclose()
            await until(lambda: client.stats.num_running == 1)
            cancelled.cancel()
            await until(lambda: client.stats.num_running == 0)
            assert client.num_live == 0

    run(scenario)


def test_what_the_worker_refuses_becomes_the_error_of_its_code() -> None:
    async def scenario() -> None:
        async with running(make_client()) as client:
            with pytest.raises(NotFoundError, match="no such adapter") as caught:
                await outputs_of(client, make_request(stand_in.REFUSE))
            assert caught.value.code == "model_not_found"
            assert client.num_live == 0

    run(scenario)


def test_a_request_without_output_is_run_again_after_a_kill() -> None:
    async def scenario() -> None:
        async with running(make_client()) as client:
            waiting = asyncio.create_task(outputs_of(client, make_request(stand_in.SILENT)))
            await until(lambda: client.stats.num_running == 1)
            await kill_worker(client)
            counted = asyncio.create_task(outputs_of(client, make_request(stand_in.COUNT, "while there is no worker")))
            await until(lambda: client.ready is not None)
            assert len(await counted) == 3
            await until(lambda: client.stats.num_running == 1)  # the new worker has it
            assert client.num_restarts == 1
            assert client.ready is not None
            assert client.ready.device == "cpu after a crash", "it is told, and runs nothing that nobody asks for"
            assert not waiting.done()
            waiting.cancel()

    run(scenario)


def test_a_request_with_output_ends_with_an_error_after_a_kill() -> None:
    async def scenario() -> None:
        async with running(make_client()) as client:
            outputs = client.generate(make_request(stand_in.FIRST_ONLY))
            assert (await anext(outputs)).token_ids == (0,)
            await kill_worker(client)
            with pytest.raises(WorkerLostError, match="SIGKILL"):
                await anext(outputs)
            await until(lambda: client.ready is not None)
            assert client.stats.num_running == 0

    run(scenario)


def test_an_output_that_nobody_took_does_not_stop_a_new_run() -> None:
    async def scenario() -> None:
        async with running(make_client()) as client:
            request = make_request(stand_in.FIRST_ONLY)
            outputs = client.generate(request)
            taking = asyncio.create_task(anext(outputs))  # type: ignore[arg-type]
            pid = client.worker_pid
            assert pid is not None
            # The process stands still, so the request is in its socket but has no output when it is killed.
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.05)
            await kill_worker(client)
            assert (await taking).token_ids == (0,)
            assert client.num_restarts == 1
            await outputs.aclose()

    run(scenario)


def test_a_request_that_kills_every_worker_is_given_up_and_the_others_go_on() -> None:
    async def scenario() -> None:
        async with running(make_client(crashes=CrashWindow(max_crashes=10, first_delay_s=0.01))) as client:
            with pytest.raises(WorkerLostError, match=f"was run {MAX_RUNS} times"):
                await outputs_of(client, make_request(stand_in.DIE))
            assert len(await outputs_of(client, make_request(stand_in.COUNT))) == 3
            assert client.num_restarts == MAX_RUNS

    run(scenario)


def test_the_last_words_of_a_worker_are_heard() -> None:
    async def scenario() -> None:
        async with running(make_client()) as client:
            outputs = client.generate(make_request(stand_in.DIE_AFTER_FIRST))
            assert (await anext(outputs)).token_ids == (0,)
            with pytest.raises(WorkerLostError):
                await anext(outputs)

    run(scenario)


def test_the_last_words_of_a_worker_are_heard_however_late_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where this process was paused meanwhile."""
    monkeypatch.setattr(supervisor, "_HEAR_OUT_S", 60.0)

    async def scenario() -> None:
        async with running(make_client("apart")) as client:
            outputs = client.generate(make_request(stand_in.DIE_BEFORE_FIRST))
            assert (await anext(outputs)).token_ids == (0,)
            with pytest.raises(WorkerLostError):
                await anext(outputs)
            assert client.num_restarts <= 1

    run(scenario)


def test_start_failed_is_final_and_says_why() -> None:
    async def scenario() -> None:
        async with running(make_client("refuse"), ready=False) as client:
            assert await asyncio.wait_for(client.wait_failed(), 60) == "this model does not fit"
            assert (client.failed, client.exit_code) == ("this model does not fit", 2)
            with pytest.raises(CotenantError, match="does not fit"):
                await client.wait_ready()
            with pytest.raises(OverloadedError, match="has failed"):
                await outputs_of(client, make_request(stand_in.COUNT))

    run(scenario)


@pytest.mark.parametrize(("start", "reason"), [("die", "exited with code 3"), ("die-loading", "SIGKILL")])
def test_a_crash_loop_ends(start: str, reason: str) -> None:
    async def scenario() -> None:
        async with running(make_client(start), ready=False) as client:
            failed = await asyncio.wait_for(client.wait_failed(), 60)
            assert "5 times within 60 s" in failed
            assert reason in failed
            assert client.exit_code == 1

    run(scenario)


def test_workers_that_die_before_they_are_ready_are_counted_however_long_they_take() -> None:
    """A large model loads for longer than deaths are counted together."""

    async def scenario() -> None:
        crashes = CrashWindow(window_s=1e-3, first_delay_s=0.01)
        async with running(make_client("die", crashes=crashes), ready=False) as client:
            failed = await asyncio.wait_for(client.wait_failed(), 60)
            assert "5 times before it was ready; the last time it exited with code 3" in failed
            assert client.exit_code == 1

    run(scenario)


def test_a_worker_that_cannot_be_started_is_a_crash_loop_too() -> None:
    async def scenario() -> None:
        client = WorkerClient(CONFIG, worker_command=("/nonexistent/program",), crashes=CrashWindow(first_delay_s=0.01))
        async with running(client, ready=False):
            assert "/nonexistent/program" in await asyncio.wait_for(client.wait_failed(), 60)

    run(scenario)


def job_spec(job_id: str) -> JobSpec:
    return JobSpec(job_id, "tiny", "/j", "/j/train", None, "ft", Hyperparameters())


def test_job_messages_keep_their_order_and_a_broken_handler_stops_nothing() -> None:
    async def scenario() -> None:
        client = make_client()
        jobs = RecordedJobs()
        client.attach_jobs(jobs)
        async with running(client):
            for number in range(20):
                assert client.post(StartJob(job_spec(f"job-{number}")))
            await until(lambda: len(jobs.messages) == 41)
            await kill_worker(client)
            assert not client.post(StartJob(job_spec("nobody is there")))
            await until(lambda: len(jobs.messages) == 42)
        assert jobs.messages[0] == "ready"
        assert jobs.messages[-1] == "ready"
        expected: list[tuple[type, str]] = []
        for number in range(20):
            expected += [(JobStarted, f"job-{number}"), (JobFailed, f"job-{number}")]
        told = [(type(message), message.job_id) for message in jobs.messages[1:-1]]  # type: ignore[union-attr]
        assert told == expected

    run(scenario)


def test_drain_refuses_new_requests_hears_the_last_message_and_starts_no_other_worker() -> None:
    async def scenario() -> None:
        client = make_client()
        jobs = RecordedJobs()
        client.attach_jobs(jobs)
        async with running(client):
            await client.drain(timeout_s=60)
            assert jobs.messages == ["ready", JobPaused("drained", 0)]
            assert client.worker_pid is None
            assert client.failed is None
            with pytest.raises(OverloadedError, match="shutting down"):
                await outputs_of(client, make_request(stand_in.COUNT))

    run(scenario)


def test_drain_ends_a_worker_that_does_not_answer() -> None:
    async def scenario() -> None:
        async with running(make_client("deaf")) as client:
            waiting = asyncio.create_task(outputs_of(client, make_request(stand_in.COUNT)))
            await until(lambda: client.num_live == 1)
            await client.drain(timeout_s=0.3)
            with pytest.raises(WorkerLostError):
                await waiting
            assert client.worker_pid is None

    run(scenario)


def test_drain_does_not_wait_for_a_model_that_is_being_loaded() -> None:
    async def scenario() -> None:
        async with running(make_client("slow"), ready=False) as client:
            await until(lambda: client.worker_pid is not None)
            await asyncio.wait_for(client.drain(timeout_s=120), 60)
            assert client.worker_pid is None

    run(scenario)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files; a short one, for in a long one there is no place for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.mark.parametrize("start", ["ready", "die"])
def test_nothing_is_left_in_the_temporary_folder(start: str, temporary: Path) -> None:
    async def scenario() -> None:
        async with running(make_client(start), ready=start == "ready") as client:
            if start == "ready":
                assert list(temporary.iterdir()) == []  # so a SIGKILL of this process leaves nothing either
                assert len(await outputs_of(client, make_request(stand_in.COUNT))) == 3
            else:
                await client.wait_failed()

    run(scenario)
    assert list(temporary.iterdir()) == []


def test_what_a_killed_server_left_is_removed_and_what_a_live_one_has_is_not(temporary: Path) -> None:
    abandon = (
        "import os; from cotenant.api.supervisor import ApiChannel, WorkerFolder;"
        "folder = WorkerFolder(b'{}'); ApiChannel(folder.address); os._exit(9)"
    )
    environment = {**os.environ, "TMPDIR": str(temporary)}
    subprocess.run([sys.executable, "-c", abandon], env=environment)
    (left,) = temporary.glob("cotenant-worker-*")
    assert {path.name for path in left.iterdir()} == {"config.json", "worker.sock"}
    (temporary / "cotenant-worker-12345678").mkdir()  # killed as it was made
    others = [temporary / name / "notes" for name in ("cotenant-worker-mine", "cotenant-bench-12345678")]
    for path in others:
        path.parent.mkdir()
        path.write_text("")

    async def scenario() -> None:
        async with (
            running(make_client("slow"), ready=False) as first,
            running(make_client("slow"), ready=False) as more,
        ):
            await until(lambda: None not in (first.worker_pid, more.worker_pid))
            assert not left.exists()
            assert len(list(temporary.glob("*/worker.sock"))) == 2
            assert len(list(temporary.iterdir())) == 4

    run(scenario)
    assert sorted(temporary.rglob("*")) == sorted([*others, *(path.parent for path in others)])


def test_the_workers_configuration_is_private(temporary: Path) -> None:
    async def scenario() -> None:
        async with running(make_client("slow"), ready=False) as client:
            await until(lambda: client.worker_pid is not None)
            (config,) = temporary.glob("*/config.json")
            assert config.stat().st_mode & 0o777 == 0o600
            assert config.parent.stat().st_mode & 0o777 == 0o700
            assert b"secret" not in config.read_bytes()

    run(scenario)


def test_the_crash_window_waits_longer_each_time_and_forgets() -> None:
    window = CrashWindow(max_crashes=4, window_s=10, first_delay_s=1)
    assert [window.record(0.0), window.record(1.0), window.record(2.0)] == [0.0, 1.0, 2.0]
    assert window.record(10.5) == 2.0  # the first crash is too long ago
    assert window.record(10.6) is None
    assert window.record(100.0) == 0.0


def test_exits_are_described_in_words() -> None:
    assert describe_exit(3) == "exited with code 3"
    assert "SIGSEGV" in describe_exit(-11)
    assert "memory" in describe_exit(-9)
