"""Names of people and places, real and made up."""

from __future__ import annotations

from random import Random

PEOPLE = (
    "Ada", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Ida", "Jonas", "Karla", "Leo", "Mia", "Nora",
    "Oscar", "Paula", "Quentin", "Rosa", "Simon", "Tara", "Ugo", "Vera", "Walter", "Yara", "Anna", "Boris", "Carmen",
    "Daniel", "Elena", "Frank", "Grace", "Henry", "Irene", "Jack", "Kate", "Lucas", "Maria", "Nina", "Otto", "Peter",
    "Ruth", "Sara", "Tom", "Victor", "Wendy", "Alice", "Bruno", "Dora", "Eric", "Lena", "Max", "Olga", "Amir", "Chen",
    "Fatima", "Hana", "Ivan", "Kofi", "Lila", "Mateo", "Noor", "Priya", "Ravi", "Sofia", "Yuki", "Zoe", "Bob", "Sam",
)  # fmt: skip

_FIRST = (
    "Al", "Bel", "Cor", "Dun", "El", "Fen", "Gar", "Hol", "Ist", "Kel", "Lor", "Mar", "Nor", "Or", "Pel", "Quil",
    "Ros", "Sel", "Tor", "Ul", "Vel", "Wil", "Yor", "Zan", "Bri", "Dra", "Fli", "Gro", "Kra", "Sno", "Tri", "Plu",
)  # fmt: skip
_MIDDLE = (
    "a", "e", "i", "o", "u", "an", "er", "im", "or", "un", "ar", "el", "in", "ow", "ee", "ai",
)  # fmt: skip
_LAST = (
    "ba", "dor", "fin", "gum", "ho", "kin", "la", "mon", "nex", "pot", "rik", "sa", "ton", "vik", "wen", "zo", "by",
    "dle", "mer", "th", "x", "ck", "ster", "ly",
)  # fmt: skip

_PLACE_FIRST = (
    "Green", "Stone", "River", "Oak", "Silver", "North", "Apple", "Winter", "Bright", "Long", "Fox", "Salt", "Hill",
    "Clear", "Rose",
)  # fmt: skip
_PLACE_LAST = (
    "field", "bridge", "wood", "mill", "haven", "ford", "dale", "gate", "well", "port",
)  # fmt: skip


def person(rng: Random) -> str:
    return rng.choice(PEOPLE)


def invented(rng: Random) -> str:
    """A name that nobody has heard: the model learns to copy it from the text rather than to know it."""
    parts = [rng.choice(_FIRST)]
    if rng.random() < 0.4:
        parts.append(rng.choice(_MIDDLE))
    return "".join([*parts, rng.choice(_LAST)])


def town(rng: Random) -> str:
    return rng.choice(_PLACE_FIRST) + rng.choice(_PLACE_LAST)


def any_name(rng: Random) -> str:
    return person(rng) if rng.random() < 0.6 else invented(rng)
