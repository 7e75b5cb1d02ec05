"""The attention of fused batches as a GPU runs it, where there is no GPU: see fused_on_cpu.py."""

from __future__ import annotations

from pathlib import Path

from engine.script_runs import run_script
from finetune.conftest import save_llama


def test_fused_batches_plan_each_wrapper_once_and_change_no_token(tmp_path: Path) -> None:
    save_llama(tmp_path)
    assert run_script(Path(__file__).parent / "fused_on_cpu.py", tmp_path).count("layers fused") == 3
