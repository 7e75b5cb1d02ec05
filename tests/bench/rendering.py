"""bench/render.py, and results of the bench for it to render."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from cotenant.bench.comparison import compare

ROOT = Path(__file__).parents[2]


def render(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "bench" / "render.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def colocate_cell(policy: str, harvest: float, attainment: float | None, **more: Any) -> dict[str, Any]:
    latency = {"p50": 5.0, "p90": 8.0, "p99": None, "mean": 5.5}
    return {
        "load": "trace",
        "trace": "conv",
        "format": "azure",
        "time_scale": 0.5,
        "policy": policy,
        "slo": {"ttft_ms": 500.0, "tpot_ms": 40.0},
        "duration_s": 60.0,
        "num_requests": 90,
        "attainment": attainment,
        "ttft_ms": latency,
        "tpot_ms": {**latency, "p99": 9.25},
        "itl_ms": None,
        "train_tokens_per_s": 1000 * harvest,
        "harvest": harvest,
        "prediction_error": {"alone": None, "co_run": {"mean": 0.021, "p95": 0.08, "iterations": 40}},
        **more,
    }


def colocated(cells: list[dict[str, Any]]) -> dict[str, Any]:
    result = {
        "kind": "colocate",
        "command": "cotenant bench colocate tiny",
        "model": "tiny",
        "dtype": "float32",
        "machine": {"cpu": "A CPU", "num_cores": 4, "gpus": []},
        "versions": {"torch": "2.13.0"},
        "training": {"seq_len": 16, "tokens_per_step": 32, "r": 16},
        "train_alone_tokens_per_s": 1000.0,
        "cells": cells,
    }
    return {**result, "comparison": compare(result, 0.99)}


def device_time(*, prompts: float) -> dict[str, float]:
    shares = {"prompts_shared": 0.0, "decode_alone": 0.02, "decode_shared": 0.1, "training_alone": 0.7, "rest": 0.03}
    return {"prompts_alone": prompts, **shares, "training_work": 0.7}
