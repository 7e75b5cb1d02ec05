"""How the product of a few rows with a large matrix is cut into programs, by the SMs that it has.

What bounds it is how fast an SM takes in data, the matrix and the input together, and that no SM is idle while others
work. Few programs of many columns read the input seldom; many of few columns divide evenly; and those that are on an SM
at once should have much of its shared memory to read ahead into. Sums are added up in the same order whatever is
chosen, so rows do not depend on it by a bit; only ``splits`` would, and follow from the shape.

Chosen by what was fastest on an H200, alone on all of its SMs and beside training on 16 to 80 of them
(bench/skinny_tilings.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import NamedTuple

from cotenant.models.compressed import BLOCK_BYTES, BLOCK_COLUMNS, BLOCK_DEPTH, BLOCK_WARPS, MAX_SPLITS

MAX_ROWS = 64
# The most programs that a product is split into: two on each multiprocessor of a Hopper GPU.
_MAX_SPLIT_PROGRAMS = 264
_MIN_SPLIT_DEPTH = 512
_HOPPER_SMS = 132
_MAX_COMPRESSED_STAGES = 5
_SMALL_OUT = 8192
# So many programs of 64 columns are enough for a Hopper GPU's SMs if each is halved; fewer are of fewer columns.
_ENOUGH_PROGRAMS = 64
_LARGE_SHARED_BYTES = 200 * 1024
_RESERVED_BYTES = 1024  # of an SM's shared memory, by each program there
_BARRIER_BYTES = 1024  # and more than a program's barriers take
_FEW = 2 / 3  # of all SMs: up to there each takes in as much as it can
# For a few SMs: columns, depth and stages; of equal ones the first, for smaller programs leave less of a last turn.
# Those of 32 columns are for small matrices, and have copies by the threads: by TMA they were not measured with any.
_CUTS = ((64, 64, 6), (64, 64, 4), (128, 64, 5), (128, 64, 4), (128, 64, 3), (128, 128, 5), (32, 256, 5))
# With so much of what it reads on its way, an SM has it half as fast as with very much.
_HALF_RATE_BYTES = 30_000
# Programs begin by waiting, and end by adding up: that takes an SM as long as reading so much.
_ROUND_BYTES = 200_000
_sms_at_hand: ContextVar[int | None] = ContextVar("sms_at_hand", default=None)


@contextmanager
def sms_at_hand(count: int) -> Iterator[None]:
    """Products that are launched or captured inside are cut for so many SMs; outside, for all of the device's."""
    token = _sms_at_hand.set(count)
    try:
        yield
    finally:
        _sms_at_hand.reset(token)


def num_sms_at_hand() -> int | None:
    """None: all."""
    return _sms_at_hand.get()


class Tiling(NamedTuple):
    """How a product is cut: ``rows`` of the input at once, ``columns`` of the output per program, ``depth`` input
    features per turn, and the input features over ``splits`` programs. ``by_tma``: the memory's own engine copies whole
    tiles, where else each thread copies some of their bytes."""

    rows: int
    columns: int
    depth: int
    splits: int
    num_warps: int
    num_stages: int
    by_tma: bool = False

    @property
    def stage_bytes(self) -> int:
        """Shared memory of each stage, for elements of two bytes."""
        return (self.rows + self.columns) * self.depth * 2

    def num_programs(self, num_out: int) -> int:
        return num_out // self.columns * self.splits

    def runs_at_once(self, num_out: int, sms: Multiprocessors) -> bool:
        """Whether a product of more than 32 rows was cut into no more programs than find room on a Hopper GPU, and the
        device is one. Follows from the shape, whatever the SMs at hand."""
        return sms.are_large and self.rows == MAX_ROWS and num_out // 64 * self.splits <= _MAX_SPLIT_PROGRAMS

    def leaving_room(self, num_out: int, sms: Multiprocessors) -> Tiling:
        """For a launch that has programs of other work behind the product's, each with as much shared memory. Where all
        of the product's run at once, two on an SM, a third finds room there: so the others run beside them, and not
        when they have ended; and a second one where an SM has one, of up to 32 rows."""
        if self.columns != 64 or not sms.are_large:
            return self
        if self.runs_at_once(num_out, sms):
            return self._replace(depth=64, num_stages=4)
        return self._replace(num_stages=min(self.num_stages, sms.stages(self, 2)))


class CompressedTiling(NamedTuple):
    """The same of a product with a compressed matrix, which a program takes by blocks. One stage fewer than
    ``num_stages`` is read ahead."""

    rows: int
    splits: int
    num_stages: int
    columns: int = BLOCK_COLUMNS
    depth: int = BLOCK_DEPTH
    num_warps: int = BLOCK_WARPS

    @property
    def stage_bytes(self) -> int:
        """Shared memory of what a turn reads."""
        return self.rows * BLOCK_DEPTH * 2 + BLOCK_BYTES

    @property
    def sums_bytes(self) -> int:
        """Shared memory that sums pass through in the end."""
        return self.rows * BLOCK_COLUMNS * 2

    def num_programs(self, num_out: int) -> int:
        return num_out // BLOCK_COLUMNS * self.splits

    def runs_at_once(self, num_out: int, _: Multiprocessors) -> bool:
        """Whether each program has an SM of a Hopper GPU to itself. Follows from the shape."""
        return self.num_programs(num_out) <= _HOPPER_SMS

    def leaving_room(self, num_out: int, _: Multiprocessors) -> CompressedTiling:
        """For a launch that has programs of other work behind the product's: beside one of the product's on an SM there
        is room for one of them."""
        return self._replace(num_stages=min(self.num_stages, 4))


class Multiprocessors(NamedTuple):
    """``num`` of the device's ``total`` SMs; a program may take ``shared_bytes`` of one's shared memory."""

    num: int
    total: int
    shared_bytes: int

    @property
    def are_few(self) -> bool:
        return self.num <= _FEW * self.total

    @property
    def are_large(self) -> bool:
        """Whether each has as much shared memory as a Hopper GPU's. Such GPUs have its TMA as well."""
        return self.shared_bytes >= _LARGE_SHARED_BYTES

    def stages(self, tiling: Tiling, num_programs: int) -> int:
        """So many that this many programs find room on one."""
        each_bytes = (self.shared_bytes + _RESERVED_BYTES) // num_programs - _RESERVED_BYTES - _BARRIER_BYTES
        return each_bytes // tiling.stage_bytes

    def at_once(self, tiling: Tiling) -> int:
        """How many programs find room on one."""
        each_bytes = tiling.num_stages * tiling.stage_bytes + _RESERVED_BYTES + _BARRIER_BYTES
        return (self.shared_bytes + _RESERVED_BYTES) // each_bytes


def choose_tiling(
    num_rows: int, num_out: int, num_in: int, sms: Multiprocessors, *, is_finished: bool = False
) -> Tiling | None:
    """None for a matrix that is not cut evenly. ``is_finished``: up to 32 rows are not in parts."""
    rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else MAX_ROWS
    tiling = None
    if rows == MAX_ROWS:
        tiling = _split(rows, num_out, num_in)
        if tiling is not None and sms.are_large:
            tiling = _on_large(rows, num_out, num_in, tiling.splits, sms)
    elif sms.are_large and num_out % 64 == 0 and num_in % 128 == 0:
        tiling = _on_large(rows, num_out, num_in, 1 if is_finished else _few_splits(num_out, num_in), sms)
    elif num_out <= 4096 and num_out % 32 == 0 and num_in % 256 == 0:
        tiling = Tiling(rows, 32, 256, 1, 4, 5)
    elif num_out % 64 == 0 and num_in % 128 == 0:
        tiling = Tiling(rows, 64, 128, 1, 4, 5 if num_out <= _SMALL_OUT else 4)
    return tiling and tiling._replace(num_stages=max(1, min(tiling.num_stages, sms.shared_bytes // tiling.stage_bytes)))


def _few_splits(num_out: int, num_in: int) -> int:
    """In two, where there would be too few programs for the SMs of a Hopper GPU but enough to divide."""
    is_halved = _ENOUGH_PROGRAMS <= num_out // 64 <= _HOPPER_SMS // 2 and num_in % 256 == 0
    return 2 if is_halved and num_in >= 2 * _MIN_SPLIT_DEPTH else 1


@lru_cache(maxsize=1024)
def _on_large(rows: int, num_out: int, num_in: int, splits: int, sms: Multiprocessors) -> Tiling:
    """On a few SMs, each of which takes in what it can, the least work for the one with the most; on more they share
    what the memory gives."""
    if not sms.are_few:
        return _on_many(rows, num_out, num_in, splits, sms)
    candidates = [Tiling(rows, columns, depth, splits, 4, stages, columns > 32) for columns, depth, stages in _CUTS]
    fitting = [
        each
        for each in candidates
        if num_out % each.columns == 0 and num_in % (splits * each.depth) == 0 and sms.at_once(each) > 0
    ]
    return min(fitting, key=lambda tiling: _longest(tiling, num_out, num_in, sms))


def _longest(tiling: Tiling, num_out: int, num_in: int, sms: Multiprocessors) -> float:
    """How long the SM with the most programs takes, in bytes that it could have taken in meanwhile."""
    program_bytes = (tiling.rows + tiling.columns) * num_in // tiling.splits * 2
    left, at_once, longest = -(-tiling.num_programs(num_out) // sms.num), sms.at_once(tiling), 0.0
    while left > 0:
        count = min(left, at_once)
        ahead_bytes = count * (tiling.num_stages - 1) * tiling.stage_bytes
        longest += count * program_bytes * (1 + _HALF_RATE_BYTES / ahead_bytes) + _ROUND_BYTES
        left -= count
    return longest


def _on_many(rows: int, num_out: int, num_in: int, splits: int, sms: Multiprocessors) -> Tiling:
    if rows == MAX_ROWS:
        is_at_once = num_out // 64 * splits <= _MAX_SPLIT_PROGRAMS or num_out % 128 != 0
        return Tiling(rows, 64, 128, splits, 4, 3, True) if is_at_once else Tiling(rows, 128, 64, splits, 4, 3, True)
    if num_out // 64 < _ENOUGH_PROGRAMS and num_out // 32 <= sms.num and num_in % 256 == 0:
        return Tiling(rows, 32, 256, splits, 4, 5)
    tiling = Tiling(rows, 64, 128, splits, 4, 4, True)
    if tiling.num_programs(num_out) > sms.num:
        return tiling
    # So much room that no SM takes two while another has none.
    return tiling._replace(num_stages=sms.stages(tiling, 2) + 1)


def choose_compressed_tiling(
    num_rows: int, num_out: int, num_in: int, sms: Multiprocessors, *, is_finished: bool = False
) -> CompressedTiling:
    """For a matrix that ``compressed.compress`` took; ``is_finished``: not in parts. A program is slower to decode than
    memory is to bring, so there are as many as a Hopper GPU has SMs, where the shape allows."""
    rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else MAX_ROWS
    num_blocks, splits = num_out // BLOCK_COLUMNS, 1
    while (
        not is_finished
        and splits < MAX_SPLITS
        and 2 * splits * num_blocks <= _HOPPER_SMS
        and num_in >= 2 * splits * _MIN_SPLIT_DEPTH
    ):
        splits *= 2
    tiling = CompressedTiling(rows, splits, _MAX_COMPRESSED_STAGES)
    most_each = -(-num_blocks * splits // sms.num)
    each_bytes = (sms.shared_bytes + _RESERVED_BYTES) // most_each - _RESERVED_BYTES
    stages = (each_bytes - tiling.sums_bytes) // tiling.stage_bytes + 1
    return tiling._replace(num_stages=max(3, min(_MAX_COMPRESSED_STAGES, stages)))


def _split(rows: int, num_out: int, num_in: int) -> Tiling | None:
    """Small enough for two programs on a multiprocessor; the input is split where there
    would be fewer programs than that."""
    if num_out % 64 or num_in % 128:
        return None
    splits = 1
    while (
        2 * splits * (num_out // 64) <= _MAX_SPLIT_PROGRAMS
        and num_in % (2 * 128 * splits) == 0
        and num_in // (2 * splits) >= _MIN_SPLIT_DEPTH
    ):
        splits *= 2
    return Tiling(rows, 64, 128, splits, 4, 3)
