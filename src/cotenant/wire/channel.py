"""One ZeroMQ PAIR over a Unix socket: the API process binds, the worker connects.

A new worker gets a new address, so a message for its predecessor can never reach it.
"""

from __future__ import annotations

import asyncio

import msgspec
import zmq
import zmq.asyncio

from cotenant.wire.messages import FromWorker, ToWorker

_ENCODER = msgspec.msgpack.Encoder()


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

    async def send(self, message: ToWorker) -> None:
        await self._socket.send(_ENCODER.encode(message))

    async def receive(self) -> FromWorker:
        """The next message, however long it takes."""
        return self._decoder.decode(await self._socket.recv())

    async def heard_out(self) -> None:
        """Return when the worker, which has connected, has closed its end (a process that ends does), and ``receive``
        has been given all that it sent."""
        await self._ends.recv_multipart()  # once all that came before is in the socket
        while await self._socket.poll(0):
            await asyncio.sleep(0)

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.destroy(linger=0)
