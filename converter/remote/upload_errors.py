"""What goes wrong when something is written to the Hub, said with its real cause and the way out."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import ConvertError, TargetError
from .store import Dropped

AGAIN = (
    "Nothing was committed: the revision before is served as before. Run the same push again: what has arrived is "
    "not sent a second time."
)
LOGIN = "Log in with `hf auth login`, or set HF_TOKEN to a token from https://huggingface.co/settings/tokens."

_TRANSPORT = {"httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "hf_xet"}
_REFUSALS = (
    (
        "write token",
        "this token can only read.",
        "Use one with the role `write`, or a fine-grained one that may write.",
    ),
    ("storage limit", "its storage is full.", "Free or buy room, push to another namespace, or make it public."),
    ("quota", "its storage is full.", "Free or buy room, or push to another namespace."),
    ("create_pr", "this user may not write to it.", "Pass --create-pr to propose the change, or ask its owner."),
    (
        "namespace",
        "this user may not create repositories there.",
        "Push to a namespace of your own, or ask for rights.",
    ),
)


@contextmanager
def explained(repo: str, doing: str, *, begun: bool = True) -> Iterator[None]:
    """Turn what huggingface_hub raises into a TargetError. `begun`: something may have been uploaded already."""
    try:
        yield
    except ConvertError:
        raise
    except Exception as error:
        said = explain(error, repo)
        if said is None:
            raise
        what, hint = said
        words = (hint, AGAIN if begun else "")
        raise TargetError(f"{repo}: {doing} failed: {what}", hint=" ".join(filter(None, words))) from error


@contextmanager
def passing() -> Iterator[None]:
    """For calls that huggingface_hub tries once: what may pass becomes Dropped, which `fetch.retried` tries again."""
    try:
        yield
    except Exception as error:
        if may_pass(error):
            raise Dropped(_short(root_of(error)), wait_of(error)) from error
        raise


def root_of(error: BaseException) -> BaseException:
    """The error that matters: huggingface_hub wraps what the server said about an upload."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def root_cause(error: Exception) -> Exception:
    """What huggingface_hub raised, of an error that `passing` and `retried` have made of it."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
        if not isinstance(error, Dropped):
            break
    return error


def status_of(error: BaseException) -> int | None:
    """The HTTP status in an error, or None."""
    return getattr(getattr(root_of(error), "response", None), "status_code", None)


def is_transport(error: BaseException) -> bool:
    """Whether the connection failed, rather than the request."""
    if _name(error) == "OfflineModeIsEnabled":
        return False
    places = {base.__module__.partition(".")[0] for base in type(error).__mro__}
    return status_of(error) is None and (bool(places & _TRANSPORT) or isinstance(error, ConnectionError | TimeoutError))


def may_pass(error: BaseException) -> bool:
    """Whether the same request may succeed in a moment."""
    error, status = root_of(error), status_of(error)
    if status is not None:
        return status in (408, 425, 429) or status >= 500
    return is_transport(error) and "CERTIFICATE" not in _chain(error).upper()


def explain(error: BaseException, repo: str) -> tuple[str, str] | None:
    """What happened and what to do, or None for what is no trouble with the Hub."""
    error = root_of(error)
    status, message = status_of(error), _short(error)
    if _name(error) == "OfflineModeIsEnabled":
        return "offline mode is on.", "Unset HF_HUB_OFFLINE (and TRANSFORMERS_OFFLINE)."
    if status is not None:
        return _refused(error, status, message, repo)
    if is_transport(error):
        return _cut(error)
    if isinstance(error, ValueError) and "README.md" in message:
        return f"the Hub refuses the card: {message}", "Mend the YAML between the two lines of --- at its top."
    if isinstance(error, ValueError) and "LFS" in message:
        return message, ""
    return None


def _refused(error: BaseException, status: int, message: str, repo: str) -> tuple[str, str]:
    name = _name(error)
    if name == "GatedRepoError":
        return "it is gated, and this user was not let in.", f"Ask for access at its page on the Hub ({repo})."
    if name == "RevisionNotFoundError":
        return message, "Pass --branch NAME to have the branch created."
    if name == "RepositoryNotFoundError":
        return "it does not exist, or is private and this token does not see it.", f"Check the name. {LOGIN}"
    if status == 401:
        return "the Hub does not accept this token.", LOGIN
    if status == 409 and "already created" in message:
        return "somebody made it meanwhile.", "The same push again looks at what is there now."
    if status == 412:
        return "somebody committed to the branch meanwhile.", ""
    if status == 429:
        wait = wait_of(error)
        return f"too many requests (429){f', wait {wait:.0f} s' if wait else ''}.", "Wait, then go on."
    if status == 413:
        return f"a file is too large for the Hub: {message}", "Pass a smaller --max-shard-size."
    if status == 403:
        for word, what, hint in _REFUSALS:
            if word in message.lower():
                return f"{what} The Hub says: {message}", hint
        return f"it was refused: {message}", "Check the token's rights."
    if status >= 500:
        return f"the Hub is in trouble ({status}): {message}", ""
    return f"{message} ({status})", ""


def _cut(error: BaseException) -> tuple[str, str]:
    words, text = _chain(error), _short(error)
    if "xet" in words.lower():
        return f"the upload over Xet broke off: {text}", "HF_HUB_DISABLE_XET=1 uploads over plain HTTP."
    if "SSL" in words or "CERTIFICATE" in words.upper():
        return f"no safe connection: {text}", "Set SSL_CERT_FILE to your organisation's certificates."
    proxies = [n for n in ("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy") if os.environ.get(n)]
    behind = f" {proxies[0]} is set: check the proxy." if proxies else ""
    from huggingface_hub import constants

    what = "no connection" if "ConnectError" in words or "ConnectionError" in words else "the connection broke off"
    return f"{what} ({constants.ENDPOINT}): {text}", f"Check the network and HF_ENDPOINT.{behind}"


def _name(error: BaseException) -> str:
    return type(error).__name__


def _short(error: BaseException) -> str:
    """An error's own words on one line; the server's, where it said any."""
    said = getattr(error, "server_message", None) or str(error) or _name(error)
    lines = [line.strip() for line in str(said).splitlines() if line.strip() and not line.startswith("For more info")]
    return re.sub(r"\s*\(Request ID:[^)]*\)", "", " ".join(lines))[:400]


def _chain(error: BaseException | None) -> str:
    """The words of an error and of what led to it."""
    words = []
    while error is not None and len(words) < 8:
        words.append(f"{_name(error)} {error}")
        error = error.__cause__ or error.__context__
    return " ".join(words)


def wait_of(error: BaseException) -> float | None:
    """Seconds that the server asks to wait."""
    headers: Any = getattr(getattr(root_of(error), "response", None), "headers", {})
    try:
        return float(headers.get("Retry-After"))
    except (TypeError, ValueError):
        return None
