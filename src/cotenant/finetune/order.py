"""Which examples make up which optimizer step: a pure function of the example lengths, the settings and the seed."""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Sequence
from functools import lru_cache

from cotenant.core.job import DPO, Hyperparameters

# Examples of similar length are put together within windows of this many batches.
GROUPING_BATCHES = 4


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing: put items into bins of at most ``capacity``; an item larger than that has a bin alone.

    Returns the bins as lists of item indices, in the order in which they were opened. Equal lengths keep their order,
    so the result depends on nothing but the arguments.
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, bin), sorted
    for item in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[item]
        place = bisect.bisect_left(rooms, (length, -1))
        if place == len(rooms):
            room, chosen = capacity, len(bins)
            bins.append([])
        else:
            room, chosen = rooms.pop(place)
        bins[chosen].append(item)
        bisect.insort(rooms, (room - length, chosen))
    return bins


class DataOrder:
    """The examples of every step of a job.

    With ``packing`` the unit of data is a row: whole examples filled into ``max_length`` tokens, the same rows in every
    epoch. Without, it is an example, or with method 'dpo' a pair of them, the chosen one first. An epoch shuffles the
    units with a generator seeded from (seed, epoch). Without packing it then sorts by length within windows of
    ``GROUPING_BATCHES`` batches, cuts the batches, and shuffles the full batches, so that a step's examples are alike
    in length and the lengths follow no trend. The last batch of an epoch may be smaller than the others and comes last.
    """

    def __init__(self, lengths: Sequence[int], hyper: Hyperparameters) -> None:
        self._lengths = tuple(lengths)
        self._hyper = hyper
        self._rows = _units(lengths, hyper)
        self._row_lengths = [sum(lengths[example] for example in row) for row in self._rows]
        self.steps_per_epoch = -(-len(self._rows) // hyper.batch_size)
        self.total_steps = hyper.max_steps if hyper.max_steps > 0 else hyper.n_epochs * self.steps_per_epoch
        self.batches = lru_cache(maxsize=2)(self._batches)

    @property
    def num_units(self) -> int:
        """Units of data in an epoch."""
        return len(self._rows)

    @property
    def mean_step_tokens(self) -> float:
        """Training tokens of an average step."""
        return sum(self._lengths) / self.steps_per_epoch

    @property
    def longest(self) -> int:
        """Tokens of the longest example, or pair: what no micro-batch can be smaller than."""
        if self._hyper.method == DPO:
            return max(self._row_lengths)
        return max(self._lengths)

    def step(self, index: int) -> tuple[int, ...]:
        """The examples of optimizer step ``index``, counted from 0."""
        epoch, position = divmod(index, self.steps_per_epoch)
        return self.batches(epoch)[position]

    def ends_epoch(self, num_steps: int) -> bool:
        """Whether an epoch, or the job, is over after ``num_steps`` steps."""
        return num_steps % self.steps_per_epoch == 0 or num_steps == self.total_steps

    def evaluates(self, num_steps: int, every: int) -> bool:
        """Whether to evaluate after ``num_steps`` steps: at the end of an epoch, and ``every`` so many (0: not)."""
        return self.ends_epoch(num_steps) or (every > 0 and num_steps % every == 0)

    def saves(self, num_steps: int) -> bool:
        """Whether a checkpoint is due after ``num_steps`` steps: at the end of an epoch, and every ``save_steps``."""
        return self.evaluates(num_steps, self._hyper.save_steps)

    def may_save(self, num_steps: int) -> bool:
        """Whether there may be one for whatever reason: a step that is compared may be the best, or the last."""
        compared = self._hyper.selects and self.evaluates(num_steps, self._hyper.eval_steps)
        return compared or self.saves(num_steps)

    def num_evaluations(self, every: int, num_steps: int | None = None) -> int:
        """How often ``evaluates`` is true in the first ``num_steps`` steps (None: of all)."""
        stop = self.total_steps if num_steps is None else num_steps
        count = stop // self.steps_per_epoch
        if every > 0:
            count += stop // every - stop // math.lcm(every, self.steps_per_epoch)
        # The job may end within an epoch.
        is_extra = (
            stop == self.total_steps and stop % self.steps_per_epoch != 0 and not (every > 0 and stop % every == 0)
        )
        return count + is_extra

    def _batches(self, epoch: int) -> tuple[tuple[int, ...], ...]:
        """The example indices of each step of an epoch, in order."""
        generator = random.Random(f"order/{self._hyper.seed}/{epoch}")
        size = self._hyper.batch_size
        units = list(range(len(self._rows)))
        generator.shuffle(units)
        if not self._hyper.packing:
            window = size * GROUPING_BATCHES
            units = [
                unit
                for start in range(0, len(units), window)
                for unit in sorted(units[start : start + window], key=self._row_lengths.__getitem__, reverse=True)
            ]
        batches = [units[start : start + size] for start in range(0, len(units), size)]
        num_full = len(units) // size
        full = batches[:num_full]
        generator.shuffle(full)
        return tuple(
            tuple(example for unit in batch for example in self._rows[unit]) for batch in full + batches[num_full:]
        )


def _units(lengths: Sequence[int], hyper: Hyperparameters) -> list[list[int]]:
    """The units of data, each as the examples in it."""
    if hyper.method == DPO:
        return [[index, index + 1] for index in range(0, len(lengths), 2)]
    if hyper.packing:
        return pack(lengths, hyper.max_length)
    return [[index] for index in range(len(lengths))]
