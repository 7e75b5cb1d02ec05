"""``cotenant jobs``: fine-tuning jobs of a running server, over its HTTP API."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from cotenant.cli.client import ApiClient
from cotenant.cli.output import duration, local_time
from cotenant.cli.tables import open_console, print_rows
from cotenant.cli.watch import watch_job
from cotenant.config import ApiConfig, api_key_from_environment
from cotenant.core.errors import CotenantError, InvalidInputError
from cotenant.core.job import Hyperparameters

JOBS_PATH = "/v1/fine_tuning/jobs"
_DEFAULT_URL = f"http://{ApiConfig().host}:{ApiConfig().port}"

Url = Annotated[str, typer.Option("--url", help="The server.")]
ApiKey = Annotated[str, typer.Option("--api-key", help="Its key; or set COTENANT_API_KEY.", show_default=False)]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print the API's JSON.")]

# Of a job's hyperparameters those that are always shown; the others are where they are not the default.
_SHOWN = ("n_epochs", "max_steps", "batch_size", "learning_rate", "lr_scheduler_type", "max_length", "packing", "r",
          "lora_alpha", "target_modules", "beta")  # fmt: skip
_DEFAULTS = asdict(Hyperparameters())
_LATEST_EVENTS = 20
_COLUMNS = ("job", "status", "model", "created", "trained tokens", "result")
_DROPPED_FIRST = ("created", "trained tokens", "result")  # where the terminal is narrow

jobs_app = typer.Typer(help="Fine-tuning jobs of a running server.", no_args_is_help=True)


def _client(url: str, api_key: str) -> ApiClient:
    return ApiClient(url, api_key or api_key_from_environment())


@jobs_app.command("list")
def list_jobs(
    limit: Annotated[int, typer.Option("--limit", help="How many, newest first.")] = 20,
    as_json: AsJson = False,
    url: Url = _DEFAULT_URL,
    api_key: ApiKey = "",
) -> None:
    """List jobs, newest first."""
    with _client(url, api_key) as client:
        found = client.get(JOBS_PATH, limit=limit)
    if as_json:
        _print_json(found)
    else:
        print_rows(open_console(), _COLUMNS, [_row(job) for job in found["data"]], _DROPPED_FIRST)


@jobs_app.command()
def show(job_id: JobId, as_json: AsJson = False, url: Url = _DEFAULT_URL, api_key: ApiKey = "") -> None:
    """Show one job and all its checkpoints, newest first."""
    with _client(url, api_key) as client:
        job = client.get(f"{JOBS_PATH}/{job_id}")
        if as_json:
            _print_json(job)
            return
        checkpoints = list(client.all_of(f"{JOBS_PATH}/{job_id}/checkpoints"))
        events = client.get(f"{JOBS_PATH}/{job_id}/events", limit=_LATEST_EVENTS)["data"]
    console = open_console()
    console.print(_job_table(job, _latest_metrics(events)))
    if checkpoints:
        rows = [_checkpoint_row(checkpoint) for checkpoint in checkpoints]
        print_rows(console, list(rows[0]), rows, ("valid loss", "train loss"))


@jobs_app.command()
def events(
    job_id: JobId,
    limit: Annotated[int, typer.Option("--limit", help="How many, the newest.")] = 50,
    url: Url = _DEFAULT_URL,
    api_key: ApiKey = "",
) -> None:
    """Show a job's newest events, oldest first."""
    with _client(url, api_key) as client:
        found = client.get(f"{JOBS_PATH}/{job_id}/events", limit=limit)["data"]
    rows = [
        {"time": local_time(event["created_at"]), "level": event["level"], "message": event["message"]}
        for event in reversed(found)
    ]
    print_rows(open_console(), ("time", "level", "message"), rows)


@jobs_app.command()
def create(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Training examples (JSONL).", show_default=False)],
    model: Annotated[str, typer.Option("--model", help="The base model's name in the API.", show_default=False)],
    suffix: Annotated[str | None, typer.Option("--suffix", help="Becomes part of the new model's name.")] = None,
    validation_file: Annotated[Path | None, typer.Option("--validation-file", help="Validation examples.")] = None,
    method: Annotated[str, typer.Option("--method", help="supervised, or dpo for pairs of answers.")] = "supervised",
    seed: Annotated[int | None, typer.Option("--seed", help="Of the order of examples and the start.")] = None,
    hyperparameter: Annotated[
        list[str] | None,
        typer.Option(
            "-H",
            "--hyperparameter",
            metavar="NAME=VALUE",
            help='May be repeated. VALUE is JSON where it can be: target_modules=\'["q_proj","v_proj"]\'.',
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Then show its progress.")] = False,
    as_json: AsJson = False,
    url: Url = _DEFAULT_URL,
    api_key: ApiKey = "",
) -> None:
    """Upload FILE, start a job on it, and print the job's id."""
    if as_json and watch:
        raise InvalidInputError("--json prints the job as it is created: leave --watch out", param="json")
    hyperparameters: dict[str, Any] = {}
    for name, value in map(_parse_hyperparameter, hyperparameter or ()):
        if name in hyperparameters:
            raise InvalidInputError(f"-H {name}: is given twice", param="hyperparameter")
        hyperparameters[name] = value
    body: dict[str, Any] = {"model": model, "method": {"type": method}}
    if suffix is not None:
        body["suffix"] = suffix
    if seed is not None:
        body["seed"] = seed
    if hyperparameters:
        body["method"][method] = {"hyperparameters": hyperparameters}
    files = {"training_file": file}
    if validation_file is not None:
        files["validation_file"] = validation_file
    with _client(url, api_key) as client:
        job = _create(client, body, files)
        if as_json:
            _print_json(job)
        else:
            typer.echo(job["id"])
        if watch:
            raise typer.Exit(watch_job(client, job["id"], open_console()))


@jobs_app.command()
def pause(job_id: JobId, url: Url = _DEFAULT_URL, api_key: ApiKey = "") -> None:
    """Pause a job; it keeps its progress."""
    _act(job_id, "pause", url, api_key)


@jobs_app.command()
def resume(job_id: JobId, url: Url = _DEFAULT_URL, api_key: ApiKey = "") -> None:
    """Let a paused job go on, or one that has failed for want of space or memory, say, once that is mended."""
    _act(job_id, "resume", url, api_key)


@jobs_app.command()
def cancel(job_id: JobId, url: Url = _DEFAULT_URL, api_key: ApiKey = "") -> None:
    """Stop a job for good; its checkpoints stay."""
    _act(job_id, "cancel", url, api_key)


@jobs_app.command()
def delete(job_id: JobId, url: Url = _DEFAULT_URL, api_key: ApiKey = "") -> None:
    """Delete a job that has ended: its record, events, models, checkpoints and tokenised examples. Uploaded files and
    the file with its metrics stay. DELETE /v1/models/NAME deletes one model alone."""
    with _client(url, api_key) as client:
        deleted = client.delete(f"{JOBS_PATH}/{job_id}")
    typer.echo(f"{deleted['id']}: deleted")


@jobs_app.command()
def watch(
    job_id: JobId,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")] = 1.0,
    url: Url = _DEFAULT_URL,
    api_key: ApiKey = "",
) -> None:
    """Show a job's events and progress until it ends. Exit code 1 if it does not succeed."""
    with _client(url, api_key) as client:
        raise typer.Exit(watch_job(client, job_id, open_console(), interval_s))


def _create(client: ApiClient, body: dict[str, Any], files: dict[str, Path]) -> dict[str, Any]:
    """Upload the files and create the job. If that comes to nothing they are deleted: nobody else knows their ids."""
    ids: dict[str, str] = {}
    try:
        for name, path in files.items():
            ids[name] = client.upload(path, "fine-tune")["id"]
        return client.post(JOBS_PATH, {**body, **ids})
    except BaseException:
        for file_id in ids.values():
            with suppress(CotenantError):
                client.delete(f"/v1/files/{file_id}")
        raise


def _latest_metrics(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a job's newest events, which come newest first."""
    return next((event["data"] for event in events if event.get("type") == "metrics" and event.get("data")), {})


def _act(job_id: str, action: str, url: str, api_key: str) -> None:
    with _client(url, api_key) as client:
        job = client.post(f"{JOBS_PATH}/{job_id}/{action}")
    status = job["status"]
    what = {"pause": "pause", "cancel": "cancellation"}.get(action)
    if what is not None and status == "running":
        status += f"; the {what} is requested and not done yet: the worker has still to confirm it"
    typer.echo(f"{job['id']}: {status}")


def _parse_hyperparameter(text: str) -> tuple[str, Any]:
    """``name=value``, the value as JSON if it is JSON ('3', '0.1', 'true', '["q_proj"]'), else as text. Refuses numbers
    that are not finite: Python reads them, and no request can hold them."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise InvalidInputError(f"-H: expected NAME=VALUE, got '{text}'", param="hyperparameter")

    def finite(digits: str) -> float:
        number = float(digits)
        if not math.isfinite(number):
            raise InvalidInputError(f"-H {name}: {digits} is not a finite number; give one", param="hyperparameter")
        return number

    try:
        return name, json.loads(value, parse_float=finite, parse_constant=finite)
    except ValueError:
        return name, value


def _print_json(content: dict[str, Any]) -> None:
    typer.echo(json.dumps(content, indent=2, ensure_ascii=False))


def _row(job: dict[str, Any]) -> dict[str, str]:
    cells = (
        job["id"],
        job["status"],
        job["model"],
        local_time(job["created_at"]),
        _number(job.get("trained_tokens")),
        job.get("fine_tuned_model") or "-",
    )
    return dict(zip(_COLUMNS, cells, strict=True))


def _checkpoint_row(checkpoint: dict[str, Any]) -> dict[str, str]:
    metrics = checkpoint.get("metrics") or {}
    valid_losses = [metrics.get(name) for name in ("full_valid_loss", "valid_loss")]
    return {
        "step": str(checkpoint["step_number"]),
        "train loss": _number(metrics.get("train_loss")),
        "valid loss": _number(next((loss for loss in valid_losses if loss is not None), None)),
        "checkpoint model": checkpoint["fine_tuned_model_checkpoint"],
    }


def _job_table(job: dict[str, Any], metrics: dict[str, Any]) -> Table:
    table = Table(Column(no_wrap=True), Column(overflow="fold"), show_header=False)
    for name in ("id", "status", "model", "fine_tuned_model", "training_file", "validation_file", "seed"):
        if job.get(name) is not None:
            table.add_row(name, escape(str(job[name])))
    if "step" in metrics:
        table.add_row("step", f"{metrics['step']:,} of {_number(metrics.get('total_steps'))}")
    table.add_row("trained tokens", _number(job.get("trained_tokens")))
    for name in ("created_at", "estimated_finish", "finished_at"):
        if job.get(name) is not None:
            table.add_row(name.replace("_", " "), local_time(job[name]))
    if job.get("finished_at") is not None:
        table.add_row("took", duration(job["finished_at"] - job["created_at"]))
    kind = (job.get("method") or {}).get("type", "supervised")
    table.add_row("method", kind)
    settings = ((job.get("method") or {}).get(kind) or {}).get("hyperparameters") or job.get("hyperparameters") or {}
    others = [name for name, value in settings.items() if name not in _SHOWN and value != _DEFAULTS.get(name, value)]
    for name in (*_SHOWN, *others):
        if name in settings:
            table.add_row(name, escape(str(settings[name])))
    if (job.get("error") or {}).get("message"):
        table.add_row("error", escape(job["error"]["message"]))
    if job.get("result_files"):
        table.add_row("result files", ", ".join(job["result_files"]))
    return table


def _number(value: int | float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
