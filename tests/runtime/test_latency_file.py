"""What was measured is kept, also by a server that is never idle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cotenant.config import BatchConfig, CoExecutionConfig, ModelConfig, ServerConfig
from cotenant.core.plan import BatchShape, IterationRecord, Mode
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.runtime import loop as loop_module
from cotenant.runtime.latency_file import LatencyFile
from cotenant.runtime.tenants import build_tenants
from cotenant.wire.messages import AddRequest
from runtime.cotenancy import request
from runtime.test_loop import Channel, small_loop
from small_model import CONFIG

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
