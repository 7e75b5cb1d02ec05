"""The engine's pages on the GPU while batches are in flight: aborts, preemption, a cache that changes its size."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from cotenant.engine.flight import OnlineStep
from gpu.engine_runs import PAGE_TOKENS, assert_near_greedy
from gpu.support import Model, Outputs, Overlapped, logprobs, prompt, request, tokens

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
    assert_near_greedy(model, [*kept, *late], outputs, rounding)


def test_64_preempted_sequences_lose_nothing(model: Model, rounding: float) -> None:
    online = Overlapped(model.decoder(torch.bfloat16), num_pages=48, max_num_seqs=64, max_num_batched_tokens=512)
    online.capture((16, 32, 64))
    requests = [request(prompt(10 + (7 * index) % 50, index), 150) for index in range(64)]
    outputs = online.run(requests, at_once=64)
    print(f"{online.engine.num_preemptions} preemptions")
    assert online.engine.num_preemptions > 40
    assert_near_greedy(model, requests, outputs, rounding)


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
