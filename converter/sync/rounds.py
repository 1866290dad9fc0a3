"""One epoch of a hub, and the pushes in it: what every sender rank does, step for step, together.

A step that fails on one rank fails on all of them (`peers.together`), so all leave at the same place; the first rank
then calls the servers back. Only the first rank has a `Fleet`; a step of it is `lead`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np

from ..codecs import Array
from ..errors import ConvertError, Problem, ServerRefused, SourceError, SyncAborted
from ..peers import Peers
from .blocks import Blocks
from .channel import own_address
from .client import Client
from .fleet import Fleet
from .ledger import DIGEST, layout_key, root_of
from .members import Member
from .nowhere import Nowhere
from .planning import Planned
from .sending import Sender, Sent
from .source import Source
from .transport import OnProgress, Peer, Place, Transport, choose, make
from .transports.delta import Base, Holds
from .transports.delta import choose as choose_delta
from .transports.segments import host_id
from .wire import Manifest

T = TypeVar("T")


class Clock:
    """Seconds for each phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def total(self) -> dict[str, float]:
        return {**self.seconds, "total": time.perf_counter() - self._start}


@dataclass
class How:
    """What a user chose, as far as an epoch is concerned.

    transport  auto or a kind; `options` for it
    host       this machine's address as the servers reach it; None: found out
    anchor     every so many deltas a whole push
    allow_nan  whether weights with NaN may leave
    """

    transport: str = "auto"
    bucket: int = 16 << 20
    block: int = 256 << 10
    timeout: float = 60.0
    token: str | None = None
    host: str | None = None
    mode: str = "full"
    anchor: int = 0
    allow_nan: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    progress: OnProgress | None = None


@dataclass(frozen=True)
class Agenda:
    """What the first rank tells the others at the beginning of a push.

    urls    servers with a stage, in the order of their ranks; `all` of them, with fenced ones
    rejoin  whether a new epoch is needed; `kind` of transport
    holds   what the servers have, for a delta
    """

    version: int
    urls: tuple[str, ...]
    all: tuple[str, ...]
    rejoin: bool
    kind: str
    holds: tuple[Holds, ...]


@dataclass
class Staged:
    """A push that every server with a stage has, verified, and nobody serves yet."""

    manifest: Manifest
    blocks: Blocks
    root: str
    sent: Sent
    sent_bytes: int
    buckets: int
    base: Base
    notes: list[str] = field(default_factory=list)


class Round:
    """An epoch at a time, for one rank of a job. `fleet` and `members` are the first rank's."""

    def __init__(self, how: How, peers: Peers, fleet: Fleet | None) -> None:
        self.how, self.peers, self.fleet = how, peers, fleet
        self.members: list[Member] = []
        self.blamed: dict[str, str] = {}
        self.epoch = 0
        self.base: Base | None = None
        self.transport: Transport | None = None
        self.travelling = False
        self.fenced: dict[str, str] = {}
        self.rebased = ""  # why a delta was refused, until the full push that takes its place is announced
        said = peers.exchange((secrets.token_hex(4), host_id()))
        self._run, self._hosts = said[0][0], [host for _, host in said]

    def lead(self, what: str, action: Callable[[Fleet], T]) -> T:
        """A step that the first rank takes, and all hear of."""

        def act() -> T | None:
            return action(self.fleet) if self.fleet is not None else None

        return self.peers.together(what, act)[0]

    # -------------------------------------------------------------------------------------------- the epoch

    def agree_on(self, version: int | None, members: Sequence[Member]) -> Agenda:
        """Which servers, which version, and whether the epoch still holds. `members` is looked at on the first rank."""

        def act(fleet: Fleet) -> Agenda:
            wanted = fleet.next_version() if version is None else version
            fleet.check_version(wanted, members)
            staged = [m for m in members if m.staged]
            kind = choose(self.how.transport, as_all_see(staged, self._hosts)) if staged else "none"
            urls = tuple(m.url for m in staged)
            old = tuple(m.url for m in self.members if m.staged)
            gone = any(m.joined is None or m.joined[0] != self.epoch for m in staged)
            rejoin = bool(staged) and (self.transport is None or gone or urls != old or self.transport.kind != kind)
            self.members = list(members)
            for member in members:
                member.silent, member.called_off = "", False
            holds = tuple(Holds(m.url, m.status.version, m.status.root) for m in staged)
            return Agenda(wanted, urls, tuple(m.url for m in members), rejoin, kind, holds)

        return self.lead("Looking at the servers", act)

    def join(self, agenda: Agenda) -> None:
        """A new epoch: new groups under new names, with exactly these servers. Nothing of the old one is used again."""
        self.close_transport("a new epoch began")
        self.epoch = self.lead("Numbering the epoch", lambda fleet: fleet.next_epoch())
        self.transport = transport = make(agenda.kind, self._place(agenda))

        def invite(fleet: Fleet) -> dict[str, Any]:
            offer = transport.offer()
            fleet.journal.known.epoch = max(fleet.journal.known.epoch, self.epoch)
            fleet.join(self.members, self.epoch, self._run, offer)
            return offer

        offer = self.lead("Inviting the servers", invite)
        self.peers.together("Joining the epoch", lambda: self._open(transport, offer))
        self.lead("Joining the epoch", lambda fleet: fleet.await_joined(self.members, self.epoch))

    def _open(self, transport: Transport, offer: dict[str, Any]) -> None:
        """A server that could not open its end has said why, and the transport knows only that it did not come."""
        try:
            transport.open(offer)
        except ConvertError as error:
            if self.fleet is not None:
                self.fleet.check_joining(self.members, self.epoch, error)
            raise

    def _place(self, agenda: Agenda) -> Place:
        how = self.how
        clients = [Client(url, how.token, how.timeout) for url in agenda.urls]
        host = how.host or own_address(_farthest(agenda.urls))
        world, rank = self.peers.world, self.peers.rank
        return Place(self._run, self.epoch, rank, world, clients, host, how.bucket, how.timeout, how.options)

    # -------------------------------------------------------------------------------------------- a push

    def stage(self, source: Source, planned: Planned, agenda: Agenda, clock: Clock) -> Staged:
        """Prepare, send, seal: afterwards every server with a stage has the version, verified. Raises what kept one
        from it; the caller then aborts."""
        self.blamed, self.travelling = {}, False
        if agenda.rejoin:
            with clock.phase("join"):
                self.join(agenda)
        manifest, notes = self._manifest(planned, agenda)
        blocks = Blocks(manifest)
        delta = manifest.mode == "delta"
        with clock.phase("prepare"):
            self._on_base("Preparing", lambda fleet: fleet.prepare(self.members, manifest))
        self.travelling = True
        with clock.phase("send"):
            sent = self._send(source, manifest, blocks, self.base.digests if delta and self.base else None)
        with clock.phase("seal"):
            rows = self.peers.exchange(sent.digests.tobytes())
            digests = np.frombuffer(b"".join(rows), np.uint8).reshape(-1, DIGEST)
            root = root_of(digests)
            self._on_base("Sealing", lambda fleet: fleet.seal(self.members, manifest.version, root))
        totals = self.peers.exchange((sent.bytes, sent.buckets))
        key, own = layout_key(manifest), sent.digests
        since = self.base.since + 1 if delta and self.base else 0
        base = Base(manifest.version, root, key, own, since)
        total, buckets = (sum(column) for column in zip(*totals, strict=True))
        return Staged(manifest, blocks, root, sent, total, buckets, base, notes)

    def _on_base(self, what: str, act: Callable[[Fleet], object]) -> None:
        """A step of the first rank that a server may refuse because it has not what a delta is built upon. Then it is
        the same error on every rank: all of them go on with a full push."""

        def tried(fleet: Fleet) -> str:
            try:
                act(fleet)
            except ServerRefused as error:
                if error.code != "base_mismatch":
                    raise
                return str(error)
            return ""

        other = self.lead(what, tried)
        if other:
            self.base, self.rebased = None, other
            raise ServerRefused("base_mismatch", other, retryable=True)

    def _manifest(self, planned: Planned, agenda: Agenda) -> tuple[Manifest, list[str]]:
        """What is announced; a delta where it was asked for and can be."""
        how = self.how
        manifest = Manifest(
            run=self._run,
            epoch=self.epoch,
            version=agenda.version,
            mode="full",
            atoms=planned.atoms,
            senders=planned.senders,
            block=max(64, min(how.block, how.bucket - 8)),
            bucket=how.bucket,
            model=planned.model,
        )
        self.peers.agree("The manifest of the push", layout_key(manifest))
        choice = choose_delta(how.mode, self.base, layout_key(manifest), agenda.holds, how.anchor)
        if choice.delta and self.base is not None and agenda.urls:  # fenced servers take all of it
            manifest.mode, manifest.base = "delta", (self.base.version, self.base.root)
        if planned.lora is not None:
            manifest.mode, manifest.base, manifest.lora = "lora", None, planned.lora
            return manifest, []
        why, self.rebased = self.rebased or choice.why, ""
        notes = [f"a full push: {why}"] if why and how.mode == "delta" else []
        return manifest, notes

    def _send(self, source: Source, manifest: Manifest, blocks: Blocks, base: Array | None) -> Sent:
        """This rank's blocks. The first rank looks after the servers meanwhile."""
        transport = self.transport if self.transport is not None else Nowhere(manifest.bucket)
        rank, fleet, progress = self.peers.rank, self.fleet, self.how.progress
        total = int(blocks.lengths(blocks.of_sender(rank)).sum())
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress("send", done, total)

        def act() -> Sent:
            sender = Sender(source, manifest, blocks, rank, transport, advance, self.how.allow_nan)
            watch = fleet.watching(self.members, sender.call_off) if fleet is not None else nullcontext()
            try:
                with watch:
                    sent = sender.send(base)
                source.check_unchanged()
                return sent
            except ConvertError as error:
                if fleet is not None:  # before the other ranks are waited for: they may wait for these servers
                    self.blamed = {} if isinstance(error, SourceError) else fleet.diagnose(self.members)
                    fleet.abort(self.members, None, _short(error))
                raise

        return self.peers.together("Sending", act)[rank]

    # -------------------------------------------------------------------------------------------- the end

    def call_off(self, version: int | None, error: BaseException) -> None:
        """Every rank, after a step failed: the epoch is over here, and the servers are told by the first rank."""
        self.close_transport(_short(error))
        if self.fleet is not None:
            failed = self.fleet.abort(self.members, version, _short(error))
            self.fenced = {url: e.what for url, e in failed.items() if getattr(e, "code", "") == "fenced"}

    def close_transport(self, reason: str) -> None:
        if self.transport is not None:
            self.transport.abort(reason)
            self.transport.close()
            self.transport = None

    def aborted(self, version: int, error: ConvertError, blamed: dict[str, str]) -> SyncAborted:
        """The error for a push that was called off while it travelled."""
        problems = [Problem(url, why) for url, why in blamed.items()] or list(error.problems)
        problems += [Problem(url, f"it answers nobody: {why}") for url, why in self.fenced.items()]
        who = "every server with a stage" if self.fenced else "every server"
        return SyncAborted(
            f"Version {version} was called off, {who} goes on with its old weights: {error.what}",
            problems,
            error.hint,
        )


def as_all_see(members: Sequence[Member], hosts: Sequence[str]) -> list[Peer]:
    """The servers as every sender rank can reach them. Where the ranks are on several hosts (`hosts`: of each), some of
    them share no memory with a server, wherever that is; the first rank, which chooses, would not see it."""
    other = next((host for host in hosts if host != hosts[0]), None)
    seen = {} if other is None else {"host": other}
    return [Peer(m.url, {**m.status.raw, **seen}) for m in members]


def _short(error: BaseException) -> str:
    text = error.what if isinstance(error, ConvertError) else f"{type(error).__name__}: {error}".removesuffix(": ")
    return text.rstrip(".")[:500] or type(error).__name__


def _farthest(urls: Sequence[str]) -> str:
    """A server's host from which this machine's address can be told: one that is not this machine, if there is any."""
    hosts = [urlsplit(url).hostname or "127.0.0.1" for url in urls]
    return next((h for h in hosts if h != "localhost" and not h.startswith("127.") and h != "::1"), "127.0.0.1")
