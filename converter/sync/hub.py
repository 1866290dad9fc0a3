"""The hub: pushes new weights into running servers, all or nothing.

    with WeightSync("checkpoints/step-200", ["http://10.0.0.7:8000", "http://10.0.0.8:8000"]) as sync:
        print(sync.push())

A push prepares every server, sends each block once to all of them, has every server verify the whole, journals the
decision, and commits. Whatever fails before the decision leaves every server with its old weights; afterwards it is
carried through, by this hub or by the next one with the same journal.

In a job of several ranks every rank makes a WeightSync with the same arguments and its `peers`, and calls the same
methods in the same order; each sends what it holds. The first rank alone talks HTTP and has the journal.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConvertError, RankError, SourceError, SyncError
from ..execute import Limits
from ..peers import Peers
from . import fences
from .afterwards import behind, catch_up, compare_digests, in_doubt, outcomes, standing, statuses
from .choices import OnFailure, PushMode, check_choices
from .commits import InFlight
from .feed import SourceFeed
from .fleet import Fleet
from .journal import Journal
from .members import Member, Settings
from .planning import Planned, one_layout, plan
from .report import PushReport
from .retaining import Retained
from .rounds import Agenda, Clock, How, Round, Staged
from .sink import Receipt, SinkLayout
from .source import Source, open_source
from .transport import OnProgress

if TYPE_CHECKING:
    from ..mesh import Mesh

Received = tuple[dict[str, Receipt], dict[str, str]]
"""url → receipt of a commit; url → why it is in doubt."""


class WeightSync:
    """Weights of one source for some servers.

    source      a checkpoint (directory, URL, opened), a module, a state dict, a list of these, or a function that gives
                one of them; further keywords go to `open_checkpoint`. None: `push_adapter` only, or push(source=…)
    servers     their addresses; `token` their bearer token
    base, mesh, rank   (live) as `export_hf` has them; `peers` the ranks of the job
    transport   auto, gloo, nccl, shm, disk, inline; `options` for it (disk: directory) and for dialects
    mode        full; delta: only what changed since the last push, where that can be; auto: the same, without a note
    anchor      every so many deltas a full push
    journal     file of decisions. Without one, nobody completes what a hub had decided when it died
    retain      (live) directory for a snapshot of the last version, from which servers that restarted catch up
    on_failure  abort: a server that fails calls the push off for all; drop: the others get it, and it is reported
    in_flight   what becomes of requests that run as weights change: finish, wait, abort, keep
    allow_nan   push weights that hold NaN; otherwise they are refused by name, as `convert` does
    bucket, block   bytes; `timeout` seconds that a server or sender may be silent; `lease` seconds that a dead hub's
                servers stay its own
    """

    def __init__(
        self,
        source: Any,
        servers: Sequence[str] | str,
        *,
        base: Any = None,
        mesh: Mesh | None = None,
        rank: int = 0,
        peers: Peers | None = None,
        transport: str = "auto",
        mode: PushMode = "full",
        token: str | None = None,
        journal: str | Path | None = None,
        retain: str | Path | None = None,
        bucket: int = 16 << 20,
        block: int = 256 << 10,
        timeout: float = 60.0,
        lease: float = 30.0,
        anchor: int = 0,
        on_failure: OnFailure = "abort",
        in_flight: InFlight = "finish",
        allow_nan: bool = False,
        host: str | None = None,
        options: dict[str, Any] | None = None,
        on_progress: OnProgress | None = None,
        limits: Limits | None = None,
        **opening: Any,
    ) -> None:
        self._urls = [servers] if isinstance(servers, str) else list(servers)
        check_choices(self._urls, mode, on_failure, in_flight, bucket, block, timeout=timeout, lease=lease)
        self._given: dict[str, Any] = {"source": source, "base": base, "mesh": mesh, "rank": rank, "limits": limits}
        self._opening = opening
        self._peers = peers or Peers()
        self._how = How(
            transport, bucket, block, timeout, token, host, mode, anchor, allow_nan, dict(options or {}), on_progress
        )
        self._settings = Settings(token, timeout, lease, in_flight, on_failure, dict(options or {}))
        self._journal_path = journal
        where = Path(retain) if retain is not None else None
        self._retained = Retained(where, base, mesh, rank, self._peers, allow_nan=allow_nan)
        self._fleet: Fleet | None = None
        self._source: Source | None = None
        self._round: Round | None = None
        self._layout: SinkLayout | None = None
        self._decided: int | None = None
        self._turn = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self.notes: list[str] = []

    def __enter__(self) -> WeightSync:
        return self.connect()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -------------------------------------------------------------------------------------------- connect

    def connect(self) -> WeightSync:
        """Open the source, find out what the servers are, take their leases, and compare the two. Finishes what an
        earlier hub with this journal decided. Idempotent.

        Raises ServerUnreachable, ServerRefused, LeaseHeld, PlanError, …, with everything that is wrong; nothing has
        changed then, and no lease is held.
        """
        if self._round is not None:
            return self
        try:
            if self._given["source"] is not None:
                self._source = open_source(peers=self._peers, **self._given, **self._opening)
            self._round = Round(self._how, self._peers, None)
            self._peers.together("Connecting", self._connect_servers)
            self._round.fleet = self._fleet
            self._layout = self._round.lead("Comparing the servers", self._one_layout)
            self.notes = self._round.lead("Connecting", lambda fleet: list(fleet.notes))
            if self._source is not None:
                plan(self._source, self._layout)
        except BaseException:
            self.close()
            raise
        return self

    def _connect_servers(self) -> None:
        if self._peers.rank == 0:
            fleet = Fleet(self._urls, Journal.open(self._journal_path), self._settings)
            self._fleet = fleet
            fleet.connect()

    def _one_layout(self, fleet: Fleet) -> SinkLayout:
        """Of the servers with a stage. Where all are fenced, whatever the first one tells."""
        staged = {m.url: m.layout for m in fleet.members if m.staged}
        return one_layout(staged or {m.url: m.layout for m in fleet.members})

    # -------------------------------------------------------------------------------------------- push

    def push(self, version: int | None = None, *, source: Any = None, digests: bool = False) -> PushReport:
        """Bring the source's weights, as they are now, to all servers, as `version` (None: the next one).

        source   another source from now on: a later checkpoint of the same model, as the constructor takes it
        digests  have the servers compute a digest of every atom afterwards, and compare them with each other

        Raises SyncAborted when it was called off while it travelled, and the error of the kind that fits when it never
        began; either way every server has its old weights. A server that did not confirm what was decided is `in_doubt`
        in the report; InDoubt is raised when none did.
        """
        with self._turn:
            self.connect()
            if source is not None:
                self._take(source)
            self._decided = 0
            try:
                return self._push(version, digests, Clock())
            except ConvertError:
                self._decided = None
                raise

    def _take(self, source: Any) -> None:
        """Open another source in the place of the one before, which stays where that fails."""
        given = {**self._given, "source": source}
        opened = open_source(peers=self._peers, **given, **self._opening)
        before, self._source, self._given = self._source, opened, given
        if before is not None:
            before.close()

    def push_adapter(self, name: str, source: Any, version: int | None = None) -> PushReport:
        """Bring a LoRA adapter to all servers, beside their weights; see `transports.adapter_push`."""
        from .transports.adapter_push import push_adapter

        with self._turn:
            self.connect()
            if self._round is not None:
                self._round.close_transport("an adapter is pushed")
            return push_adapter(self._how, self._peers, self._fleet, name, source, version)

    def remove_adapter(self, name: str, version: int | None = None) -> PushReport:
        """Have all servers forget an adapter; requests that use it are finished with it."""
        return self.push_adapter(name, None, version)

    def push_async(self, version: int | None = None, *, digests: bool = False) -> Future[PushReport]:
        """The same in a thread (`asyncio.wrap_future` makes it awaitable). The weights must not change meanwhile."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="areal-sync-push")
        return self._pool.submit(self.push, version, digests=digests)

    def _push(self, version: int | None, digests: bool, clock: Clock) -> PushReport:
        round_, source = self._ready()
        with clock.phase("plan"):
            round_.lead("Looking back", lambda fleet: fleet.finish_pending())
            source.refresh()
            planned = self._peers.together("Planning the push", lambda: plan(source, self._layout_now()))[
                self._peers.rank
            ]
        dropped: dict[str, str] = {}
        while True:
            with clock.phase("plan"):
                agenda = round_.agree_on(version, self._members(dropped))
            try:
                staged = self._stage(round_, source, planned, agenda, clock)
                break
            except BaseException as error:
                dropped |= self._after_failure(agenda, error)
        self._decided = agenda.version
        with clock.phase("commit"):
            receipts, doubts = round_.lead("Committing", lambda fleet: self._commit(fleet, agenda, staged))
        return self._finish(agenda, planned, staged, receipts, doubts, dropped, digests, clock)

    def _ready(self) -> tuple[Round, Source]:
        if self._round is None or self._source is None:
            raise SyncError("The hub is not connected.", hint="Call connect(), or use it in a `with`.")
        return self._round, self._source

    def _layout_now(self) -> SinkLayout:
        assert self._layout is not None
        return self._layout

    def _members(self, dropped: dict[str, str]) -> list[Member]:
        """Who is there, on the first rank. Servers that do not answer are left out where they may be."""
        if self._fleet is None:
            self._peers.together("Asking the servers", lambda: None)
            return []
        fleet = self._fleet
        found: list[Member] = []

        def act() -> None:
            found.extend(m for m in fleet.look() if m.url not in dropped)

        self._peers.together("Asking the servers", act)
        return found

    def _stage(self, round_: Round, source: Source, planned: Planned, agenda: Agenda, clock: Clock) -> Staged:
        """Everything up to the decision, which is its last step: whatever is raised here can be called off."""
        feed = SourceFeed(source, self._peers, allow_nan=self._how.allow_nan)
        if fences.has_fences(agenda):
            fences.check(round_, feed, agenda)
        staged = round_.stage(source, planned, agenda, clock)
        if fences.has_fences(agenda):
            fences.load(round_, self._peers, feed, agenda, clock)

        def decide(fleet: Fleet) -> None:
            members = [m for m in fleet.members if m.url in agenda.all]
            fleet.decide(members, staged.manifest.epoch, agenda.version, staged.root)

        round_.lead("Deciding", decide)
        return staged

    def _commit(self, fleet: Fleet, agenda: Agenda, staged: Staged) -> Received:
        members = [m for m in fleet.members if m.url in agenda.all]
        receipts, doubts = fleet.commit(members, agenda.version, staged.root)
        return receipts, {url: error.what for url, error in doubts.items()}

    # -------------------------------------------------------------------------------------------- afterwards

    def _after_failure(self, agenda: Agenda, error: BaseException) -> dict[str, str]:
        """Call the push off everywhere. Returns the servers to go on without, or raises what there is to say."""
        round_, _ = self._ready()
        blamed = dict(round_.blamed)
        asked = isinstance(error, ConvertError) and not isinstance(error, SourceError)
        if self._fleet is not None and not blamed and asked:
            blamed = self._fleet.diagnose(round_.members)
        round_.call_off(agenda.version, error)
        if not isinstance(error, ConvertError):
            raise error
        if round_.rebased and getattr(error, "code", "") == "base_mismatch":  # a delta, refused: once more, in full
            return {}
        if self._settings.on_failure == "drop":
            blamed = round_.lead("Looking for who failed", lambda _: blamed)
            left = set(agenda.all) - blamed.keys()
            if blamed and left:
                return {url: why for url, why in blamed.items() if url in agenda.all}
        if round_.travelling and not isinstance(error, RankError):
            raise round_.aborted(agenda.version, error, blamed) from error
        raise error

    def _finish(
        self,
        agenda: Agenda,
        planned: Planned,
        staged: Staged,
        receipts: dict[str, Receipt],
        doubts: dict[str, str],
        dropped: dict[str, str],
        digests: bool,
        clock: Clock,
    ) -> PushReport:
        round_, source = self._ready()
        round_.base, self._decided = staged.base, None
        if not receipts:
            raise in_doubt(agenda.version, doubts, journalled=self._journal_path is not None)
        with clock.phase("retain"):
            self._retained.keep(source, agenda.version, planned)
            if self._fleet is not None and self._retained.snapshot is not None:
                self._fleet.journal.retained(agenda.version, str(self._retained.snapshot))
        found = round_.lead("Comparing digests", lambda fleet: compare_digests(fleet, agenda)) if digests else {}
        report = PushReport(
            version=agenda.version,
            mode=staged.manifest.mode,
            transport=agenda.kind,
            bytes=staged.blocks.total,
            sent_bytes=staged.sent_bytes if agenda.urls or "path" not in self._how.options else 0,
            root=staged.root,
            epoch=staged.manifest.epoch,
            seconds=clock.total(),
            servers=round_.lead("Reporting", lambda fleet: outcomes(fleet, receipts, doubts, dropped)),
            digests=found,
            casts=planned.casts,
            notes=[*planned.notes, *staged.notes],
            senders=self._peers.world,
            buckets=staged.buckets,
            rank_waited=staged.sent.waited,
        )
        return report

    # -------------------------------------------------------------------------------------------- the rest

    def status(self) -> dict[str, Any]:
        """url → what that server says now, or {"error": …}. The same on every rank."""
        round_, _ = self._ready()
        return round_.lead("Asking the servers", statuses)

    def standing(self) -> str:
        """After an interruption: what the push that was under way leaves behind. A sentence."""
        return standing(self._round, self._decided, journalled=self._journal_path is not None)

    def add(self, url: str) -> None:
        """One more server, from the next push (or `catch_up`) on: a new epoch. Raises as `connect` does."""
        round_, source = self._ready()
        with self._turn:
            round_.lead("Adding a server", lambda fleet: fleet.add(url))
            try:
                layout = round_.lead("Comparing the servers", self._one_layout)
                plan(source, layout)
            except ConvertError:
                round_.lead("Removing the server", lambda fleet: fleet.remove(url))
                raise
            self._layout = layout

    def remove(self, url: str) -> None:
        """One server less: it goes on with the weights that it has."""
        round_, _ = self._ready()
        with self._turn:
            round_.lead("Removing a server", lambda fleet: fleet.remove(url))

    def behind(self) -> list[str]:
        """Servers that answer and do not have the last committed version: restarted ones, and late ones."""
        round_, _ = self._ready()
        return round_.lead("Asking the servers", lambda fleet: [m.url for m in behind(fleet)])

    def catch_up(self) -> list[str]:
        """Bring the servers that are behind to the last committed version, from the snapshot that was retained (a
        checkpoint is its own). Returns which they were. Raises SyncError when there is no snapshot of that version."""
        round_, source = self._ready()
        with self._turn:
            kept = self._retained
            return round_.lead(
                "Catching up",
                lambda fleet: catch_up(
                    fleet, self._how, self._layout_now(), lambda: kept.source_of(source), kept.version
                ),
            )

    def close(self) -> None:
        """Give leases, groups and files back. What was decided and not confirmed stays in the journal. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None
        if self._round is not None:
            self._round.close_transport("the hub was closed")
            self._round = None
        if self._fleet is not None:
            self._fleet.close()
            self._fleet = None
        if self._source is not None:
            self._source.close()
            self._source = None
