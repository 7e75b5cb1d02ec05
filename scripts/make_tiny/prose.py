"""Plain text without roles, for the completions endpoint: stories, descriptions, letters, notes, facts."""

from __future__ import annotations

from random import Random

from scripts.make_tiny.grammar import article, capital, first_sentence, join, maybe
from scripts.make_tiny.names import person, town
from scripts.make_tiny.sentences import paragraph
from scripts.make_tiny.stories import story
from scripts.make_tiny.words import DEFINITIONS, DIRECTIONS, EXPLANATIONS, POEMS
from scripts.make_tiny.world import (
    ANIMALS,
    CAPITALS,
    DAYS,
    GROUPS,
    JOBS,
    MONTHS,
    NUMBERS,
    OBJECTS,
    PLACES,
    SEASONS,
    Animal,
)


def animal_facts(rng: Random, animal: Animal) -> list[str]:
    """Sentences about an animal, in random order; the first one says what it is."""
    kind, plural = article(animal.kind), animal.plural
    legs = "no legs" if animal.legs == 0 else f"{NUMBERS[animal.legs]} legs"
    sound = animal.sound
    facts = [
        f"It lives {animal.home}.",
        f"It eats {animal.food}.",
        f"It has {legs} and {animal.cover}.",
        f"A young {animal.name} is called {article(animal.young)}.",
        f"You find {plural} {PLACES[animal.place]}.",
        f"It {sound}." if sound not in ("makes no sound", "is quiet") else f"It {sound} most of the time.",
    ]
    rng.shuffle(facts)
    return [f"{capital(article(animal.name))} is {kind}.", *facts]


def _animal(rng: Random) -> str:
    return " ".join(animal_facts(rng, rng.choice(ANIMALS))[: rng.randint(3, 7)])


def _definition(rng: Random) -> str:
    word, (what, more) = rng.choice(list(DEFINITIONS.items()))
    return f"{capital(word)} is {what}. {more}."


def _capital(rng: Random) -> str:
    country, city = rng.choice(list(CAPITALS.items()))
    return rng.choice((f"The capital of {country} is {city}.", f"{city} is the capital of {country}."))


def _facts(rng: Random) -> str:
    makers = (_definition, _capital, _animal, lambda r: r.choice(list(EXPLANATIONS.values())), _job, _object)
    return " ".join(rng.choice(makers)(rng) for _ in range(rng.randint(2, 5)))


def _job(rng: Random) -> str:
    who, (does, where, tool) = rng.choice(list(JOBS.items()))
    return f"{capital(article(who))} {does}. You meet one {where}, with {tool}."


def _object(rng: Random) -> str:
    thing, (use, material) = rng.choice(list(OBJECTS.items()))
    return f"{capital(article(thing))} is for {use}. It is made of {material}."


_WEATHER = (
    "It rained in the morning", "The sun was shining", "A cold wind blew from the north",
    "There was fog over the river",
    "It was warm and still", "Snow lay on the roofs", "The sky was grey", "It was a clear and bright day",
)  # fmt: skip
_DOINGS = (
    "went to the market and bought bread, cheese and plums", "read a long book by the window",
    "walked along the river", "wrote a letter to an old friend", "worked in the garden until it was dark",
    "met {name} in the library", "cooked a big pot of soup", "repaired the old bicycle",
    "listened to music with {name}", "baked a cake for {name}", "cleaned the whole house",
    "fed the ducks in the park", "learned a new song", "played cards with {name}",
)  # fmt: skip
_THOUGHTS = (
    "It was a good day.", "Tomorrow I want to sleep longer.", "I was tired but happy.", "I will not forget it.",
    "I hope it will be like that again.", "Now it is late and the house is quiet.", "Time goes by so fast.",
)  # fmt: skip


def doings(rng: Random, number: int) -> list[str]:
    return [doing.format(name=person(rng)) for doing in rng.sample(_DOINGS, number)]


def diary(rng: Random) -> str:
    first, second = doings(rng, 2)
    day = rng.choice(DAYS)
    return (
        f"{day}, {rng.randint(1, 28)} {rng.choice(MONTHS)}. {rng.choice(_WEATHER)}. "
        f"I {first}. {rng.choice(('Then', 'After that', 'In the evening', 'Later'))} I {second}. "
        f"{rng.choice(_THOUGHTS)}"
    )


def letter(rng: Random) -> str:
    first, second = doings(rng, 2)
    ask = rng.choice(
        ("How are you?", "How is your family?", "What are you doing these days?", "When will you visit me?")
    )
    return (
        f"Dear {person(rng)},\n\nthank you for your letter. {rng.choice(_WEATHER)} here in {town(rng)}. "
        f"Yesterday I {first}, and today I {second}. {ask}\n\n"
        f"{rng.choice(('Yours', 'With love', 'Best wishes'))},\n{person(rng)}"
    )


_SIGHTS = (
    "an old mill", "a stone bridge", "a small harbour", "a market square", "a school", "a library", "a castle",
    "a bakery", "a tall tower", "a wide park", "a quiet lake", "a row of oaks",
)  # fmt: skip


def description(rng: Random) -> str:
    place = town(rng)
    things = rng.sample(_SIGHTS, 3)
    season, (what, weather) = rng.choice(list(SEASONS.items()))
    known = rng.choice(("bread", "cheese", "apples", "honey", "clocks", "boats", "flowers", "music", "paper", "wool"))
    return (
        f"{place} is {rng.choice(('a small town', 'a quiet village', 'an old town', 'a busy little city'))} "
        f"{rng.choice(('by the sea', 'in the hills', 'on the river', 'near the forest', 'between two mountains'))}. "
        f"It has {join(things)}. It is known for its {known}. "
        f"In {season} it is {weather} there, and {what}."
        + maybe(rng, 0.5, f" People say that nobody leaves {place} hungry.")
    )


def dialogue(rng: Random) -> str:
    first, second = rng.sample(("Anna", "Ben", "Clara", "Leo", "Mia", "Tom", "Nora", "Sam"), 2)
    lines = rng.choice(
        (
            (
                f'"Where are you going?" asked {first}.',
                f'"To the market," said {second}. "Do you need anything?"',
                '"Some bread, please."',
            ),
            (
                f'"Did you hear that?" asked {first}.',
                f'"It is only the wind," said {second}.',
                "But it was not the wind.",
            ),
            (
                f'"It is cold today," said {first}.',
                f'"Then take my coat," said {second}, "I have another one."',
                "They walked on together.",
            ),
            (
                f'"What are you reading?" asked {first}.',
                f'"A book about the stars," said {second}.',
                '"May I read it after you?"',
            ),
            (
                f'"I cannot find my keys," said {first}.',
                f'"Look under the table," said {second}.',
                "And there they were.",
            ),
        )
    )
    return " ".join(lines)


def _poem(rng: Random) -> str:
    topic, lines = rng.choice(list(POEMS.items()))
    return f"{capital(topic)}\n\n" + "\n".join(lines)


def _directions(rng: Random) -> str:
    task, steps = rng.choice(list(DIRECTIONS.items()))
    return f"How to {task}\n\n" + "\n".join(f"{number}. {step}" for number, step in enumerate(steps, 1))


def _list(rng: Random) -> str:
    group, members = rng.choice(list(GROUPS.items()))
    return f"{capital(group)}: {', '.join(rng.sample(members, min(4, len(members))))}."


def _counting(rng: Random) -> str:
    start, count = rng.randint(0, 12), rng.randint(4, 8)
    if rng.random() < 0.5:
        return ", ".join(NUMBERS[start : start + count]) + "."
    return ", ".join(str(number) for number in range(start, start + count)) + "."


def _news(rng: Random) -> str:
    place, who = town(rng), person(rng)
    doing = doings(rng, 1)[0]
    return (
        f"News from {place}. {rng.choice(_WEATHER)}, and {who} {doing}. "
        f"The {rng.choice(('market', 'bridge', 'school', 'library', 'harbour'))} is open again. "
        f"{first_sentence(rng.choice(list(EXPLANATIONS.values())))}"
    )


_MAKERS = (
    (story, 10), (paragraph, 6), (_animal, 4), (_facts, 4), (diary, 3), (letter, 2), (description, 3), (dialogue, 2),
    (_poem, 1), (_directions, 1), (_list, 1), (_counting, 1), (_news, 1),
)  # fmt: skip


def prose(rng: Random) -> str:
    """One document of plain text."""
    makers, weights = zip(*_MAKERS, strict=True)
    return str(rng.choices(makers, weights)[0](rng))
