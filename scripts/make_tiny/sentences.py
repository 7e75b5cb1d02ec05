"""Single sentences from a grammar: who does what with what, where, when and why."""

from __future__ import annotations

from random import Random

from scripts.make_tiny.grammar import article, capital, maybe
from scripts.make_tiny.names import any_name, person, town
from scripts.make_tiny.world import ANIMALS, JOBS, OBJECTS

_ADJECTIVES = (
    "old", "young", "small", "tall", "tired", "happy", "quiet", "friendly", "strange", "famous", "poor", "rich",
    "kind", "clever",
)  # fmt: skip
_THING_ADJECTIVES = (
    "old", "new", "heavy", "broken", "beautiful", "small", "red", "blue", "green", "white", "golden", "lost", "warm",
    "strange",
)  # fmt: skip
_ACTIONS = (
    "found {thing}", "lost {thing}", "sold {thing} to {person}", "bought {thing} from {person}",
    "painted a picture of {thing}", "told {person} about {thing}", "carried {thing}", "hid {thing}",
    "repaired {thing}", "dreamed of {thing}", "gave {thing} to {person}", "looked at {thing} for a long time",
    "asked {person} for {thing}", "forgot {thing}", "showed {person} {thing}", "shared {thing} with {person}",
    "waited for {person} with {thing}",
)  # fmt: skip
_PLACES = (
    "in the kitchen", "near the river", "at the market", "on the bridge", "in the library", "under a tree",
    "at the harbour", "behind the school", "in the garden", "by the window", "in front of the bakery", "in {town}",
)  # fmt: skip
_TIMES = (
    "yesterday", "last night", "in the morning", "in the evening", "one summer", "long ago", "on a cold day",
    "after lunch", "before the rain", "when the sun went down", "early in spring", "at midnight",
)  # fmt: skip
_REASONS = (
    "because it was raining", "because nobody else wanted it", "because it was a birthday", "although it was late",
    "and went home", "and was very happy", "but said nothing", "because winter was near", "and everybody laughed",
    "so that the children could sleep", "but did not know why", "although the road was long",
)  # fmt: skip


def _who(rng: Random) -> str:
    roll = rng.random()
    if roll < 0.35:
        return any_name(rng)
    noun = rng.choice(list(JOBS)) if roll < 0.75 else rng.choice(ANIMALS).name
    return f"the {maybe(rng, 0.6, rng.choice(_ADJECTIVES) + ' ')}{noun}"


def _thing(rng: Random) -> str:
    noun = rng.choice(list(OBJECTS))
    adjective = maybe(rng, 0.6, rng.choice(_THING_ADJECTIVES) + " ")
    return article(adjective + noun) if rng.random() < 0.6 else f"the {adjective}{noun}"


def _finish(rng: Random, who: str, thing: str) -> str:
    action = rng.choice(_ACTIONS).format(thing=thing, person=person(rng))
    place = maybe(rng, 0.5, " " + rng.choice(_PLACES).format(town=town(rng)))
    reason = maybe(rng, 0.45, " " + rng.choice(_REASONS))
    if rng.random() < 0.5:
        return f"{capital(rng.choice(_TIMES))}, {who} {action}{place}{reason}."
    return f"{capital(who)} {action}{place}{reason}."


def sentence(rng: Random) -> str:
    return _finish(rng, _who(rng), _thing(rng))


def sentence_about(rng: Random, noun: str) -> str:
    """A sentence in which ``noun`` does something or something is done with it."""
    if noun in OBJECTS:
        return _finish(
            rng,
            _who(rng),
            f"{rng.choice(('a', 'the'))} {rng.choice(_THING_ADJECTIVES)} {noun}".replace("a old", "an old"),
        )
    return _finish(rng, f"the {rng.choice(_ADJECTIVES)} {noun}", _thing(rng))


def paragraph(rng: Random) -> str:
    return " ".join(sentence(rng) for _ in range(rng.randint(2, 6)))
