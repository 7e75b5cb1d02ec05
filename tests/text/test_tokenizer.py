from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from cotenant.core.errors import InvalidInputError
from cotenant.text.byte_tokenizer import MIN_VOCAB_SIZE, ByteTokenizer
from cotenant.text.tokenizer import Tokenizer, load_tokenizer
from text.samples import SENTENCES, byte_level_folder

TEXTS = [*SENTENCES[:6], "", " ", "\n\n", "  two  spaces ", "a<|im_end|>b", "</s>", "🧑‍🚀 naïve \x00"]


@pytest.fixture(params=["byte_level", "sentencepiece", "unigram"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def test_ids_and_text_are_those_of_transformers(folder: Path) -> None:
    ours, theirs = load_tokenizer(folder, 2000), PreTrainedTokenizerFast.from_pretrained(folder)
    for text in TEXTS:
        for special in (True, False):
            assert ours.encode(text, special) == theirs.encode(text, add_special_tokens=special)
        ids = ours.encode(text)
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip) == expected
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.special_token_ids == {i for i, token in theirs.added_tokens_decoder.items() if token.special}


def test_offsets_name_the_characters_of_each_token(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, 2000)
    text = "Who waits in Zürich?\nassistant"
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    covered = {index for start, end in offsets for index in range(start, end)}
    assert covered >= {index for index, character in enumerate(text) if not character.isspace()}


@pytest.mark.parametrize("add_bos", [True, False])
def test_the_start_token_is_added_where_transformers_adds_it(tmp_path: Path, add_bos: bool) -> None:
    folder = byte_level_folder(tmp_path, add_bos_token=add_bos)
    ours, theirs = load_tokenizer(folder, 2000), PreTrainedTokenizerFast.from_pretrained(folder)
    assert ours.encode("boats") == theirs.encode("boats")


def test_end_tokens_come_from_all_files(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    eot, end = inner.token_to_id("<|eot_id|>"), inner.token_to_id("</s>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [eot, end]}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": eot}))
    tokenizer = load_tokenizer(folder, 2000)
    assert tokenizer.eos_token_ids == (inner.token_to_id("<|im_end|>"), eot, end)
    assert tokenizer.eos_texts == ("<|im_end|>", "<|eot_id|>", "</s>")


def test_the_text_of_one_token_keeps_its_space_and_its_bytes(byte_level: Path, sentencepiece: Path) -> None:
    for folder in (byte_level, sentencepiece):
        tokenizer = load_tokenizer(folder, 2000)
        ids = tokenizer.encode("wide river 🧑", add_special_tokens=False)
        joined = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
        assert joined.decode().removeprefix(" ") == "wide river 🧑"
        assert tokenizer.token_text(ids[-1]) == "\ufffd"
        assert tokenizer.token_text(tokenizer.encode("in the wind", False)[-1]).endswith("d")
        assert tokenizer.token_text(tokenizer.eos_token_ids[0]) == tokenizer.eos_texts[0]
        assert tokenizer.token_text(1999) == ""


def _with_plain_token(folder: Path, text: str, **config: Any) -> Path:
    """A model whose tokenizer.json has ``text`` as a token that is not special."""
    byte_level_folder(folder, **config)
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_tokens([tokenizers.AddedToken(text, special=False)])
    inner.save(str(folder / "tokenizer.json"))
    return folder


class TestTokensThatOnlyTheConfigurationNames:
    MARKS = "The <x1> river <x2> is wide<x3>."

    @pytest.mark.parametrize(
        "config",
        [
            {"eos_token": "<x1>"},
            {"eos_token": {"content": "<x1>", "lstrip": True, "__type": "AddedToken"}},
            {"additional_special_tokens": ["<x1>", {"content": "<x2>", "special": True, "__type": "AddedToken"}]},
            {"additional_special_tokens": ["<x1>"], "extra_special_tokens": ["<x2>"]},
            {"additional_special_tokens": ["<x1>"], "extra_special_tokens": {"mark_token": "<x2>"}},
            {"added_tokens_decoder": {"503": {"content": "<x2>"}, "502": {"content": "<x1>", "special": True}}},
            {"added_tokens_decoder": {"502": {"content": "<x1>"}}, "pad_token": "<x1>", "eos_token": "<x2>"},
            {"mark_token": "<x3>", "pad_token": "<x2>", "eos_token": "<x1>"},
        ],
    )
    def test_they_are_added_as_by_transformers(self, tmp_path: Path, config: dict[str, Any]) -> None:
        folder = byte_level_folder(tmp_path, **config)
        ours, theirs = load_tokenizer(folder, 2000), PreTrainedTokenizerFast.from_pretrained(folder)
        ids = ours.encode(self.MARKS)
        assert ids == theirs.encode(self.MARKS)
        assert max(ids) >= 502
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
        assert ours.eos_token_ids == (theirs.eos_token_id,)

    @pytest.mark.parametrize("name", ["eos_token", "pad_token"])
    def test_a_named_token_is_special_whatever_tokenizer_json_says(self, tmp_path: Path, name: str) -> None:
        folder = _with_plain_token(tmp_path, "<x1>", **{name: "<x1>"})
        ours, theirs = load_tokenizer(folder, 2000), PreTrainedTokenizerFast.from_pretrained(folder)
        ids = ours.encode("wide<x1> river")
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "wide river"
        assert 502 in ours.special_token_ids

    def test_the_properties_of_a_token_are_the_configurations(self, tmp_path: Path) -> None:
        declared = {"502": {"content": "<x1>", "special": True, "lstrip": True}}
        folder = _with_plain_token(tmp_path, "<x1>", added_tokens_decoder=declared)
        ours, theirs = load_tokenizer(folder, 2000), PreTrainedTokenizerFast.from_pretrained(folder)
        ids = ours.encode("wide  <x1> river")
        assert ids == theirs.encode("wide  <x1> river")
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "wide river"

    def test_an_additional_token_is_as_special_as_tokenizer_json_says(self, tmp_path: Path) -> None:
        folder = _with_plain_token(tmp_path, "<x1>", additional_special_tokens=["<x1>"])
        ours, theirs = load_tokenizer(folder, 2000), PreTrainedTokenizerFast.from_pretrained(folder)
        ids = ours.encode("wide<x1> river")
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "wide<x1> river"

    def test_one_beyond_the_models_vocabulary_is_text(self, tmp_path: Path) -> None:
        plain = load_tokenizer(byte_level_folder(tmp_path / "plain"), 502)
        declared = {"700": {"content": "<x3>"}}
        folder = byte_level_folder(tmp_path / "named", pad_token="<x1>", added_tokens_decoder=declared)
        assert load_tokenizer(folder, 502).encode(self.MARKS) == plain.encode(self.MARKS)

    @pytest.mark.parametrize(
        ("declared", "words"),
        [
            ({"3": {"content": "<x1>"}}, "'<x1>' the id 3, but that is the id of '<|start_header_id|>'"),
            ({"600": {"content": "<x1>"}}, "'<x1>' the id 600, but the next free one is 502"),
            ({"one": {"content": "<x1>"}}, "'added_tokens_decoder' must be tokens by their ids"),
            (["<x1>"], "'added_tokens_decoder' must be tokens by their ids"),
        ],
    )
    def test_an_id_that_cannot_be_given_is_refused(self, tmp_path: Path, declared: Any, words: str) -> None:
        folder = byte_level_folder(tmp_path, added_tokens_decoder=declared)
        with pytest.raises(InvalidInputError, match=re.escape(words)) as caught:
            load_tokenizer(folder, 2000)
        assert str(tmp_path / "tokenizer_config.json") in caught.value.message


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no tokenizer.json"),
        ({"tokenizer.json": "{"}, "Cannot read"),
        ({"tokenizer.json": None, "tokenizer_config.json": "[1]"}, "no JSON object"),
    ],
)
def test_a_broken_folder_is_named(tmp_path: Path, byte_level: Path, files: dict[str, str | None], words: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text((byte_level / name).read_text() if content is None else content)
    with pytest.raises(InvalidInputError, match=words) as caught:
        load_tokenizer(tmp_path, 2000)
    assert str(tmp_path) in caught.value.message


@pytest.mark.parametrize("which", ["byte_level", "bytes"])
def test_text_that_is_no_unicode_is_refused(which: str, byte_level: Path) -> None:
    tokenizer = load_tokenizer(byte_level if which == "byte_level" else None, 2000)
    with pytest.raises(InvalidInputError, match="U\\+D800"):
        tokenizer.encode("a\ud800b")


@pytest.mark.parametrize("ids", [[-1], [1 << 40]])
def test_ids_that_are_none_are_refused(byte_level: Path, ids: list[int]) -> None:
    with pytest.raises(InvalidInputError, match="between 0 and 1999"):
        load_tokenizer(byte_level, 2000).decode(ids)


def test_a_token_beyond_the_models_vocabulary_is_refused(byte_level: Path) -> None:
    tokenizer = load_tokenizer(byte_level, 100)
    with pytest.raises(InvalidInputError, match="vocabulary of 100 tokens"):
        tokenizer.encode("The river <think>")


class TestBytes:
    tokenizer: Tokenizer = ByteTokenizer(128_256)

    @given(st.text())
    def test_text_survives(self, text: str) -> None:
        ids = self.tokenizer.encode(text)
        assert ids[0] == self.tokenizer.bos_token_id
        assert max(ids) < MIN_VOCAB_SIZE
        assert self.tokenizer.decode(ids, skip_special_tokens=False).removeprefix("<|bos|>") == text

    @given(st.text(st.characters(codec="utf-8"), max_size=20), st.text(max_size=5))
    def test_offsets_cover_the_text_in_order(self, before: str, after: str) -> None:
        text = before + "<|user|>" + after
        ids, offsets = self.tokenizer.encode_with_offsets(text)
        assert ids == self.tokenizer.encode(text, add_special_tokens=False)
        for token_id, (start, end) in zip(ids, offsets, strict=True):
            assert self.tokenizer.token_bytes(token_id) in text[start:end].encode()

    @given(st.lists(st.integers(MIN_VOCAB_SIZE, 128_255)))
    @settings(max_examples=30)
    def test_every_other_id_is_printable(self, ids: list[int]) -> None:
        text = self.tokenizer.decode(ids)
        assert len(text) == len(ids)
        assert text.isprintable()

    def test_marks_are_special(self) -> None:
        ids = self.tokenizer.encode("<|user|>hi<|eos|>", add_special_tokens=False)
        assert len(ids) == 4
        assert self.tokenizer.decode(ids) == "hi"
        assert self.tokenizer.eos_token_ids == (ids[-1],)

    def test_a_vocabulary_without_room_is_refused(self) -> None:
        with pytest.raises(InvalidInputError, match="262"):
            load_tokenizer(None, 261)
