"""The model's own speed, measured at start: it primes the predictor and gives the default targets on the CPU."""

from __future__ import annotations

import statistics
import time

from cotenant.core.errors import InvalidInputError
from cotenant.core.plan import IterationRecord, Mode, Plan, Slo
from cotenant.core.request import Request, SamplingParams, SequenceOutput
from cotenant.engine.engine import OnlineEngine
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.runtime.executor import Executor

TARGET_FACTOR = 4.0
_PROMPT_TOKENS = 64
_NEW_TOKENS = 12
_CONCURRENCY = (1, 4, 1, 4, 2, 4)


def calibrate(
    engine: OnlineEngine, executor: Executor, predictor: LatencyPredictor, vocab_size: int, max_model_len: int
) -> Slo:
    """Serve a few synthetic requests alone. Returns four times the median TTFT and step time seen, in milliseconds.

    TTFT here is a request's time from being added to its first token while others like it run beside it.
    Raises InvalidInputError for a model that puts out no token for any of them.
    """
    prompt_tokens = min(_PROMPT_TOKENS, max_model_len // 2)
    ttfts_ms: list[float] = []
    steps_ms: list[float] = []
    outputs: list[SequenceOutput] = []
    for number, concurrency in enumerate(_CONCURRENCY):
        for index in range(concurrency):
            prompt = tuple((7 * number + 13 * index + 3 * i + 1) % vocab_size for i in range(prompt_tokens))
            sampling = SamplingParams(max_tokens=_NEW_TOKENS, temperature=0.0, ignore_eos=True)
            name = f"calibration-{number}-{index}"
            engine.add(Request(name, prompt, sampling, time.monotonic(), uses_prefix_cache=False))
            ttfts_ms.append(_run_until_first_token(engine, executor, predictor, steps_ms, outputs))
        while engine.has_work:
            record = _step(executor, predictor, outputs)
            if not record.batch.empty:
                steps_ms.append(record.total_ms)
    engine.forget_counts()  # of prompts that nobody sent
    if not any(output.token_ids for output in outputs):
        raise InvalidInputError(
            f"the model's logits are not finite for any of {sum(_CONCURRENCY)} prompts, so it can answer nobody: its "
            "weights are damaged (copy or download them again), or its numbers are too large for their dtype "
            "(--dtype float32 or bfloat16 instead of float16; no --quantization)",
            param="model",
        )
    return Slo(TARGET_FACTOR * statistics.median(ttfts_ms), TARGET_FACTOR * statistics.median(steps_ms))


def _run_until_first_token(
    engine: OnlineEngine,
    executor: Executor,
    predictor: LatencyPredictor,
    steps_ms: list[float],
    outputs: list[SequenceOutput],
) -> float:
    """Milliseconds until no request waits for its first token; decode steps on the way go into ``steps_ms``."""
    start = time.perf_counter()
    while any(view.first_token_s is None for view in engine.views()):
        record = _step(executor, predictor, outputs)
        if not record.batch.empty and record.batch.prefill_tokens == 0:
            steps_ms.append(record.total_ms)
    return (time.perf_counter() - start) * 1e3


def _step(executor: Executor, predictor: LatencyPredictor, outputs: list[SequenceOutput]) -> IterationRecord:
    record = executor.execute(Plan(mode=Mode.NONE), outputs.extend, lambda: False)
    predictor.observe(record)  # of an empty batch, which has nothing to teach, when the batch is still in flight
    return record
