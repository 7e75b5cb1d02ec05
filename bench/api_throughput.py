"""How many streamed tokens a second one core of the API process carries.

A worker without a model answers every request with one token per step, all requests in one message, as the real one
does; many clients read their streams; the API process is the real one. Its CPU time over the measured seconds gives the
events that one core could carry. Steps are paced, so that tokens do not pile up and leave together in fewer writes.

    .venv/bin/python bench/api_throughput.py
    .venv/bin/python bench/api_throughput.py --endpoint chat --streams 256 --step-ms 25 --profile api.pstats
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from cotenant.api.server import BaseModel, run_server
from cotenant.config import ApiConfig, BatchConfig, ModelConfig, ServerConfig
from cotenant.core.plan import Slo
from cotenant.core.request import FinishReason, SequenceOutput
from cotenant.models.registry import resolve_model
from cotenant.wire.channel import WorkerChannel
from cotenant.wire.messages import AbortRequests, AddRequest, Drain, Drained, Outputs, Ready, Stats

MODEL = "tiny"
MAX_MODEL_LEN = 1 << 20
TEXT = b'"text":"', b'"content":"'  # whose quotes would be escaped within a string
STATS_EVERY_S = 0.2
WARM_UP_S = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    parser.add_argument("--streams", type=int, default=128, help="streams at a time")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of an answer")
    parser.add_argument("--step-ms", type=float, default=25.0, help="time between two tokens of a stream")
    parser.add_argument("--seconds", type=float, default=10.0, help="time measured")
    parser.add_argument("--profile", help="file for the API process's cProfile statistics; its figures are then slower")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        probe.close()
        options: tuple[str, ...] = ("--port", str(port), "--data-dir", folder, "--step-ms", str(arguments.step_ms))
        if arguments.profile:
            options += ("--profile", arguments.profile)
        server = subprocess.Popen([sys.executable, __file__, "--role", "server", *options])
        try:
            print(asyncio.run(measure(arguments, port, server.pid)))
        finally:
            server.terminate()
            server.wait()


async def measure(arguments: argparse.Namespace, port: int, server_pid: int) -> str:
    """Keep ``--streams`` streams going, and count for ``--seconds`` seconds."""
    await until_listening(port)
    body = {"model": MODEL, "max_tokens": arguments.tokens, "stream": True, "stream_options": {"include_usage": True}}
    if arguments.endpoint == "chat":
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": "How are you?"}]
    else:
        path, body["prompt"] = "/v1/completions", "How are you?"
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
    loop = asyncio.get_running_loop()
    count = Count()
    request = head.encode() + raw
    connections = [
        await loop.create_connection(lambda: Reader(request, count), "127.0.0.1", port)
        for _ in range(arguments.streams)
    ]
    await asyncio.sleep(WARM_UP_S)
    process = psutil.Process(server_pid)
    before, cpu_before, started_s = count.num_events, process.cpu_times(), time.monotonic()
    await asyncio.sleep(arguments.seconds)
    elapsed_s, num_events, cpu = time.monotonic() - started_s, count.num_events - before, process.cpu_times()
    user_s, system_s = cpu.user - cpu_before.user, cpu.system - cpu_before.system
    used_s = user_s + system_s
    for transport, _ in connections:
        transport.close()
    if count.num_failed:
        raise SystemExit(f"{count.num_failed} streams failed")
    if not num_events or not used_s:
        raise SystemExit(f"no token came within {elapsed_s:.1f} s, or none that cost CPU time: try more --seconds")
    return (
        f"{arguments.endpoint}: {num_events / elapsed_s:,.0f} events/s delivered with {used_s / elapsed_s:.2f} cores: "
        f"{num_events / used_s:,.0f} events/s per core; an event costs {user_s / num_events * 1e6:.1f} us in the "
        f"process and {system_s / num_events * 1e6:.1f} us in the kernel"
    )


async def until_listening(port: int) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                answer = await reader.read()
                writer.close()
                if answer.startswith(b"HTTP/1.1 200"):
                    return
            except OSError:
                pass
            await asyncio.sleep(0.1)


@dataclass
class Count:
    num_events: int = 0
    num_failed: int = 0


class Reader(asyncio.Protocol):
    """One connection: asks again as soon as an answer has ended. Counts events that hold text, as neither an answer's
    usage does nor, in a chat, its role and the reason of its end."""

    def __init__(self, request: bytes, count: Count) -> None:
        self._request = request
        self._count = count
        self._rest = b""  # of an event that has not arrived whole
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        data = self._rest + data
        whole, _, self._rest = data.rpartition(b"\n\n")
        for begin in TEXT:
            self._count.num_events += whole.count(begin) - whole.count(begin + b'"')
        if b'"error"' in data:
            self._count.num_failed += 1
        if data.endswith(b"0\r\n\r\n"):
            self._rest = b""
            self._transport.write(self._request)


def serve(port: int, data_dir: str, step_ms: float, profile: str | None) -> int:
    """The API process, with a worker that is this file again."""
    base = resolve_model(ModelConfig(MODEL))
    config = ServerConfig(
        ModelConfig(MODEL), batch=BatchConfig(max_queue=4096), api=ApiConfig(port=port), data_dir=data_dir
    )
    command = (sys.executable, __file__, "--role", "worker", "--step-ms", str(step_ms))
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    code = run_server(config, BaseModel(base.folder, base.spec.vocab_size, MODEL), print, worker_command=command)
    if profile:
        profiler.disable()
        profiler.dump_stats(profile)
    return code


def work(channel: WorkerChannel, step_s: float) -> None:
    """One token for every live request each step; the tokens go through the vocabulary's ordinary ones."""
    live: dict[str, tuple[int, int]] = {}  # tokens sent, and tokens wanted
    next_step_s = next_stats_s = time.monotonic()
    while os.getppid() != 1:
        next_step_s = max(next_step_s + step_s, time.monotonic())
        while (left_s := next_step_s - time.monotonic()) > 0:
            time.sleep(left_s)
        for message in channel.receive():
            match message:
                case AddRequest(request):
                    live[request.request_id] = 0, request.sampling.max_tokens
                case AbortRequests(request_ids):
                    for request_id in request_ids:
                        live.pop(request_id, None)
                case Drain():
                    channel.send(Drained())
                    return
        outputs: list[SequenceOutput] = []
        for request_id, (num_sent, num_wanted) in list(live.items()):
            is_last = num_sent + 1 == num_wanted
            reason = FinishReason.LENGTH if is_last else None
            outputs.append(SequenceOutput(request_id, (300 + num_sent % 500,), finish_reason=reason))
            if is_last:
                del live[request_id]
            else:
                live[request_id] = num_sent + 1, num_wanted
        if outputs:
            channel.send(Outputs(tuple(outputs)))
        if time.monotonic() >= next_stats_s:
            next_stats_s += STATS_EVERY_S
            channel.send(Stats(num_running=len(live)))


def worker() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--role")
    parser.add_argument("--step-ms", type=float)
    parser.add_argument("--address")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--parent-pid", type=int)
    arguments = parser.parse_args()
    config = msgspec.json.decode(arguments.config.read_bytes(), type=ServerConfig)
    spec = resolve_model(ModelConfig(MODEL)).spec
    channel = WorkerChannel(arguments.address)
    policy = config.coexecution.policy
    slo = Slo(500.0, 40.0)
    channel.send(
        Ready(MAX_MODEL_LEN, spec.num_layers, spec.vocab_size, 16, 16, "none", "float32", policy, slo, load_s=0.0)
    )
    work(channel, arguments.step_ms / 1e3)
    channel.close()


def server() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--role")
    parser.add_argument("--port", type=int)
    parser.add_argument("--data-dir")
    parser.add_argument("--step-ms", type=float)
    parser.add_argument("--profile")
    arguments = parser.parse_args()
    return serve(arguments.port, arguments.data_dir, arguments.step_ms, arguments.profile)


if __name__ == "__main__":
    role = sys.argv[2] if sys.argv[1:2] == ["--role"] else "clients"
    sys.exit({"clients": main, "server": server, "worker": worker}[role]())
