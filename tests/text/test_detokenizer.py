from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cotenant.text.detokenizer import IncrementalDetokenizer
from cotenant.text.tokenizer import Tokenizer, load_tokenizer

KINDS = ["bytes", "byte_level", "sentencepiece", "unigram"]
RELAXED = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    folder = None if request.param == "bytes" else request.getfixturevalue(request.param)
    return load_tokenizer(folder, 800)


def _stream(detokenizer: IncrementalDetokenizer, ids: list[int], chunk: int = 1) -> list[str]:
    pieces = [detokenizer.add(ids[start : start + chunk]) for start in range(0, len(ids), chunk)]
    return [*pieces, detokenizer.flush()]


@RELAXED
@given(ids=st.lists(st.integers(0, 799), max_size=30), skip=st.booleans(), chunk=st.integers(1, 4))
def test_the_pieces_are_the_whole_for_any_ids(tokenizer: Tokenizer, ids: list[int], skip: bool, chunk: int) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    spared = _spare_characters(tokenizer, ids, skip)
    assert "".join(_stream(detokenizer, ids, chunk)) == tokenizer.decode(spared, skip_special_tokens=skip)


def _spare_characters(tokenizer: Tokenizer, ids: list[int], skip: bool) -> list[int]:
    """``ids`` with the tokens of U+FFFD for each byte that spoils characters in its run of single bytes."""
    hidden = tokenizer.special_token_ids if skip else frozenset()
    shown = [token_id for token_id in ids if token_id not in hidden and tokenizer.token_bytes(token_id)]
    spared: list[int] = []
    for is_bytes, tokens in groupby(shown, tokenizer.is_partial_byte):
        run = list(tokens)
        text = b"".join(map(tokenizer.token_bytes, run)).decode(errors="surrogateescape") if is_bytes else ""
        bad = ["\udc80" <= character <= "\udcff" for character in text]
        if any(bad) and not all(bad):
            mended = "".join("\ufffd" if is_bad else character for character, is_bad in zip(text, bad, strict=True))
            run = _byte_tokens(tokenizer, mended)
        spared += run
    return spared


def _byte_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    tokens = {tokenizer.token_bytes(each): each for each in range(800) if tokenizer.is_partial_byte(each)}
    return [tokens[bytes([byte])] for byte in text.encode()]


TEXTS = st.text(st.one_of(st.sampled_from(" aéあ🙂\n"), st.characters(codec="utf-8", exclude_characters="\ufffd")))


@RELAXED
@given(text=TEXTS, cut=st.integers(0, 60), prompt=TEXTS)
def test_each_character_comes_with_its_last_byte(sentencepiece: Path, text: str, cut: int, prompt: str) -> None:
    tokenizer = load_tokenizer(sentencepiece, 800)
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False) if prompt else []
    ids = tokenizer.encode(text, add_special_tokens=False)[:cut]
    before = tokenizer.decode(prompt_ids)
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids=prompt_ids)
    come = before
    num_whole = 0  # of the tokens, up to the last that ends a character
    for end in range(1, len(ids) + 1):
        come += detokenizer.add(ids[end - 1 : end])
        if _ends_a_character(tokenizer, ids[num_whole:end]):
            num_whole = end
        assert come == tokenizer.decode(prompt_ids + ids[:num_whole])
    assert detokenizer.flush() == "\ufffd" * (len(ids) - num_whole)


def _ends_a_character(tokenizer: Tokenizer, ids: list[int]) -> bool:
    try:
        b"".join(map(tokenizer.token_bytes, ids)).decode()
    except UnicodeDecodeError:
        return False
    return True


def test_an_answer_goes_on_from_a_long_run_of_bytes(sentencepiece: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece, 800)
    prompt_ids = _byte_tokens(tokenizer, "မြန်မာ")
    for answer in ("\n", "စာ", " a"):
        detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids=prompt_ids)
        assert "".join(_stream(detokenizer, _byte_tokens(tokenizer, answer))) == answer


def test_bytes_that_make_no_character_come_one_by_one_and_are_not_decoded_again_and_again(
    sentencepiece: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model may say nothing else for thousands of tokens, and the event loop decodes them."""
    tokenizer = load_tokenizer(sentencepiece, 800)
    bad = tokenizer.byte_token_id(0xFF)
    assert bad is not None
    num_decoded, really = [0], tokenizer.decode

    def decode(ids: list[int], **options: bool) -> str:
        num_decoded[0] += len(ids)
        return really(ids, **options)

    monkeypatch.setattr(tokenizer, "decode", decode)
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = _stream(detokenizer, [bad] * 500)
    assert pieces == ["\ufffd"] * 500 + [""]
    assert num_decoded[0] < 20 * 500


@RELAXED
@given(text=st.text(st.one_of(st.sampled_from(" aéあ🙂\n"), st.characters(codec="utf-8")), max_size=20))
def test_no_piece_holds_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text.replace("\ufffd", ""), add_special_tokens=False)
    assert not any("\ufffd" in piece for piece in _stream(IncrementalDetokenizer(tokenizer), ids))


@RELAXED
@given(
    prompt=st.lists(st.sampled_from(["river", "the", "Zürich", "🙂", "wide"]), min_size=1, max_size=6),
    answer=st.lists(st.sampled_from(["boats", "wait", "slow", "Κόσμε"]), min_size=1, max_size=6),
)
def test_a_completion_goes_on_where_the_prompt_ended(
    tokenizer: Tokenizer, prompt: list[str], answer: list[str]
) -> None:
    begun, whole = " ".join(prompt), " ".join([*prompt, *answer])
    prompt_ids, ids = tokenizer.encode(begun), tokenizer.encode(whole)
    if ids[: len(prompt_ids)] != prompt_ids:
        return
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids=prompt_ids)
    assert begun + "".join(_stream(detokenizer, ids[len(prompt_ids) :])) == whole


def test_text_comes_as_soon_as_it_is_certain(byte_level: Path, sentencepiece: Path) -> None:
    for folder in (byte_level, sentencepiece):
        tokenizer = load_tokenizer(folder, 800)
        ids = tokenizer.encode("The river is wide", add_special_tokens=False)
        pieces = _stream(IncrementalDetokenizer(tokenizer), ids)
        assert "".join(pieces) == "The river is wide"
        assert all(pieces[:-1])
        assert not pieces[-1]


def test_a_skipped_token_does_not_swallow_the_next_space(sentencepiece: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece, 800)
    river, wind = tokenizer.encode("river", False), tokenizer.encode("wind", False)
    ids = [*river, tokenizer.eos_token_ids[0], *wind]
    assert "".join(_stream(IncrementalDetokenizer(tokenizer), ids)) == "river wind"


def test_an_unfinished_character_is_replaced_at_the_end(byte_level: Path) -> None:
    tokenizer = load_tokenizer(byte_level, 800)
    ids = tokenizer.encode("ok 🧑", add_special_tokens=False)[:-1]
    pieces = _stream(IncrementalDetokenizer(tokenizer), ids)
    assert "".join(pieces[:-1]) == "ok "
    assert pieces[-1] == "\ufffd"
