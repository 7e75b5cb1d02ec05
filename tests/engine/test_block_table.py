"""Rows of the block tables."""

import numpy as np

from cotenant.engine.block_table import BlockTables


def test_rows_are_padded_with_the_sequences_own_first_page() -> None:
    """Also where another sequence with more pages sat before."""
    tables = BlockTables(num_seats=2, max_pages=5, page_tokens=4)
    gone = tables.open((9, 8, 7, 6, 5))
    tables.close(gone)
    first, second = tables.open((3,)), tables.open((4, 2))
    tables.extend(first, (1,))
    assert tables.rows([second, first], max_context=17).tolist() == [[4, 2, 4, 4, 4], [3, 1, 3, 3, 3]]
    assert tables.rows([first], max_context=8).tolist() == [[3, 1]]
    assert (tables.pages(first), tables.pages(second)) == ((3, 1), (4, 2))
    assert tables.num_free_seats == 0


def test_slots_are_page_and_row() -> None:
    tables = BlockTables(num_seats=2, max_pages=3, page_tokens=4)
    first, second = tables.open((7, 2)), tables.open((5,))
    slots = tables.slots(np.array([first, first, second]), np.array([3, 6, 1]))
    assert slots.tolist() == [7 * 4 + 3, 2 * 4 + 2, 5 * 4 + 1]
