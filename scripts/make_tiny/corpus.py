"""The training text: an endless, seeded stream of documents, each plain prose or a conversation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from itertools import islice
from random import Random
from typing import Any

from scripts.make_tiny.grammar import Turn, first_sentence, vary_question
from scripts.make_tiny.more_topics import animal_talk
from scripts.make_tiny.prose import prose
from scripts.make_tiny.tasks import Message, correction, remembering, tool_call
from scripts.make_tiny.topics import any_turn

# Prose, or the messages of a conversation and the tools it has.
Document = str | tuple[list[Message], list[dict[str, Any]]]

_PLAIN_SYSTEM = (
    "You are a helpful assistant.",
    "You are tiny, a small language model.",
    "You are a friendly assistant.",
    "Be kind and honest.",
    "You answer questions and tell stories.",
    "You are a helpful and friendly assistant. Use simple words.",
)


def _keep(answer: str) -> str:
    return answer


# A system message and what it makes of an answer.
_STYLES: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("Answer in one sentence.", first_sentence),
    ("Answer briefly.", first_sentence),
    ("You are a pirate.", lambda answer: f"Arr! {answer} Ahoy!"),
    ("You are a polite butler.", lambda answer: f"Certainly. {answer} Will that be all?"),
    ("You are a cheerful robot.", lambda answer: f"Beep! {answer} Beep beep!"),
    ("You are an old wizard.", lambda answer: f"By my beard! {answer}"),
    ("You are a teacher. End with praise.", lambda answer: f"{answer} That was a good question!"),
)


def _any_turn(rng: Random) -> Turn:
    question, answer = any_turn(rng)
    return vary_question(rng, question), answer


def _conversation(rng: Random) -> tuple[list[Message], list[dict[str, Any]]]:
    roll = rng.random()
    if roll < 0.03:
        return tool_call(rng)
    system, style = None, _keep
    if rng.random() < 0.3:
        system = rng.choice(_PLAIN_SYSTEM)
    elif rng.random() < 0.12:
        system, style = rng.choice(_STYLES)
    count = rng.choices((1, 2, 3, 4, 6, 10), (55, 18, 12, 8, 5, 2))[0]
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    turns = animal_talk(rng) if rng.random() < 0.05 else [_any_turn(rng) for _ in range(count)]
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": style(answer)}]
    if style is _keep and roll < 0.13:
        _weave(rng, messages, remembering(rng) if rng.random() < 0.7 else correction(rng))
    return messages, []


def _weave(rng: Random, messages: list[Message], extra: list[Message]) -> None:
    """Put the turns of ``extra`` into ``messages``, in order, with the other turns around and between them."""
    start = 1 if messages[0]["role"] == "system" else 0
    turns = [messages[index : index + 2] for index in range(start, len(messages), 2)]
    more = [extra[index : index + 2] for index in range(0, len(extra), 2)]
    places = sorted(rng.randint(0, len(turns)) for _ in more)
    for offset, (place, turn) in enumerate(zip(places, more, strict=True)):
        turns.insert(place + offset, turn)
    messages[start:] = [message for turn in turns for message in turn]


def documents(seed: int) -> Iterator[Document]:
    """Document after document, for ever; the same for the same seed."""
    rng = Random(seed)
    while True:
        yield prose(rng) if rng.random() < 0.22 else _conversation(rng)


def text_digest(seed: int, num_documents: int = 2000) -> str:
    """SHA-256 of the first documents."""
    digest = hashlib.sha256()
    for document in islice(documents(seed), num_documents):
        digest.update(json.dumps(document).encode())
    return digest.hexdigest()
