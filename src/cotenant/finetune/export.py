"""A trained adapter as a folder that PEFT, vLLM and this server load: PEFT's files beside the tokenizer's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from cotenant.durable import atomic_folder
from cotenant.models.lora import LoraAdapter, save_adapter

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
EXPORT_FILE = "export.json"

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
_TEMPLATES = "additional_chat_templates"  # a folder of them beside the other files


def write_adapter_files(adapter: LoraAdapter, folder: Path, base_model: str, tokenizer_folder: Path | None) -> None:
    """Fill ``folder`` with the adapter and, if there are any, the base model's tokenizer files.

    vLLM applies one factor to all modules, whatever the configuration says of a single one, so the files have one.
    """
    save_adapter(adapter.with_one_scale(), folder, base_model)
    if tokenizer_folder is not None:
        _copy_files(TOKENIZER_FILES, tokenizer_folder, folder)


def export_adapter(adapter: LoraAdapter, target: Path, base_model: str, tokenizer_folder: Path | None) -> None:
    """Make ``target``, the finished adapter's folder, in one atomic step."""
    with atomic_folder(target) as folder:
        write_adapter_files(adapter, folder, base_model, tokenizer_folder)
        _write_best_step(folder, None)


def export_copy(source: Path, target: Path, best_step: int) -> None:
    """Make ``target`` from the adapter's and tokenizer's files in ``source``, in one atomic step. ``best_step``: the
    step whose they are."""
    with atomic_folder(target) as folder:
        _copy_files((*ADAPTER_FILES, *TOKENIZER_FILES), source, folder)
        _write_best_step(folder, best_step)


def _copy_files(names: Sequence[str], source: Path, target: Path) -> None:
    """Those of ``names`` that are there, and the named chat templates."""
    templates = [f"{_TEMPLATES}/{path.name}" for path in (source / _TEMPLATES).glob("*.jinja") if path.is_file()]
    if templates:
        (target / _TEMPLATES).mkdir()
    for name in (*names, *templates):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def is_exported(target: Path) -> bool:
    """Whether ``target`` holds a finished adapter. It is made atomically, so its existence is enough."""
    return all((target / name).is_file() for name in ADAPTER_FILES)


def exported_best_step(target: Path) -> int | None:
    """The step whose adapter ``target`` holds, if it was exported as the best one; None: the last one's."""
    try:
        step = json.loads((target / EXPORT_FILE).read_bytes())["best_step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def _write_best_step(folder: Path, best_step: int | None) -> None:
    (folder / EXPORT_FILE).write_text(json.dumps({"best_step": best_step}) + "\n", encoding="utf-8")
