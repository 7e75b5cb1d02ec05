"""What a body may hold: complaints name the field, nulls are nothing, and no answer is changed silently."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from cotenant.api.schemas.chat import ChatRequest, checked_messages
from cotenant.api.schemas.completion import CompletionRequest
from cotenant.api.schemas.parsing import IGNORED_FIELDS, UNSUPPORTED_FIELDS, parse, read_object
from cotenant.api.schemas.sampling import MAX_TOKEN_IDS, for_choice, sampling_params
from cotenant.api.schemas.structure import MAX_CONTAINERS, MAX_LONG_NUMBERS_BYTES, MAX_STRINGS, MAX_VALUES
from cotenant.core.errors import InvalidInputError
from cotenant.core.request import SamplingParams

MESSAGES = [{"role": "user", "content": "hi"}]
VOCAB_SIZE = 100


def chat(**fields: Any) -> ChatRequest:
    body = parse({"model": "m", "messages": MESSAGES, **fields}, ChatRequest)
    body.check()
    return body


def completion(**fields: Any) -> CompletionRequest:
    body = parse({"model": "m", "prompt": "hi", **fields}, CompletionRequest)
    body.check()
    return body


def sampling(**fields: Any) -> SamplingParams:
    return sampling_params(chat(**fields), max_tokens=5, vocab_size=VOCAB_SIZE, logprobs=None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("temperature", 1e308),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 1.01),
        ("seed", 2**63),
        ("seed", "1"),
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", 10**30),
        ("max_tokens", 2.5),
        ("max_completion_tokens", False),
        ("presence_penalty", -2.5),
        ("frequency_penalty", 3),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-38),
        ("stop", 5),
        ("stop", ""),
        ("stop", ["a"] * 17),
        ("stop_token_ids", [-1]),
        ("logit_bias", {"1": 101}),
        ("logit_bias", [1]),
        ("top_logprobs", 21),
        ("logprobs", 1),
        ("priority", 2**31),
        ("ignore_eos", 1),
        ("min_tokens", -1),
        ("min_tokens", 2**31),
        ("stream", "yes"),
        ("stream_options", True),
        ("messages", []),
        ("messages", "hi"),
        ("tools", {}),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidInputError) as caught:
        chat(**{field: value})
    assert caught.value.param is not None
    assert caught.value.param.split("[")[0] == field
    assert field in caught.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 0), ("temperature", 2), ("top_p", 1), ("top_k", -1), ("seed", -(2**63)), ("n", 128)],
)
def test_the_ends_of_ranges_are_inside(field: str, value: Any) -> None:
    assert getattr(chat(**{field: value}), field) == value


@pytest.mark.parametrize("field", ["model", "messages"])
def test_a_missing_field_is_named(field: str) -> None:
    fields = {"model": "m", "messages": MESSAGES}
    del fields[field]
    with pytest.raises(InvalidInputError, match=f"Missing required parameter: '{field}'") as caught:
        parse(fields, ChatRequest)
    assert caught.value.code == "missing_required_parameter"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "json_object"}),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content", "content": "x"}),
        ("guided_json", {"type": "object"}),
        ("guided_regex", "a+"),
        ("structured_outputs", {"json": {}}),
        ("reasoning_effort", "high"),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("continue_final_message", True),
        ("echo", True),
        ("web_search_options", {}),
        ("prompt_logprobs", 0),
        ("spaces_between_special_tokens", False),
        ("detokenize", False),
        ("include_reasoning", False),
        ("truncate_prompt_tokens", 5),
        ("verbosity", "low"),
        ("allowed_token_ids", []),
        ("guided_choice", []),
        ("guided_grammar", ""),
        ("guided_json", {}),
        ("guided_regex", ""),
        ("prediction", {}),
        ("response_format", {}),
        ("structural_tag", ""),
        ("structured_outputs", {}),
        ("thinking_token_budget", 0),
        ("never_heard_of_it", False),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=field) as caught:
        chat(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "text"}),
        ("modalities", ["text"]),
        ("functions", []),
        ("bad_words", []),
        ("tools", []),
        ("function_call", "none"),
        ("tool_choice", "auto"),
        ("min_tokens", 0),
        ("use_beam_search", False),
        ("length_penalty", 1.0),
        ("continue_final_message", False),
        ("guided_json", None),
        ("include_reasoning", True),
        ("truncation_side", "left"),
        ("verbosity", "medium"),
        *((name, "anything") for name in sorted(IGNORED_FIELDS)),
    ],
)
def test_what_asks_for_nothing_is_accepted(field: str, value: Any) -> None:
    fields = {"model": "m", "messages": MESSAGES}
    plain = parse(fields, ChatRequest)
    if value is not None:  # nulls are dropped where the body is read
        fields[field] = value
    body = parse(fields, ChatRequest)
    body.check()
    assert msgspec.structs.replace(body, tool_choice=None) == plain


def test_tools_are_shown_when_they_cannot_be_called() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert chat(tools=tools, tool_choice="none").tools == tools


def test_no_field_is_both_known_and_unsupported() -> None:
    assert not set(UNSUPPORTED_FIELDS) & set(ChatRequest.__struct_fields__)
    assert not set(UNSUPPORTED_FIELDS) & IGNORED_FIELDS


def test_stream_options_need_a_stream() -> None:
    with pytest.raises(InvalidInputError, match="'stream_options' is only allowed when 'stream' is true"):
        chat(stream_options={"include_usage": True})
    assert chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": None}).include_usage
    with pytest.raises(InvalidInputError, match=r"stream_options\.include_cake"):
        chat(stream=True, stream_options={"include_cake": True})


def test_top_logprobs_need_logprobs() -> None:
    with pytest.raises(InvalidInputError, match="'top_logprobs' is only allowed when 'logprobs' is true"):
        chat(top_logprobs=2)
    assert chat(logprobs=True, top_logprobs=2).num_logprobs == 2
    assert chat(logprobs=True).num_logprobs == 0
    assert chat().num_logprobs is None


def test_the_newer_name_of_max_tokens_wins() -> None:
    assert chat(max_tokens=3, max_completion_tokens=4).token_limit == 4
    assert chat(max_tokens=3).token_limit == 3
    assert chat().token_limit is None


def test_sampling_parameters_reach_the_worker() -> None:
    params = sampling(
        temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, logit_bias={"7": -100, "8": 1.5}, ignore_eos=True
    )
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 0, 0.1)
    assert params.logit_bias == {7: -100.0, 8: 1.5}
    assert sampling(logit_bias={"0": 1, "10": 2}).logit_bias == {0: 1.0, 10: 2.0}
    assert params.ignore_eos
    assert params.seed is None


def test_top_k_beyond_the_vocabulary_is_all_of_it() -> None:
    assert sampling(top_k=2**31 - 1).top_k == VOCAB_SIZE


@pytest.mark.parametrize("key", ["x", "-1", "1.0", "", "100", "９", str(10**12), "05", "00", "+5", " 5", "1_0"])
def test_logit_bias_keys_are_token_ids(key: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        sampling(logit_bias={key: 1})
    assert caught.value.param == "logit_bias"


def test_stop_token_ids_are_in_the_vocabulary() -> None:
    assert sampling(stop_token_ids=[99]).stop_token_ids == (99,)
    with pytest.raises(InvalidInputError, match="token id 100"):
        sampling(stop_token_ids=[100])


def test_min_tokens_are_max_tokens_at_most() -> None:
    assert [sampling(min_tokens=number).min_tokens for number in (0, 5)] == [0, 5]
    with pytest.raises(InvalidInputError, match="max_tokens=5, got 6") as caught:
        sampling(min_tokens=6)
    assert caught.value.param == "min_tokens"


@given(st.integers(-(2**63), 2**63 - 1))
def test_seeds_stay_in_range_and_differ_by_choice(seed: int) -> None:
    seeds = [for_choice(sampling(seed=seed), index).seed for index in range(5)]
    assert len(set(seeds)) == 5
    assert all(value is not None and 0 <= value < 2**63 for value in seeds)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_the_four_kinds_of_prompt(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", [[], [1, "a"], ["a", 1], [True], [1.5], {}, [["a"]], 5])
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidInputError) as caught:
        completion(prompt=prompt)
    assert caught.value.param is not None
    assert caught.value.param.startswith("prompt")


@pytest.mark.parametrize("kind", [chat, completion])
def test_the_best_of_as_many_answers_as_are_given_is_all_of_them(kind: Callable[..., Any]) -> None:
    for n in (1, 2):
        assert kind(best_of=n, n=n).n == n
    for fields in ({"best_of": 2}, {"best_of": 1, "n": 2}, {"best_of": 0}, {"best_of": "1"}):
        with pytest.raises(InvalidInputError) as caught:
            kind(**fields)
        assert caught.value.param == "best_of"


def test_completions_refuse_what_only_they_know() -> None:
    assert completion(suffix="", echo=True, max_tokens=0).token_limit == 0
    for fields in ({"suffix": "x"}, {"logprobs": 21}, {"logprobs": True}, {"messages": MESSAGES}):
        with pytest.raises(InvalidInputError) as caught:
            completion(**fields)
        assert caught.value.param in fields


def test_text_parts_are_joined_and_nulls_dropped() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": parts, "name": None, "refusal": None, "type": "text"}
    assert checked_messages([message]) == [{"role": "user", "content": "a\nb"}]


def test_an_assistant_may_only_call_tools() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]
    checked = checked_messages(messages)
    assert checked[0] == {"role": "assistant", "content": None, "tool_calls": calls}
    assert checked[1] == {"role": "tool", "content": "4", "tool_call_id": "1"}


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_earlier_reasoning_is_left_to_the_template(name: str) -> None:
    message = {"role": "assistant", "content": "4", name: "2 and 2"}
    assert checked_messages([message]) == [message]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({}, "messages[1].role"),
        ({"role": "robot", "content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": "x", "name": 5}, "messages[1].name"),
        ({"role": "assistant", "content": "x", "reasoning": ["y"]}, "messages[1].reasoning"),
        ({"role": "user", "content": "x", "audio": {"id": "a"}}, "messages[1].audio"),
        ({"role": "user", "content": "x", "tool_calls": [{}]}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[1].tool_calls[0].function"),
    ],
)
def test_a_bad_message_is_refused_by_its_place(message: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        checked_messages([MESSAGES[0], message])
    assert caught.value.param == param
    assert param in caught.value.message


def read(raw: bytes) -> dict[str, Any]:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": raw}

    return asyncio.run(read_object(Request({"type": "http", "method": "POST", "headers": []}, receive)))


def test_what_a_large_body_holds_is_not_walked_as_garbage_while_it_grows() -> None:
    walks: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        walks.append(phase)

    raw = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": []}] * 20_000})
    gc.callbacks.append(note)
    try:
        parse(read(raw), ChatRequest)
    finally:
        gc.callbacks.remove(note)
    assert len(walks) < 20
    with pytest.raises(InvalidInputError):
        read(raw[:-1])
    assert gc.isenabled()


@given(st.text(st.sampled_from('\\"[]{},:u1. \nä\U0001f600'), min_size=1), st.booleans())
def test_what_is_written_within_strings_is_never_too_much(text: str, is_ascii: bool) -> None:
    """However often: of all that is counted there would be more than may be."""
    long = text * (MAX_VALUES // len(text) + 1)
    body = {"prompt": long, text: [text, long[::-1]]}
    assert read(json.dumps(body, ensure_ascii=is_ascii).encode()) == body


@pytest.mark.parametrize(
    ("taken", "refused", "says"),
    [
        (["x"] * (MAX_STRINGS - 1), ["x"] * MAX_STRINGS, f"more than {MAX_STRINGS} strings"),
        (
            {f'{number}\\\\"': "" for number in range(MAX_STRINGS // 2 - 1)},
            {f'{number}\\\\"': "" for number in range(MAX_STRINGS // 2)},
            f"more than {MAX_STRINGS} strings",
        ),
        ([[]] * (MAX_CONTAINERS - 2), [[]] * (MAX_CONTAINERS - 1), f"more than {MAX_CONTAINERS} arrays and objects"),
        (
            [{}] * (MAX_CONTAINERS - 2),
            [{}, []] * (MAX_CONTAINERS // 2),
            f"more than {MAX_CONTAINERS} arrays and objects",
        ),
        ([2**63] * 4096, [2**63] * 4097, f"more than {MAX_LONG_NUMBERS_BYTES} characters in numbers"),
        ([-1 / 3] * 4096, [-1 / 3] * 4097, f"more than {MAX_LONG_NUMBERS_BYTES} characters in numbers"),
        ([int("9" * 4000)] * 16, [int("9" * 4000)] * 17, f"more than {MAX_LONG_NUMBERS_BYTES} characters in numbers"),
        ([1] * MAX_VALUES, [1] * (MAX_VALUES + 1), f"more than {MAX_VALUES} values"),
    ],
)
def test_a_body_of_too_many_values_is_refused_before_they_are_made(taken: Any, refused: Any, says: str) -> None:
    assert read(json.dumps({"a": taken}).encode()) == {"a": taken}
    raw = json.dumps({"a": refused}).encode()
    with pytest.raises(InvalidInputError, match=says) as caught:
        read(raw)
    assert (caught.value.code, caught.value.param) == ("request_too_complex", None)
    with pytest.raises(InvalidInputError) as caught:  # what is no JSON is told so, whatever its size
        read(raw[:-1])
    assert caught.value.code == "invalid_json"


def test_the_longest_list_of_token_ids_is_taken_with_all_that_may_be_beside_it() -> None:
    fields = {"prompt": [100_000] * MAX_TOKEN_IDS, "logit_bias": {str(number): 1 for number in range(1024)}}
    body = parse(read(json.dumps({"model": "m", **fields}).encode()), CompletionRequest)
    assert body.prompts == [fields["prompt"]]


@pytest.mark.parametrize(
    ("escapes", "code_point"),
    [
        ("\\ud83d", "D83D"),
        ("\\uDE00", "DE00"),
        ("\\ud83dx", "D83D"),
        ("\\ud83d\\n", "D83D"),
        ("\\ud83d\\u0041", "D83D"),
        ("\\ud800\\ud83d\\ude00", "D800"),
        ("\\ud83d\\ude00\\ud83c", "D83C"),
        ("\\ud83d\\ude00\\udc01", "DC01"),
    ],
)
@pytest.mark.parametrize("after", ["", '", "b": "' + "x" * 20])
def test_half_of_a_character_is_told_as_such(escapes: str, code_point: str, after: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"JSON: it holds an unpaired surrogate \(U\+{code_point}\)") as caught:
        read(f'{{"prompt": "{escapes}{after}"}}'.encode())
    assert caught.value.code == "invalid_json"


@pytest.mark.parametrize(
    "raw", [b'{"a": "\\ud83d', b'{"a": "x', b'{"a": "\\ud8', b'{"a": "\\u00e9"', b'{"a": "\\ud83d\\u']
)
def test_what_breaks_off_is_told_so(raw: bytes) -> None:
    with pytest.raises(InvalidInputError, match="truncated"):
        read(raw)
