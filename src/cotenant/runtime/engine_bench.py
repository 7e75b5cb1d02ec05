"""`cotenant bench engine`: how fast batches run in this process, beside what the device could do at best.

The floor of a step is the larger of two times: the bytes it must read (weights once, where they are compressed three
quarters of their bytes, and each sequence's keys and values) at the bandwidth measured here, and its arithmetic at the
matrix rate measured here.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from cotenant.bench.summary import percentile
from cotenant.config import ServerConfig
from cotenant.core.errors import InvalidInputError
from cotenant.core.job import LINEAR_MODULES
from cotenant.core.request import AdapterRef, Request, SamplingParams
from cotenant.engine.flight import Collected
from cotenant.models.lora import LoraAdapter
from cotenant.models.skinny_tiling import MAX_ROWS
from cotenant.runtime.build import Serving, build_serving
from cotenant.runtime.sizing import page_bytes

_WARM_STEPS = 8


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device does at best: GB/s of a large copy (read and written), TFLOP/s of a large matrix product."""

    copy_gb_s: float
    matmul_tflop_s: float


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """A copy much larger than any cache, and a square matrix product; medians of several."""
    is_cuda = device.type == "cuda"
    num_bytes, size = (2 << 30, 8192) if is_cuda else (128 << 20, 1024)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = _median_seconds(lambda: target.copy_(source), device)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    matmul_s = _median_seconds(lambda: left @ right, device)
    return Ceilings(2 * num_bytes / copy_s / 1e9, 2 * size**3 / matmul_s / 1e12)


def _median_seconds(run: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def open_bench(config: ServerConfig) -> EngineBench:
    """Load what ``config`` names, and measure the device. Raises CotenantError for what cannot be served."""
    serving = build_serving(config)
    with serving.device.online():
        serving.engine.wait_for_kernels()
    ceilings = measure_ceilings(serving.device.torch_device, serving.decoder.dtype)
    weight_bytes = serving.decoder.dtype.itemsize if config.model.quantization is None else 1
    return EngineBench(serving, ceilings, weight_bytes)


class EngineBench:
    """Runs batches through a served model, as the worker's loop would without requests coming in between.

    ``weight_bytes``: of each weight of a linear layer.
    """

    def __init__(self, serving: Serving, ceilings: Ceilings, weight_bytes: int) -> None:
        self._serving = serving
        self._weight_bytes = weight_bytes
        self._engine = serving.engine
        self._ceilings = ceilings
        self._names = itertools.count()
        self._random = torch.Generator().manual_seed(0)

    def description(self) -> dict[str, Any]:
        """What was measured on what."""
        return {
            "model": self._serving.resolved.name,
            "dtype": str(self._serving.decoder.dtype).removeprefix("torch."),
            "compressed": self._serving.decoder.weights.is_compressed,
            "device": self._serving.device.name,
            "ceilings": asdict(self._ceilings),
        }

    def random_adapters(self, count: int, rank: int) -> list[AdapterRef]:
        """``count`` adapters over all linear modules, each with memory of its own, ready to be put into slots."""
        adapter = LoraAdapter.trainable(
            self._serving.resolved.spec, r=rank, alpha=2.0 * rank, target_modules=LINEAR_MODULES, seed=0
        )
        refs = [AdapterRef(f"random-{index}", f"/nowhere/random-{index}") for index in range(count)]
        for ref in refs:
            self._engine.register_adapter(ref, adapter)
        self._engine.wait_for_adapters(refs)
        return refs

    def decode(
        self, batch_size: int, context: int, num_steps: int, adapters: Sequence[AdapterRef] = ()
    ) -> dict[str, Any]:
        """Steps of ``batch_size`` sequences with about ``context`` tokens each, ``adapters`` dealt out among them.

        ``step_ms`` is from one step's tokens to the next one's on the host, over ``num_steps`` steps.
        """
        prompt = max(1, context - num_steps // 2)
        room = self._engine.max_model_len - prompt
        wanted = min(room, num_steps + _WARM_STEPS + batch_size + 64)  # more than it takes until all of them decode
        for index in range(batch_size):
            adapter = adapters[index % len(adapters)] if adapters else None
            self._engine.add(self._request(prompt, wanted, adapter))
        while any(view.first_token_s is None for view in self._engine.views()):
            self._iterate()
        for _ in range(_WARM_STEPS):
            self._iterate()
        if self._engine.num_running < batch_size:
            raise InvalidInputError(
                f"{batch_size} sequences of {context} tokens do not decode together: the KV cache has "
                f"{self._engine.num_pages} pages; lower --batch-sizes or --context"
            )
        steps_ms, device_ms, gaps_us = [], [], []
        last = time.perf_counter()
        for _ in range(num_steps):
            collected = self._iterate()
            now = time.perf_counter()
            steps_ms.append((now - last) * 1e3)
            last = now
            if collected is not None:
                device_ms.append(collected.device_ms)
                if collected.gap_ms is not None:
                    gaps_us.append(collected.gap_ms * 1e3)
        self._end_all()
        floor_ms = self.floor_ms(batch_size, batch_size * context, batch_size)
        return {
            "batch_size": batch_size,
            "context": context,
            "num_adapters": len(adapters),
            "step_ms": spread(steps_ms),
            "device_ms": spread(device_ms),
            "gap_us": spread(gaps_us) if gaps_us else None,
            "floor_ms": round(floor_ms, 4),
            "ratio_to_floor": round(statistics.median(steps_ms) / floor_ms, 3),
        }

    def prefill(self, num_tokens: int, repeats: int) -> dict[str, Any]:
        """One prompt alone, from being added to its first token on the host."""
        times_ms, device_ms = [], []
        for _ in range(repeats + 2):
            request = self._request(num_tokens, 1, None)
            start = time.perf_counter()
            self._engine.add(request)
            collected = None
            while self._engine.has_work:
                collected = self._iterate()
            times_ms.append((time.perf_counter() - start) * 1e3)
            if collected is not None:
                device_ms.append(collected.device_ms)
        floor_ms = self.floor_ms(num_tokens, num_tokens, 1, num_tokens * num_tokens / 2)
        return {
            "num_tokens": num_tokens,
            "prefill_ms": spread(times_ms[2:]),
            "device_ms": spread(device_ms[2:]),
            "floor_ms": round(floor_ms, 4),
            "ratio_to_floor": round(statistics.median(times_ms[2:]) / floor_ms, 3),
        }

    def floor_ms(self, num_tokens: int, context_tokens: int, num_sampled: int, attended: float | None = None) -> float:
        """The least time for ``num_tokens`` tokens over ``context_tokens`` cached ones; ``attended``: pairs of a query
        and a key (by default each query attends to its share of the context)."""
        spec, dtype = self._serving.resolved.spec, self._serving.decoder.dtype
        layers, head = spec.layer_parameters, spec.vocab_size * spec.hidden_size
        share_read = self._serving.decoder.weights.share_read if num_tokens <= MAX_ROWS else 1.0
        num_bytes = share_read * (layers * self._weight_bytes + head * dtype.itemsize)
        num_bytes += context_tokens * page_bytes(spec, 1, dtype)
        pairs = context_tokens if attended is None else attended
        operations = 2.0 * layers * num_tokens + 2.0 * head * num_sampled
        operations += 4 * pairs * spec.num_heads * spec.head_dim * spec.num_layers
        by_bytes = num_bytes / (self._ceilings.copy_gb_s * 1e9)
        return 1e3 * max(by_bytes, operations / (self._ceilings.matmul_tflop_s * 1e12))

    def _request(self, num_tokens: int, max_tokens: int, adapter: AdapterRef | None) -> Request:
        vocab_size = self._serving.resolved.spec.vocab_size
        prompt = tuple(torch.randint(0, vocab_size, (num_tokens,), generator=self._random).tolist())
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return Request(f"bench-{next(self._names)}", prompt, sampling, time.monotonic(), adapter)

    def _iterate(self) -> Collected | None:
        """One iteration without best-effort work; the last batch that was collected in it."""
        device = self._serving.device
        with device.online():
            collected = self._engine.iterate(num_ahead=int(device.overlaps)).collected
        return collected[-1] if collected else None

    def _end_all(self) -> None:
        self._engine.abort([view.request_id for view in self._engine.views()])
        while self._engine.has_work:
            self._iterate()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Percentiles and the largest of one or more values."""
    shares = {"p50": 50, "p10": 10, "p90": 90, "p99": 99, "max": 100}
    return {name: round(percentile(values, share), 4) for name, share in shares.items()}
