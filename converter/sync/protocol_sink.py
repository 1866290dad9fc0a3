"""A server that speaks our protocol (`/ws/*`), as the hub sees it: the embedded one, or whoever mounts `routes.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import ServerRefused
from .client import Client
from .sink import Receipt, SinkLayout, SinkStatus, Tier
from .wire import PROTOCOL, Atom, Manifest


class ProtocolSink:
    """See `sink.StagedSink`. Every message names the hub, and the epoch of the last join."""

    name = "areal-convert"

    def __init__(self, client: Client, hub: str, commit_policy: Mapping[str, Any] | None = None) -> None:
        self.client, self.url, self.hub = client, client.url, hub
        self.epoch = 0
        self.run = ""
        self.tier: Tier = "swap"
        self._policy = dict(commit_policy or {})

    @property
    def _soon(self) -> float:
        """Seconds for what a server answers at once, however busy it is."""
        return min(10.0, self.client.timeout)

    def status(self) -> SinkStatus:
        raw = self.client.get("/ws/status", timeout=self._soon, attempts=1)
        if raw.get("protocol") != PROTOCOL:
            raise ServerRefused(
                "protocol",
                f"{self.url} speaks version {raw.get('protocol')!r} of the protocol, this hub version {PROTOCOL}.",
                hint="Install the same version of areal-convert on both sides.",
            )
        if raw.get("atomicity") in ("swap", "host_stage", "fenced"):
            self.tier = raw["atomicity"]
        staged, lease = raw.get("staged"), raw.get("lease")
        return SinkStatus(
            sink=str(raw.get("sink") or ""),
            state=str(raw.get("state")),
            version=int(raw.get("version") or 0),
            root=str(raw.get("root") or ""),
            staged=(int(staged["version"]), str(staged["root"])) if staged else None,
            epoch=int(raw.get("epoch") or 0),
            run=str(raw.get("run") or ""),
            lease=(str(lease.get("hub")), float(lease.get("expires_in") or 0)) if lease else None,
            error=_error_text(raw.get("error")),
            raw=raw,
        )

    def layout(self) -> SinkLayout:
        raw = self.client.get("/ws/layout")
        try:
            atoms = [Atom(str(name), tuple(shape), str(dtype)) for name, shape, dtype in raw["atoms"]]
            return SinkLayout(dict(raw["model"]), atoms, [list(names) for names in raw.get("ties") or ()])
        except (KeyError, TypeError, ValueError) as error:
            raise ServerRefused("wrong_dialect", f"{self.url}: GET /ws/layout tells no layout ({error!r}).") from error

    def lease(self, hub: str, ttl: float) -> None:
        self.client.post("/ws/lease", {"hub": hub, "ttl": ttl}, idempotent=True, timeout=self._soon)

    def release(self) -> None:
        self.client.delete("/ws/lease", {"hub": self.hub}, timeout=self._soon)

    def join(self, epoch: int, transport: Mapping[str, Any]) -> None:
        body = {"hub": self.hub, "run": self.run, "epoch": epoch, "transport": dict(transport)}
        self.client.post("/ws/join", body)
        self.epoch = epoch

    def prepare(self, manifest: Manifest) -> None:
        self.client.post("/ws/prepare", {**manifest.to_json(), "hub": self.hub}, idempotent=True)

    def seal(self, version: int, root: str) -> str:
        answer = self.client.post("/ws/seal", self._said(version, root=root), idempotent=True)
        return str(answer.get("root") or "")

    def commit(self, version: int, root: str) -> Receipt:
        answer = self.client.post("/ws/commit", self._said(version, root=root) | self._policy, idempotent=True)
        found = (int(answer.get("version") or 0), str(answer.get("root") or ""))
        if found != (version, root):
            raise ServerRefused(
                "false_receipt", f"{self.url} confirmed version {found[0]} (root {found[1]}), not {version} ({root})."
            )
        in_flight = answer.get("in_flight")
        return Receipt(*found, float(answer.get("pause_s") or 0.0), in_flight if isinstance(in_flight, Mapping) else {})

    def abort(self, version: int | None, reason: str) -> None:
        body: dict[str, Any] = {"hub": self.hub, "epoch": self.epoch, "reason": reason}
        if version is not None:
            body["version"] = version
        self.client.post("/ws/abort", body, idempotent=True, timeout=min(20.0, self.client.timeout))

    def digests(self, names: Iterable[str] | None = None) -> dict[str, str]:
        answer = self.client.get("/ws/digests")
        found = answer.get("atoms")
        if not isinstance(found, Mapping):
            raise ServerRefused("wrong_dialect", f"{self.url}: GET /ws/digests has no atoms.")
        wanted = None if names is None else set(names)
        return {str(k): str(v) for k, v in found.items() if wanted is None or k in wanted}

    def close(self) -> None: ...

    def _said(self, version: int, **fields: Any) -> dict[str, Any]:
        return {"hub": self.hub, "epoch": self.epoch, "version": version, **fields}


def _error_text(error: Any) -> str | None:
    if not error:
        return None
    return str(error.get("message") or error) if isinstance(error, Mapping) else str(error)
