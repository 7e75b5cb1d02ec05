"""How `cotenant jobs` reaches its server."""

from __future__ import annotations

import pytest

from cotenant.cli.client import ApiClient, ServerAwayError
from cotenant.core.errors import CotenantError


@pytest.mark.parametrize(
    ("name", "proxy"), [("ALL_PROXY", "socks5://127.0.0.1:9"), ("HTTP_PROXY", "http://127.0.0.1:9")]
)
def test_no_proxy_stands_before_this_machine(monkeypatch: pytest.MonkeyPatch, name: str, proxy: str) -> None:
    """It could not reach it, and would see the key. Of another machine's it is said that there is one."""
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    for each in (name, name.lower()):
        monkeypatch.setenv(each, proxy)
    for url in ("http://127.0.0.1:1", "http://[::1]:1", "http://localhost:1/v1"):
        with ApiClient(url, "key") as client, pytest.raises(ServerAwayError) as caught:
            client.get("/v1/models")
        assert "proxy" not in caught.value.message
    with pytest.raises(CotenantError, match=r"proxy.*NO_PROXY=HOST"), ApiClient("http://192.0.2.1:1", "") as client:
        client.get("/v1/models")


def test_a_proxy_that_is_none_is_not_taken_for_the_servers_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "ftp://proxy")
    monkeypatch.setenv("http_proxy", "ftp://proxy")
    with pytest.raises(CotenantError, match="the environment names a proxy that is none"):
        ApiClient("http://192.0.2.1:1", "")
