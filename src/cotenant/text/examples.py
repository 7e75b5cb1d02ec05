"""Training examples as token ids with a loss weight each, and the file in which the worker gets them.

The file is safetensors with ``token_ids`` int32 [total], ``weights`` float32 [total] and ``offsets`` int64
[num_examples + 1]: example i is ``offsets[i]:offsets[i + 1]``. A weight is that of predicting this very token from
those before it, so an example's first token weighs 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from cotenant.core.errors import InvalidInputError
from cotenant.durable import leave_room, write_atomically
from cotenant.text.chat import ChatTemplate
from cotenant.text.preference_format import Preference
from cotenant.text.spans import Span, SpanFinder
from cotenant.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EncodedExample:
    """One conversation, as long as the model sees it."""

    token_ids: npt.NDArray[np.int32]  # [tokens]
    weights: npt.NDArray[np.float32]  # [tokens]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_trained_tokens(self) -> int:
        return int(np.count_nonzero(self.weights))


def encode_example(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    example: Mapping[str, Any],
    max_length: int | None,
    cut_length: int | None = None,
) -> EncodedExample:
    """Encode one example of OpenAI's chat format; only the assistant's tokens are trained on.

    The whole conversation is rendered and encoded once, so the ids are those of inference; a token is trained on if any
    of its characters lie in an assistant message (its end of turn included) whose ``weight`` is not 0. With
    ``cut_length``, the number of tokens that the example will be cut to, no weights are worked out for messages that
    begin behind them.
    InvalidInputError if the example has more than ``max_length`` tokens, or none to train on.
    """
    messages: Sequence[Mapping[str, Any]] = example["messages"]
    finder = SpanFinder(
        template, [_without_weight(message) for message in messages], example.get("tools"), tokenizer.eos_texts
    )
    ids, offsets = tokenizer.encode_with_offsets(finder.text)
    # Before the spans: they are found by rendering again for each message, and a line may have very many.
    if max_length is not None and len(ids) > max_length:
        raise InvalidInputError(
            f"it has {len(ids)} tokens, but at most {max_length} are possible here; shorten it, split it, or give "
            "max_length, which cuts what is longer"
        )
    is_cut = cut_length is not None and len(ids) > cut_length
    until = max((end for _, end in offsets[:cut_length]), default=0) if is_cut else None
    spans = finder.find(until)
    weights = _token_weights(offsets, spans, messages)
    said: dict[int, list[str]] = {}
    for span in spans:
        said.setdefault(span.message, []).append(finder.text[span.start : span.end])
    for index, pieces in said.items():
        if _weight(messages[index]):
            _check_said(messages[index], index + 1, "".join(pieces), tokenizer.eos_texts)
    # What is cut off later is no error of the line: what is left of all lines is looked at when the job starts.
    unseen = messages[spans[-1].message + 1 if spans else 0 :] if is_cut else []
    if not weights.any() and not any(message["role"] == "assistant" and _weight(message) for message in unseen):
        raise InvalidInputError("nothing to train on: no token of an assistant message with weight 1 is left in it")
    return EncodedExample(np.asarray(ids, dtype=np.int32), weights)


def _weight(message: Mapping[str, Any]) -> float:
    return 1.0 if message.get("weight") is None else message["weight"]


def _token_weights(
    offsets: Sequence[tuple[int, int]], spans: Sequence[Span], messages: Sequence[Mapping[str, Any]]
) -> npt.NDArray[np.float32]:
    """For each token the weight of the last span that it shares characters with; 0 for the first, and without one."""
    weights = np.zeros(len(offsets), dtype=np.float32)
    starts, ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
    # Offsets need not rise from token to token. These do, so that only tokens about a span are compared with it.
    reached = np.maximum.accumulate(ends)
    ahead = np.minimum.accumulate(starts[::-1])[::-1]
    for span in spans:
        part = slice(np.searchsorted(reached, span.start, "right"), np.searchsorted(ahead, span.end, "left"))
        weights[part][(starts[part] < span.end) & (ends[part] > span.start)] = _weight(messages[span.message])
    weights[:1] = 0.0
    return weights


def encode_preference(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    preference: Preference,
    max_length: int | None,
    cut_length: int | None = None,
) -> tuple[EncodedExample, EncodedExample]:
    """The prompt with the chosen answer, and the prompt with the rejected one. Only the answers' tokens have weight.

    InvalidInputError, naming the answer's field, for what ``encode_example`` refuses, and if the two are the same.
    """
    prompt = [{**message, "weight": 0} if message["role"] == "assistant" else message for message in preference.prompt]
    encoded = []
    for field, answer in zip(preference.fields, (preference.chosen, preference.rejected), strict=True):
        example = {"messages": [*prompt, *answer], "tools": preference.tools}
        try:
            encoded.append(encode_example(tokenizer, template, example, max_length, cut_length))
        except InvalidInputError as error:
            raise InvalidInputError(f"'{field}': {error.message}") from error
    if np.array_equal(encoded[0].token_ids, encoded[1].token_ids):
        names = " and ".join(f"'{field}'" for field in preference.fields)
        raise InvalidInputError(f"{names} are the same, token by token, so neither is preferred; leave the line out")
    return encoded[0], encoded[1]


def _check_said(message: Mapping[str, Any], number: int, said: str, eos_texts: Sequence[str]) -> None:
    """A template that leaves a message's substance out would teach the model to say nothing."""
    names = {call["function"]["name"] for call in message.get("tool_calls") or []}
    if any(name not in said for name in names):
        raise InvalidInputError(
            f"the chat template does not write the tool calls of message {number}; weight 0 skips it"
        )
    for token in eos_texts:
        said = said.replace(token, "")
    if not names and not said.strip():
        raise InvalidInputError(f"the chat template writes nothing of message {number}; weight 0 skips it")


def _without_weight(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "weight"}


def write_examples(path: Path, examples: Sequence[EncodedExample]) -> None:
    """Write the examples to ``path``, all of them or nothing. OSError if the disk is full."""
    lengths = [example.num_tokens for example in examples]
    tensors = {
        "token_ids": _joined([example.token_ids for example in examples], np.int32),
        "weights": _joined([example.weights for example in examples], np.float32),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
    }
    # Not save_file: it reports a full disk as an error of its own kind, which is no OSError.
    content = save(tensors)
    write_atomically(path, lambda temporary: _write(temporary, content))


def _joined(arrays: Sequence[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, dtype=dtype), *arrays])


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    leave_room(path)
