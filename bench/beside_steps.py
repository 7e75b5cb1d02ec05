"""What a job gets on a part of a GPU's SMs beside what the others do every so many milliseconds: nothing, bring the
weights of a decode step in, or multiply with them; as they are, and compressed. Weights are brought in by the memory's
own engine, which no thread waits for, and nothing is computed from them: the least that a step's products could take of
the board's power and of the memory.

    python bench/beside_steps.py --sms 48,32 --period-ms 10

Each is measured twice, in turn. A job's speed is in tasklets a second, and as a share of what it has with all SMs and
nothing beside it. Needs an NVIDIA GPU with green contexts, whose energy NVML counts, and nvidia-ml-py.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pynvml
import torch
from read_energy import NUM_LAYERS, decode_products, random_layers

from cotenant.config import CacheConfig, CoExecutionConfig, ModelConfig, ServerConfig
from cotenant.core.errors import CotenantError
from cotenant.core.job import JobSpec
from cotenant.core.plan import Partition, Slo
from cotenant.device.cuda.compiled import CompiledKernel, pointer
from cotenant.device.cuda.device import CudaDevice
from cotenant.device.cuda.graphs import capture_graph
from cotenant.models.compressed import compress
from cotenant.models.fused_linear import FusedLinear
from cotenant.models.skinny_tiling import num_sms_at_hand, sms_at_hand
from cotenant.runtime.finetune_workload import Workload, write_random_dataset
from cotenant.runtime.load import Load
from cotenant.runtime.tenants import Tenants, build_tenants
from cotenant.runtime.training import TrainingTenant
from cotenant.scheduler.space import sm_shares
from cotenant.wire.messages import FromWorker, JobFailed

_MODEL, _NUM_PAGES = "llama-3.1-8b", 8192
_ROWS, _SEQ_LEN, _TOKENS_PER_STEP, _RANK = 32, 2048, 8192, 16
_STEPS_PER_EPOCH = 64
_ALONE = "all SMs, nothing beside"
_WARM_S, _FIRST_S = 0.5, 3.5  # the first time products' algorithms are tried and layers captured
_CLOCKS_EVERY_S = 0.2
_PIECE_BYTES, _NUM_AHEAD = 16384, 3  # of what an SM brings in
_BRING_IN = r"""
typedef unsigned int u32;
typedef unsigned long long u64;
extern "C" __global__ void bring_in(const char* bytes, long long count) {
    extern __shared__ __align__(128) char room[];
    __shared__ __align__(8) u64 barriers[AHEAD];
    if (threadIdx.x != 0) return;
    const u32 to = (u32)__cvta_generic_to_shared(room), barrier = (u32)__cvta_generic_to_shared(barriers);
    for (int place = 0; place < AHEAD; ++place)
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barrier + 8 * place) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    auto copy = [&](long long number, int place) {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::
            "r"(barrier + 8 * place), "r"(PIECE) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(to + place * PIECE), "l"(bytes + number * PIECE), "r"(PIECE), "r"(barrier + 8 * place) : "memory");
    };
    const long long step = gridDim.x;
    for (int place = 0; place < AHEAD; ++place)
        if (blockIdx.x + place * step < count) copy(blockIdx.x + place * step, place);
    int place = 0, phase = 0;
    for (long long number = blockIdx.x; number < count; number += step) {
        asm volatile("{\n.reg .pred done;\nagain:\n"
            "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}" ::
            "r"(barrier + 8 * place), "r"(phase) : "memory");
        if (number + AHEAD * step < count) copy(number + AHEAD * step, place);
        if (++place == AHEAD) place = 0, phase ^= 1;
    }
}
"""


class Found(NamedTuple):
    """``tasklets``: a second; ``steps`` likewise; ``step_ms``: the median, 0 for nothing."""

    tasklets: float
    steps: float
    step_ms: float
    watts: float
    clock_mhz: float


@dataclass
class Beside:
    """What happens on the other SMs: a graph every ``period_s``."""

    graph: torch.cuda.CUDAGraph | None
    stream: torch.cuda.Stream
    period_s: float
    due_s: float = field(default_factory=time.perf_counter)
    num_launched: int = 0
    timed: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def launch(self) -> None:
        """If it is time."""
        now_s = time.perf_counter()
        if self.graph is None or now_s < self.due_s:
            return
        self.due_s = max(self.due_s, now_s - self.period_s) + self.period_s
        self.num_launched += 1
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            start.record()
            self.graph.replay()
            end.record()
        self.timed.append((start, end))


class Measurement:
    """A server's worker in this process, with a job."""

    def __init__(self, folder: Path, period_s: float, seconds: float) -> None:
        self._period_s, self._seconds = period_s, seconds
        self._tenants = self._build(folder)
        self.device = self._tenants.serving.device
        assert isinstance(self.device, CudaDevice)
        self._training: TrainingTenant = self._tenants.training
        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(self.device.torch_device).uuid
        self._handle: Any = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        self._num_ended = 0
        for partition in (None, *self.device.partitions):
            self._run(partition, Beside(None, torch.cuda.Stream(), 1.0), _FIRST_S)

    def _build(self, folder: Path) -> Tenants:
        def hear(message: FromWorker) -> None:
            if isinstance(message, JobFailed):
                raise CotenantError(message.message)

        config = ServerConfig(
            model=ModelConfig(_MODEL, load_format="dummy"),
            cache=CacheConfig(num_pages=_NUM_PAGES),
            coexecution=CoExecutionConfig("adaptive"),
            data_dir=str(folder),
        )
        tenants = build_tenants(config, hear)
        tenants.lanes.finish()
        rehearsal = tenants.rehearsal
        assert rehearsal is not None
        loop = tenants.loop(Load((), 1, seed=0), "adaptive", Slo(500.0, 10.0), sm_shares("adaptive"))
        while not (rehearsal.is_compiled() and rehearsal.done):
            loop.iterate()
        workload = Workload(_SEQ_LEN, _TOKENS_PER_STEP, 0, _RANK, False)
        dataset = folder / "train.safetensors"
        write_random_dataset(dataset, workload, tenants.serving.resolved.spec.vocab_size, _STEPS_PER_EPOCH)
        job = folder / "job"
        job.mkdir()
        tenants.training.start(JobSpec("job", _MODEL, str(job), str(dataset), None, "job", workload.hyperparameters()))
        return tenants

    def measure(self, partition: Partition | None, launch: Callable[[], None] | None) -> Found:
        """``launch``: what the online SMs of the partition do."""
        if partition is None:
            return self._run(None, Beside(None, torch.cuda.Stream(), self._period_s), self._seconds)
        with self.device.online(partition):
            stream = torch.cuda.current_stream()
        graph = None
        if launch is not None:
            with sms_at_hand(partition.online_sms), torch.cuda.stream(stream):
                graph = capture_graph(launch, torch.cuda.graph_pool_handle())
        torch.cuda.synchronize()
        return self._run(partition, Beside(graph, stream, self._period_s), self._seconds)

    def _run(self, partition: Partition | None, beside: Beside, seconds: float) -> Found:
        self._train_until(partition, beside, time.perf_counter() + _WARM_S)
        begin_mj, begin_s = self._energy_as_it_moves(partition, beside)
        beside.timed.clear()
        ended, launched, clocks = self._num_ended, beside.num_launched, []
        while time.perf_counter() < begin_s + seconds:
            self._train_until(partition, beside, time.perf_counter() + _CLOCKS_EVERY_S)
            clocks.append(pynvml.nvmlDeviceGetClockInfo(self._handle, pynvml.NVML_CLOCK_SM))
        end_mj, end_s = self._energy_as_it_moves(partition, beside)
        ended, launched = self._num_ended - ended, beside.num_launched - launched
        torch.cuda.synchronize()
        took_s = end_s - begin_s
        step_ms = statistics.median([start.elapsed_time(end) for start, end in beside.timed] or [0.0])
        watts, clock = (end_mj - begin_mj) / 1e3 / took_s, statistics.median(clocks)
        return Found(ended / took_s, launched / took_s, step_ms, watts, clock)

    def _train_until(self, partition: Partition | None, beside: Beside, until_s: float) -> None:
        while time.perf_counter() < until_s:
            self._tasklet(partition, beside)

    def _energy_as_it_moves(self, partition: Partition | None, beside: Beside) -> tuple[int, float]:
        """NVML counts it every 100 ms or so."""
        before_mj = found_mj = pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        while found_mj == before_mj:
            self._tasklet(partition, beside)
            found_mj = pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        return found_mj, time.perf_counter()

    def _tasklet(self, partition: Partition | None, beside: Beside) -> None:
        self.device.wait_for_room()
        if self._training.runnable:
            self.device.run_tasklet(self._training.run_tasklet, partition=partition)
        beside.launch()
        self._num_ended += len(self.device.finished_tasklets())


def kinds() -> Iterator[tuple[str, Callable[[], None] | None]]:
    """What the other SMs do, by name."""
    constants = {"AHEAD": _NUM_AHEAD, "PIECE": _PIECE_BYTES}
    kernel = CompiledKernel(_BRING_IN, "bring_in", constants, _NUM_AHEAD * _PIECE_BYTES)
    plain = [[FusedLinear((), (), weight) for weight in layer] for layer in random_layers()]
    compressed = [[FusedLinear((), (), base.weight, None, compress(base.weight)) for base in layer] for layer in plain]

    def bring_in(tensors: list[torch.Tensor]) -> None:
        for each in tensors:
            kernel.launch(num_sms_at_hand() or 1, 32, (pointer(each), (each.nbytes // _PIECE_BYTES, ctypes.c_longlong)))

    weights = [base.weight for layer in plain for base in layer]
    blocks = [base.compressed.blocks for layer in compressed for base in layer if base.compressed is not None]
    assert len(blocks) == len(weights)
    yield "nothing", None
    yield "weights brought in", lambda: bring_in(weights)
    yield f"products of {_ROWS} rows", lambda: decode_products(plain, _ROWS)
    yield "compressed weights brought in", lambda: bring_in(blocks)
    yield "products with compressed weights", lambda: decode_products(compressed, _ROWS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sms", default="48,32", help="of steps; of 132: 32, 48, 64 or 80")
    parser.add_argument("--period-ms", type=float, default=10.0, help="a step every so often")
    parser.add_argument("--seconds", type=float, default=2.5, help="how long each is measured, each time")
    arguments = parser.parse_args()
    wanted = list(map(int, arguments.sms.split(",")))
    with tempfile.TemporaryDirectory(prefix="cotenant-bench-") as folder:
        measurement = Measurement(Path(folder), arguments.period_ms / 1e3, arguments.seconds)
        partitions = [each for each in measurement.device.partitions if each.online_sms in wanted]
        found: dict[str, list[Found]] = {}
        launches = dict(kinds())
        for _ in range(2):
            found.setdefault(_ALONE, []).append(measurement.measure(None, None))
            for partition in partitions:
                for kind, launch in launches.items():
                    name = f"{partition.best_effort_sms} SMs, {kind} on {partition.online_sms}"
                    found.setdefault(name, []).append(measurement.measure(partition, launch))
    name = torch.cuda.get_device_name()
    print(
        f"{name}, torch {torch.__version__}; {_MODEL}, {NUM_LAYERS} layers' products, every {arguments.period_ms:g} ms"
    )
    print(
        "| a job on | tasklets/s | of its speed alone | a step, ms | steps/s | W | MHz |\n|---|---|---|---|---|---|---|"
    )
    alone = statistics.mean(each.tasklets for each in found[_ALONE])
    for name, twice in found.items():
        speeds = " and ".join(f"{each.tasklets:.0f}" for each in twice)
        shares = " and ".join(f"{each.tasklets / alone:.1%}" for each in twice)
        of_steps = [statistics.mean(values) for values in zip(*(each[1:] for each in twice), strict=True)]
        steps, step_ms, watts, clock = of_steps
        print(f"| {name} | {speeds} | {shares} | {step_ms:.2f} | {steps:.0f} | {watts:.0f} | {clock:.0f} |")


if __name__ == "__main__":
    main()
