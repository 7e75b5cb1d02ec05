"""How long a server takes to start: from `cotenant serve` to /health, and to the first token of a completion.

    python bench/start_up.py llama-3.1-8b --load-format dummy

What follows the model goes to `cotenant serve`, which gets a port and an empty --data-dir for each start. The first
start finds the caches of compiled kernels (Triton's, nvcc's) as they are: empty, where nothing has run before. The
others find what it left there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import Request, urlopen

from cotenant.bench.machine import machine
from cotenant.bench.server import free_port, stop

_TIMEOUT_S = 300.0
_POLL_S = 0.05
_LAST_OF_LOG = 2000  # characters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--show-log", action="store_true", help="print what the server logs: when each part was ready")
    arguments, flags = parser.parse_known_args()
    for flag in ("--port", "--data-dir", "--served-model-name"):
        if any(word.partition("=")[0] == flag for word in flags):
            parser.error(f"{flag} is chosen here")
    found = machine()
    print(" ".join([arguments.model, *flags]), "on", found["cpu"], found["num_cores"], "cores", found["gpus"] or "")
    for number in range(arguments.starts):
        healthy_s, token_s, log = start(arguments.model, flags)
        print(log if arguments.show_log else "", end="")
        print(f"start {number + 1}: healthy after {healthy_s:.1f} s, first token after {token_s:.1f} s", flush=True)


def start(model: str, flags: list[str]) -> tuple[float, float, str]:
    """Seconds until the server is healthy, and until it has answered with a token; what it logged until then."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        path, data = Path(folder, "server.log"), str(Path(folder, "data"))
        command = [sys.executable, "-m", "cotenant", "serve", model, "--port", str(port), "--data-dir", data, *flags]
        begin_s = time.monotonic()
        with path.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_healthy(url, process, begin_s + _TIMEOUT_S)
            healthy_s = time.monotonic() - begin_s
            wait_for_token(url, model)
            return healthy_s, time.monotonic() - begin_s, path.read_text(errors="replace")
        except OSError as error:
            raise SystemExit(
                f"{error}; the server's log ends:\n{path.read_text(errors='replace')[-_LAST_OF_LOG:]}"
            ) from error
        finally:
            stop(process)


def wait_healthy(url: str, process: subprocess.Popen[bytes], deadline_s: float) -> None:
    while process.poll() is None:
        try:
            with urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(_POLL_S)
    raise ChildProcessError(f"the server ended with code {process.returncode}")


def wait_for_token(url: str, model: str) -> None:
    body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 2, "stream": True}
    request = Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=_TIMEOUT_S) as answer:
        first = next((line for line in answer if line.startswith(b"data:")), b"")
    if b'"choices"' not in first:
        raise ConnectionError(f"the answer has no token but {first.decode()!r}")


if __name__ == "__main__":
    main()
