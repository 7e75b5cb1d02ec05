"""``cotenant bench``: measurements of a running server."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from cotenant.cli.bench_colocate import colocate
from cotenant.cli.bench_colocate_report import colocate_report
from cotenant.cli.bench_engine import engine
from cotenant.cli.bench_finetune import finetune
from cotenant.cli.output import fail, write_json
from cotenant.core.errors import InvalidInputError

if TYPE_CHECKING:
    from cotenant.bench.traces import Trace

_DEFAULT_NUM_PROMPTS = 1000
_SECRET_FLAGS = ("--api-key", "--header")

bench_app = typer.Typer(help="Measure a server, or the engine or training by itself.", no_args_is_help=True)
bench_app.command()(engine)
bench_app.command()(finetune)
bench_app.command()(colocate)
bench_app.command()(colocate_report)


@bench_app.command()
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
    time_scale: Annotated[float, typer.Option(help="2 replays the trace at twice its rate.")] = 1.0,
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
        float, typer.Option(help="Shape of the gamma distribution of gaps; 1 is a Poisson process, less is burstier.")
    ] = 1.0,
    random_input_len: Annotated[int, typer.Option(min=1, help="Prompt tokens of the synthetic load.")] = 1024,
    random_output_len: Annotated[int, typer.Option(min=1, help="Answer tokens of the synthetic load.")] = 128,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Most requests. Default: all of a trace, {_DEFAULT_NUM_PROMPTS} without --duration otherwise.",
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
        str, typer.Option(envvar="OPENAI_API_KEY", help="The server's key.", show_default=False, show_envvar=True)
    ] = "",
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
    from rich.console import Console

    from cotenant.bench.machine import command_line
    from cotenant.bench.serve import ServeBench, ServeOptions, SyntheticLoad, TraceLoad
    from cotenant.bench.serve_table import print_run
    from cotenant.bench.summary import Targets

    _check_url(url)
    if burstiness <= 0 or math.isnan(burstiness):
        raise InvalidInputError(f"--burstiness must be above 0, not {burstiness:g}")
    if endpoint.rstrip("/").endswith("chat/completions"):
        raise InvalidInputError("--endpoint: prompts are token ids, which chat completions do not take")
    if append_result and json_path is None:
        raise InvalidInputError("--append-result needs --json")
    if stop_when_missed and slo_ttft_ms is None and slo_tpot_ms is None:
        raise InvalidInputError("--stop-when-missed needs --slo-ttft-ms or --slo-tpot-ms")
    earlier = _read_results(json_path) if json_path is not None and append_result else []
    values = None if sweep is None else sorted({_rate("--sweep", part) for part in sweep.split(",")})
    load: TraceLoad | SyntheticLoad
    if trace is not None:
        if request_rate is not None:
            raise InvalidInputError("give --trace or --request-rate, not both")
        chosen = _part_of_trace(trace, window, busiest).capped(max_input_len, max_output_len)
        scales = values or [_rate("--time-scale", str(time_scale))]
        load = TraceLoad(trace.name, chosen, scales, num_prompts, duration)
    else:
        if window is not None or busiest is not None:
            raise InvalidInputError("--window and --busiest choose a part of a trace: give --trace")
        if values is None and request_rate is None:
            raise InvalidInputError("give --trace, --request-rate or --sweep: what is to be sent?")
        rates = values or [_rate("--request-rate", str(request_rate), may_be_infinite=True)]
        if num_prompts is None and duration is None:
            num_prompts = _DEFAULT_NUM_PROMPTS
        if num_prompts is None and math.inf in rates:
            raise InvalidInputError("--request-rate inf sends all at once: give --num-prompts, not --duration")
        load = SyntheticLoad(rates, burstiness, random_input_len, random_output_len, num_prompts, duration)
    options = ServeOptions(
        url=url,
        load=load,
        targets=Targets(slo_ttft_ms or math.inf, slo_tpot_ms or math.inf),
        endpoint="/" + endpoint.lstrip("/"),
        model=model,
        lora_modules=[name for given in lora_modules or () for name in re.split(r"[,\s]+", given) if name],
        headers=_headers(header or (), api_key),
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
    console = Console()

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    report = ServeBench(options, say, lambda run: print_run(run, console)).measure()
    if "runs" in report:
        say(f"highest {report['swept']} sustained: {report['highest_sustained']}")
    if json_path is not None:
        write_json(json_path, [*earlier, report] if append_result else report, is_compact=save_detailed)
    if not any(run["completed"] for run in report.get("runs", [report])):
        fail("no request was answered", exit_code=1)


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    try:
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good:
        raise InvalidInputError(f"--url: {url} is not a URL like http://127.0.0.1:8000")


def _rate(flag: str, text: str, may_be_infinite: bool = False) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InvalidInputError(f"{flag}: expected a number, got {text.strip()!r}") from None
    if not value > 0 or (math.isinf(value) and not may_be_infinite):
        raise InvalidInputError(f"{flag} must be above 0{'' if may_be_infinite else ' and finite'}, not {text.strip()}")
    return value


def _part_of_trace(path: Path, window: str | None, busiest_s: float | None) -> Trace:
    from cotenant.bench.traces import read_trace

    if window is not None and busiest_s is not None:
        raise InvalidInputError("give --window or --busiest, not both")
    trace = read_trace(path)
    if window is not None:
        trace = trace.window(*_window(window))
    elif busiest_s is not None:
        trace = trace.window(*trace.busiest(busiest_s))
    if not trace.requests:
        raise InvalidInputError(f"--window: {path} has no request between these seconds")
    return trace


def _window(text: str) -> tuple[float, float]:
    start, _, end = text.partition(":")
    try:
        start_s, end_s = float(start or 0), float(end or math.inf)
    except ValueError:
        raise InvalidInputError(f"--window: expected START:END in seconds, got '{text}'") from None
    if not 0 <= start_s < end_s:
        raise InvalidInputError(f"--window: START must be at least 0 and before END, got '{text}'")
    return start_s, end_s


def _headers(given: Sequence[str], api_key: str) -> dict[str, str]:
    if not (api_key.isascii() and api_key.isprintable()):
        raise InvalidInputError("--api-key: a key is printable ASCII")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    for item in given:
        name, found, value = item.partition("=")
        if not found or not name or not (item.isascii() and item.isprintable()):
            raise InvalidInputError(f"--header: expected NAME=VALUE in printable ASCII, got {item!r}")
        headers[name] = value
    return headers


def _read_results(path: Path) -> list[Any]:
    """The results in a file that --append-result adds to; none if there is no file."""
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"--json: {path} cannot be added to: {error}") from error
    return content if isinstance(content, list) else [content]
