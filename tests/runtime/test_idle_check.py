"""What the loop checks while nobody is served, and that nobody waits for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from clocks import SteppedTime
from cotenant.engine.engine import OnlineEngine
from cotenant.memory import pages
from cotenant.memory.pages import PagePool
from cotenant.runtime.loop import WorkerLoop
from cotenant.wire.messages import AddRequest, Outputs, ToWorker
from runtime.cotenancy import request
from runtime.driven_loop import Channel, Watching, small_loop

LAST_PAGE = 63

pytestmark = pytest.mark.usefixtures("loop_clock")


class Quiet(Channel):
    """Nothing comes but what ``to_come`` says: at the third look."""

    def __init__(self, clock: SteppedTime) -> None:
        super().__init__()
        self.to_come: ToWorker | None = None
        self.num_looks = 0
        self._clock = clock

    def pending(self) -> bool:
        self.num_looks += 1
        if self.num_looks >= 3 and self.to_come is not None:
            self.inbox.append(self.to_come)
            self.to_come = None
        return super().pending()

    def wait(self, timeout_s: float) -> bool:
        self.num_looks_before_wait = 0
        self._clock.sleep(timeout_s)
        return bool(self.inbox)

    @property
    def num_answered(self) -> int:
        messages = [message for message in self.sent if isinstance(message, Outputs)]
        return sum(output.finish_reason is not None for message in messages for output in message.outputs)


@pytest.fixture
def channel(loop_clock: SteppedTime) -> Quiet:
    return Quiet(loop_clock)


@pytest.fixture
def loop(tmp_path: Path, channel: Quiet) -> WorkerLoop:
    return small_loop(tmp_path, channel, Watching())[0]


def pool_of(engine: OnlineEngine) -> PagePool:
    return engine._cache.pool


def answer(loop: WorkerLoop, channel: Quiet, message: ToWorker) -> None:
    channel.inbox.append(message)
    num_answered = channel.num_answered
    while channel.num_answered == num_answered:
        loop.iterate()


def run_for(loop: WorkerLoop, clock: SteppedTime, seconds: float) -> None:
    until_s = clock.now_s + seconds
    while clock.now_s < until_s:
        loop.iterate()


def test_who_comes_while_pages_are_checked_does_not_wait_for_all_of_them(
    loop: WorkerLoop, channel: Quiet, loop_clock: SteppedTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_CHECKED_AT_ONCE", 8)
    answer(loop, channel, AddRequest(request("first", [5, 6, 7], 3)))
    pool_of(loop._engine)._user[LAST_PAGE] = 7
    run_for(loop, loop_clock, 0.9)  # between the turns of a conversation
    channel.num_looks, channel.to_come = 0, AddRequest(request("second", [5, 6, 8], 3))
    while channel.num_answered < 2:
        loop.iterate()
    assert channel.num_looks >= 3, "it came while pages were checked"
    with pytest.raises(AssertionError, match=f"page {LAST_PAGE} has 0 users and lists 7"):
        run_for(loop, loop_clock, 1.2)


def test_all_pages_are_checked_once_it_is_quiet(loop: WorkerLoop, channel: Quiet, loop_clock: SteppedTime) -> None:
    answer(loop, channel, AddRequest(request("first", [5, 6, 7], 3)))
    run_for(loop, loop_clock, 1.2)
    num_looks = channel.num_looks
    assert num_looks > 0
    run_for(loop, loop_clock, 1.2)
    assert channel.num_looks == num_looks, "nothing has changed since"


def test_a_lost_page_is_noticed_at_once(loop: WorkerLoop, channel: Quiet) -> None:
    answer(loop, channel, AddRequest(request("first", [5, 6, 7], 3)))
    pool_of(loop._engine)._free.popitem()
    with pytest.raises(AssertionError, match="1 pages are lost"):
        loop.iterate()
