"""A server with the built-in model, and clients that it answers."""

from __future__ import annotations

import threading
import time

import httpx

from serving import RunningServer

FLAGS = ("--slo-ttft-ms", "500", "--slo-tpot-ms", "100", "--max-model-len", "1024")


def client_of(server: RunningServer) -> httpx.Client:
    return httpx.Client(base_url=server.base_url, headers={"Authorization": "Bearer open-sesame"}, timeout=60)


def body(max_tokens: int, stream: bool = False) -> dict[str, object]:
    return {"model": "tiny", "prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}


class Stream:
    """A streamed completion that a thread reads; ``events`` grows as they come."""

    def __init__(self, server: RunningServer, max_tokens: int) -> None:
        self.events: list[str] = []
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._read, args=(server, max_tokens), daemon=True)
        self._thread.start()

    def _read(self, server: RunningServer, max_tokens: int) -> None:
        try:
            with (
                client_of(server) as client,
                client.stream("POST", "/v1/completions", json=body(max_tokens, stream=True)) as response,
            ):
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            self.error = error

    def wait_first(self) -> None:
        wait_until(lambda: bool(self.events))

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


def wait_until(condition: object, timeout_s: float = 60) -> None:
    assert callable(condition)
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.02)
