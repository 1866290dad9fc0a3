"""What a server answers when it does not do what a hub asked: a code, a status, what to do, whether to try again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import ConvertError, Problem, Problems

STATUS: dict[str, int] = {
    "unauthorized": 401,
    "expired_token": 401,
    "browser": 403,
    "not_found": 404,
    "too_large": 413,
    "bad_request": 422,
    "bad_manifest": 422,
    "bad_transport": 422,
    "bad_bucket": 422,
    "mismatch": 422,
    "timeout": 504,
    "install_failed": 500,
    "internal": 500,
}
"""Codes that are no plain 409: the request was understood, and does not fit the state that this server is in."""

RETRYABLE = frozenset({"lease_held", "busy", "timeout", "install_failed"})
"""Codes after which the same request may succeed later, unless the refusal says otherwise."""


class Refused(ConvertError):
    """A request of the hub that is not carried out. Nothing changed, unless the code is `failed`.

    code       a word for programs (`stale_epoch`, `lease_held`, `memory`, …); `status` the HTTP status
    retryable  whether the same request may succeed later
    facts      more fields of the JSON error (who holds the lease, bytes that are missing, …)
    """

    def __init__(
        self,
        code: str,
        what: str,
        problems: Iterable[Problem] = (),
        hint: str = "",
        *,
        retryable: bool | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(what, problems, hint)
        self.code, self.facts = code, facts
        self.status = STATUS.get(code, 409)
        self.retryable = code in RETRYABLE if retryable is None else retryable

    def to_json(self) -> dict[str, Any]:
        """The body of the answer: {"error": {code, message, hint, retryable, problems?, …facts}}."""
        error: dict[str, Any] = {
            "code": self.code,
            "message": self.what,
            "hint": self.hint,
            "retryable": self.retryable,
        }
        if self.problems:
            error["message"] = str(self)
            error["problems"] = [{"about": p.about, "what": p.what, "hint": p.hint} for p in self.problems[:200]]
        return {"error": {**error, **self.facts}}


def refuse(problems: Problems, code: str, what: str, hint: str = "") -> None:
    """Raise Refused with all that was found; do nothing when nothing was."""
    if problems:
        raise Refused(code, what, problems.found, hint)
