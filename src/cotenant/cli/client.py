"""A server's HTTP API for the command line: JSON in and out, errors as one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from cotenant.config import check_api_key
from cotenant.core.errors import CotenantError

if TYPE_CHECKING:
    import httpx

_PAGE = 100  # of a list, at once
_CONNECT_TIMEOUT_S = 5.0
_TIMEOUT_S = 60.0
_NO_PROXY = "NO_PROXY=HOST keeps a server from it"


class ServerAwayError(CotenantError):
    """The server cannot be reached, or says that it cannot answer now (503): it may be back soon."""


def _is_loopback(url: str) -> bool:
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class ApiClient:
    """Calls paths below ``/v1``. Raises CotenantError with the server's own words, ServerAwayError if there is none."""

    def __init__(self, url: str, api_key: str, transport: httpx.BaseTransport | None = None) -> None:
        import httpx  # here and not above: the other commands should not wait for it

        self.url = url.rstrip("/").removesuffix("/v1")
        check_api_key(api_key)
        headers = {b"Authorization": f"Bearer {api_key}".encode()} if api_key else {}
        timeout = httpx.Timeout(_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
        self._may_use_proxy = not _is_loopback(self.url)  # of this machine no proxy knows, nor is it to see the key
        try:
            self._http = httpx.Client(
                base_url=self.url,
                headers=headers,
                timeout=timeout,
                transport=transport,
                trust_env=self._may_use_proxy,
                verify=httpx.create_ssl_context(),  # by SSL_CERT_FILE, too
            )
        except (ValueError, httpx.InvalidURL) as error:
            if "for proxy URL" in str(error):  # httpx has no error of its own for it
                raise CotenantError(f"the environment names a proxy that is none: {error}; {_NO_PROXY}") from error
            raise CotenantError(f"--url: {self.url} is not a URL like http://127.0.0.1:8000: {error}") from error
        except ImportError as error:  # of what a SOCKS proxy needs
            raise CotenantError(f"the proxy that the environment names cannot be used: {error}; {_NO_PROXY}") from error

    def __enter__(self) -> ApiClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def get(self, path: str, **parameters: Any) -> dict[str, Any]:
        given = {name: value for name, value in parameters.items() if value is not None}
        return self._call("GET", path, params=given)

    def all_of(self, path: str) -> Iterator[dict[str, Any]]:
        """What a list holds, in its order, page after page as far as it is asked for."""
        after: str | None = None
        while True:
            page = self.get(path, limit=_PAGE, after=after)
            yield from page["data"]
            if not page.get("has_more") or not page["data"]:
                return
            after = page["data"][-1]["id"]

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return self._call("POST", path, json=body)

    def delete(self, path: str) -> dict[str, Any]:
        return self._call("DELETE", path)

    def upload(self, file: Path, purpose: str) -> dict[str, Any]:
        """Upload a file; the answer describes it, its ``id`` above all. Nothing limits how long this takes."""
        try:
            with file.open("rb") as content:
                return self._call(
                    "POST", "/v1/files", data={"purpose": purpose}, files={"file": (file.name, content)}, timeout=None
                )
        except OSError as error:
            raise CotenantError(f"{file} cannot be read: {error.strerror}") from error

    def _call(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        import httpx

        try:
            response = self._http.request(method, path, **arguments)
        except UnicodeEncodeError as error:
            part = error.object[error.start : error.end]
            raise CotenantError(f"{part!r} in what was given is no text that can be sent: give UTF-8") from error
        except (UnicodeError, httpx.InvalidURL) as error:
            raise CotenantError(f"--url: {self.url}{path} is not a URL: {error}") from error
        except httpx.TransportError as error:
            proxies = getproxies() if self._may_use_proxy else {}
            through = f". The environment names a proxy; {_NO_PROXY}" if proxies else ""
            raise ServerAwayError(f"cannot reach a server at {self.url}: {error}{through}") from error
        try:
            content = response.json()
        except ValueError:
            content = None
        if response.is_success and isinstance(content, dict):
            return content
        if response.status_code == httpx.codes.UNAUTHORIZED:
            has_key = "Authorization" in self._http.headers
            problem = "does not take this API key: check" if has_key else "asks for an API key: give"
            raise CotenantError(f"the server at {self.url} {problem} --api-key or COTENANT_API_KEY")
        kind = ServerAwayError if response.status_code == httpx.codes.SERVICE_UNAVAILABLE else CotenantError
        raise kind(_describe(response, content))


def _describe(response: httpx.Response, content: object) -> str:
    error = content.get("error") if isinstance(content, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return str(message) if message else f"the server answered {response.status_code} {response.reason_phrase}"
