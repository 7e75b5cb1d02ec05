"""Short stories, grown from a grammar: a hero, a wish, a trouble, a helper, an end."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from scripts.make_tiny.grammar import article, capital
from scripts.make_tiny.names import any_name, person, town
from scripts.make_tiny.world import ANIMALS

_TRAITS = (
    "small", "brave", "clever", "lazy", "shy", "curious", "old", "young", "kind", "proud", "hungry", "quiet",
    "cheerful", "careful", "lonely", "busy", "wise", "funny", "gentle", "stubborn",
)  # fmt: skip
_PLACES = (
    "in a dark forest", "by a wide river", "on a high mountain", "in a little village", "near the sea",
    "in an old mill", "behind the garden wall", "in a busy town", "on a quiet farm", "under a great oak",
    "at the edge of the desert", "on a green island", "in a tall lighthouse", "beside a deep lake",
)  # fmt: skip
_PEOPLE = (
    "baker", "sailor", "farmer", "girl", "boy", "king", "queen", "clockmaker", "shepherd", "gardener", "painter",
    "miller", "teacher", "fisherman", "musician", "carpenter",
)  # fmt: skip
_THINGS = (
    "lantern", "golden key", "red boat", "map", "silver bell", "book", "drum", "blue hat", "kite", "apple", "letter",
    "warm coat", "clock", "compass", "flute", "round stone", "basket of plums", "jar of honey",
)  # fmt: skip
_WISHES = (
    "wanted to see the sea", "wished for a friend", "wanted to learn to sing", "wanted to fly like a bird",
    "hoped to find the way home", "wanted to build a boat", "wished to reach the top of the hill",
    "wanted to know where the river ends", "wanted to sleep in a warm bed", "dreamed of the moon",
)  # fmt: skip
_TROUBLES = (
    "a great storm came and the rain fell all night", "the bridge over the river was broken",
    "the path was lost in the fog", "it became dark and very cold", "a big stone lay in the way",
    "the wind blew everything away", "a proud wolf stood in the middle of the road",
    "the door was closed and nobody answered", "the snow was too deep to walk", "there was nothing left to eat",
)  # fmt: skip
_DEEDS = (
    "lit a small fire", "sang a quiet song", "showed a way around", "shared a piece of bread", "built a little raft",
    "called all the birds", "asked a clever question", "told a long and funny story", "worked until late",
    "opened an old gate", "waited until the morning",
)  # fmt: skip
_ENDS = (
    "From that day on they were friends.", "And they all slept well that night.", "They never forgot that day.",
    "After that, nobody was afraid any more.", "And if the wind is right, you can still hear them laugh.",
    "So the long way had been worth it.", "In the morning the sun was warm and everything was well.",
    "And that is the end of the story.", "Since then, there has always been a light in the window.",
)  # fmt: skip
_LESSONS = (
    "It is good to help each other.", "A small friend can be a great help.", "Patience is better than anger.",
    "You should keep your promises.", "It is never too late to begin.", "Even the smallest light is seen at night.",
    "What you share becomes more.", "Who asks will learn.", "Courage grows when you use it.",
)  # fmt: skip


@dataclass(frozen=True)
class Hero:
    """``noun`` is what the hero is, ``pronoun`` and ``possessive`` how the story goes on to speak of it."""

    noun: str
    name: str
    trait: str
    pronoun: str
    possessive: str


def _hero(rng: Random, noun: str | None = None) -> Hero:
    people = noun in _PEOPLE or (noun is None and rng.random() < 0.4)
    noun = noun or (rng.choice(_PEOPLE) if people else rng.choice(ANIMALS).name)
    if noun in ("girl", "queen"):
        pronoun, possessive = "she", "her"
    elif noun in ("boy", "king", "fisherman"):
        pronoun, possessive = "he", "his"
    elif people:
        pronoun, possessive = rng.choice((("she", "her"), ("he", "his")))
    else:
        pronoun, possessive = "it", "its"
    return Hero(noun, any_name(rng), rng.choice(_TRAITS), pronoun, possessive)


def topic_noun(rng: Random) -> str:
    return rng.choice(_PEOPLE) if rng.random() < 0.35 else rng.choice(ANIMALS).name


def topic_thing(rng: Random) -> str:
    return rng.choice(_THINGS)


def story(rng: Random, noun: str | None = None, thing: str | None = None, short: bool = False) -> str:
    """A story about ``noun`` (or somebody) and ``thing`` (or something), 3 to 10 sentences."""
    hero = _hero(rng, noun)
    thing = thing or rng.choice(_THINGS)
    plot = _plot_short if short else rng.choice((_plot_wish, _plot_lost, _plot_gift, _plot_race))
    sentences = [_opening(rng, hero), *plot(rng, hero, thing)]
    sentences.append(rng.choice(_ENDS))
    if not short and rng.random() < 0.25:
        sentences.append(rng.choice(_LESSONS))
    return " ".join(sentences)


def _opening(rng: Random, hero: Hero) -> str:
    start = rng.choice(("Once upon a time", "Long ago", "One day", "Many years ago", "Once", "In a time of old kings"))
    who = article(f"{hero.trait} {hero.noun}")
    place = rng.choice(_PLACES)
    return rng.choice(
        (
            f"{start} there was {who} called {hero.name}, who lived {place}.",
            f"{start} {who} lived {place}. {capital(hero.possessive)} name was {hero.name}.",
            f"{start} there lived {place} {who} named {hero.name}.",
            f"{start}, {place}, there was {who} called {hero.name}.",
        )
    )


def _helper(rng: Random, hero: Hero) -> str:
    animal = rng.choice([animal.name for animal in ANIMALS if animal.name != hero.noun])
    return article(f"{rng.choice(_TRAITS)} {animal}")


def _plot_short(rng: Random, hero: Hero, thing: str) -> list[str]:
    name, pronoun = hero.name, hero.pronoun
    return rng.choice(
        (
            [
                f"{name} {rng.choice(_WISHES)}.",
                f"One day {pronoun} met {_helper(rng, hero)}, and together they {rng.choice(_DEEDS)}.",
            ],
            [
                f"One evening {name} found {article(thing)}, but {rng.choice(_TROUBLES)}.",
                f"So {pronoun} {rng.choice(_DEEDS)}.",
            ],
            [
                f"{name} had {article(thing)} and gave it to {_helper(rng, hero)}.",
                "The next morning there was a present at the door.",
            ],
        )
    )


def _plot_wish(rng: Random, hero: Hero, thing: str) -> list[str]:
    name, pronoun = hero.name, hero.pronoun
    helper = _helper(rng, hero)
    short_helper = "the " + helper.split(" ", 2)[2]
    return [
        rng.choice(
            (f"Every day {name} {rng.choice(_WISHES)}.", f"{name} {rng.choice(_WISHES)}, but did not know how.")
        ),
        rng.choice(
            (
                f"One morning {pronoun} took {article(thing)} and went away.",
                f"So {pronoun} packed {article(thing)} and left.",
            )
        ),
        f"On the way {rng.choice(_TROUBLES)}.",
        rng.choice((f"Then {name} met {helper}.", f"{name} was about to cry when {helper} came by.")),
        f'"Do not be afraid," said {short_helper}, and it {rng.choice(_DEEDS)}.',
        rng.choice(
            (
                f"{name} gave {short_helper} the {thing} and said thank you.",
                f"Together they went on, and {name} was happy.",
            )
        ),
    ]


def _plot_lost(rng: Random, hero: Hero, thing: str) -> list[str]:
    name, pronoun = hero.name, hero.pronoun
    helper = _helper(rng, hero)
    short_helper = "the " + helper.split(" ", 2)[2]
    where = rng.choice(("under the bed", "in the well", "behind the oven", "in a tree", "in the river", "on the roof"))
    return [
        f"{name} had {article(thing)} and loved it very much.",
        rng.choice((f"But one evening the {thing} was gone.", f"One night {pronoun} lost the {thing}.")),
        f'{name} asked everybody: "Have you seen my {thing}?"',
        rng.choice((f"Nobody had seen it but {helper}.", f"Only {helper} knew something.")),
        f"At last {name} and {short_helper} looked {where}, and there it was.",
        rng.choice(
            (f"{name} laughed and {rng.choice(('danced', 'jumped', 'sang'))} all the way home.", f"{name} was so glad!")
        ),
    ]


def _plot_gift(rng: Random, hero: Hero, thing: str) -> list[str]:
    name = hero.name
    friend = person(rng)
    return [
        f"A friend called {friend} lived in {town(rng)}, and soon it was {friend}'s birthday.",
        f'"I have nothing to give," thought {name}, "but I can find {article(thing)}."',
        f"{name} looked for it the whole day, although {rng.choice(_TROUBLES)}.",
        f"In the evening {hero.pronoun} found {article(thing)} and brought it to {friend}.",
        rng.choice(
            (
                f'"This is the best present of all," said {friend}.',
                f"{friend} was so happy that they ate cake until late.",
                f'"You came all this way for me!" said {friend}.',
            )
        ),
    ]


def _plot_race(rng: Random, hero: Hero, thing: str) -> list[str]:
    name = hero.name
    rival = rng.choice([animal.name for animal in ANIMALS if animal.name != hero.noun])
    return [
        f"{capital(article(rival))} laughed at {name} and said: "
        f'"You are too {rng.choice(("slow", "small", "weak", "young"))}!"',
        f'"Let us see who brings home the {thing} first," said {name}.',
        f"The {rival} ran fast, but then {rng.choice(_TROUBLES)}.",
        f"{name} went on step by step and did not stop.",
        rng.choice(
            (
                f"In the end {name} held the {thing} in the air, and the {rival} said sorry.",
                f"So {name} won the {thing}, and shared it with the {rival}.",
            )
        ),
    ]
