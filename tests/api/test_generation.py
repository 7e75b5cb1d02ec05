"""From tokens to text: stop strings, ends, places of tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from api.figures import figures
from cotenant.api.generation import Choice, ChoiceText, Piece, TextOptions, collect_choice
from cotenant.api.metrics import Metrics
from cotenant.api.worker_client import WorkerClient
from cotenant.config import ModelConfig, ServerConfig
from cotenant.core.errors import WorkerLostError
from cotenant.core.plan import Slo
from cotenant.core.request import FinishReason, Request, SamplingParams, SequenceOutput, TokenLogprobs
from cotenant.text.byte_tokenizer import EOS, ByteTokenizer
from cotenant.text.tokenizer import load_tokenizer
from cotenant.wire.messages import Ready
from text.samples import sentencepiece_folder

TOKENIZER = ByteTokenizer(300)
EOS_ID = TOKENIZER.eos_token_ids[0]


def request(**sampling: object) -> Request:
    return Request("r", (65,), SamplingParams(**sampling), 0.0)  # type: ignore[arg-type]


def outputs(groups: list[bytes], end: FinishReason, last: tuple[int, ...] = ()) -> list[SequenceOutput]:
    """One output per group of bytes; the last one also has the tokens ``last``, and ends."""
    made = [
        SequenceOutput("r", tuple(group), tuple(TokenLogprobs(token, -1.0, 1) for token in group))
        for group in groups[:-1]
    ]
    ids = (*groups[-1], *last)
    stop_token = last[-1] if end is FinishReason.STOP else None
    logprobs = tuple(TokenLogprobs(token, -1.0, 1) for token in ids)
    return [*made, SequenceOutput("r", ids, logprobs, finish_reason=end, stop_token_id=stop_token)]


def run(options: TextOptions, steps: list[SequenceOutput], **sampling: object) -> list[Piece]:
    text = ChoiceText(TOKENIZER, request(**sampling), options)
    pieces = []
    for output in steps:
        pieces.append(text.add(output))
        if pieces[-1].finish_reason is not None:
            break
    return pieces


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def singles(text: str) -> list[bytes]:
    return [bytes([byte]) for byte in text.encode()]


def test_an_end_of_sequence_token_is_no_text() -> None:
    steps = outputs(singles("héllo"), FinishReason.STOP, (EOS_ID,))
    pieces = run(TextOptions(), steps)
    assert text_of(pieces) == "héllo"
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("stop", None)
    assert sum(piece.num_tokens for piece in pieces) == 7  # its tokens count, the end among them


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abc")])
def test_a_stop_token_of_the_clients_is_cut_and_named(include: bool, text: str) -> None:
    steps = outputs(singles("ab"), FinishReason.STOP, (ord("c"),))
    pieces = run(TextOptions(include_stop=include), steps, stop_token_ids=(ord("c"),))
    assert text_of(pieces) == text
    assert pieces[-1].stop_reason == ord("c")


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one STOP")])
def test_a_stop_string_ends_the_text(include: bool, text: str) -> None:
    pieces = run(TextOptions(("STOP",), include), outputs(singles("one STOP two"), FinishReason.LENGTH))
    assert text_of(pieces) == text
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("stop", "STOP")
    assert len(pieces) == len("one STOP")


@pytest.mark.parametrize("size", [1, 2, 3, 11])
@pytest.mark.parametrize(
    ("min_tokens", "text"), [(0, "a "), (5, "a "), (6, "a STOP "), (10, "a STOP "), (11, "a STOP STOP")]
)
def test_a_stop_string_counts_if_it_is_complete_after_min_tokens(min_tokens: int, text: str, size: int) -> None:
    """However many tokens an output has; it may begin before."""
    raw = b"a STOP STOP"
    groups = [raw[start : start + size] for start in range(0, len(raw), size)]
    pieces = run(TextOptions(("STOP",)), outputs(groups, FinishReason.LENGTH), min_tokens=min_tokens)
    assert text_of(pieces) == text
    assert pieces[-1].stop_reason == ("STOP" if min_tokens < len(raw) else None)
    assert [offset for piece in pieces for offset in piece.offsets] == [*range(sum(one.num_tokens for one in pieces))]


def test_a_line_break_that_is_a_token_of_one_byte_stops_at_once(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece_folder(tmp_path), 800)
    line_break = tokenizer.byte_token_id(ord("\n"))
    assert line_break is not None
    tokens = [*tokenizer.encode("river", add_special_tokens=False), line_break]
    text = ChoiceText(tokenizer, request(), TextOptions(("\n",)))
    pieces = [text.add(SequenceOutput("r", (token,))) for token in tokens]
    assert text_of(pieces) == "river"
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("stop", "\n")


def test_what_only_began_like_a_stop_string_is_text() -> None:
    pieces = run(TextOptions(("STOP",)), outputs(singles("one STO"), FinishReason.LENGTH))
    assert text_of(pieces) == "one STO"
    assert pieces[-1].finish_reason == "length"


def test_special_tokens_are_shown_if_asked_for() -> None:
    steps = outputs([b"a", b"b"], FinishReason.STOP, (EOS_ID,))
    assert text_of(run(TextOptions(skip_special_tokens=False, include_stop=True), steps)) == "ab" + EOS


def test_half_a_character_at_the_end_is_replaced() -> None:
    pieces = run(TextOptions(), outputs(singles("é")[:1], FinishReason.LENGTH))
    assert text_of(pieces) == "\ufffd"


def test_each_token_has_its_place_in_the_text() -> None:
    pieces = run(TextOptions(), outputs(singles("aéb"), FinishReason.STOP, (EOS_ID,)))
    assert [offset for piece in pieces for offset in piece.offsets] == [0, 1, 1, 2, 3]


@given(
    st.text(alphabet="abcé", max_size=30),
    st.lists(st.text(alphabet="abcé", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_the_text_does_not_depend_on_how_tokens_are_grouped(text: str, stops: list[str], data: st.DataObject) -> None:
    raw = text.encode() or b"a"
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(raw) - 1)))))
    groups = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    options = TextOptions(tuple(stops))
    whole = run(options, outputs([raw], FinishReason.LENGTH))
    grouped = run(options, outputs(groups, FinishReason.LENGTH))
    assert text_of(grouped) == text_of(whole)
    assert grouped[-1].finish_reason == whole[-1].finish_reason
    assert not any(stop in text_of(grouped) for stop in stops)


@pytest.mark.parametrize(
    ("num_before", "failed", "num_runs"), [(0, None, 1), (1, None, 2), (1, "the worker died 5 times within 60 s", 1)]
)
def test_a_collected_request_is_run_again_only_if_its_tokens_were_lost(
    num_before: int, failed: str | None, num_runs: int
) -> None:
    """Before the first token ``WorkerClient`` runs it again itself, a limited number of times; and not where there will
    be no other worker."""
    runs: list[str] = []

    async def generate(asked: Request, **_: Any) -> AsyncIterator[SequenceOutput]:
        runs.append(asked.request_id)
        for output in outputs(singles("ab"), FinishReason.LENGTH)[:num_before]:
            yield output
        raise WorkerLostError("The model's worker was killed.")

    metrics = Metrics("m", WorkerClient(ServerConfig(ModelConfig("tiny"))))
    worker = SimpleNamespace(generate=generate, failed=failed)
    state: Any = SimpleNamespace(metrics=metrics, tokenizer=TOKENIZER, worker=worker)
    with pytest.raises(WorkerLostError) as caught:
        asyncio.run(collect_choice(state, Choice(request(), TextOptions())))
    assert len(set(runs)) == len(runs) == num_runs
    seen = figures(metrics)
    assert seen['cotenant:request_success_total{finished_reason="error",model_name="m"}'] == 1
    assert seen['cotenant:prompt_tokens_total{model_name="m"}'] == num_before
    assert ("begun 2 times" in caught.value.message) == (num_runs == 2)


def test_a_request_that_is_run_again_counts_once() -> None:
    runs: list[str] = []

    async def generate(asked: Request, **_: Any) -> AsyncIterator[SequenceOutput]:
        runs.append(asked.request_id)
        whole = outputs(singles("abcd"), FinishReason.LENGTH)
        yield structs.replace(whole[0], queue_s=0.5)
        for output in whole[1:2] if len(runs) == 1 else whole[1:]:
            yield output
        if len(runs) == 1:
            raise WorkerLostError("The model's worker was killed.")

    client = WorkerClient(ServerConfig(ModelConfig("tiny")))
    client.on_message(Ready(256, 2, 300, 8, 16, "cpu", "float32", "multitask", Slo(100, 10), 0.1))
    metrics = Metrics("m", client)
    state: Any = SimpleNamespace(
        metrics=metrics, tokenizer=TOKENIZER, worker=SimpleNamespace(generate=generate, failed=None)
    )
    assert text_of(asyncio.run(collect_choice(state, Choice(request(), TextOptions())))) == "abcd"
    assert len(runs) == 2
    seen, label = figures(metrics), '{model_name="m"}'
    ends = {name: count for name, count in seen.items() if "request_success_total" in name}
    assert ends == {'cotenant:request_success_total{finished_reason="length",model_name="m"}': 1}
    for name in ("time_to_first_token_seconds", "request_queue_time_seconds", "e2e_request_latency_seconds"):
        assert seen[f"cotenant:{name}_count{label}"] == 1, name
    assert seen[f"cotenant:prompt_tokens_total{label}"] == 1
    assert seen[f"cotenant:generation_tokens_total{label}"] == 4
    assert seen[f"cotenant:slo_requests_total{label}"] == 1
