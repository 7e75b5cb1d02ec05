"""The memory that the engine needs on the GPU, and how long the device waits between steps."""

from __future__ import annotations

import gc
import json
import statistics
from dataclasses import replace

import torch

from cotenant.config import BatchConfig
from cotenant.models.loading import load_decoder
from cotenant.models.registry import ARCHITECTURES, ResolvedModel
from cotenant.runtime.sizing import batch_bytes
from gpu.engine_runs import drawn_requests
from gpu.support import DEVICE, Overlapped, prompt, request

# What is left, and what is waited for.


def test_memory_ends_where_it_began(online: Overlapped) -> None:
    def use_everything() -> int:
        requests = [*drawn_requests(), *(request(prompt(100, seed), 50, logprobs=3) for seed in range(8))]
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
