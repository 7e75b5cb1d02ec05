"""Pages have equal keys when, and only when, all tokens up to their ends and the weights are equal."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.engine.prefix import BASE_ROOT, PrefixKeys, salted
from cotenant.engine.sequence import PENDING

texts = st.lists(st.integers(0, 2), min_size=0, max_size=24)


def keys(tokens: list[int], page_tokens: int, root: bytes = BASE_ROOT) -> list[bytes]:
    return PrefixKeys(page_tokens, root).keys(tokens, len(tokens) // page_tokens)


@given(first=texts, second=texts, page_tokens=st.integers(1, 4))
def test_keys_are_equal_as_far_as_the_texts_are(first: list[int], second: list[int], page_tokens: int) -> None:
    ends = range(page_tokens, min(len(first), len(second)) + 1, page_tokens)
    for end, mine, theirs in zip(ends, keys(first, page_tokens), keys(second, page_tokens), strict=False):
        assert (mine == theirs) == (first[:end] == second[:end])


@given(tokens=texts, counts=st.lists(st.integers(0, 12)), page_tokens=st.integers(1, 4))
def test_keys_do_not_depend_on_when_they_are_asked_for(tokens: list[int], counts: list[int], page_tokens: int) -> None:
    """The text grows between the calls, and its last token may be on its way."""
    expected = keys(tokens, page_tokens)
    prefix = PrefixKeys(page_tokens, BASE_ROOT)
    for count in counts:
        count = min(count, len(expected))
        known = [*tokens[: count * page_tokens], PENDING]
        assert prefix.keys(known, count) == expected[:count]
    assert prefix.keys(tokens, len(expected)) == expected


def test_a_key_names_one_place_in_the_text() -> None:
    assert len(set(keys([7] * 40, 4))) == 10


def test_what_was_computed_with_other_weights_has_other_keys() -> None:
    roots = [BASE_ROOT, b"1" * 16, b"2" * 16]
    assert len({keys([1, 2], 2, root)[0] for root in roots}) == len(roots)


def test_a_salt_gives_keys_of_its_own() -> None:
    adapter = b"1" * 16
    roots = [salted(root, salt) for root in (BASE_ROOT, adapter) for salt in ("", "a", "b", "ab")]
    assert len({keys([1, 2], 2, root)[0] for root in roots}) == len(roots)
    assert salted(adapter, "") == adapter
    page = array("I", [1, 2]).tobytes().decode()
    assert salted(BASE_ROOT, page) != keys([1, 2], 2)[0], "a salt of tokens is not their page"


def test_large_token_ids_are_told_apart() -> None:
    assert keys([65536, 0], 2) != keys([0, 1], 2)
    assert keys([2**31, 0], 2) != keys([0, 0], 2)


def test_a_page_with_a_token_that_is_not_known_has_no_key() -> None:
    with pytest.raises(OverflowError):
        PrefixKeys(2, BASE_ROOT).keys([1, PENDING], 1)


def test_a_page_that_is_not_full_has_no_key() -> None:
    with pytest.raises(AssertionError, match="not full"):
        PrefixKeys(4, BASE_ROOT).keys([1, 2, 3], 1)
