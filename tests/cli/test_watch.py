"""`cotenant jobs watch` while its server comes and goes."""

from __future__ import annotations

import io
from collections.abc import Iterator

import httpx
import pytest
from rich.console import Console

from cotenant.cli.client import ApiClient
from cotenant.cli.watch import watch_job
from cotenant.core.errors import CotenantError

RUNNING, SUCCEEDED = ({"id": "ftjob-1", "status": status} for status in ("running", "succeeded"))
REFUSED = httpx.ConnectError("Connection refused")
LOADING = httpx.Response(503, json={"error": {"message": "The server is shutting down."}})


def watched(*answers: dict[str, str] | httpx.Response | Exception, patience_s: float = 60.0) -> int:
    """``answers``: what each look at the job gets; the last one stays."""
    left: Iterator[dict[str, str] | httpx.Response | Exception] = iter(answers)

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/events"):
            return httpx.Response(200, json={"data": []})
        answer = next(left, answers[-1])
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, json=answer)

    with ApiClient("http://server:8000", "", httpx.MockTransport(handle)) as client:
        return watch_job(client, "ftjob-1", Console(file=io.StringIO()), interval_s=0.001, patience_s=patience_s)


def test_a_server_that_is_started_again_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert watched(RUNNING, LOADING, REFUSED, REFUSED, LOADING, RUNNING, SUCCEEDED) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("The server is shutting down.; the job goes on when")


def test_who_gives_up_says_how_to_watch_again() -> None:
    with pytest.raises(CotenantError) as caught:
        watched(RUNNING, REFUSED, patience_s=0.01)
    assert "cannot reach a server at http://server:8000" in caught.value.message
    assert "the job goes on when the server is back" in caught.value.message
    assert "`cotenant jobs watch ftjob-1 --url http://server:8000`" in caught.value.message


def test_a_server_that_was_never_there_is_not_waited_for() -> None:
    with pytest.raises(CotenantError, match="cannot reach"):
        watched(REFUSED, SUCCEEDED)


def test_other_errors_end_it() -> None:
    gone = httpx.Response(404, json={"error": {"message": "There is no job ftjob-1."}})
    with pytest.raises(CotenantError, match="There is no job"):
        watched(RUNNING, gone, SUCCEEDED)
