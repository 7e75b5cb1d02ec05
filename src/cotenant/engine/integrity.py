"""What must hold between the queues, the page pool and the block tables."""

from __future__ import annotations

from cotenant.engine.block_table import BlockTables
from cotenant.engine.queue import SequenceQueue
from cotenant.memory.pages import PagePool


def check_queues(running: SequenceQueue, waiting: SequenceQueue, pool: PagePool, tables: BlockTables) -> None:
    """Raise AssertionError where they disagree."""
    running.check_integrity()
    waiting.check_integrity()
    assert len({sequence.seat for sequence in running}) == len(running), "two sequences share a seat"
    assert pool.owners() == {sequence.number for sequence in running}, "pages belong to nobody who runs"
    assert len(running) or pool.num_used == 0, f"{pool.num_used} pages are lost"
    assert tables.num_free_seats == tables.num_seats - len(running), "a seat was lost"
    for sequence in running:
        assert sequence.seat is not None
        pages = pool.pages(sequence.number)
        assert tables.pages(sequence.seat) == pages, "a block table disagrees with the pool"
        assert sequence.num_computed <= len(pages) * tables.page_tokens, "tokens were computed without a page"
        assert sequence.num_left >= 1 or sequence.is_spent, "a live sequence has nothing to compute"
    for sequence in waiting:
        assert sequence.seat is None, "a waiting sequence has a seat"
        assert sequence.num_computed == 0, "a waiting sequence has computed tokens"
