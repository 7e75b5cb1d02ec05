"""Questions that want a longer text: directions, poems, stories, letters, descriptions."""

from __future__ import annotations

from random import Random

from scripts.make_tiny.grammar import Turn, article
from scripts.make_tiny.names import person
from scripts.make_tiny.prose import description, diary, letter
from scripts.make_tiny.stories import story, topic_noun, topic_thing
from scripts.make_tiny.words import DIRECTIONS, POEMS


def directions(rng: Random) -> Turn:
    task, steps = rng.choice(list(DIRECTIONS.items()))
    question = rng.choice(
        (
            f"How do I {task}?",
            f"How can I {task}?",
            f"Tell me how to {task}.",
            f"Explain how to {task}.",
            f"What are the steps to {task}?",
        )
    )
    if rng.random() < 0.4:
        return question, "\n".join(f"{number}. {step}" for number, step in enumerate(steps, 1))
    first, second, third, fourth = (step[0].lower() + step[1:] for step in steps)
    return question, f"First {first} Then {second} After that, {third} At last, {fourth}"


def poem(rng: Random) -> Turn:
    topic, lines = rng.choice(list(POEMS.items()))
    question = rng.choice(
        (
            f"Write a poem about {topic}.",
            f"Write a short poem about {topic}.",
            f"A poem about {topic}, please.",
            "Write a poem.",
            "Tell me a poem.",
        )
    )
    return question, "\n".join(lines)


def tale(rng: Random) -> Turn:
    noun = topic_noun(rng)
    thing_name = topic_thing(rng)
    roll = rng.random()
    if roll < 0.25:
        question = rng.choice(
            (
                "Tell me a story.",
                "Write a story.",
                "Tell me a short story.",
                "I would like to hear a story.",
                "Once more, a story please.",
            )
        )
        return question, story(rng, short=rng.random() < 0.5)
    if roll < 0.65:
        question = rng.choice(
            (
                f"Tell me a story about {article(noun)}.",
                f"Write a story about {article(noun)}.",
                f"A story about {article(noun)}, please.",
            )
        )
        return question, story(rng, noun)
    if roll < 0.8:
        question = f"Tell me a short story about {article(noun)}."
        return question, story(rng, noun, short=True)
    question = rng.choice(
        (
            f"Write a story about {article(noun)} and {article(thing_name)}.",
            f"Tell me a story about {article(noun)} and {article(thing_name)}.",
        )
    )
    return question, story(rng, noun, thing_name)


def writing(rng: Random) -> Turn:
    kind = rng.random()
    if kind < 0.35:
        friend = person(rng)
        text = letter(rng)
        return f"Write a letter to {friend}.", f"Dear {friend},{text.split(',', 1)[1]}"
    if kind < 0.6:
        return rng.choice(("Write a diary entry.", "Write a page of a diary.", "Write about a day.")), diary(rng)
    return rng.choice(
        ("Describe a town.", "Describe a small town.", "Invent a town.", "Tell me about a town.")
    ), description(rng)
