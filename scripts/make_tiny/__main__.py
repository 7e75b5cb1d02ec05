"""``python -m scripts.make_tiny``: writes the text, trains the tokenizer and the model, and puts them into the package.

The same options, machine, thread count and versions of torch, transformers and tokenizers give the same bytes. What
they were is written to ``made.json`` beside the weights, with a digest of the text: a test compares it with the text
that the generator writes now, so that nobody changes the text and forgets to train.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
from itertools import islice
from pathlib import Path

# Must be set before the library is imported: the tokenizer is trained in one thread.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import tokenizers
import torch
import transformers
from safetensors.torch import save
from scripts.make_tiny.corpus import documents, text_digest
from scripts.make_tiny.tokenizer import load_tokenizer, train_tokenizer, write_tokenizer
from scripts.make_tiny.train import Recipe, held_out_loss, model_config, train
from transformers import LlamaForCausalLM

from cotenant.durable import atomic_folder

logger = logging.getLogger(__name__)

_ROOT = Path(__file__).resolve().parents[2]
_DEFAULT_FOLDER = _ROOT / "src" / "cotenant" / "assets" / "tiny"
_MAX_SIZE_BYTES = 8_000_000
_GENERATION_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def _plain_text(seed: int, num_documents: int) -> list[str]:
    """The words of the first documents, without marks: what the tokenizer is trained on."""
    texts: list[str] = []
    for document in islice(documents(seed), num_documents):
        if isinstance(document, str):
            texts.append(document)
        else:
            texts.extend(message["content"] for message in document[0] if message.get("content"))
    return texts


def made_of(recipe: Recipe) -> dict[str, object]:
    """What decides the bytes of the model, for ``made.json``."""
    return {
        "command": "python -m scripts.make_tiny",
        "recipe": dataclasses.asdict(recipe),
        "text_sha256": text_digest(recipe.seed),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }


def _write_weights(model: LlamaForCausalLM, folder: Path) -> None:
    # The tied head is left out, as transformers does it.
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    (folder / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))


def _write_json(value: object, path: Path) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def make(folder: Path, recipe: Recipe) -> None:
    """Makes the model and puts its files into ``folder``, which holds the whole model or the old one, never a part."""
    with atomic_folder(folder) as work:
        work.chmod(0o755)
        inner = train_tokenizer(_plain_text(recipe.seed, recipe.tokenizer_documents), recipe.vocab_size)
        config = model_config(inner.get_vocab_size())
        write_tokenizer(inner, work, config["max_position_embeddings"])
        _write_json(config, work / "config.json")
        _write_json({key: config[key] for key in _GENERATION_KEYS}, work / "generation_config.json")
        _write_json(made_of(recipe), work / "made.json")
        tokenizer = load_tokenizer(work)
        model = train(tokenizer, recipe)
        logger.info("held-out loss %.4f", held_out_loss(model, tokenizer, recipe))
        _write_weights(model, work)
        size_bytes = sum(path.stat().st_size for path in work.iterdir())
        if size_bytes > _MAX_SIZE_BYTES:
            raise ValueError(f"the model has {size_bytes} bytes, more than the package's {_MAX_SIZE_BYTES}")
    logger.info("%s: %d bytes", folder, size_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.make_tiny", description="Makes the built-in model tiny.")
    parser.add_argument("--out", type=Path, default=_DEFAULT_FOLDER, help="folder to write (default: the package's)")
    parser.add_argument("--samples", action="store_true", help="print what the finished model says")
    for field in dataclasses.fields(Recipe):
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, type=type(field.default), default=field.default, help="default: %(default)s")
    options = vars(parser.parse_args())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    folder, samples = options.pop("out"), options.pop("samples")
    make(folder, Recipe(**options))
    if samples:
        from scripts.make_tiny.samples import print_samples

        print_samples(folder)


if __name__ == "__main__":
    main()
