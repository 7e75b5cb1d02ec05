"""What was measured is kept, also by a server that is never idle."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cotenant.config import BatchConfig, CoExecutionConfig, ModelConfig, ServerConfig
from cotenant.core.plan import BatchShape, IterationRecord, Mode
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.runtime import loop as loop_module
from cotenant.runtime.latency_file import LatencyFile
from cotenant.runtime.tenants import build_tenants
from cotenant.wire.messages import AddRequest
from runtime.cotenancy import request
from runtime.driven_loop import Channel, iterate_until_answered, small_loop
from small_model import CONFIG
from taught import FORWARD, taught_predictor

NUM_SHAPES = 1000


def _learn(predictor: LatencyPredictor, num_decode: int) -> None:
    predictor.observe(IterationRecord(BatchShape(num_decode, 100), Mode.NONE, 2.0, 2.0))


def test_what_is_saved_in_parts_is_what_is_saved_at_once(tmp_path: Path) -> None:
    """Measurements that come meanwhile do no harm."""
    file, predictor = LatencyFile(tmp_path, "hardware", "model"), LatencyPredictor("hardware", "model")
    for num_decode in range(1, NUM_SHAPES + 1):
        _learn(predictor, num_decode)
    num_parts = 1
    while not file.save_part(predictor):
        num_parts += 1
        assert not file.path.exists()
        _learn(predictor, NUM_SHAPES + num_parts)
    assert num_parts > 5
    file.wait()
    again = LatencyPredictor("hardware", "model")
    assert NUM_SHAPES <= file.load(again) <= predictor.num_records
    file.save(predictor)
    assert file.load(LatencyPredictor("hardware", "model")) == predictor.num_records


def test_a_save_that_was_begun_in_parts_gives_way_to_a_whole_one(tmp_path: Path) -> None:
    file, predictor = LatencyFile(tmp_path, "hardware", "model"), LatencyPredictor("hardware", "model")
    _learn(predictor, 1)
    assert not file.save_part(predictor)
    _learn(predictor, 2)
    file.save(predictor)
    while not file.save_part(predictor):
        pass
    file.wait()
    assert file.load(LatencyPredictor("hardware", "model")) == 2


def test_that_it_cannot_be_written_is_told_and_harms_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "latencies").write_text("no folder")
    file = LatencyFile(tmp_path, "hardware", "model")
    while not file.save_part(LatencyPredictor("hardware", "model")):
        pass
    file.wait()
    assert [record.message for record in caplog.records if "latencies cannot be kept" in record.message]


def _ways(node: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """To all that a JSON document holds."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in pairs:
        yield (*way, key)
        yield from _ways(value, (*way, key))


EXPORTED = taught_predictor(2.0, 1.0, 3.0).export().decode()
WAYS = sorted(_ways(json.loads(EXPORTED)), key=str)
NUMBERS = st.sampled_from([0, -1, -0.0, 5e-324, 1e-300, 9e11, 1e12, 1e308, 2**63, 10**30, 10**400]) | st.integers()
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(WAYS), VALUES), min_size=1, max_size=3))
@example([(("batches", 0, 0, 0), 9e11)])  # taken over, and beyond what can be by what is learned then
def test_nothing_that_the_file_may_hold_keeps_a_worker_from_starting(
    tmp_path: Path, changes: list[tuple[tuple[Any, ...], Any]]
) -> None:
    content = json.loads(EXPORTED)
    for way, value in changes:
        node = content
        with suppress(KeyError, IndexError, TypeError):  # another change has taken it away
            for key in way[:-1]:
                node = node[key]
            node[way[-1]] = value
    file, predictor = _file_of(tmp_path, json.dumps(content)), LatencyPredictor("test hardware", "test model")
    file.load(predictor)
    for num_decode in (1, 4, 8):
        predictor.batch_ms(BatchShape(num_decode, 100 * num_decode))
        predictor.tasklet_ms(FORWARD, with_batch=BatchShape(num_decode, 100 * num_decode))
        _learn(predictor, num_decode)
    file.write(predictor)
    assert file.load(LatencyPredictor("test hardware", "test model")) == predictor.num_records


def _file_of(folder: Path, content: str | None = None) -> LatencyFile:
    file = LatencyFile(folder, "test hardware", "test model")
    file.path.parent.mkdir(exist_ok=True)
    if content is not None:
        file.path.write_text(content)
    return file


def _holding(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


@pytest.mark.parametrize(
    "put",
    [
        _holding(""),
        _holding("[" * 100_000),
        _holding(EXPORTED.replace('"records":[', f'"more":{"[" * 5000 + "]" * 5000},"records":[')),
        _holding(EXPORTED.replace('"records":[', '"records":[[[[1]],["batch",[1,1,1,1]],1.0,0.0,5],')),
        _holding(EXPORTED.replace("2.0", "NaN")),
        _holding(EXPORTED.replace("2.0", "1e999")),
        lambda path: path.write_bytes(b"\xff\x00"),
        lambda path: path.write_bytes(b"") or os.truncate(path, 1 << 40),
        Path.mkdir,
        os.mkfifo,
        lambda path: path.symlink_to(path),
    ],
    ids=["empty", "nested", "deep", "list", "nan", "infinite", "bytes", "endless", "folder", "pipe", "loop"],
)
def test_what_was_never_saved_is_passed_over_with_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, put: Callable[[Path], object]
) -> None:
    file, predictor = _file_of(tmp_path), LatencyPredictor("test hardware", "test model")
    put(file.path)
    assert file.load(predictor) == 0
    (record,) = caplog.records
    assert str(file.path) in record.message
    assert "\n" not in record.message
    assert predictor.num_records == 0


@pytest.mark.parametrize("is_long", [False, True])
def test_a_loop_that_is_never_idle_saves_by_parts(
    is_long: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "_STATS_EVERY_S", 0.0)
    if is_long:  # since the last time
        monkeypatch.setattr(loop_module, "_SAVE_EVERY_S", -1.0)
        monkeypatch.setattr(loop_module, "_SAVE_BUSY_AFTER_S", 0.0)
    num_parts = 0

    def save_part() -> bool:
        nonlocal num_parts
        num_parts += 1
        return num_parts % 3 == 0

    channel = Channel(AddRequest(request("r", [5, 6, 7], 30)))
    loop, _ = small_loop(tmp_path, channel, "adaptive", save_part=save_part)
    for _ in range(20):
        loop.iterate()
    assert num_parts == (19 if is_long else 0), "nothing was learned before the first"
    loop.run()


def test_an_idle_loop_saves_by_parts_and_then_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "_SAVE_EVERY_S", -1.0)
    num_parts = 0

    def save_part() -> bool:
        nonlocal num_parts
        num_parts += 1
        return num_parts == 3

    channel = Channel(AddRequest(request("r", [5, 6, 7], 2)))
    loop, _ = small_loop(tmp_path, channel, "adaptive", save_part=save_part)
    iterate_until_answered(loop, channel, "r")
    assert num_parts == 0
    for expected in (1, 2, 3, 3, 3):
        loop.iterate()
        assert num_parts == expected
    loop.run()


def test_a_disk_that_hangs_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, predictor = LatencyFile(tmp_path, "hardware", "model"), LatencyPredictor("hardware", "model")
    _learn(predictor, 1)
    goes_on = threading.Event()
    monkeypatch.setattr(file, "_write", lambda exported: goes_on.wait(60))
    for _ in range(2):
        while not file.save_part(predictor):
            pass
    assert threading.active_count() > 1
    goes_on.set()
    file.wait()


def test_it_is_the_models_whatever_name_it_is_served_under(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG))

    def path(model: Path, *names: str, dtype: str = "auto", enforce_eager: bool = False) -> Path:
        chosen = ModelConfig(str(model), served_model_names=names, load_format="dummy", dtype=dtype, device="cpu")
        targets = CoExecutionConfig(slo_ttft_ms=1e4, slo_tpot_ms=1e3)
        batch = BatchConfig(enforce_eager=enforce_eager)
        config = ServerConfig(model=chosen, batch=batch, coexecution=targets, data_dir=str(tmp_path / "data"))
        return build_tenants(config, lambda message: None).latencies.path

    first = path(here)
    assert path(there, "llama") == first
    assert path(here, dtype="bfloat16") != first
    assert path(here, enforce_eager=True) != first
    (there / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 1}))
    assert path(there, "llama") != first
