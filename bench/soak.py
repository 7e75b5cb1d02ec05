"""Mixed load against a running server for a long time; at the end every page must be free and memory where it was.

cotenant serve tiny --port 8000 & python bench/soak.py http://127.0.0.1:8000 --minutes 30 --pid $! \\
    --make-adapters 12 --config "$(cotenant model path tiny)/config.json" --json bench/results/soak_cpu.json

Exit code 1 if anything did not hold, with the reasons. Adapters are loaded and unloaded while they are used; their
folders must lie on the server's disk.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from cotenant.bench.client import ServerError
from cotenant.bench.machine import command_line, machine, versions
from cotenant.bench.random_adapters import make_adapters
from cotenant.bench.soak import Soak, SoakOptions
from cotenant.core.errors import CotenantError


def main() -> int:
    arguments = _parse()
    with tempfile.TemporaryDirectory() as folder:
        try:
            options = _options(arguments, Path(folder))
            report = asyncio.run(Soak(options).run())
        except (ServerError, CotenantError, ProcessLookupError, httpx.HTTPError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    report |= {
        "label": arguments.label,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": command_line(["python", "bench/soak.py", *sys.argv[1:]], ["--api-key"]),
        "machine": machine(),
        "versions": versions(),
    }
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    _print(report)
    return 0 if report["passed"] else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="the server, without /v1")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--concurrency", type=int, default=8, help="requests at once")
    parser.add_argument("--adapters", nargs="+", default=[], help="folders of adapters to load and unload")
    parser.add_argument("--make-adapters", type=int, default=0, metavar="N", help="make N random ones; needs --config")
    parser.add_argument("--config", type=Path, help="the model's config.json")
    parser.add_argument("--rank", type=int, default=8, help="of the random adapters")
    parser.add_argument("--pid", type=int, help="the server's process: look at the memory of it and all below it")
    parser.add_argument("--warmup-minutes", type=float, help="when memory is taken as settled (default: 2, or a third)")
    parser.add_argument("--rss-bound-mib", type=float, default=64.0, help="how much it may grow after that")
    parser.add_argument("--sample-seconds", type=float, default=60.0)
    parser.add_argument(
        "--healthy-within", type=float, default=5.0, metavar="S", help="wait so long for a server that is starting"
    )
    parser.add_argument("--api-key", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--label", help="a name for the server in the figures")
    parser.add_argument("--json", type=Path, help="write the report here")
    arguments = parser.parse_args()
    if arguments.make_adapters and arguments.config is None:
        parser.error("--make-adapters needs --config")
    return arguments


def _options(arguments: argparse.Namespace, scratch: Path) -> SoakOptions:
    adapters = {Path(folder).name: str(Path(folder).resolve()) for folder in arguments.adapters}
    if arguments.make_adapters:
        adapters |= make_adapters(scratch, arguments.config, arguments.make_adapters, arguments.rank, arguments.seed)
    duration_s = arguments.minutes * 60
    warmup_s = duration_s / 3 if arguments.warmup_minutes is None else arguments.warmup_minutes * 60
    return SoakOptions(
        url=arguments.url,
        duration_s=duration_s,
        concurrency=arguments.concurrency,
        adapters=adapters,
        pid=arguments.pid,
        sample_every_s=arguments.sample_seconds,
        warmup_s=min(warmup_s, 120.0) if arguments.warmup_minutes is None else warmup_s,
        rss_bound_bytes=int(arguments.rss_bound_mib * 2**20),
        api_key=arguments.api_key,
        seed=arguments.seed,
        healthy_within_s=arguments.healthy_within,
    )


def _print(report: dict[str, Any]) -> None:
    for sample in report["samples"]:
        memory = f", {sample['rss_bytes'] / 2**20:.0f} MiB" if "rss_bytes" in sample else ""
        print(
            f"{sample['at_s']:7.0f} s: {sample.get('num_requests_running', 0):.0f} running, "
            f"{sample.get('kv_cache_usage_perc', 0):.1%} of pages{memory}"
        )
    print(", ".join(f"{count} {kind}" for kind, count in report["requests"].items()))
    for problem in report["problems"]:
        print(f"FAILED: {problem}")
    if report["passed"]:
        print("passed: all pages free, memory within its bound, greedy answers as at the start")


if __name__ == "__main__":
    sys.exit(main())
