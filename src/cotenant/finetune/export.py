"""A trained adapter as a folder that PEFT, vLLM and this server load: PEFT's files beside the tokenizer's."""

from __future__ import annotations

import shutil
from pathlib import Path

from cotenant.durable import atomic_folder
from cotenant.models.lora import LoraAdapter, save_adapter

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

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


def write_adapter_files(adapter: LoraAdapter, folder: Path, base_model: str, tokenizer_folder: Path | None) -> None:
    """Fill ``folder`` with the adapter and, if there are any, the base model's tokenizer files."""
    save_adapter(adapter, folder, base_model)
    if tokenizer_folder is None:
        return
    for name in TOKENIZER_FILES:
        source = tokenizer_folder / name
        if source.is_file():
            shutil.copyfile(source, folder / name)


def export_adapter(adapter: LoraAdapter, target: Path, base_model: str, tokenizer_folder: Path | None) -> None:
    """Make ``target``, the finished adapter's folder, in one atomic step."""
    with atomic_folder(target) as folder:
        write_adapter_files(adapter, folder, base_model, tokenizer_folder)


def export_copy(source: Path, target: Path) -> None:
    """Make ``target`` from the adapter's and tokenizer's files in ``source``, in one atomic step."""
    with atomic_folder(target) as folder:
        for name in (*ADAPTER_FILES, *TOKENIZER_FILES):
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)


def is_exported(target: Path) -> bool:
    """Whether ``target`` holds a finished adapter. It is made atomically, so its existence is enough."""
    return all((target / name).is_file() for name in ADAPTER_FILES)
