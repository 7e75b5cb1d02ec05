"""Decode steps while the KV cache grows and shrinks under them, beside the same steps undisturbed.

    python bench/resize_under_load.py llama-3.1-8b --gib 8 --json bench/results/resize_h200.json
    python bench/resize_under_load.py tiny --device cpu --batch-size 8 --context 64 --steps 100 --gib 0.05

In this process, without a server. Both runs are the same batches of the same sequences. Half of the sequences that a
run begins with leave before it is timed, so that the pages of the others lie scattered over all of the cache, and what
they add while it is large has to move each time it shrinks. The cache shrinks and grows by ``--gib``, again as soon as
it is there, a part at each step.

Exit code 1 if a token or a page of keys and values differs between the two, or if p99 differs by more than allowed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from cotenant.bench.machine import command_line, machine, versions
from cotenant.config import BatchConfig, CacheConfig, CoExecutionConfig, LoraConfig, ModelConfig, ServerConfig
from cotenant.core.errors import CotenantError
from cotenant.core.request import Request, SamplingParams, SequenceOutput
from cotenant.device import create_device
from cotenant.engine.flight import OnlineStep
from cotenant.models.paged_attention import cache_head_dim
from cotenant.models.registry import ARCHITECTURES, resolve_model
from cotenant.runtime.build import build_serving, choose_dtype
from cotenant.runtime.sizing import page_bytes

GIB = 1 << 30
_WARM_STEPS = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """Pages of the cache: when it is small, enough for the timed sequences to their end; when it is large, ``--gib``
    more, and enough for those that leave as well."""

    small: int
    large: int
    page_bytes: int


@dataclass(slots=True)
class Run:
    """What was seen of the timed steps; by request ``tokens``, and ``checksums`` of the pages full at the end."""

    step_ms: list[float] = field(default_factory=list)
    steps: list[OnlineStep] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    checksums: dict[str, list[int]] = field(default_factory=dict)
    num_resizes: int = 0  # that were completed
    num_resized: int = 0  # pages that came or went


def main() -> int:
    arguments = _parse()
    try:
        report = Bench(arguments).measure()
    except CotenantError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report |= {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": command_line(["python", "bench/resize_under_load.py", *sys.argv[1:]]),
        "machine": machine(),
        "versions": versions(),
    }
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    _print(report)
    return 0 if report["passed"] else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", nargs="?", default="llama-3.1-8b", help="as for cotenant serve; an architecture's name"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024, help="tokens of each sequence when timing begins")
    parser.add_argument("--steps", type=int, default=400, help="timed steps of each run")
    parser.add_argument("--gib", type=float, default=8.0, help="what the cache gives up and takes back")
    parser.add_argument("--max-p99-ms", type=float, default=5.0, help="how much longer the p99 of a step may be")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    if min(arguments.batch_size, arguments.steps) < 1 or arguments.context < 2 or arguments.gib <= 0:
        parser.error("--batch-size, --steps and --gib must be positive, --context at least 2")
    return arguments


class Bench:
    """Runs the same batches twice in one engine."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._batch_size = arguments.batch_size
        self._context = arguments.context
        model = ModelConfig(
            arguments.model,
            load_format="dummy" if arguments.model in ARCHITECTURES else "auto",
            dtype=arguments.dtype,
            device=arguments.device,
            max_model_len=self._context + arguments.steps + 64,
        )
        self._layout = self._plan(model)
        self._serving = build_serving(
            ServerConfig(
                model=model,
                # Without prefixes in the cache, which would spare the second run its prompts.
                cache=CacheConfig(num_pages=self._layout.large, enable_prefix_caching=False),
                batch=BatchConfig(
                    max_num_seqs=2 * self._batch_size, cuda_graph_sizes=(self._batch_size, 2 * self._batch_size)
                ),
                lora=LoraConfig(max_loras=1, max_lora_rank=16),
                coexecution=CoExecutionConfig(policy="inference-only"),
            )
        )
        self._engine = self._serving.engine

    def _plan(self, model: ModelConfig) -> Layout:
        device, resolved = create_device(model.device), resolve_model(model)
        page_tokens = CacheConfig().page_tokens
        spec, dtype = resolved.spec, choose_dtype(model.dtype, resolved.spec.dtype, device)
        bytes_per_page = page_bytes(spec, page_tokens, dtype, cache_head_dim(spec, device.torch_device, dtype))
        resized = math.ceil(self._arguments.gib * GIB / bytes_per_page)
        # One page more for each sequence than it will fill: none is preempted, or the batches would not be the same.
        at_end = self._batch_size * (math.ceil((self._context + self._arguments.steps + 64) / page_tokens) + 1)
        scattered = 2 * self._batch_size * (math.ceil((self._context + 64) / page_tokens) + 2)
        small = max(at_end, scattered - resized)
        return Layout(small, small + resized, bytes_per_page)

    def measure(self) -> dict[str, Any]:
        """The report, less what it was measured on."""
        self._engine.wait_for_kernels()
        undisturbed, resizing = self._run(resizes=False), self._run(resizes=True)
        before, after = spread(undisturbed.step_ms), spread(resizing.step_ms)
        gib = resizing.num_resized * self._layout.page_bytes / GIB
        num_moved = count_moved(resizing.steps)
        report = {
            "kind": "resize",
            "model": self._serving.resolved.name,
            "dtype": str(self._serving.decoder.dtype).removeprefix("torch."),
            "batch_size": self._batch_size,
            "context": self._context,
            "num_steps": len(resizing.step_ms),
            "gib": self._arguments.gib,
            "undisturbed_step_ms": before,
            "resizing_step_ms": after,
            "p99_difference_ms": round(after["p99"] - before["p99"], 4),
            "num_resizes": resizing.num_resizes,
            "resized_gib": round(gib, 3),
            # Of medians: a few long steps have other reasons, and nearly every step resizes.
            "ms_per_gib": round((after["p50"] - before["p50"]) * len(resizing.step_ms) / gib, 3) if gib else None,
            "num_pages_moved": num_moved,
            "moved_gib": round(num_moved * self._layout.page_bytes / GIB, 3),
            "num_tokens": sum(map(len, resizing.tokens.values())),
            "tokens_equal": resizing.tokens == undisturbed.tokens,
            "num_pages_compared": sum(map(len, resizing.checksums.values())),
            "pages_equal": resizing.checksums == undisturbed.checksums,
        }
        problems = self._problems(report)
        return report | {"passed": not problems, "problems": problems}

    def _problems(self, report: dict[str, Any]) -> list[str]:
        allowed, difference = self._arguments.max_p99_ms, report["p99_difference_ms"]
        found = {
            "a token differs from the undisturbed run's": not report["tokens_equal"],
            "a page of keys and values differs from the undisturbed run's": not report["pages_equal"],
            "a sequence was preempted: the batches were not the same": self._engine.num_preemptions > 0,
            "the cache was never resized": report["num_resizes"] == 0,
            f"p99 of a step is {difference:.2f} ms longer, more than {allowed:g} ms": difference > allowed,
        }
        return [problem for problem, is_so in found.items() if is_so]

    def _run(self, *, resizes: bool) -> Run:
        run, engine = Run(), self._engine
        self._scatter()
        for _ in range(_WARM_STEPS):
            self._iterate()
        last, was_resizing = time.perf_counter(), False
        for _ in range(self._arguments.steps):
            num_pages = engine.num_pages
            if resizes and not engine.is_resizing:
                engine.resize(self._layout.small if num_pages >= self._layout.large else self._layout.large)
                run.num_resizes += was_resizing
                was_resizing = True
            step, outputs = self._iterate()
            now = time.perf_counter()
            run.step_ms.append((now - last) * 1e3)
            last = now
            run.num_resized += abs(engine.num_pages - num_pages)
            assert step is not None, "all sequences go on to the end"
            run.steps.append(step)
            for output in outputs:
                run.tokens.setdefault(output.request_id, []).extend(output.token_ids)
        run.num_resizes += was_resizing and not engine.is_resizing
        run.checksums = self._checksums(run.steps[-1])
        self._end()
        return run

    def _scatter(self) -> None:
        """Begin with twice as many sequences, which get pages in turn as they grow; then every other one leaves."""
        engine, prompt, random = self._engine, self._context // 2, torch.Generator().manual_seed(0)
        vocab_size = self._serving.resolved.spec.vocab_size
        sampling = SamplingParams(max_tokens=engine.max_model_len, temperature=0.0, ignore_eos=True)
        for index in range(2 * self._batch_size):
            tokens = tuple(torch.randint(0, vocab_size, (prompt,), generator=random).tolist())
            name = f"{'leaves' if index % 2 else 'stays'}-{index // 2}"
            engine.add(Request(name, tokens, sampling, float(index)))
        while True:
            generated = [view.num_generated for view in engine.views()]
            if min(generated) > 0 and prompt + max(generated) >= self._context - _WARM_STEPS:
                break
            self._iterate()
        engine.abort([f"leaves-{index}" for index in range(self._batch_size)])

    def _iterate(self) -> tuple[OnlineStep | None, list[SequenceOutput]]:
        """One iteration, as the worker runs it without best-effort work."""
        device = self._serving.device
        with device.online():
            iterated = self._engine.iterate(num_ahead=int(device.overlaps))
        return iterated.launched, iterated.outputs

    def _checksums(self, step: OnlineStep) -> dict[str, list[int]]:
        """The sum of the bits of every page that is full after this step, the last that was launched."""
        self._serving.device.synchronize()
        checksums = {}
        for name, pages, context in pages_of(step):
            full = self._engine.kv_cache[pages[: context // step.host.page_tokens]].flatten(1)
            bits = full.view(torch.int16 if full.dtype.itemsize == 2 else torch.int32)
            checksums[name] = bits.sum(dim=1, dtype=torch.int64).tolist()
        return checksums

    def _end(self) -> None:
        engine = self._engine
        engine.abort([view.request_id for view in engine.views()])
        engine.resize(self._layout.large)
        while engine.has_work or engine.is_resizing:
            self._iterate()
        engine.check_integrity()


def pages_of(step: OnlineStep) -> Iterator[tuple[str, list[int], int]]:
    """Each sequence of the step: its request, its pages, and the tokens that they hold after it."""
    host = step.host
    rows = [
        (table[:count].tolist(), context)
        for segment in host.segments
        for table, count, context in zip(
            segment.tables, segment.page_counts(host.page_tokens), segment.contexts, strict=True
        )
    ]
    for entry, (pages, context) in zip(host.entries, rows, strict=True):
        yield entry.sequence.request.request_id, pages, context


def count_moved(steps: Sequence[OnlineStep]) -> int:
    """Pages of a sequence that are others in one step than in the step before."""
    num_moved = 0
    last: dict[str, list[int]] = {}
    for step in steps:
        for name, pages, _ in pages_of(step):
            num_moved += sum(old != new for old, new in zip(last.get(name, []), pages, strict=False))
            last[name] = pages
    return num_moved


def spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    places = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[min(len(ordered) - 1, int(at * len(ordered)))], 4) for name, at in places.items()}


def _print(report: dict[str, Any]) -> None:
    print(
        f"{report['model']}, {report['dtype']}: {report['num_steps']} steps of {report['batch_size']} sequences, from "
        f"{report['context']} tokens each"
    )
    for title, key in (("undisturbed", "undisturbed_step_ms"), ("resizing", "resizing_step_ms")):
        print(f"{title:>12}: step " + ", ".join(f"{name} {value:.2f} ms" for name, value in report[key].items()))
    cost = "" if report["ms_per_gib"] is None else f", {report['ms_per_gib']:.2f} ms per GiB"
    print(
        f"{report['num_resizes']} resizes of {report['gib']:g} GiB: {report['resized_gib']:.2f} GiB came or went{cost}"
    )
    print(f"{report['num_pages_moved']} pages in use moved, {report['moved_gib']:.2f} GiB")
    print(
        f"p99 differs by {report['p99_difference_ms']:.2f} ms; {report['num_tokens']} tokens and "
        f"{report['num_pages_compared']} pages compared"
    )
    for problem in report["problems"]:
        print(f"FAILED: {problem}")
    if report["passed"]:
        print("passed: every token and every page is as undisturbed")


if __name__ == "__main__":
    sys.exit(main())
