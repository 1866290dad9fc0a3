"""What fsspec's file systems, botocore and sockets raise, said in our words: what happened, and what to do.

The libraries are known by the names of their exceptions, so that none has to be imported for it.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..errors import ConvertError, NoAccess, RemoteChanged, RemoteError, TargetError, Unreachable
from .store import Dropped

LATER = {408, 425, 429, 500, 502, 503, 504}
"""Answers after which the same request may succeed."""

_CREDENTIALS = (
    "Credentials come from where the AWS tools take them (AWS_ACCESS_KEY_ID, AWS_PROFILE, ~/.aws) and from fsspec's "
    "configuration; AWS_ENDPOINT_URL names another endpoint."
)
_CLOCK = {"RequestTimeTooSkewed": "Set this machine's clock."}
_WRONG_KEYS = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthorizationHeaderMalformed"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_MISSING = {"NoSuchKey", "404", "NotFound"}
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "CredentialRetrievalError"}
_NO_CREDENTIALS |= {"TokenRetrievalError", "SSOTokenLoadError", "UnauthorizedSSOTokenError", "DefaultCredentialsError"}
_REGION = {"PermanentRedirect", "IllegalLocationConstraintException", "301"}
_TRANSPORT = {
    "ConnectionError",
    "HTTPClientError",
    "ClientError",
    "HTTPException",
    "IncompleteReadError",
    "TimeoutError",
}
_TRANSPORT |= {"ReadTimeoutError", "ResponseStreamingError", "ProtocolError", "ClientConnectionError", "HttpError"}


class Reason(NamedTuple):
    """kind: `later` (the same may work), `access`, `changed`, or `other`."""

    kind: str
    what: str
    hint: str = ""


def explain(error: BaseException, about: str) -> ConvertError | Dropped:
    """What reading raises instead. An exception that is a bug of ours is raised as it is."""
    if isinstance(error, (ConvertError, Dropped)):
        return error
    reason = reason_of(error)
    if reason.kind == "later":
        return Dropped(reason.what)
    kinds = {"access": NoAccess, "changed": RemoteChanged, "down": Unreachable}
    return kinds.get(reason.kind, RemoteError)(f"{about}: {reason.what}.", hint=reason.hint)


def explain_writing(error: BaseException, about: str) -> ConvertError | Dropped:
    """What writing raises instead."""
    if isinstance(error, (ConvertError, Dropped)):
        return error
    reason = reason_of(error)
    if reason.kind == "later":
        return Dropped(reason.what)
    return TargetError(f"{about}: {reason.what}.", hint=reason.hint)


def reason_of(error: BaseException) -> Reason:
    """Why a call into a storage library failed. Raises `error` itself when it is none of storage."""
    chain = list(_chain(error))
    names = {kind.__name__ for cause in chain for kind in type(cause).__mro__}
    for cause in chain:
        answer: Any = getattr(cause, "response", None)
        if isinstance(answer, dict) and "Error" in answer:
            return _of_s3(answer)
    if names & _NO_CREDENTIALS:
        return Reason("access", f"there are no credentials for it ({_last(chain)})", _CREDENTIALS)
    if any(isinstance(cause, ssl.SSLError) for cause in chain) or "SSLError" in names:
        return Reason("down", f"TLS fails: {_last(chain)}", "SSL_CERT_FILE or AWS_CA_BUNDLE names another authority.")
    if _unknown_host(chain):
        return Reason("down", f"there is no such server: {_last(chain)}", "Check the host, the network and the proxy.")
    endpoint = next((cause for cause in chain if type(cause).__name__ == "EndpointConnectionError"), None)
    if endpoint is not None or any(isinstance(cause, ConnectionRefusedError) for cause in chain):
        return Reason("later", f"the server cannot be reached: {_last([endpoint] if endpoint else chain)}")
    if isinstance(error, FileNotFoundError):
        return Reason("access", "there is no such file, directory or bucket")
    if isinstance(error, PermissionError):
        return Reason("access", f"access is denied ({_last(chain)})", _CREDENTIALS)
    if names & _TRANSPORT or isinstance(error, OSError):
        status = next((s for cause in chain if isinstance(s := getattr(cause, "status", None), int)), None)
        if status is not None and status not in LATER:
            return Reason("access" if status in (401, 403, 404) else "other", f"the server answers {status}")
        return Reason("later", _last(chain))
    raise error


def _of_s3(answer: dict[str, Any]) -> Reason:
    """From an S3 error document."""
    code, said = str(answer["Error"].get("Code", "")), str(answer["Error"].get("Message", "")).rstrip(".")
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    told = f"{said or 'no reason given'} ({code})"
    if code == "NoSuchBucket":
        return Reason("access", "there is no such bucket", "Check its name, and AWS_ENDPOINT_URL if it is not on AWS.")
    if code in _MISSING or status == 404:
        return Reason("access", "there is no such object")
    if code in _EXPIRED:
        return Reason("access", f"the credentials have expired: {told}", "Get new ones (`aws sso login`, say).")
    if code in _CLOCK:
        return Reason("access", told, _CLOCK[code])
    if code in _WRONG_KEYS:
        return Reason("access", f"the credentials or the region are wrong: {told}", _CREDENTIALS)
    if code in _REGION or status == 301:
        return Reason("access", f"the bucket is in another region: {told}", "Set AWS_REGION or AWS_DEFAULT_REGION.")
    if code in ("PreconditionFailed", "InvalidRange") or status in (412, 416):
        return Reason("changed", f"it was changed while it was read: {told}", "Begin again when nothing writes to it.")
    if code == "InvalidObjectState":
        return Reason("other", f"it is archived: {told}", "Restore it from the archive first.")
    if code in ("SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable") or status in LATER:
        return Reason("later", f"the server answers {status}: {told}")
    if code in ("AccessDenied", "403", "Forbidden", "AllAccessDisabled", "401") or status in (401, 403):
        return Reason("access", f"access is denied: {told}", _CREDENTIALS)
    return Reason("other", told)


def _unknown_host(chain: list[BaseException]) -> bool:
    return any(isinstance(cause, socket.gaierror) for cause in chain) or any(
        word in str(cause) for cause in chain for word in ("Name or service not known", "name resolution")
    )


def _last(chain: list[BaseException]) -> str:
    """The deepest cause that says something, in one line."""
    said = [str(cause).strip().splitlines()[0] for cause in chain if str(cause).strip()]
    return (said[-1] if said else type(chain[0]).__name__)[:300].rstrip(".")


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen = set[int]()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__
