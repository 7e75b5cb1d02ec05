"""Which characters of a rendered conversation the assistant said, for any chat template.

The rule: what the model has to produce itself after a generation prompt, up to and including the end of its turn. That
is the message's content and tool calls and the end-of-turn tokens; not the header, not the line break that a template
puts behind the turn.

A template that declares it with ``{% generation %}`` is believed. The templates of Llama 3 and Qwen declare nothing, so
it is found from outside, by rendering again: the conversation cut before the message must be how the whole begins (then
the message starts there), and cut behind it likewise. Where a template rewrites history (drops earlier thinking, moves
the tools to the last question) these are no prefixes; then the message is rendered with a stand-in text in its place,
within the whole conversation, and what stands before and behind that is the same as before and behind the message.

Each message costs renders of its own, so what is beyond a job's limit on length should be refused before spans are
looked for. What is cut off anyway is left out of the search and, where that changes nothing before the cut, of renders.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from cotenant.core.errors import InvalidInputError
from cotenant.text.chat import ChatTemplate, Message
from cotenant.text.unused_word import unused_word

# The fewest messages that a conversation is cut to for a search of its beginning.
_MIN_BEGINNING = 16


@dataclass(frozen=True, slots=True)
class Span:
    """Characters ``start:end`` of the rendered text belong to message number ``message`` (from 0)."""

    message: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Probe:
    """What surrounds a stand-in for a message.

    ``before``/``after``: the rest of the whole conversation. ``lead``: what comes between the generation prompt and the
    stand-in (None if that cannot be told). ``tail``: what follows it when the conversation ends there.
    """

    before: str
    after: str
    lead: str | None
    tail: str


class SpanFinder:
    """One conversation: ``text``, as the template renders it, and where in it the assistant's messages are.

    ``end_tokens`` are the texts of the tokens that end a turn. InvalidInputError if the template refuses the messages.
    """

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        end_tokens: Sequence[str],
        strftime: Callable[[str], str] | None = None,
    ) -> None:
        self._template = template
        self._messages = list(messages)
        self._assistants = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
        self._tools = tools
        self._end_tokens = tuple(token for token in end_tokens if token)
        # A template may write the time; all renders of one conversation get the same.
        self._strftime = strftime or datetime.now().strftime
        self._stand_in = unused_word("StandIn", json.dumps([self._messages, tools], default=str))
        self.text = self._render(self._messages)

    def _render(self, messages: Sequence[Message], prompt: bool = False, **kwargs: Any) -> str:
        return self._template.render(messages, self._tools, prompt, strftime_now=self._strftime, **kwargs)

    def _try_render(self, messages: Sequence[Message], prompt: bool = False) -> str | None:
        """None where the template refuses: a part of a conversation need not be a conversation."""
        try:
            return self._render(messages, prompt)
        except InvalidInputError:
            return None

    def find(self, until: int | None = None) -> list[Span]:
        """The spans of the assistant's messages in order, or of those alone that begin before character ``until``.

        A message may have several spans if the template declares several, or none if the template declares others but
        none of its own. InvalidInputError if a template changes the conversation in a way that hides where a message
        lies.
        """
        until = len(self.text) + 1 if until is None else until
        all_declared = self._declared()
        if not all_declared:
            return self._inferred(until)
        declared = [(start, end) for start, end in all_declared if start < until]
        try:
            # What is declared before ``until`` may reach into messages that begin behind it.
            inferred = self._inferred(max([until, *(end for _, end in declared)]))
        except InvalidInputError:
            if len(all_declared) != len(self._assistants):
                raise
            return [Span(index, *span) for index, span in zip(self._assistants, declared, strict=False)]
        return list(_owned(declared, inferred))

    def _inferred(self, until: int) -> list[Span]:
        """The spans of messages that begin before ``until``, whatever the template declares."""
        for beginning in self._beginnings(until):
            try:
                spans = beginning._infer_all(until)
            except InvalidInputError:
                continue
            length = max([until, *(span.end for span in spans)])
            if beginning.text[:length] == self.text[:length]:
                return spans
        return self._infer_all(until)

    def _beginnings(self, until: int) -> Iterator[SpanFinder]:
        """The conversation cut behind more and more of its messages, where it reads as the whole does up to ``until``.

        Twice as many each time, so that to render all of them takes no longer than two renders of the whole.
        """
        count = _MIN_BEGINNING
        while until < len(self.text) and count < len(self._messages):
            messages = self._messages[:count]
            count *= 2
            try:
                beginning = SpanFinder(self._template, messages, self._tools, self._end_tokens, self._strftime)
            except InvalidInputError:  # a part of a conversation need not be a conversation
                continue
            if beginning.text[: until + 1] == self.text[: until + 1]:
                yield beginning

    def _declared(self) -> list[tuple[int, int]]:
        """What stands between the template's generation tags, each with the end of turn that follows it."""
        opening, closing = f"<{self._stand_in}>", f"</{self._stand_in}>"
        pieces = self._render(self._messages, generation_marks=(opening, closing)).split(opening)
        text = pieces[0]
        spans = []
        for piece in pieces[1:]:
            inside, closed, outside = piece.partition(closing)
            if not closed:
                return []
            if inside.strip():
                spans.append((len(text), len(text) + len(inside)))
            text += inside + outside
        # A filter around the tags can see the marks; then they say nothing about the real text.
        return [(start, self._close(start, end)) for start, end in spans] if text == self.text else []

    def _close(self, start: int, end: int) -> int:
        """``end`` moved back to the end token before it, or forward over those that follow."""
        trimmed = self.text[start:end].rstrip()
        if trimmed.endswith(self._end_tokens):
            return start + len(trimmed)
        return self._behind_end_tokens(self.text, end)

    def _behind_end_tokens(self, text: str, position: int) -> int:
        """``position`` in ``text`` moved forward over the end tokens that stand there."""
        while token := next((token for token in self._end_tokens if text.startswith(token, position)), None):
            position += len(token)
        return position

    def _infer_all(self, until: int) -> list[Span]:
        spans: list[Span] = []
        for index in self._assistants:
            start = self._start(index)
            earliest = spans[-1].end if spans else 0
            if start is not None and start >= max(until, earliest):
                break
            end = self._end(index)
            if start is None or end is None or not earliest <= start <= end:
                raise InvalidInputError(
                    "the chat template rewrites the conversation, so that it cannot be told what of it is message "
                    f"{index + 1}; mark the assistant's part in the template with {{% generation %}}"
                )
            # Some templates end a turn with the mark that opens the next one.
            spans.append(Span(index, start, self._behind_end_tokens(self.text, end)))
        return spans

    # -- where a message starts

    def _start(self, index: int) -> int | None:
        asked = self._try_render(self._messages[:index], prompt=True)
        if asked is not None and self.text.startswith(asked):
            return len(asked) + self._header_length(index, asked)
        for probe in self._probes(index):
            if self.text.startswith(probe.before):
                return len(probe.before) - self._spoken_lead_length(index, probe)
        return None

    @cached_property
    def _generation_prompt(self) -> str:
        """What ``add_generation_prompt`` adds; empty for templates without a header for the assistant."""
        first = next((i for i, message in enumerate(self._messages) if i and message.get("role") == "assistant"), None)
        for question in (self._messages[:first], [*self._messages, {"role": "user", "content": self._stand_in}]):
            with_prompt, without = self._try_render(question, prompt=True), self._try_render(question)
            if with_prompt is not None and without is not None and with_prompt.startswith(without):
                return with_prompt[len(without) :]
        return ""

    def _header_length(self, index: int, asked: str) -> int:
        """Length of the header that a template without a generation prompt puts before the message all the same."""
        header = "" if self._generation_prompt else self._fixed_lead(index)
        return len(header) if self.text.startswith(header, len(asked)) else 0

    def _spoken_lead_length(self, index: int, probe: _Probe) -> int:
        """How much of the end of ``probe.before`` the model has to produce: an empty thinking block, say."""
        if not probe.lead or (not self._generation_prompt and self._fixed_lead(index)):
            return 0
        return len(probe.lead) if probe.before.endswith(self._generation_prompt + probe.lead) else 0

    def _fixed_lead(self, index: int) -> str:
        """What a plain answer has before its first word although nothing asked for it, unless it is only space."""
        probe = self._probe(index, {"role": "assistant", "content": self._stand_in})
        return probe.lead if probe is not None and probe.lead is not None and probe.lead.strip() else ""

    # -- where a message ends

    def _end(self, index: int) -> int | None:
        through = self._try_render(self._messages[: index + 1])
        is_prefix = through is not None and self.text.startswith(through)
        if through is not None and is_prefix and through.rstrip().endswith(self._end_tokens):
            return len(through.rstrip())
        for probe in self._probes(index):
            end_of_turn = self._end_of_turn(probe.tail)
            # A template may end only the last turn; then nothing ends this one.
            rest = probe.after.removeprefix(end_of_turn)
            if self.text.endswith(rest):
                return len(self.text) - len(rest)
        return len(through.rstrip()) if through is not None and is_prefix else None

    def _end_of_turn(self, tail: str) -> str:
        """``tail`` up to its first end tokens, or without the space at its end if it has none."""
        starts = [start for token in self._end_tokens if (start := tail.find(token)) >= 0]
        if not starts:
            return tail.rstrip()
        return tail[: self._behind_end_tokens(tail, min(starts))]

    # -- stand-ins

    def _probes(self, index: int) -> list[_Probe]:
        plain: dict[str, Any] = {"role": "assistant", "content": self._stand_in}
        candidates = [plain]
        calls = self._messages[index].get("tool_calls")
        if calls:
            candidates.append({"role": "assistant", "tool_calls": [self._stand_in_call(call) for call in calls]})
        probes = (self._probe(index, candidate) for candidate in candidates)
        return [probe for probe in probes if probe is not None]

    def _stand_in_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """The same call with another name and other arguments; its id stays, a later message may refer to it."""
        return {**call, "function": {"name": self._stand_in, "arguments": {self._stand_in: self._stand_in}}}

    def _probe(self, index: int, message: dict[str, Any]) -> _Probe | None:
        word, earlier, later = self._stand_in, self._messages[:index], self._messages[index + 1 :]
        whole = self._try_render([*earlier, message, *later])
        cut = self._try_render([*earlier, message]) if later else whole
        if whole is None or cut is None or word not in whole or word not in cut:
            return None
        return _Probe(
            before=whole[: whole.index(word)],
            after=whole[whole.rindex(word) + len(word) :],
            lead=self._lead(earlier, cut),
            tail=cut[cut.rindex(word) + len(word) :],
        )

    def _lead(self, earlier: Sequence[Message], cut: str) -> str | None:
        asked = self._try_render(earlier, prompt=True)
        if asked is None or not cut.startswith(asked):
            # The question reads differently once it is answered. What a plain answer shares is not said by the model.
            plain = self._try_render([*earlier, {"role": "assistant", "content": self._stand_in}])
            asked = None if plain is None or plain == cut else _common_prefix(plain, cut)
        return None if asked is None else cut[len(asked) : cut.index(self._stand_in)]


def _common_prefix(left: str, right: str) -> str:
    pairs = zip(left, right, strict=False)
    return left[: next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))]


def _owned(declared: Sequence[tuple[int, int]], inferred: Sequence[Span]) -> Iterator[Span]:
    """The spans of ``declared``, for each message of ``inferred`` that they share characters with."""
    ends = [own.end for own in inferred]  # in order, as no two overlap
    for start, end in declared:
        index = bisect_right(ends, start)
        while index < len(inferred) and inferred[index].start < end:
            yield Span(inferred[index].message, start, end)
            index += 1
