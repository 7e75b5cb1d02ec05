"""When a lane's pieces are captured, with graphs that are none: nothing here needs a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cotenant.device.cuda import graphs
from cotenant.device.cuda.graphs import LaneGraphs


class Lane:
    """The current one, and what was launched or replayed there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        self.done: list[str] = []
        self.is_settled = True
        monkeypatch.setattr(graphs, "current_lane", lambda: self.number)
        monkeypatch.setattr(graphs, "capture_graph", self._capture)

    def _capture(self, run: Callable[[], None], pool: object, *, warm_up: bool) -> _Graph:
        before = len(self.done)
        run()
        del self.done[before:]  # a capture runs nothing
        return _Graph(self)

    def launch(self) -> None:
        self.done.append("launched")


class _Graph:
    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def replay(self) -> None:
        self._lane.done.append("replayed")


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> Lane:
    return Lane(monkeypatch)


def test_pieces_are_captured_once_one_of_their_kind_has_run_on_the_lane(lane: Lane) -> None:
    pieces = LaneGraphs(None)
    for number, piece in ((0, "a"), (0, "a"), (0, "b"), (1, "a"), (1, "a"), (0, "a")):
        lane.number = number
        pieces.run(piece, "kind", lane.launch)
    assert lane.done == ["launched", "replayed", "replayed", "launched", "replayed", "replayed"]
    assert len(pieces) == 3


def test_nothing_is_captured_while_it_is_not_ready(lane: Lane) -> None:
    pieces = LaneGraphs(None, lambda: lane.is_settled)
    lane.is_settled = False
    for _ in range(3):
        pieces.run("a", "tried", lane.launch)
    lane.is_settled = True
    pieces.run("first", "another kind", lane.launch)
    assert len(pieces) == 0
    pieces.run("a", "tried", lane.launch)
    assert (len(pieces), lane.done) == (0, 5 * ["launched"])
    pieces.run("a", "tried", lane.launch)
    assert (len(pieces), lane.done[-1]) == (1, "replayed")


def test_nothing_is_captured_that_may_not_be(lane: Lane) -> None:
    pieces = LaneGraphs(None)
    for _ in range(2):
        pieces.run("a", "kind", lane.launch, may_capture=False)
    assert len(pieces) == 0
    pieces.run("a", "kind", lane.launch)
    assert len(pieces) == 1
