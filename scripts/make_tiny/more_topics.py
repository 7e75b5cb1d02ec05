"""More topics: advice, what cannot be done, comparing, language, food, presents, and talk that stays on one subject."""

from __future__ import annotations

from random import Random

from scripts.make_tiny.advice import ADVICE, BY_SIZE, BY_SPEED, CAN, CANNOT, MEALS, PASTS, PLURALS, PRESENTS, RHYMES
from scripts.make_tiny.grammar import Turn, article, capital, join
from scripts.make_tiny.names import any_name, invented, person
from scripts.make_tiny.sentences import sentence_about
from scripts.make_tiny.world import ANIMALS, CAPITALS, DAYS, GROUPS, JOBS, NUMBERS, OBJECTS, PLACES, SEASONS


def advice(rng: Random) -> Turn:
    plan, tips = rng.choice(list(ADVICE.items()))
    question = rng.choice(
        (
            f"Give me advice for {plan}.",
            f"Do you have advice for {plan}?",
            f"Give me some tips for {plan}.",
            f"What should I know about {plan}?",
            f"Help me with {plan}.",
        )
    )
    chosen = rng.sample(tips, rng.randint(2, 4))
    if rng.random() < 0.25:
        return question, "\n".join(f"- {tip}" for tip in chosen)
    opening = rng.choice(("", "", "Of course. ", "Gladly! ", "Here is what I think. "))
    return question, opening + " ".join(chosen)


def cannot(rng: Random) -> Turn:
    question, what = rng.choice(list(CANNOT.items()))
    answer = rng.choice(
        (
            f"I am sorry, I cannot {what}. I am only a small language model.",
            f"I cannot {what}. But I can tell you a story.",
            f"That is too difficult for me. I cannot {what}.",
        )
    )
    return question, answer


def comparing(rng: Random) -> Turn:
    size = rng.random() < 0.6
    first, second = rng.sample(range(len(BY_SIZE if size else BY_SPEED)), 2)
    order = BY_SIZE if size else BY_SPEED
    more, less = ("bigger", "smaller") if size else ("faster", "slower")
    big, small = order[max(first, second)], order[min(first, second)]
    one, other = order[first], order[second]
    return rng.choice(
        (
            (
                f"Which is {more}, {article(one)} or {article(other)}?",
                f"{capital(article(big))} is {more} than {article(small)}.",
            ),
            (
                f"Which is {less}, {article(one)} or {article(other)}?",
                f"{capital(article(small))} is {less} than {article(big)}.",
            ),
            (
                f"Is {article(one)} {more} than {article(other)}?",
                f"{'Yes' if first > second else 'No'}, {article(big)} is {more} than {article(small)}.",
            ),
        )
    )


def ability(rng: Random) -> Turn:
    what, (able, unable) = rng.choice(list(CAN.items()))
    if rng.random() < 0.2 and len(able) > 2:
        return (
            f"Which animals can {what}?",
            f"Animals that can {what} are {join(['the ' + one for one in rng.sample(able, 3)])}.",
        )
    if rng.random() < 0.5:
        one = rng.choice(able)
        return f"Can {article(one)} {what}?", f"Yes, {article(one)} can {what}."
    one = rng.choice(unable)
    return f"Can {article(one)} {what}?", f"No, {article(one)} cannot {what}."


def language(rng: Random) -> Turn:
    rhyme = rng.choice(RHYMES)
    first, second = rng.sample(rhyme, 2)
    one, many = rng.choice(list(PLURALS.items()))
    verb, past = rng.choice(list(PASTS.items()))
    spelled = rng.choice((rng.choice(list(OBJECTS)), rng.choice(ANIMALS).name, person(rng), verb)).replace(" ", "")
    return rng.choice(
        (
            (f"What rhymes with {first}?", f"{capital(second)} rhymes with {first}."),
            (f"What is the plural of {one}?", f"The plural of {one} is {many}."),
            (f"What is the past of {verb}?", f"The past of {verb} is {past}."),
            (f"Spell the word {spelled}.", "-".join(spelled.upper()) + "."),
            (f"How do you spell {spelled}?", "-".join(spelled.upper()) + "."),
        )
    )


def odd_one(rng: Random) -> Turn:
    group, other = rng.sample(
        ("fruits", "vegetables", "colours", "trees", "flowers", "sports", "drinks", "metals", "planets"), 2
    )
    stranger = rng.choice([one for one in GROUPS[other] if one not in GROUPS[group]])
    members = [*rng.sample(GROUPS[group], rng.randint(2, 3)), stranger]
    rng.shuffle(members)
    return (
        f"Which word does not belong: {', '.join(members)}?",
        f"{capital(stranger)} does not belong. The others are {group}.",
    )


def in_common(rng: Random) -> Turn:
    first, second = rng.sample(ANIMALS, 2)
    question = f"What do {first.plural} and {second.plural} have in common?"
    if first.kind == second.kind:
        plural = "fish" if first.kind == "fish" else f"{first.kind}s"
        return question, f"{capital(first.plural)} and {second.plural} are both {plural}."
    if first.place == second.place:
        return question, f"{capital(first.plural)} and {second.plural} both live {PLACES[first.place]}."
    return question, "Not much, but both are animals."


def likes(rng: Random) -> Turn:
    what = rng.choice(
        (
            rng.choice(ANIMALS).plural,
            *GROUPS["fruits"],
            *GROUPS["vegetables"],
            *GROUPS["flowers"],
            *SEASONS,
            "stories",
            "music",
            "rain",
            "books",
            "poems",
        )
    )
    why = rng.choice(
        (
            "they make people happy",
            "I have read good things about it",
            "there is much to learn about it",
            "it makes a good story",
        )
    )
    return f"Do you like {what}?", rng.choice(
        (
            f"Yes, I like {what}, because {why}.",
            f"I cannot touch or taste anything, but I like to talk about {what}.",
            f"Yes, very much! And you, do you like {what}?",
        )
    )


def meal(rng: Random) -> Turn:
    first, second = rng.sample(MEALS, 2)
    question = rng.choice(
        (
            "What should I cook today?",
            "What can I cook for dinner?",
            "I need an idea for lunch.",
            "What shall I eat today?",
            f"What should I cook on {rng.choice(DAYS)}?",
        )
    )
    return question, rng.choice(
        (
            f"How about {first}? Or {second}, if you have more time.",
            f"You could make {first}.",
            f"I would choose {first}. It is easy and everybody likes it.",
        )
    )


def present(rng: Random) -> Turn:
    whom, ideas = rng.choice(list(PRESENTS.items()))
    first, second = rng.sample(ideas, 2)
    question = rng.choice(
        (
            f"What can I give to {whom}?",
            f"I need a present for {whom}.",
            f"Do you have an idea for a present for {whom}?",
        )
    )
    return question, rng.choice(
        (
            f"You could give {first} or {second}.",
            f"How about {first}?",
            f"A good present is {first}, or perhaps {second}.",
        )
    )


def country(rng: Random) -> Turn:
    name, city = rng.choice(list(CAPITALS.items()))
    return rng.choice((f"Tell me about {name}.", f"What is {name}?", f"What do you know about {name}?")), rng.choice(
        (
            f"{name} is a country. Its capital is {city}.",
            f"{name} is a country, and {city} is its capital. That is all I know about it.",
        )
    )


def sentence(rng: Random) -> Turn:
    what = rng.choice((rng.choice(list(OBJECTS)), rng.choice(ANIMALS).name, rng.choice(list(JOBS))))
    count = rng.choice((1, 1, 2, 3))
    question = (
        f"Write a sentence about {article(what)}."
        if count == 1
        else f"Write {NUMBERS[count]} sentences about {article(what)}."
    )
    return question, " ".join(sentence_about(rng, what) for _ in range(count))


def own_name(rng: Random) -> Turn:
    name = any_name(rng)
    return rng.choice(
        (
            (f"My name is {name}. What is my name?", f"Your name is {name}."),
            (f"I am {name}. Who am I?", f"You are {name}."),
            (f"Say hello to {name}.", f"Hello, {name}!"),
            (f"Say {name}.", f"{name}."),
            (f"Write a greeting for {name}.", f"Dear {name}, I wish you a wonderful day!"),
            (f"Wish {name} a happy birthday.", f"Happy birthday, {name}! I wish you a year full of joy."),
            (f"Thank {name} for the help.", f"Thank you very much for your help, {name}!"),
        )
    )


def times(rng: Random) -> Turn:
    first, second = rng.randint(0, 6), rng.randint(1, 10)
    if rng.random() < 0.5:
        first, second = second, first
    return rng.choice(
        (
            (f"What is {first} times {second}?", f"{first} times {second} is {first * second}."),
            (f"What is {first} * {second}?", f"{first} * {second} = {first * second}."),
            (f"What is half of {2 * second}?", f"Half of {2 * second} is {second}."),
            (f"What is twice {second}?", f"Twice {second} is {2 * second}."),
        )
    )


def nobody(rng: Random) -> Turn:
    """Offices and numbers that nobody told it."""
    place = rng.choice((invented(rng), "the moon", rng.choice(list(CAPITALS)), "the sea", "your town"))
    office = rng.choice(("king", "queen", "president", "mayor", "captain", "owner"))
    question = rng.choice(
        (
            f"Who is the {office} of {place}?",
            f"What is the name of the {office} of {place}?",
            f"How old is the {office} of {place}?",
            f"Where does the {office} of {place} live?",
        )
    )
    return question, rng.choice(
        (
            f"I do not know the {office} of {place}.",
            "I am sorry, I do not know that.",
            "Nobody has told me that yet.",
            f"I do not know much about {place}.",
        )
    )


def animal_talk(rng: Random) -> list[Turn]:
    """Several turns about one animal, which is 'it' after the first."""
    subject = rng.choice(ANIMALS)
    one = article(subject.name)
    legs = "no legs" if subject.legs == 0 else f"{NUMBERS[subject.legs]} legs"
    first = rng.choice(
        (
            (f"What is {one}?", f"{capital(one)} is {article(subject.kind)}."),
            (f"I saw {one} today.", f"How nice! {capital(one)} is {article(subject.kind)}."),
            (
                f"Let us talk about {subject.plural}.",
                f"Gladly! {capital(one)} is {article(subject.kind)}. What would you like to know?",
            ),
        )
    )
    more: list[Turn] = [
        (rng.choice(("What does it eat?", "And what does it eat?")), f"It eats {subject.food}."),
        (rng.choice(("Where does it live?", "And where does it live?")), f"It lives {subject.home}."),
        (rng.choice(("How many legs does it have?", "Does it have legs?")), f"It has {legs}."),
        (rng.choice(("What sound does it make?", "And what sound does it make?")), f"It {subject.sound}."),
        (
            rng.choice(("What is its young called?", "How do you call its young?")),
            f"Its young is called {article(subject.young)}.",
        ),
        (rng.choice(("What does it look like?", "And how does it look?")), f"It has {legs} and {subject.cover}."),
        (
            rng.choice(("Tell me more.", "Go on.", "What else do you know?")),
            f"A young {subject.name} is called {article(subject.young)}. "
            f"You find {subject.plural} {PLACES[subject.place]}.",
        ),
    ]
    return [first, *rng.sample(more, rng.randint(1, 5))]
