"""How many tokens an answer has taken so far."""

from __future__ import annotations

from cotenant.api.generation import Piece
from cotenant.api.schemas.chat import PromptTokensDetails, Usage


class UsageCount:
    """Counts the pieces of an answer to prompts of together ``num_prompt`` tokens, with ``num_choices`` choices each.

    What was cached of a prompt is what its first choice found: the others may find what that one has computed.
    """

    __slots__ = ("_num_cached", "_num_choices", "_num_generated", "_num_prompt")

    def __init__(self, num_prompt: int, num_choices: int) -> None:
        self._num_prompt = num_prompt
        self._num_choices = num_choices
        self._num_generated = 0
        self._num_cached = 0

    def add(self, index: int, piece: Piece) -> None:
        """Count a piece of choice ``index``; choices are numbered prompt by prompt."""
        self._num_generated += piece.num_tokens
        if piece.num_cached_tokens is not None and index % self._num_choices == 0:
            self._num_cached += piece.num_cached_tokens

    def usage(self) -> Usage:
        """The counts as the API tells them."""
        total = self._num_prompt + self._num_generated
        return Usage(self._num_prompt, self._num_generated, total, PromptTokensDetails(self._num_cached))
