"""Which gap between two batches a policy is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from clocks import SteppedTime
from cotenant.runtime import gaps
from cotenant.wire.messages import AddRequest, JobSucceeded, ToWorker
from runtime.cotenancy import request
from runtime.driven_loop import Channel, Watching, small_loop

pytestmark = pytest.mark.usefixtures("loop_clock")


class Halting(Channel):
    """``halts_s``: by the number of the look, how long the machine stands still then."""

    def __init__(self, clock: SteppedTime, halts_s: dict[int, float], *messages: ToWorker) -> None:
        super().__init__(*messages)
        self._clock = clock
        self._halts_s = halts_s
        self._num_looks = 0

    def receive(self) -> list[ToWorker]:
        self._num_looks += 1
        self._clock.sleep(self._halts_s.get(self._num_looks, 0.0))
        return super().receive()


@pytest.mark.parametrize(("halt_s", "is_a_gap"), [(300.0, False), (0.5, True)])
def test_while_the_process_is_stopped_there_is_no_gap_between_batches(
    halt_s: float, is_a_gap: bool, loop_clock: SteppedTime, tmp_path: Path
) -> None:
    channel = Halting(loop_clock, {5: halt_s}, AddRequest(request("r", [5, 6, 7], 10)))
    loop, policy = small_loop(tmp_path, channel, Watching())
    loop.run()
    largest_s = [seen.largest_gap_s for seen in policy.seen]
    assert 0.0 < largest_s[4] < 0.1, "before it"
    assert (largest_s[-1] >= halt_s) == is_a_gap
    assert (largest_s[-1] < 0.1) != is_a_gap


def test_a_large_gap_is_forgotten_after_many_batches(
    loop_clock: SteppedTime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gaps, "_WINDOW", 8)
    channel = Halting(loop_clock, {5: 0.5}, AddRequest(request("r", [5, 6, 7], 40)))
    loop, policy = small_loop(tmp_path, channel, Watching())
    loop.run()
    largest_s = [seen.largest_gap_s for seen in policy.seen]
    assert all(each_s >= 0.5 for each_s in largest_s[5:13]), "so many batches it counts for"
    assert all(0.0 < each_s < 0.1 for each_s in largest_s[25:])


def test_training_goes_on_soon_though_the_process_was_stopped_once(loop_clock: SteppedTime, tmp_path: Path) -> None:
    class Waiting(Halting):
        def wait(self, timeout_s: float) -> bool:
            if any(isinstance(message, JobSucceeded) for message in self.sent):
                return super().wait(1.0)
            self.num_looks_before_wait = 0
            loop_clock.sleep(timeout_s)
            return False

    channel = Waiting(loop_clock, {5: 300.0}, AddRequest(request("r", [5, 6, 7], 10)))
    loop, _ = small_loop(tmp_path, channel, "lifecycle", with_job=True)
    while loop.iterate().num_tasklets == 0:
        assert loop_clock.now_s < 1000.0 + 300.0 + 10.0, "nothing is trained"
    loop.run()
