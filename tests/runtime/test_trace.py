"""The worker's Chrome trace."""

from __future__ import annotations

import itertools
import json
import os
import resource
import time
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from cotenant.config import BatchConfig, CoExecutionConfig, LoraConfig, ModelConfig, ServerConfig
from cotenant.core.errors import InvalidInputError
from cotenant.core.plan import Mode, Plan, Slo, Snapshot
from cotenant.device import create_device
from cotenant.engine.engine import OnlineEngine
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.runtime.executor import Executor
from cotenant.runtime.loop import WorkerLoop
from cotenant.runtime.tenants import build_tenants
from cotenant.runtime.trace import Trace, Track
from cotenant.runtime.training import TrainingTenant
from cotenant.scheduler import create_policy
from cotenant.wire.messages import AddRequest
from finetune import support
from finetune.conftest import save_llama
from runtime.cotenancy import request
from runtime.driven_loop import Channel
from runtime.executor_bench import Bench
from runtime.side_by_side import FEW, SplitDevice


def test_what_the_lanes_did_when(tmp_path: Path) -> None:
    save_llama(tmp_path / "model")
    decoder, device = support.load(tmp_path / "model"), create_device("cpu")
    # Many tokens: tasklets of a shape that nobody has measured yet come one a step, and it is not predicted.
    num_tokens = 48
    channel = Channel(AddRequest(request("r", [5, 6, 7], num_tokens)))
    engine = OnlineEngine(decoder, 64, 4, BatchConfig(8, 64), 128, LoraConfig(), ())
    training = TrainingTenant(device, decoder, None, support.TASKLET_TOKENS, channel.send)
    training.start(support.make_spec(tmp_path / "job", n_epochs=1))
    predictor = LatencyPredictor("test", "test")
    trace = Trace(tmp_path / "trace.json")
    executor = Executor(device, decoder, engine, training, trace)
    policy = create_policy("adaptive", predictor)
    WorkerLoop(channel, engine, training, policy, executor, predictor, Slo(1e4, 1e3), False, trace=trace).run()
    events = _events(tmp_path / "trace.json")
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} >= {"loop", "online lane"}
    spans = {track: [event for event in events if event.get("tid") == track and event["ph"] == "X"] for track in Track}
    assert [event["name"] for event in spans[Track.ONLINE]] == ["prefill 3", *["decode 1"] * (num_tokens - 1)]
    kinds = {event["name"] for event in spans[Track.BEST_EFFORT]}
    assert kinds >= {"forward", "loss", "backward", "optimizer"}
    assert {event["name"] for event in spans[Track.LOOP]} == {"observe", "plan", "execute", "publish"}
    for track in Track:
        ends = [event["ts"] + event["dur"] for event in spans[track]]
        # To the digit that is written: viewers leave out what overlaps.
        begins_and_ends = zip(spans[track][1:], ends, strict=False)
        assert all(round(10 * event["ts"]) >= round(10 * end) for event, end in begins_and_ends), track
    iterations = [event["args"] for event in spans[Track.LOOP] if event["name"] == "execute"]
    assert "temporal" in {each["mode"] for each in iterations}
    assert sum(each["ended_tasklets"] for each in iterations) == len(spans[Track.BEST_EFFORT])
    predicted = [each for each in iterations if each["predicted_ms"] is not None]
    assert predicted, "of what was measured before"
    assert all(each["taken_ms"] > 0 and each["predicted_ms"] > 0 for each in predicted)
    # The record's figure of that name is the plan's.
    assert all(each["planned_ms"] == each["record"]["predicted_ms"] for each in iterations)
    assert any(each["planned_ms"] not in (None, each["predicted_ms"]) for each in iterations)


def test_what_was_before_a_failure_is_in_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_llama(tmp_path / "model")
    decoder, device = support.load(tmp_path / "model"), create_device("cpu")
    channel = Channel(AddRequest(request("r", [5, 6, 7], 8)))
    engine = OnlineEngine(decoder, 64, 4, BatchConfig(8, 64), 128, LoraConfig(), ())
    training = TrainingTenant(device, decoder, None, support.TASKLET_TOKENS, channel.send)
    predictor, trace = LatencyPredictor("test", "test"), Trace(tmp_path / "trace.json")
    executor = Executor(device, decoder, engine, training, trace)
    policy = create_policy("inference-only", predictor)
    loop = WorkerLoop(channel, engine, training, policy, executor, predictor, Slo(1e4, 1e3), False, trace=trace)
    plan, plans = policy.plan, itertools.count()

    def fail_at_the_fifth(snapshot: Snapshot) -> Plan:
        if next(plans) == 4:
            raise RuntimeError("a policy that fails")
        return plan(snapshot)

    monkeypatch.setattr(policy, "plan", fail_at_the_fifth)
    with pytest.raises(RuntimeError):
        loop.run()
    names = [event["name"] for event in _events(tmp_path / "trace.json")]
    assert names.count("execute") == 4
    assert names[-1] == "end"


def test_what_shares_a_batch_and_where_is_told(tmp_path: Path) -> None:
    """Fused tasklets stand at their batch, a batch in a partition has its SMs, tasklets there a row of their own."""
    trace = Trace(tmp_path / "trace.json")
    bench = Bench(tmp_path, SplitDevice(), trace=trace)
    bench.engine.add(request("r", [5, 6, 7], 8))
    bench.run(Plan())
    fused = Plan(num_tasklets=2, num_fused=2, mode=Mode.FUSED)
    bench.run(fused)  # the prompt's batch lands
    bench.run(fused)
    bench.run(Plan(num_tasklets=2, num_beside=1, partition=FEW, mode=Mode.SPATIAL))
    bench.pause()
    trace.close()
    events = _events(tmp_path / "trace.json")
    batches = [event for event in events if event.get("tid") == Track.ONLINE and event["ph"] == "X"]
    shared = [{key: event["args"].get(key) for key in ("fused", "sms")} for event in batches]
    tokens = shared[1]["fused"]["tokens"]
    assert tokens > 0
    assert shared == [
        {"fused": None, "sms": None},
        {"fused": {"kind": "forward", "tasklets": 2, "tokens": tokens}, "sms": None},
        {"fused": None, "sms": FEW.online_sms},
    ]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    rows = [names[event["tid"]] for event in events if event["ph"] == "X" and event["tid"] >= Track.BEST_EFFORT]
    assert Counter(rows) == {"best-effort lane": 2, f"best-effort lane, {FEW.best_effort_sms} SMs": 1}


def test_a_trace_begins_anew_and_the_one_before_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for _ in range(2):
        trace = Trace(path)
        trace.span(Track.LOOP, "observe", 1.0, 2.0)
        trace.close()
    *_, span, end = json.loads(path.read_text())
    assert (span["dur"], end["name"]) == (1e6, "end")
    assert len(_events(tmp_path / "trace.json.old")) == len(_events(path))


def test_the_traces_of_the_last_four_workers_are_kept(tmp_path: Path) -> None:
    """Of a server that ends because its worker died five times, the first one's is among them."""
    path = tmp_path / "trace.json"
    for worker in range(7):
        trace = Trace(path)
        trace.mark(f"worker {worker}")
        trace.close()
    kept = ["trace.json", *(f"trace.json.old{number}" for number in ("", ".2", ".3", ".4"))]
    assert sorted(each.name for each in tmp_path.iterdir()) == kept
    assert [_events(tmp_path / name)[-2]["name"] for name in kept] == [f"worker {number}" for number in (6, 5, 4, 3, 2)]


def test_a_servers_says_which_model_and_policy_it_is_of_and_since_when(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    model, targets = ModelConfig("tiny", device="cpu"), CoExecutionConfig(slo_ttft_ms=1e4, slo_tpot_ms=1e3)
    config = ServerConfig(model, coexecution=targets, trace_file=str(path), data_dir=str(tmp_path / "data"))
    trace = build_tenants(config, lambda message: None).trace
    assert trace is not None
    trace.close()
    (name,) = [event["args"]["name"] for event in _events(path) if event["name"] == "process_name"]
    about, _, since = name.partition(", since ")
    assert about == "cotenant worker: tiny, policy adaptive"
    assert abs(datetime.strptime(since, "%Y-%m-%d %H:%M:%S %z").timestamp() - time.time()) < 120


def test_a_folder_that_is_missing_is_made(tmp_path: Path) -> None:
    path = tmp_path / "traces" / "today" / "trace.json"
    Trace(path).close()
    assert _events(path)[-1]["name"] == "end"


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInputError, match=r"--trace-file: .*file/traces/trace\.json cannot be written"):
        Trace(tmp_path / "file" / "traces" / "trace.json")


def test_nothing_but_a_trace_makes_way_for_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").write_text("[1, 2]")
    os.mkfifo(tmp_path / "pipe")
    names = {path.name for path in tmp_path.iterdir()}
    for name, complaint in (("folder", "is a folder"), ("notes.txt", "is no trace"), ("pipe", "is no trace")):
        with pytest.raises(InvalidInputError, match=f"--trace-file: .*{name} .*{complaint}"):
            Trace(tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == names
    (tmp_path / "empty").touch()
    Trace(tmp_path / "empty").close()


def test_a_trace_that_is_being_written_stays_where_it_is(tmp_path: Path) -> None:
    first = Trace(tmp_path / "trace.json")
    with pytest.raises(InvalidInputError, match=r"--trace-file: another server is writing .*trace\.json; name another"):
        Trace(tmp_path / "trace.json")
    first.close()
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    Trace(tmp_path / "trace.json").close()


def test_a_full_disk_ends_the_trace_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = Trace(tmp_path / "trace.json")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        for _ in range(3):
            trace.span(Track.LOOP, "observe", 1.0, 2.0)
        trace.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [record.message for record in caplog.records if "the trace ends here" in record.message]


def test_a_trace_that_a_full_disk_cuts_ends_behind_an_event(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = Trace(path)
    for _ in range(30):
        trace.span(Track.LOOP, "observe", 1.0, 2.0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    time.sleep(1.0)  # it is written once a second
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        trace.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    trace.span(Track.LOOP, "plan", 2.0, 3.0)
    trace.close()
    assert 1800 < path.stat().st_size <= 2000
    assert _events(path)[-1]["name"] == "observe"


def _events(path: Path) -> list[dict[str, Any]]:
    """As a viewer reads it: the end of the array may be missing."""
    text = path.read_text().rstrip()
    return json.loads(text if text.endswith("]") else text.rstrip(",") + "]")  # type: ignore[no-any-return]
