"""Preference files: both formats give the same sequences, and a line that is wrong is named with its field."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from cotenant.core.errors import InvalidInputError
from cotenant.text.chat import load_chat_template
from cotenant.text.examples import EncodedExample
from cotenant.text.tokenizer import load_tokenizer
from cotenant.text.validation import prepare_training_file, validate_and_encode
from text.samples import TOOLS

ASKS = {"role": "user", "content": "Hi"}
EARLIER = [ASKS, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Name a colour."}]


def _says(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


def openai(prompt: list[dict[str, Any]], good: str = "Red!", bad: str = "A dog.", **more: Any) -> dict[str, Any]:
    return {
        "input": {"messages": prompt, "parallel_tool_calls": True, **more},
        "preferred_output": _says(good),
        "non_preferred_output": _says(bad),
    }


GOOD = openai([ASKS])


def _file(folder: Path, *lines: Any) -> Path:
    path = folder / "train.jsonl"
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"".join(text + b"\n" for text in texts))
    return path


def _encode(path: Path, max_length: int | None = 2048, **more: Any) -> list[EncodedExample]:
    return validate_and_encode(
        path, load_tokenizer(None, 300), load_chat_template(None, None), max_length, method="dpo", **more
    )


def _text(example: EncodedExample, *, trained: bool) -> str:
    tokenizer = load_tokenizer(None, 300)
    ids = [
        int(token) for token, weight in zip(example.token_ids, example.weights, strict=True) if (weight > 0) == trained
    ]
    return tokenizer.decode(ids)


@pytest.mark.parametrize("no_calls", [None, []])
def test_fields_that_are_null_count_as_absent(tmp_path: Path, no_calls: list[Any] | None) -> None:
    nothing = {**dict.fromkeys(("name", "function_call", "weight", "refusal", "audio")), "tool_calls": no_calls}
    prompt, good, bad = (
        [{**message, **nothing} for message in messages] for messages in (EARLIER, _says("a"), _says("b"))
    )
    formats: list[dict[str, Any]] = [
        {
            "input": {"messages": prompt, "tools": None, "functions": None, "parallel_tool_calls": None},
            "preferred_output": good,
            "non_preferred_output": bad,
            "chosen": None,
            "messages": None,
        },
        {"prompt": prompt, "chosen": good, "rejected": bad, "tools": None, "input": None, "preferred_output": None},
        openai(EARLIER, "a", "b"),
    ]
    encoded = _encode(_file(tmp_path, *formats), min_examples=3)
    assert len({_text(example, trained=False) for example in encoded}) == 1
    assert [_text(example, trained=True) for example in encoded] == [
        _text(example, trained=True) for example in encoded[-2:] * 3
    ]


@pytest.mark.parametrize("no_calls", [None, []])
def test_a_shared_prompt_is_found_where_one_side_alone_writes_nulls(tmp_path: Path, no_calls: list[Any] | None) -> None:
    nulls = [{"name": None, **message, "tool_calls": no_calls} for message in EARLIER]
    good, bad = _says("a"), _says("b")
    lines = [
        {"chosen": EARLIER + good, "rejected": EARLIER + bad},
        {"chosen": nulls + good, "rejected": EARLIER + bad},
        {"chosen": EARLIER + good, "rejected": nulls + bad},
        {"chosen": EARLIER[:2] + nulls[2:] + good, "rejected": EARLIER + bad},
    ]
    encoded = _encode(_file(tmp_path, *lines), min_examples=4)
    for index in range(2, 8):
        assert encoded[index].token_ids.tolist() == encoded[index % 2].token_ids.tolist()
        assert encoded[index].weights.tolist() == encoded[index % 2].weights.tolist()


def test_of_conversations_that_do_not_begin_alike_nothing_else_is_said(tmp_path: Path) -> None:
    """Where the answers begin is not known, so that nothing is wrong with the users' messages."""
    other = [{"role": "user", "content": "Hello"}]
    line = {"chosen": [*EARLIER, *_says("a")], "rejected": [*other, *_says("b")]}
    with pytest.raises(InvalidInputError) as caught:
        _encode(_file(tmp_path, line, line), min_examples=2)
    assert caught.value.message == (
        "Invalid file format. Line 1 has no 'prompt', and 'chosen' and 'rejected' do not begin with the same messages. "
        "The same in line 2."
    )


def test_only_the_answers_count(tmp_path: Path) -> None:
    chosen, rejected = _encode(_file(tmp_path, openai(EARLIER)), min_examples=1)
    assert _text(chosen, trained=True).startswith("Red!")
    assert _text(rejected, trained=True).startswith("A dog.")
    for example in (chosen, rejected):
        assert "Yes?" in _text(example, trained=False)
    assert _text(chosen, trained=False) == _text(rejected, trained=False)


def test_trls_formats_are_the_same_examples(tmp_path: Path) -> None:
    good, bad = _says("Red!"), _says("A dog.")
    same = [
        openai(EARLIER),
        {"prompt": EARLIER, "chosen": good, "rejected": bad},
        {"prompt": EARLIER, "chosen": "Red!", "rejected": "A dog.", "score": 3},
        {"chosen": EARLIER + good, "rejected": EARLIER + bad},
    ]
    encoded = _encode(_file(tmp_path, *same), min_examples=4)
    assert len(encoded) == 8
    for index in range(2, 8):
        assert encoded[index].token_ids.tolist() == encoded[index % 2].token_ids.tolist()
        assert encoded[index].weights.tolist() == encoded[index % 2].weights.tolist()
    texts = _encode(_file(tmp_path, {"prompt": "Hi", "chosen": "Red!", "rejected": "A dog."}), min_examples=1)
    assert [_text(text, trained=True) for text in texts] == [_text(text, trained=True) for text in encoded[:2]]


def test_weights_in_a_prompt_are_context_all_the_same(tmp_path: Path) -> None:
    weighted = [{**message, "weight": 1} if message["role"] == "assistant" else message for message in EARLIER]
    good, bad = _says("Red!"), _says("A dog.")
    lines = [openai(EARLIER), openai(weighted), {"chosen": weighted + good, "rejected": weighted + bad}]
    encoded = _encode(_file(tmp_path, *lines), min_examples=3)
    for index in range(2, 6):
        assert encoded[index].weights.tolist() == encoded[index % 2].weights.tolist()


def test_a_shared_prompt_is_found_whatever_weights_each_side_has(tmp_path: Path) -> None:
    weighted = [[EARLIER[0], {**EARLIER[1], "weight": weight}, EARLIER[2]] for weight in (0, 1)]
    pairs = itertools.product([EARLIER, *weighted], repeat=2)
    lines = [{"chosen": one + _says("a"), "rejected": other + _says("b")} for one, other in pairs]
    encoded = _encode(_file(tmp_path, *lines), min_examples=9)
    for index in range(2, 18):
        assert encoded[index].token_ids.tolist() == encoded[index % 2].token_ids.tolist()
        assert encoded[index].weights.tolist() == encoded[index % 2].weights.tolist()


def test_tools_reach_the_template(tmp_path: Path) -> None:
    plain, with_tools = (
        _encode(_file(tmp_path, openai([ASKS], **more)), min_examples=1) for more in ({}, {"tools": None})
    )
    assert plain[0].num_tokens == with_tools[0].num_tokens
    assert len(_encode(_file(tmp_path, openai([ASKS], tools=TOOLS)), min_examples=1)) == 2


def test_a_prepared_file_counts_pairs(tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    prepared = prepare_training_file(
        _file(tmp_path, *[GOOD] * 10), target, None, None, 300, None, 10, "training_file", "dpo"
    )
    assert prepared.num_examples == 10
    assert len(load_file(target)["offsets"]) == 21
    with pytest.raises(InvalidInputError, match=r"has 9 example\(s\)"):
        _encode(_file(tmp_path, *[GOOD] * 9))


def _with(**changes: Any) -> dict[str, Any]:
    return {name: value for name, value in {**GOOD, **changes}.items() if value is not None}


TRL = {"prompt": [ASKS], "chosen": _says("a"), "rejected": _says("b")}

BROKEN: list[tuple[Any, str]] = [
    (b"{", "Line 57 is not valid JSON"),
    ([1], "Line 57 is not a dictionary"),
    ({}, "Line 57: a preference example needs 'input', 'preferred_output' and 'non_preferred_output'"),
    ({"messages": [ASKS]}, "Line 57: it has 'messages', which is for method.type 'supervised'"),
    (_with(input=None), "Line 57 has no 'input'"),
    (_with(preferred_output=None), "Line 57 has no 'preferred_output'"),
    (_with(non_preferred_output=None), "Line 57 has no 'non_preferred_output'"),
    (_with(input=[ASKS]), "Line 57, 'input': it must be a dictionary with 'messages'"),
    (_with(input={}), "Line 57, 'input': it has no 'messages'"),
    (_with(input={"messages": []}), "Line 57, 'input.messages': it must be a list with at least one message"),
    (_with(input={"messages": [{"role": "robot", "content": ""}]}), "Line 57, 'input.messages', message 1: unknown"),
    (_with(input={"messages": [ASKS], "tools": 3}), "Line 57, 'input': 'tools' must be a list"),
    (_with(preferred_output="Red!"), "Line 57, 'preferred_output': it must be a list with at least one message"),
    (_with(preferred_output=[]), "Line 57, 'preferred_output': it must be a list with at least one message"),
    (_with(preferred_output=["Red!"]), "Line 57, 'preferred_output', message 1: a message must be a dictionary"),
    (_with(preferred_output=_says("")), "Line 57, 'preferred_output', message 1: its 'content' is empty"),
    (_with(preferred_output=[ASKS]), "Line 57, 'preferred_output', message 1: its role is 'user'"),
    (_with(non_preferred_output=[{"content": "x"}]), "Line 57, 'non_preferred_output', message 1: it has no 'role'"),
    (_with(non_preferred_output=_says("x" * 5000)), "Line 57, 'non_preferred_output': it has "),
    (_with(non_preferred_output=_says("\ud800")), "Line 57, 'non_preferred_output': The text holds an unpaired"),
    (
        _with(preferred_output=[{**_says("x")[0], "weight": 0}, *_says("y")]),
        "Line 57, 'preferred_output', message 1: 'weight' is for",
    ),
    ({**TRL, "rejected": [{**_says("x")[0], "weight": 1}]}, "Line 57, 'rejected', message 1: 'weight' is for"),
    ({**TRL, "rejected": None}, "Line 57 has no 'rejected'"),
    ({**TRL, "chosen": 7}, "Line 57, 'chosen': it must be a text or a list with at least one message"),
    ({**TRL, "prompt": None, "chosen": 7}, "Line 57, 'chosen': it must be a list with at least one message"),
    ({**TRL, "chosen": ""}, "Line 57, 'chosen', message 1: its 'content' is empty"),
    ({**TRL, "prompt": []}, "Line 57, 'prompt': it must be a text or a list with at least one message"),
    ({**TRL, "prompt": None}, "Line 57 has no 'prompt', and 'chosen' and 'rejected' do not begin with the same"),
    ({**TRL, "prompt": {"a": 1}}, "Line 57, 'prompt': it must be a text or a list with at least one message"),
    ({"prompt": 1, "chosen": "x", "rejected": "y"}, "Line 57, 'prompt': it must be a text or a list with at least"),
    ({**TRL, "rejected": [*_says("b"), {"role": "tool", "content": "x"}]}, "Line 57, 'rejected': its last message"),
    (openai([ASKS], "Red!", "Red!"), "Line 57, 'preferred_output' and 'non_preferred_output' are the same"),
    ({"prompt": "Hi", "chosen": "a", "rejected": _says("a")}, "Line 57, 'chosen' and 'rejected' are the same"),
    ({"chosen": [ASKS, *_says("a")], "rejected": [ASKS, *_says("a")]}, "Line 57, 'chosen' and 'rejected' are the same"),
    (
        {"chosen": [ASKS, *_says("a")], "rejected": [{**ASKS, "weight": 1}, *_says("b")]},
        "Line 57, 'rejected', message 1: 'weight' belongs to messages of the assistant only",
    ),
    (
        {"chosen": EARLIER + _says("a"), "rejected": [ASKS, {**EARLIER[1], "weight": 7}, EARLIER[2], *_says("b")]},
        "Line 57, 'rejected', message 2: 'weight' must be 0 or 1, not 7",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("line", "words"), BROKEN, ids=[str(index) for index in range(len(BROKEN))])
def test_a_broken_line_57(tmp_path: Path, line: Any, words: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        _encode(_file(tmp_path, *[GOOD] * 56, line, *[GOOD] * 3), param="validation_file")
    assert words in caught.value.message
    assert (caught.value.code, caught.value.param) == ("invalid_validation_file", "validation_file")
    assert len(caught.value.message) < 300
