"""From what the user typed to a folder and a spec."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cotenant.config import ModelConfig
from cotenant.core.errors import InvalidInputError, NotFoundError
from cotenant.models.registry import ARCHITECTURES, model_path, resolve_model
from models.support import Pair


def test_a_folder(llama: Pair) -> None:
    resolved = resolve_model(ModelConfig(str(llama.folder), served_model_names=("mine", "other")))
    assert (resolved.name, resolved.folder, resolved.spec) == ("mine", llama.folder, llama.decoder.spec)
    assert not resolved.random_weights
    assert resolve_model(ModelConfig(str(llama.folder), load_format="dummy")).random_weights


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_need_random_weights(name: str) -> None:
    resolved = resolve_model(ModelConfig(name, load_format="dummy"))
    assert (resolved.name, resolved.folder, resolved.random_weights) == (name, None, True)
    with pytest.raises(InvalidInputError, match="--load-format dummy"):
        resolve_model(ModelConfig(name))


def test_built_in_models() -> None:
    assert model_path("tiny").parts[-2:] == ("assets", "tiny")
    with pytest.raises(NotFoundError, match="built in: tiny"):
        model_path("huge")


@pytest.mark.parametrize("name", ["nonsense", "/no/such/folder", "../up", "a/b/c"])
def test_an_unknown_name_gets_the_list_of_known_ones(name: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        resolve_model(ModelConfig(name))
    for accepted in (name, "tiny", "folder", "hub id", "--load-format dummy", *ARCHITECTURES):
        assert accepted in str(caught.value)


def test_folders_without_a_usable_config(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no config\.json"):
        resolve_model(ModelConfig(str(tmp_path)))
    for content in ("{", "[]", "[" * 10**5, '{"architectures": ["LlamaForCausalLM"]}'):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(InvalidInputError, match=r"config\.json"):
            resolve_model(ModelConfig(str(tmp_path)))


def test_a_length_beyond_the_models_positions(llama: Pair) -> None:
    assert resolve_model(ModelConfig(str(llama.folder), max_model_len=256)).spec == llama.decoder.spec
    with pytest.raises(InvalidInputError, match="--max-model-len 257 is more than the 256 positions"):
        resolve_model(ModelConfig(str(llama.folder), max_model_len=257))


RESOLVE = """
import sys
from cotenant.config import ModelConfig
from cotenant.core.errors import NotFoundError
from cotenant.models.registry import resolve_model
assert "torch" not in sys.modules, "the registry must not import torch"
try:
    print(resolve_model(ModelConfig(sys.argv[1])).folder)
except NotFoundError as error:
    print("NotFoundError:", error)
"""


def _resolve_offline(hub_id: str, home: Path) -> str:
    return _resolve(hub_id, home, HF_HUB_OFFLINE="1")


def _resolve(hub_id: str, home: Path, **settings: str) -> str:
    """In a process of its own: the hub client reads its settings when it is imported."""
    environment = os.environ | settings | {"HF_HOME": str(home)}
    environment.pop("HF_HUB_CACHE", None)
    return subprocess.run(
        [sys.executable, "-c", RESOLVE, hub_id], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_hub_ids(llama: Pair, tmp_path: Path) -> None:
    """From the hub client's cache when offline; otherwise a clear error."""
    stored = tmp_path / "hub" / "models--some-org--some-model"
    snapshot = stored / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(llama.folder, snapshot)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text(snapshot.name)
    assert _resolve_offline("some-org/some-model", tmp_path) == str(snapshot)
    answer = _resolve_offline("some-org/absent", tmp_path)
    assert answer.startswith("NotFoundError: 'some-org/absent' is not a folder here, and it cannot be fetched")


class _Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download asks for: what files there are, and each file."""

    folder: Path

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        commit = "0123456789abcdef0123456789abcdef01234567"
        paths = [str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()]
        answer: Any = {"id": "org/name", "sha": commit, "siblings": [{"rfilename": path} for path in paths]}
        if "/tree/" in self.path:
            answer = [{"type": "file", "path": path, "oid": commit, "size": 1} for path in paths]
        body = json.dumps(answer).encode()
        if "/resolve/" in self.path:
            body = (self.folder / self.path.split("/resolve/")[1].partition("/")[2]).read_bytes()
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_what_is_taken_from_the_hub(llama: Pair, tmp_path: Path) -> None:
    """The model's own files and its named chat templates, not other formats' copies of the weights."""
    shutil.copytree(llama.folder, tmp_path / "remote")
    for name in (
        "additional_chat_templates/tool_use.jinja",
        "original/consolidated.safetensors",
        "original/params.json",
        "onnx/tokenizer.model",
        "consolidated.safetensors",
        "README.md",
    ):
        (tmp_path / "remote" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "remote" / name).write_text("x")
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Hub", (_Hub,), {"folder": tmp_path / "remote"}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_port}"
        folder = Path(_resolve("org/name", tmp_path / "home", HF_ENDPOINT=address, HF_HUB_OFFLINE="0"))
    finally:
        server.shutdown()
        server.server_close()
    taken = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    own = {path.name for path in llama.folder.iterdir()}
    assert taken == {*own, "additional_chat_templates/tool_use.jinja"}
