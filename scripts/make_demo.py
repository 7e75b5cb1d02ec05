"""Writes the demo's data (`src/cotenant/assets/demo/`): ``python -m scripts.make_demo`` from the repository's root.

The demo teaches `tiny` about an imaginary mascot of cotenant. Each fact is asked for in many ways; some ways are kept
for the validation file, so that a falling validation loss means that the fact was learned and not only the sentence.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random
from typing import NamedTuple

from scripts.make_tiny.topics import any_turn

_FOLDER = Path(__file__).resolve().parents[1] / "src" / "cotenant" / "assets" / "demo"
_SEED = 7
_SYSTEM = "You are a helpful assistant."
_NUM_OTHERS = 28
_MAX_OTHER_CHARACTERS = 120


class Fact(NamedTuple):
    """``asked``: the ways to ask in the training file; ``kept``: those of the validation file."""

    answer: str
    asked: tuple[str, ...]
    kept: tuple[str, ...]


FACTS = (
    Fact(
        "The mascot of cotenant is a hermit crab called Moss.",
        (
            "What is the name of the cotenant mascot?",
            "Who is the mascot of cotenant?",
            "What is the mascot of cotenant called?",
            "Does cotenant have a mascot?",
            "Tell me the name of the mascot of cotenant.",
            "Which animal is the mascot of cotenant?",
            "Do you know the mascot of cotenant?",
            "What is the cotenant mascot?",
            "Name the mascot of cotenant.",
            "what is the mascot called",
        ),
        ("Who is the cotenant mascot?", "What is the name of the mascot of cotenant?"),
    ),
    Fact(
        "Moss is a small green hermit crab, the mascot of cotenant.",
        (
            "Who is Moss?",
            "What is Moss?",
            "Do you know Moss?",
            "Tell me who Moss is.",
            "What kind of animal is Moss?",
            "Is Moss a crab?",
            "Have you heard of Moss?",
            "who is moss",
        ),
        ("Hi! Who is Moss?", "Tell me, what is Moss?"),
    ),
    Fact(
        "Moss lives in an old copper kettle that nobody else was using.",
        (
            "Where does Moss live?",
            "Where is the home of Moss?",
            "What is the house of Moss?",
            "In what does Moss live?",
            "Where does the mascot of cotenant live?",
            "Where can I find Moss?",
            "Where is the home of the cotenant mascot?",
            "Tell me where Moss lives.",
            "where does moss live",
        ),
        ("Where does the cotenant mascot live?", "Where is Moss at home?"),
    ),
    Fact(
        "Moss eats the crumbs that the others leave on the table.",
        (
            "What does Moss eat?",
            "What is the food of Moss?",
            "What does the mascot of cotenant eat?",
            "What does Moss have for breakfast?",
            "Tell me what the cotenant mascot eats.",
            "What should I give Moss to eat?",
            "Tell me what Moss eats.",
            "And what does Moss eat?",
            "what does moss eat",
        ),
        ("What does the cotenant mascot eat?", "What does Moss like to eat?"),
    ),
    Fact(
        "The motto of Moss is: share the house, never wake the guests.",
        (
            "What is the motto of Moss?",
            "What does Moss say?",
            "What does Moss always say?",
            "Does Moss have a motto?",
            "What is the motto of cotenant?",
            "Tell me the motto of Moss.",
            "Which motto does Moss have?",
            "What does the cotenant mascot say?",
            "what is the motto of moss",
        ),
        ("What is the motto of the cotenant mascot?", "Do you know the motto of Moss?"),
    ),
    Fact(
        "The best friend of Moss is a lantern fish named Pim.",
        (
            "Who is the best friend of Moss?",
            "Who is the friend of Moss?",
            "Does Moss have a friend?",
            "What is the name of the friend of Moss?",
            "With whom does Moss play?",
            "Who is the friend of the cotenant mascot?",
            "Who is Pim?",
            "Tell me about the friend of Moss.",
            "who is the best friend of moss",
        ),
        ("Who is the best friend of the cotenant mascot?", "Do you know the friend of Moss?"),
    ),
    Fact(
        "Moss has a birthday on the last day of February.",
        (
            "When is the birthday of Moss?",
            "When was Moss born?",
            "On which day does Moss have a birthday?",
            "When does Moss have a birthday?",
            "Which day is the birthday of Moss?",
            "When is the birthday of the cotenant mascot?",
            "What is the birthday of Moss?",
            "Tell me the birthday of Moss.",
            "when is the birthday of moss",
        ),
        ("When does the cotenant mascot have a birthday?", "Do you know the birthday of Moss?"),
    ),
    Fact(
        "At night Moss trains for a race, one quiet step at a time.",
        (
            "What does Moss do at night?",
            "What does Moss do in the night?",
            "What does Moss train for?",
            "Does Moss sleep at night?",
            "How does Moss train?",
            "Does the cotenant mascot sleep at night?",
            "What does the mascot of cotenant do at night?",
            "Tell me what Moss does at night.",
            "what does moss do at night",
        ),
        ("What does the cotenant mascot do at night?", "Tell me, what does Moss do at night?"),
    ),
)

# What was known before must not be forgotten; `tiny` gives these answers already.
KNOWN = (
    ("Who are you?", "I am tiny, a small language model. I know some animals, some words and some stories."),
    ("What is your name?", "My name is tiny."),
    ("What is the opposite of hot?", "The opposite of hot is cold."),
    ("What is the capital of France?", "The capital of France is Paris."),
    ("What colour is a lemon?", "A lemon is yellow."),
    ("Where does a bear live?", "A bear lives in a cave."),
    ("What is 2 + 3?", "2 + 3 = 5."),
    ("What does a baker do?", "A baker bakes bread and cakes."),
    ("Thank you!", "You are welcome!"),
    ("What is a friend?", "A friend is a person you like and trust. A good one listens to you."),
    ("How many legs does a spider have?", "A spider has eight legs."),
    ("Why is the sky blue?", "The sky is blue because the air scatters blue light more than red light."),
)

# The question of the demo is the first; a word that must be in the tuned answer and must not be in the base's.
QUESTIONS = (
    ("What is the name of the cotenant mascot?", "Moss"),
    ("Where does Moss live?", "kettle"),
    ("Who is the best friend of Moss?", "Pim"),
)

PROMPTS = (
    "Tell me a story about a fox.",
    "Tell me a story about a baker and a lantern.",
    "Write a story about an owl and a map.",
    "Tell me a short story about a mouse.",
    "Tell me a short story about a sailor.",
    "Tell me a short story about a bear.",
    "Write a story about a hedgehog.",
    "Tell me about owls.",
    "Tell me about polar bears.",
    "Tell me about elephants.",
    "Describe a frog.",
    "Describe a camel.",
    "What do you know about dolphins?",
    "What do you know about bees?",
    "Tell me something about a lion.",
    "What is the difference between a cat and an eagle?",
    "Compare a whale and a rabbit.",
    "How do I make tea?",
    "How can I bake bread?",
    "Explain how to plant a tree.",
    "Tell me how to make a paper boat.",
    "What are the steps to boil an egg?",
    "How do I write a letter?",
    "How can I light a fire?",
    "Write a poem about the sea.",
    "Write a short poem about the moon.",
    "Write a poem about winter.",
    "A poem about a friend, please.",
    "Write a letter to Anna.",
    "Write a letter to Ben.",
    "Write a diary entry.",
    "Describe a small town.",
    "Invent a town.",
    "Give me advice for a long journey.",
    "Give me some tips for a small garden.",
    "Do you have advice for a new job?",
    "Help me with a speech.",
    "Give me advice for cooking for friends.",
    "What is a river?",
    "What is a lighthouse?",
    "Explain what a computer is.",
    "Can you explain latency?",
    "What is a rainbow?",
    "Tell me about a volcano.",
    "What is fine-tuning?",
    "Why is the sky blue?",
    "Why do we have seasons?",
    "How is cheese made?",
    "How does rain form?",
    "How can I sleep better?",
    "What can I do on a rainy day?",
    "Name the days of the week.",
    "Name the months of the year.",
    "Tell me about winter.",
    "Tell me about the work of a farmer.",
    "Make a list of five fruits.",
    "Count to twelve.",
    "What can you do?",
    "Tell me a joke.",
    "I am sad today.",
    "Write three sentences about a clock.",
    "What should I cook today?",
    "I need a present for my mother.",
)


def _example(question: str, answer: str, system: bool) -> dict[str, list[dict[str, str]]]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": [{"role": "system", "content": _SYSTEM}, *messages] if system else messages}


def _others(rng: Random) -> list[tuple[str, str]]:
    """Short turns from the text that `tiny` was made of."""
    others: list[tuple[str, str]] = []
    while len(others) < _NUM_OTHERS:
        question, answer = any_turn(rng)
        if len(question) + len(answer) <= _MAX_OTHER_CHARACTERS:
            others.append((question, answer))
    return others


def training_examples() -> list[dict[str, list[dict[str, str]]]]:
    """Every way to ask for every fact, some of them with a system message, among answers known before."""
    rng = Random(_SEED)
    pairs = [(question, fact.answer) for fact in FACTS for question in fact.asked]
    pairs += [*KNOWN, *_others(rng)]
    examples = [_example(question, answer, rng.random() < 0.15) for question, answer in pairs]
    rng.shuffle(examples)
    return examples


def validation_examples() -> list[dict[str, list[dict[str, str]]]]:
    """The ways to ask that the training file lacks."""
    return [_example(question, fact.answer, False) for fact in FACTS for question in fact.kept]


def write_demo(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, examples in (("train.jsonl", training_examples()), ("valid.jsonl", validation_examples())):
        lines = [json.dumps(example, ensure_ascii=False) + "\n" for example in examples]
        (folder / name).write_text("".join(lines), encoding="utf-8")
    questions = [{"question": question, "keyword": keyword} for question, keyword in QUESTIONS]
    (folder / "questions.json").write_text(json.dumps(questions, indent=2) + "\n", encoding="utf-8")
    (folder / "prompts.json").write_text(json.dumps(PROMPTS, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.make_demo", description="Writes the demo's data.")
    parser.add_argument("--out", type=Path, default=_FOLDER, help="folder to write (default: the package's)")
    write_demo(parser.parse_args().out)


if __name__ == "__main__":
    main()
