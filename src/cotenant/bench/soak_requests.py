"""The requests of a soak: drawn at random, and each answer checked against what was asked for."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

_PATH = "/v1/completions"
_NUM_PREFIXES = 8
_TOKEN_IDS = (100, 1100)


@dataclass(frozen=True, slots=True)
class SoakRequest:
    """One request: its body, and when its client goes away (None: never). ``kind`` names it in the counts."""

    kind: str
    body: dict[str, Any]
    abort_after_events: int | None = None
    abort_after_s: float | None = None


class RequestSource:
    """Draws requests: short and long prompts, some that begin alike, all kinds of sampling, clients that go away."""

    def __init__(self, seed: int, max_model_len: int) -> None:
        self._random = random.Random(seed)
        self._max_model_len = max_model_len
        self._prefixes = [self._token_ids(max_model_len // 2) for _ in range(_NUM_PREFIXES)]

    def draw(self, model: str) -> SoakRequest:
        """The next request for this model."""
        rng = self._random
        max_tokens = rng.choice((1, 8, 24, 64))
        stream = rng.random() < 0.6
        body = {
            "model": model,
            "prompt": self._prompt(max_tokens),
            "max_tokens": max_tokens,
            "priority": rng.choice((0, 0, 0, -1, 1)),
            "ignore_eos": rng.random() < 0.7,
            **self._sampling(),
        }
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if rng.random() < 0.2:
            if stream:
                return SoakRequest("aborted stream", body, abort_after_events=rng.randint(0, 5))
            return SoakRequest("aborted", body, abort_after_s=rng.uniform(0.0, 0.3))
        return SoakRequest("stream" if stream else "whole", body)

    def _sampling(self) -> dict[str, Any]:
        rng = self._random
        if rng.random() < 0.4:
            return {"temperature": 0}
        sampling: dict[str, Any] = {"temperature": rng.choice((0.5, 1.0)), "seed": rng.randrange(2**31)}
        optional: Sequence[tuple[str, object]] = (
            ("top_p", 0.9),
            ("top_k", 20),
            ("min_p", 0.05),
            ("presence_penalty", 0.5),
            ("frequency_penalty", 0.5),
            ("repetition_penalty", 1.2),
            ("logprobs", rng.randint(0, 5)),
            ("n", 2),
        )
        return sampling | {name: value for name, value in optional if rng.random() < 0.25}

    def _prompt(self, max_tokens: int) -> list[int]:
        rng, room = self._random, self._max_model_len - max_tokens
        low, high = rng.choice(((1, 32), (1, 32), (32, room // 4), (room // 2, room)))
        length = rng.randint(low, max(low, high))
        if rng.random() < 0.4:
            prefix = rng.choice(self._prefixes)[: rng.randint(0, length)]
            return prefix + self._token_ids(length - len(prefix))
        return self._token_ids(length)

    def _token_ids(self, count: int) -> list[int]:
        return [self._random.randrange(*_TOKEN_IDS) for _ in range(count)]


class WrongAnswerError(Exception):
    """The answer is not what was asked for. ``status`` is the HTTP status."""

    def __init__(self, message: str, status: int = 200) -> None:
        super().__init__(message)
        self.status = status


async def send(client: httpx.AsyncClient, request: SoakRequest) -> None:
    """Send a request and check its answer, or leave as it says. Raises WrongAnswerError or httpx.HTTPError."""
    if request.body.get("stream"):
        await _send_stream(client, request)
        return
    try:
        async with asyncio.timeout(request.abort_after_s):
            response = await client.post(_PATH, json=request.body)
    except TimeoutError:
        return
    if response.status_code != 200:
        raise WrongAnswerError(_refusal(response.status_code, response.text), response.status_code)
    answer = response.json()
    _check(request.body, answer["usage"], len({choice["index"] for choice in answer["choices"]}))
    for choice in answer["choices"]:
        if choice["finish_reason"] not in ("stop", "length"):
            raise WrongAnswerError(f"finish_reason is {choice['finish_reason']}")
        if (choice["logprobs"] is not None) != ("logprobs" in request.body):
            raise WrongAnswerError("logprobs are there, or missing, against what was asked for")


async def _send_stream(client: httpx.AsyncClient, request: SoakRequest) -> None:
    num_events, is_done = 0, False
    usage: dict[str, int] | None = None
    finished: set[int] = set()
    async with client.stream("POST", _PATH, json=request.body) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            raise WrongAnswerError(_refusal(response.status_code, text), response.status_code)
        if request.abort_after_events == 0:
            return
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                is_done = True
            elif line.startswith("data:"):
                event = json.loads(line[5:])
                if "error" in event:
                    raise WrongAnswerError(f"an error event: {event['error']}")
                usage = event["usage"] or usage
                finished |= {choice["index"] for choice in event["choices"] if choice["finish_reason"]}
                num_events += 1
                if num_events == request.abort_after_events:
                    return
    if not is_done or usage is None:
        raise WrongAnswerError("the stream ended without usage or [DONE]")
    _check(request.body, usage, len(finished))


def _check(body: dict[str, Any], usage: dict[str, int], num_finished: int) -> None:
    num_choices = body.get("n", 1)
    most = body["max_tokens"] * num_choices
    num_tokens = usage["completion_tokens"]
    if usage["prompt_tokens"] != len(body["prompt"]):
        raise WrongAnswerError(f"{usage['prompt_tokens']} prompt tokens were counted, {len(body['prompt'])} were sent")
    if num_tokens > most or (body["ignore_eos"] and num_tokens != most):
        raise WrongAnswerError(f"{num_tokens} tokens came, {most} were asked for")
    if num_finished != num_choices:
        raise WrongAnswerError(f"{num_finished} choices were finished, {num_choices} were asked for")


def _refusal(status: int, text: str) -> str:
    return f"HTTP {status}: {text[:300]}"
