"""A real server as its operator meets it: start, signals, kills, and what is said when it cannot start."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from cotenant.bench.server import free_port
from cotenant.config import ModelConfig
from cotenant.models.lora import LoraAdapter, save_adapter
from cotenant.models.registry import model_path, resolve_model
from cotenant.store import JobStatus, NewEvent, open_store
from forked import run_command
from online import figure_in
from serving import RunningServer, running_server, start_server, wait_gone
from small_model import CONFIG
from store.rows import add_job, add_running_job, make_adapter
from undisturbed import until_undisturbed

FLAGS = ("--slo-ttft-ms", "500", "--slo-tpot-ms", "100", "--max-model-len", "1024")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server for the tests that leave it running."""
    folder = tmp_path_factory.mktemp("serve")
    with running_server(folder / "data", *FLAGS, env={"COTENANT_API_KEY": "open-sesame"}) as running:
        yield running


def client_of(server: RunningServer) -> httpx.Client:
    return httpx.Client(base_url=server.base_url, headers={"Authorization": "Bearer open-sesame"}, timeout=60)


def body(max_tokens: int, stream: bool = False) -> dict[str, object]:
    return {"model": "tiny", "prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}


class Stream:
    """A streamed completion that a thread reads; ``events`` grows as they come."""

    def __init__(self, server: RunningServer, max_tokens: int) -> None:
        self.events: list[str] = []
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._read, args=(server, max_tokens), daemon=True)
        self._thread.start()

    def _read(self, server: RunningServer, max_tokens: int) -> None:
        try:
            with (
                client_of(server) as client,
                client.stream("POST", "/v1/completions", json=body(max_tokens, stream=True)) as response,
            ):
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            self.error = error

    def wait_first(self) -> None:
        wait_until(lambda: bool(self.events))

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


def wait_until(condition: object, timeout_s: float = 60) -> None:
    assert callable(condition)
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.02)


def test_the_ready_line_tells_where_and_what(server: RunningServer) -> None:
    """It comes once the server is healthy, which is what the fixture has waited for."""
    wait_until(lambda: re.search(r"^cotenant is ready: .*\n", server.log, re.MULTILINE))
    (line,) = re.findall(r"^cotenant is ready: .*\n", server.log, re.MULTILINE)
    assert server.base_url in line
    assert re.search(r"model tiny +policy adaptive +SLO TTFT 500\.0 ms TPOT 100\.0 ms ITL 300\.0 ms\n$", line)


def test_the_key_from_the_environment_guards_v1_only_and_reaches_no_log(server: RunningServer) -> None:
    assert httpx.get(f"{server.base_url}/v1/models", timeout=60).status_code == 401
    assert httpx.get(f"{server.base_url}/health", timeout=60).status_code == 200
    with client_of(server) as client:
        assert client.get("/v1/models").status_code == 200
    assert "open-sesame" not in server.log


def test_a_killed_worker_comes_back_and_only_a_started_stream_is_lost(server: RunningServer) -> None:
    for _ in range(3):
        before = counts(server)
        lost, answer = lose_worker(server)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 300
        server.wait_ready()
        num_prompt = answer.json()["usage"]["prompt_tokens"]
        assert [now - then for now, then in zip(counts(server), before, strict=True)] == [2, 2 * num_prompt, 2]
        if lost.events[-1] != "[DONE]":  # else the machine paused, and the stream had ended before
            break
    assert lost.events[-1] != "[DONE]"
    assert "error" in json.loads(lost.events[-1])


def counts(server: RunningServer) -> list[float]:
    """Requests that have ended, tokens of prompts that were begun, and first tokens."""
    metrics = httpx.get(f"{server.base_url}/metrics", timeout=60).text
    names = ("request_success_total", "prompt_tokens_total", "time_to_first_token_seconds_count")
    return [figure_in(metrics, name) for name in names]


def lose_worker(server: RunningServer) -> tuple[Stream, httpx.Response]:
    """Kill the worker while it streams: the stream at its end, and the answer to a request that had none by then."""
    num_begun = counts(server)[2]
    stream = Stream(server, max_tokens=900)
    stream.wait_first()
    answers: list[httpx.Response] = []

    def ask() -> None:
        with client_of(server) as client:
            answers.append(client.post("/v1/completions", json=body(300)))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: counts(server)[2] == num_begun + 2)  # both have begun
    server.kill_worker()
    stream.join()
    asking.join(60)
    return stream, answers[0]


def test_a_port_in_use_is_exit_code_1_and_says_so(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        failed = start_server(tmp_path / "data", "--port", str(port), wait=False)
        assert failed.wait_exit() == 1
    assert f"error: port {port} on 127.0.0.1 is in use" in failed.log
    assert "Traceback" not in failed.log


def test_a_second_server_on_the_same_data_folder_is_refused(server: RunningServer) -> None:
    second = start_server(server.data_dir, wait=False)
    assert second.wait_exit() == 2
    said = second.log[second.log.rindex("error:") :]
    assert str(server.data_dir) in said
    assert server.is_healthy()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_worker_that_cannot_start_says_why_and_ends_the_server(tmp_path: Path) -> None:
    failed = start_server(tmp_path / "data", "--device", "cuda", wait=False)
    assert failed.wait_exit() == 2
    assert re.search(r"^error: .*cuda", failed.log, re.MULTILINE | re.IGNORECASE)
    assert "Traceback" not in failed.log


@pytest.mark.parametrize(
    ("shapes", "flags"),
    [
        pytest.param({"vocab_size": 10**12}, (), id="weights"),
        pytest.param(
            {"max_position_embeddings": 2_000_000},
            ("--page-tokens", "1", "--max-num-seqs", "65536"),
            id="tables",
            marks=pytest.mark.skipif(psutil.virtual_memory().total > 1 << 39, reason="they may fit"),
        ),
    ],
)
def test_a_worker_without_enough_memory_to_start_says_so_once(
    tmp_path: Path, shapes: dict[str, int], flags: tuple[str, ...]
) -> None:
    folder, tiny = tmp_path / "model", model_path("tiny")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **shapes}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, folder)
    more = ("--load-format", "dummy", "--device", "cpu", *flags)
    failed = start_server(tmp_path / "data", *more, model=str(folder), wait=False)
    assert failed.wait_exit() == 2
    assert re.search(r"^error: there is not enough memory .*lower --max-model-len, --max-num-seqs", failed.log, re.M)
    assert failed.log.count("started") == 1
    assert "Traceback" not in failed.log


def broken_model(folder: Path, name: str) -> str:
    """A copy of the built-in model in which a tensor has become NaN."""
    shutil.copytree(model_path("tiny"), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors = {each: tensor.clone() for each, tensor in tensors.items()}
    tensors[name][...] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.input_layernorm.weight"])
def test_a_model_that_says_nothing_finite_is_refused_at_start(tmp_path: Path, name: str) -> None:
    failed = start_server(tmp_path / "data", *FLAGS, model=broken_model(tmp_path / "model", name), wait=False)
    assert failed.wait_exit() == 2
    (said,) = re.findall(r"^error: (.*)$", failed.log, re.MULTILINE)
    assert "logits are not finite" in said
    assert failed.log.count("not finite") == 2, "in the log, and as the error; not for each prompt"
    assert "--dtype float32" in said
    assert failed.log.count("started") == 1
    assert "Traceback" not in failed.log


def test_a_bad_adapter_of_a_flag_is_named_before_anything_is_served(tmp_path: Path) -> None:
    spec = resolve_model(ModelConfig("tiny")).spec
    config, weights = "adapter_config.json", "adapter_model.safetensors"

    def save(folder: Path, rank: int = 4) -> Path:
        adapter = LoraAdapter.trainable(spec, r=rank, alpha=8.0, target_modules=("q_proj",), seed=0)
        save_adapter(adapter, folder, "tiny")
        return folder

    def unknown_target(folder: Path) -> None:
        values = json.loads((folder / config).read_text()) | {"target_modules": ["q_proj", "lm_head"]}
        (folder / config).write_text(json.dumps(values))

    def diverged(folder: Path) -> None:
        tensors = load_file(folder / weights)
        tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"][1, 2] = torch.nan
        save_file(tensors, folder / weights)

    spoiled: dict[str, tuple[Callable[[Path], object], str]] = {
        "missing": (shutil.rmtree, "there is no folder"),
        "empty": (lambda folder: (folder / config).unlink(), f"holds no {config}"),
        "wide": (lambda folder: save(folder, 8), "q_proj is over --max-lora-rank, which is 4"),
        "strange": (unknown_target, "target_modules lm_head cannot have LoRA here"),
        "torn": (lambda folder: os.truncate(folder / weights, 100), f"{weights} is not a readable safetensors file"),
        "diverged": (diverged, "layers.0.self_attn.q_proj.lora_A.weight holds weights that are NaN or infinite"),
    }
    fine = save(tmp_path / "fine")
    for name, (spoil, complaint) in spoiled.items():
        folder, data_dir = save(tmp_path / name), tmp_path / f"{name}-data"
        spoil(folder)
        flags = ("--max-lora-rank", "4", "--lora-modules", f"fine={fine}", "--lora-modules", f"{name}={folder}")
        failed = run_command("serve", "tiny", "--data-dir", str(data_dir), "--port", str(free_port()), *flags)
        assert failed.returncode == 2
        (said,) = re.findall(r"^error: (.*)$", failed.stderr, re.MULTILINE)
        assert said.startswith(f"--lora-modules: '{name}'")
        assert str(tmp_path / name) in said
        assert complaint in said
        assert "Traceback" not in failed.stdout + failed.stderr
        assert not data_dir.exists()


def test_a_name_of_a_jobs_model_is_given_to_nothing_else(tmp_path: Path) -> None:
    """A server with the same flags starts once it has another name, or the model is gone."""
    spec, data_dir, other = resolve_model(ModelConfig("tiny")).spec, tmp_path / "data", tmp_path / "other"
    save_adapter(LoraAdapter.trainable(spec, r=4, alpha=8.0, target_modules=("q_proj",), seed=0), other, "tiny")
    with contextlib.closing(open_store(data_dir)) as store:
        done, queued, cancelled = add_running_job(store), add_job(store), add_job(store)
        path = make_adapter(store, done, "adapter")
        store.jobs.succeed(
            done.id, adapter_path=path, trained_tokens=1, total_steps=6, result_file=None, events=[NewEvent("done")]
        )
        checkpoint = f"{done.adapter_name}:ckpt-step-3"
        path = make_adapter(store, done, "checkpoints", "step-00000003")
        store.events.add_checkpoint(done.id, 3, checkpoint, path, None, NewEvent("saved"))
        store.jobs.change(cancelled.id, [JobStatus.VALIDATING], {"status": JobStatus.CANCELLED})
    flags = ("--data-dir", str(data_dir), "--port", str(free_port()))
    taken = {done.adapter_name: done, checkpoint: done, f"{queued.adapter_name}:ckpt-step-9": queued}
    for name, job in taken.items():
        for flag, value in (("--served-model-name", name), ("--lora-modules", f"{name}={other}")):
            failed = run_command("serve", "tiny", *flags, flag, value)
            assert failed.returncode == 2
            (said,) = re.findall(r"^error: (.*)$", failed.stderr, re.MULTILINE)
            assert said.startswith(f"{flag}: the name '{name}' is in use")
            assert f"fine-tuning job '{job.id}' in {data_dir}. Give another name" in said
            assert "Traceback" not in failed.stdout + failed.stderr
    named = ("--served-model-name", cancelled.adapter_name, "--lora-modules", f"mine={other}")
    for _ in range(2):  # what flags have named is no job's, the next time either
        with running_server(data_dir, *named) as running:
            listed = httpx.get(f"{running.base_url}/v1/models", timeout=60).json()["data"]
            assert {cancelled.adapter_name, "mine"} <= {card["id"] for card in listed}


def test_decode_steps_that_lack_are_measured_before_anybody_asks(tmp_path: Path) -> None:
    """By the worker, once it has nothing to do."""
    flags = ("--self-profile", "--max-num-seqs", "2", "--max-model-len", "512")
    with running_server(tmp_path / "data", *flags) as server:
        wait_until(lambda: "decode steps of 2 shapes were measured in idle time" in server.log)
        metrics = httpx.get(f"{server.base_url}/metrics", timeout=60).text
        assert re.search(r"^cotenant:prefix_cache_queries_total\S* 0\.0$", metrics, re.MULTILINE)
        assert server.stop() == 0
    (path,) = (tmp_path / "data" / "latencies").iterdir()
    batches = [shape[1] for _, shape, *_ in json.loads(path.read_text())["records"] if shape[0] == "batch"]
    longest = {size: max(context for count, context, *_ in batches if count == size) for size in (1, 2)}
    assert longest[1] >= 256, "calibration's have 76 at most"
    assert longest[2] >= 512


def test_sigterm_lets_running_streams_end(tmp_path: Path) -> None:
    with running_server(tmp_path / "data", *FLAGS) as server:
        stream = Stream(server, max_tokens=900)
        stream.wait_first()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not server.is_healthy())
        stream.join()
        assert stream.error is None
        assert stream.events[-1] == "[DONE]"
        assert server.wait_exit() == 0
        assert "Traceback" not in server.log


def test_the_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with running_server(tmp_path / "data", *FLAGS) as server:
        worker_pid = server.worker_pid()
        assert worker_pid is not None
        stream = Stream(server, max_tokens=1000)
        stream.wait_first()
        os.kill(worker_pid, signal.SIGSTOP)  # so that the first signal alone could not end it
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: "draining" in server.log)
        server.process.send_signal(signal.SIGINT)
        assert server.wait_exit(10) == 128 + signal.SIGINT
        assert re.search(r"WARNING .*: SIGINT again: stopping at once; 1 requests are cut off$", server.log, re.M)
        wait_gone(worker_pid)


def test_sigterm_while_the_model_is_loaded_ends_it_soon(tmp_path: Path) -> None:
    def stopped(attempt: int) -> str | None:
        with running_server(tmp_path / f"data-{attempt}", wait=False) as server:
            wait_until(lambda: "listening on" in server.log)
            status = httpx.get(f"{server.base_url}/health", timeout=60).status_code
            began_s = time.monotonic()
            assert server.stop() == 0
            took_s = time.monotonic() - began_s
            assert server.worker_pid() is None
        return None if status == 503 and took_s < 10 else f"/health had said {status}, and it took {took_s:.1f} s"

    until_undisturbed(stopped)


UPLOAD = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\nkept\r\n--b--\r\n'
)


def begin(server: RunningServer, method: str, path: str, kind: str, num_bytes: int, content: bytes) -> socket.socket:
    """A connection that has sent a request's head and ``content`` of its ``num_bytes``, and reads next to nothing."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {num_bytes}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def test_who_has_connected_before_sigterm_is_answered_and_not_reset(tmp_path: Path) -> None:
    content = json.dumps(body(2)).encode()
    with contextlib.ExitStack() as stack, running_server(tmp_path / "data", *FLAGS) as server:
        server.process.send_signal(signal.SIGSTOP)  # so that the kernel alone takes connections
        request = ("POST", "/v1/completions", "application/json", len(content), content)
        connections = [stack.enter_context(begin(server, *request)) for _ in range(100)]
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGCONT)
        answers = [connection.makefile("rb").read() for connection in connections]
        assert {answer[:12] for answer in answers} <= {b"HTTP/1.1 200", b"HTTP/1.1 503"}
        refused = [answer for answer in answers if b"shutting_down" in answer]
        assert refused
        assert all(b"\r\nretry-after:" in answer for answer in refused)
        assert server.wait_exit() == 0
        assert "cut" not in server.log


def test_clients_that_do_not_go_on_hold_a_drained_server_for_seconds(tmp_path: Path) -> None:
    """An upload and a request that do not end, and an answer that is not read; what ends meanwhile is kept."""
    form = "multipart/form-data; boundary=b"
    with contextlib.ExitStack() as stack, running_server(tmp_path / "data", *FLAGS) as server:
        file = {"file": ("large.txt", b"x" * (32 << 20))}
        large = httpx.post(f"{server.base_url}/v1/files", files=file, data={"purpose": "user_data"}, timeout=60)
        content_path = f"/v1/files/{large.json()['id']}/content"
        stack.enter_context(begin(server, "POST", "/v1/files", form, 10_000, UPLOAD[:-8]))
        stack.enter_context(begin(server, "POST", "/v1/completions", "application/json", 10_000, b"{"))
        unread = stack.enter_context(begin(server, "GET", content_path, "text/plain", 0, b""))
        assert unread.recv(12) == b"HTTP/1.1 200"
        late = stack.enter_context(begin(server, "POST", "/v1/files", form, len(UPLOAD), UPLOAD[:-8]))
        wait_until(lambda: len(list((server.data_dir / "files").iterdir())) == 3)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "drained" in server.log)
        late.sendall(UPLOAD[-8:])
        assert late.recv(12) == b"HTTP/1.1 200"
        assert server.wait_exit() == 0
        assert "cut 3 connections" in server.log
        assert "Traceback" not in server.log
        assert sorted(path.stat().st_size for path in (server.data_dir / "files").iterdir()) == [4, 32 << 20]


def test_a_signal_ends_a_server_that_lost_its_worker_and_waits_for_a_client(tmp_path: Path) -> None:
    with running_server(tmp_path / "data", *FLAGS) as server:
        stalled = begin(server, "POST", "/v1/completions", "application/json", 10_000, b"{")

        def has_given_up() -> bool:
            pid = server.worker_pid()
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return "5 times within 60 s" in server.log

        with stalled:
            wait_until(has_given_up)
            assert server.stop() == 1
        # Not after as long as a client is waited for that nobody is in a hurry for.
        assert logged_at(server, "cut 1 connections") - logged_at(server, "SIGTERM: stopping") < timedelta(seconds=5)


def logged_at(server: RunningServer, text: str) -> datetime:
    (line,) = (line for line in server.log.splitlines() if text in line)
    return datetime.strptime(" ".join(line.split()[:2]), "%Y-%m-%d %H:%M:%S,%f")


@pytest.mark.parametrize("moment", ["starting", "ready"])
def test_the_worker_dies_with_a_killed_server(moment: str, tmp_path: Path) -> None:
    with running_server(tmp_path / "data", *FLAGS, wait=moment == "ready") as server:
        wait_until(lambda: server.worker_pid() is not None)
        worker_pid = server.worker_pid()
        assert worker_pid is not None
        os.kill(server.process.pid, signal.SIGKILL)
        wait_gone(worker_pid, 10)


def test_a_server_waits_for_the_worker_of_one_that_was_killed(tmp_path: Path) -> None:
    """This process stands where a worker is that takes its time to end."""
    with running_server(tmp_path / "data", *FLAGS) as killed:
        worker_pid = killed.worker_pid()
    path = tmp_path / "data" / "WORKER"
    assert path.read_text() == f"{worker_pid}\n"
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        server = start_server(tmp_path / "data", *FLAGS, wait=False)
        try:
            told = f"waiting for the worker of a server that was killed, process {worker_pid}, to end"
            wait_until(lambda: told in server.log)
            assert not server.is_healthy()
            fcntl.flock(held, fcntl.LOCK_UN)
            server.wait_ready()
            assert server.stop() == 0
        finally:
            server.kill()
