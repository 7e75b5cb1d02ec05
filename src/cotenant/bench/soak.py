"""A soak: mixed load for a long time, and at the end nothing may be left of it.

Every page free, memory where it stood after the first minutes, no request failed that was not meant to, and greedy
answers as at the start.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from cotenant.bench.client import ServerError, call, metrics, new_client, wait_healthy
from cotenant.bench.greedy_answer import GreedyAnswer
from cotenant.bench.process_memory import resident_bytes, tree
from cotenant.bench.soak_requests import RequestSource, WrongAnswerError, send

_IDLE_WITHIN_S = 120.0
_PAUSE_AFTER_FAILURE_S = 0.5
_MAX_REPORTED = 20
_PROBE: dict[str, Any] = {"prompt": [*range(101, 150)], "max_tokens": 32, "temperature": 0, "ignore_eos": True}
_SAMPLED = (
    "kv_cache_usage_perc",
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_live",
    "num_preemptions_total",
    "generation_tokens_total",
    "iterations_total",
)
_MUST_BE_ZERO = ("num_requests_running", "num_requests_waiting", "num_requests_live")


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """``adapters`` are folders by name, on the server's disk. ``pid``: the server's process, None: do not look at its
    memory, which may be ``rss_bound_bytes`` above that of ``warmup_s`` after the start. ``healthy_within_s``: how long
    a server that is still starting is waited for."""

    url: str
    duration_s: float
    concurrency: int
    adapters: Mapping[str, str]
    pid: int | None
    sample_every_s: float
    warmup_s: float
    rss_bound_bytes: int
    api_key: str
    seed: int
    healthy_within_s: float


@dataclass(slots=True)
class Soak:
    """One soak. ``run`` gives the report; ``problems`` is empty when all held."""

    options: SoakOptions
    problems: list[str] = field(default_factory=list)
    _counts: Counter[str] = field(default_factory=Counter)
    _samples: list[dict[str, float]] = field(default_factory=list)
    _loaded: set[str] = field(default_factory=set)
    # How often an adapter was unloaded: a request that was under way meanwhile may be told that there is none.
    _unloads: Counter[str] = field(default_factory=Counter)
    _start_s: float = 0.0
    _processes: list[int] = field(default_factory=list)  # of the server, which are to be there at the end
    _is_warm: bool = False

    async def run(self) -> dict[str, Any]:
        """Load the server for the whole time, then check what is left."""
        async with new_client(self.options.url) as client:
            if self.options.api_key:
                client.headers["Authorization"] = f"Bearer {self.options.api_key}"
            await wait_healthy(client, timeout_s=self.options.healthy_within_s)
            card = (await call(client, "GET", "/v1/models"))["data"][0]
            model, max_model_len = str(card["id"]), int(card.get("max_model_len") or 2048)
            first_probes = await self._probes(client, model)
            self._processes = tree(self.options.pid) if self.options.pid is not None else []
            self._start_s = time.monotonic()
            await self._sample(client)
            await self._load(client, model, max_model_len)
            try:
                await self._become_idle(client)
                await self._sample(client)
                for name, answer in (await self._probes(client, model)).items():
                    difference = answer.difference_from(first_probes[name])
                    if difference is not None:
                        self.problems.append(f"the greedy answer of {name} is not that of the start: {difference}")
            except (ServerError, httpx.HTTPError) as error:
                self.problems.append(f"after the load: {type(error).__name__}: {error}")
            self._check_processes()
        return {
            "kind": "soak",
            "passed": not self.problems,
            "problems": self.problems,
            "duration_s": self.options.duration_s,
            "concurrency": self.options.concurrency,
            "num_adapters": len(self.options.adapters),
            "requests": dict(sorted(self._counts.items())),
            "rss_bound_bytes": self.options.rss_bound_bytes,
            "samples": self._samples,
        }

    async def _load(self, client: httpx.AsyncClient, model: str, max_model_len: int) -> None:
        end_s = self._start_s + self.options.duration_s
        async with asyncio.TaskGroup() as group:
            for number in range(self.options.concurrency):
                source = RequestSource(self.options.seed * 1000 + number, max_model_len)
                group.create_task(self._send_until(client, end_s, source, model, random.Random(number)))
            group.create_task(self._sample_until(client, end_s))
            if self.options.adapters:
                group.create_task(self._change_adapters_until(client, end_s))

    async def _send_until(
        self, client: httpx.AsyncClient, end_s: float, source: RequestSource, model: str, rng: random.Random
    ) -> None:
        while time.monotonic() < end_s:
            adapter = rng.choice(sorted(self._loaded)) if self._loaded and rng.random() < 0.6 else None
            unloads = self._unloads[adapter] if adapter else 0
            request = source.draw(adapter or model)
            kind = request.kind
            try:
                await send(client, request)
            except WrongAnswerError as error:
                if error.status == 404 and adapter and self._unloads[adapter] != unloads:
                    kind = "adapter unloaded meanwhile"
                else:
                    kind = "failed"
                    self._report(f"{request.kind} to {adapter or model}: {error}")
            except (httpx.HTTPError, ValueError, KeyError) as error:
                kind = "failed"
                self._report(f"{request.kind} to {adapter or model}: {type(error).__name__}: {error}")
            self._counts[kind] += 1
            if kind == "failed":
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)

    async def _change_adapters_until(self, client: httpx.AsyncClient, end_s: float) -> None:
        rng, names = random.Random(self.options.seed), sorted(self.options.adapters)
        while time.monotonic() < end_s:
            name = rng.choice(names)
            try:
                await (self._unload(client, name) if name in self._loaded else self._load_adapter(client, name))
            except (ServerError, httpx.HTTPError) as error:
                self._report(f"adapter {name}: {type(error).__name__}: {error}")
            await asyncio.sleep(rng.uniform(0.05, 1.0))

    async def _load_adapter(self, client: httpx.AsyncClient, name: str) -> None:
        await _post(client, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": self.options.adapters[name]})
        self._loaded.add(name)
        self._counts["adapter loads"] += 1

    async def _unload(self, client: httpx.AsyncClient, name: str) -> None:
        self._loaded.discard(name)
        self._unloads[name] += 1
        await _post(client, "/v1/unload_lora_adapter", {"lora_name": name})

    async def _sample_until(self, client: httpx.AsyncClient, end_s: float) -> None:
        due_s = self._start_s
        while (due_s := due_s + self.options.sample_every_s) < end_s:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            await self._sample(client)
            is_warm = due_s - self._start_s >= self.options.warmup_s
            if self.options.pid is not None and is_warm and not self._is_warm:
                self._is_warm = True  # whoever only helped to start has ended by now
                with suppress(ProcessLookupError):
                    self._processes = tree(self.options.pid)

    async def _sample(self, client: httpx.AsyncClient) -> None:
        try:
            figures = await metrics(client)
        except httpx.HTTPError as error:
            self._report(f"/metrics: {type(error).__name__}: {error}")
            return
        sample = {"at_s": round(time.monotonic() - self._start_s, 1)}
        sample |= {name: figures[f"cotenant:{name}"] for name in _SAMPLED if f"cotenant:{name}" in figures}
        if self.options.pid is not None:
            sample["rss_bytes"] = resident_bytes(self.options.pid)
        earlier = self._samples[-1].get("iterations_total", 0) if self._samples else 0
        if sample.get("iterations_total", earlier) < earlier:
            self._report("the worker was restarted: its iterations began again")
        self._samples.append(sample)

    async def _become_idle(self, client: httpx.AsyncClient) -> None:
        """Unload what is loaded, and wait until no request is left and no page is in use."""
        for name in sorted(self._loaded):
            await self._unload(client, name)
        deadline_s = time.monotonic() + _IDLE_WITHIN_S
        while True:
            figures = await metrics(client)
            left = {name: figures.get(f"cotenant:{name}", 0.0) for name in _MUST_BE_ZERO}
            usage = figures.get("cotenant:kv_cache_usage_perc", 0.0)
            if not any(left.values()) and usage == 0:
                return
            if time.monotonic() > deadline_s:
                self.problems.append(f"{_IDLE_WITHIN_S:g} s after the load {left}, {usage:.2%} of the pages in use")
                return
            await asyncio.sleep(0.1)

    async def _probes(self, client: httpx.AsyncClient, model: str) -> dict[str, GreedyAnswer]:
        """Greedy answers of the base model and of one adapter, each with its prompt in the prefix cache."""
        answers = {model: await self._probe(client, model)}
        if self.options.adapters:
            name = min(self.options.adapters)
            await self._load_adapter(client, name)
            answers[name] = await self._probe(client, name)
            await self._unload(client, name)
        return answers

    async def _probe(self, client: httpx.AsyncClient, model: str) -> GreedyAnswer:
        for _ in range(2):
            answer = await call(client, "POST", "/v1/completions", json={**_PROBE, "model": model, "logprobs": 5})
        logprobs = answer["choices"][0]["logprobs"]
        return GreedyAnswer(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"])

    def _check_processes(self) -> None:
        if self.options.pid is None:
            return
        try:
            gone = set(self._processes) - set(tree(self.options.pid))
        except ProcessLookupError:
            gone = {self.options.pid}
        warm = [sample for sample in self._samples if sample["at_s"] >= self.options.warmup_s]
        if gone:
            self.problems.append(f"processes of the server have ended: {sorted(gone)}")
            return
        if len(warm) < 2:
            self.problems.append(
                f"after the warm-up memory was sampled {len(warm)} times, too few to compare: run longer, or sample "
                "more often"
            )
            return
        before, after = warm[0]["rss_bytes"], self._samples[-1]["rss_bytes"]
        if after > before + self.options.rss_bound_bytes:
            bound = self.options.rss_bound_bytes / 2**20
            self.problems.append(
                f"memory grew from {before / 2**20:.0f} MiB at {warm[0]['at_s']:.0f} s to {after / 2**20:.0f} MiB, by "
                f"more than {bound:.0f} MiB"
            )

    def _report(self, problem: str) -> None:
        if len(self.problems) < _MAX_REPORTED:
            self.problems.append(f"at {time.monotonic() - self._start_s:.0f} s: {problem}")


async def _post(client: httpx.AsyncClient, path: str, body: dict[str, str]) -> None:
    """A call that is answered with plain text. Raises ServerError with the server's own words."""
    response = await client.post(path, json=body)
    if response.status_code != 200:
        raise ServerError(f"{path}: HTTP {response.status_code}: {response.text[:300]}")
