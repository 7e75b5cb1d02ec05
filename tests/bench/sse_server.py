"""A completions API that generates nothing: it streams as many events as are asked for, at a set pace, or misbehaves.

    python tests/bench/sse_server.py PORT [--interval-ms 5] [--tokens-per-chunk 1] [--dies-after ANSWERS]

The model's name says how an answer goes: ``tiny`` is answered in full, the others as ``_Answer`` lists them. One timer
feeds all streams, so that the server costs less than the client that it is there to measure. ``GET /seen`` gives the
bodies of all completions so far, without the prompts' ids but with their lengths and first ids, and with the number of
the connection that each came by; ``GET /read`` the number of answers that a client has certainly read to their ends: on
the same connection it has asked for another one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from typing import Any

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_TOKEN = (
    b'{"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1750000000,"model":"tiny",'
    b'"choices":[{"index":0,"text":" token","logprobs":null,"finish_reason":null}],"usage":null}'
)
_BUSY = b'{"error":{"message":"too many requests","type":"server_error","param":null,"code":null}}'


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(data: bytes) -> bytes:
    return _chunk(b"data: " + data + b"\n\n")


class _Answer:
    """One answer under way."""

    def __init__(self, transport: Any, body: dict[str, Any], tokens_per_chunk: int) -> None:
        self._transport = transport
        self._model = body["model"]
        self._num_prompt = len(body["prompt"])
        self._num_tokens = body["max_tokens"]
        self._per_chunk = tokens_per_chunk
        self._sent = 0
        transport.write(_HEAD)

    def step(self) -> bool:
        """Send the next chunk; False when there is no more."""
        if self._transport.is_closing():
            return False
        self._sent += self._per_chunk
        if self._model == "truncated" and self._sent > 3:
            self._transport.close()
            return False
        if self._model == "error-event" and self._sent > 3:
            self._transport.write(_event(b'{"error":{"message":"the worker died"}}') + _chunk(b""))
            return False
        if self._model == "not-json" and self._sent > 3:
            self._transport.write(_event(b"{oops") + _event(b"[DONE]") + _chunk(b""))
            return False
        if self._model == "stalls" and self._sent > 3:
            return False
        if self._model == "split":
            for byte in _event(_TOKEN):
                self._transport.write(bytes([byte]))
        else:
            self._transport.write(_event(_TOKEN))
        if self._sent < (self._num_tokens if self._model != "short" else 2):
            return True
        self._finish()
        return False

    def _finish(self) -> None:
        usage = {"prompt_tokens": self._num_prompt, "completion_tokens": self._sent}
        last = _event(b'{"choices":[],"usage":' + json.dumps(usage).encode() + b"}")
        if self._model == "no-usage":
            last = b""
        self._transport.write(last + _event(b"[DONE]") + _chunk(b""))
        if self._model == "closes":
            self._transport.close()


class _Server:
    def __init__(self, interval_s: float, tokens_per_chunk: int, dies_after: int | None) -> None:
        self.seen: list[dict[str, Any]] = []
        self.num_connections = 0
        self.num_read = 0
        self._dies_after = dies_after
        self._answers: list[_Answer] = []
        self._interval_s = interval_s
        self._tokens_per_chunk = tokens_per_chunk

    def answer(self, transport: Any, body: dict[str, Any], connection: int) -> None:
        prompt = body["prompt"]
        self.seen.append({**body, "prompt": prompt[:1024], "prompt_len": len(prompt), "connection": connection})
        if body["model"] == "busy":
            transport.write(b"HTTP/1.1 503 Busy\r\ncontent-length: %d\r\n\r\n%b" % (len(_BUSY), _BUSY))
        elif body["model"] == "hangs-up":
            transport.close()
        else:
            self._answers.append(_Answer(transport, body, self._tokens_per_chunk))

    def was_read(self) -> None:
        """A client has read an answer to its end."""
        self.num_read += 1
        if self.num_read == self._dies_after:
            os._exit(0)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            due_s += self._interval_s
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            self._answers = [answer for answer in self._answers if answer.step()]


class _Connection(asyncio.Protocol):
    def __init__(self, server: _Server) -> None:
        self._server = server
        self._data = b""
        self._was_asked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._server.num_connections += 1
        self._number = self._server.num_connections

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, rest = self._data.partition(b"\r\n\r\n")
        if not found:
            return
        lengths = [line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
        length = int(lengths[0]) if lengths else 0
        if len(rest) < length:
            return
        self._data = rest[length:]
        if head.startswith(b"POST"):
            if self._was_asked:
                self._server.was_read()
            self._was_asked = True
            self._server.answer(self._transport, json.loads(rest[:length]), self._number)
            return
        path = head.split()[1]
        answers = {
            b"/v1/models": {"data": [{"id": "tiny"}]},
            b"/version": {"version": "1.2.3"},
            b"/seen": self._server.seen,
            b"/read": self._server.num_read,
        }
        content = json.dumps(answers.get(path, {})).encode()
        status = b"200 OK" if path in answers else b"404 Not Found"
        self._transport.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(content), content))


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--interval-ms", type=float, default=5.0)
    parser.add_argument("--tokens-per-chunk", type=int, default=1)
    parser.add_argument("--dies-after", type=int, metavar="ANSWERS")
    arguments = parser.parse_args()
    server = _Server(arguments.interval_ms / 1e3, arguments.tokens_per_chunk, arguments.dies_after)
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(lambda: _Connection(server), "127.0.0.1", arguments.port, backlog=1024)
    port = listening.sockets[0].getsockname()[1]
    print(port, flush=True)
    await server.run()


if __name__ == "__main__":
    try:
        import uvloop

        uvloop.run(_main())
    except ImportError:
        asyncio.run(_main())
