"""Stop strings over a stream of text."""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Cuts a stream at the first stop string, however the stream is chopped.

    The stop that counts is the one that is complete first; of several that end at the same character, the longest.
    Nothing of it and nothing after it is ever emitted. One that ends in a piece that is not to stop the stream is text;
    it may begin there.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(stop for stop in stop_strings if stop))
        self._held = ""
        self._num_passed = 0  # of the characters held: no stop string ends in them
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the stream, None while there is none."""
        return self._matched

    def feed(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """Take the next piece; give the text that is safe to emit, and whether the stream has stopped.

        A suffix that could be the start of a stop string is held back until it is known.
        """
        if self._matched is not None:
            return "", True
        pending = self._held + text
        passed = self._num_passed if may_stop else len(pending)
        # (end, start): the earliest end wins, then the earliest start.
        found = min(
            (
                (start + len(stop), start)
                for stop in self._stops
                if (start := pending.find(stop, max(0, passed - len(stop) + 1))) >= 0
            ),
            default=None,
        )
        if found is not None:
            end, start = found
            self._matched = pending[start:end]
            self._held = ""
            return pending[:start], True
        num_held = self._num_undecided(pending)
        self._held = pending[len(pending) - num_held :]
        self._num_passed = max(0, passed - (len(pending) - num_held))
        return pending[: len(pending) - num_held], False

    def flush(self) -> str:
        """The generation ended by itself: what was held back is text after all."""
        held, self._held = self._held, ""
        return held

    def _num_undecided(self, text: str) -> int:
        """Length of the longest suffix of ``text`` that a stop string starts with."""
        longest = max(map(len, self._stops), default=0) - 1
        for length in range(min(longest, len(text)), 0, -1):
            suffix = text[-length:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return length
        return 0
