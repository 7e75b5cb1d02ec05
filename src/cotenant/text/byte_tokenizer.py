"""A tokenizer for models without one: UTF-8 bytes, a few marks, and a letter for every other id."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cotenant.core.errors import InvalidInputError
from cotenant.text.unicode import check_encodable

BOS, EOS = "<|bos|>", "<|eos|>"
MARKS = (BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
NUM_BYTES = 256
MIN_VOCAB_SIZE = NUM_BYTES + len(MARKS)

# Rendered by the usual machinery; the generation marks say what the assistant's part is.
BYTE_CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}{{ '<|system|>' + (tools | tojson) + eos_token }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('Unknown role: ' ~ message.role) }}{% endif %}"
    "{{ '<|' + message.role + '|>' }}"
    "{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content or '' }}{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ (message.content or '') + eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class ByteTokenizer:
    """Ids 0-255 are bytes, the next ones ``MARKS``; the rest decode to lower-case letters and spaces, so that a model
    with random weights and a vocabulary of any size still produces text. ``encode`` never gives one of the rest."""

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < MIN_VOCAB_SIZE:
            raise InvalidInputError(
                f"The byte tokenizer needs a vocabulary of {MIN_VOCAB_SIZE} or more; the model's is {vocab_size}",
                param="model",
            )
        self._vocab_size = vocab_size
        self._id_of = {mark: NUM_BYTES + rank for rank, mark in enumerate(MARKS)}
        self._mark_of = {token_id: mark for mark, token_id in self._id_of.items()}
        self._special = frozenset(self._mark_of)
        self._any_mark = re.compile("(" + "|".join(re.escape(mark) for mark in MARKS) + ")")

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return (self._id_of[EOS],)

    @property
    def eos_texts(self) -> tuple[str, ...]:
        return (EOS,)

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of[BOS]

    @property
    def special_token_ids(self) -> frozenset[int]:
        return self._special

    @property
    def bytes_are_text(self) -> bool:
        return True

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        check_encodable(text)
        ids = [self._id_of[BOS]] if add_special_tokens else []
        for part in self._any_mark.split(text):
            ids.extend([self._id_of[part]] if part in self._id_of else part.encode())
        return ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids = self.encode(text, add_special_tokens=False)
        offsets: list[tuple[int, int]] = []
        position = 0
        for part in self._any_mark.split(text):
            if part in self._id_of:
                offsets.append((position, position + len(part)))
            else:
                for index, character in enumerate(part, start=position):
                    offsets.extend([(index, index + 1)] * len(character.encode()))
            position += len(part)
        return ids, offsets

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = (i for i in ids if not (skip_special_tokens and i in self._mark_of))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", errors="replace")

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        if 0 <= token_id < NUM_BYTES:
            return bytes([token_id])
        if token_id in self._mark_of:
            return self._mark_of[token_id].encode()
        return b" " if token_id % 6 == 0 else bytes([ord("a") + token_id % 26])

    def is_partial_byte(self, token_id: int) -> bool:
        return False

    def byte_token_id(self, byte: int) -> int | None:
        return None
