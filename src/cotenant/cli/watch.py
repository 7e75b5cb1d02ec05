"""``cotenant jobs watch``: a job's events as lines, and under them one line of progress that is kept up to date."""

from __future__ import annotations

import itertools
import time
from typing import Any

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from cotenant.cli.client import ApiClient, ServerAwayError
from cotenant.cli.output import duration, local_time
from cotenant.core.errors import CotenantError

_ENDED = ("succeeded", "failed", "cancelled")
PATIENCE_S = 300.0  # a server that is started again loads its model first
_GOES_ON = "{}; the job goes on when the server is back"


class _Watched:
    """A job of a server that may be away for a while."""

    def __init__(self, client: ApiClient, job_id: str, interval_s: float, patience_s: float) -> None:
        self._client = client
        self._job_id = job_id
        self._interval_s = interval_s
        self._patience_s = patience_s
        self._was_seen = False

    def look(self, last_event: str | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The job, and its events since the last one. Once the job was seen, a server that is away is waited for;
        raises CotenantError if it stays away."""
        away_since_s: float | None = None
        path = f"/v1/fine_tuning/jobs/{self._job_id}"
        while True:
            try:
                seen = self._client.get(path), _events_after(self._client, path, last_event)
                self._was_seen = True
                return seen
            except ServerAwayError as error:
                if not self._was_seen:
                    raise
                away_since_s = away_since_s or self._say_away(error)
                if time.monotonic() - away_since_s > self._patience_s:
                    again = f"cotenant jobs watch {self._job_id} --url {self._client.url}"
                    raise CotenantError(f"{_GOES_ON.format(error)}: watch it again with `{again}`") from error
            time.sleep(self._interval_s)

    def _say_away(self, error: ServerAwayError) -> float:
        """Since when it is: now."""
        typer.echo(f"{_GOES_ON.format(error)}; trying for {duration(self._patience_s)}", err=True)
        return time.monotonic()


def watch_job(
    client: ApiClient, job_id: str, console: Console, interval_s: float = 1.0, patience_s: float = PATIENCE_S
) -> int:
    """Show the job until it ends; returns 0 if it succeeded, else 1. A server that is away is waited for. Raises
    CotenantError if it stays away, or was never there."""
    watched = _Watched(client, job_id, interval_s, patience_s)
    last_event: str | None = None
    metrics: dict[str, Any] = {}
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            job, events = watched.look(last_event)
            for event in events:
                if event.get("type") == "metrics":
                    metrics = event.get("data") or metrics
                else:
                    live.console.print(Text(f"{local_time(event['created_at'])}  {event['message']}"))
            if events:
                last_event = events[-1]["id"]
            live.update(Text(progress_line(job, metrics, time.time())), refresh=True)
            if job["status"] in _ENDED:
                break
            time.sleep(interval_s)
    console.print(Text(progress_line(job, metrics, time.time())))
    return 0 if job["status"] == "succeeded" else 1


def _events_after(client: ApiClient, path: str, last_event: str | None) -> list[dict[str, Any]]:
    """The events that are newer than ``last_event``, oldest first. The server lists the newest first."""
    newer = itertools.takewhile(lambda event: event["id"] != last_event, client.all_of(f"{path}/events"))
    return list(newer)[::-1]


def progress_line(job: dict[str, Any], metrics: dict[str, Any], now_s: float) -> str:
    """'running  step 12/60  loss 1.234  4,096 tokens trained  2 min 5 s left' with what is known of it."""
    parts = [job["status"]]
    if "step" in metrics:
        total = metrics.get("total_steps")
        parts.append(f"step {metrics['step']}" + (f"/{total}" if total else ""))
    for name, label in (("train_loss", "loss"), ("full_valid_loss", "validation loss")):
        if metrics.get(name) is not None:
            parts.append(f"{label} {metrics[name]:.4f}")
    if job.get("trained_tokens"):
        parts.append(f"{job['trained_tokens']:,} tokens trained")
    if job["status"] == "running" and job.get("estimated_finish"):
        parts.append(f"{duration(job['estimated_finish'] - now_s)} left")
    if job.get("fine_tuned_model"):
        parts.append(f"model {job['fine_tuned_model']}")
    if (job.get("error") or {}).get("message"):
        parts.append(str(job["error"]["message"]))
    return "  ".join(parts)
