"""Small helpers for building English sentences."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

# A question and its answer.
Turn = tuple[str, str]


def article(noun: str) -> str:
    """``a`` or ``an`` before the noun."""
    return f"an {noun}" if noun[0].lower() in "aeiou" and not noun.startswith(("uni", "one")) else f"a {noun}"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def join(items: Sequence[str], last: str = "and") -> str:
    """``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} {last} {items[-1]}"


def first_sentence(text: str) -> str:
    for index, character in enumerate(text):
        if character in ".!?" and (index + 1 == len(text) or text[index + 1] in " \n"):
            return text[: index + 1]
    return text


def maybe(rng: Random, chance: float, text: str) -> str:
    return text if rng.random() < chance else ""


_OPENINGS = (
    "Hi! {}", "Hello. {}", "Hey, {l}", "Please tell me: {l}", "I have a question. {}", "So, {l}", "Good morning! {}",
    "Tiny, {l}", "Quick question: {l}", "Do you know this? {}", "And {l}", "Now: {l}", "Please, {l}", "OK. {}",
)  # fmt: skip
# First words that may be written small, and before which an opening makes sense: not names, not greetings.
_QUESTION_WORDS = frozenset(
    [
        "what",
        "which",
        "where",
        "who",
        "why",
        "how",
        "when",
        "is",
        "are",
        "can",
        "do",
        "does",
        "tell",
        "write",
        "name",
        "give",
        "describe",
        "explain",
        "define",
        "compare",
        "make",
        "say",
        "count",
        "spell",
        "put",
        "help",
    ]
)


def vary_question(rng: Random, question: str) -> str:
    """The same question as different people type it."""
    roll = rng.random()
    if roll < 0.62:
        return question
    if roll < 0.68:
        return question.rstrip("?.")
    if question.split(" ", 1)[0].lower() not in _QUESTION_WORDS or "\n" in question:
        return question
    small = question[0].lower() + question[1:]
    if roll < 0.76:
        return small
    if roll < 0.84:
        return small.rstrip("?.")
    return rng.choice(_OPENINGS).format(question, l=small)
