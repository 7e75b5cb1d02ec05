"""How the product of a few rows with a large matrix is cut into programs, by the SMs that it has.

What bounds it is how fast an SM takes in data, the matrix and the input together, and that no SM is idle while others
work. Few programs of many columns read the input seldom; many of few columns divide evenly. Sums are added up in the
same order whatever is chosen, so rows do not depend on it by a bit; only ``splits`` would, and follow from the shape.

Chosen by what was fastest on an H200, on all and on 16 to 80 of its SMs (bench/skinny_tilings.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from cotenant.models.compressed import BLOCK_BYTES, BLOCK_COLUMNS, BLOCK_DEPTH, BLOCK_WARPS, MAX_SPLITS

MAX_ROWS = 64
# The most programs that a product is split into: two on each multiprocessor of a Hopper GPU.
_MAX_SPLIT_PROGRAMS = 264
_MIN_SPLIT_DEPTH = 512
_HOPPER_SMS = 132
_MAX_COMPRESSED_STAGES = 5
# So many SMs that read ahead come near all of the memory's bandwidth, on a GPU whose SMs have so much shared memory.
_ENOUGH_SMS = 64
_LARGE_SHARED_BYTES = 200 * 1024
_RESERVED_BYTES = 1024  # of an SM's shared memory, by each program there
_FEW = 2 / 3  # of all SMs, that programs of many columns are best for
_SMALL_OUT = 8192
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
    features per turn, and the input features over ``splits`` programs."""

    rows: int
    columns: int
    depth: int
    splits: int
    num_warps: int
    num_stages: int

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
        """For a launch that has programs of other work behind the product's. Where all of the product's run at once,
        two on an SM, a third finds room there: so the others run beside them, and not when they have ended."""
        if self.columns == 64 and self.runs_at_once(num_out, sms):
            return self._replace(depth=64, num_stages=4)
        return self


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
        """Whether each has as much shared memory as a Hopper GPU's."""
        return self.shared_bytes >= _LARGE_SHARED_BYTES

    def stages(self, tiling: Tiling, num_programs: int) -> int:
        """So many that all programs find room at once."""
        most_each = -(-num_programs // self.num)
        return ((self.shared_bytes + _RESERVED_BYTES) // most_each - _RESERVED_BYTES) // tiling.stage_bytes


def choose_tiling(
    num_rows: int, num_out: int, num_in: int, sms: Multiprocessors, *, is_finished: bool = False
) -> Tiling | None:
    """None for a matrix that is not cut evenly. ``is_finished``: up to 32 rows are not in parts."""
    rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else MAX_ROWS
    tiling = None
    if rows == MAX_ROWS:
        tiling = _split(rows, num_out, num_in)
        if tiling is not None and sms.are_large and sms.are_few and num_out % 128 == 0:
            tiling = Tiling(rows, 128, 64, tiling.splits, 4, 4)
    elif sms.are_large and num_out % 64 == 0 and num_in % 128 == 0:
        tiling = _of_many_columns(rows, num_out, num_in, sms, 1 if is_finished else _few_splits(num_out, num_in))
    elif num_out <= 4096 and num_out % 32 == 0 and num_in % 256 == 0:
        tiling = Tiling(rows, 32, 256, 1, 4, 5)
    elif num_out % 64 == 0 and num_in % 128 == 0:
        tiling = Tiling(rows, 64, 128, 1, 4, 5 if num_out <= _SMALL_OUT else 4)
    return tiling and tiling._replace(num_stages=max(1, min(tiling.num_stages, sms.shared_bytes // tiling.stage_bytes)))


def _few_splits(num_out: int, num_in: int) -> int:
    """In two, where there would be too few programs for the SMs of a Hopper GPU but enough to divide."""
    is_halved = _ENOUGH_SMS <= num_out // 64 <= _HOPPER_SMS // 2 and num_in % 256 == 0
    return 2 if is_halved and num_in >= 2 * _MIN_SPLIT_DEPTH else 1


def _of_many_columns(rows: int, num_out: int, num_in: int, sms: Multiprocessors, splits: int) -> Tiling:
    narrow, wide = Tiling(rows, 64, 128, splits, 4, 4), Tiling(rows, 128, 64, splits, 4, 5)
    if num_out > _SMALL_OUT:  # in several turns, whatever is chosen
        return wide if sms.num <= _ENOUGH_SMS and num_out % 128 == 0 else narrow
    if num_out // 64 < _ENOUGH_SMS and num_out // 32 <= sms.num and num_in % 256 == 0:
        return Tiling(rows, 32, 256, 1, 4, 5)
    stages = sms.stages(narrow, narrow.num_programs(num_out))
    if stages < 3 and num_out % 128 == 0:
        wide_stages = sms.stages(wide, wide.num_programs(num_out))
        return wide._replace(num_stages=max(3, min(wide.num_stages, wide_stages)))
    return narrow._replace(num_stages=max(3, min(6 if splits == 1 else 4, stages)))


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
