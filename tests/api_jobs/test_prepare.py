"""The process that validates files: what it answers, and that nothing of it outlives those who wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import uvloop

from api_jobs.support import READY, TINY, examples, run, server
from cotenant.api.jobs import prepare as prepare_module
from cotenant.api.jobs import prepare_main, validator
from cotenant.api.jobs.prepare import prepare
from cotenant.api.jobs.prepare_main import FileTask, Task
from cotenant.core.errors import CotenantError, InvalidInputError
from cotenant.store import StoreError
from cotenant.text.prepared_file import PreparedFile


def make_task(folder: Path, content: bytes, target: Path | None = None) -> Task:
    source = folder / "source"
    source.write_bytes(content)
    file = FileTask(str(source), str(target or folder / "out" / "train.safetensors"), "training_file", 10)
    return Task((file,), str(TINY), None, READY.vocab_size, READY.max_model_len)


def slow_task(folder: Path) -> Task:
    """Takes far longer than any of these tests."""
    os.mkfifo(folder / "source")
    file = FileTask(str(folder / "source"), str(folder / "out"), "training_file", 10)
    return Task((file,), str(TINY), None, READY.vocab_size, READY.max_model_len)


def children_that(are: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    """One may end, and be reaped, while it is asked."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if are(child):
                found.append(child)
    return found


def children() -> list[psutil.Process]:
    return children_that(lambda child: prepare_main.__name__ in child.cmdline())


def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.01)


def test_files_are_tokenised(tmp_path: Path) -> None:
    async def scenario() -> None:
        (file,) = await prepare(make_task(tmp_path, examples(12)))
        assert file.num_examples == 12
        assert 0 < file.num_trained_tokens < file.num_tokens
        assert (tmp_path / "out" / "train.safetensors").is_file()
        assert children() == []

    run(scenario)


def test_what_max_length_cuts_off_is_not_searched_for_what_the_assistant_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: list[Task] = []

    async def noting(task: Task) -> tuple[PreparedFile, ...]:
        tasks.append(task)
        return prepare_main.run(task).files

    monkeypatch.setattr(validator, "prepare", noting)

    async def scenario() -> None:
        async with server(tmp_path) as there:
            file = await there.upload(examples(12))
            await there.started_job(training_file=file, hyperparameters={"max_length": 128})
            await there.wait((await there.create(training_file=file))["id"], "queued")
            assert [(task.max_length, task.cut_length) for task in tasks] == [(None, 128), (512, None)]

    run(scenario)


def test_errors_travel(tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(InvalidInputError, match="3 example") as refused:
            await prepare(make_task(tmp_path, examples(3)))
        assert (refused.value.code, refused.value.param) == ("invalid_n_examples", "training_file")
        with pytest.raises(StoreError, match="could not be read or written"):
            await prepare(make_task(tmp_path, examples(), tmp_path / "source" / "train.safetensors"))

    run(scenario)


def test_a_process_that_is_killed_is_started_once_more(tmp_path: Path) -> None:
    """As where a server's processes are all killed, the server last: nothing is wrong with the file."""

    async def scenario() -> None:
        task = slow_task(tmp_path)
        preparing = asyncio.create_task(prepare(task))
        await kill_first()
        await give(tmp_path / "source", preparing)

    run(scenario)


def test_one_that_is_killed_twice_is_an_error_and_no_hang(tmp_path: Path) -> None:
    async def scenario() -> None:
        preparing = asyncio.create_task(prepare(slow_task(tmp_path)))
        await kill_first()
        await kill_first()
        with pytest.raises(CotenantError, match="killed by signal 9, when it was started again, too") as failed:
            await preparing
        assert failed.value.code == "validation_failed"

    run(scenario)


@pytest.mark.parametrize("num_failures", [1, 2])
def test_one_that_ends_with_an_exit_code_is_started_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_failures: int
) -> None:
    """As Python does that is interrupted before it can say that it is not to be."""
    start, calls = asyncio.create_subprocess_exec, itertools.count()

    async def start_or_end(*command: str, **options: Any) -> asyncio.subprocess.Process:
        ends_at_once = (sys.executable, "-c", "raise SystemExit(1)")
        return await start(*(ends_at_once if next(calls) < num_failures else command), **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_or_end)

    async def scenario() -> None:
        if num_failures == 1:
            (prepared,) = await prepare(make_task(tmp_path, examples(12)))
            assert prepared.num_examples == 12
        else:
            with pytest.raises(CotenantError, match="ended with exit code 1, when it was started again, too"):
                await prepare(make_task(tmp_path, examples(12)))

    run(scenario)


async def kill_first() -> None:
    """Once there is one that can be killed."""
    await asyncio.to_thread(until, children)
    (child,) = children()
    child.kill()
    await asyncio.to_thread(until, lambda: child not in children())


def test_a_process_that_dies_before_it_is_told_its_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = asyncio.create_subprocess_exec

    async def start_and_kill(*args: object, **options: object) -> asyncio.subprocess.Process:
        process = await start(*args, **options)  # type: ignore[arg-type]
        process.kill()
        await process.wait()
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_and_kill)

    async def scenario() -> None:
        with pytest.raises(CotenantError, match="killed by signal 9"):
            await prepare(slow_task(tmp_path))

    run(scenario)


def fail_to_start(monkeypatch: pytest.MonkeyPatch, num_failures: int) -> None:
    """For so many times the program is not there."""
    start, calls = asyncio.create_subprocess_exec, itertools.count()

    async def start_or_fail(*command: str, **options: Any) -> asyncio.subprocess.Process:
        program = "/is/not/there" if next(calls) < num_failures else command[0]
        return await start(program, *command[1:], **options)

    monkeypatch.setattr(prepare_module, "START_DELAYS_S", (0.01, 0.02, 0.04))
    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_or_fail)


def test_a_process_that_cannot_be_started_fails_its_job_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail_to_start(monkeypatch, 4)

    async def scenario() -> None:
        async with server(tmp_path) as there:
            file = await there.upload(examples())
            first, second = [(await there.create(training_file=file))["id"] for _ in range(2)]
            error = (await there.wait(first, "failed"))["error"]
            assert error["code"] == "validation_failed"
            assert "could not be started, in 4 attempts" in error["message"]
            assert f"({sys.executable}: No such file or directory)" in error["message"]
            assert error["message"].endswith("resume the job: its files are validated again.")
            await there.wait_started(second)

    run(scenario)
    said = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 3
    for message, delay_s in zip(said, ("0.01", "0.02", "0.04"), strict=True):
        assert message.startswith("the process that validates files could not be started (")
        assert message.endswith(f"; trying again in {delay_s} s")
    assert "Traceback" not in caplog.text


def test_a_process_that_is_started_at_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail_to_start(monkeypatch, 3)

    async def scenario() -> None:
        async with server(tmp_path) as there:
            await there.wait_started((await there.create())["id"])

    run(scenario)
    assert len([record for record in caplog.records if "trying again" in record.message]) == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", ["start", "work"])
def test_a_signal_to_all_processes_is_the_servers_to_handle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, moment: str
) -> None:
    start = asyncio.create_subprocess_exec
    started: list[asyncio.subprocess.Process] = []

    async def start_and_tell(*args: object, **options: object) -> asyncio.subprocess.Process:
        process = await start(*args, **options)  # type: ignore[arg-type]
        if moment == "start" and not started:
            process.send_signal(number)
        started.append(process)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_and_tell)

    async def scenario() -> None:
        preparing = asyncio.create_task(prepare(slow_task(tmp_path)))
        await give(tmp_path / "source", preparing, before=lambda: moment == "work" and started[-1].send_signal(number))

    run(scenario)


async def give(
    pipe: Path, preparing: asyncio.Task[tuple[PreparedFile, ...]], before: Callable[[], object] = lambda: None
) -> None:
    """Twelve examples to who reads them; ``before`` that is called. They are found valid."""
    source = await asyncio.to_thread(open_once_read, pipe)
    before()
    with os.fdopen(source, "wb") as file:
        file.write(examples(12))
    (prepared,) = await preparing
    assert prepared.num_examples == 12


def open_once_read(pipe: Path) -> int:
    """The writing end of a named pipe that somebody reads, or soon does."""
    found: list[int] = []

    def is_read() -> bool:
        with contextlib.suppress(OSError):
            found.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        return bool(found)

    until(is_read)
    return found[0]


def test_cancelling_kills_the_process(tmp_path: Path) -> None:
    async def scenario() -> None:
        preparing = asyncio.create_task(prepare(slow_task(tmp_path)))
        await asyncio.to_thread(until, children)
        preparing.cancel()
        await asyncio.gather(preparing, return_exceptions=True)
        assert children() == []

    run(scenario)


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_cancelling_at_any_moment_of_the_start_leaves_no_process(
    tmp_path: Path, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    task, others = slow_task(tmp_path), {child.pid for child in psutil.Process().children()}

    async def scenario() -> None:
        for num_turns in range(10):
            preparing = asyncio.create_task(prepare(task))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            preparing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await preparing
            left = {child.pid for child in psutil.Process().children()} - others  # zombies, too
            assert not left, num_turns

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(scenario())


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_cancelling_twice_leaves_no_process_alive(
    tmp_path: Path, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    task = slow_task(tmp_path)

    async def scenario() -> None:
        for first in range(1, 6):
            for second in range(1, 9):
                preparing = asyncio.create_task(prepare(task))
                for num_turns in (first, second):
                    for _ in range(num_turns):
                        await asyncio.sleep(0)
                    preparing.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await preparing
        await asyncio.to_thread(until, lambda: not alive())

    def alive() -> list[psutil.Process]:
        return children_that(lambda child: child.pid not in others and child.status() != psutil.STATUS_ZOMBIE)

    others = {child.pid for child in psutil.Process().children()}
    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(scenario())


def test_the_process_ends_with_its_parent(tmp_path: Path) -> None:
    """The parent's end of the pipe closes however the parent ends."""
    process = start_child()
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(slow_task(tmp_path)) + b"\n")
    process.stdin.flush()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.5)
    assert_ends_quietly(process)


@pytest.mark.parametrize("said", [b"", b'{"files": ['])
def test_a_parent_that_is_gone_before_it_has_given_the_task(said: bytes) -> None:
    process = start_child()
    assert process.stdin is not None
    process.stdin.write(said)
    assert_ends_quietly(process)


def test_a_parent_that_is_gone_when_the_task_is_done(tmp_path: Path) -> None:
    process = start_child()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.close()
    process.stdin.write(msgspec.json.encode(make_task(tmp_path, examples(12))) + b"\n")
    process.stdin.flush()
    assert process.wait(60) == 1
    assert_ends_quietly(process)


def start_child() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", prepare_main.__name__]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def assert_ends_quietly(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.close()
    assert process.wait(60) == 1
    assert process.stderr.read() == b""


def test_ctrl_c_in_the_terminal_does_not_reach_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        preparing = asyncio.create_task(prepare(slow_task(tmp_path)))
        await asyncio.to_thread(until, children)
        assert os.getpgid(children()[0].pid) != os.getpgid(0)
        preparing.cancel()
        await asyncio.gather(preparing, return_exceptions=True)

    run(scenario)
