"""What huggingface_hub and its HTTP client raise, said in our words: what happened, and what to do.

The client is requests, httpx or httpx2, by the library's version, so its exceptions are known by their names.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ..errors import ConvertError, NoAccess, RemoteError, Unreachable
from .fetch import Traffic, retried
from .store import Dropped

T = TypeVar("T")

_LATER = {408, 425, 429, 500, 502, 503, 504, 520, 522, 524}
"""Answers after which the same request may succeed."""

_TRANSPORT = {"TransportError", "RequestException", "HTTPError", "HTTPException"}
"""httpx' and httpx2's, requests', urllib3's (below requests, in the middle of a body), http.client's."""


def call(action: Callable[[], T], about: str, *, attempts: int = 4, traffic: Traffic | None = None) -> T:
    """The result of a call into huggingface_hub, tried again where that may help. Raises RemoteError.

    about  what is asked for, for the message: the repository's URL
    """

    def once() -> T:
        try:
            return action()
        except (Dropped, ConvertError):
            raise
        except Exception as error:
            raise explain(error, about) from error

    return retried(once, about=about, attempts=attempts, traffic=traffic)


def explain(error: BaseException, about: str) -> RemoteError | Dropped:
    """What to raise instead: Dropped when another attempt may succeed, else a RemoteError. What is no error of the
    network or of the Hub is raised as it is."""
    chain = list(_chain(error))
    names = {kind.__name__ for cause in chain for kind in type(cause).__mro__}
    if "OfflineModeIsEnabled" in names:
        return Unreachable(
            f"{about}: offline mode is on (HF_HUB_OFFLINE), and Hugging Face's cache does not hold it.",
            hint="Unset HF_HUB_OFFLINE, or fetch it into the cache before.",
        )
    response = next((r for cause in chain if (r := getattr(cause, "response", None)) is not None), None)
    if response is not None:
        return of_answer(error, names, response, about)
    if names & _TRANSPORT or isinstance(error, (OSError, TimeoutError)):
        return _of_transport(chain, about)
    raise error


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def of_answer(error: BaseException, names: set[str], response: Any, about: str) -> RemoteError | Dropped:
    """An answer other than the one hoped for."""
    status = int(response.status_code)
    said = str(getattr(error, "server_message", None) or "").strip() or f"the server answers {status}"
    if status in _LATER:
        return Dropped(_busy(status, said), wait_of(response))
    if "GatedRepoError" in names:
        return NoAccess(
            f"{about} is gated, and access has not been granted to this user.",
            hint=f"{_login()}Ask for access on the repository's page: {_page(about)}",
        )
    if "DisabledRepoError" in names:
        return NoAccess(f"{about} was disabled by the Hub.")
    if "RevisionNotFoundError" in names:
        return NoAccess(
            f"{about}: there is no such revision (branch, tag or commit); a commit can vanish by a forced push.",
            hint="Without @revision the main branch is read. A slash in a branch's name is written %2F.",
        )
    if "EntryNotFoundError" in names or "RemoteEntryNotFoundError" in names:
        return NoAccess(f"{about}: there is no such file.")
    if "RepositoryNotFoundError" in names:
        return NoAccess(
            f"{about}: there is no such repository, or it is private and this user may not see it.",
            hint=f"Is the name right? {_login() or 'Does the token belong to somebody who may see it?'}".strip(),
        )
    if status == 401:
        return NoAccess(
            f"{about}: the Hub does not accept the token: {said}",
            hint="It is invalid or expired: log in anew with `hf auth login`, or correct HF_TOKEN.",
        )
    if status == 403:
        return NoAccess(f"{about}: access is refused: {said}", hint=_login() or "The token's rights do not suffice.")
    if status == 404:
        return NoAccess(f"{about}: {said} (status 404).", hint="Is the name right? A repository is org/name.")
    return RemoteError(f"{about}: {said} (status {status}).")


def _busy(status: int, said: str) -> str:
    if status == 429:
        return f"too many requests, the Hub asks to slow down: {said}"
    return f"the server fails with {status}: {said}"


def wait_of(response: Any) -> float | None:
    """Seconds for which the server asks to wait (`Retry-After`, or `t=` of `RateLimit`)."""
    text = str(response.headers.get("Retry-After") or "")
    if text.isdigit():
        return float(text)
    for part in str(response.headers.get("RateLimit") or "").split(";"):
        name, _, value = part.strip().partition("=")
        if name == "t" and value.isdigit():
            return float(value)
    return None


def _login() -> str:
    from huggingface_hub import get_token

    return "" if get_token() else "No token is set: log in with `hf auth login`, or set HF_TOKEN. "


def _page(about: str) -> str:
    from huggingface_hub import constants

    from .urls import parse_hub

    return f"{constants.ENDPOINT}/{parse_hub(about).repo}" if about.startswith("hf://") else about


def _of_transport(chain: list[BaseException], about: str) -> RemoteError | Dropped:
    """The connection could not be made, or broke."""
    text = next((str(cause) for cause in chain if str(cause)), type(chain[0]).__name__)
    proxy = next((v for v in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy") if os.environ.get(v)), None)
    if any(isinstance(cause, ssl.SSLError) for cause in chain) or "[SSL" in text or "CERTIFICATE_VERIFY" in text:
        return Unreachable(
            f"{about}: no secure connection could be made: {text}",
            hint="Behind a proxy that opens TLS, name its certificate: SSL_CERT_FILE, or REQUESTS_CA_BUNDLE for older "
            "versions of huggingface_hub.",
        )
    through = f" ({proxy} is set: is the proxy running, and does NO_PROXY say what goes past it?)" if proxy else ""
    if any(isinstance(cause, socket.gaierror) for cause in chain) or "Name or service" in text or "resolution" in text:
        return Dropped(f"the server's name cannot be resolved: {text}{through}")
    if "Timeout" in "".join(type(cause).__name__ for cause in chain):
        return Dropped(f"the server did not answer in time{through}")
    return Dropped(f"the connection failed: {text}{through}")
