"""One ZeroMQ PAIR over a Unix socket: the API process binds, the worker connects.

A new worker gets a new address, so a message for its predecessor can never reach it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

import msgspec
import zmq
import zmq.asyncio

from cotenant.core.request import SequenceOutput, TokenLogprobs, num_values, stretches
from cotenant.wire.messages import FromWorker, Outputs, PromptLogprobs, ToWorker

_ENCODER = msgspec.msgpack.Encoder()
# Probabilities of prompts, of their tokens and the alternatives, in one message, which is decoded in one go.
_MOST_VALUES = 4096


class WorkerChannel:
    """The worker's end, synchronous: ``receive`` drains what has arrived, ``wait`` blocks for the next message."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = 2000
        self._socket.connect(address)
        self._decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)

    def send(self, message: FromWorker) -> None:
        if isinstance(message, Outputs):
            prompts = [output for output in message.outputs if output.prompt_logprobs]
            if sum(num_values(output.prompt_logprobs or ()) for output in prompts) > _MOST_VALUES:
                for ahead in _packed(prompts):
                    self._socket.send(_ENCODER.encode(ahead))
                message = Outputs(tuple(map(_without_prompt, message.outputs)))
        self._socket.send(_ENCODER.encode(message))

    def receive(self) -> list[ToWorker]:
        """All messages that are here now; an empty list if none."""
        messages: list[ToWorker] = []
        while True:
            try:
                messages.append(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def wait(self, timeout_s: float) -> bool:
        """Block until a message can be received, at most ``timeout_s``. True if there is one."""
        return bool(self._socket.poll(round(timeout_s * 1000)))

    def pending(self) -> bool:
        """True if a message can be received now."""
        return bool(self._socket.poll(0))

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def _packed(outputs: Iterable[SequenceOutput]) -> Iterator[PromptLogprobs]:
    """The probabilities of their prompts in as few messages as have room for them: a long prompt's in several, those of
    short ones together."""
    packed: list[tuple[str, tuple[TokenLogprobs | None, ...]]] = []
    room = _MOST_VALUES
    for output in outputs:
        entries = output.prompt_logprobs or ()
        for part in stretches(entries, _MOST_VALUES):
            needed = num_values(entries[part])
            if needed > room:
                yield PromptLogprobs(tuple(packed))
                packed, room = [], _MOST_VALUES
            packed.append((output.request_id, entries[part]))
            room -= needed
    yield PromptLogprobs(tuple(packed))


def _without_prompt(output: SequenceOutput) -> SequenceOutput:
    return msgspec.structs.replace(output, prompt_logprobs=()) if output.prompt_logprobs else output


class ApiChannel:
    """The API process's end, for asyncio."""

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._ends = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.bind(address)
        self._decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
        self._come: dict[str, list[TokenLogprobs | None]] = {}  # of prompts, by request, before their outputs

    async def send(self, message: ToWorker) -> None:
        await self._socket.send(_ENCODER.encode(message))

    async def receive(self) -> FromWorker:
        """The next message, however long it takes. One that takes long to decode comes in several, between which others
        have their turn."""
        while isinstance(message := self._decoder.decode(await self._socket.recv()), PromptLogprobs):
            for request_id, entries in message.stretches:
                self._come.setdefault(request_id, []).extend(entries)
            await asyncio.sleep(0)
        if self._come and isinstance(message, Outputs):
            return Outputs(tuple(map(self._with_prompt, message.outputs)))
        return message

    def _with_prompt(self, output: SequenceOutput) -> SequenceOutput:
        come = self._come.pop(output.request_id, None)
        return output if come is None else msgspec.structs.replace(output, prompt_logprobs=tuple(come))

    async def heard_out(self) -> None:
        """Return when the worker, which has connected, has closed its end (a process that ends does), and ``receive``
        has been given all that it sent."""
        await self._ends.recv_multipart()  # once all that came before is in the socket
        while await self._socket.poll(0):
            await asyncio.sleep(0)

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.destroy(linger=0)
