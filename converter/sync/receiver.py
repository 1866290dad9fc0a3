"""The server's side of a push, without HTTP: what `routes.py` calls, and what other servers can embed.

    from areal_convert.converter.sync import Receiver
    from areal_convert.converter.sync.routes import router

    receiver = Receiver(model, json.loads(Path("model/config.json").read_text()), name="my-server", token="secret")
    app.include_router(router(receiver))                   # FastAPI: /ws/status, /ws/join, … for a WeightSync

    @app.post("/generate")
    def generate(request: Request) -> Answer:
        with receiver.reading() as (model, version):       # one version from the first token to the last
            return Answer(model.generate(...), weight_version=version)

A push is received into a second copy of the weights and verified there; a commit swaps the two copies between
`before_install` (close the gate, drain) and `after_install` (flush caches that hold keys and values, open the gate).
Whatever fails before leaves the old version serving. See `wire.State` for the states.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ..errors import ConvertError
from . import memory
from .checking import check_manifest, number, read_manifest, text
from .commits import POLICIES, Commit, Critical, Facts, bracketed, carry_out
from .inlet import KINDS
from .ledger import Ledger
from .reception import Reception
from .refusals import Refused
from .session import Push, Session
from .stage import Stage
from .staging import Staging
from .transports.segments import host_id
from .wire import PROTOCOL, Manifest, State

HTTP_MARGIN = 0.9
"""Of a hub's timeout: this server answers `busy` or `timeout` before the hub gives up on it."""

RECEIPTS = 16
"""Commits whose receipt is given again to a hub that asks again."""


class Receiver(Session):
    """Takes pushes for one model. Every method may be called from any thread; those of the protocol raise Refused.

    target          the module that serves (or a callable that makes it, or a mapping of tensors): whole tensors
    config          the model's config.json as a dict
    name, token     what the server is called; the bearer token that `routes.py` asks for (or a callable that gets what
                    was sent and returns why it does not do, or None)
    version, root   of the weights that are there now
    critical        the server's own critical section (see `commits.Critical`), instead of the two hooks
    before_install, after_install   called with the `Commit` (and whether it was installed) around the swap
    adapters        where LoRA pushes go (`transports.lora.AdapterStage`); None: they are refused
    transports      kinds that a join may ask for
    timeout         seconds that prepare, seal and the transport wait at most
    on_change       called with the state whenever it changes, from whatever thread
    keep, twin, free   as `Stage` has them

    Raises PlanError when the target is not what the config says.
    """

    def __init__(
        self,
        target: Any,
        config: Mapping[str, Any],
        *,
        name: str = "server",
        token: str | Callable[[str], str | None] | None = None,
        version: int = 0,
        root: str | None = None,
        critical: Critical | None = None,
        before_install: Callable[[Commit], Facts] | None = None,
        after_install: Callable[[Commit, bool], Facts] | None = None,
        adapters: Staging | None = None,
        transports: Iterable[str] = ("gloo", "nccl", "shm", "disk", "inline"),
        timeout: float = 60.0,
        on_change: Callable[[State], None] | None = None,
        keep: Sequence[str] = (),
        twin: Callable[[Any], Any] | None = None,
        free: memory.Free = memory.free,
    ) -> None:
        made = target() if callable(target) and not hasattr(target, "state_dict") else target
        self.stage = Stage(made, config, version=version, root=root, keep=keep, twin=twin, free=free)
        self.name, self.token = name, token
        sink = f"{name}-{os.getpid()}-{secrets.token_hex(4)}"
        super().__init__(sink, [kind for kind in transports if kind in KINDS], timeout, on_change)
        self._adapters, self._free = adapters, free
        self._critical = critical or bracketed(before_install, after_install)
        self._receipts: dict[tuple[int, str], dict[str, Any]] = {}

    # -------------------------------------------------------------------------------------------- serving

    def reading(self) -> AbstractContextManager[tuple[Any, int]]:
        """`with receiver.reading() as (module, version)`: neither changes inside."""
        return self.stage.reading()

    def current(self) -> Any:
        """The module (or mapping) that serves now."""
        return self.stage.current()

    @property
    def version(self) -> int:
        return self.stage.version

    def status(self) -> dict[str, Any]:
        """As `GET /ws/status` gives it."""
        with self._lock:
            push, epoch = self._push, self._epoch
            staged = push is not None and self._state in ("staged", "committing")
            adapters = self._adapters
            return {
                "protocol": PROTOCOL,
                "sink": self.sink,
                "name": self.name,
                "host": host_id(),
                "state": self._state,
                "epoch": self._seen,
                "run": epoch.run if epoch is not None else "",
                "version": self.stage.version,
                "root": self.stage.root,
                "adapters": {"version": adapters.version, "root": adapters.root} if adapters is not None else None,
                "staged": {"version": push.version, "root": push.root} if staged and push is not None else None,
                "receiving": self._receiving(push),
                "lease": self._lease.to_json(),
                "transports": self.transports,
                "atomicity": "swap",
                "memory_free": self._free(self.stage.device),
                "readers": self.stage.readers,
                "error": self._error,
            }

    @staticmethod
    def _receiving(push: Push | None) -> dict[str, Any] | None:
        if push is None:
            return None
        came = int(push.ledger.came.sum())
        return {"version": push.version, "bytes": push.reception.bytes, "blocks": came, "of": push.ledger.came.size}

    def layout(self) -> dict[str, Any]:
        """As `GET /ws/layout` gives it."""
        return self.stage.layout.to_json()

    # -------------------------------------------------------------------------------------------- prepare

    def prepare(self, body: Any) -> dict[str, Any]:
        """A manifest: check all of it, take memory, and begin to receive."""
        manifest = read_manifest(body)
        with self._turn:
            with self._lock:
                epoch = self._check_epoch(body)
                if self._push is not None:
                    return self._again(manifest)
                if self._lease.hub != epoch.hub or self._lease.left <= 0:
                    raise self._no_lease(epoch.hub)
            if not epoch.ready.wait(self.timeout * HTTP_MARGIN):
                raise Refused("timeout", f"Epoch {epoch.number} is not joined after {self.timeout:g} s.")
            if epoch.error is not None:
                raise Refused("join_failed", f"Epoch {epoch.number} was not joined: {epoch.error}")
            drops = self._wait_for_drops()
            if manifest.run != epoch.run:
                raise Refused("bad_manifest", f"run: {manifest.run!r}; epoch {epoch.number} is of run {epoch.run!r}.")
            staging = self._staging(manifest)
            self._check_version(manifest, staging)
            blocks = check_manifest(manifest, staging)
            epoch.inlet.begin(len(manifest.senders), manifest.bucket)
            ledger = staging.begin(manifest, blocks, self.timeout * HTTP_MARGIN)
            reception = Reception(epoch.inlet, manifest, blocks, staging, ledger, self._moved)
            with self._lock:
                if self._epoch is not epoch or self._drops != drops or self._closed:  # ended meanwhile
                    staging.drop()
                    raise Refused("aborted", f"Epoch {epoch.number} was ended while the push was prepared.")
                self._push = Push(manifest, staging, ledger, reception)
                self._error = None
                self.counters.pushes += 1
                self._state = "prepared"
                reception.start()
                self._wake.notify_all()
        self._tell()
        return self._prepared(manifest, ledger)

    def _prepared(self, manifest: Manifest, ledger: Ledger) -> dict[str, Any]:
        return {
            "state": "prepared",
            "sink": self.sink,
            "epoch": manifest.epoch,
            "version": manifest.version,
            "blocks": ledger.came.size,
        }

    def _again(self, manifest: Manifest) -> dict[str, Any]:
        """The same prepare once more is answered like the first; another one has to wait for the end of this push."""
        push = self._push
        assert push is not None
        if push.manifest == manifest and self._state != "failed":
            return self._prepared(manifest, push.ledger)
        what = f"Version {push.version} is under way here ({self._state})."
        raise Refused("push_in_progress", what, hint="Abort it first.", version=push.version, state=self._state)

    def _staging(self, manifest: Manifest) -> Staging:
        if manifest.mode != "lora":
            return self.stage
        if self._adapters is None:
            raise Refused("no_adapters", "This server takes no LoRA adapters.")
        return self._adapters

    def _check_version(self, manifest: Manifest, staging: Staging) -> None:
        have = staging.version
        if manifest.version > have:
            return
        if manifest.version == have:
            what = f"Version {have} is installed here already (root {staging.root or 'not known'})."
            raise Refused("duplicate_version", what, version=have, root=staging.root)
        what = f"Version {manifest.version} is older than version {have}, which this server has."
        hint = "Versions grow; to go back to older weights, push them under a new version."
        raise Refused("older_version", what, hint=hint, version=have)

    # -------------------------------------------------------------------------------------------- data, seal

    def message(self, what: str, body: Mapping[str, Any], data: bytes | memoryview | None = None) -> dict[str, Any]:
        """A bucket, or word of one, that came by HTTP (`bucket`, `load`): handed to the epoch's transport."""
        with self._lock:
            epoch = self._epoch
            if epoch is None or self._push is None:
                raise Refused("no_push", "No push is under way here.")
            self._lease.check(epoch.hub)
        return epoch.inlet.accept(what, body, data)

    def seal(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """{epoch, version, root}: wait until everything is there, and compare the root. Idempotent."""
        version, root = number(body, "version", 1), text(body, "root")
        with self._lock:
            self._check_epoch(body)
            push = self._named(version)
        if not push.reception.wait(self.timeout * HTTP_MARGIN):
            left = push.ledger.missing
            raise Refused("timeout", f"{left} blocks of {push.ledger.came.size} are not there yet.")
        if push.reception.error is None and not push.staging.wait(self.timeout * HTTP_MARGIN):
            raise Refused("timeout", f"What version {version} leaves as it is was not looked through in time.")
        with self._lock:
            if self._push is not push:
                raise Refused("aborted", f"Version {version} was aborted.", error=self._error)
            if self._state == "failed" and push.reception.error is None:
                raise Refused("failed", f"Version {version} has failed; abort it.", reason=self._error)
            if self._state not in ("staged", "committing"):
                self._finish(push, root)
            if root != push.root:
                raise Refused("root_mismatch", f"What is staged has the root {push.root}, not {root}.")
        self._tell()
        return {"state": "staged", "sink": self.sink, "version": version, "root": root}

    def _finish(self, push: Push, root: str) -> None:
        """Verify what came. Caller locks. Raises Refused (`failed`), and then the push has failed."""
        try:
            if push.reception.error is not None:
                raise push.reception.error
            found = push.ledger.root()
            if found != root:
                raise Refused("root_mismatch", f"The root of what came is {found}; the hub's is {root}.")
            push.staging.finish(found)
        except ConvertError as error:
            self._has_failed(error)
            assert self._error is not None
            code = "base_mismatch" if getattr(error, "code", "") == "base_mismatch" else "failed"
            raise Refused(code, f"Version {push.version} is not staged: {error}", reason=self._error) from error
        push.root = found
        self._state = "staged"

    def _named(self, version: int) -> Push:
        """The push of this version. Caller locks."""
        if self._push is None:
            raise Refused("no_push", f"No push is under way here; version {self.version} serves.", error=self._error)
        if self._push.version != version:
            raise Refused("other_version", f"Version {self._push.version} is under way here, not {version}.")
        return self._push

    def _moved(self) -> None:
        """Something happened in the reception."""
        with self._lock:
            push = self._push
            if push is not None:
                if push.reception.error is not None and self._state in ("prepared", "receiving"):
                    self._has_failed(push.reception.error)
                elif push.reception.began is not None and self._state == "prepared":
                    self._state = "receiving"
        self._tell()

    def _has_failed(self, error: ConvertError) -> None:
        if self._state != "failed":
            self.counters.failed += 1
        code = error.code if isinstance(error, Refused) else "bad_bucket"
        version = self._push.version if self._push is not None else None
        self._error = {"code": code, "message": str(error), "version": version}
        self._state = "failed"

    # -------------------------------------------------------------------------------------------- commit, abort

    def commit(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """{epoch, version, root, in_flight?}: install what is staged. Idempotent. Returns the receipt."""
        version, root = number(body, "version", 1), text(body, "root")
        policy = body.get("in_flight") or body.get("policy") or "finish"
        if policy not in POLICIES:
            raise Refused("bad_request", f"in_flight: {policy!r} is none of {', '.join(POLICIES)}.")
        with self._turn:
            with self._lock:
                done = self._committed(version, root)
                if done is not None:
                    return done
                self._check_epoch(body)
                push = self._named(version)
                if self._state != "staged":
                    what = f"Version {version} is not staged here ({self._state})."
                    raise Refused("not_staged", what, state=self._state, error=self._error)
                if push.root != root:
                    raise Refused("root_mismatch", f"What is staged has the root {push.root}, not {root}.")
                self._state = "committing"
            self._tell()
            return self._install(push, Commit(version, root, push.manifest.mode, policy, self.timeout * HTTP_MARGIN))

    def _install(self, push: Push, commit: Commit) -> dict[str, Any]:
        try:
            receipt = carry_out(push.staging, commit, self._critical)
        except Refused as error:
            with self._lock:
                self._error = {"code": error.code, "message": error.what, "version": commit.version}
                self._state = "staged"
            self._tell()
            raise
        push.staging.drop()
        reception = push.reception
        reception.cancel("the push is committed")
        with self._lock:
            self._push = None
            self._receipts[commit.version, commit.root] = receipt = {"sink": self.sink, **receipt}
            while len(self._receipts) > RECEIPTS:
                self._receipts.pop(next(iter(self._receipts)))
            self._error = None
            self.counters.add(reception)
            self.counters.committed += 1
            self.counters.pause_seconds += receipt["pause_s"]
            self._state = "joined" if self._epoch is not None else "serving"
        self._tell()
        return receipt

    def _committed(self, version: int, root: str) -> dict[str, Any] | None:
        """The receipt of a commit that was carried out before, or None. Caller locks."""
        known = self._receipts.get((version, root))
        if known is not None:
            return {**known, "repeated": True}
        for held in (self.stage, self._adapters):
            if held is not None and held.version == version:
                if held.root == root:
                    return {"sink": self.sink, "version": version, "root": root, "pause_s": 0.0, "repeated": True}
                if self._push is None:
                    what = f"Version {version} is installed here with the root {held.root}, not {root}."
                    raise Refused("root_mismatch", what, version=version, root=held.root)
        return None

    # -------------------------------------------------------------------------------------------- the rest

    def digests(self, version: int | None = None, names: Iterable[str] = ()) -> dict[str, Any]:
        """xxh3_128 of whole atoms, of the version that serves (None) or of the staged one."""
        with self._lock:
            staged = self._push is not None and self._state == "staged" and version == self._push.version
            if version is not None and version != self.version and not staged:
                raise Refused("other_version", f"Version {version} is not here; version {self.version} serves.")
            holder: Staging = self._push.staging if staged and self._push is not None else self.stage
        found = holder.digests(staged)
        wanted = set(names)
        atoms = {name: digest for name, digest in found.items() if not wanted or name in wanted}
        return {"version": version if staged else self.version, "staged": staged, "atoms": atoms}
