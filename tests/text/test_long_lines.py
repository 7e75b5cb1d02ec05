"""Lines of very many messages. What is rendered and tokenised for them is counted: it decides how long they take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cotenant.core.errors import InvalidInputError
from cotenant.text.chat import ChatTemplate, load_chat_template
from cotenant.text.tokenizer import Tokenizer, load_tokenizer
from cotenant.text.validation import validate_and_encode
from text.samples import (
    CALLS_WITHOUT_CONTENT,
    GEMMA,
    LLAMA3,
    MARKED,
    MISTRAL,
    NEXT_MARK,
    NO_PROMPT,
    QWEN3,
    THINKING_PROMPT,
    byte_level_folder,
)

SOURCES = {
    "llama3": (LLAMA3, "<|eot_id|>"),
    "qwen3": (QWEN3, "<|im_end|>"),
    "mistral": (MISTRAL, "</s>"),
    "gemma": (GEMMA, "<end_of_turn>"),
    "thinking prompt": (THINKING_PROMPT, "</s>"),
    "next mark": (NEXT_MARK, "</s>"),
    "marked": (MARKED, "<|im_end|>"),
    "last marked": (MARKED.replace("role == 'assistant'", "role == 'assistant' and loop.last"), "<|im_end|>"),
    "no prompt": (NO_PROMPT, "<|im_end|>"),
    "calls without content": (CALLS_WITHOUT_CONTENT, "</s>"),
}


class Work:
    """How many messages the template has been given to render, and how many texts the tokenizer to encode."""

    num_messages = 0
    num_texts = 0


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    counted = Work()
    render = ChatTemplate.render

    def counting(self: ChatTemplate, messages: Sequence[Any], *args: Any, **kwargs: Any) -> str:
        counted.num_messages += len(messages)
        return render(self, messages, *args, **kwargs)

    monkeypatch.setattr(ChatTemplate, "render", counting)
    return counted


def _counting_tokenizer(tokenizer: Tokenizer, work: Work, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    encode = type(tokenizer).encode_with_offsets

    def counting(self: Any, text: str) -> Any:
        work.num_texts += 1
        return encode(self, text)

    monkeypatch.setattr(type(tokenizer), "encode_with_offsets", counting)
    return tokenizer


@pytest.fixture(scope="module", params=SOURCES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, ChatTemplate]:
    source, eos = SOURCES[request.param]
    folder = byte_level_folder(tmp_path_factory.mktemp("model"), source.replace(":%S.%f", ""), eos_token=eos)
    return load_tokenizer(folder, 2000), load_chat_template(folder, None)


def _talk(num_messages: int) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[index % 2], "content": f"ok {index}"} for index in range(num_messages)]


def _file(folder: Path, line: Any) -> Path:
    path = folder / "train.jsonl"
    path.write_text(json.dumps(line) + "\n")
    return path


def _preference(num_messages: int) -> dict[str, Any]:
    answers = [[{"role": "assistant", "content": text}] for text in ("Red!", "A dog.")]
    return {"prompt": _talk(num_messages - 1), "chosen": answers[0], "rejected": answers[1]}


@pytest.mark.parametrize("method", ["supervised", "dpo"])
@pytest.mark.parametrize("param", ["training_file", "validation_file"])
def test_what_is_too_long_is_refused_by_one_render(
    tmp_path: Path,
    model: tuple[Tokenizer, ChatTemplate],
    work: Work,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    param: str,
) -> None:
    tokenizer = _counting_tokenizer(model[0], work, monkeypatch)
    line = _preference(2000) if method == "dpo" else {"messages": _talk(2000)}
    with pytest.raises(InvalidInputError, match=r"Line 1.* it has \d+ tokens, but at most 1024 are possible here"):
        validate_and_encode(_file(tmp_path, line), tokenizer, model[1], 1024, 1, param, method)
    assert (work.num_messages, work.num_texts) == (2000, 1)
