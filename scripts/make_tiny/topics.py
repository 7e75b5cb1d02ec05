"""Every topic of conversation with the share of turns that it gets."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from scripts.make_tiny import facts, more_topics, small_talk, tasks, writing
from scripts.make_tiny.grammar import Turn

# (topic, weight)
TOPICS: tuple[tuple[Callable[[Random], Turn], float], ...] = (
    (small_talk.greeting, 3),
    (small_talk.thanks, 1.5),
    (small_talk.farewell, 1.5),
    (small_talk.identity, 4),
    (small_talk.name_exchange, 2),
    (facts.animal, 9),
    (facts.animal_places, 2),
    (facts.animal_kinds, 1),
    (facts.animal_compare, 2),
    (facts.colour, 4),
    (facts.opposite, 4),
    (facts.capital_city, 4),
    (facts.definition, 8),
    (facts.explanation, 7),
    (facts.job, 4),
    (facts.thing, 4),
    (facts.calendar, 3),
    (facts.arithmetic, 6),
    (facts.counting, 2),
    (facts.listing, 3),
    (writing.directions, 4),
    (small_talk.joke, 2),
    (writing.poem, 2),
    (writing.tale, 8),
    (writing.writing, 3),
    (small_talk.feeling, 2),
    (small_talk.preference, 2),
    (small_talk.unknown, 3),
    (more_topics.advice, 4),
    (more_topics.cannot, 3),
    (more_topics.comparing, 3),
    (more_topics.ability, 3),
    (more_topics.language, 4),
    (more_topics.odd_one, 1.5),
    (more_topics.in_common, 2),
    (more_topics.likes, 2),
    (more_topics.meal, 1.5),
    (more_topics.present, 1.5),
    (more_topics.country, 1.5),
    (more_topics.sentence, 3),
    (more_topics.own_name, 4),
    (more_topics.times, 3),
    (more_topics.nobody, 2),
    (tasks.rewriting, 3),
    (tasks.words, 2),
    (tasks.reading, 6),
)


def any_turn(rng: Random) -> Turn:
    topics, weights = zip(*TOPICS, strict=True)
    turn: Turn = rng.choices(topics, weights)[0](rng)
    return turn
