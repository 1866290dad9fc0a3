"""From STAGED on: the decision, the commits, and what becomes of either after a crash. And the way back, before it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..errors import ConvertError, ServerUnreachable
from .journal import Journal
from .members import Member, Settings, each
from .protocol_sink import ProtocolSink
from .sink import Receipt
from .wire import CALLED_OFF


class Decider:
    """What a `Fleet` does about a version as a whole."""

    journal: Journal
    settings: Settings
    members: list[Member]
    notes: list[str]

    def decide(self, members: Sequence[Member], epoch: int, version: int, root: str) -> None:
        """The journal's entry. Once on disk, whoever comes next completes it, unless `abort` was written after."""
        self.journal.commit(epoch, version, root, [m.url for m in members])

    def commit(
        self, members: Sequence[Member], version: int, root: str
    ) -> tuple[dict[str, Receipt], dict[str, ConvertError]]:
        """Tell everybody what was decided: protocol servers first, fences open last. Who does not confirm now is asked
        again by `finish_pending`."""
        receipts: dict[str, Receipt] = {}
        doubts: dict[str, ConvertError] = {}
        for group in ([m for m in members if m.staged], [m for m in members if not m.staged]):
            found, failed = each(group, lambda m: self._commit(m, version, root))
            receipts |= found
            doubts |= failed
        if receipts:
            self.journal.done(version, list(receipts))
        return receipts, doubts

    def _commit(self, member: Member, version: int, root: str) -> Receipt:
        """Until it is confirmed, or the timeout is over. An answer that was lost is looked up."""
        end = time.monotonic() + self.settings.timeout
        wait = 0.05
        while True:
            try:
                return member.sink.commit(version, root)
            except ConvertError as error:
                passing = isinstance(error, ServerUnreachable) or getattr(error, "retryable", False)
                if self._has(member, version, root):
                    return Receipt(version, root, 0.0, notes=["its answer was lost; its status confirms the version"])
                if not passing or time.monotonic() + wait > end:
                    raise
            time.sleep(wait)
            wait = min(2.0, wait * 2)

    @staticmethod
    def _has(member: Member, version: int, root: str) -> bool:
        try:
            status = member.sink.status()
        except ConvertError:
            return False
        return status.version == version and status.root in ("", root)

    def finish_pending(self) -> list[str]:
        """Complete what an earlier push (or an earlier hub with this journal) decided. Returns what there is to say.

        A server that lost its stage meanwhile is only behind: the next push, or `catch_up`, brings it along.
        """
        pending = self.journal.known.pending
        if pending is None:
            return []
        said: list[str] = []
        confirmed: list[str] = []
        for member in [m for m in self.members if m.url in pending.servers]:
            try:
                status = member.status = member.sink.status()
                if (status.version, status.root) == (pending.version, pending.root) or status.version > pending.version:
                    confirmed.append(member.url)
                elif status.staged == (pending.version, pending.root) or not member.staged:
                    if isinstance(member.sink, ProtocolSink):
                        member.sink.epoch = pending.epoch
                    member.sink.commit(pending.version, pending.root)
                    member.status = member.sink.status()
                    confirmed.append(member.url)
                    said.append(f"{member.url}: version {pending.version}, decided before, is committed now")
                else:
                    confirmed.append(member.url)  # nothing is left there that could be committed
                    said.append(f"{member.url} lost version {pending.version} before it was committed: it is behind")
            except ConvertError as error:
                said.append(f"{member.url}: version {pending.version} is still in doubt: {error.what}")
        if confirmed:
            self.journal.done(pending.version, confirmed)
        self.notes += said
        return said

    def abort(self, members: Sequence[Member], version: int | None, reason: str) -> dict[str, ConvertError]:
        """Back to the old version everywhere, as far as the servers answer; the others' leases run out.

        The journal hears of it first: a hub that dies between the two must not leave a decision that no server can
        carry out any more (a rank that fails while the first one journals calls off what nobody has been told).
        Whoever was told already is not told again, nor waited for again where it says nothing.
        """
        try:
            if version is not None:
                self.journal.abort(version, reason)
        finally:
            due = [m for m in members if not (m.staged and m.called_off)]
            _, failed = each(due, lambda m: m.sink.abort(version, reason))
            for member in members:
                member.joined, member.called_off = None, True
        return failed

    def diagnose(self, members: Sequence[Member]) -> dict[str, str]:
        """Who is to blame for a push that failed: url → why. Empty: none of the servers. One that is known to be silent
        is not asked again."""
        found, failed = each([m for m in members if not m.silent], lambda m: m.sink.status())
        blamed = {m.url: m.silent for m in members if m.silent} | {url: e.what for url, e in failed.items()}
        for member in members:
            status = found.get(member.url)
            if status is None:
                continue
            if status.state == "failed" and (status.error or "").startswith(CALLED_OFF):
                continue  # a sender told it to stop: whatever failed, this server did not
            if status.state == "failed":
                blamed[member.url] = status.error or "it failed"
            elif member.joined is not None and status.sink != member.joined[1]:
                blamed[member.url] = "it was restarted"
        return blamed
