"""Token ids in, text out, as they come."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from cotenant.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_NUM_CONTEXT_TOKENS = 8
_REPLACE_EACH_BYTE = "cotenant.replace_each_byte"


class IncrementalDetokenizer:
    """The text of a growing sequence, piece by piece; all pieces together are ``tokenizer.decode`` of all its ids.

    But for one case: where some tokens stand for single bytes among others that stand for characters, and a byte in a
    run of them belongs to no character, ``tokenizer.decode`` replaces each byte of the run. Here the characters in it
    stay: they were emitted before it ended.

    Part of a character is held back until it is complete or ``flush`` says that nothing follows. ``prompt_ids`` (its
    tail is enough) make the first piece continue the prompt, leading space included; without them the text starts by
    itself, as an answer in a chat does.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._stream: _Stream
        if tokenizer.bytes_are_text:
            self._stream = _ByteStream(tokenizer)
        else:
            context = [token_id for token_id in prompt_ids if token_id not in tokenizer.special_token_ids]
            self._stream = _WindowStream(tokenizer, context[-_NUM_CONTEXT_TOKENS:])

    def add(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete, often none."""
        shown = [token_id for token_id in token_ids if token_id not in self._hidden]
        return self._stream.add(shown) if shown else ""

    def flush(self) -> str:
        """What was held back, bad bytes replaced. Nothing may be added afterwards."""
        return self._stream.flush()


class _Stream(Protocol):
    def add(self, token_ids: list[int]) -> str: ...

    def flush(self) -> str: ...


class _ByteStream:
    """For tokenizers whose text is their tokens' bytes put together: one UTF-8 decoder, at most 3 bytes held back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_ids: list[int]) -> str:
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, token_ids)))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """For tokenizers where a token's text depends on its place (sentencepiece drops the first space).

    ``_window[:_num_emitted]`` are the tokens of the last piece, already emitted and kept as context, so that no later
    token is ever first. The rest of the window is not emitted yet. The window holds no part of a character.
    """

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._tokenizer = tokenizer
        before = _WholeCharacters(tokenizer)  # the context may begin within a character
        self._window = before.add(context) + before.flush()
        self._num_emitted = len(self._window)
        # The text of the context; the next piece is what comes after it.
        self._emitted_text = self._decode(self._window)
        self._characters = _WholeCharacters(tokenizer)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def add(self, token_ids: list[int]) -> str:
        self._window += self._characters.add(token_ids)
        if len(self._window) == self._num_emitted:
            return ""
        text = self._decode(self._window)
        # A token of a single byte ends a whole character here, be it a replaced one.
        is_part = text.endswith(_REPLACEMENT) and not self._tokenizer.is_partial_byte(self._window[-1])
        if is_part or len(text) <= len(self._emitted_text):
            return ""
        piece = text[len(self._emitted_text) :]
        self._window = self._window[self._num_emitted :]
        self._num_emitted = len(self._window)
        self._emitted_text = self._decode(self._window)
        return piece

    def flush(self) -> str:
        self._window += self._characters.flush()
        piece = self._decode(self._window)[len(self._emitted_text) :]
        self._window = []
        self._num_emitted = 0
        self._emitted_text = ""
        return piece


class _WholeCharacters:
    """Holds back tokens of single bytes until they make a character, at most 3 of them. Those that never will become
    the tokens of the replacement character's bytes, so that they spoil nothing beside them when they are decoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(_REPLACE_EACH_BYTE)

    def add(self, token_ids: list[int]) -> list[int]:
        """The tokens that are complete now. Ids without a token are left out: decode does not see them."""
        whole: list[int] = []
        for token_id in token_ids:
            token_bytes = self._tokenizer.token_bytes(token_id)
            if self._tokenizer.is_partial_byte(token_id):
                whole += self._tokens_of(self._decoder.decode(token_bytes))
            elif token_bytes:
                whole += self.flush()
                whole.append(token_id)
        return whole

    def flush(self) -> list[int]:
        """What was held back, replaced."""
        return self._tokens_of(self._decoder.decode(b"", final=True))

    def _tokens_of(self, text: str) -> list[int]:
        tokens = map(self._tokenizer.byte_token_id, text.encode())
        return [token_id for token_id in tokens if token_id is not None]


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """As decoders with byte fallback do it; Python's own replaces the beginning of a character by one."""
    assert isinstance(error, UnicodeDecodeError)
    return _REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_REPLACE_EACH_BYTE, _replace_each_byte)
