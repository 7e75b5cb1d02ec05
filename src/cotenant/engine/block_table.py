"""Where each running sequence's pages are, as rows of one array that a batch copies from."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


class BlockTables:
    """A row (seat) per running sequence: entry i is the page of its tokens ``i * page_tokens`` and up.

    The rest of a row repeats the sequence's first page: reading past the end of a sequence then stays within its own
    memory, so what one sequence wrote can never reach another, not even as 0 * NaN behind a mask.
    """

    def __init__(self, num_seats: int, max_pages: int, page_tokens: int) -> None:
        self._table: IntArray = np.zeros((num_seats, max_pages), dtype=np.int64)
        self._lengths = [0] * num_seats
        self._free_seats = list(range(num_seats - 1, -1, -1))
        self.page_tokens = page_tokens

    @property
    def num_seats(self) -> int:
        return len(self._lengths)

    @property
    def num_free_seats(self) -> int:
        return len(self._free_seats)

    def open(self, pages: tuple[int, ...]) -> int:
        """A seat for a sequence that starts with these pages, at least one."""
        seat = self._free_seats.pop()
        self._table[seat] = pages[0]
        self.extend(seat, pages)
        return seat

    def extend(self, seat: int, pages: tuple[int, ...]) -> None:
        length = self._lengths[seat]
        self._table[seat, length : length + len(pages)] = pages
        self._lengths[seat] = length + len(pages)

    def close(self, seat: int) -> None:
        self._lengths[seat] = 0
        self._free_seats.append(seat)

    def move(self, moves: Mapping[int, int]) -> None:
        """Rewrite every row: what was on a page of ``moves`` is now on the page that it maps to."""
        if moves:
            where = np.arange(max(max(moves), int(self._table.max())) + 1)
            where[list(moves)] = list(moves.values())
            self._table = where[self._table]

    def pages(self, seat: int) -> tuple[int, ...]:
        return tuple(self._table[seat, : self._lengths[seat]].tolist())

    def rows(self, seats: list[int], max_context: int) -> IntArray:
        """The rows of ``seats``, wide enough for ``max_context`` tokens."""
        return self._table[seats, : -(-max_context // self.page_tokens)]  # [seats, pages]

    def slots(self, seats: IntArray, positions: IntArray) -> IntArray:
        """Where each token goes, given its sequence's seat and its position: page * page_tokens + row in the page."""
        pages = positions // self.page_tokens
        # The token's row in its page is position - pages * page_tokens.
        slots: IntArray = (self._table[seats, pages] - pages) * self.page_tokens + positions  # [positions]
        return slots
