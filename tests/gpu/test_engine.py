"""The engine on the GPU with captured graphs and batches launched ahead: what is drawn, aborts, preemption, a cache
that changes its size, memory, and how long the device waits between steps.

Half precision rounds by how a batch is computed: with other neighbours or without graphs a sequence may get another
token where two are nearly as likely. So runs are compared token by token only where every batch is the same; elsewhere
each token is held against transformers in float32 on the same text.
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from cotenant.config import BatchConfig, LoraConfig
from cotenant.core.job import LINEAR_MODULES
from cotenant.core.request import AdapterRef, Request, SequenceOutput
from cotenant.engine.flight import OnlineStep
from cotenant.engine.sampling_state import SamplingState
from cotenant.models.loading import load_decoder
from cotenant.models.lora import save_adapter
from cotenant.models.registry import ARCHITECTURES, ResolvedModel
from cotenant.runtime.sizing import batch_bytes
from gpu import support
from gpu.support import DEVICE, Model, Outputs, Overlapped, logits_of, logprobs, prompt, request, tokens
from models.support import random_adapter

PAGE_TOKENS = 16
GRAPH_SIZES = (1, 4, 16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return support.make_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def rounding(model: Model) -> float:
    """The largest error of a logit of transformers in bfloat16."""
    texts = [prompt(200, seed) for seed in range(4)]
    theirs = model.reference_in(torch.bfloat16)
    return max(float((logits_of(theirs, text) - logits_of(model.reference, text)).abs().max()) for text in texts)


@pytest.fixture(scope="module")
def online(model: Model) -> Overlapped:
    """Without prefix caching, so that the same requests make the same batches again. 512 pages in chunks of 32."""
    online = Overlapped(model.decoder(torch.bfloat16), enable_prefix_caching=False, page_tokens=PAGE_TOKENS)
    online.capture(GRAPH_SIZES)
    online.engine.wait_for_kernels()  # prompts go through other ones from then on
    return online


def _assert_near_greedy(model: Model, requests: Sequence[Request], outputs: Outputs, rounding: float) -> None:
    """Each token's float32 logit is the best one's but for what rounding explains: an error of each of the two."""
    gaps = []
    for one in requests:
        chosen = tokens(outputs[one.request_id])
        assert len(chosen) == one.sampling.max_tokens
        logits = logits_of(model.reference, [*one.prompt, *chosen[:-1]])[len(one.prompt) - 1 :]
        found = logits.gather(-1, torch.tensor(chosen, device=DEVICE).unsqueeze(-1))  # [tokens, 1]
        gaps.append(logits.amax(-1) - found.squeeze(-1))
    all_gaps = torch.cat(gaps)
    assert all_gaps.max() < 3 * rounding
    assert (all_gaps == 0).float().mean() > 0.9


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
    _assert_near_greedy(tuned, [*alone, *all_of_it, one_of_five[2]], outputs, 2 * rounding)


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
        _assert_near_greedy(Model(model.folder, reference), mine, outputs, 2 * rounding)


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
    _assert_near_greedy(model, requests, outputs, rounding)


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
        _assert_near_greedy(model, requests, online.run(requests, at_once=count), rounding)
    num_rows = [step.host.num_tokens for step in online.steps if not step.host.is_decode]
    assert num_rows == [587, 1202, 1520, 2516, 3942, 4316]
    assert len(padded) == 5
    assert all(size >= rows for size, rows in zip(padded, num_rows, strict=False))


# What is drawn.


def _drawn_requests() -> list[Request]:
    """Those with penalties choose among few tokens, which come again and again."""
    few = dict.fromkeys(range(100, 1000, 25), 15.0)
    options: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.5, "top_p": 0.6},
        {"logit_bias": few, "repetition_penalty": 1.5},
        {"logit_bias": few, "frequency_penalty": 0.6, "presence_penalty": 1.5},
        {"logit_bias": few, "temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.1},
    ]
    return [
        request(
            prompt(5 + (29 * index) % 80, index),
            40,
            seed=index,
            logprobs=0,
            **({"temperature": 1.0} | options[index % 5]),
        )
        for index in range(11)
    ]


def test_the_same_batches_draw_the_same_tokens(online: Overlapped) -> None:
    """To the last bit of their log-probabilities, with other seats and other pages."""
    first, second = _drawn_requests(), _drawn_requests()
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
        requests = _drawn_requests()
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


# Pages.


def test_aborts_while_batches_are_in_flight(model: Model, online: Overlapped, rounding: float) -> None:
    """Pages go to others at once, while a batch that writes to them is still on its way."""
    kept = [request(prompt(20 + seed, seed), 60) for seed in range(6)]
    gone = [request(prompt(90, seed), 60) for seed in range(8)]
    late = [request(prompt(70, 20 + seed), 30) for seed in range(8)]
    engine = online.engine
    outputs: Outputs = {one.request_id: [] for one in (*kept, *gone, *late)}
    for one in (*kept, *gone):
        engine.add(one)
    for iteration in range(24):
        for output in online.iterate():
            outputs[output.request_id].append(output)
        if iteration >= 16:
            assert engine.num_in_flight == 1
            victim = gone[iteration - 16].request_id
            engine.abort([victim])
            engine.add(late[iteration - 16])
            engine.check_integrity()
    num_seen = [len(outputs[one.request_id]) for one in gone]
    for name, more in online.run().items():
        outputs[name] += more
    assert num_seen == [len(outputs[one.request_id]) for one in gone]
    assert all(0 < count < 60 for count in num_seen)
    _assert_near_greedy(model, [*kept, *late], outputs, rounding)


def test_64_preempted_sequences_lose_nothing(model: Model, rounding: float) -> None:
    online = Overlapped(model.decoder(torch.bfloat16), num_pages=48, max_num_seqs=64, max_num_batched_tokens=512)
    online.capture((16, 32, 64))
    requests = [request(prompt(10 + (7 * index) % 50, index), 150) for index in range(64)]
    outputs = online.run(requests, at_once=64)
    print(f"{online.engine.num_preemptions} preemptions")
    assert online.engine.num_preemptions > 40
    _assert_near_greedy(model, requests, outputs, rounding)


def test_a_cache_that_grows_and_shrinks_changes_nothing(online: Overlapped) -> None:
    """Batch for batch the same tokens and log-probabilities as undisturbed, with pages moved under graphs in flight."""
    undisturbed, num_moved = _decode(online, ())
    assert num_moved == 0
    resized, num_moved = _decode(online, (96, 512, 128, 320) * 10)
    print(f"{num_moved} pages moved")
    assert num_moved > 20
    assert resized == undisturbed


def _decode(online: Overlapped, sizes: Sequence[int]) -> tuple[list[tuple[list[int], list[float]]], int]:
    """Six sequences, whose pages lie among those of ten others that have left: their tokens and log-probabilities, and
    how many of their pages were moved. ``sizes``: of the cache, each set when the one before is reached."""
    engine = online.engine
    kept = [request(prompt(20 + seed, seed), 180, logprobs=0) for seed in range(6)]
    others = [request(prompt(150, seed), 106) for seed in range(10)]
    outputs: Outputs = {one.request_id: [] for one in (*kept, *others)}
    for index in range(10):
        for one in (*kept[index : index + 1], others[index]):
            engine.add(one)
    num_preemptions, wanted = engine.num_preemptions, list(sizes)
    online.steps.clear()
    for iteration in itertools.count():
        if iteration == 90:
            engine.abort([one.request_id for one in others])
            assert len(engine.views()) == 6
        if iteration > 90 and wanted and not engine.is_resizing:
            engine.resize(wanted.pop(0))
        if not engine.has_work:
            break
        for output in online.iterate():
            outputs[output.request_id].append(output)
        engine.check_integrity()
    assert not wanted
    assert engine.num_preemptions == num_preemptions
    engine.resize(512)
    while engine.is_resizing:
        online.iterate()
    assert engine.num_pages == 512
    found = [outputs[one.request_id] for one in kept]
    return [(tokens(one), logprobs(one)) for one in found], _count_moved(online.steps)


def _count_moved(steps: Sequence[OnlineStep]) -> int:
    """Pages of a sequence that are others in one step than in its step before."""
    num_moved = 0
    last: dict[str, list[int]] = {}
    for step in steps:
        rows = itertools.chain.from_iterable(
            (table[:count].tolist() for table, count in zip(part.tables, part.page_counts(PAGE_TOKENS), strict=True))
            for part in step.host.segments
        )
        for entry, pages in zip(step.host.entries, rows, strict=True):
            before = last.get(entry.sequence.request.request_id, [])
            num_moved += sum(old != new for old, new in zip(before, pages, strict=False))
            last[entry.sequence.request.request_id] = pages
    return num_moved


# What is left, and what is waited for.


def test_memory_ends_where_it_began(online: Overlapped) -> None:
    def use_everything() -> int:
        requests = [*_drawn_requests(), *(request(prompt(100, seed), 50, logprobs=3) for seed in range(8))]
        for one in requests[::2]:
            online.engine.add(one)
        for _ in range(20):
            online.iterate()
        online.engine.abort([one.request_id for one in requests[::4]])
        online.run(requests[1::2])
        online.collected.clear()
        online.steps.clear()
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    use_everything()
    allocated = [use_everything() for _ in range(4)]
    assert max(allocated) - min(allocated) < 1 << 16
    assert online.engine.kv_cache_usage == 0
    assert not online.engine.has_work


def test_more_and_more_requests_need_no_new_memory_of_the_device() -> None:
    """For which the host waits until all has ended that is in flight. Logits of Llama's vocabulary would need some with
    every eighth request."""
    spec = replace(ARCHITECTURES["llama-3.1-8b"], num_layers=1)
    online = Overlapped(
        load_decoder(ResolvedModel("llama", None, spec, random_weights=True), DEVICE, torch.bfloat16, seed=0),
        num_pages=2048,
        max_num_seqs=128,
        max_num_batched_tokens=256,
        max_model_len=512,
    )
    online.capture((8, 128))
    online.engine.wait_for_kernels()
    online.run([request(prompt(100, seed), 10) for seed in range(8)])
    before = torch.cuda.memory_stats()["num_device_alloc"]
    online.run([request(prompt(100, seed), 140) for seed in range(128)], at_once=1)
    assert max(step.shape.num_decode for step in online.steps if step.shape.prefill_tokens) > 100
    assert torch.cuda.memory_stats()["num_device_alloc"] == before


def test_no_batch_needs_more_memory_than_was_set_aside() -> None:
    """However many requests there are, with all that is chosen by and with nothing captured; also when the libraries
    take what they keep from that memory, and when torch gives all back that is unused."""
    spec = replace(ARCHITECTURES["llama-3.1-8b"], num_layers=1)
    batch = BatchConfig(max_num_seqs=128, max_num_batched_tokens=4096)
    online = Overlapped(
        load_decoder(ResolvedModel("llama", None, spec, random_weights=True), DEVICE, torch.bfloat16, seed=0),
        num_pages=2048,
        max_num_seqs=batch.max_num_seqs,
        max_num_batched_tokens=batch.max_num_batched_tokens,
        max_model_len=512,
    )
    with online.device.online():
        online.engine.warm_up(enforce_eager=True)
    online.engine.wait_for_kernels()

    num_bytes = batch_bytes(spec, batch, torch.bfloat16)
    assert online.device.set_aside(num_bytes)  # as at a server's start: before libraries have what they keep

    def run(count: int) -> tuple[int, int]:
        """How often torch has asked the device for memory of tensors that are not small, and how much it has."""
        wanted = {"repetition_penalty": 1.2, "logit_bias": {7: 1.0}, "logprobs": 3}
        online.run([request(prompt(100, seed), 6, **wanted) for seed in range(count)], at_once=count)
        stats = torch.cuda.memory_stats()
        return int(stats["segment.large_pool.allocated"]), int(stats["reserved_bytes.large_pool.current"])

    before = run(2)
    assert [run(count) for count in (8, 24, 64, 128)] == [before] * 4
    torch.cuda.empty_cache()
    count, reserved_bytes = before
    assert run(128)[0] == count
    assert reserved_bytes >= run(24)[1] >= num_bytes


def test_the_device_hardly_waits_between_steps() -> None:
    """With the shapes of an 8B model: a small one's step ends before the host has prepared the next."""
    resolved = ResolvedModel("llama-3.1-8b", None, ARCHITECTURES["llama-3.1-8b"], random_weights=True)
    online = Overlapped(
        load_decoder(resolved, DEVICE, torch.bfloat16, seed=0),
        num_pages=256,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        max_model_len=512,
    )
    online.capture((8,))
    requests = [request(prompt(200, seed), 80) for seed in range(8)]
    online.run(requests, at_once=8)
    decodes = [one for one in online.collected if one.shape.num_decode == 8][:-2][-50:]
    gaps_ms = [one.gap_ms for one in decodes if one.gap_ms is not None]
    assert len(gaps_ms) == 50, "each step is launched while the one before is in flight"
    median_ms, step_ms = statistics.median(gaps_ms), statistics.median(one.device_ms for one in decodes)
    print(json.dumps({"gap_ms": median_ms, "gap_max_ms": max(gaps_ms), "step_ms": step_ms}))
    assert median_ms < 0.2
