"""What the hub's first rank does with the servers: probe, lease, join, prepare, seal, commit, abort.

All servers at once, and everything that goes wrong on any of them is collected before it is told.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, cast

from ..errors import ConvertError, Problems, ServerRefused, ServerUnreachable
from .client import Client
from .deciding import Decider
from .journal import Journal
from .lease import LeaseKeeper
from .members import Member, Settings, each, raise_all
from .protocol_sink import ProtocolSink
from .sink import FencedSink, Sink, SinkStatus, StagedSink
from .wire import Manifest

WATCH_EVERY = 0.25
"""Seconds between two looks at the servers while buckets travel."""
SILENT = 3
"""Looks in a row that a server may leave unanswered, unless the timeout is over before."""


def open_sink(client: Client, hub: str, settings: Settings) -> Sink:
    """Whatever speaks at this address: our protocol, or a dialect. Raises ServerUnreachable or ServerRefused."""
    sink = ProtocolSink(client, hub, {"in_flight": settings.in_flight})
    try:
        sink.status()
        return sink
    except ServerRefused as error:
        if error.code not in ("wrong_dialect", "not_found"):
            raise
    from .dialects import probe

    return cast("Sink", probe(client, hub, {"in_flight": settings.in_flight, **settings.options}))


class Fleet(Decider):
    """All servers of one hub. Only the first rank of a job has one."""

    def __init__(self, urls: Sequence[str], journal: Journal, settings: Settings) -> None:
        self.journal, self.settings = journal, settings
        self.hub = journal.known.hub
        self.urls = list(dict.fromkeys(Client(url).url for url in urls))
        self.members: list[Member] = []
        self.leases = LeaseKeeper(self.hub, settings.ttl)
        self.notes: list[str] = []

    # -------------------------------------------------------------------------------------------- who is there

    def connect(self) -> None:
        """Find out what every server is, and take the lease on it. Raises with everything that is wrong, and then has
        no lease any more; servers that cannot be reached are left behind where `on_failure` is `drop`."""
        failed = self._meet_missing()
        if self.settings.on_failure == "drop" and self.members:
            failed = {url: e for url, e in failed.items() if not self._left_out(url, e)}
        if failed:
            self.leases.release()
            raise_all(failed, "Not all servers can be pushed to:")
        self.finish_pending()

    def _meet_missing(self) -> dict[str, ConvertError]:
        """Find out what those servers are that are not members yet, and take their leases; url → why one is not."""
        known = {m.url for m in self.members}
        clients = [Client(u, self.settings.token, self.settings.timeout) for u in self.urls if u not in known]
        failed: dict[str, ConvertError] = {}

        def meet(client: Client) -> Member:
            sink = open_sink(client, self.hub, self.settings)
            member = Member(sink, client, sink.layout(), sink.status())
            self.leases.take(sink)
            return member

        with ThreadPoolExecutor(min(32, max(1, len(clients))), thread_name_prefix="areal-sync-http") as pool:
            for client, future in [(c, pool.submit(meet, c)) for c in clients]:
                try:
                    self.members.append(future.result())
                except ConvertError as error:
                    failed[client.url] = error
        self.members.sort(key=lambda m: self.urls.index(m.url))
        for member, other in self._twice():
            self.members.remove(member)  # the lease stays: it is the other's
            self.leases.drop(member.sink)
            what = f"{member.url} is the same server as {other.url}."
            failed[member.url] = ServerRefused("same_server", what, hint="Name every server once.")
        return failed

    def _twice(self) -> list[tuple[Member, Member]]:
        """Servers that are known under two addresses: (the later one, the first one)."""
        first: dict[str, Member] = {}
        for member in self.members:
            first.setdefault(member.status.sink or member.url, member)
        return [(m, first[m.status.sink]) for m in self.members if m.status.sink and first[m.status.sink] is not m]

    def add(self, url: str) -> None:
        """One more server. It joins with the next epoch."""
        client = Client(url)
        if client.url in self.urls:
            return
        self.urls.append(client.url)
        failed = self._meet_missing()
        if client.url in failed:
            self.urls.remove(client.url)
            raise failed[client.url]

    def remove(self, url: str) -> None:
        """One server less: it goes on with the weights that it has, and its lease is given back."""
        wanted = Client(url).url
        self.urls = [u for u in self.urls if u != wanted]
        for member in [m for m in self.members if m.url == wanted]:
            self.members.remove(member)
            self.leases.drop(member.sink)
            try:
                member.sink.release()
            except ServerUnreachable:
                continue  # it has gone already

    def _left_out(self, url: str, error: ConvertError) -> bool:
        if not isinstance(error, ServerUnreachable):
            return False
        self.notes.append(f"{url} is left out: {error.what}")
        return True

    def look(self) -> list[Member]:
        """Ask all servers how they are; those that were restarted have to join again. Returns the ones to push to.

        Raises when one does not answer, or lost its lease (or leaves it `behind`, where `on_failure` is `drop`).
        """
        missing = self._meet_missing()
        found, failed = each(self.members, lambda m: m.sink.status())
        failed |= missing
        for member in self.members:
            member.behind = ""
            if member.url in found:
                member.status = found[member.url]
                if member.joined is not None and self._gone(member, member.status):
                    member.joined = None
            else:
                member.joined = None
                member.behind = str(failed[member.url])
        if self.settings.on_failure != "drop":
            raise_all(failed, "Not all servers answer:")
        ready = [m for m in self.members if not m.behind]
        if not ready:
            raise_all(failed, "No server answers:")
        _, refused = each(ready, lambda m: self.leases.take(m.sink))
        raise_all(refused, "Not all servers can be pushed to:")
        return ready

    @staticmethod
    def _gone(member: Member, status: SinkStatus) -> bool:
        """Whether a server left the epoch that it had joined: it was restarted, gave up, or another hub came."""
        joined = member.joined
        if joined is None:
            return True
        return (status.epoch, status.sink) != joined or (member.staged and status.state in ("serving", "failed"))

    def next_epoch(self) -> int:
        return 1 + max([self.journal.known.epoch, *(m.status.epoch for m in self.members)])

    def next_version(self) -> int:
        return 1 + max([self.journal.known.version, *(m.status.version for m in self.members)])

    def check_version(self, version: int, members: Sequence[Member]) -> None:
        """A server takes a version that is newer than its own only. Raises ServerRefused, naming all that have it."""
        problems, codes = Problems(), set[str]()
        for member in members:
            have = member.status.version
            if have >= version:
                codes.add("duplicate_version" if have == version else "old_version")
                problems.add(member.url, f"has version {have}" + (" already" if have == version else ""))
        if problems:
            code = "old_version" if "old_version" in codes else "duplicate_version"
            newest = max(m.status.version for m in members)
            hint = f"Versions only grow: the next is {newest + 1}, or leave version= out."
            raise ServerRefused(
                code, f"Version {version} is not newer than what the servers have:", problems.found, hint
            )

    # -------------------------------------------------------------------------------------------- the steps

    def join(self, members: Sequence[Member], epoch: int, run: str, offer: Mapping[str, Any]) -> None:
        """Tell every server where the epoch's groups are. They form them while the senders do."""
        staged = [m for m in members if m.staged]

        def act(member: Member) -> None:
            sink = cast("StagedSink", member.sink)
            if isinstance(sink, ProtocolSink):
                sink.run = run
            sink.join(epoch, {**offer, "rank": staged.index(member) + 1, "world": len(staged) + 1})

        _, failed = each(staged, act)
        raise_all(failed, "Not all servers join the epoch:")

    def await_joined(self, members: Sequence[Member], epoch: int) -> None:
        """Until every server has its end of the transport open. Raises what kept one from it."""
        end = time.monotonic() + self.settings.timeout

        def act(member: Member) -> None:
            while True:
                status = member.status = member.sink.status()
                if status.epoch != epoch or status.error or status.state == "failed":
                    what = f"{member.url} did not join: {status.error or status.state}."
                    raise ServerRefused("join_failed", what, retryable=True)
                if status.state != "serving":
                    member.joined = (epoch, status.sink)
                    return
                if time.monotonic() > end:
                    raise ServerUnreachable(f"{member.url} did not join within {self.settings.timeout:g} s.")
                time.sleep(0.02)

        _, failed = each([m for m in members if m.staged], act)
        raise_all(failed, "Not all servers joined the epoch:")

    @staticmethod
    def check_joining(members: Sequence[Member], epoch: int, error: ConvertError) -> None:
        """Raise what servers say about a join that failed on their side; nothing where they know of no fault."""

        def act(member: Member) -> None:
            status = member.sink.status()
            if status.error and status.epoch in (0, epoch) and status.state in ("serving", "failed"):
                what = f"{member.url} did not join: {status.error}"
                hint = "" if error.what in status.error else error.what
                raise ServerRefused("join_failed", what, hint=hint, retryable=True)

        _, failed = each([m for m in members if m.staged], act)
        raise_all(
            {url: e for url, e in failed.items() if isinstance(e, ServerRefused)}, "Servers did not join the epoch:"
        )

    def prepare(self, members: Sequence[Member], manifest: Manifest) -> None:
        """Announce a push. Nothing has moved when this raises, with what every server found wrong."""
        servers = [m.url for m in members]
        self.journal.begin(manifest.run, manifest.epoch, manifest.version, servers)
        _, failed = each([m for m in members if m.staged], lambda m: cast("StagedSink", m.sink).prepare(manifest))
        raise_all(failed, f"Version {manifest.version} does not fit all servers:")

    @contextmanager
    def watching(self, members: Sequence[Member], call_off: Callable[[str], None]) -> Iterator[None]:
        """While buckets travel: a server that fails, is restarted or falls silent ends the push at once."""
        done = threading.Event()
        staged = [m for m in members if m.staged]
        unanswered = dict.fromkeys((m.url for m in staged), 0)
        heard = dict.fromkeys(unanswered, time.monotonic())

        def ask(member: Member) -> str:
            url = member.url
            try:
                status = member.sink.status()
            except ConvertError as error:
                unanswered[url] += 1
                if unanswered[url] >= SILENT or time.monotonic() - heard[url] >= self.settings.timeout:
                    member.silent = error.what
                return member.silent
            unanswered[url], heard[url] = 0, time.monotonic()
            if status.state == "failed":
                return f"{member.url}: {status.error or 'it failed'}"
            if member.joined is not None and (status.epoch, status.sink) != member.joined:
                return f"{member.url} was restarted"
            return ""

        def run() -> None:
            while not done.wait(WATCH_EVERY):
                said, _ = each(staged, ask)
                reason = next((text for text in said.values() if text), "")
                if reason and not done.is_set():
                    call_off(reason)
                    return

        thread = threading.Thread(target=run, name="areal-sync-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def seal(self, members: Sequence[Member], version: int, root: str) -> None:
        """Every server has all of it, and it is what was sent: STAGED. Raises what is not so."""

        def act(member: Member) -> None:
            theirs = cast("StagedSink", member.sink).seal(version, root)
            if theirs != root:
                raise ServerRefused(
                    "false_receipt",
                    f"{member.url} says that it has all of version {version}, but its digest is {theirs or 'missing'}; "
                    f"{root} was sent.",
                    hint="It did not receive what was sent, whatever it answers.",
                )

        _, failed = each([m for m in members if m.staged], act)
        raise_all(failed, f"Version {version} did not arrive everywhere:")

    @staticmethod
    def fenced(members: Sequence[Member]) -> list[FencedSink]:
        """The servers that have no stage."""
        return [cast("FencedSink", m.sink) for m in members if not m.staged]

    def close(self) -> None:
        """Leases go back, but for those of servers that have not confirmed what was decided: what they have staged is
        there for the next hub with this journal until their leases run out."""
        pending = self.journal.known.pending if self.journal.path is not None else None
        for member in self.members:
            if pending is not None and member.url in pending.servers:
                self.leases.drop(member.sink)
        self.leases.release()
        for member in self.members:
            member.sink.close()
        self.journal.close()
