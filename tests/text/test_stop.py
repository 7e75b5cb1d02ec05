from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.text.stop import StopChecker


def _naive(text: str, stops: list[str], num_passed: int = 0) -> tuple[str, bool]:
    """Grow the text by a character at a time until it ends with a stop string; cut the longest such one off. Not where
    it ends within the first ``num_passed`` characters."""
    for end in range(num_passed and num_passed + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def _stream(pieces: list[str], stops: list[str], num_passed: int = 0) -> tuple[str, bool]:
    """``num_passed``: so many pieces at first are not to stop it."""
    checker, out = StopChecker(stops), ""
    for number, piece in enumerate(pieces):
        text, stopped = checker.feed(piece, may_stop=number >= num_passed)
        out += text
        if stopped:
            assert checker.matched in stops
            assert checker.feed("more") == ("", True)
            return out, True
    return out + checker.flush(), False


@given(st.lists(st.text("ab", max_size=5), max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_equals_the_naive_definition_however_the_text_is_chopped(pieces: list[str], stops: list[str]) -> None:
    assert _stream(pieces, stops) == _naive("".join(pieces), stops)


@given(
    st.lists(st.text("ab", max_size=5), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.integers(0, 12),
)
def test_none_counts_that_ends_where_nothing_may_stop(pieces: list[str], stops: list[str], num_passed: int) -> None:
    num_characters = len("".join(pieces[:num_passed]))
    assert _stream(pieces, stops, num_passed) == _naive("".join(pieces), stops, num_characters)


@given(st.lists(st.text("ab", max_size=5), max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_holds_back_only_what_may_become_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    checker, seen, out = StopChecker(stops), "", ""
    for piece in pieces:
        text, stopped = checker.feed(piece)
        seen, out = seen + piece, out + text
        if stopped:
            return
        held = seen.removeprefix(out)
        assert out + held == seen
        assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["one\n", "\ntwo"], ["\n\n"], ("one", True)),
        (["say <|e", "n", "d|> no"], ["<|end|>"], ("say ", True)),
        (["abc"], ["bc", "abcd"], ("a", True)),
        (["xabc"], ["c", "abc"], ("x", True)),
        (["almost <|en"], ["<|end|>"], ("almost <|en", False)),
        (["nothing"], [], ("nothing", False)),
        (["nothing"], [""], ("nothing", False)),
    ],
)
def test_cases(pieces: list[str], stops: list[str], expected: tuple[str, bool]) -> None:
    assert _stream(pieces, stops) == expected
