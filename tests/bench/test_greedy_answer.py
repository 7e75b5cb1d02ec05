"""Ties may go either way; anything else is a difference."""

from __future__ import annotations

from cotenant.bench.greedy_answer import GreedyAnswer


def _answer(*steps: dict[str, float]) -> GreedyAnswer:
    """The likeliest token of each step."""
    tokens = [max(step, key=lambda token: step[token]) for step in steps]
    return GreedyAnswer(tokens, [step[token] for step, token in zip(steps, tokens, strict=True)], steps)


FIRST = _answer({"a": -0.1, "b": -3.0}, {"c": -1.00, "d": -1.02}, {"e": -0.2, "f": -4.0})


def test_rounding_and_ties_are_no_difference() -> None:
    assert FIRST.difference_from(FIRST) is None
    rounded = _answer({"a": -0.12, "b": -2.9}, {"c": -0.98, "d": -1.03}, {"e": -0.25, "f": -3.9})
    assert rounded.difference_from(FIRST) is None
    other_way = _answer({"a": -0.1, "b": -3.0}, {"d": -0.99, "c": -1.01}, {"x": -0.1, "y": -3.0})
    assert other_way.difference_from(FIRST) is None


def test_another_text_is_a_difference() -> None:
    other = _answer({"b": -0.1, "a": -3.0}, {"c": -1.0, "d": -1.02}, {"e": -0.2, "f": -4.0})
    assert other.difference_from(FIRST) == "token 0 is 'b' instead of 'a', and it is no tie"
    unknown = _answer({"z": -0.1, "b": -0.2}, {"c": -1.0, "d": -1.02}, {"e": -0.2, "f": -4.0})
    assert unknown.difference_from(FIRST) is not None


def test_the_same_text_with_other_probabilities_is_a_difference() -> None:
    surer = _answer({"a": -0.1, "b": -3.0}, {"c": -0.2, "d": -2.0}, {"e": -0.2, "f": -4.0})
    assert surer.difference_from(FIRST) == "token 1 has a log-probability that is 0.800 off"
