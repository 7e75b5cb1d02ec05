"""Tokenizers: Hugging Face's ``tokenizer.json``, and the choice between it and plain bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from cotenant.core.errors import InvalidInputError
from cotenant.text.added_tokens import add_named_tokens
from cotenant.text.byte_tokenizer import ByteTokenizer
from cotenant.text.folder import read_json, special_tokens
from cotenant.text.unicode import check_encodable

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "▁"
# Characters or tokens from which on a text takes long enough for other threads to notice.
_LONG_TEXT = 4096


class Tokenizer(Protocol):
    """What the rest of the project needs of a tokenizer.

    ``vocab_size`` is the model's: every id in ``range(vocab_size)`` can be decoded. ``bytes_are_text`` promises that
    ``decode(ids)`` is the UTF-8 decoding (bad bytes replaced) of the tokens' bytes put together, so that text can be
    decoded token by token; without it the text of a token depends on its neighbours.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All that a model's files name as an end: of a turn that training teaches, and so of an answer."""
        ...

    @property
    def eos_texts(self) -> tuple[str, ...]:
        """The tokens of ``eos_token_ids`` as a chat template writes them."""
        ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def special_token_ids(self) -> frozenset[int]: ...

    @property
    def bytes_are_text(self) -> bool: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of ``text``; marks of special tokens in it become those tokens. ``add_special_tokens``: with the
        start token, where the model's tokenizer adds one."""
        ...

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """``encode`` without special tokens added, and for each token the characters of ``text`` it stands for."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``. Ids without a token (a padded vocabulary) have no text."""
        ...

    def token_text(self, token_id: int) -> str:
        """One token as it reads in the middle of a text, its leading space included; bad bytes replaced."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The same as bytes; part of a character for a token that is one."""
        ...

    def is_partial_byte(self, token_id: int) -> bool:
        """True for a token that stands for a single byte among tokens that stand for characters (byte fallback)."""
        ...

    def byte_token_id(self, byte: int) -> int | None:
        """The token of this byte for which ``is_partial_byte`` holds; None if there is none."""
        ...


def load_tokenizer(folder: Path | None, vocab_size: int) -> Tokenizer:
    """The tokenizer of a model folder in Hugging Face's format, or the byte tokenizer where there is no folder."""
    if folder is None:
        return ByteTokenizer(vocab_size)
    return HuggingFaceTokenizer(folder, vocab_size)


class HuggingFaceTokenizer:
    """``tokenizer.json`` through the ``tokenizers`` library, with the tokens that the files beside it name.

    Whether a start token is added is decided by the post-processor in ``tokenizer.json`` alone, as in transformers.
    How text is split, and where a space is put before it, is that file's alone, too: transformers 5 rebuilds that for
    the class ``LlamaTokenizer`` from ``legacy`` and ``add_prefix_space`` in ``tokenizer_config.json``.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise InvalidInputError(
                f"{folder} has no tokenizer.json; save the model with a fast tokenizer", param="model"
            )
        try:
            self._inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise InvalidInputError(f"Cannot read {path}: {error}", param="model") from error
        self._inner.no_truncation()
        self._inner.no_padding()
        add_named_tokens(self._inner, folder, vocab_size)
        added = self._inner.get_added_tokens_decoder()
        names = special_tokens(folder)
        self._vocab_size = vocab_size
        self._num_tokens = self._inner.get_vocab_size(with_added_tokens=True)
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bos = self._id_of(names.get("bos_token"))
        self._eos = self._find_eos(folder, names.get("eos_token"))
        self._decoding = _Decoding(path)

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._inner.token_to_id(token)

    def _find_eos(self, folder: Path, eos_token: str | None) -> tuple[int, ...]:
        ids = [self._id_of(eos_token)]
        for name in ("generation_config.json", "config.json"):
            value = read_json(folder / name).get("eos_token_id")
            ids.extend(value if isinstance(value, list) else [value])
        return tuple(dict.fromkeys(token_id for token_id in ids if isinstance(token_id, int)))

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._eos

    @property
    def eos_texts(self) -> tuple[str, ...]:
        tokens = (self._inner.id_to_token(token_id) for token_id in self._eos)
        return tuple(token for token in tokens if token is not None)

    @property
    def bos_token_id(self) -> int | None:
        return self._bos

    @property
    def special_token_ids(self) -> frozenset[int]:
        return self._special

    @property
    def bytes_are_text(self) -> bool:
        return self._decoding.byte_level

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._encode(text, add_special_tokens).ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self._encode(text, False)
        return encoding.ids, encoding.offsets

    def _encode(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        check_encodable(text)
        if len(text) < _LONG_TEXT:
            encoding = self._inner.encode(text, add_special_tokens=add_special_tokens)
        else:  # the same, but it lets other threads run meanwhile
            encoding = self._inner.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        if self._num_tokens > self._vocab_size and max(encoding.ids, default=0) >= self._vocab_size:
            raise InvalidInputError(
                f"The text holds a token with id {max(encoding.ids)}, which this model's vocabulary of "
                f"{self._vocab_size} tokens does not have"
            )
        return encoding

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        try:
            if len(ids) < _LONG_TEXT:
                return self._inner.decode(list(ids), skip_special_tokens=skip_special_tokens)
            # The same, but it lets other threads run meanwhile.
            return self._inner.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        except OverflowError as error:
            raise InvalidInputError(f"Token ids must be between 0 and {self._vocab_size - 1}") from error

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        token = self._inner.id_to_token(token_id)
        return b"" if token is None else self._decoding.token_bytes(token)

    def is_partial_byte(self, token_id: int) -> bool:
        if not self._decoding.byte_fallback:
            return False
        token = self._inner.id_to_token(token_id)
        return token is not None and _BYTE_TOKEN.fullmatch(token) is not None

    def byte_token_id(self, byte: int) -> int | None:
        return self._inner.token_to_id(f"<0x{byte:02X}>") if self._decoding.byte_fallback else None


class _Decoding:
    """How tokens become bytes, read off the decoder in ``tokenizer.json``."""

    def __init__(self, path: Path) -> None:
        decoder = json.loads(path.read_text(encoding="utf-8")).get("decoder")
        steps = _flatten(decoder)
        kinds = [step.get("type") for step in steps]
        self.byte_level = kinds == ["ByteLevel"]
        self.byte_fallback = "ByteFallback" in kinds
        self._word_start = _WORD_START if "Metaspace" in kinds else None
        for step in steps:
            if step.get("type") == "Metaspace":
                self._word_start = step.get("replacement", _WORD_START)
            elif step.get("type") == "Replace" and step.get("content") == " ":
                self._word_start = step.get("pattern", {}).get("String", self._word_start)
        self._byte_of = _byte_level_alphabet() if "ByteLevel" in kinds else {}

    def token_bytes(self, token: str) -> bytes:
        if self._byte_of:
            # As the library does it: a token with any character outside the alphabet stands for itself.
            try:
                return bytes(self._byte_of[character] for character in token)
            except KeyError:
                return token.encode()
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return (token.replace(self._word_start, " ") if self._word_start else token).encode()


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for child in decoder.get("decoders", []) for step in _flatten(child)]
    return [decoder]


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: a printable one of Latin-1 is itself, the others follow U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}
