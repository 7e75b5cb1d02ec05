"""What a server that cannot start says, before anything is served."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from cli.served import FLAGS
from cotenant.bench.server import free_port
from cotenant.config import ModelConfig
from cotenant.models.lora import LoraAdapter, save_adapter
from cotenant.models.registry import model_path, resolve_model
from cotenant.store import JobStatus, NewEvent, open_store
from forked import run_command
from serving import running_server, start_server
from small_model import CONFIG
from store.rows import add_job, add_running_job, make_adapter


def test_a_port_in_use_is_exit_code_1_and_says_so(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        failed = start_server(tmp_path / "data", "--port", str(port), wait=False)
        assert failed.wait_exit() == 1
    assert f"error: port {port} on 127.0.0.1 is in use" in failed.log
    assert "Traceback" not in failed.log


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
