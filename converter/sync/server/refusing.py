"""What a client is told when a request is not answered: OpenAI's form, what to do, whether to try again."""

from __future__ import annotations

from typing import Any

from ...errors import ConvertError

STATUS: dict[str, int] = {
    "invalid_request": 400,
    "context_length_exceeded": 400,
    "unauthorized": 401,
    "model_not_found": 404,
    "not_found": 404,
    "weight_version": 409,
    "too_large": 413,
    "queue_full": 429,
    "internal": 500,
    "aborted": 503,
    "shutting_down": 503,
}
RETRYABLE = frozenset({"weight_version", "queue_full", "aborted", "shutting_down"})
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class RequestRefused(ConvertError):
    """A request to the model that is not answered.

    code   a word for programs; `status` the HTTP status
    param  the field of the request that is wrong, if one is
    facts  more fields of the JSON error (the current version, say)
    """

    def __init__(self, code: str, what: str, hint: str = "", *, param: str | None = None, **facts: Any) -> None:
        super().__init__(what, hint=hint)
        self.code, self.param, self.facts = code, param, facts
        self.status = STATUS[code]
        self.retryable = code in RETRYABLE

    def to_json(self) -> dict[str, Any]:
        """{"error": {message, type, param, code, hint, retryable, …facts}}, as OpenAI's clients expect it."""
        error: dict[str, Any] = {
            "message": f"{self.what} {self.hint}".strip(),
            "type": _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error"),
            "param": self.param,
            "code": self.code,
            "hint": self.hint,
            "retryable": self.retryable,
        }
        return {"error": {**error, **self.facts}}
