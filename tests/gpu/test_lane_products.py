"""Training's products on a part of the SMs: the same bits as everywhere, whichever algorithm computes them."""

from __future__ import annotations

import pytest
import torch

from cotenant.core.errors import InvalidInputError
from cotenant.device.cuda.cublaslt import Operands, Product
from cotenant.device.cuda.graphs import LaneGraphs, capture_graph
from cotenant.device.cuda.partitions import split_multiprocessors
from cotenant.models.lane_products import add_product, load_algorithms, take_settled

MOST_TRIALS = 150
SHAPES = {  # rows, output features, input features, whether the matrix is transposed
    "forward": (1920, 4096, 2048, True),
    "backward": (1024, 2048, 4096, False),
    "deep": (1024, 2048, 8192, True),
    "deep backward": (1024, 4096, 28672, False),
}


def operands(rows: int, out: int, inner: int, is_transposed: bool, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    options = {"device": "cuda", "dtype": dtype}
    matrix = torch.randn(out, inner, **options).T if is_transposed else torch.randn(inner, out, **options)  # type: ignore[call-overload]
    return torch.randn(rows, out, **options), torch.randn(rows, inner, **options), matrix * 0.02  # type: ignore[call-overload]


@pytest.fixture(scope="module")
def lane() -> torch.cuda.Stream:
    """Where training runs in a partition."""
    device = torch.device("cuda", 0)
    try:
        partitions = split_multiprocessors(
            device, [torch.cuda.get_device_properties(device).multi_processor_count // 3]
        )
    except (InvalidInputError, RuntimeError) as error:
        pytest.skip(f"no green contexts: {error}")
    (streams,) = partitions.values()
    return streams.best_effort


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_all_algorithms_have_torchs_bits(shape: tuple[int, int, int, bool], dtype: torch.dtype) -> None:
    out, x, matrix = operands(*shape, dtype)
    expected = out.clone().addmm_(x, matrix)
    known = Operands.of(out, x, matrix)
    assert known is not None
    product = Product(known, 84, out.device)
    assert len(product.algorithms) > 1 or shape not in (SHAPES["forward"], SHAPES["backward"])
    for index in range(len(product.algorithms)):
        found = out.clone()
        product.add(index, found, x, matrix)
        assert torch.equal(found, expected), f"algorithm {index}"


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_product_is_tried_and_then_settled(lane: torch.cuda.Stream, shape: tuple[int, int, int, bool]) -> None:
    out, x, matrix = operands(*shape, torch.bfloat16)
    expected = out.clone().addmm_(x, matrix)
    torch.cuda.synchronize()
    take_settled()
    with torch.cuda.stream(lane):
        was_tried = 0
        for _ in range(MOST_TRIALS):
            found = add_product(out.clone(), x, matrix)
            lane.synchronize()
            assert torch.equal(found, expected)
            if take_settled():
                break
            was_tried += 1
        assert 3 <= was_tried < MOST_TRIALS
        assert take_settled(), "nothing was launched since"
        # A capture launches nothing that is timed.
        target = out.clone()
        graph = capture_graph(lambda: target.copy_(add_product(out.clone(), x, matrix)), torch.cuda.graph_pool_handle())  # type: ignore[arg-type, return-value]
        graph.replay()
        lane.synchronize()
        assert torch.equal(target, expected)


def test_what_is_captured_before_is_not_tried(lane: torch.cuda.Stream) -> None:
    out, x, matrix = operands(2048, 2048, 2304, False, torch.bfloat16)
    expected = out.clone().addmm_(x, matrix)
    torch.cuda.synchronize()
    take_settled()
    target = out.clone()
    with torch.cuda.stream(lane):
        graph = capture_graph(
            lambda: target.copy_(add_product(out.clone(), x, matrix)),  # type: ignore[arg-type, return-value]
            torch.cuda.graph_pool_handle(),
            warm_up=False,
        )
        graph.replay()
        lane.synchronize()
    assert take_settled()
    assert torch.equal(target, expected)


def test_small_ones_and_all_sms_are_left_to_torch(lane: torch.cuda.Stream) -> None:
    take_settled()
    out, x, matrix = operands(*SHAPES["forward"], torch.bfloat16)
    assert torch.equal(add_product(out.clone(), x, matrix), out.clone().addmm_(x, matrix))
    small = operands(128, 512, 512, True, torch.bfloat16)
    wide = tuple(each.float() for each in (out, x, matrix))
    torch.cuda.synchronize()
    with torch.cuda.stream(lane):
        for out, x, matrix in (small, wide):
            assert torch.equal(add_product(out.clone(), x, matrix), out.clone().addmm_(x, matrix))
    assert take_settled()


def test_operands_that_lie_otherwise_are_left_to_torch() -> None:
    out, x, matrix = operands(*SHAPES["backward"], torch.bfloat16)
    assert Operands.of(out, x[:, :4088], matrix[:4088]) is None
    assert Operands.of(out[:, :2040], x, matrix[:, :2040]) is None
    assert Operands.of(out.float(), x, matrix) is None


def test_algorithms_are_loaded_without_a_trial(lane: torch.cuda.Stream) -> None:
    _, _, matrix = operands(*SHAPES["forward"], torch.bfloat16)
    take_settled()
    for each in (matrix, matrix[:, :24], matrix.float()):
        list(load_algorithms(each, 2048, 84))
    torch.cuda.synchronize()
    assert take_settled()


def test_a_lane_captures_once_its_products_are_settled(lane: torch.cuda.Stream) -> None:
    out, x, matrix = operands(1920, 2048, 4096, True, torch.bfloat16)
    expected = out.clone().addmm_(x, matrix)
    target = torch.empty_like(out)
    torch.cuda.synchronize()
    graphs = LaneGraphs(torch.cuda.graph_pool_handle(), take_settled)
    take_settled()

    def launch() -> None:
        target.copy_(out)
        add_product(target, x, matrix)

    with torch.cuda.stream(lane):
        turns = 0
        while len(graphs) == 0 and turns < MOST_TRIALS:
            turns += 1
            target.zero_()
            graphs.run("piece", "kind", launch)
            lane.synchronize()
            assert torch.equal(target, expected)
        assert len(graphs) == 1
        assert turns > 3
