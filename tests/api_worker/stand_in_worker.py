"""A worker without a model, for what the real one cannot be made to do at a given moment: fail to start, die before it
is ready, die at an exact point of a request. What it does with a request follows from the first token of its prompt.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from cotenant.config import ServerConfig
from cotenant.core.plan import Slo
from cotenant.core.request import FinishReason, Request, SequenceOutput
from cotenant.wire.channel import WorkerChannel
from cotenant.wire.messages import (
    AbortRequests,
    AdapterFailed,
    AdapterLoaded,
    AddRequest,
    Drain,
    Drained,
    JobFailed,
    JobPaused,
    JobStarted,
    LoadAdapter,
    Outputs,
    PauseJob,
    Ready,
    RequestFailed,
    StartFailed,
    StartJob,
    Stats,
)

COUNT = 1  # all tokens at once, one output each: 0, 1, 2, … max_tokens - 1
SILENT = 2  # nothing, ever
FIRST_ONLY = 3  # one token, and then nothing
REFUSE = 4  # the request fails with code model_not_found
DIE = 5  # kills itself when it sees the request
DIE_AFTER_FIRST = 6  # sends one token, and kills itself
DIE_BEFORE_FIRST = 7  # of one that runs apart: the process ends, and a token arrives later

# What it does with an adapter follows from its name.
BROKEN_ADAPTER = "broken"
DEADLY_ADAPTER = "deadly"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def answer(channel: WorkerChannel, request: Request) -> bool:
    """Act on a request; True if it stays live."""
    behaviour = request.prompt[0]
    if behaviour == DIE:
        die()
    if behaviour == REFUSE:
        channel.send(RequestFailed(request.request_id, "no such adapter", "model_not_found"))
        return False
    if behaviour == COUNT:
        last = request.sampling.max_tokens - 1
        for token in range(last + 1):
            reason = FinishReason.LENGTH if token == last else None
            channel.send(Outputs((SequenceOutput(request.request_id, (token,), finish_reason=reason),)))
        return False
    if behaviour == DIE_BEFORE_FIRST:
        os.close(sys.stdout.fileno())
        time.sleep(0.5)
    if behaviour in (FIRST_ONLY, DIE_AFTER_FIRST, DIE_BEFORE_FIRST):
        channel.send(Outputs((SequenceOutput(request.request_id, (0,)),)))
    if behaviour in (DIE_AFTER_FIRST, DIE_BEFORE_FIRST):
        channel.close()  # what was sent arrives
        die()
    return True


def load(channel: WorkerChannel, name: str) -> None:
    if name == DEADLY_ADAPTER:
        die()
    channel.send(AdapterFailed(name, "this is no adapter") if name == BROKEN_ADAPTER else AdapterLoaded(name))


def run_apart(arguments: list[str]) -> None:
    """In a process of its own, which outlives this one: what is sent is as late as if the kernel still had it."""
    command = [sys.executable, __file__, *arguments, "--parent-pid", str(os.getpid())]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read()  # until it closes it
    os._exit(0)


def serve(channel: WorkerChannel) -> None:
    live: set[str] = set()
    while True:
        channel.wait(0.02)
        for message in channel.receive():
            match message:
                case AddRequest():
                    if answer(channel, message.request):
                        live.add(message.request.request_id)
                case AbortRequests():
                    live -= set(message.request_ids)
                case LoadAdapter():
                    load(channel, message.name)
                case StartJob():
                    job_id = message.spec.job_id
                    channel.send(JobStarted(job_id, 10, 0, 1.0))
                    channel.send(JobFailed(job_id, "broken", "made to fail", 1))
                case PauseJob():
                    channel.send(JobPaused(message.job_id, 1))
                case Drain():
                    channel.send(JobPaused("drained", len(live)))
                    channel.send(Drained())
                    return
        channel.send(Stats(num_running=len(live)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("start", choices=("ready", "apart", "die", "die-loading", "refuse", "slow", "deaf"))
    parser.add_argument("--address", required=True)
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--parent-pid", required=True, type=int)
    parser.add_argument("--after-crash", action="store_true")
    arguments = parser.parse_args()
    assert arguments.parent_pid == os.getppid()
    config = msgspec.json.decode(arguments.config.read_bytes(), type=ServerConfig)
    assert config.api.api_key == "", "the key must not reach the worker"
    if arguments.start == "die":
        sys.exit(3)
    if arguments.start == "apart":
        run_apart(["ready", *sys.argv[2:]])
    channel = WorkerChannel(arguments.address)
    if arguments.start == "die-loading":
        channel.send(Stats())
        die()
    if arguments.start == "refuse":
        channel.send(StartFailed("this model does not fit"))
        channel.close()
        sys.exit(2)
    if arguments.start == "slow":
        time.sleep(60)
    device = "cpu after a crash" if arguments.after_crash else "cpu"
    ready = Ready(128, 2, 64, 16, 16, device, "float32", config.coexecution.policy, Slo(100.0, 10.0), 0.1)
    channel.send(ready)
    if arguments.start == "deaf":
        time.sleep(60)
    serve(channel)
    channel.close()


if __name__ == "__main__":
    main()
