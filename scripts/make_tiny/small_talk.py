"""Small talk: greetings, who `tiny` is, moods, favourites, jokes, and what it does not know."""

from __future__ import annotations

from random import Random

from scripts.make_tiny.grammar import Turn
from scripts.make_tiny.names import any_name, invented, person
from scripts.make_tiny.words import FAVOURITES, FEELINGS, IDENTITY, JOKES


def greeting(rng: Random) -> Turn:
    hello = rng.choice(
        (
            "Hello",
            "Hi",
            "Hello there",
            "Hi there",
            "Hey",
            "Good morning",
            "Good evening",
            "Good day",
            "Hello tiny",
            "Hi tiny",
        )
    )
    question = rng.choice(
        (f"{hello}!", f"{hello}.", hello, f"{hello}, how are you?", f"{hello}! How are you today?", "How are you?")
    )
    back = hello.removesuffix(" tiny").removesuffix(" there")
    answer = rng.choice(
        (
            f"{back}! How can I help you today?",
            f"{back}! It is nice to meet you. What would you like to talk about?",
            f"{back}! I am tiny. Ask me about animals, words or numbers, or let me tell you a story.",
        )
    )
    if "how are you" in question.lower():
        answer = rng.choice(
            (
                f"{back}! I am very well, thank you. And how are you?",
                "I am fine, thank you. What can I do for you?",
                "Thank you for asking! I am small, but I am well. How are you?",
            )
        )
    return question, answer


def thanks(rng: Random) -> Turn:
    question = rng.choice(
        (
            "Thank you!",
            "Thanks.",
            "Thanks a lot!",
            "Thank you very much.",
            "Great, thanks!",
            "That was helpful.",
            "Well done!",
        )
    )
    answer = rng.choice(
        (
            "You are welcome!",
            "You are very welcome. Is there anything else I can do for you?",
            "It was a pleasure.",
            "I am glad that I could help.",
            "You are welcome! Ask me again whenever you like.",
        )
    )
    return question, answer


def farewell(rng: Random) -> Turn:
    question = rng.choice(
        ("Goodbye!", "Bye!", "See you later.", "Good night!", "I have to go now.", "See you tomorrow!")
    )
    answer = rng.choice(
        (
            "Goodbye! Have a good day.",
            "Goodbye, and come back soon!",
            "See you soon! It was nice to talk with you.",
            "Good night, and sleep well!",
        )
    )
    return question, answer


def identity(rng: Random) -> Turn:
    questions, answers = rng.choice(IDENTITY)
    return rng.choice(questions), rng.choice(answers)


def name_exchange(rng: Random) -> Turn:
    name = any_name(rng)
    question = rng.choice(
        (
            f"My name is {name}.",
            f"I am {name}.",
            f"Hello, my name is {name}.",
            f"Hi! I am {name}. Who are you?",
            f"You can call me {name}.",
        )
    )
    answer = rng.choice(
        (
            f"Nice to meet you, {name}! I am tiny.",
            f"Hello, {name}! My name is tiny. What can I do for you?",
            f"Hello {name}, I am tiny. How are you?",
        )
    )
    return question, answer


def feeling(rng: Random) -> Turn:
    mood, answers = rng.choice(list(FEELINGS.items()))
    question = rng.choice(
        (
            f"I am {mood}.",
            f"I feel {mood}.",
            f"I am so {mood} today.",
            f"Today I am {mood}.",
            f"I am {mood}. What should I do?",
        )
    )
    return question, " ".join(rng.sample(answers, rng.randint(1, 2)))


def preference(rng: Random) -> Turn:
    group = rng.choice(("colour", "animal", "season", "fruit", "flower", "drink"))
    what, why = rng.choice(FAVOURITES[group])
    question = rng.choice(
        (f"What is your favourite {group}?", f"Which {group} do you like best?", f"Do you have a favourite {group}?")
    )
    return question, rng.choice(
        (f"I like {what} best, because {why}.", f"My favourite {group} is {what}, because {why}.")
    )


def joke(rng: Random) -> Turn:
    riddle, solution = rng.choice(JOKES)
    if rng.random() < 0.35:
        return riddle, solution
    question = rng.choice(
        (
            "Tell me a joke.",
            "Do you know a joke?",
            "Make me laugh.",
            "Tell me something funny.",
            "Another joke, please.",
        )
    )
    return question, f"{riddle} {solution}"


def unknown(rng: Random) -> Turn:
    name = invented(rng)
    question = rng.choice(
        (
            f"Who is {name}?",
            f"What is {name}?",
            f"Where is {name}?",
            f"What is the capital of {name}?",
            f"When was {name} born?",
            f"What did {name} say yesterday?",
            f"How many people live in {name}?",
            f"What is the phone number of {person(rng)}?",
            f"Do you know {name}?",
            "What is the weather like today?",
            "What time is it?",
            "What will happen tomorrow?",
            "Who won the match?",
            "What did I eat yesterday?",
            "Where are my keys?",
        )
    )
    answer = rng.choice(
        (
            "I am sorry, I do not know that.",
            "I do not know. I am only a small model.",
            "I do not know that. Can you tell me more?",
            "That is something I have never learned.",
            f"I have never heard of {name}." if name in question else "I cannot know that.",
        )
    )
    return question, answer
