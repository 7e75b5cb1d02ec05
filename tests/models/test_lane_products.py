"""How algorithms for a partition's products are tried, with a library that only pretends to be one."""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
from typing import Any

import pytest
import torch

from cotenant.device.cuda import cublaslt, pacing
from cotenant.models import lane_products
from cotenant.models.lane_products import add_product, load_algorithms, num_trials, take_settled

MOST_TURNS = 200
FASTEST, SPLIT, FAILING = 2, 3, 101
# By their first number; those above 100 are named for a part of the SMs.
TIMES_MS = {0: 1.3, 1: 1.1, FASTEST: 0.8, SPLIT: 0.1, 100: 1.2, FAILING: 0.1, 102: 0.9}
BY_TORCH_MS = 1.0


class Library:
    """In place of cuBLASLt, and of a device whose clock goes on with each product."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.launched: list[int] = []
        self.refuses: Exception | None = None

    def layout(self, *_: int) -> ctypes.c_void_p:
        return ctypes.c_void_p()

    def description(self, is_transposed: bool, num_sms: int | None) -> ctypes.c_void_p:
        return ctypes.c_void_p(0 if num_sms is None else num_sms)

    def algorithms(self, description: ctypes.c_void_p, layouts: object) -> list[Any]:
        if self.refuses is not None:
            raise self.refuses
        is_part = bool(description.value)
        return [_algorithm(number) for number in TIMES_MS if (number >= 100) == is_part]

    def adds_in_one_go(self, algorithm: Any) -> bool:
        return int(algorithm.data[0]) != SPLIT

    def multiply(self, description: object, layouts: object, algorithm: Any, *operands: torch.Tensor) -> None:
        out, x, matrix = operands
        number = int(algorithm.data[0])
        if number == FAILING:
            raise RuntimeError("this one cannot")
        self.launched.append(number)
        self.now_ms += TIMES_MS[number]
        out.addmm_(x, matrix)


def _algorithm(number: int) -> Any:
    return cublaslt._Algorithm((ctypes.c_uint64 * 8)(number))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at_ms = 0.0
            self._is_start = next(count) % 2 == 0
            self._before = len(found.launched)

        def record(self) -> None:
            if not self._is_start and len(found.launched) == self._before:
                found.now_ms += BY_TORCH_MS  # it was torch's product
            self.at_ms = found.now_ms

        def query(self) -> bool:
            return True

        def elapsed_time(self, end: Event) -> float:
            return end.at_ms - self.at_ms

    count = itertools.count()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cublaslt, "_library", lambda: found)
    monkeypatch.setattr(cublaslt, "_workspace", lambda device: torch.empty(0))
    monkeypatch.setattr(cublaslt, "_lies_well", torch.Tensor.is_contiguous)
    monkeypatch.setattr(lane_products, "_num_sms", lambda x: 84)
    monkeypatch.setattr(lane_products, "_LEAST_OPERATIONS", 0)
    monkeypatch.setattr(lane_products, "_LONGEST_LAUNCH_S", math.inf)  # here a launch is the product itself
    monkeypatch.setattr(lane_products, "_state", lane_products._State())
    return found


def operands(num_rows: int = 1024) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, weight = (torch.randn(rows, 16, dtype=torch.bfloat16) for rows in (num_rows, 24))
    return torch.randn(num_rows, 24, dtype=torch.bfloat16), x, weight.T


def settle(out: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor) -> int:
    """How many turns it takes."""
    expected = out.clone().addmm_(x, matrix)
    for turn in range(MOST_TURNS):
        assert torch.equal(add_product(out.clone(), x, matrix), expected)
        if take_settled():
            return turn
    raise AssertionError(f"not settled in {MOST_TURNS} turns")


def test_the_fastest_that_has_the_same_bits_and_does_not_fail_is_settled_on(library: Library) -> None:
    num_turns = settle(*operands())
    assert num_trials() == num_turns
    assert library.launched[-1] == FASTEST
    assert set(library.launched) == set(TIMES_MS) - {SPLIT, FAILING}
    before = len(library.launched)
    assert settle(*operands()) == 0, "it holds for all products of that shape"
    assert library.launched[before:] == [FASTEST]


def test_while_a_graph_is_captured_nothing_is_tried(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert settle(*operands()) == 0
    assert not library.launched
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    add_product(*operands())
    assert not take_settled()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    before = num_trials()
    assert settle(*operands()) == 0
    assert num_trials() == before


def test_a_tasklet_with_an_algorithm_that_nobody_has_timed_is_no_measure(library: Library) -> None:
    is_trial = []
    while True:
        pacing._Launch.is_trial = False
        add_product(*operands())
        is_trial.append(pacing._Launch.is_trial)
        if take_settled():
            break
    assert is_trial[:2] == [False, True], "torch's own choice is one"
    assert not is_trial[-1]


@pytest.mark.parametrize("num_rows", [128, 1023])
def test_few_rows_are_left_to_torch(library: Library, num_rows: int) -> None:
    assert settle(*operands(num_rows)) == 0
    assert not library.launched


def test_where_torchs_choice_has_other_bits_nothing_else_is_tried(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "adds_in_one_go", lambda algorithm: int(algorithm.data[0]) != 0)
    settle(*operands())
    assert not library.launched


def test_without_the_library_all_is_torchs_and_the_log_says_so_once(
    library: Library, caplog: pytest.LogCaptureFixture
) -> None:
    library.refuses = RuntimeError("there is none")
    with caplog.at_level(logging.WARNING):
        for num_rows in (1024, 2048):
            assert settle(*operands(num_rows)) == 0
            assert list(load_algorithms(operands()[2], num_rows, 84)) == []
    (warning,) = caplog.messages
    assert "there is none" in warning
    assert not library.launched


def test_for_want_of_memory_nothing_is_tried_until_there_is_some(library: Library) -> None:
    library.refuses = torch.OutOfMemoryError("none left")
    assert settle(*operands()) == 0
    library.refuses = None
    assert settle(*operands()) > 0


def test_kernels_are_loaded_one_at_a_time(library: Library) -> None:
    loaded = [list(library.launched) for _ in load_algorithms(operands()[2], 2048, 84)]
    assert [len(launched) for launched in loaded] == [1, 2, 3, 4, 4, 5], "one of them fails"
    assert take_settled()
    assert num_trials() == 0
