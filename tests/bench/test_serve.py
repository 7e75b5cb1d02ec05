"""`cotenant bench serve` against a server whose answers are known, and against the real one."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from cotenant.bench.event_stream import EventStream
from cotenant.bench.generator import Endpoint, Generator, Share, ShareResult
from cotenant.bench.schedule import PlannedRequest
from cotenant.bench.serve import _first_model
from cotenant.bench.stream_client import ExchangeFailed, StreamClient
from cotenant.cli import bench_serve
from cotenant.cli.main import app
from cotenant.core.errors import CotenantError
from forked import run_command
from serving import running_server
from undisturbed import until_undisturbed

SSE_SERVER = Path(__file__).parent / "sse_server.py"
INTERVAL_MS = 20.0  # so long that an answer's time is little longer on a machine that has much to do


@contextmanager
def sse_server(*flags: str) -> Iterator[str]:
    """The URL of a server that streams an event every INTERVAL_MS."""
    command = [sys.executable, str(SSE_SERVER), "0", "--interval-ms", str(INTERVAL_MS), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def url() -> Iterator[str]:
    with sse_server() as address:
        yield address


def seen_by(url: str) -> list[dict[str, Any]]:
    """The bodies of its requests so far."""
    seen: list[dict[str, Any]] = httpx.get(f"{url}/seen", timeout=60, verify=False).json()  # as in serving.py
    return seen


def command(url: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "cotenant", "bench", "serve", "--url", url, *arguments]


def bench(url: str, folder: Path, *arguments: str, exit_code: int = 0) -> tuple[dict[str, Any], str]:
    """Run it; the report and what was printed."""
    path = folder / "result.json"
    run = run_command("bench", "serve", "--url", url, "--json", str(path), *arguments)
    assert run.returncode == exit_code, run.stdout + run.stderr
    assert run.stderr == ("" if exit_code == 0 else "error: no request was answered\n")
    return json.loads(path.read_text()), run.stdout


SHORT = ("--request-rate", "40", "--num-prompts", "20", "--random-input-len", "30", "--random-output-len", "20")
SLO = ("--slo-ttft-ms", "30000", "--slo-tpot-ms", "3000")


@pytest.mark.parametrize("processes", ["1", "3"])
def test_every_request_is_sent_and_measured(url: str, tmp_path: Path, processes: str) -> None:
    def measured(attempt: int) -> str | None:
        report, printed = bench(url, tmp_path, *SHORT, *SLO, "--processes", processes, "--label", "mine")
        assert (report["kind"], report["label"], report["model_id"]) == ("serve", "mine", "tiny")
        assert report["server_version"] == "1.2.3"
        assert (report["completed"], report["failed"], report["unfinished"]) == (20, 0, 0)
        assert (report["total_input_tokens"], report["total_output_tokens"]) == (600, 400)
        assert report["slo_attainment"] == 1.0
        assert report["request_goodput"] == report["request_throughput"] == pytest.approx(20 / report["duration"])
        assert report["generator"]["num_processes"] == int(processes)
        assert report["sustained"] is True
        assert "Successful requests:                     20" in printed
        seen = seen_by(url)[20 * attempt :]
        assert sorted(body["prompt_len"] for body in seen) == [30] * 20
        assert len({tuple(body["prompt"]) for body in seen}) == 20
        return unlike(report, median_tpot_ms=INTERVAL_MS)

    until_undisturbed(measured)


def unlike(report: dict[str, Any], **expected: float) -> str | None:
    """Those of these figures that are not as they should be: tokens that came while somebody was held up are read at
    once."""
    found = {name: report[name] for name in expected}
    return None if found == pytest.approx(expected, rel=0.3) else str(found)


def test_figures_are_those_of_the_detailed_arrays(url: str, tmp_path: Path) -> None:
    report, _ = bench(url, tmp_path, *SHORT, *SLO, "--save-detailed")
    ttfts = np.array(report["ttfts"])
    e2els = ttfts + np.array([sum(gaps) for gaps in report["itls"]])
    tpots = (e2els - ttfts) / (np.array(report["output_lens"]) - 1)
    for name, seconds in (("ttft", ttfts), ("e2el", e2els), ("tpot", tpots)):
        assert report[f"mean_{name}_ms"] == pytest.approx(seconds.mean() * 1e3)
        assert report[f"median_{name}_ms"] == pytest.approx(np.median(seconds) * 1e3)
        assert report[f"p99_{name}_ms"] == pytest.approx(np.percentile(seconds, 99) * 1e3)
    assert [len(gaps) for gaps in report["itls"]] == [19] * 20
    assert report["output_throughput"] == pytest.approx(400 / report["duration"])
    lags = np.array(report["start_times"]) - np.array(report["due_times"])
    assert lags.min() > -0.002  # a timer's tick
    assert report["generator"]["lag_ms"]["max"] == pytest.approx(lags.max() * 1e3)


@pytest.mark.parametrize(
    ("model", "failure", "message"),
    [
        ("busy", "HTTP 503", "too many requests"),
        ("hangs-up", "connection lost", ""),
        ("truncated", "truncated stream", "after 3 chunks"),
        ("error-event", "error event", "the worker died"),
        ("not-json", "malformed answer", ""),
        ("stalls", "timeout", "within 0.5 s"),
    ],
)
def test_a_failure_is_counted_by_its_kind(url: str, tmp_path: Path, model: str, failure: str, message: str) -> None:
    timeout_s = "0.5" if failure == "timeout" else "60"
    report, printed = bench(url, tmp_path, *SHORT, *SLO, "--model", model, "--timeout", timeout_s, exit_code=1)
    assert report["failures"] == {failure: 20}
    assert (report["completed"], report["failed"], report["slo_attainment"]) == (0, 20, 0.0)
    assert report["mean_ttft_ms"] is None
    assert report["sustained"] is False
    assert all(failure in example and message in example for example in report["failure_examples"])
    assert sum(report["failure_examples"].values()) == 20
    assert failure in printed


def test_the_same_failure_is_printed_once(url: str, tmp_path: Path) -> None:
    report, printed = bench(url, tmp_path, *SHORT, "--model", "busy", exit_code=1)
    ((text, count),) = report["failure_examples"].items()
    assert count == 20
    assert printed.count("too many requests") == 1
    assert f"  {text} (20 times)\n" in printed


@pytest.mark.parametrize("model", ["busy", "error-event"])
def test_a_refusal_leaves_its_connection_to_the_next_request(url: str, model: str) -> None:
    async def ask(client: StreamClient, name: str) -> str | None:
        try:
            await client.post(json.dumps({"model": name, "prompt": [1], "max_tokens": 5}).encode(), EventStream())
        except ExchangeFailed as error:
            return error.kind
        return None

    async def ask_all() -> list[str | None]:
        client = StreamClient(f"{url}/v1/completions", {}, 60.0)
        found = [await ask(client, name) for name in ("tiny", model, model, "tiny", "hangs-up", "tiny")]
        client.close()
        return found

    found = asyncio.run(ask_all())
    assert found[0] is found[3] is found[5] is None
    assert found[1] == found[2] in ("HTTP 503", "error event")
    assert found[4] == "connection lost"
    connections = [body["connection"] for body in seen_by(url)]
    assert connections[:5] == [1] * 5
    assert connections[-2] != connections[-1] != 1


@pytest.mark.parametrize("model", ["split", "no-usage", "closes"])
def test_unusual_answers_that_are_whole(url: str, tmp_path: Path, model: str) -> None:
    report, _ = bench(url, tmp_path, *SHORT, "--model", model)
    assert (report["completed"], report["total_output_tokens"]) == (20, 400)


def test_tokens_are_counted_from_usage_when_a_chunk_has_several(tmp_path: Path) -> None:
    interval_ms = 100.0  # so long that who is held up does not read several chunks at once
    with sse_server("--tokens-per-chunk", "4", "--interval-ms", str(interval_ms)) as address:

        def measured(_: int) -> str | None:
            report, _ = bench(address, tmp_path, *SHORT)
            assert report["total_output_tokens"] == 400
            return unlike(report, median_tpot_ms=4 * interval_ms / 19, median_itl_ms=interval_ms)

        until_undisturbed(measured)


def test_a_late_generator_says_so(url: str, tmp_path: Path) -> None:
    arguments = (
        "--request-rate",
        "inf",
        "--num-prompts",
        "3000",
        "--random-input-len",
        "4",
        "--random-output-len",
        "2",
    )
    report, printed = bench(url, tmp_path, *arguments)
    assert (report["completed"], report["request_rate"]) == (3000, "inf")
    assert report["generator"]["lag_ms"]["p99"] > 10
    assert "these figures are the generator's" in printed


def test_no_garbage_is_collected_once_the_first_request_is_due(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be late by as much."""
    collections = list[int]()

    async def run() -> ShareResult:
        endpoint = Endpoint(f"{url}/v1/completions", {}, 10.0)
        generator = Generator(Share(endpoint, [PlannedRequest(0, 0.0, 4, 2, "tiny")], 100, seed=0, nonce=0))
        generator.prepare()
        monkeypatch.setattr(gc, "collect", lambda generation=2: collections.append(generation))
        return await generator.run(time.monotonic())

    (outcome,) = asyncio.run(run()).outcomes
    assert outcome.finished
    assert not collections


def test_a_server_that_ends_early_is_noticed(url: str, tmp_path: Path) -> None:
    report, printed = bench(url, tmp_path, *SHORT, "--model", "short")
    assert report["short_answers"] == 20
    assert "shorter than asked for" in printed


def test_a_server_that_dies_during_the_run_is_a_failure_of_what_it_owed(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    arguments = ("--request-rate", "40", "--duration", "3", "--random-output-len", "20", "--json", str(path))

    def measured(_: int) -> str | None:
        with sse_server("--dies-after", "10") as address:
            process = subprocess.run(command(address, *arguments), capture_output=True, timeout=120, check=False)
        assert (process.returncode, process.stderr) == (0, b"")
        report = json.loads(path.read_text())
        assert report["completed"] >= 10
        assert report["completed"] + report["failed"] == 120
        assert set(report["failures"]) <= {"cannot connect", "truncated stream", "connection lost"}
        # A generator that was held up at first has sent all of them before the server dies.
        return None if "cannot connect" in report["failures"] else str(report["failures"])

    until_undisturbed(measured)


def test_adapters_are_drawn_for_each_request(url: str, tmp_path: Path) -> None:
    names = ["tiny", "tiny-b", "tiny-c"]
    report, _ = bench(url, tmp_path, *SHORT, "--lora-modules", "tiny,tiny-b", "--lora-modules", "tiny-c")
    assert report["lora_modules"] == names
    assert {body["model"] for body in seen_by(url)} == set(names)


def test_a_trace_is_replayed_with_shared_prefixes(url: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]},
        {"timestamp": 100, "input_length": 700, "output_length": 4, "hash_ids": [1, 3]},
        {"timestamp": 200, "input_length": 20, "output_length": 5, "hash_ids": [4]},
        {"timestamp": 90_000, "input_length": 20, "output_length": 5, "hash_ids": [4]},
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report, _ = bench(url, tmp_path, "--trace", str(trace), "--window", ":1", "--time-scale", "2", "--warmup", "2")
    assert (report["trace_format"], report["completed"], report["total_output_tokens"]) == ("mooncake", 3, 12)
    seen = seen_by(url)
    assert len(seen) == 5
    warm = [body["prompt"] for body in seen[:2]]
    third, first, second = sorted((body["prompt"] for body in seen[2:]), key=len)
    assert first[:512] == second[:512]
    assert first[512:] != second[512:]
    assert len(third) == 20
    assert all(prompt[:512] != first[:512] for prompt in warm)


def test_a_sweep_ends_with_the_first_rate_that_misses(url: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("Timestamp,Request tokens,Response tokens\n" + "".join(f"{at},5,8\n" for at in range(10)))
    arguments = ("--trace", str(trace), "--sweep", "20,40", "--slo-ttft-ms", "30000")
    report, printed = bench(url, tmp_path, *arguments, "--stop-when-missed", "--slo-tpot-ms", "0.5")
    assert [run["time_scale"] for run in report["runs"]] == [20.0]
    assert report["highest_sustained"] is None
    assert "no time_scale of these was sustained" in printed
    report, printed = bench(url, tmp_path, *arguments, "--stop-when-missed", "--slo-tpot-ms", "3000")
    assert [run["time_scale"] for run in report["runs"]] == [20.0, 40.0]
    assert (report["swept"], report["highest_sustained"]) == ("time_scale", 40.0)
    assert "highest time_scale sustained: 40" in printed
    prompts = [tuple(body["prompt"]) for body in seen_by(url)]
    assert len(set(prompts)) == 20, "two runs of one report must not share prompts"


def test_a_sweep_without_targets_judges_nothing_and_says_so(url: str, tmp_path: Path) -> None:
    _, printed = bench(url, tmp_path, *SHORT[2:], "--sweep", "40,80")
    assert "no request_rate was judged: give targets, as --slo-ttft-ms" in printed


def test_the_url_may_end_as_openais_clients_have_it(url: str, tmp_path: Path) -> None:
    report, _ = bench(f"{url}/v1", tmp_path, *SHORT)
    assert report["completed"] == 20


@pytest.mark.parametrize(
    ("ours", "openais", "given", "key"),
    [
        ("ours", "openais", (), "ours"),
        ("", "openais", (), "openais"),
        ("ours", "openais", ("--api-key", "flag"), "flag"),
        ("ours", "openais", ("--api-key", ""), None),
        ("", "", (), None),
    ],
)
def test_the_key_is_the_flags_then_ours_then_openais(
    ours: str, openais: str, given: tuple[str, ...], key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = list[dict[str, str]]()
    monkeypatch.setattr(bench_serve, "_measure", lambda options, *_: sent.append(options.headers))
    variables = {"COTENANT_API_KEY": ours, "OPENAI_API_KEY": openais}
    arguments = ["bench", "serve", "--url", "http://127.0.0.1:1", "--request-rate", "1", *given]
    assert CliRunner().invoke(app, arguments, env=variables).exit_code == 0
    assert sent == [{} if key is None else {"Authorization": f"Bearer {key}"}]


def test_a_server_that_names_no_model_is_named_whole() -> None:
    with pytest.raises(CotenantError, match=r"^http://a/b/v1/models names no model \(HTTP status 404\); name it"):
        _first_model(httpx.Client(base_url="http://a/b", transport=httpx.MockTransport(lambda _: httpx.Response(404))))


def test_results_of_several_servers_go_into_one_file(url: str, tmp_path: Path) -> None:
    for label in ("a", "b"):
        report, _ = bench(url, tmp_path, *SHORT, "--label", label, "--append-result")
    assert [one["label"] for one in report] == ["a", "b"]


@pytest.mark.parametrize("processes", ["1", "2"])
def test_interrupting_ends_the_run_and_reports(url: str, tmp_path: Path, processes: str) -> None:
    path = tmp_path / "result.json"
    arguments = ("--request-rate", "20", "--duration", "60", "--random-output-len", "30", "--processes", processes)
    process = subprocess.Popen(
        command(url, *arguments, "--json", str(path)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline_s = time.monotonic() + 120
    while httpx.get(f"{url}/read", timeout=60, verify=False).json() < 5:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    report = json.loads(path.read_text())
    assert report["interrupted"] is True
    assert report["completed"] >= 5
    assert report["failed"] == 0
    assert report["completed"] + report["unfinished"] == report["num_prompts"] == 1200
    assert "ended early" in printed


@pytest.mark.parametrize("sweep", ["40", "40,60"])
def test_what_was_measured_is_kept_though_nobody_reads_on(url: str, tmp_path: Path, sweep: str) -> None:
    path = tmp_path / "result.json"
    arguments = ("--sweep", sweep, "--num-prompts", "10", "--random-output-len", "5", "--json", str(path))
    process = subprocess.Popen(command(url, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "10 requests" in process.stdout.readline()
    process.stdout.close()
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (1, "")
    report = json.loads(path.read_text())
    runs = report.get("runs", [report])
    assert [(run["request_rate"], run["completed"]) for run in runs] == [(40.0, 10)]


def test_a_real_server(tmp_path: Path) -> None:
    flags = ("--slo-ttft-ms", "500", "--slo-tpot-ms", "100")
    arguments = ("--request-rate", "8", "--num-prompts", "16", "--random-input-len", "40", "--random-output-len", "9")
    with running_server(tmp_path / "data", *flags, env={"COTENANT_API_KEY": "open-sesame"}) as server:
        report, _ = bench(server.base_url, tmp_path, *arguments, *SLO, "--warmup", "2", "--api-key", "open-sesame")
        for given, said in (
            (
                (),
                f"the server at {server.base_url} asks for an API key: give --api-key, COTENANT_API_KEY or OPENAI_API",
            ),
            (("--api-key", "shazam"), "does not take this API key: check --api-key, COTENANT_API_KEY or OPENAI_API"),
        ):
            refused = run_command("bench", "serve", "--url", server.base_url, *arguments, *given)
            assert said in refused.stderr
            assert (refused.returncode, "--model" in refused.stderr) == (2, False)
    assert (report["completed"], report["total_input_tokens"], report["total_output_tokens"]) == (16, 640, 144)
    assert report["short_answers"] == 0
    assert "open-sesame" not in json.dumps(report)
