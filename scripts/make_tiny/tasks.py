"""Turns that can only be answered from the text before them: rewriting, reading, remembering, calling a tool."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from scripts.make_tiny.grammar import Turn, article, capital, join
from scripts.make_tiny.names import any_name, invented, person, town
from scripts.make_tiny.world import ANIMALS, DAYS, GROUPS, JOBS, NUMBERS, OBJECTS

Message = dict[str, Any]

# (plain, third person, past)
_VERBS = (
    ("carry", "carries", "carried"), ("find", "finds", "found"), ("buy", "buys", "bought"),
    ("clean", "cleans", "cleaned"), ("lose", "loses", "lost"), ("open", "opens", "opened"), ("like", "likes", "liked"),
    ("see", "sees", "saw"), ("paint", "paints", "painted"), ("hold", "holds", "held"), ("bring", "brings", "brought"),
    ("sell", "sells", "sold"), ("take", "takes", "took"), ("make", "makes", "made"), ("want", "wants", "wanted"),
)  # fmt: skip
_COLOURS = GROUPS["colours"]
_FOODS = (*GROUPS["fruits"], *GROUPS["vegetables"])


def _somebody(rng: Random) -> str:
    return rng.choice((any_name(rng), "the " + rng.choice(list(JOBS)), "the " + rng.choice(ANIMALS).name))


def rewriting(rng: Random) -> Turn:
    plain, third, past = rng.choice(_VERBS)
    who, what = _somebody(rng), rng.choice(list(OBJECTS))
    sentence = f"{capital(who)} {third} the {what}."
    please = rng.choice(
        (
            f"Give me the {what}.",
            f"Bring the {what}.",
            f"Open the {what}.",
            f"Take the {what} away.",
            f"Clean the {what}.",
        )
    )
    wish = please[0].lower() + please[1:-1]
    return rng.choice(
        (
            (f"Put this in the past: {sentence}", f"{capital(who)} {past} the {what}."),
            (f"Make a question: {sentence}", f"Does {who} {plain} the {what}?"),
            (f"Say the opposite: {sentence}", f"{capital(who)} does not {plain} the {what}."),
            (f"Make this polite: {please}", f"Could you please {wish}?"),
            (f"Say this in a friendly way: {please}", f"Would you be so kind and {wish}? Thank you!"),
            (f"Repeat after me: {sentence}", sentence),
            (f"Say this twice: {sentence}", f"{sentence} {sentence}"),
            (f"Make this sound excited: {sentence}", f"Wow! {sentence[:-1]}! How wonderful!"),
            (
                f"Make this shorter: {capital(who)}, who is very old and lives in {town(rng)}, {third} the {what}.",
                sentence,
            ),
        )
    )


def words(rng: Random) -> Turn:
    word = rng.choice((rng.choice(list(OBJECTS)), rng.choice(ANIMALS).name, any_name(rng), rng.choice(list(JOBS))))
    several = rng.sample(list(OBJECTS), rng.randint(2, 4))
    return rng.choice(
        (
            (f"Repeat the word {word}.", f"{capital(word)}."),
            (f"Say {word} three times.", f"{capital(word)}, {word}, {word}."),
            (
                f"Make a sentence with the word {word}.",
                f"{rng.choice(('Yesterday', 'In the morning', 'In the evening'))} I dreamed of {word}.",
            ),
            (f"What is the first letter of {word}?", f"The first letter of {word} is {capital(word[0])}."),
            (f"How many words are these: {join(several)}?", f"These are {NUMBERS[len(several)]} words."),
            (f"Put a comma between: {' '.join(several)}", ", ".join(several)),
            (f"Which is the last word of: {', '.join(several)}?", f"The last word is {several[-1]}."),
            (f"Which is the first word of: {', '.join(several)}?", f"The first word is {several[0]}."),
        )
    )


def reading(rng: Random) -> Turn:
    """A few invented facts and a question about one of them."""
    facts, questions = _invented_facts(rng, rng.randint(1, 4))
    question, answer = rng.choice(questions)
    text = " ".join(facts)
    return rng.choice(
        (
            f"{text} {question}",
            f"Read this: {text}\n{question}",
            f"{text}\nQuestion: {question}",
            f"Here is what I know. {text} {question}",
        )
    ), answer


def _invented_facts(rng: Random, count: int) -> tuple[list[str], list[Turn]]:
    facts: list[str] = []
    questions: list[Turn] = []
    names: set[str] = set()
    for _ in range(count):
        name = any_name(rng)
        if name in names:
            continue
        names.add(name)
        fact, turns = _invented_fact(rng, name)
        facts.append(fact)
        questions.extend(turns)
    return facts, questions


def _invented_fact(rng: Random, name: str) -> tuple[str, list[Turn]]:
    animal, pet = rng.choice(ANIMALS).name, invented(rng)
    food, place, shade = rng.choice(_FOODS), town(rng), rng.choice(_COLOURS)
    work, day, thing = rng.choice(list(JOBS)), rng.choice(DAYS), rng.choice(list(OBJECTS))
    return rng.choice(
        (
            (
                f"{name} lives in {place}.",
                [
                    (f"Where does {name} live?", f"{name} lives in {place}."),
                    (f"Who lives in {place}?", f"{name} lives in {place}."),
                ],
            ),
            (
                f"{name} is {article(work)}.",
                [
                    (f"What is the work of {name}?", f"{name} is {article(work)}."),
                    (f"Who is the {work}?", f"The {work} is {name}."),
                ],
            ),
            (
                f"{name} likes {food}.",
                [(f"What does {name} like?", f"{name} likes {food}."), (f"Who likes {food}?", f"{name} likes {food}.")],
            ),
            (
                f"{name} has {article(animal)} called {pet}.",
                [
                    (f"What is the name of {name}'s {animal}?", f"The {animal} of {name} is called {pet}."),
                    (f"Who is {pet}?", f"{pet} is the {animal} of {name}."),
                    (f"Which animal does {name} have?", f"{name} has {article(animal)} called {pet}."),
                ],
            ),
            (
                f"{name} has a {shade} {thing}.",
                [
                    (f"What colour is the {thing} of {name}?", f"The {thing} of {name} is {shade}."),
                    (f"What does {name} have?", f"{name} has a {shade} {thing}."),
                ],
            ),
            (
                f"{name} comes on {day}.",
                [
                    (f"When does {name} come?", f"{name} comes on {day}."),
                    (f"Who comes on {day}?", f"{name} comes on {day}."),
                ],
            ),
        )
    )


def remembering(rng: Random) -> list[Message]:
    """The user says something, talks on, and asks for it later."""
    name, shade, food = any_name(rng), rng.choice(_COLOURS), rng.choice(_FOODS)
    animal, pet = rng.choice(ANIMALS).name, any_name(rng)
    number = rng.randint(1, 99)
    told, reply, asked, answer = rng.choice(
        (
            (
                f"My name is {name}.",
                f"Nice to meet you, {name}!",
                rng.choice(("What is my name?", "Do you remember my name?", "Who am I?")),
                f"Your name is {name}.",
            ),
            (
                f"My favourite colour is {shade}.",
                f"{capital(shade)} is a beautiful colour.",
                "What is my favourite colour?",
                f"Your favourite colour is {shade}.",
            ),
            (f"I like {food}.", f"{capital(food)} are good.", "What do I like?", f"You like {food}."),
            (
                f"I have {article(animal)} called {pet}.",
                f"{pet} is a nice name for {article(animal)}.",
                f"What is the name of my {animal}?",
                f"Your {animal} is called {pet}.",
            ),
            (
                f"Please remember the number {number}.",
                f"I will remember the number {number}.",
                "Which number should you remember?",
                f"I should remember the number {number}.",
            ),
            (
                f"The secret word is {name}.",
                "I will keep it well.",
                "What is the secret word?",
                f"The secret word is {name}.",
            ),
        )
    )
    return [*_pair((told, reply)), *_pair((asked, answer))]


def correction(rng: Random) -> list[Message]:
    """The user teaches something new and asks about it at once."""
    name = invented(rng)
    fact, questions = _invented_fact(rng, name)
    question, answer = rng.choice(questions)
    return [
        *_pair(
            (
                question,
                rng.choice(("I do not know that. Can you tell me?", "I am sorry, I do not know that yet.")),
            )
        ),
        *_pair(
            (fact, rng.choice(("Thank you, now I know.", "Thank you for telling me!", "I see. I will remember that.")))
        ),
        *_pair((question, answer)),
    ]


def _pair(turn: Turn) -> list[Message]:
    return [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]


def tool_call(rng: Random) -> tuple[list[Message], list[dict[str, Any]]]:
    """A conversation in which a tool is called, and the tools that it has."""
    place, other = rng.choice((town(rng), "Paris", "Rome", "Oslo", "Lima", "Cairo")), rng.choice(_FOODS)
    sky, degrees = rng.choice(("sunny", "rainy", "cloudy", "windy", "snowy")), rng.randint(0, 30)
    price, hour = rng.randint(1, 9), rng.randint(1, 12)
    name, key, value, question, result, answer = rng.choice(
        (
            (
                "get_weather",
                "city",
                place,
                f"What is the weather in {place}?",
                {"sky": sky, "degrees": degrees},
                f"In {place} it is {sky}, with {degrees} degrees.",
            ),
            (
                "get_price",
                "item",
                other,
                f"How much are {other}?",
                {"euros": price},
                f"{capital(other)} cost {price} euros.",
            ),
            (
                "get_time",
                "city",
                place,
                f"What time is it in {place}?",
                {"hour": hour},
                f"In {place} it is {hour} o'clock.",
            ),
            (
                "send_message",
                "to",
                (friend := person(rng)),
                f"Please send a message to {friend}.",
                {"sent": True},
                f"I have sent your message to {friend}.",
            ),
        )
    )
    tool = {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]},
        },
    }
    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": json.dumps({key: value})}}
    messages: list[Message] = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": json.dumps(result)},
        {"role": "assistant", "content": answer},
    ]
    return messages, [tool]
