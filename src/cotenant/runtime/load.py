"""A load of requests for a worker's loop in the same process: it comes open loop, as over HTTP, and is timed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from cotenant.core.request import Request, SamplingParams
from cotenant.wire.messages import AbortRequests, AddRequest, FromWorker, Outputs, RequestFailed, ToWorker


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a load, due so many seconds after the beginning. Lengths in tokens."""

    due_s: float
    input_len: int
    output_len: int


@dataclass(slots=True)
class Answer:
    """What came of an arrival. ``token_s``: seconds after the beginning, of each token."""

    arrival: Arrival
    token_s: list[float] = field(default_factory=list)
    failure: str | None = None

    @property
    def done(self) -> bool:
        return self.failure is not None or len(self.token_s) >= self.arrival.output_len


class Load:
    """The loop's channel: hands requests over when they are due, and notes when their tokens come."""

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        vocab_size: int,
        seed: int,
        first_token: int = 0,
        first_messages: Sequence[ToWorker] = (),
    ) -> None:
        """It begins at once. Prompts are random tokens after ``first_token``: loads of one seed that differ in it are
        the same load, and find nothing of each other in a prefix cache."""
        generator = torch.Generator().manual_seed(seed)
        self.answers = [Answer(arrival) for arrival in sorted(arrivals, key=lambda arrival: arrival.due_s)]
        self._prompts = [
            (first_token, *torch.randint(vocab_size, (answer.arrival.input_len - 1,), generator=generator).tolist())
            for answer in self.answers
        ]
        self._messages = list(first_messages)
        self._num_sent = 0
        self._begun_s = time.monotonic()

    @property
    def now_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._begun_s

    @property
    def done(self) -> bool:
        """Whether all requests were sent and answered."""
        return self._num_sent == len(self.answers) and all(answer.done for answer in self.answers)

    def abort(self) -> None:
        """What is sent and not answered is wanted no more; the rest is not sent."""
        live = tuple(_name(index) for index in range(self._num_sent) if not self.answers[index].done)
        self._messages.append(AbortRequests(live))
        for answer in self.answers[self._num_sent :]:
            answer.failure = "not sent"
        self._num_sent = len(self.answers)

    def send(self, message: FromWorker) -> None:
        if isinstance(message, Outputs):
            now_s = self.now_s
            for output in message.outputs:
                self.answers[_index(output.request_id)].token_s += [now_s] * len(output.token_ids)
        elif isinstance(message, RequestFailed):
            self.answers[_index(message.request_id)].failure = message.message

    def receive(self) -> list[ToWorker]:
        messages, self._messages = self._messages, []
        while self.pending():
            answer, prompt = self.answers[self._num_sent], self._prompts[self._num_sent]
            sampling = SamplingParams(max_tokens=answer.arrival.output_len, temperature=0.0, ignore_eos=True)
            due_at = self._begun_s + answer.arrival.due_s
            messages.append(AddRequest(Request(_name(self._num_sent), prompt, sampling, due_at)))
            self._num_sent += 1
        return messages

    def pending(self) -> bool:
        if self._messages:
            return True
        return self._num_sent < len(self.answers) and self.answers[self._num_sent].arrival.due_s <= self.now_s

    def wait(self, timeout_s: float) -> bool:
        end_s = self.now_s + timeout_s
        while not self.pending() and (left_s := end_s - self.now_s) > 0:
            time.sleep(min(left_s, 1e-3))
        return self.pending()


def _name(index: int) -> str:
    return f"bench-{index}"


def _index(name: str) -> int:
    return int(name.rpartition("-")[2])
