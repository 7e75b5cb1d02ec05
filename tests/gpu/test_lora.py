"""Grouped LoRA by kernels, inside captured graphs: each row gets its adapter's delta, whatever the others get, and the
deltas cost little beside what they are added to."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from cotenant.core.job import LINEAR_MODULES
from cotenant.models.batch import AdapterSpan, Batch, TrainingSegment
from cotenant.models.decoder import Decoder
from cotenant.models.fused_linear import FusedLinear
from cotenant.models.linear import linear
from cotenant.models.lora import LoraAdapter
from cotenant.models.lora_stacks import GroupedLora, LoraStacks
from cotenant.models.skinny_tiling import sms_at_hand
from cotenant.models.spec import ModelSpec
from cotenant.models.weights import DecoderWeights, LayerWeights, allocate, with_compressed

CUDA = torch.device("cuda")
LLAMA_8B = ModelSpec("llama", 32, 4096, 14336, 32, 8, 128, 1024, 4096)
SMALL = ModelSpec("llama", 2, 1024, 2048, 8, 2, 128, 50, 128)
SHAPES = {
    "odd": ModelSpec("llama", 2, 96, 176, 6, 2, 16, 50, 128),
    "8b": ModelSpec("llama", 1, 4096, 14336, 32, 8, 128, 50, 128),
}
# The second: sizes that are no powers of 2, heads in twos, input features over several programs.
MODEL_SHAPES = {"small": SMALL, "uneven": ModelSpec("llama", 2, 1536, 8960, 12, 2, 128, 50, 128)}
BATCHES = {
    "base": [-1] * 3,
    "one": [2],
    "alike": [1] * 37,
    "sorted": [-1] * 5 + [0] * 21 + [1] + [2] * 18,
    "mixed": [2, -1, 0, 0, 1, 2, 2, -1, 0] * 4,
}
MODULES = (LINEAR_MODULES, ("q_proj", "v_proj", "up_proj", "o_proj"), LINEAR_MODULES)
RANKS = (16, 5, 64)


def _adapter(spec: ModelSpec, seed: int, r: int, modules: Sequence[str]) -> LoraAdapter:
    adapter = LoraAdapter.trainable(spec, r=r, alpha=2.0 * r, target_modules=modules, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, b in adapter.weights.values():
            b.copy_(torch.randn(b.shape, generator=generator) * 0.1)
    return adapter


def _bases(layer: LayerWeights) -> list[FusedLinear]:
    return [layer.qkv, layer.output, layer.gate_up, layer.down]


def _random_weights(spec: ModelSpec, dtype: torch.dtype) -> DecoderWeights:
    weights = allocate(spec, CUDA, dtype)
    for base in (base for layer in weights.layers for base in _bases(layer)):
        base.weight.normal_(0, base.weight.shape[1] ** -0.5)
    for layer in weights.layers:
        layer.input_norm.uniform_(0.5, 1.5)
        layer.mlp_norm.uniform_(0.5, 1.5)
    weights.embedding.normal_()
    weights.head.normal_()
    weights.final_norm.uniform_(0.5, 1.5)
    return weights


def _spans(slots: Iterable[int], placed: Sequence[LoraAdapter]) -> list[AdapterSpan]:
    return [AdapterSpan(row, row + 1, placed[slot]) for row, slot in enumerate(slots) if slot >= 0]


def _tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 3e-2, "rtol": 3e-2}


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_row_gets_its_adapters_delta_in_a_captured_graph(shape: str, dtype: torch.dtype) -> None:
    """One graph for all batches of a size; slots and the adapters in them change between replays."""
    torch.backends.cuda.matmul.allow_tf32 = False
    spec = SHAPES[shape]
    with torch.inference_mode(False):
        stacks = LoraStacks(spec, 3, 64, CUDA, dtype)
    adapters = [_adapter(spec, seed, r, modules) for seed, (r, modules) in enumerate(zip(RANKS, MODULES, strict=True))]
    hosts = [stacks.pack(adapter) for adapter in adapters]
    bases = _bases(_random_weights(spec, dtype).layers[0])
    for slots in BATCHES.values():
        grouped = GroupedLora.of(stacks, [-1] * len(slots))
        inputs = [torch.randn(len(slots), base.weight.shape[1], device=CUDA).to(dtype) for base in bases]
        replay, outs = _capture(partial(_all_products, inputs, bases, 0, grouped))
        for order in ((0, 1, 2), (2, 0, 1)):
            placed = [stacks.load(slot, hosts[which]) for slot, which in enumerate(order)]
            _set(grouped, slots)
            replay()
            for x, base, out in zip(inputs, bases, outs, strict=True):
                torch.testing.assert_close(out, linear(x, base, 0, _spans(slots, placed)), **_tolerance(dtype))


def _set(grouped: GroupedLora, slots: Sequence[int]) -> None:
    """Have a captured batch's rows take these slots from now on."""
    wanted = GroupedLora.of(grouped.stacks, slots)
    grouped.slots.copy_(wanted.slots)
    grouped.ranks.copy_(wanted.ranks)


def _all_products(
    inputs: Sequence[torch.Tensor], bases: Sequence[FusedLinear], layer: int, grouped: GroupedLora | None
) -> list[torch.Tensor]:
    return [linear(x, base, layer, (), grouped) for x, base in zip(inputs, bases, strict=True)]


def _capture(run: Callable[[], list[torch.Tensor]]) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """Capture ``run``: how to run it again, and where its results then lie."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run()
    return graph.replay, outs


class _Model:
    """``CudaForward`` over batches of single tokens that attend to themselves alone."""

    def __init__(self, spec: ModelSpec, weights: DecoderWeights, max_rows: int = 64) -> None:
        from cotenant.models.cuda_forward import CudaForward

        embedding = weights.embedding
        shape = (-(-max_rows // 16), spec.num_layers, 2, 16, spec.num_kv_heads, spec.head_dim)
        cache = torch.zeros(shape, device=CUDA, dtype=embedding.dtype)
        self._spec = spec
        self._forward = CudaForward(Decoder(spec, weights), cache, torch.zeros(1, dtype=torch.int64, device=CUDA))

    def _attend(self, layer: int, query: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        values = cache[:, 1].flatten(0, 1)[: len(query)]  # [rows, kv_heads, head_dim]
        return values.repeat_interleave(self._spec.num_heads // self._spec.num_kv_heads, dim=1)

    def __call__(
        self, token_ids: torch.Tensor, grouped: GroupedLora | None = None, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[rows] -> [rows, hidden] after the final norm; ``rows``: of these only."""
        from cotenant.models.cuda_forward import TokenInputs

        places = torch.arange(len(token_ids), dtype=torch.int32, device=CUDA)
        inputs = TokenInputs(token_ids, token_ids, places, places)
        return self._forward(inputs, self._attend, grouped=grouped, rows=rows)

    def without_attention(self, token_ids: torch.Tensor, grouped: GroupedLora | None) -> list[torch.Tensor]:
        """The same kernels, but queries go on as what they attend to: for timing."""
        from cotenant.models.cuda_forward import TokenInputs

        def attend(layer: int, query: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
            return query

        return [self._forward(TokenInputs(token_ids, token_ids, token_ids, token_ids), attend, grouped=grouped)]


def _token_ids(num_rows: int) -> torch.Tensor:
    return torch.arange(num_rows, dtype=torch.int32, device=CUDA) * 7 % 50


def _plain(
    decoder: Decoder, token_ids: torch.Tensor, slots: Sequence[int], placed: Sequence[LoraAdapter]
) -> torch.Tensor:
    segments = (TrainingSegment((1,) * len(token_ids)),)
    batch = Batch(token_ids.long(), token_ids.long(), segments, tuple(_spans(slots, placed)))
    return decoder.final_norm(decoder.forward(batch))


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", MODEL_SHAPES)
@pytest.mark.parametrize("name", BATCHES)
def test_a_small_batch_goes_through_the_model_as_spans_do(name: str, shape: str, dtype: torch.dtype) -> None:
    """In half precision it is as near to fp32 as the plain decoder in it is. One graph for all adapters."""
    torch.backends.cuda.matmul.allow_tf32 = False
    slots, spec = BATCHES[name], MODEL_SHAPES[shape]
    weights = {torch.float32: _random_weights(spec, torch.float32)}
    weights[dtype] = _copied(spec, weights[torch.float32], dtype)
    adapters = [_adapter(spec, seed, r, modules) for seed, (r, modules) in enumerate(zip(RANKS, MODULES, strict=True))]
    with torch.inference_mode(False):
        stacks = {kind: LoraStacks(spec, 3, 64, CUDA, kind) for kind in weights}
    token_ids = _token_ids(len(slots))
    grouped = GroupedLora.of(stacks[dtype], [-1] * len(slots))
    model = _Model(spec, weights[dtype])
    replay, (ours,) = _capture(lambda: [model(token_ids, grouped)])
    for order in ((0, 1, 2), (2, 0, 1)):
        plain = {}
        for kind, stack in stacks.items():
            placed = [stack.load(slot, stack.pack(adapters[which])) for slot, which in enumerate(order)]
            plain[kind] = _plain(Decoder(spec, weights[kind]), token_ids, slots, placed).float()
        _set(grouped, slots)
        replay()
        exact = plain[torch.float32]
        error = torch.linalg.norm(ours.float() - exact) / torch.linalg.norm(exact)
        plain_error = torch.linalg.norm(plain[dtype] - exact) / torch.linalg.norm(exact)
        assert error < 1.2 * plain_error + 1e-4


def _copied(spec: ModelSpec, weights: DecoderWeights, dtype: torch.dtype) -> DecoderWeights:
    copy = allocate(spec, CUDA, dtype)
    for to, source in zip(_tensors(copy), _tensors(weights), strict=True):
        to.copy_(source)
        source.copy_(to)  # the same values, rounded, in both
    return copy


def _tensors(weights: DecoderWeights) -> list[torch.Tensor]:
    layers = [[layer.input_norm, layer.mlp_norm, *(base.weight for base in _bases(layer))] for layer in weights.layers]
    return [weights.embedding, weights.head, weights.final_norm, *itertools.chain.from_iterable(layers)]


@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 16, 17, 33, 63, 64])
@pytest.mark.parametrize("order", [list, sorted])
def test_pieces_are_neighbouring_rows_of_one_adapter(num_rows: int, order: Callable[[list[int]], list[int]]) -> None:
    from cotenant.models.kernels.lora_shrink import find_pieces

    drawn = random.Random(num_rows)
    for _ in range(10):
        slots = order([drawn.choice([-1, 0, 1, 2]) for _ in range(num_rows)])
        ranks = [16 * (slot + 1) for slot in slots]
        pieces: list[list[int]] = []  # first row, rows, slot, rank
        for row, (slot, rank) in enumerate(zip(slots, ranks, strict=True)):
            if slot >= 0 and row % 8 and slots[row - 1] == slot:
                pieces[-1][1] += 1
            elif slot >= 0:
                pieces.append([row, 1, slot, rank])
        found = find_pieces(*torch.tensor([slots, ranks], dtype=torch.int32, device=CUDA)).tolist()
        assert found[: len(pieces)] == pieces
        assert all(length == 0 for _, length, *_ in found[len(pieces) :])


@torch.inference_mode()
@pytest.mark.parametrize("num_rows", [1, 9, 32, 33, 64])
def test_a_row_does_not_depend_on_the_others(num_rows: int) -> None:
    """Not one bit: not on their order, their adapters, nor on whether theirs are finite."""
    stacks = LoraStacks(SMALL, 3, 64, CUDA, torch.bfloat16)
    stacks.storage.normal_(0, 0.02)
    stacks.storage[2] = float("nan")
    stacks.ranks[:] = [16, 48, 32]
    model = _Model(SMALL, _random_weights(SMALL, torch.bfloat16))
    token_ids = torch.full((num_rows,), 5, dtype=torch.int32, device=CUDA)

    def row(slots: Sequence[int], which: int) -> torch.Tensor:
        return model(token_ids, GroupedLora.of(stacks, slots))[which].clone()

    base = model(token_ids)[0].clone()
    fewest = 1 if num_rows <= 32 else 33
    for own in (-1, 0, 1):
        with_few = model(token_ids[:fewest], _uniform(stacks, fewest, own))[0].clone()
        # Without adapters anywhere the products are cut another way, which rounds another way.
        error = (with_few.float() - base.float()).norm() / base.float().norm()
        assert bool(error < 0.02) == (own < 0)
        for which in {0, num_rows // 2, num_rows - 1}:
            for others in ([own], [2], [-1], [1, 1, 0, 2, -1], [0, own, 2]):
                slots = [others[index % len(others)] for index in range(num_rows)]
                slots[which] = own
                assert torch.equal(row(slots, which), with_few)


@torch.inference_mode()
@pytest.mark.parametrize("num_rows", [8, 32, 64])
@pytest.mark.parametrize("is_compressed", [False, True])
def test_adapters_leave_a_products_own_sums_as_they_are(num_rows: int, is_compressed: bool) -> None:
    """Not one bit, however many SMs it is cut for; nor does what is computed beside it depend on those."""
    from cotenant.models.kernels.lora_shrink import find_pieces
    from cotenant.models.kernels.skinny import unfinished_product

    spec = SHAPES["8b"]
    stacks = LoraStacks(spec, 2, 16, CUDA, torch.bfloat16)
    stacks.storage.normal_(0, 0.02)
    stacks.ranks[:] = [16, 16]
    grouped = GroupedLora.of(stacks, [(0, 1, 1, -1)[row % 4] for row in range(num_rows)])
    grouped = replace(grouped, pieces=find_pieces(grouped.slots, grouped.ranks))
    weights = _random_weights(spec, torch.bfloat16)
    for base in _bases((with_compressed(weights) if is_compressed else weights).layers[0]):
        assert (base.compressed is not None) == is_compressed
        x = torch.randn(num_rows, base.weight.shape[1], device=CUDA).to(torch.bfloat16)
        adapters = grouped.group(base, 0)
        alone, beside = (unfinished_product(x, base, each) for each in (None, adapters))
        assert torch.equal(beside.sums, alone.sums)
        assert beside.delta is not None
        for count in (16, 48, 80):
            with sms_at_hand(count):
                few = unfinished_product(x, base, adapters)
            assert torch.equal(few.sums, alone.sums)
            assert few.delta is not None
            has_adapter = grouped.slots >= 0
            assert torch.equal(few.delta.sums[:, has_adapter], beside.delta.sums[:, has_adapter])


@torch.inference_mode()
@pytest.mark.parametrize("num_rows", [24, 80])
def test_the_rows_that_are_wanted_have_their_own_adapters(num_rows: int) -> None:
    """The last layer goes on for them alone: other pieces than the whole batch has."""
    stacks = LoraStacks(SMALL, 3, 64, CUDA, torch.bfloat16)
    stacks.storage.normal_(0, 0.02)
    stacks.ranks[:] = [16, 48, 32]
    model = _Model(SMALL, _random_weights(SMALL, torch.bfloat16), num_rows)
    grouped = GroupedLora.of(stacks, [(0, 0, 2, -1, 1, 1, 1, 2)[row % 8] for row in range(num_rows)])
    rows = torch.tensor([0, 3, 8, 9, 12, 17, 20, num_rows - 1], device=CUDA)
    whole = model(_token_ids(num_rows), grouped).float()
    wanted = model(_token_ids(num_rows), grouped, rows).float()
    assert (wanted - whole[rows]).norm() / whole[rows].norm() < 0.02
    for others in (rows - 1, rows + 1):  # whose adapters are others
        assert (wanted - whole[others % num_rows]).norm() / wanted.norm() > 0.1


def _uniform(stacks: LoraStacks, num_rows: int, slot: int) -> GroupedLora:
    return GroupedLora.of(stacks, [slot] * num_rows)


@torch.inference_mode()
def test_a_row_of_a_large_batch_does_not_depend_on_the_others() -> None:
    """Not one bit: not on their number, their order, their adapters, nor on whether theirs are finite."""
    spec = SHAPES["8b"]
    stacks = LoraStacks(spec, 3, 64, CUDA, torch.bfloat16)
    stacks.storage.normal_(0, 0.02)
    stacks.storage[2] = float("nan")
    stacks.ranks[:] = [16, 48, 32]
    base = _bases(allocate(spec, CUDA, torch.bfloat16).layers[0])[2]
    base.weight.zero_()  # leaves the deltas alone
    x = torch.randn(1, 4096, device=CUDA).to(torch.bfloat16)
    for own in (0, 1):
        (alone,) = linear(x, base, 0, (), GroupedLora.of(stacks, [own]))
        assert alone.any()
        for others in ([own] * 40, [2, 2, own], [1 - own] * 20 + [2, own, own], [-1] * 300 + [own] * 17):
            slots = [*others[:-1], own, *others]
            many = torch.randn(len(slots), 4096, device=CUDA).to(torch.bfloat16)
            many[len(others) - 1] = x
            assert torch.equal(linear(many, base, 0, (), GroupedLora.of(stacks, slots))[len(others) - 1], alone)


@torch.inference_mode()
def test_adapters_cost_little_in_a_decode_step() -> None:
    """An 8B model's layers without attention, adapters of rank 16. The aim is a tenth of a whole step (0.64 ms on an
    H200) for 8 adapters and a quarter (1.6 ms) for 64; the bounds here only keep what has been reached."""
    model = _Model(LLAMA_8B, _random_weights(LLAMA_8B, torch.bfloat16))
    stacks = LoraStacks(LLAMA_8B, 64, 64, CUDA, torch.bfloat16)
    stacks.storage.normal_(0, 0.02)
    stacks.ranks[:] = [16] * 64
    generator = torch.Generator().manual_seed(1)
    times_ms = {}
    for num_rows, counts in ((64, (0, 1, 8, 64)), (32, (8,)), (16, (8,))):
        token_ids = _token_ids(num_rows)
        grouped = GroupedLora.of(stacks, [-1] * num_rows)
        times_ms[f"{num_rows} rows"] = _median_ms(_capture(partial(model.without_attention, token_ids, None))[0])
        replay, _ = _capture(partial(model.without_attention, token_ids, grouped))
        for count in counts:
            chosen = torch.randperm(64, generator=generator)[:count]
            _set(grouped, chosen[torch.arange(num_rows) * count // num_rows].tolist() if count else [-1] * num_rows)
            times_ms[f"{num_rows} rows, {count} adapters"] = _median_ms(replay)
    print(json.dumps({"device": torch.cuda.get_device_name(), "ms": times_ms}, indent=1))
    assert times_ms["64 rows, 8 adapters"] <= times_ms["64 rows"] + 1.0
    assert times_ms["64 rows, 64 adapters"] <= times_ms["64 rows"] + 2.4


def _median_ms(replay: Callable[[], None], count: int = 30) -> float:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    for _ in range(3):
        replay()
    for event in events[:-1]:
        event.record()
        replay()
    events[-1].record()
    torch.cuda.synchronize()
    return round(statistics.median(start.elapsed_time(end) for start, end in itertools.pairwise(events)), 4)
