"""HTTP from the hub to one server: JSON there and back, and every way in which it fails as an error of its own.

A request is sent again only where doing it twice is doing it once (GET, and what the protocol calls idempotent).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import LeaseHeld, Problem, ServerRefused, ServerUnreachable

if TYPE_CHECKING:
    import requests

ATTEMPTS = 3
_FIRST_WAIT = 0.2
_PASSING = frozenset({502, 503, 504})
"""Statuses of a proxy or a server that starts, where there is no JSON error of ours."""
_CAUSES = (
    "Connection refused",
    "Name or service not known",
    "Connection reset",
    "No route to host",
    "Remote end closed connection without response",
)
_TOKEN = "Pass the server's token: --token, AREAL_SERVE_TOKEN, or token=."


class Client:
    """One server. For several threads.

    url      `http://host:port`, a path behind it allowed
    token    bearer token of the server, or None
    timeout  seconds that a request may take, unless it is told otherwise: once they are over it is not sent again;
             `connect` to reach the server at all
    """

    def __init__(self, url: str, token: str | None = None, timeout: float = 60.0, connect: float = 5.0) -> None:
        self.url = url.rstrip("/")
        if "://" not in self.url:
            self.url = f"http://{self.url}"
        self.timeout, self.connect = timeout, connect
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._local = threading.local()

    def get(self, path: str, *, timeout: float | None = None, attempts: int = ATTEMPTS) -> dict[str, Any]:
        return self._send("GET", path, attempts, timeout)

    def text(self, path: str, *, timeout: float | None = None) -> str:
        """What is no JSON: metrics."""
        return self._answer("GET", path, timeout, {}).text

    def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        idempotent: bool = False,
    ) -> dict[str, Any]:
        """`idempotent`: may be sent again when no answer came."""
        return self._send("POST", path, ATTEMPTS if idempotent else 1, timeout, json=dict(body or {}))

    def post_bytes(
        self, path: str, data: bytes | bytearray | memoryview, *, timeout: float | None = None
    ) -> dict[str, Any]:
        """A body of raw bytes; sent once."""
        headers = {"Content-Type": "application/octet-stream"}
        return self._send("POST", path, 1, timeout, data=bytes(data), headers=headers)

    def delete(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout: float | None = None
    ) -> dict[str, Any]:
        return self._send("DELETE", path, ATTEMPTS, timeout, json=dict(body or {}))

    # -------------------------------------------------------------------------------------------- underneath

    def _session(self) -> requests.Session:
        """One for each thread. Proxies and .netrc of the environment are not for servers of one's own cluster."""
        import requests

        session: requests.Session | None = getattr(self._local, "session", None)
        if session is None:
            session = self._local.session = requests.Session()
            session.trust_env = False
            session.headers.update(self._headers)
        return session

    def _send(self, method: str, path: str, attempts: int, timeout: float | None, **options: Any) -> dict[str, Any]:
        """A server that is only just gone, or whose answer was lost, is asked again; one that said nothing for as long
        as it may is not: it would say nothing three times as long."""
        wait, end = _FIRST_WAIT, time.monotonic() + (self.timeout if timeout is None else timeout)
        while True:
            attempts -= 1
            try:
                return self._once(method, path, timeout, options)
            except ServerUnreachable:
                if attempts <= 0 or time.monotonic() + wait > end:
                    raise
            time.sleep(wait)
            wait *= 2

    def _once(self, method: str, path: str, timeout: float | None, options: Mapping[str, Any]) -> dict[str, Any]:
        return self._body(self._answer(method, path, timeout, options), method, path)

    def _answer(self, method: str, path: str, timeout: float | None, options: Mapping[str, Any]) -> requests.Response:
        import requests

        limit = self.timeout if timeout is None else timeout
        try:
            answer = self._session().request(method, f"{self.url}{path}", timeout=(self.connect, limit), **options)
        except requests.Timeout as error:
            raise ServerUnreachable(f"{self.url} did not answer {method} {path} within {limit:g} s.") from error
        except (requests.exceptions.InvalidURL, requests.exceptions.InvalidSchema) as error:
            hint = "http://HOST:PORT was expected."
            raise ServerRefused("bad_url", f"{self.url} is no address of a server: {error}.", hint=hint) from error
        except requests.RequestException as error:
            raise ServerUnreachable(
                f"{self.url} cannot be reached: {_reason(error)}", hint="Is the server running, and the port right?"
            ) from error
        if answer.status_code < 400:
            return answer
        raise self._refusal(answer, method, path)

    def _body(self, answer: requests.Response, method: str, path: str) -> dict[str, Any]:
        try:
            body = answer.json() if answer.content else {}
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise ServerRefused(
                "wrong_dialect", f"{self.url} answered {method} {path} with something that is no JSON object."
            )
        return body

    def _refusal(self, answer: requests.Response, method: str, path: str) -> ServerRefused | ServerUnreachable:
        """The error that an answer of 400 or more stands for."""
        status = answer.status_code
        try:
            body = answer.json()
        except ValueError:
            body = None
        error = body.get("error") if isinstance(body, Mapping) else None
        if isinstance(error, Mapping) and isinstance(error.get("code"), str):
            return self._from_json(error, status)
        if status in _PASSING:
            return ServerUnreachable(f"{self.url} answered {method} {path} with {status}.")
        if status == 404:
            what, hint = (
                f"{self.url} has no {method} {path}: it does not speak this protocol.",
                "Is it the right server?",
            )
            return ServerRefused("wrong_dialect", what, hint=hint, facts={"status": status})
        if status in (401, 403):
            return ServerRefused("unauthorized", f"{self.url} does not accept the token.", hint=_TOKEN)
        text = answer.text[:200].replace("\n", " ")
        return ServerRefused(
            "http", f"{self.url} answered {method} {path} with {status}: {text}", facts={"status": status}
        )

    def _from_json(self, error: Mapping[str, Any], status: int) -> ServerRefused:
        code, message = error["code"], str(error.get("message") or error["code"])
        listed = error.get("problems")
        problems = [
            Problem(str(p.get("about", "")), str(p.get("what", "")), str(p.get("hint", "")))
            for p in (listed if isinstance(listed, list) else ())
            if isinstance(p, Mapping)
        ]
        hint = str(error.get("hint") or "")
        if problems:
            message = message.splitlines()[0]
        message = message.removesuffix(hint).rstrip() or message
        if code in ("unauthorized", "expired_token"):
            hint = _TOKEN
        kind = LeaseHeld if code == "lease_held" else ServerRefused
        return kind(
            code,
            f"{self.url}: {message}",
            problems,
            hint,
            retryable=bool(error.get("retryable")),
            facts={"status": status}
            | {k: v for k, v in error.items() if k not in ("code", "message", "hint", "retryable", "problems")},
        )


def _reason(error: Exception) -> str:
    """The innermost cause, without the library's wrapping."""
    text = str(error)
    for known in _CAUSES:
        if known in text:
            return f"{known}."
    return f"{text[:160]}."
