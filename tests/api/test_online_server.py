"""Requests to a real server with the built-in model, through the clients that people use."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import httpx
import openai
import pytest
from openai.types import CompletionUsage

import serving
from online import MESSAGES, MODEL, figure, figure_in, max_model_len, wait_until_idle
from undisturbed import until_undisturbed


def counts(usage: CompletionUsage | None) -> tuple[int, int, int]:
    assert usage is not None
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


# Chat.


def test_chat_answers_and_counts(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert 1 <= answer.usage.completion_tokens <= 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    arguments: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**arguments)
    chunks = list(client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert not any(reasons[:-1])
    stops = [chunk.choices[0].model_extra or {} for chunk in chunks[:-1]]
    assert stops == [*({} for _ in stops[1:]), {"stop_reason": None}], "no stop string, and no token of the request's"
    assert chunks[-1].choices == []
    assert counts(chunks[-1].usage) == counts(whole.usage)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_stream_on_the_wire(http: httpx.Client) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4, "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = http.post("/v1/chat/completions", json={**body, "stream_options": options})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-request-id"]
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    counts = [json.loads(event)["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts)
    assert counts[0] == 0


def test_greedy_answers_repeat_and_seeds_decide_the_others(client: openai.OpenAI) -> None:
    def answer(**arguments: Any) -> str | None:
        made = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=12, extra_body={"ignore_eos": True}, **arguments
        )
        return made.choices[0].message.content

    assert answer(temperature=0) == answer(temperature=0)
    assert answer(seed=1, temperature=2) == answer(seed=1, temperature=2)
    assert len({answer(seed=seed, temperature=2) for seed in range(4)}) > 1


def test_several_choices_count_the_prompt_once(client: openai.OpenAI) -> None:
    arguments: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 5, "extra_body": {"ignore_eos": True}}
    one = client.chat.completions.create(**arguments)
    three = client.chat.completions.create(**arguments, n=3, seed=7, temperature=2)
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert one.usage is not None
    assert three.usage is not None
    assert three.usage.prompt_tokens == one.usage.prompt_tokens
    assert three.usage.completion_tokens == 15
    again = client.chat.completions.create(**arguments, n=3, seed=7, temperature=2)
    assert [c.message.content for c in again.choices] == [c.message.content for c in three.choices]


def test_several_choices_in_a_stream(client: openai.OpenAI) -> None:
    texts = {0: "", 1: ""}
    roles = []
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=6, n=2, temperature=0, stream=True
    )
    for chunk in stream:
        choice = chunk.choices[0]
        roles += [choice.index] if choice.delta.role else []
        texts[choice.index] += choice.delta.content or ""
    assert roles == [0, 1]
    assert texts[0] == texts[1]


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert answer.usage is not None
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob <= 0
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob, abs=1e-4)  # greedy takes the likeliest
        assert entry.bytes is not None
    shown = content[:-1] if answer.choices[0].finish_reason == "stop" else content
    text = b"".join(bytes(entry.bytes or []) for entry in shown).decode(errors="replace")
    assert text == answer.choices[0].message.content


def test_logprobs_in_a_stream_are_those_of_the_whole(client: openai.OpenAI) -> None:
    arguments: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 6, "temperature": 0, "logprobs": True}
    whole = client.chat.completions.create(**arguments).choices[0].logprobs
    streamed: list[float] = []
    for chunk in client.chat.completions.create(**arguments, stream=True):
        if chunk.choices[0].logprobs and chunk.choices[0].logprobs.content:
            streamed += [entry.logprob for entry in chunk.choices[0].logprobs.content]
    assert whole is not None
    assert streamed == pytest.approx([entry.logprob for entry in whole.content or []], abs=1e-4)


def test_a_stop_string_cuts_the_answer(client: openai.OpenAI) -> None:
    arguments: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 32, "temperature": 0}
    whole = client.chat.completions.create(**arguments).choices[0].message.content
    assert whole is not None
    stop = whole[3:6]
    cut = client.chat.completions.create(**arguments, stop=[stop, "\u2603"]).choices[0]
    assert cut.message.content == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"
    stream = client.chat.completions.create(**arguments, stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole[: whole.index(stop)]


def test_a_banned_token_does_not_come(client: openai.OpenAI, http: httpx.Client) -> None:
    arguments: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1, "temperature": 0, "logprobs": True}
    first = client.chat.completions.create(**arguments).choices[0].logprobs
    assert first is not None
    token = (first.content or [])[0].token
    ids = http.post("/tokenize", json={"prompt": token, "add_special_tokens": False}).json()["tokens"]
    banned = client.chat.completions.create(**arguments, logit_bias={str(i): -100 for i in ids}).choices[0].logprobs
    assert banned is not None
    assert (banned.content or [])[0].token != token


def test_ignore_eos_goes_on_to_the_limit(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=60, extra_body={"ignore_eos": True, "priority": -1, "top_k": 5}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 60


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_usage_says_how_much_of_the_prompt_was_cached(http: httpx.Client, path: str, stream: bool) -> None:
    text = f"{path} {stream}: " + "the quick brown fox jumps over the lazy dog, " * 12

    def usage(text: str, **more: Any) -> tuple[int, int]:
        body: dict[str, Any] = {"model": MODEL, "max_tokens": 3, "ignore_eos": True, "stream": stream, **more}
        body |= {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
        if stream:
            body["stream_options"] = {"include_usage": True}
        response = http.post(f"/v1/{path}", json=body)
        assert response.status_code == 200, response.text
        if stream:
            *_, last, done, _ = response.text.split("\n\n")
            assert done == "data: [DONE]"
            answer = json.loads(last.removeprefix("data: "))
        else:
            answer = response.json()
        assert set(answer["usage"]["prompt_tokens_details"]) == {"cached_tokens"}
        return answer["usage"]["prompt_tokens"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    num_prompt, num_cached = usage(text)
    assert num_cached < 16 * 2, "at most what a chat template begins with"
    full_pages = (num_prompt - 1) // 16 * 16
    assert usage(text) == (num_prompt, full_pages)
    assert usage(text, n=3) == (num_prompt, full_pages), "a prompt that is answered several times counts once"
    assert [usage(text, cache_salt="a")[1] for _ in range(2)] == [0, full_pages]
    if "chat" not in path:
        body = {"model": MODEL, "prompt": [text, text], "max_tokens": 1, "n": 2}
        both = http.post("/v1/completions", json=body).json()["usage"]
        assert both["prompt_tokens"] == 2 * num_prompt
        assert both["prompt_tokens_details"] == {"cached_tokens": 2 * full_pages}
        body |= {"prompt": text, "echo": True, "logprobs": 0}
        scored = http.post("/v1/completions", json=body).json()["usage"]
        assert scored["prompt_tokens_details"] == {"cached_tokens": 0}, "scoring a prompt computes all of it"


# Completions.


def test_a_completion_of_text_and_of_its_tokens_is_the_same(client: openai.OpenAI, http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": "The sun"}).json()["tokens"]
    arguments: Any = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    text = client.completions.create(prompt="The sun", **arguments)
    tokens = client.completions.create(prompt=ids, **arguments)
    both = client.completions.create(prompt=[ids, ids], **arguments)
    strings = client.completions.create(prompt=["The sun", "The moon"], **arguments)
    assert text.choices[0].text == tokens.choices[0].text == both.choices[1].text == strings.choices[0].text
    assert counts(text.usage) == counts(tokens.usage)
    assert [choice.index for choice in both.choices] == [0, 1]


def test_echo_repeats_the_prompt(client: openai.OpenAI) -> None:
    arguments: Any = {"model": MODEL, "prompt": "The sun", "max_tokens": 5, "temperature": 0}
    plain = client.completions.create(**arguments).choices[0].text
    assert client.completions.create(**arguments, echo=True).choices[0].text == "The sun" + plain
    stream = client.completions.create(**arguments, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "The sun" + plain


def test_a_streamed_echo_has_the_log_probabilities_of_the_whole_answer(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": "The sun is warm, and the sea is wide. " * 8}).json()["tokens"]
    body = {"model": MODEL, "prompt": [ids], "echo": True, "logprobs": 20, "max_tokens": 4, "temperature": 0, "n": 2}
    whole = http.post("/v1/completions", json=body).json()
    answer = http.post("/v1/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}})
    *events, done = answer.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {key: chunks[-1]["usage"][key] for key in ("prompt_tokens", "completion_tokens")} == {
        "prompt_tokens": len(ids),
        "completion_tokens": 8,
    }
    for choice in whole["choices"]:
        own = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(each["text"] for each in own) == choice["text"]
        assert own[-1]["finish_reason"] == choice["finish_reason"] == "length"
        assert [each["stop_reason"] for each in own if "stop_reason" in each] == [choice["stop_reason"]] == [None]
        for name in ("tokens", "text_offset"):
            assert [value for each in own for value in each["logprobs"][name]] == choice["logprobs"][name]
        first, *values = [value for each in own for value in each["logprobs"]["token_logprobs"]]
        assert first is choice["logprobs"]["token_logprobs"][0] is None
        assert values == pytest.approx(choice["logprobs"]["token_logprobs"][1:], abs=1e-3)
        assert len(own[0]["logprobs"]["top_logprobs"]) > len(ids)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_what_lm_eval_asks_for(http: httpx.Client, max_tokens: int) -> None:
    ids = http.post("/tokenize", json={"prompt": "The sun is warm."}).json()["tokens"]
    body = {"model": MODEL, "prompt": [ids], "echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0}
    answer = http.post("/v1/completions", json={**body, "seed": 1234}).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert {len(values) for values in logprobs.values()} == {len(ids) + max_tokens}
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    for value, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert value <= 1e-6
        assert max(top.values()) >= value
    assert answer["usage"] == {
        "prompt_tokens": len(ids), "completion_tokens": max_tokens, "total_tokens": len(ids) + max_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


def test_a_prompts_logprobs_are_those_of_generating_it(client: openai.OpenAI) -> None:
    generated = client.completions.create(model=MODEL, prompt="The sun", max_tokens=5, temperature=0, logprobs=0)
    text, logprobs = generated.choices[0].text, generated.choices[0].logprobs
    scored = client.completions.create(model=MODEL, prompt="The sun" + text, max_tokens=0, echo=True, logprobs=0)
    again = scored.choices[0].logprobs
    assert logprobs is not None
    assert again is not None
    if again.tokens is not None and again.tokens[-len(logprobs.tokens or []) :] == logprobs.tokens:
        expected = logprobs.token_logprobs or []
        assert (again.token_logprobs or [])[-len(expected) :] == pytest.approx(expected, abs=1e-3)


def test_offsets_point_at_tokens(client: openai.OpenAI) -> None:
    choice = client.completions.create(
        model=MODEL, prompt="The sun", max_tokens=5, temperature=0, logprobs=0, echo=True
    ).choices[0]
    assert choice.logprobs is not None
    for token, offset in zip(choice.logprobs.tokens or [], choice.logprobs.text_offset or [], strict=True):
        if "\ufffd" not in token and not token.startswith("<"):
            assert choice.text[offset:].startswith(token)


def test_offsets_count_the_marks_that_a_prompt_is_written_with(client: openai.OpenAI) -> None:
    prompt = "<|begin|><|user|>Hi<|end|>"
    choice = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=1, temperature=0, logprobs=0, echo=True
    ).choices[0]
    assert choice.logprobs is not None
    assert choice.text.startswith(prompt)
    assert (choice.logprobs.tokens or [])[:-1] == ["<|begin|>", "<|begin|>", "<|user|>", "Hi", "<|end|>"]
    assert choice.logprobs.text_offset == [0, 0, 9, 17, 19, 26]


# Around them.


def test_tokens_and_back(http: httpx.Client) -> None:
    text = "Hello wörld, 3 + 4 = 7!"
    made = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False, "return_token_strs": True}).json()
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    assert made["max_model_len"] == max_model_len(http)
    assert http.post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": text}


def test_a_conversation_is_tokenised_as_chat_does_it(client: openai.OpenAI, http: httpx.Client) -> None:
    counts = []
    for options in ({}, {"add_special_tokens": False}, {"add_special_tokens": True}):
        count = http.post("/tokenize", json={"model": MODEL, "messages": MESSAGES, **options}).json()["count"]
        usage = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1, extra_body=options).usage
        assert usage is not None
        assert usage.prompt_tokens == count
        counts.append(count)
    assert counts == [counts[0], counts[0], counts[0] + 1]


def test_models_have_cards(client: openai.OpenAI, http: httpx.Client) -> None:
    assert next(iter(client.models.list())).id == MODEL
    card = http.get(f"/v1/models/{MODEL}").json()
    assert card["object"] == "model"
    assert card["parent"] is None
    assert card["root"]
    assert client.models.retrieve(MODEL).id == MODEL


def test_version_and_health(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200
    assert http.get("/version").json()["version"]


def test_metrics_count_what_happened(client: openai.OpenAI, http: httpx.Client) -> None:
    names = ("generation_tokens_total", "slo_requests_total", "time_to_first_token_seconds_count")
    times = ("request_queue_time_seconds_sum", "time_to_first_token_seconds_sum")
    before, before_s = ([figure(http, name) for name in each] for each in (names, times))
    client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=7, extra_body={"ignore_eos": True})
    after, after_s = ([figure(http, name) for name in each] for each in (names, times))
    assert [new - old for old, new in zip(before, after, strict=True)] == [7, 1, 1]
    queue_s, first_token_s = (new - old for old, new in zip(before_s, after_s, strict=True))
    assert 0.0 < queue_s < first_token_s, "by the clock that both processes share"
    assert figure(http, "slo_attained_total") <= after[1]
    assert figure(http, "slo_target_ms") > 0


# Clients that leave.


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_sequence(
    server: serving.RunningServer, http: httpx.Client, stream: bool
) -> None:
    limit = max_model_len(http) - 100
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": limit, "ignore_eos": True, "stream": stream, "n": 4}
    raw = json.dumps(body).encode()

    def left(_: int) -> str | None:
        tokens_before = figure(http, "generation_tokens_total")
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
            connection.sendall(head.encode() + raw)
            deadline_s = time.monotonic() + 60
            while figure(http, "generation_tokens_total") == tokens_before:
                assert time.monotonic() < deadline_s, "it never began"
        wait_until_idle(http, within_s=60)
        num_tokens = figure(http, "generation_tokens_total") - tokens_before
        return None if num_tokens < 4 * limit else f"{num_tokens:.0f} tokens were generated"

    until_undisturbed(left, num_runs=3)


def test_nothing_is_left_live(http: httpx.Client) -> None:
    assert figure_in(wait_until_idle(http, within_s=60), "kv_cache_usage_perc") == 0
