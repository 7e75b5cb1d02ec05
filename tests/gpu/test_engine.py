"""The engine on the GPU with captured graphs and batches launched ahead: adapters, short prompts, and what is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from cotenant.config import LoraConfig
from cotenant.core.job import LINEAR_MODULES
from cotenant.core.request import AdapterRef, Request, SequenceOutput
from cotenant.engine.sampling_state import SamplingState
from cotenant.models.lora import save_adapter
from gpu.engine_runs import GRAPH_SIZES, PAGE_TOKENS, assert_near_greedy, drawn_requests
from gpu.support import DEVICE, Model, Outputs, Overlapped, logits_of, logprobs, prompt, request, tokens
from models.support import random_adapter

# Adapters.


def test_few_rows_with_adapters_compile_nothing(model: Model, rounding: float, tmp_path: Path) -> None:
    """Prompts and steps of a warm engine without graphs: one row, rows with one adapter, and one that has it among
    others. The first test here: what others have compiled would count as there."""
    from triton import knobs

    decoder = model.decoder(torch.bfloat16)
    mine = random_adapter(decoder, 0, r=16, alpha=64.0, target_modules=LINEAR_MODULES)
    save_adapter(mine, tmp_path, str(model.folder))
    online = Overlapped(decoder, page_tokens=PAGE_TOKENS)
    with online.device.online():
        online.engine.warm_up(enforce_eager=True)
    ref = AdapterRef("a", str(tmp_path))
    alone = [replace(request(prompt(20, 50), 8), adapter=ref)]
    all_of_it = [replace(request(prompt(30, seed), 8), adapter=ref) for seed in range(16)]
    one_of_five = [replace(request(prompt(9, 40 + seed), 8), adapter=ref if seed == 2 else None) for seed in range(5)]
    outputs: Outputs = {one.request_id: [] for one in (*alone, *all_of_it, *one_of_five)}
    compiled: list[str] = []
    num_small = 0
    knobs.runtime.jit_post_compile_hook = lambda *, fn, **_: compiled.append(fn.name)
    try:
        for several in (alone, one_of_five, all_of_it):
            for one in several:
                online.engine.add(one)
            while online.engine.has_work:
                compiled.clear()
                num_steps = len(online.steps)
                _keep(online.iterate(), outputs)
                if len(online.steps) > num_steps and online.steps[-1].host.num_tokens <= 64:
                    num_small += 1
                    assert not compiled
    finally:
        knobs.runtime.jit_post_compile_hook = None
    assert num_small > 20, "of 24 steps and some prompts"
    reference = type(model.reference).from_pretrained(model.folder).to(DEVICE).eval()
    tuned = Model(model.folder, PeftModel.from_pretrained(reference, tmp_path))
    assert_near_greedy(tuned, [*alone, *all_of_it, one_of_five[2]], outputs, 2 * rounding)


def test_adapters_of_several_ranks_beside_each_other(model: Model, rounding: float, tmp_path: Path) -> None:
    """Seven kinds of rows, the base's among them, in prompt batches and captured decodes: each is held against peft."""
    decoder = model.decoder(torch.bfloat16)
    folders = [tmp_path / f"adapter-{index}" for index in range(6)]
    for index, (folder, rank) in enumerate(zip(folders, (5, 16, 48, 16, 5, 48), strict=True)):
        adapter = random_adapter(decoder, index, r=rank, alpha=2.0 * rank**0.5, target_modules=LINEAR_MODULES)
        save_adapter(adapter, folder, str(model.folder))
    refs = [None, *(AdapterRef(folder.name, str(folder)) for folder in folders)]
    online = Overlapped(
        decoder, max_num_batched_tokens=256, page_tokens=PAGE_TOKENS, lora=LoraConfig(max_loras=6, max_lora_rank=48)
    )
    online.capture(GRAPH_SIZES)
    requests = [
        replace(request(prompt(9 + 7 * index % 50, index), 10), adapter=refs[index % len(refs)]) for index in range(28)
    ]
    outputs = online.run(requests, at_once=14)
    for ref in refs:
        reference = type(model.reference).from_pretrained(model.folder).to(DEVICE).eval()
        if ref is not None:
            reference = PeftModel.from_pretrained(reference, ref.path)
        mine = [one for one in requests if one.adapter == ref]
        assert_near_greedy(Model(model.folder, reference), mine, outputs, 2 * rounding)


# Short prompts.


@pytest.mark.parametrize("is_captured", [True, False], ids=["captured", "eager"])
def test_chunks_of_one_token_beside_decodes(model: Model, rounding: float, is_captured: bool) -> None:
    """Prompts of one token, and others of which the cache leaves one: attention of decodes and of chunks is planned
    apart, however alike they look."""
    online = Overlapped(model.decoder(torch.bfloat16), page_tokens=PAGE_TOKENS)
    if is_captured:
        online.capture(GRAPH_SIZES)
    shared = prompt(2 * PAGE_TOKENS, 99)
    requests = [request(prompt(20 + 7 * index, index), 60) for index in range(6)] + [request([*shared, 5], 60)]
    outputs: Outputs = {one.request_id: [] for one in requests}
    for one in requests:
        online.engine.add(one)
    for _ in range(8):
        _keep(online.iterate(), outputs)
    for index in range(6):
        late = request(prompt(1, index) if index % 2 else [*shared, 10 + index], 12)
        requests.append(late)
        outputs[late.request_id] = []
        online.engine.add(late)
        for _ in range(3):
            _keep(online.iterate(), outputs)
    while online.engine.has_work:
        _keep(online.iterate(), outputs)
    mixed = [step.host.segments for step in online.steps if len(step.host.segments) == 2]
    assert sum(max(chunks.counts) == 1 for _, chunks in mixed) == 6
    assert_near_greedy(model, requests, outputs, rounding)


def _keep(found: Sequence[SequenceOutput], outputs: Outputs) -> None:
    for output in found:
        outputs[output.request_id].append(output)


def test_prompts_in_batches_of_all_sizes(model: Model, rounding: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that come together are one batch: padded to a captured size, of which the largest has 4,096 rows, or larger
    than that."""
    from cotenant.models.cuda_pieces import CapturedPieces  # needs Triton

    padded: list[int] = []
    launch = CapturedPieces.launch

    def noted(pieces: CapturedPieces, index: int) -> None:
        padded.extend([len(pieces.residual)] if index == 0 else [])
        launch(pieces, index)

    monkeypatch.setattr(CapturedPieces, "launch", noted)
    decoder = model.decoder(torch.bfloat16)
    online = Overlapped(decoder, max_num_batched_tokens=8192, max_model_len=512, enable_prefix_caching=False)
    online.capture(GRAPH_SIZES)
    for count in (2, 4, 5, 8, 12, 13):
        requests = [request(prompt(290 + 7 * index, index), 4) for index in range(count)]
        assert_near_greedy(model, requests, online.run(requests, at_once=count), rounding)
    num_rows = [step.host.num_tokens for step in online.steps if not step.host.is_decode]
    assert num_rows == [587, 1202, 1520, 2516, 3942, 4316]
    assert len(padded) == 5
    assert all(size >= rows for size, rows in zip(padded, num_rows, strict=False))


# What is drawn.


def test_the_same_batches_draw_the_same_tokens(online: Overlapped) -> None:
    """To the last bit of their log-probabilities, with other seats and other pages."""
    first, second = drawn_requests(), drawn_requests()
    outputs = online.run(first)
    before = online.run([request(prompt(50, seed), 5) for seed in range(7)], at_once=7)  # seats and pages are mixed
    again = online.run(second)
    assert len(before) == 7
    for one, other in zip(first, second, strict=True):
        assert tokens(outputs[one.request_id]) == tokens(again[other.request_id])
        assert logprobs(outputs[one.request_id]) == logprobs(again[other.request_id])


def test_what_is_drawn_is_where_the_seeds_number_points(model: Model, online: Overlapped) -> None:
    """In the distribution of transformers in float32, with graphs (batches of 11 padded to 16) and without."""
    eager = Overlapped(model.decoder(torch.bfloat16), enable_prefix_caching=False)
    for one_online in (online, eager):
        requests = drawn_requests()
        outputs = one_online.run(requests)
        distances = torch.cat([_distances(model, one, tokens(outputs[one.request_id])) for one in requests])
        assert len(distances) == 11 * 40
        assert distances.max() < 0.08, "in a sum of probabilities"
        assert distances.mean() < 0.001
        assert len(set(tokens(outputs[requests[0].request_id]))) > 20


def _distances(model: Model, one: Request, chosen: Sequence[int]) -> torch.Tensor:
    """How far the seed's number lies outside the part of the cumulative distribution that is the token's. [tokens]"""
    logits = logits_of(model.reference, [*one.prompt, *chosen[:-1]])[len(one.prompt) - 1 :].double().cpu()
    state = SamplingState(one.sampling)
    distances = []
    for index, token in enumerate(chosen):
        cumulative = _weights(logits[index], one, chosen[:index]).cumsum(0)
        cumulative /= cumulative[-1].clone()
        low, high = float(cumulative[token - 1]) if token else 0.0, float(cumulative[token])
        number = state.uniform(index)
        distances.append(max(low - number, number - high, 0.0))
    return torch.tensor(distances)


def _weights(logits: torch.Tensor, one: Request, generated: Sequence[int]) -> torch.Tensor:
    """The probabilities that the next token is drawn from, not normalised; a definition for one row. [vocab]"""
    sampling = one.sampling
    counts = torch.bincount(torch.tensor(list(generated), dtype=torch.int64), minlength=len(logits))
    seen = counts > 0
    seen[list(one.prompt)] = True
    repeated = torch.where(logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty)
    values = torch.where(seen, repeated, logits)
    values = values - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    for token, bias in sampling.logit_bias.items():
        values[token] += bias
    weights = (values / sampling.temperature).softmax(-1)
    ordered = weights.sort(descending=True).values
    inside = ordered.cumsum(0) - ordered < sampling.top_p
    return weights.where(weights >= ordered[inside][-1], 0.0)


def test_a_batch_that_chooses_no_token_is_waited_for(online: Overlapped) -> None:
    """A chunk of a prompt alone: nothing of it is read back."""
    engine = online.engine
    one = request(prompt(180, 5), 2)
    engine.add(one)
    with online.device.online():
        step = engine.schedule()
        assert step is not None
        assert not step.host.sampled_rows()
        torch.cuda._sleep(200_000_000)  # cycles, so that the host is there first
        engine.launch(step)
        assert engine.collect().device_ms > 0
    engine.abort([one.request_id])
