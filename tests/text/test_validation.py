from __future__ import annotations

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from cotenant.core.errors import InvalidInputError
from cotenant.text import validation
from cotenant.text.chat import load_chat_template
from cotenant.text.examples import EncodedExample
from cotenant.text.prepared_file import PreparedFile
from cotenant.text.tokenizer import load_tokenizer
from cotenant.text.validation import prepare_training_file, validate_and_encode
from text.samples import TOOLS, byte_level_folder, call_message, tool_message

USER = {"role": "user", "content": "Hi"}
GOOD = {"messages": [USER, {"role": "assistant", "content": "Hello!"}]}


def _file(folder: Path, *lines: Any) -> Path:
    path = folder / "train.jsonl"
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"".join(text + b"\n" for text in texts))
    return path


def _validate(path: Path, max_length: int | None = None, **more: Any) -> list[EncodedExample]:
    return validate_and_encode(path, load_tokenizer(None, 300), load_chat_template(None, None), max_length, **more)


def _error(path: Path, max_length: int | None = None, **more: Any) -> InvalidInputError:
    with pytest.raises(InvalidInputError) as caught:
        _validate(path, max_length, **more)
    return caught.value


def test_everything_that_is_allowed(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
    answered, says = GOOD["messages"], GOOD["messages"][1]
    lines = [
        b"\xef\xbb\xbf" + json.dumps(GOOD).encode(),
        json.dumps(GOOD).encode() + b"\r",
        {"messages": [{"role": "system", "content": ""}, {"role": "user", "content": parts, "name": "A"}, *answered]},
        {"messages": [{"role": "developer", "content": "x"}, *answered], "id": 7},
        {"messages": [USER, call_message(), tool_message()], "tools": TOOLS, "parallel_tool_calls": False},
        {"messages": [USER, {"role": "assistant", "content": None, "weight": 0, **call_message()}, *answered]},
        {"messages": [USER, {**says, "weight": 0}, USER, {**says, "weight": 1}]},
        {"messages": [USER, {**says, "thinking": "hm", "reasoning": None, "refusal": None, "annotations": []}]},
        {"messages": answered, "tools": None},
        GOOD,
        GOOD,
        b"",
        b"  ",
    ]  # fmt: skip
    assert len(_validate(_file(tmp_path, *lines))) == 11


@pytest.mark.parametrize("no_calls", [None, []])
def test_fields_that_are_null_count_as_absent(tmp_path: Path, no_calls: list[Any] | None) -> None:
    """OpenAI's client writes them all when it is asked for what it was answered; other servers answer no tool calls as
    an empty list."""
    nothing = dict.fromkeys(("name", "tool_calls", "tool_call_id", "function_call", "weight", "refusal", "audio"))
    nothing["tool_calls"] = no_calls
    given = [*GOOD["messages"], USER, call_message(), tool_message()]
    written = [{**nothing, **message} for message in given]
    for call in written[3]["tool_calls"]:
        call["index"] = None
    line = {"messages": written, "tools": TOOLS, **dict.fromkeys(("functions", "parallel_tool_calls", "input"))}
    plain = {"messages": given, "tools": TOOLS}
    written_out, left_out = _validate(_file(tmp_path, line, plain), min_examples=2)
    assert written_out.token_ids.tolist() == left_out.token_ids.tolist()
    assert written_out.weights.tolist() == left_out.weights.tolist()
    empty = {"messages": [USER, {**nothing, "role": "assistant", "content": None}]}
    assert "message 2 (assistant): it has neither 'content' nor 'tool_calls'" in _error(_file(tmp_path, empty)).message


@pytest.mark.parametrize("num_examples", [0, 3, 9])
def test_too_few_examples(tmp_path: Path, num_examples: int) -> None:
    error = _error(_file(tmp_path, *[GOOD] * num_examples))
    assert error.message == f"Training file has {num_examples} example(s), but must have at least 10 examples"
    assert (error.code, error.param) == ("invalid_n_examples", "training_file")
    assert len(_validate(_file(tmp_path, *[GOOD] * num_examples), min_examples=num_examples)) == num_examples


def _with(message: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [USER, message]}


def _call(**function: Any) -> dict[str, Any]:
    return _with({"role": "assistant", "tool_calls": [{"type": "function", "function": function}]})


BROKEN: list[tuple[Any, str]] = [
    (b'{"messages": [', "Line 57 is not valid JSON: Expecting value at character 15"),
    (b'{"messages": NaN}', "Line 57 is not valid JSON: NaN is no JSON number"),
    (b'{"messages": 1' + b"0" * 5000 + b"}", "Line 57 is not valid JSON: a number of 5001 digits is too long"),
    (b'{"messages": [-1e999]}', "Line 57 is not valid JSON: the number -1e999 is too large"),
    (b"[" * 100_000, "Line 57 is nested too deeply"),
    (b'{"messages": "caf\xe9"}', "Line 57 is not UTF-8: byte 0xE9 at position 18 of the line"),
    (["a"], "Line 57 is not a dictionary (one JSON object a line is expected, not one list)"),
    ("a", "Line 57 is not a dictionary"),
    (b"", "Line 57 is empty"),
    ({}, "Line 57 has no 'messages'"),
    ({"prompt": "a", "completion": "b"}, "Line 57: it is in the old prompt/completion format"),
    ({"input": {}, "preferred_output": []}, "Line 57: it is a preference example, which is for method.type 'dpo'"),
    ({"messages": []}, "Line 57: 'messages' must be a list with at least one message"),
    ({"messages": "Hi"}, "Line 57: 'messages' must be a list with at least one message"),
    ({"messages": [USER]}, "Line 57: nothing to train on: it has no message of the assistant"),
    ({"messages": [USER, "Hi"]}, "Line 57, message 2: a message must be a dictionary"),
    (_with({"content": "x"}), "Line 57, message 2: it has no 'role'"),
    (_with({"role": "robot", "content": "x"}), 'Line 57, message 2: unknown role "robot"; it must be one of system'),
    (_with({"role": ["user"], "content": "x"}), 'Line 57, message 2: unknown role ["user"]'),
    (_with({"role": "assistant", "content": ""}), "Line 57, message 2 (assistant): its 'content' is empty"),
    (_with({"role": "assistant", "content": " \n"}), "Line 57, message 2 (assistant): its 'content' is empty"),
    (_with({"role": "assistant"}), "Line 57, message 2 (assistant): it has neither 'content' nor 'tool_calls'"),
    (_with({"role": "assistant", "content": 5}), "Line 57, message 2 (assistant): 'content' must be a string"),
    (_with({"role": "user", "content": None}), "Line 57, message 2 (user): it has no 'content'"),
    (
        _with({"role": "assistant", "content": [{"type": "image_url"}]}),
        "Line 57, message 2 (assistant): 'content' may only have parts of the form",
    ),
    (
        _with({"role": "assistant", "content": "x", "weight": 2}),
        "Line 57, message 2 (assistant): 'weight' must be 0 or 1, not 2",
    ),
    (_with({"role": "assistant", "content": "x", "weight": True}), "'weight' must be 0 or 1, not true"),
    (_with({"role": "assistant", "content": "x", "weight": "1"}), "'weight' must be 0 or 1, not \"1\""),
    (_with({"role": "assistant", "content": "x", "weight": [1]}), "'weight' must be 0 or 1, not [1]"),
    (_with({"role": "assistant", "content": "x", "thinking": ["hm"]}), "'thinking' must be a string, not [\"hm\"]"),
    (_with({"role": "user", "content": "x", "weight": 1}), "message 2 (user): 'weight' belongs to messages of the"),
    (_with({"role": "assistant", "content": "x", "weight": 0}), "nothing to train on: every message of the assistant"),
    (_with({"role": "assistant", "function_call": {"name": "f"}}), "'function_call' and the role 'function' are"),
    (_with({"role": "function", "content": "x"}), "'function_call' and the role 'function' are the old form"),
    (_with({"role": "assistant", "tool_calls": []}), "(assistant): it has neither 'content' nor 'tool_calls'"),
    (_with({"role": "assistant", "content": "x", "tool_calls": {}}), "(assistant): 'tool_calls' must be a list"),
    (_with({"role": "assistant", "tool_calls": [{"id": "1"}]}), "message 2 (assistant): tool call 1: it must be"),
    (_call(name="f", arguments="{"), "tool call 1: its 'arguments' are not valid JSON"),
    (_call(name="f", arguments='{"x": NaN}'), "tool call 1: its 'arguments' are not valid JSON"),
    (_call(name="f", arguments='{"x": 1e999}'), "tool call 1: its 'arguments' are not valid JSON"),
    (_call(name="f", arguments="[1]"), "tool call 1: its 'arguments' must be a JSON object"),
    (_call(name=""), "tool call 1: it must be"),
    ({**GOOD, "tools": {"a": 1}}, "Line 57: 'tools' must be a list of"),
    ({**GOOD, "tools": [{"type": "function"}]}, "Line 57: 'tools' must be a list of"),
    ({**GOOD, "parallel_tool_calls": "no"}, "Line 57: 'parallel_tool_calls' must be true or false"),
    ({**GOOD, "functions": []}, "Line 57: 'functions' is the old form; use 'tools'"),
    (_with({"role": "assistant", "content": "a\ud800"}), "Line 57: The text holds an unpaired surrogate (U+D800)"),
    (_with({"role": "assistant", "content": "x" * 50_000}), "Line 57: it has 50007 tokens, but at most 2048"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "words"), BROKEN, ids=[str(index) for index in range(len(BROKEN))])
def test_a_broken_line_57(tmp_path: Path, line: Any, words: str) -> None:
    error = _error(_file(tmp_path, *[GOOD] * 56, line, *[GOOD] * 3), 2048)
    assert error.message.startswith("Invalid file format. ")
    assert words in error.message
    assert (error.code, error.param) == ("invalid_training_file", "training_file")
    assert len(error.message) < 300


def test_the_first_five_problems_come_in_one_message(tmp_path: Path) -> None:
    two = {"messages": [{"role": "user"}, {"role": "assistant"}]}
    message = _error(_file(tmp_path, GOOD, b"{", two, [], b"5")).message
    for words in ("Line 2 ", "Line 3, message 1 (user)", "Line 3, message 2 (assistant)", "Line 4 ", "Line 5 "):
        assert words in message
    assert "checking stopped" in message
    message = _error(_file(tmp_path, *[b"{"] * 20)).message
    assert message.count("is not valid JSON") == 1
    assert "The same in lines 2, 3, 4, 5." in message
    assert "Line 6 " not in message
    assert "checking stopped" not in _error(_file(tmp_path, b"{", *[GOOD] * 12)).message


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf_16_is_named(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "train.jsonl"
    text = "\n".join([json.dumps(GOOD)] * 12)
    path.write_bytes(text.encode(encoding) if encoding == "utf-16" else ("\ufeff" + text).encode(encoding))
    assert _error(path).message == "Invalid file format. The file is not UTF-8 but UTF-16; save it as UTF-8."


def test_carriage_returns_in_the_place_of_line_ends_are_told(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    line = json.dumps(GOOD)
    hint = "(a carriage return alone ends no line; end each with a line feed)"
    path.write_bytes("\r".join([line] * 12).encode())
    assert f"Line 1 is not valid JSON: Extra data at character {len(line) + 2} {hint}." in _error(path).message
    path.write_bytes("\r\n".join([line] * 12).encode())
    assert len(_validate(path)) == 12
    assert hint not in _error(_file(tmp_path, *[GOOD] * 12, f"{line} {line}".encode())).message


def test_a_line_without_end_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "MAX_LINE_BYTES", 1000)
    error = _error(_file(tmp_path, *[GOOD] * 10, b"x" * 5500, b"{", *[GOOD] * 3))
    assert "Line 11 has over 1000 bytes." in error.message
    assert "Line 12 is not valid JSON" in error.message


def test_a_validation_file_is_called_one(tmp_path: Path) -> None:
    error = _error(_file(tmp_path), min_examples=1, param="validation_file")
    assert error.message == "Validation file has 0 example(s), but must have at least 1 example"
    assert error.param == "validation_file"
    error = _error(_file(tmp_path, b"{"), min_examples=1, param="validation_file")
    assert (error.code, error.param) == ("invalid_validation_file", "validation_file")


def test_a_model_without_a_template_cannot_train_on_messages(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    with pytest.raises(InvalidInputError, match="--chat-template") as caught:
        prepare_training_file(_file(tmp_path, *[GOOD] * 10), tmp_path / "out", folder, None, 2000, None)
    assert caught.value.param == "training_file"


@pytest.fixture(scope="module")
def child() -> Any:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


def test_a_file_is_prepared_in_another_process(tmp_path: Path, child: ProcessPoolExecutor) -> None:
    longer = {"messages": [USER, {"role": "assistant", "content": "Hello, hello!"}]}
    source, target = _file(tmp_path, *[GOOD] * 10, longer), tmp_path / "jobs" / "train.safetensors"
    prepared = child.submit(prepare_training_file, source, target, None, None, 300, 2048).result()
    examples = _validate(source)
    assert prepared == PreparedFile(
        num_examples=11,
        num_tokens=sum(example.num_tokens for example in examples),
        num_trained_tokens=10 * len("Hello!.") + len("Hello, hello!."),
        max_tokens=examples[-1].num_tokens,
    )
    assert load_file(target)["token_ids"].tolist() == [int(i) for example in examples for i in example.token_ids]


def test_an_error_comes_whole_from_another_process(tmp_path: Path, child: ProcessPoolExecutor) -> None:
    target = tmp_path / "train.safetensors"
    with pytest.raises(InvalidInputError) as caught:
        child.submit(prepare_training_file, _file(tmp_path, GOOD), target, None, None, 300, None).result()
    assert (caught.value.code, caught.value.param) == ("invalid_n_examples", "training_file")
    assert caught.value.message.startswith("Training file has 1 example(s)")
    assert not target.exists()
