"""A real server whose adapters come and go: what it answers, what it serves, and who may ask."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

import serving
from cotenant.config import ModelConfig
from cotenant.models.loading import load_decoder
from cotenant.models.lora import LoraAdapter, save_adapter
from cotenant.models.registry import resolve_model
from online import error_of

KEY = "open sesame"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Folders of two adapters for the built-in model that change what it says."""
    decoder = load_decoder(resolve_model(ModelConfig("tiny")), torch.device("cpu"), torch.float32, 0)
    folders: list[str] = []
    for seed in (1, 2):
        adapter = LoraAdapter.trainable(decoder.spec, r=4, alpha=8.0, target_modules=("q_proj", "down_proj"), seed=seed)
        with torch.no_grad():
            for _, b in adapter.weights.values():
                b.normal_(generator=torch.Generator().manual_seed(seed))
        folder = tmp_path_factory.mktemp("adapters") / str(seed)
        save_adapter(adapter, folder, "tiny")
        folders.append(str(folder))
    return folders


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, adapters: list[str]) -> Iterator[serving.RunningServer]:
    flags = ("--lora-modules", f"flagged={adapters[0]}", "--max-loras", "2")
    with serving.running_server(
        tmp_path_factory.mktemp("adapters") / "data", *flags, env={"COTENANT_API_KEY": KEY}
    ) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: serving.RunningServer) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.base_url, timeout=60, headers=headers) as session:
        yield session


def say(http: httpx.Client, model: str) -> str:
    body = {"model": model, "prompt": "The sun", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def load(http: httpx.Client, name: str, path: str, **more: Any) -> httpx.Response:
    return http.post(LOAD, json={"lora_name": name, "lora_path": path, **more})


def unload(http: httpx.Client, name: str) -> httpx.Response:
    return http.post(UNLOAD, json={"lora_name": name})


def test_an_adapter_comes_and_goes(http: httpx.Client, adapters: list[str]) -> None:
    base, flagged = say(http, "tiny"), say(http, "flagged")
    answer = load(http, "new", adapters[1])
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert answer.headers["content-type"].startswith("text/plain")
    new = say(http, "new")
    assert len({base, flagged, new}) == 3
    card = http.get("/v1/models/new").json()
    assert (card["parent"], card["root"]) == ("tiny", adapters[1])
    answer = unload(http, "new")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
    assert http.post("/v1/completions", json={"model": "new", "prompt": "a"}).status_code == 404
    assert "new" not in [model["id"] for model in http.get("/v1/models").json()["data"]]
    assert unload(http, "new").status_code == 404
    assert (say(http, "tiny"), say(http, "flagged")) == (base, flagged)


def test_an_adapter_of_the_users_cannot_be_deleted(http: httpx.Client, adapters: list[str]) -> None:
    assert load(http, "loaded", adapters[1]).status_code == 200
    for name in ("flagged", "loaded"):
        answer = http.delete(f"/v1/models/{name}")
        assert answer.status_code == 400
        error = error_of(answer)
        assert "/v1/unload_lora_adapter" in error["message"]
        say(http, name)
    assert unload(http, "loaded").status_code == 200


def test_loading_in_place_serves_what_the_folder_holds_now(
    http: httpx.Client, adapters: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(adapters[0], folder)
    assert load(http, "changing", str(folder)).status_code == 200
    first = say(http, "changing")
    shutil.copytree(adapters[1], folder, dirs_exist_ok=True)
    again = load(http, "changing", str(folder))
    assert again.status_code == 400
    assert "load_inplace" in error_of(again)["message"]
    assert load(http, "changing", str(folder), load_inplace=True).status_code == 200
    second = say(http, "changing")
    assert first == say(http, "flagged")
    assert first != second
    assert unload(http, "changing").status_code == 200


def test_a_loop_of_links_is_no_folder(http: httpx.Client, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    answer = load(http, "new", str(tmp_path / "loop"))
    assert (answer.status_code, error_of(answer)["code"], error_of(answer)["param"]) == (404, "not_found", "lora_path")


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_weights_that_are_not_finite_are_refused(
    http: httpx.Client, adapters: list[str], tmp_path: Path, value: float
) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(adapters[0], folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    name = max(tensors)
    tensors[name][0, 0] = value
    save_file(tensors, folder / "adapter_model.safetensors")
    answer = load(http, "diverged", str(folder))
    assert answer.status_code == 400
    error = error_of(answer)
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_adapter", "lora_path")
    assert f"{name} holds weights that are NaN or infinite" in error["message"]
    assert http.post("/v1/completions", json={"model": "diverged", "prompt": "a"}).status_code == 404


def test_a_refused_reload_leaves_the_old_adapter_serving(
    http: httpx.Client, adapters: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(adapters[1], folder)
    assert load(http, "staying", str(folder)).status_code == 200
    before = say(http, "staying")
    (folder / "adapter_model.safetensors").write_bytes(b"torn")
    fresh = load(http, "another", str(folder))
    again = load(http, "staying", str(folder), load_inplace=True)
    assert (again.status_code, again.json()) == (fresh.status_code, fresh.json())
    error = error_of(again)
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_adapter")
    assert (error["param"], str(folder) in error["message"]) == ("lora_path", True)
    assert say(http, "staying") == before
    assert load(http, "staying", str(tmp_path), load_inplace=True).status_code == 400
    assert http.get("/v1/models/staying").json()["root"] == str(folder)
    assert say(http, "staying") == before
    assert unload(http, "staying").status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (LOAD, {"lora_name": "x"}, 400, "lora_path"),
        (LOAD, {"lora_path": "x"}, 400, "lora_name"),
        (LOAD, {"lora_name": "", "lora_path": "x"}, 400, "lora_name"),
        (LOAD, {"lora_name": " ", "lora_path": "/tmp"}, 400, "lora_name"),
        (LOAD, {"lora_name": "a\nb", "lora_path": "/tmp"}, 400, "lora_name"),
        (LOAD, {"lora_name": "\u202ea", "lora_path": "/tmp"}, 400, "lora_name"),
        (LOAD, {"lora_name": "tiny ", "lora_path": "/tmp"}, 400, "lora_name"),
        (LOAD, {"lora_name": "x", "lora_path": 5}, 400, "lora_path"),
        (LOAD, {"lora_name": "x", "lora_path": "/nowhere"}, 404, "lora_path"),
        (LOAD, {"lora_name": "x", "lora_path": "/nowhere", "colour": "red"}, 400, "colour"),
        (LOAD, {"lora_name": "tiny", "lora_path": "/tmp"}, 400, "lora_name"),
        (LOAD, {"lora_name": "flagged", "lora_path": "/tmp"}, 400, "lora_name"),
        (UNLOAD, {}, 400, "lora_name"),
        (UNLOAD, {"lora_name": "nobody"}, 404, "lora_name"),
        (UNLOAD, {"lora_name": "tiny"}, 404, "lora_name"),
    ],
)
def test_what_is_wrong_is_named(http: httpx.Client, path: str, body: dict[str, Any], status: int, param: str) -> None:
    response = http.post(path, json=body)
    assert (response.status_code, error_of(response)["param"]) == (status, param)


def test_a_folder_that_holds_no_adapter_is_refused_in_the_workers_words(http: httpx.Client, tmp_path: Path) -> None:
    for _ in range(2):  # nothing of the first attempt is left
        response = load(http, "empty", str(tmp_path))
        assert response.status_code == 400
        assert str(tmp_path) in error_of(response)["message"]
    assert http.get("/v1/models/empty").status_code == 404


def test_pipes_in_the_place_of_an_adapters_files_hold_nobody(
    http: httpx.Client, adapters: list[str], tmp_path: Path
) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        folder = tmp_path / name
        shutil.copytree(adapters[0], folder)
        (folder / name).unlink()
        os.mkfifo(folder / name)
        response = load(http, "piped", str(folder))
        assert (response.status_code, name in error_of(response)["message"]) == (400, True)
    assert load(http, "whole", adapters[0]).status_code == 200
    assert unload(http, "whole").status_code == 200


def test_an_adapter_whose_output_is_no_number_is_named(
    server: serving.RunningServer, http: httpx.Client, adapters: list[str], tmp_path: Path
) -> None:
    shutil.copytree(adapters[1], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    save_file(
        {name: torch.full_like(tensor, torch.finfo(tensor.dtype).max) for name, tensor in tensors.items()},
        tmp_path / "adapter_model.safetensors",
    )
    assert load(http, "broken", str(tmp_path)).status_code == 200
    words = "The output of the adapter 'broken' for this request is not a number."
    body = {"model": "broken", "prompt": "a"}
    for more in ({}, {"stream": True}):
        answer = http.post("/v1/completions", json={**body, **more}, headers={"x-request-id": f"asked-{len(more)}"})
        assert answer.status_code == 500
        assert (error_of(answer)["code"], error_of(answer)["message"]) == ("model_failed", words)
        (line,) = [line for line in server.log.splitlines() if f"asked-{len(more)}" in line]
        assert words in line
    assert unload(http, "broken").status_code == 200


def test_the_log_does_not_tell_of_each_adapter_that_takes_anothers_place(
    server: serving.RunningServer, http: httpx.Client, adapters: list[str]
) -> None:
    """There are slots for two."""
    for name in ("second", "third"):
        assert load(http, name, adapters[1]).status_code == 200
    for name in ("flagged", "second", "third", "flagged"):
        say(http, name)
    assert "makes room" not in server.log
    for name in ("second", "third"):
        assert unload(http, name).status_code == 200


def test_both_need_the_key(server: serving.RunningServer) -> None:
    for path in (LOAD, UNLOAD):
        assert httpx.post(server.base_url + path, json={"lora_name": "x"}, timeout=60).status_code == 401


def test_a_loaded_adapter_outlives_the_worker_and_a_flags_adapter_can_be_unloaded(
    server: serving.RunningServer, http: httpx.Client, adapters: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(adapters[1], folder)
    assert load(http, "staying", str(folder)).status_code == 200
    before = say(http, "staying")
    server.kill_worker()
    assert say(http, "staying") == before
    server.wait_ready()
    (folder / "adapter_config.json").unlink()
    server.kill_worker()
    refused = http.post("/v1/completions", json={"model": "staying", "prompt": "a"})
    assert (refused.status_code, error_of(refused)["code"], error_of(refused)["param"]) == (
        400,
        "invalid_adapter",
        "model",
    )
    assert unload(http, "staying").status_code == 200
    assert unload(http, "flagged").status_code == 200
    assert http.post("/v1/completions", json={"model": "flagged", "prompt": "a"}).status_code == 404
