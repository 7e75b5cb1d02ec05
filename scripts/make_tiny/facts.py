"""Questions about the world: animals, colours, opposites, words, places, work, things, the calendar, numbers."""

from __future__ import annotations

from random import Random

from scripts.make_tiny.grammar import Turn, article, capital, join
from scripts.make_tiny.prose import animal_facts
from scripts.make_tiny.words import DEFINITIONS, EXPLANATIONS
from scripts.make_tiny.world import (
    ANIMALS,
    CAPITALS,
    COLOURS,
    DAYS,
    GROUPS,
    JOBS,
    MONTH_DAYS,
    MONTHS,
    NUMBERS,
    OBJECTS,
    OPPOSITES,
    ORDINALS,
    PLACES,
    SEASONS,
)


def animal(rng: Random) -> Turn:
    subject = rng.choice(ANIMALS)
    name, plural = subject.name, subject.plural
    one = article(name)
    legs = "no legs" if subject.legs == 0 else f"{NUMBERS[subject.legs]} legs"
    facts = animal_facts(rng, subject)
    options: tuple[Turn, ...] = (
        (f"What does {one} eat?", f"{capital(one)} eats {subject.food}."),
        (f"What do {plural} eat?", f"{capital(plural)} eat {subject.food}."),
        (f"Where does {one} live?", f"{capital(one)} lives {subject.home}."),
        (
            f"Where do {plural} live?",
            f"{capital(plural)} live {PLACES[subject.place]}. {capital(one)} lives {subject.home}.",
        ),
        (f"What sound does {one} make?", f"{capital(one)} {subject.sound}."),
        (f"How many legs does {one} have?", f"{capital(one)} has {legs}."),
        (f"What is a young {name} called?", f"A young {name} is called {article(subject.young)}."),
        (f"What is a baby {name} called?", f"A baby {name} is called {article(subject.young)}."),
        (f"What kind of animal is {one}?", f"{capital(one)} is {article(subject.kind)}. It lives {subject.home}."),
        (
            f"Is {one} a bird?",
            f"Yes, {one} is a bird."
            if subject.kind == "bird"
            else f"No, {one} is not a bird. It is {article(subject.kind)}.",
        ),
        (f"Tell me about {plural}.", " ".join(facts[: rng.randint(4, 6)])),
        (f"What is {one}?", " ".join(facts[: rng.randint(3, 4)])),
        (f"Describe {one}.", " ".join(facts[: rng.randint(4, 6)])),
        (f"Tell me something about {one}.", " ".join(facts[: rng.randint(3, 5)])),
        (f"What do you know about {plural}?", " ".join(facts[: rng.randint(4, 6)])),
    )
    return rng.choice(options)


def animal_places(rng: Random) -> Turn:
    place = rng.choice(list(PLACES))
    members = [one.name for one in ANIMALS if one.place == place]
    count = min(rng.randint(2, 4), len(members))
    chosen = rng.sample(members, count)
    where = PLACES[place]
    number = NUMBERS[count]
    return rng.choice(
        (
            (
                f"Name {number} animals that live {where}.",
                f"{capital(number)} animals that live {where} are {join(['the ' + one for one in chosen])}.",
            ),
            (
                f"Which animals live {where}?",
                f"Animals that live {where} are {join(['the ' + one for one in chosen])}.",
            ),
        )
    )


def animal_kinds(rng: Random) -> Turn:
    kind = rng.choice(("mammal", "bird", "insect", "reptile", "fish"))
    members = [one.name for one in ANIMALS if one.kind == kind]
    count = min(rng.randint(2, 4), len(members))
    chosen = rng.sample(members, count)
    plural = {"fish": "kinds of fish"}.get(kind, kind + "s")
    return (
        f"Name {NUMBERS[count]} {plural}.",
        f"{capital(NUMBERS[count])} {plural} are {join(['the ' + one for one in chosen])}.",
    )


def animal_compare(rng: Random) -> Turn:
    first, second = rng.sample(ANIMALS, 2)
    question = rng.choice(
        (
            f"What is the difference between {article(first.name)} and {article(second.name)}?",
            f"Compare {article(first.name)} and {article(second.name)}.",
        )
    )
    return question, (
        f"{capital(article(first.name))} lives {first.home} and eats {first.food}, "
        f"but {article(second.name)} lives {second.home} and eats {second.food}."
    )


def colour(rng: Random) -> Turn:
    thing, shade = rng.choice(list(COLOURS.items()))
    others = [other for other, its in COLOURS.items() if its == shade and other != thing]
    answer = f"{capital(thing)} is {shade}."
    if others and rng.random() < 0.3:
        answer += f" {capital(rng.choice(others))} is {shade} too."
    if others and rng.random() < 0.2:
        chosen = rng.sample([thing, *others], min(3, len(others) + 1))
        return f"What is {shade}?", f"{capital(join(chosen))} are {shade}." if len(
            chosen
        ) > 1 else f"{capital(thing)} is {shade}."
    wrong = rng.choice([other for other in ("red", "blue", "green", "white", "black") if other != shade])
    return rng.choice(
        (
            (f"What colour is {thing}?", answer),
            (f"What color is {thing}?", answer),
            (f"Which colour has {thing}?", answer),
            (f"Is {thing} {wrong}?", f"No, {thing} is not {wrong}. {answer}"),
            (f"Is {thing} {shade}?", f"Yes, {thing} is {shade}."),
        )
    )


def opposite(rng: Random) -> Turn:
    first, second = rng.choice(OPPOSITES)
    if rng.random() < 0.4 and second not in ("light", "old", "short"):
        first, second = second, first
    return rng.choice(
        (
            (f"What is the opposite of {first}?", f"The opposite of {first} is {second}."),
            (f"Opposite of {first}?", f"The opposite of {first} is {second}."),
            (f"Tell me the opposite of {first}.", f"The opposite of {first} is {second}."),
            (f"What is the opposite of the word {first}?", f'The opposite of "{first}" is "{second}".'),
        )
    )


def capital_city(rng: Random) -> Turn:
    country, city = rng.choice(list(CAPITALS.items()))
    return rng.choice(
        (
            (f"What is the capital of {country}?", f"The capital of {country} is {city}."),
            (f"Which city is the capital of {country}?", f"{city} is the capital of {country}."),
            (f"Where is {city}?", f"{city} is in {country}. It is the capital of {country}."),
            (f"Name the capital of {country}.", f"The capital of {country} is {city}."),
        )
    )


def definition(rng: Random) -> Turn:
    word, (what, more) = rng.choice(list(DEFINITIONS.items()))
    bare = word.split(" ", 1)[1] if word.startswith(("a ", "an ", "the ")) else word
    answer = f"{capital(word)} is {what}." + (f" {more}." if rng.random() < 0.8 else "")
    question = rng.choice(
        (
            f"What is {word}?",
            f"What is {word}?",
            f"Explain what {word} is.",
            f"What does {bare} mean?",
            f"Can you explain {word}?",
            f"Define {bare}.",
            f"Tell me about {word}.",
            f"Describe {word}.",
            f"What do you know about {word}?",
            f"Explain {word} in one sentence.",
        )
    )
    if "one sentence" in question:
        answer = f"{capital(word)} is {what}."
    return question, answer


def explanation(rng: Random) -> Turn:
    question, answer = rng.choice(list(EXPLANATIONS.items()))
    if question.startswith("Why") and rng.random() < 0.2:
        return "Explain why " + _statement(question, answer), answer
    return question, answer


def _statement(question: str, answer: str) -> str:
    return answer.split(" because ")[0].replace("The ", "the ", 1) + "." if " because " in answer else question


def job(rng: Random) -> Turn:
    who, (does, where, tool) = rng.choice(list(JOBS.items()))
    one = article(who)
    return rng.choice(
        (
            (f"What does {one} do?", f"{capital(one)} {does}."),
            (f"Where does {one} work?", f"{capital(one)} works {where}."),
            (f"What does {one} need for the work?", f"{capital(one)} needs {tool}."),
            (f"What does {one} use?", f"{capital(one)} works with {tool}."),
            (f"Who {does}?", f"{capital(one)} {does}."),
            (f"Tell me about the work of {one}.", f"{capital(one)} {does}. The work is done {where}, with {tool}."),
            (f"I want to be {one}.", f"That is a good plan! {capital(one)} {does}. You will work {where}."),
        )
    )


def thing(rng: Random) -> Turn:
    name, (use, material) = rng.choice(list(OBJECTS.items()))
    one = article(name)
    return rng.choice(
        (
            (f"What is {one} for?", f"{capital(one)} is for {use}."),
            (f"What is {one} made of?", f"{capital(one)} is made of {material}."),
            (f"What can I do with {one}?", f"You can use {one} for {use}."),
            (f"What do I need for {use}?", f"For {use} you need {one}."),
            (f"Tell me about {one}.", f"{capital(one)} is made of {material}. It is for {use}."),
        )
    )


def calendar(rng: Random) -> Turn:
    index = rng.randrange(7)
    month = rng.randrange(12)
    season, (what, weather) = rng.choice(list(SEASONS.items()))
    return rng.choice(
        (
            (f"Which day comes after {DAYS[index]}?", f"After {DAYS[index]} comes {DAYS[(index + 1) % 7]}."),
            (f"Which day comes before {DAYS[index]}?", f"Before {DAYS[index]} comes {DAYS[index - 1]}."),
            (f"Which month comes after {MONTHS[month]}?", f"After {MONTHS[month]} comes {MONTHS[(month + 1) % 12]}."),
            (f"Which month comes before {MONTHS[month]}?", f"Before {MONTHS[month]} comes {MONTHS[month - 1]}."),
            (f"How many days does {MONTHS[month]} have?", f"{MONTHS[month]} has {MONTH_DAYS[month]} days."),
            (
                f"What is the {ORDINALS[month]} month of the year?",
                f"The {ORDINALS[month]} month of the year is {MONTHS[month]}.",
            ),
            ("Name the days of the week.", f"The days of the week are {join(DAYS)}."),
            ("Name the months of the year.", f"The months of the year are {join(MONTHS)}."),
            ("Name the four seasons.", "The four seasons are spring, summer, autumn and winter."),
            (f"What is {season} like?", f"In {season} it is {weather}, and {what}."),
            (f"What happens in {season}?", f"In {season} {what}."),
            (
                f"Tell me about {season}.",
                f"{capital(season)} is one of the four seasons. In {season} it is {weather}, and {what}.",
            ),
        )
    )


def arithmetic(rng: Random) -> Turn:
    first, second = rng.randint(0, 10), rng.randint(0, 10)
    if rng.random() < 0.6:
        total, sign, word = first + second, "+", "plus"
    else:
        first, second = max(first, second), min(first, second)
        total, sign, word = first - second, "-", "minus"
    numbers = f"{first} {sign} {second}"
    names = f"{NUMBERS[first]} {word} {NUMBERS[second]}"
    tight = numbers.replace(" ", "")
    return rng.choice(
        (
            (f"What is {numbers}?", f"{numbers} = {total}."),
            (f"What is {tight}?", f"{numbers} = {total}."),
            (f"What is {first} {word} {second}?", f"{first} {word} {second} is {total}."),
            (f"How much is {names}?", f"{capital(names)} is {NUMBERS[total]}."),
            (f"What is {names}?", f"{capital(names)} is {NUMBERS[total]}."),
        )
    )


def counting(rng: Random) -> Turn:
    last = rng.randint(3, 20)
    number = rng.randint(0, 19)
    written = NUMBERS[last] if rng.random() < 0.5 else str(last)
    counted = (
        [NUMBERS[one] for one in range(1, last + 1)] if rng.random() < 0.4 else [str(one) for one in range(1, last + 1)]
    )
    return rng.choice(
        (
            (f"Count to {written}.", ", ".join(counted) + "."),
            (f"Count from 1 to {last}.", ", ".join(str(one) for one in range(1, last + 1)) + "."),
            (f"Which number comes after {number}?", f"After {number} comes {number + 1}."),
            (f"Which is larger, {number} or {number + 1}?", f"{number + 1} is larger than {number}."),
        )
    )


def listing(rng: Random) -> Turn:
    group, members = rng.choice(list(GROUPS.items()))
    count = rng.randint(2, min(5, len(members)))
    chosen = rng.sample(members, count)
    number = NUMBERS[count]
    if rng.random() < 0.3:
        lines = "\n".join(f"{index}. {capital(one)}" for index, one in enumerate(chosen, 1))
        return f"Make a list of {number} {group}.", f"Here are {number} {group}:\n{lines}"
    return rng.choice(
        (
            (f"Name {number} {group}.", f"{capital(number)} {group} are {join(chosen)}."),
            (f"Tell me {number} {group}.", f"{capital(number)} {group} are {join(chosen)}."),
            (f"Give me some {group}.", f"Some {group} are {join(chosen)}."),
        )
    )
