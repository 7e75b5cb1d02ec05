"""Partitions of the SMs: who runs where, and that sharing in space changes nothing but time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import safetensors.torch
import torch

from cotenant.core.job import JobSpec
from cotenant.core.plan import Mode, Partition, Plan
from cotenant.core.request import SequenceOutput
from cotenant.core.tasklet import TaskletKind, TaskletShape
from cotenant.device import Device, create_device
from cotenant.device.cuda.graphs import capture_graph
from cotenant.engine.flight import Flight
from cotenant.models.product_check import wrong_share
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.runtime.executor import Executor
from cotenant.runtime.finetune_workload import Workload, write_random_dataset
from cotenant.runtime.lanes import LaneCaptures
from cotenant.runtime.self_profile import SelfProfile
from cotenant.runtime.training import TrainingTenant
from cotenant.scheduler.space import sm_shares
from cotenant.wire.messages import FromWorker, JobFailed, JobSucceeded
from gpu import support
from gpu.support import Overlapped, prompt, request, tokens

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

SHAPE = TaskletShape(TaskletKind.FORWARD, 1, 1)
NUM_PROGRAMS = 16_384
GRAPH_SIZES = (1, 4, 8)
WORKLOAD = Workload(seq_len=128, tokens_per_step=512, tasklet_tokens=256, r=8, gradient_checkpointing=False)
STEPS_PER_EPOCH = 6


@triton.jit  # type: ignore[untyped-decorator]
def _where_kernel(sms_ptr) -> None:  # type: ignore[no-untyped-def]
    """Each program notes its SM, after enough work for others to come elsewhere."""
    total = tl.zeros((256,), tl.float32)
    for step in range(200):
        total += tl.sqrt(total + step)
    sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(sms_ptr + tl.program_id(0), sm + (tl.sum(total) < 0).to(tl.int32))


def where(sms: torch.Tensor) -> None:
    _where_kernel[(NUM_PROGRAMS,)](sms)


@pytest.fixture(scope="module")
def device() -> Device:
    device = create_device("cuda")
    assert device.num_multiprocessors is not None
    device.split([device.num_multiprocessors // 4, device.num_multiprocessors // 2])
    if not device.partitions:
        pytest.skip("this GPU, its driver or its bindings have no green contexts")
    return device


@pytest.fixture
def sms() -> torch.Tensor:
    found = torch.empty(NUM_PROGRAMS, dtype=torch.int32, device="cuda")
    where(found)
    torch.cuda.synchronize()
    return found


def used(sms: torch.Tensor, run: Callable[[], None]) -> set[int]:
    sms.fill_(-1)
    torch.cuda.synchronize()
    run()
    torch.cuda.synchronize()
    return set(sms.tolist())


def test_each_tenant_has_its_own_sms(device: Device, sms: torch.Tensor) -> None:
    assert len(used(sms, lambda: where(sms))) == device.num_multiprocessors

    def online(partition: Partition | None) -> None:
        with device.online(partition):
            where(sms)

    def best_effort(partition: Partition | None) -> None:
        def launch() -> TaskletShape:
            where(sms)
            return SHAPE

        device.run_tasklet(launch, partition=partition)

    for partition in device.partitions:
        ours, theirs = used(sms, lambda: online(partition)), used(sms, lambda: best_effort(partition))  # noqa: B023
        assert (len(ours), len(theirs)) == (partition.online_sms, partition.best_effort_sms)
        assert not ours & theirs
    assert len(used(sms, lambda: online(None))) == device.num_multiprocessors
    assert len(used(sms, lambda: best_effort(None))) == device.num_multiprocessors


def test_a_graph_keeps_the_sms_that_it_was_captured_on(device: Device, sms: torch.Tensor) -> None:
    pool = torch.cuda.graph_pool_handle()
    graphs, own = {}, {}
    for partition in (None, *device.partitions):
        with device.online(partition):
            graphs[partition] = capture_graph(lambda: where(sms), pool)
        own[partition] = used(sms, graphs[partition].replay)
    assert [len(found) for found in own.values()] == [
        device.num_multiprocessors,
        *(partition.online_sms for partition in device.partitions),
    ]
    for partition, elsewhere in itertools.permutations(own, 2):
        with device.online(elsewhere):
            graph = graphs[partition]
            assert used(sms, graph.replay) == own[partition]


def test_lanes_keep_their_order_across_partitions(device: Device) -> None:
    """What one stream of a lane writes, the next one reads."""
    big = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    value = torch.zeros(1 << 20, device="cuda")
    lanes = [None, *device.partitions]

    def add() -> TaskletShape:
        torch.mm(big, big)
        value.add_(1)
        return SHAPE

    for turn in range(30):
        device.wait_for_room()
        device.run_tasklet(add, partition=lanes[turn % len(lanes)])
    device.wait_for_tasklets()
    assert (value == 30).all()
    for turn in range(30):
        with device.online(lanes[turn % len(lanes)]):
            add()
    with device.fused():
        add()
    device.synchronize()
    assert (value == 61).all()
    finished = device.finished_tasklets()
    assert {tasklet.partition for tasklet in finished} == set(lanes)


@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)], ids=str)
def test_products_with_a_large_models_matrices_are_right_in_each_partition(shape: tuple[int, int]) -> None:
    """Of both tenants, whatever kernel the library takes. Where MPS gives a process a part of the SMs they are not."""
    device = create_device("cuda")
    assert device.num_multiprocessors is not None
    shares = {share for policy in ("adaptive", "harli", "static") for share in sm_shares(policy)}
    device.split(round(share * device.num_multiprocessors) for share in shares)
    if not device.partitions:
        pytest.skip("this GPU, its driver or its bindings have no green contexts")
    weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    wrong: dict[tuple[str, int, int], float] = {}  # by tenant, rows and SMs
    for rows in (16, 64, 256, 2048):
        x = torch.randn(rows, shape[1], device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()

        def launch() -> TaskletShape:
            wrong["best effort", rows, partition.best_effort_sms] = wrong_share(x, weight)  # noqa: B023
            return SHAPE

        for partition in device.partitions:
            with device.online(partition):
                wrong["online", rows, partition.online_sms] = wrong_share(x, weight)
            device.wait_for_room()
            device.run_tasklet(launch, partition=partition)
    device.synchronize()
    assert not any(wrong.values()), wrong


# Both tenants.


class CoExecution:
    """A model's engine and a job on one device, driven plan by plan. ``compiled``: what capturing the partitions of any
    of them compiled; only the first in a process could."""

    compiled: ClassVar[list[str]] = []

    def __init__(
        self, model: support.Model, shares: Sequence[float], max_model_len: int = 256, *, with_prompts: bool = False
    ) -> None:
        decoder = model.decoder(torch.bfloat16)
        self.online = Overlapped(decoder, enable_prefix_caching=False, max_model_len=max_model_len)
        self.device, self.engine = self.online.device, self.online.engine
        assert self.device.num_multiprocessors is not None
        self.device.split([round(share * self.device.num_multiprocessors) for share in shares])
        self.online.capture(GRAPH_SIZES, [partition.online_sms for partition in self.device.partitions])
        triton.knobs.runtime.jit_post_compile_hook = lambda *, fn, **_: self.compiled.append(fn.name)
        LaneCaptures(self.device, self.engine, self.device.partitions if with_prompts else ()).finish()
        triton.knobs.runtime.jit_post_compile_hook = None
        self.updates: list[FromWorker] = []
        self.training = TrainingTenant(self.device, decoder, None, WORKLOAD.tasklet_tokens, self.updates.append)
        self.executor = Executor(self.device, decoder, self.engine, self.training)

    def run(self, folder: Path, plans: Sequence[Plan]) -> tuple[list[list[int]], dict[str, torch.Tensor], int]:
        """Eight requests and a job: tokens, the adapter, and how many tasklets ran beside a batch. Prompts have the
        device to themselves: elsewhere they would go through other kernels, which round otherwise."""
        folder.mkdir()
        write_random_dataset(folder / "train.safetensors", WORKLOAD, support.VOCAB_SIZE, STEPS_PER_EPOCH)
        hyperparameters = replace(WORKLOAD.hyperparameters(), n_epochs=2, learning_rate=1e-3)
        dataset = str(folder / "train.safetensors")
        self.training.start(JobSpec("job", "model", str(folder), dataset, None, "adapter", hyperparameters))
        requests = [request(prompt(20 + index, index), 120) for index in range(8)]
        for each in requests:
            self.engine.add(each)
        outputs: dict[str, list[SequenceOutput]] = {each.request_id: [] for each in requests}

        def emit(found: list[SequenceOutput]) -> None:
            for output in found:
                outputs[output.request_id].append(output)

        num_beside = 0
        turns: Iterator[Plan] = itertools.cycle(plans)
        while self.engine.has_work or self.training.job_id is not None:
            has_prompts = self.engine.next_shape().prefill_tokens > 0
            plan = self.executor.begun or (Plan() if has_prompts else next(turns))
            record = self.executor.execute(plan, emit, lambda: False)
            num_beside += sum(run.count for run, _ in record.beside)
            self.training.publish()
        assert not [update for update in self.updates if isinstance(update, JobFailed)]
        assert isinstance(self.updates[-1], JobSucceeded)
        adapter = safetensors.torch.load_file(folder / "adapter" / "adapter_model.safetensors")
        return [tokens(outputs[each.request_id]) for each in requests], adapter, num_beside


def test_sharing_in_space_changes_no_token_and_no_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_landed, looks = Flight.has_landed, itertools.count()
    # So small a model's step ends before a tasklet can be launched beside it: the host hears of it a little later.
    monkeypatch.setattr(
        Flight, "has_landed", property(lambda flight: next(looks) % 8 == 7 and has_landed.__get__(flight))
    )
    model = support.make_model("llama", tmp_path / "model")
    both = CoExecution(model, (0.25, 0.5))
    if not both.device.partitions:
        pytest.skip("no green contexts")
    behind = [Plan(num_tasklets=2, mode=Mode.TEMPORAL)]
    plain_tokens, plain_adapter, num_beside = both.run(tmp_path / "plain", behind)
    assert num_beside == 0
    spatial = [
        Plan(num_tasklets=4 + extra, num_beside=4, partition=partition, mode=Mode.SPATIAL)
        for partition in both.device.partitions
        for extra in (0, 0, 0, 2)
    ]
    shared_tokens, shared_adapter, num_beside = both.run(tmp_path / "shared", [*spatial, *behind, Plan()])
    assert num_beside > 50
    assert shared_tokens == plain_tokens
    for name, tensor in plain_adapter.items():
        # With fewer SMs libraries may sum in another order, and Adam makes more of it from step to step.
        difference = torch.linalg.norm(shared_adapter[name] - tensor)
        assert difference <= 0.06 * torch.linalg.norm(tensor), name


def test_partitions_launch_no_kernel_that_was_not_compiled_at_the_start(tmp_path: Path) -> None:
    both = CoExecution(support.make_model("llama", tmp_path / "model"), (0.25, 0.5))
    assert both.device.partitions
    assert not CoExecution.compiled


def test_prompts_that_run_in_a_partition_are_captured_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched kernel by kernel they would keep the host from launching tasklets beside them."""
    from cotenant.models.cuda_pieces import CapturedPieces  # needs Triton

    launched: list[int] = []
    launch = CapturedPieces.launch
    monkeypatch.setattr(CapturedPieces, "launch", lambda pieces, index: (launched.append(index), launch(pieces, index)))
    both = CoExecution(support.make_model("llama", tmp_path / "model"), (0.25, 0.5), with_prompts=True)
    assert both.device.partitions
    for partition in both.device.partitions:
        launched.clear()
        each = request(prompt(90, 1), 6)
        both.engine.add(each)
        outputs: list[SequenceOutput] = []
        plan = Plan(partition=partition, mode=Mode.SPATIAL)
        while both.engine.has_work:
            both.executor.execute(plan, outputs.extend, lambda: False)
        assert len(tokens(outputs)) == 6
        assert launched == list(range(4)), "each layer once"


def test_decode_steps_are_measured_in_idle_time_on_all_sms_and_in_each_partition(tmp_path: Path) -> None:
    both = CoExecution(support.make_model("llama", tmp_path / "model"), (0.25, 0.5), max_model_len=512)
    engine, ways = both.engine, (None, *both.device.partitions)
    predictor = LatencyPredictor("gpu", "llama")
    profile = SelfProfile(engine, predictor, both.device.partitions, support.VOCAB_SIZE)
    plain = both.online.run([request(prompt(40, index), 30) for index in range(4)])

    def nobody(outputs: list[SequenceOutput]) -> None:
        """Where a server's requests are told their tokens."""

    while profile.begin():
        while profile.is_active:
            record = both.executor.execute(profile.plan(), nobody, lambda: False)
            predictor.observe(record)
            profile.note(record)
        while engine.has_work:  # a batch that was in flight then
            both.executor.execute(Plan(run_online=False), nobody, lambda: False)
        engine.check_integrity()
        assert engine.kv_cache_usage == 0.0
    for size in (1, 2, 4, 8, 16):
        assert all(predictor.has_measured_decode(size, size * 256, size * 320, way) for way in ways), size
    again = both.online.run([request(prompt(40, index), 30) for index in range(4)])
    assert [tokens(outputs) for outputs in again.values()] == [tokens(outputs) for outputs in plain.values()]
