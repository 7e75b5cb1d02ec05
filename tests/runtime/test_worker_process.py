"""The worker as a process: how it ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from cotenant.config import ModelConfig, ServerConfig
from cotenant.wire.messages import FromWorker, Ready, StartJob, ToWorker
from finetune.support import make_spec, random_examples

WITHIN_S = 60.0
UNREADABLE = b"\xc1"  # no MessagePack begins so: the loop raises


@pytest.fixture
def socket() -> Iterator[zmq.Socket]:
    """The API process's end of a worker's channel. A socket's path must be short."""
    folder = tempfile.mkdtemp(prefix="worker-")
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.linger = 0
        socket.bind(f"ipc://{folder}/s")
        yield socket
    shutil.rmtree(folder)


def start_worker(socket: zmq.Socket, folder: Path) -> subprocess.Popen[str]:
    config = ServerConfig(ModelConfig("tiny", device="cpu"), data_dir=str(folder))
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    command = [sys.executable, "-m", "cotenant.runtime.worker", "--address", address]
    command += ["--config", str(folder / "config.json"), "--parent-pid", str(os.getpid())]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def receive(socket: zmq.Socket) -> FromWorker:
    assert socket.poll(WITHIN_S * 1000), "the worker says nothing"
    message: FromWorker = msgspec.msgpack.decode(socket.recv(), type=FromWorker)
    return message


def send(socket: zmq.Socket, message: ToWorker) -> None:
    socket.send(msgspec.msgpack.encode(message))


def opened_for_writing(pipe: Path) -> int:
    """A named pipe that is being read from now on: the reader waits for as long as this is open."""
    deadline_s = time.monotonic() + WITHIN_S
    while True:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody reads it yet
            assert time.monotonic() < deadline_s, f"nobody reads {pipe}"
            time.sleep(0.01)


def test_a_worker_whose_loop_raises_ends_though_a_thread_waits_for_a_disk(socket: zmq.Socket, tmp_path: Path) -> None:
    spec = make_spec(tmp_path / "job", random_examples(8))
    metrics = Path(spec.folder, "metrics.jsonl")
    metrics.parent.mkdir(exist_ok=True)
    os.mkfifo(metrics)
    with start_worker(socket, tmp_path) as worker:
        try:
            while not isinstance(receive(socket), Ready):
                pass
            send(socket, StartJob(spec))
            pipe = opened_for_writing(metrics)
            socket.send(UNREADABLE)
            assert worker.wait(WITHIN_S) == 1
            os.close(pipe)
            assert worker.stderr is not None
            last_words = worker.stderr.read()
        finally:
            worker.kill()
    assert "Traceback (most recent call last)" in last_words
    assert "msgspec.DecodeError" in last_words
