"""Lines of very many messages. What is rendered and tokenised for them is counted: it decides how long they take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cotenant.core.errors import InvalidInputError
from cotenant.text.chat import ChatTemplate, load_chat_template
from cotenant.text.examples import encode_example
from cotenant.text.spans import SpanFinder
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


def test_for_a_cut_no_more_is_rendered_than_the_cut_needs(
    model: tuple[Tokenizer, ChatTemplate], work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = _counting_tokenizer(model[0], work, monkeypatch)
    short, long = (encode_example(tokenizer, model[1], {"messages": _talk(n)}, None, 200) for n in (100, 4000))
    assert long.num_tokens > 4000
    assert work.num_texts == 2
    # Of the whole a handful of renders, and for each message before the cut a few of about as many as are before it.
    assert work.num_messages < 10 * 4000 + 20_000
    assert short.token_ids[:200].tolist() == long.token_ids[:200].tolist()
    assert short.weights[:200].tolist() == long.weights[:200].tolist()


def test_weights_before_a_cut_are_those_without_one(model: tuple[Tokenizer, ChatTemplate]) -> None:
    tokenizer, template = model
    messages = _talk(60)
    messages[5]["weight"] = messages[31]["weight"] = 0
    whole = encode_example(tokenizer, template, {"messages": messages}, None)
    for length in range(2, whole.num_tokens + 1, 7):
        cut = encode_example(tokenizer, template, {"messages": messages}, None, length)
        assert cut.token_ids.tolist() == whole.token_ids.tolist()
        assert cut.weights[:length].tolist() == whole.weights[:length].tolist()


def test_a_cut_before_the_first_answer_is_no_error_of_the_line() -> None:
    """As many others may be left: what is left of all is looked at when the job starts."""
    model = load_tokenizer(None, 300), load_chat_template(None, None)
    asked, says = {"role": "user", "content": "x" * 50}, {"role": "assistant", "content": "one"}
    assert encode_example(*model, {"messages": [asked, says]}, None, 10).num_trained_tokens == 0
    with pytest.raises(InvalidInputError, match="nothing to train on"):
        encode_example(*model, {"messages": [asked, {**says, "weight": 0}]}, None, 10)


def test_spans_before_a_character_are_the_first_of_all(model: tuple[Tokenizer, ChatTemplate]) -> None:
    tokenizer, template = model
    finder = SpanFinder(template, _talk(80), None, tokenizer.eos_texts)
    spans = finder.find()
    for until in (0, 1, spans[0].start, spans[0].start + 1, len(finder.text) // 2, len(finder.text)):
        assert finder.find(until) == [span for span in spans if span.start < until]
