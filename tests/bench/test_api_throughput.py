"""bench/api_throughput.py: what it counts, and that it runs."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "api_throughput.py"
EVENTS = (
    b'{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}],"usage":null}',
    b'{"choices":[{"index":0,"delta":{"content":"say \\"text\\":\\"it\\""}}],"usage":null}',
    b'{"choices":[{"index":0,"delta":{"content":" again"}}],"usage":null}',
    b'{"choices":[{"index":0,"delta":{},"finish_reason":"length"}],"usage":null}',
    b'{"choices":[{"index":0,"text":" whole","finish_reason":"length"}],"usage":null}',
    b'{"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":3}}',
    b"[DONE]",
)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_it_says_what_an_event_costs(endpoint: str) -> None:
    command = [sys.executable, str(SCRIPT), "--endpoint", endpoint, "--streams", "2", "--tokens", "5"]
    command += ["--seconds", "2"]  # a machine with much to do may deliver nothing in half of one
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = re.search(rf"^{endpoint}: ([\d,]+) events/s delivered with [\d.]+ cores", run.stdout, re.MULTILINE)
    assert found, run
    assert int(found[1].replace(",", "")) > 0


@pytest.mark.parametrize("piece", [1, 7, 4096])
def test_events_with_text_are_counted_alone_however_they_are_cut(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from api_throughput import Count, Reader

    chunks = [b"data: " + each + b"\n\n" for each in EVENTS]
    answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    answer += b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in chunks) + b"0\r\n\r\n"
    asked: list[bytes] = []

    class Sent(asyncio.Transport):
        def write(self, data: bytes | bytearray | memoryview) -> None:
            asked.append(bytes(data))

    count = Count()
    reader = Reader(b"request", count)
    reader.connection_made(Sent())
    for _ in range(2):
        for start in range(0, len(answer), piece):
            reader.data_received(answer[start : start + piece])
    assert (count.num_events, count.num_failed) == (6, 0)
    assert asked == [b"request"] * 3
