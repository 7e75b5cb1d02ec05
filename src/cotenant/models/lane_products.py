"""Products of training on a part of the SMs, by whichever of the library's algorithms is fastest there.

An output is cut into tiles, and what counts is how many rounds of them the SMs need: 256 tiles are two rounds on 132
SMs, and four on 84, of which the last has four tiles. The library chooses for all of a device's SMs; told how many
there are, it does not choose well either (bench/lane_products.py). So its algorithms are tried, each a few times in
the job's own layers, before those are captured, and timed on the device: nothing waits for it. That is beside the
batches that the partition is for, which read memory meanwhile: what reads least may be fastest there, and is not alone.
All algorithms add up in the same order, as torch's does for so many rows, so a layer has the same bits with a partition
or without, tried or settled. What was settled beside one load holds for all that come later.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from cotenant.device.cuda.cublaslt import Operands, Product
from cotenant.device.cuda.graphs import current_lane
from cotenant.device.cuda.pacing import note_trial
from cotenant.device.cuda.partitions import sms_of_lane
from cotenant.models.trials import Trials

logger = logging.getLogger(__name__)

# Smaller products are not worth a choice: they take some tens of microseconds. For fewer rows torch's library may
# divide a product between thread blocks, which changes its bits.
_LEAST_OPERATIONS = 1 << 33
_LEAST_ROWS = 1024
# What keeps the host for longer has loaded a kernel, and the device has waited: no measure.
_LONGEST_LAUNCH_S = 0.5e-3
_FEW_ROWS = 128
_BY_TORCH = -1  # the library's own choice is among what is tried


def add_product(out: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """``out += x @ matrix``: [rows, in] and [in, out] -> ``out`` [rows, out], outside autograd."""
    choice = _choice(out, x, matrix)
    if choice is None:
        return out.addmm_(x, matrix)
    choice.add(out, x, matrix)
    return out


def load_algorithms(matrix: torch.Tensor, num_rows: int, num_sms: int) -> Iterator[None]:
    """Have the library load what ``add_product`` would try for ``num_rows`` and ``matrix`` [in, out] on so many SMs,
    with a pause behind each algorithm. They run on the current stream; nothing that trains may be in flight."""
    if not _are_worth_it(num_rows, matrix):
        return
    inner, out_features = matrix.shape
    with suppress(RuntimeError):  # without the library or memory nothing is tried, either
        x, out = matrix.new_zeros(_FEW_ROWS, inner), matrix.new_zeros(_FEW_ROWS, out_features)
        operands = Operands.of(out, x, matrix)
        if operands is not None:
            product = Product(operands._replace(num_rows=num_rows), num_sms, matrix.device)
            yield from product.load(out, x, matrix)


def take_settled() -> bool:
    """Whether, since this was asked last, nothing was launched that is still being tried."""
    settled = not _state.was_tried
    _state.was_tried = False
    return settled


def num_trials() -> int:
    """That there have been in this process."""
    return _state.num_trials


@dataclass
class _State:
    was_tried: bool = False
    num_trials: int = 0
    was_told: bool = False  # that there are none
    choices: dict[tuple[Operands, int], _Choice | None] = field(default_factory=dict)


class _Trial(NamedTuple):
    algorithm: int
    start: torch.cuda.Event
    end: torch.cuda.Event


class _Choice:
    """Among the algorithms for one product on so many SMs."""

    def __init__(self, operands: Operands, num_sms: int, device: torch.device) -> None:
        self._product = Product(operands, num_sms, device)
        self._name = f"{operands.num_rows} x {operands.num_in} x {operands.num_out} on {num_sms} SMs"
        self._trials = Trials((_BY_TORCH, *range(len(self._product.algorithms))))
        self._in_flight: deque[_Trial] = deque()

    def add(self, out: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor) -> None:
        if self._trials.settled is None and not torch.cuda.is_current_stream_capturing():
            self._collect()
            tried = self._trials.next()
            if tried is not None:
                self._try(tried, out, x, matrix)
                return
            self._tell()
        self._launch(self._trials.best, out, x, matrix)

    def _launch(self, algorithm: int, out: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor) -> None:
        if algorithm == _BY_TORCH:
            out.addmm_(x, matrix)
        else:
            self._product.add(algorithm, out, x, matrix)

    def _try(self, algorithm: int, out: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor) -> None:
        _state.was_tried = True
        _state.num_trials += 1
        if not self._trials.is_ordinary(algorithm):
            note_trial()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        begin_s = time.perf_counter()
        try:
            self._launch(algorithm, out, x, matrix)
        except RuntimeError as error:
            if algorithm == _BY_TORCH:
                raise
            logger.debug("%s: an algorithm cannot: %s", self._name, error)
            self._trials.drop(algorithm)
            out.addmm_(x, matrix)
            return
        if time.perf_counter() - begin_s < _LONGEST_LAUNCH_S:
            end.record()
            self._in_flight.append(_Trial(algorithm, start, end))

    def _collect(self) -> None:
        while self._in_flight and self._in_flight[0].end.query():
            trial = self._in_flight.popleft()
            self._trials.note(trial.algorithm, trial.start.elapsed_time(trial.end))

    def _tell(self) -> None:
        self._in_flight.clear()
        times_ms = map(self._trials.median_ms, (self._trials.best, _BY_TORCH))
        logger.debug("%s: %.3f ms, by torch's choice %.3f ms", self._name, *times_ms)


def _choice(out: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor) -> _Choice | None:
    """None: as torch does it. On all SMs the library chooses well."""
    num_sms = _num_sms(x) if _are_worth_it(len(x), matrix) else None
    operands = None if num_sms is None else Operands.of(out, x, matrix)
    if num_sms is None or operands is None:
        return None
    key = (operands, num_sms)
    if key not in _state.choices:
        if torch.cuda.is_current_stream_capturing():
            return None
        try:
            _state.choices[key] = _Choice(operands, num_sms, x.device)
        except torch.OutOfMemoryError:
            return None  # there may be some the next time
        except RuntimeError as error:
            level = logging.DEBUG if _state.was_told else logging.WARNING
            logger.log(level, "products on a part of the SMs are as torch does them: %s", error)
            _state.choices[key], _state.was_told = None, True
    return _state.choices[key]


def _num_sms(x: torch.Tensor) -> int | None:
    """Of the partition whose lane is the current one. None: there is none."""
    return sms_of_lane(current_lane()) if x.is_cuda else None


def _are_worth_it(num_rows: int, matrix: torch.Tensor) -> bool:
    return num_rows >= _LEAST_ROWS and 2 * num_rows * matrix.numel() >= _LEAST_OPERATIONS


_state = _State()
