from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from cotenant.core.errors import InvalidInputError
from cotenant.text.chat import ChatTemplate, load_chat_template
from cotenant.text.examples import EncodedExample, encode_example, write_examples
from cotenant.text.tokenizer import Tokenizer, load_tokenizer
from text.samples import (
    CALLS_WITHOUT_CONTENT,
    GEMMA,
    LLAMA3,
    MARKED,
    MISTRAL,
    MISTRAL_LATE_SYSTEM,
    NEXT_MARK,
    NO_PROMPT,
    QWEN3,
    REASONING,
    TEXT_ARGUMENTS,
    THINKING_PROMPT,
    TOOLS,
    byte_level_folder,
    call_message,
    sentencepiece_folder,
    tool_message,
)

Model = tuple[Tokenizer, ChatTemplate]


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _says(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def _trained(model: Model, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[str]:
    """The texts of the runs of trained tokens. Checks on the way that the ids are those of inference."""
    tokenizer, template = model
    encoded = encode_example(tokenizer, template, {"messages": messages, "tools": tools}, None)
    plain = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
    if (text := template.render(plain, tools, False)) == template.render(plain, tools, False):  # no clock in it
        assert encoded.token_ids.tolist() == tokenizer.encode(text, add_special_tokens=False)
    assert encoded.weights[0] == 0
    runs, run = [], []
    for token_id, weight in zip(encoded.token_ids.tolist(), encoded.weights.tolist(), strict=True):
        if weight:
            run.append(token_id)
        elif run:
            runs.append(run)
            run = []
    return [b"".join(map(tokenizer.token_bytes, run)).decode() for run in [*runs, run] if run]


@pytest.fixture(
    scope="module", params=["llama3", "qwen3", "mistral", "gemma", "thinking prompt", "marked", "no prompt"]
)
def any_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Model]:
    return request.param, _model(request.param, tmp_path_factory.mktemp("model"))


def _model(name: str, folder: Path) -> Model:
    sources = {
        "llama3": (LLAMA3, "<|eot_id|>"),
        "qwen3": (QWEN3, "<|im_end|>"),
        "mistral": (MISTRAL, "</s>"),
        "gemma": (GEMMA, "<end_of_turn>"),
        "thinking prompt": (THINKING_PROMPT, "</s>"),
        "marked": (MARKED, "<|im_end|>"),
        "no prompt": (NO_PROMPT, "<|im_end|>"),
    }
    source, eos = sources[name]
    make = sentencepiece_folder if name in ("mistral", "thinking prompt") else byte_level_folder
    make(folder, source, eos_token=eos)
    return load_tokenizer(folder, 2000), load_chat_template(folder, None)


# What is trained on in [user "Hi", assistant "one", user "And?", assistant "two words"].
TWO_TURNS = {
    "llama3": ["one<|eot_id|>", "two words<|eot_id|>"],
    "qwen3": ["one<|im_end|>", "<think>\n\n</think>\n\ntwo words<|im_end|>"],
    # The tokenizer puts a space of its own before every text that follows a special token.
    "mistral": ["  one</s>", "  two words</s>"],
    "gemma": ["one<end_of_turn>", "two words<end_of_turn>"],
    # This template never ends a turn but the last.
    "thinking prompt": ["one", "two words</s>"],
    "marked": ["one<|im_end|>", "two words<|im_end|>"],
    "no prompt": ["one<|im_end|>", "two words<|im_end|>"],
}


def test_content_and_end_of_turn_are_trained_on_and_nothing_else(any_model: tuple[str, Model]) -> None:
    name, model = any_model
    messages = [_user("Hi"), _says("one"), _user("And?"), _says("two words")]
    assert _trained(model, messages) == TWO_TURNS[name]
    # What follows the last answer is context that nobody learns.
    assert _trained(model, [*messages, _user("Bye")])[0] == TWO_TURNS[name][0]


def test_weight_0_is_not_trained_on(any_model: tuple[str, Model]) -> None:
    name, model = any_model
    messages = [_user("Hi"), _says("one", weight=0), _user("And?"), _says("two words", weight=1)]
    assert _trained(model, messages) == TWO_TURNS[name][1:]
    messages[1]["weight"], messages[3]["weight"] = 1, 0
    assert _trained(model, messages) == TWO_TURNS[name][:1]
    messages[1]["weight"] = 0
    with pytest.raises(InvalidInputError, match="nothing to train on"):
        _trained(model, messages)


def test_equal_texts_elsewhere_do_not_confuse(any_model: tuple[str, Model]) -> None:
    """Questions that look like answers, headers and ends of turn."""
    name, model = any_model
    header = model[1].render([_user("Hi")]).split("Hi")[-1]
    asked = f"one two words {header}one"
    messages = [_user(asked), _says("one"), _user(asked), _says("two words")]
    assert _trained(model, messages) == TWO_TURNS[name]


def test_thinking_of_past_turns_is_dropped_where_the_template_drops_it(tmp_path: Path) -> None:
    model = _model("qwen3", tmp_path)
    thought = "<think>\nhm\n</think>\n\n"
    messages = [_user("Hi"), _says(thought + "one"), _user("And?"), _says(thought + "two")]
    assert _trained(model, messages) == ["one<|im_end|>", thought + "two<|im_end|>"]


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning"])
def test_thinking_in_a_field_of_its_own(tmp_path: Path, field: str) -> None:
    byte_level_folder(tmp_path, REASONING)
    model = load_tokenizer(tmp_path, 2000), load_chat_template(tmp_path, None)
    messages = [_user("Hi"), _says("one", **{"reasoning_content": None, field: "hm"})]
    assert _trained(model, messages) == ["<think>hm</think>one<|im_end|>"]


def test_the_prompts_own_thinking_mark_is_not_trained_on(tmp_path: Path) -> None:
    source = THINKING_PROMPT.replace("content.split('</think>')[-1]", "content")
    sentencepiece_folder(tmp_path, source)
    model = load_tokenizer(tmp_path, 2000), load_chat_template(tmp_path, None)
    messages = [_user("Hi"), _says("<think>\nhm</think>two")]
    assert _trained(model, messages)[0].strip() == "hm</think>two</s>"


CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'
TOOL_RUNS = {
    "llama3": ['{"name": "weather", "parameters": {"city": "Paris"}}<|eot_id|>', "Warm.<|eot_id|>", "Bye.<|eot_id|>"],
    "qwen3": [
        f"\n<tool_call>\n{CALL}\n</tool_call><|im_end|>",
        "Warm.<|im_end|>",
        "<think>\n\n</think>\n\nBye.<|im_end|>",
    ],
    "mistral": [f"[TOOL_CALLS]  [{CALL}]</s>", "  Warm.</s>", "  Bye.</s>"],
}


@pytest.mark.parametrize("name", TOOL_RUNS)
def test_tool_calls_are_trained_on_and_results_are_not(name: str, tmp_path: Path) -> None:
    model = _model(name, tmp_path)
    messages = [_user("Weather?"), call_message(), tool_message(), _says("Warm."), _user("Thanks"), _says("Bye.")]
    assert _trained(model, messages, TOOLS) == TOOL_RUNS[name]
    assert _trained(model, messages[:2], TOOLS)[0].endswith(TOOL_RUNS[name][0])
    messages[1]["weight"] = 0
    assert _trained(model, messages, TOOLS) == TOOL_RUNS[name][1:]


def test_thinking_before_calls_of_past_turns_is_dropped_too(tmp_path: Path) -> None:
    """Cut before "Warm.", the conversation still shows the thinking: it is no prefix of the whole."""
    model, thought = _model("qwen3", tmp_path), "<think>\nhm\n</think>\n\n"
    call, answer = call_message(content=thought + "Wait."), _says(thought + "Warm.")
    messages = [_user("Weather?"), call, tool_message(), answer, _user("Thanks"), _says("Bye.")]
    assert _trained(model, messages, TOOLS) == [f"Wait.{TOOL_RUNS['qwen3'][0]}", *TOOL_RUNS["qwen3"][1:]]


def test_a_system_message_may_move_with_the_question(tmp_path: Path) -> None:
    sentencepiece_folder(tmp_path, MISTRAL_LATE_SYSTEM)
    model = load_tokenizer(tmp_path, 2000), load_chat_template(tmp_path, None)
    system = {"role": "system", "content": "Be brief."}
    messages = [system, _user("Weather?"), call_message(), tool_message(), _says("Warm."), _user("Ok"), _says("Bye.")]
    # The first space of a plain answer cannot be told from what the template writes; the tokenizer's own is kept.
    assert [run.strip() for run in _trained(model, messages, TOOLS)] == [run.strip() for run in TOOL_RUNS["mistral"]]
    plain = _trained(model, [system, _user("Hi"), _says("one"), _user("And?"), _says("two words")])
    assert [run.strip() for run in plain] == ["one</s>", "two words</s>"]


def test_the_mark_of_the_next_turn_may_end_this_one(tmp_path: Path) -> None:
    byte_level_folder(tmp_path, NEXT_MARK, eos_token="</s>")
    model = load_tokenizer(tmp_path, 2000), load_chat_template(tmp_path, None)
    assert _trained(model, [_user("Hi"), _says("one"), _user("And?"), _says("two")]) == ["one</s>", "two"]


def test_a_template_that_drops_what_the_assistant_says_is_an_error(tmp_path: Path) -> None:
    model = _model("thinking prompt", tmp_path)
    call = call_message()
    with pytest.raises(InvalidInputError, match="does not write the tool calls of message 2"):
        _trained(model, [_user("?"), call, _user("Hi"), _says("one")])
    with pytest.raises(InvalidInputError, match="writes nothing of message 2"):
        _trained(model, [_user("?"), _says("<think>hm</think>"), _user("Hi"), _says("one")])
    assert _trained(model, [_user("?"), {**call, "weight": 0}, _user("Hi"), _says("one")]) == ["one</s>"]


def test_calls_written_as_text(tmp_path: Path) -> None:
    byte_level_folder(tmp_path, TEXT_ARGUMENTS)
    model = load_tokenizer(tmp_path, 2000), load_chat_template(tmp_path, None)
    messages = [_user("?"), call_message(), tool_message(), _says("Warm.")]
    assert _trained(model, messages) == ['weather {"city": "Paris"}<|im_end|>', "Warm.<|im_end|>"]


def test_calls_written_where_the_content_is_null(tmp_path: Path) -> None:
    byte_level_folder(tmp_path, CALLS_WITHOUT_CONTENT)
    model = load_tokenizer(tmp_path, 2000), load_chat_template(tmp_path, None)
    messages = [_user("?"), call_message(), tool_message(), _says("Warm.")]
    assert _trained(model, messages) == ['weather\n{"city": "Paris"}<|im_end|>', "Warm.<|im_end|>"]


def test_a_conversation_may_begin_with_the_assistant(tmp_path: Path) -> None:
    messages = [_says("Welcome."), _user("Hi"), _says("one")]
    assert _trained(_model("llama3", tmp_path / "llama"), messages) == ["Welcome.<|eot_id|>", "one<|eot_id|>"]
    assert _trained(_model("gemma", tmp_path / "gemma"), messages) == ["Welcome.<end_of_turn>", "one<end_of_turn>"]


def test_generation_marks_are_believed(tmp_path: Path) -> None:
    """The author trains on the last answer only, and says so in two pieces."""
    source = MARKED.replace(
        "{% generation %}{{ message.content }}{% endgeneration %}",
        "{% if loop.last %}{% generation %}{{ message.content[:3] }}{% endgeneration %}"
        "{{ message.content[3:4] }}{% generation %}{{ message.content[4:] }}{% endgeneration %}"
        "{% else %}{{ message.content }}{% endif %}",
    )
    byte_level_folder(tmp_path, source)
    model = load_tokenizer(tmp_path, 2000), load_chat_template(tmp_path, None)
    assert _trained(model, [_user("Hi"), _says("one"), _user("And?"), _says("two\nwords")]) == [
        "two",
        "words<|im_end|>",
    ]


def test_empty_generation_marks_are_not_believed(tmp_path: Path) -> None:
    source = MARKED.replace("{{ message.content }}{% endgeneration %}", "{% endgeneration %}{{ message.content }}")
    byte_level_folder(tmp_path, source)
    model = load_tokenizer(tmp_path, 2000), load_chat_template(tmp_path, None)
    assert _trained(model, [_user("Hi"), _says("one")]) == ["one<|im_end|>"]


def test_a_template_that_hides_the_answer_is_an_error() -> None:
    template = load_chat_template(
        None, "{{ messages | length }}{% for m in messages %}{{ m.content | length }}{% endfor %}"
    )
    with pytest.raises(InvalidInputError, match=r"cannot be told .* message 2"):
        encode_example(
            load_tokenizer(None, 300), template, {"messages": [_user("Hi"), _says("one"), _user("Hi")]}, None
        )


words = st.text(st.one_of(st.sampled_from(" \n<|>aé🙂"), st.characters(codec="utf-8")), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(words.filter(str.strip), min_size=2, max_size=6))
def test_any_text_is_found_again(any_model: tuple[str, Model], texts: list[str]) -> None:
    """Each answer's words are trained on, with the end of its turn; the questions are not."""
    name, model = any_model
    texts = texts if len(texts) % 2 == 0 else texts[:-1]
    messages = [(_user, _says)[index % 2](text) for index, text in enumerate(texts)]
    tokenizer, template = model
    encoded = encode_example(tokenizer, template, {"messages": messages}, None)
    ids = encoded.token_ids[encoded.weights > 0].tolist()
    trained = b"".join(map(tokenizer.token_bytes, ids)).decode()
    expected = "".join(text.strip() + tokenizer.eos_texts[0] for text in texts[1::2])
    if name == "thinking prompt":
        expected = expected.replace(tokenizer.eos_texts[0], "")
        trained = trained.replace(tokenizer.eos_texts[0], "")
    assert "".join(trained.replace("<think>\n\n</think>", "").split()) == "".join(expected.split())


def test_an_example_that_is_too_long_is_an_error_and_names_both_numbers() -> None:
    tokenizer, template = load_tokenizer(None, 300), load_chat_template(None, None)
    example = {"messages": [_user("Hi"), _says("x" * 50_000)]}
    num_tokens = encode_example(tokenizer, template, example, None).num_tokens
    assert encode_example(tokenizer, template, example, num_tokens).num_tokens == num_tokens
    with pytest.raises(InvalidInputError, match=f"{num_tokens} tokens, but at most {num_tokens - 1} "):
        encode_example(tokenizer, template, example, num_tokens - 1)


def _example(ids: list[int], weights: list[float]) -> EncodedExample:
    return EncodedExample(np.array(ids, np.int32), np.array(weights, np.float32))


def test_the_file_is_as_the_worker_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "job" / "train.safetensors"
    write_examples(path, [_example([5, 6, 7], [0, 1, 0]), _example([8], [0]), _example([9, 1], [0, 1])])
    tensors = load_file(path)
    assert {name: str(tensor.dtype) for name, tensor in tensors.items()} == {
        "token_ids": "int32",
        "weights": "float32",
        "offsets": "int64",
    }
    assert tensors["token_ids"].tolist() == [5, 6, 7, 8, 9, 1]
    assert tensors["weights"].tolist() == [0, 1, 0, 0, 0, 1]
    assert tensors["offsets"].tolist() == [0, 3, 4, 6]
    assert [entry.name for entry in path.parent.iterdir()] == ["train.safetensors"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "train.safetensors"
    write_examples(path, [_example([1], [0])])
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_examples(path, [_example(list(range(100_000)), [0.0] * 100_000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["train.safetensors"]


def test_the_arguments_of_a_call_may_be_an_object_or_text(tmp_path: Path) -> None:
    model = _model("qwen3", tmp_path)
    as_text, as_object = call_message(), call_message()
    as_object["tool_calls"][0]["function"]["arguments"] = json.loads('{"city": "Paris"}')
    assert _trained(model, [_user("?"), as_text], TOOLS) == _trained(model, [_user("?"), as_object], TOOLS)
