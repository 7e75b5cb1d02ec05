"""``cotenant bench serve``: any server with OpenAI's API under a load, as its clients see it."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from cotenant.cli.bench_load import DEFAULT_INPUT_LEN, DEFAULT_NUM_PROMPTS, DEFAULT_OUTPUT_LEN, LoadFlags
from cotenant.cli.output import check_apart, check_outputs, fail, write_json
from cotenant.config import api_key_from_environment
from cotenant.core.errors import InvalidInputError

if TYPE_CHECKING:
    from cotenant.bench.serve import ServeOptions

_SECRET_FLAGS = ("--api-key", "--header")
_KEY_OF_OPENAI = "OPENAI_API_KEY"


def serve(
    url: Annotated[str, typer.Option(help="The server; any that speaks OpenAI's API.")],
    trace: Annotated[
        Path | None,
        typer.Option(help="Arrivals and lengths: Azure LLM CSV, BurstGPT CSV or Mooncake JSONL.", show_default=False),
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option(help="Synthetic load: requests a second; inf sends all at once.", show_default=False)
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(help='"1,2,4": a run at each time scale of the trace, or at each rate.', show_default=False),
    ] = None,
    stop_when_missed: Annotated[
        bool, typer.Option("--stop-when-missed", help="End a sweep after the first run that misses the SLO.")
    ] = False,
    slo_ttft_ms: Annotated[
        float | None, typer.Option(min=0.001, help="Target for the time to the first token.", show_default=False)
    ] = None,
    slo_tpot_ms: Annotated[
        float | None, typer.Option(min=0.001, help="Target for the time per token after it.", show_default=False)
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here.", show_default=False)
    ] = None,
    append_result: Annotated[
        bool, typer.Option("--append-result", help="Add to a list in the --json file: several servers side by side.")
    ] = False,
    label: Annotated[
        str | None, typer.Option(help="A name for this server in the figures.", show_default=False)
    ] = None,
    time_scale: Annotated[
        float | None, typer.Option(help="2 replays the trace at twice its rate. Default: 1.", show_default=False)
    ] = None,
    window: Annotated[
        str | None, typer.Option(metavar="START:END", help="Only these seconds of the trace.", show_default=False)
    ] = None,
    busiest: Annotated[
        float | None,
        typer.Option(min=0.001, help="Only the window of so many seconds with the most requests.", show_default=False),
    ] = None,
    max_input_len: Annotated[int | None, typer.Option(min=1, help="Cut longer prompts.", show_default=False)] = None,
    max_output_len: Annotated[int | None, typer.Option(min=1, help="Cut longer answers.", show_default=False)] = None,
    burstiness: Annotated[
        float | None,
        typer.Option(
            help="Shape of the gamma distribution of the synthetic load's gaps; less than 1 is burstier. Default: 1, a "
            "Poisson process.",
            show_default=False,
        ),
    ] = None,
    random_input_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Prompt tokens of the synthetic load. Default: {DEFAULT_INPUT_LEN}.",
            show_default=False,
        ),
    ] = None,
    random_output_len: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Answer tokens of the synthetic load. Default: {DEFAULT_OUTPUT_LEN}.", show_default=False
        ),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Most requests. Default: all of a trace, {DEFAULT_NUM_PROMPTS} without --duration otherwise.",
            show_default=False,
        ),
    ] = None,
    duration: Annotated[
        float | None, typer.Option(min=0.001, help="Send for so many seconds.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals and prompts.")] = 0,
    endpoint: Annotated[str, typer.Option(help="Path of the completions API.")] = "/v1/completions",
    model: Annotated[str | None, typer.Option(help="Default: the first of /v1/models.", show_default=False)] = None,
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(help="Adapters, one drawn for each request: 'a,b,c', or several times.", show_default=False),
    ] = None,
    vocab_size: Annotated[
        int, typer.Option(min=2, help="Prompts are drawn from ids 100 up to this; every model has the default's.")
    ] = 1100,
    header: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Sent with each request.", show_default=False)
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help=f"The server's key; or set COTENANT_API_KEY or {_KEY_OF_OPENAI}.", show_default=False),
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before the measurement, all at once.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for one request.")] = 600.0,
    processes: Annotated[int, typer.Option(min=1, help="Processes that send the load.")] = 1,
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="Write what was seen of each request as well.")
    ] = False,
) -> None:
    """Send requests at their times, whether or not earlier ones were answered, and report what the clients saw.

    Prompts are random token ids of exact lengths. Times, rates and figures have the names that vllm bench serve gives
    them. Ctrl-C ends a run early and still reports.
    """
    # Here and not above: the other commands should not wait for it.
    from cotenant.bench.machine import command_line
    from cotenant.bench.serve import ServeOptions
    from cotenant.bench.summary import Targets

    _check_url(url)
    if endpoint.startswith("/v1/"):  # OpenAI's clients have it in the URL
        url = url.rstrip("/").removesuffix("/v1")
    if stop_when_missed and slo_ttft_ms is None and slo_tpot_ms is None:
        raise InvalidInputError("--stop-when-missed needs --slo-ttft-ms or --slo-tpot-ms")
    check_outputs(json=json_path)
    check_apart({"json": json_path}, [] if trace is None else [trace])
    earlier = _earlier_results(json_path) if append_result else None
    if save_detailed and json_path is None:
        raise InvalidInputError("--save-detailed needs --json")
    load = LoadFlags(
        trace=trace,
        window=window,
        busiest=busiest,
        max_input_len=max_input_len,
        max_output_len=max_output_len,
        time_scale=time_scale,
        request_rate=request_rate,
        burstiness=burstiness,
        random_input_len=random_input_len,
        random_output_len=random_output_len,
        sweep=sweep,
        num_prompts=num_prompts,
        duration=duration,
    ).load()
    options = ServeOptions(
        url=url,
        load=load,
        targets=Targets(slo_ttft_ms or math.inf, slo_tpot_ms or math.inf),
        endpoint=_completions_path(endpoint),
        model=model,
        lora_modules=[name for given in lora_modules or () for name in re.split(r"[,\s]+", given) if name],
        headers=_headers(header or (), _key_from_environment() if api_key is None else api_key),
        vocab_size=vocab_size,
        seed=seed,
        num_warmup=warmup,
        timeout_s=timeout,
        num_processes=processes,
        stop_when_missed=stop_when_missed,
        save_detailed=save_detailed,
        label=label,
        command=command_line(["cotenant", *sys.argv[1:]], _SECRET_FLAGS),
    )
    _measure(options, json_path, earlier)


def _measure(options: ServeOptions, json_path: Path | None, earlier: list[Any] | None) -> None:
    """Send the load, and write and say what came of it: behind the ``earlier`` results, if there are any. The file is
    written after each run, and before anything is said of it: whoever reads that may be gone."""
    from rich.console import Console

    from cotenant.bench.serve import ServeBench
    from cotenant.bench.serve_table import print_run

    console = Console(emoji=False)

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    def on_run(run: dict[str, Any]) -> None:
        if json_path is not None:
            content = bench.report() if earlier is None else [*earlier, bench.report()]
            write_json(json_path, content, is_compact=options.save_detailed)
        print_run(run, console)

    bench = ServeBench(options, say, on_run)
    bench.measure()
    report = bench.report()
    if "runs" in report:
        highest = report["highest_sustained"]
        if highest is not None:
            say(f"highest {report['swept']} sustained: {highest}")
        elif all(run["sustained"] is None for run in report["runs"]):
            say(f"no {report['swept']} was judged: give targets, as --slo-ttft-ms")
        else:
            say(f"no {report['swept']} of these was sustained")
    if not any(run["completed"] for run in report.get("runs", [report])):
        fail("no request was answered", exit_code=1)


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")  # as it is looked up
        is_good = parts.scheme in ("http", "https") and bool(host) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good:
        raise InvalidInputError(f"--url: {url} is not a URL like http://127.0.0.1:8000")


def _completions_path(text: str) -> str:
    if text.rstrip("/").endswith("chat/completions"):
        raise InvalidInputError("--endpoint: prompts are token ids, which chat completions do not take")
    return "/" + text.lstrip("/")


def _key_from_environment() -> str:
    """Ours goes first, as for the other commands; a variable that is empty counts as one that is not set."""
    return api_key_from_environment() or os.environ.get(_KEY_OF_OPENAI, "")


def _headers(given: Sequence[str], api_key: str) -> dict[str, str]:
    if not (api_key.isascii() and api_key.isprintable()):
        raise InvalidInputError(f"--api-key: a key is printable ASCII, one of COTENANT_API_KEY or {_KEY_OF_OPENAI} too")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    for item in given:
        name, found, value = item.partition("=")
        if not found or not name or not (item.isascii() and item.isprintable()):
            raise InvalidInputError(f"--header: expected NAME=VALUE in printable ASCII, got {item!r}")
        headers[name] = value
    return headers


def _earlier_results(path: Path | None) -> list[Any]:
    """The results in a file that --append-result adds to; none if there is no file."""
    if path is None:
        raise InvalidInputError("--append-result needs --json")
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"--json: {path} cannot be added to: {error}") from error
    return content if isinstance(content, list) else [content]
