"""What the scripts that train with other libraries have in common: their flags, the timed steps and the report.

The report has kind ``finetune`` and the field names of `cotenant bench finetune`; what we alone measure (ceilings,
tasklet times, suspend, discard, CPU share) is left out. A step is gradient accumulation over ``batch_size``
sequences at a time, clipping if the library does it by default, and fused AdamW.

With ``--endless`` it trains until it is ended or its parent is gone, for bench/compare_sharing.py. Standard output has
a line of JSON first, which says what trains on what, and one for each step: ``step``, ``tokens_per_s`` and ``ends``,
the end of each of its micro-batches on ``time.monotonic()`` with the tokens trained by then.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from cotenant.bench.machine import command_line, machine, versions

STEPS_OF_DATA = 64


@dataclass(frozen=True, slots=True)
class Peer:
    """A model that is ready to train. ``loss`` takes token ids of shape [sequences, seq_len] and gives the mean loss of
    their next tokens. ``max_grad_norm``: None where gradients are not clipped."""

    loss: Callable[[torch.Tensor], torch.Tensor]
    parameters: Sequence[torch.nn.Parameter]
    max_grad_norm: float | None


def parse(description: str | None, add_flags: Callable[[argparse.ArgumentParser], None]) -> argparse.Namespace:
    """The common flags and the script's own. Ends the process for sizes that do not divide each other."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder with a config.json; the weights are random")
    parser.add_argument("--compile", action="store_true", help="compile each layer, and the loss where it is torch's")
    parser.add_argument("--batch-size", type=int, default=1, help="sequences in one forward pass")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--tokens-per-step", type=int, default=16384)
    parser.add_argument("--r", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup-steps", type=int, default=3)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--label", required=True)
    ending = parser.add_mutually_exclusive_group(required=True)
    ending.add_argument("--json", type=Path)
    ending.add_argument("--endless", action="store_true", help="train until ended, with a line for each step")
    add_flags(parser)
    arguments = parser.parse_args()
    micro_batch = arguments.batch_size * arguments.seq_len
    if arguments.tokens_per_step % micro_batch:
        parser.error(f"--tokens-per-step {arguments.tokens_per_step} is not a multiple of {micro_batch} tokens a batch")
    return arguments


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def train(arguments: argparse.Namespace, peer: Peer, vocab_size: int, packages: Sequence[str]) -> None:
    """Time the steps and write the report; endless, print them. ``packages``: whose versions are named."""
    on = device()
    optimizer = torch.optim.AdamW(peer.parameters, lr=1e-5, weight_decay=0.0, fused=True)
    num_micro_batches = arguments.tokens_per_step // (arguments.batch_size * arguments.seq_len)
    shape = (STEPS_OF_DATA, num_micro_batches, arguments.batch_size, arguments.seq_len)
    data = torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(on)
    if on.type == "cuda":
        torch.cuda.empty_cache()  # what was left of making the model is no part of training's memory
        torch.cuda.reset_peak_memory_stats()

    def step(index: int, on_micro_batch: Callable[[], None] = lambda: None) -> torch.Tensor:
        total = torch.zeros((), device=on)
        for ids in data[index % STEPS_OF_DATA]:
            loss = peer.loss(ids) / num_micro_batches
            loss.backward()
            total += loss.detach()
            on_micro_batch()
        if peer.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(peer.parameters, peer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    setting = {
        "kind": "finetune",
        "label": arguments.label,
        "model": arguments.model.name,
        "dtype": arguments.dtype,
        "device": torch.cuda.get_device_name() if on.type == "cuda" else "cpu",
        "seq_len": arguments.seq_len,
        "tokens_per_step": arguments.tokens_per_step,
        "r": arguments.r,
        "gradient_checkpointing": arguments.gradient_checkpointing,
        "micro_batch_tokens": arguments.batch_size * arguments.seq_len,
        "num_micro_batches": num_micro_batches,
    }
    about = {
        "versions": {**versions(), **{name: metadata.version(name) for name in packages}},
        "command": command_line(["python", *sys.argv]),
    }
    if arguments.endless:
        # Under MPS it may be fewer than the GPU has.
        num_sms = torch.cuda.get_device_properties(on).multi_processor_count if on.type == "cuda" else None
        print(json.dumps({**setting, "num_sms": num_sms, **about}), flush=True)
        _train_endlessly(step, _Progress(num_micro_batches, arguments.tokens_per_step))
        return
    for index in range(arguments.warmup_steps):
        step(index)
    figures = _timed(step, arguments)
    report = {**setting, **figures, "memory": _peak_memory(on), "machine": machine(), **about}
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def _train_endlessly(step: Callable[[int, Callable[[], None]], torch.Tensor], progress: _Progress) -> None:
    """Until this process is ended, or the one that started it is gone."""
    parent = os.getppid()
    for index in itertools.count():
        if os.getppid() != parent:
            return
        step(index, progress.note)


@dataclass(slots=True)
class _Progress:
    """Notes the end of each micro-batch on the device and prints each step. The host waits for a micro-batch once it
    has launched the next one, so that the device is never without work."""

    num_micro_batches: int
    tokens_per_step: int
    _launched: deque[Any] = field(default_factory=deque)
    _ends: list[tuple[float, int]] = field(default_factory=list)  # of the step under way
    _num_ended: int = 0
    _step_began_s: float = field(default_factory=time.monotonic)

    def note(self) -> None:
        """A micro-batch was launched."""
        self._launched.append(_mark())
        if len(self._launched) == 1:
            return
        mark = self._launched.popleft()
        if not isinstance(mark, float):
            mark.synchronize()
        self._num_ended += 1
        tokens = self._num_ended * self.tokens_per_step // self.num_micro_batches
        # On a CPU it ended when it was noted.
        self._ends.append((mark if isinstance(mark, float) else time.monotonic(), tokens))
        if len(self._ends) == self.num_micro_batches:
            self._print_step()

    def _print_step(self) -> None:
        end_s = self._ends[-1][0]
        line = {
            "step": self._num_ended // self.num_micro_batches,
            "tokens_per_s": round(self.tokens_per_step / (end_s - self._step_began_s), 2),
            "ends": [(round(at_s, 6), tokens) for at_s, tokens in self._ends],
        }
        print(json.dumps(line), flush=True)
        self._step_began_s, self._ends = end_s, []


def _timed(step: Callable[[int], torch.Tensor], arguments: argparse.Namespace) -> dict[str, Any]:
    """Nothing waits for the device between two steps: on a GPU their ends are events in its stream."""
    _synchronize()
    ends = [_mark()]
    start_s = time.perf_counter()
    for index in range(arguments.steps):
        loss = step(arguments.warmup_steps + index)
        ends.append(_mark())
    _synchronize()
    wall_s = time.perf_counter() - start_s
    steps_ms = [_elapsed_ms(first, second) for first, second in pairwise(ends)]
    tokens = arguments.tokens_per_step
    return {
        "num_steps": arguments.steps,
        "final_loss": round(loss.item(), 4),
        "tokens_per_s": {
            "mean": round(arguments.steps * tokens / wall_s, 2),
            **_spread([tokens / milliseconds * 1e3 for milliseconds in steps_ms]),
        },
        "step_ms": _spread(steps_ms),
    }


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _mark() -> Any:
    if not torch.cuda.is_available():
        return time.monotonic()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed_ms(first: Any, second: Any) -> float:
    elapsed = (second - first) * 1e3 if isinstance(first, float) else first.elapsed_time(second)
    return float(elapsed)


def _peak_memory(on: torch.device) -> dict[str, int]:
    """As in our report: the weights included; on a CPU the process's largest resident set."""
    if on.type == "cuda":
        return {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        }
    return {"peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4)

    shares = {"p10": at(0.1), "p90": at(0.9), "p99": at(0.99), "max": at(1.0)}
    return {"p50": round(statistics.median(ordered), 4), **shares}
