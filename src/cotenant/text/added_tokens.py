"""The tokens that ``tokenizer_config.json`` names and ``tokenizer.json`` lacks, or does not know to be special."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from cotenant.core.errors import InvalidInputError
from cotenant.text.folder import read_json, special_token_entries

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def add_named_tokens(inner: tokenizers.Tokenizer, folder: Path, vocab_size: int) -> None:
    """Add what the files beside ``tokenizer.json`` name to ``inner``, which holds that file, as transformers does.

    First the tokens of ``added_tokens_decoder``, then ``eos_token`` and the like, which are special whatever
    ``tokenizer.json`` says of them, then the additional ones. Left out is what would get an id beyond the model's
    vocabulary: the model could neither read nor write it. InvalidInputError for an id that cannot be given.
    """
    path = folder / "tokenizer_config.json"
    config = read_json(path)
    adding = _Adding(inner, folder, vocab_size)
    for token_id, token in _numbered_tokens(config.get("added_tokens_decoder") or {}, path):
        adding.add_numbered(token_id, token)
    for entry in special_token_entries(folder).values():
        adding.add_special(_token(entry, special=True))
    for entry in _additional(config) or _additional(read_json(folder / "special_tokens_map.json")):
        adding.add_unknown(_token(entry, special=True))


class _Adding:
    """The tokens added so far: ``known`` has them by their text, those of ``tokenizer.json`` included."""

    def __init__(self, inner: tokenizers.Tokenizer, folder: Path, vocab_size: int) -> None:
        self._inner = inner
        self._folder = folder
        self._vocab_size = vocab_size
        added = inner.get_added_tokens_decoder()
        self.known = {token.content: token for token in added.values()}
        # The library numbers new tokens itself, and this is how.
        self._next_id = max([inner.get_vocab_size(with_added_tokens=False), *(token_id + 1 for token_id in added)])

    def add(self, token: tokenizers.AddedToken) -> None:
        """A token that is there keeps its id, and gets the properties of this one."""
        if self._inner.token_to_id(token.content) is None:
            if self._next_id >= self._vocab_size:
                return
            if (other := self._inner.id_to_token(self._next_id)) is not None:
                raise self._error(f"names the token {token.content!r}, whose id would be that of {other!r}")
            self._next_id += 1
        self._inner.add_tokens([token])
        self.known[token.content] = token

    def add_numbered(self, token_id: int, token: tokenizers.AddedToken) -> None:
        known = self._inner.token_to_id(token.content)
        if known is None and token_id < self._vocab_size and token_id != self._next_id:
            other = self._inner.id_to_token(token_id)
            reason = f"the next free one is {self._next_id}" if other is None else f"that is the id of {other!r}"
            raise self._error(f"gives the token {token.content!r} the id {token_id}, but {reason}")
        if repr(self.known.get(token.content)) != repr(token):
            self.add(token)

    def add_special(self, token: tokenizers.AddedToken | None) -> None:
        if token is None:
            return
        known = self.known.get(token.content)
        if known is None:
            self.add(token)
        elif not known.special:
            flags = {name: getattr(known, name) for name in _FLAGS} | {"special": True}
            self.add(tokenizers.AddedToken(known.content, **flags))

    def add_unknown(self, token: tokenizers.AddedToken | None) -> None:
        if token is not None and token.content not in self.known:
            self.add(token)

    def _error(self, reason: str) -> InvalidInputError:
        return InvalidInputError(
            f"{self._folder / 'tokenizer_config.json'} {reason} by tokenizer.json; add the token there, too, "
            "with the id that the model knows it by",
            param="model",
        )


def _numbered_tokens(declared: Any, path: Path) -> Iterator[tuple[int, tokenizers.AddedToken]]:
    try:
        by_id = {int(token_id): _token(entry) for token_id, entry in declared.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidInputError(
            f"Cannot read {path}: 'added_tokens_decoder' must be tokens by their ids: {error}", param="model"
        ) from error
    for token_id in sorted(by_id):
        if (token := by_id[token_id]) is not None:
            yield token_id, token


def _token(entry: Any, **flags: bool) -> tokenizers.AddedToken | None:
    """A token from its text, or from an object with that and its properties; None for anything else."""
    if isinstance(entry, str):
        return tokenizers.AddedToken(entry, **flags) if entry else None
    if not isinstance(entry, Mapping) or not isinstance(entry.get("content"), str) or not entry["content"]:
        return None
    own = {name: entry[name] for name in _FLAGS if isinstance(entry.get(name), bool)}
    return tokenizers.AddedToken(entry["content"], **own | flags)


def _additional(config: Mapping[str, Any]) -> list[Any]:
    """The list goes by two names, of which ``extra_special_tokens`` may also hold named tokens, in an object."""
    lists = [config.get(name) for name in ("extra_special_tokens", "additional_special_tokens")]
    return next((found for found in lists if isinstance(found, list) and found), [])
