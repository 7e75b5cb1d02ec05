"""`cotenant bench finetune` where tasklets run behind the launching thread."""

from __future__ import annotations

from cotenant.config import ModelConfig
from cotenant.runtime.finetune_bench import open_bench
from cotenant.runtime.finetune_workload import Workload


def test_memory_and_latencies_are_the_devices() -> None:
    bench = open_bench(ModelConfig("tiny", device="cuda"), Workload(128, 1024, 256, 16, False))
    figures = bench.steps(4, 2)
    suspend, discard = bench.suspend(20), bench.discard(20)
    bench.close()
    assert 0 < figures["memory"]["peak_allocated_bytes"] <= figures["memory"]["peak_reserved_bytes"]
    assert figures["tasklet_ms"]["loss"]["count"] == 4 * 4
    assert suspend["latency_ms"]["p50"] >= suspend["noticed_ms"]["p50"]
    assert discard["latency_ms"]["p50"] > 0
    print(f"tiny on CUDA: {figures['tokens_per_s']['mean']:.0f} tokens/s, suspend {suspend['latency_ms']}")


def test_without_a_number_of_tokens_micro_batches_fit_the_device() -> None:
    bench = open_bench(ModelConfig("tiny", device="cuda"), Workload(128, 4096, 0, 16, False))
    figures = bench.steps(2, 1)
    description = bench.description()
    bench.close()
    size, count = description["micro_batch_tokens"], description["num_micro_batches"]
    assert 1536 <= size <= 2048
    assert figures["tasklet_ms"]["forward_mlp"]["count"] % (2 * count) == 0
