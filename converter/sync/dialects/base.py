"""Which server speaks at an address, told by the endpoints that it has. Nothing there is changed by asking.

An endpoint that only takes POST answers GET with 405, one that is not there with 404: so a set of endpoints is told
without calling any, whatever version the server says that it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from ...errors import ConfigError, ServerRefused
from ..client import Client

Kind = Literal["vllm-0.19", "vllm-0.30", "sglang-0.5.10", "sglang-0.5.23", "areal-vllm", "areal-sglang"]

InFlight = Literal["finish", "wait", "abort", "keep"]


@dataclass(frozen=True, slots=True)
class Found:
    """kind  the set of endpoints that is spoken; `version` what the server calls itself, `facts` what else it said."""

    kind: Kind
    version: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Oracle:
    """What the new weights answer to a prompt, greedily: from whoever can run them (transformers, the trainer).

    prompt      token ids; `tokens` those that follow, `logprobs` theirs
    tolerance   by which a logprob may differ
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    tolerance: float = 0.02

    def fault(self, tokens: Sequence[int], logprobs: Sequence[float]) -> str:
        """What is wrong with an answer, or ""."""
        if list(tokens) != list(self.tokens):
            return f"it answers {list(tokens)}; {list(self.tokens)} was expected."
        far = max((abs(a - b) for a, b in zip(logprobs, self.logprobs, strict=True)), default=0.0)
        if not far <= self.tolerance:  # NaN, too
            return f"its logprobs differ by {far:.3g}; {self.tolerance} is let."
        return ""


@dataclass(frozen=True, slots=True)
class Choices:
    """What a user chose for servers of others; other keys of the hub's `options` are not theirs.

    in_flight   requests that run when the fence closes: `finish` and `wait` (they end first), `abort`, `keep` (they go
                on with the new weights)
    oracle      an Oracle, or a function version → Oracle | None
    drained     the router has taken the server out: nobody asks it until `commit` returned. Only then can logprobs be
                compared before anybody sees an answer
    backend     of the process group: gloo or nccl; `world` workers of the server where it does not tell
    path        (from disk) the directory that the server itself reads, or a function version → directory
    fp8         the FP8 model directory that the server was started from: its headers say what is quantised
    model       name by which requests call the model (vLLM); None: asked
    group_bytes bytes of tensors in one call
    """

    in_flight: InFlight = "finish"
    oracle: Oracle | Callable[[int], Oracle | None] | None = None
    drained: bool = False
    backend: Literal["gloo", "nccl"] = "gloo"
    world: int | None = None
    path: str | Path | Callable[[int], str | Path] | None = None
    fp8: str | Path | None = None
    model: str | None = None
    group_bytes: int = 64 << 20
    drain_timeout: float = 60.0

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Choices:
        """Raises ConfigError for a value that cannot be."""
        known = {f.name for f in fields(cls)}
        found = cls(**{k: v for k, v in options.items() if k in known})
        for name, values in (("in_flight", ("finish", "wait", "abort", "keep")), ("backend", ("gloo", "nccl"))):
            if getattr(found, name) not in values:
                raise ConfigError(f"options: {name} is {getattr(found, name)!r}; known are {', '.join(values)}.")
        return found

    def oracle_of(self, version: int) -> Oracle | None:
        return self.oracle(version) if callable(self.oracle) else self.oracle

    def path_of(self, version: int) -> str | None:
        found = self.path(version) if callable(self.path) else self.path
        return None if found is None else str(found)


def has(client: Client, path: str) -> bool:
    """Whether there is such an endpoint (one that only takes POST). Raises ServerUnreachable, or `unauthorized`."""
    try:
        client.get(path, timeout=10.0, attempts=1)
    except ServerRefused as error:
        if error.code == "unauthorized":
            raise
        return error.facts.get("status") != 404
    return True


def ask(client: Client, *paths: str) -> dict[str, Any] | None:
    """The answer of the first of these GET endpoints that there is, or None."""
    for path in paths:
        try:
            return client.get(path, timeout=10.0, attempts=1)
        except ServerRefused as error:
            if error.code == "unauthorized":
                raise
    return None


NOWHERE = "/areal-convert-looks-for-nothing-here"


def detect(client: Client) -> Found:
    """What the server is. Raises ServerRefused (`wrong_dialect`) with what it seems to be instead."""
    if has(client, NOWHERE):  # a web application that answers every path with its page: no endpoint is told by that
        raise ServerRefused(
            "wrong_dialect",
            f"{client.url} is no inference server that is known here: it answers whatever path is asked for.",
            hint="Is the address right? A web page, or a proxy, seems to be there.",
        )
    if has(client, "/areal_init_weights_update_group"):
        return Found("areal-vllm", str((ask(client, "/version") or {}).get("version", "")))
    if has(client, "/init_weight_transfer_engine"):
        said = ask(client, "/version") or {}
        new = has(client, "/start_weight_update")
        return Found("vllm-0.30" if new else "vllm-0.19", str(said.get("version", "")), said)
    if has(client, "/init_weights_update_group"):
        said = ask(client, "/server_info", "/get_server_info") or {}
        if has(client, "/awex/report_weight_meta"):
            kind: Kind = "areal-sglang"
        else:
            kind = "sglang-0.5.23" if has(client, "/begin_weight_update") else "sglang-0.5.10"
        return Found(kind, str(said.get("version", "")), said)
    what, hint = _otherwise(client)
    raise ServerRefused("wrong_dialect", f"{client.url} is {what}.", hint=hint)


def _otherwise(client: Client) -> tuple[str, str]:
    version, models = ask(client, "/version"), ask(client, "/v1/models")
    if version is not None and "version" in version:
        return (
            f"a vLLM {version['version']} without the endpoints that take weights",
            "Start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config (docs/guides/sync.md).",
        )
    if models is not None:
        owners = {str(m.get("owned_by")) for m in models.get("data", []) if isinstance(m, dict)} - {"None"}
        by = f" (models owned by {', '.join(sorted(owners))})" if owners else ""
        return (
            f"an OpenAI-compatible server{by} that takes no weights",
            "Known are areal-convert serve, vLLM ≥ 0.19, SGLang ≥ 0.5.10 and AReaL's servers.",
        )
    return "no inference server that is known here", "Is the address right? /version and /v1/models are not there."
