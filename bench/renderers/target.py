"""What was aimed at, and what versions one after the other have measured of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

HEADER = ("", "aimed at", "measured", "", "by versions before", "what stands in the way, and what would move it")


class Measured(NamedTuple):
    """By a version, in words. ``where``: behind the words, what it was measured in. ``why``: it is missed, as far as
    that is known."""

    text: str
    is_met: bool
    why: str = ""
    where: str = ""

    @property
    def told(self) -> str:
        return f"{self.text} {self.where}".rstrip()


class Target(NamedTuple):
    """``versions``: the newest last."""

    load: str
    aim: str
    versions: Sequence[Measured]

    def row(self) -> list[str]:
        """It is met if the newest version meets it; those before that do not are bold. Why one misses it is told of the
        newest that does."""
        *before, newest = self.versions
        missed = [each for each in self.versions if not each.is_met]
        earlier = "; ".join(each.told if each.is_met else f"**{each.text}** {each.where}".rstrip() for each in before)
        verdict = "met" if newest.is_met else "**missed**"
        return [self.load, self.aim, newest.told, verdict, earlier, missed[-1].why if missed else ""]


def link(words: str, anchor: str) -> str:
    return f"[{words}](#on-a-gpu-{anchor})"
