"""After a push: what became of every server, whether they hold the same, and those that have to catch up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from ..errors import ConvertError, InDoubt, Problem, Problems, SyncError
from ..peers import Peers
from .fleet import Fleet
from .members import Member
from .planning import plan
from .report import Outcome
from .rounds import Agenda, Clock, How, Round
from .sink import Receipt, SinkLayout, StagedSink
from .source import Source


def outcomes(
    fleet: Fleet, receipts: Mapping[str, Receipt], doubts: Mapping[str, str], dropped: Mapping[str, str]
) -> dict[str, Outcome]:
    """What became of every server."""
    found: dict[str, Outcome] = {}
    for member in fleet.members:
        url, name, tier = member.url, member.sink.name, member.sink.tier
        receipt = receipts.get(url)
        if receipt is not None:
            notes, flight = list(receipt.notes), dict(receipt.in_flight)
            found[url] = Outcome("committed", name, tier, receipt.version, receipt.pause_s, flight, notes=notes)
        elif url in doubts:
            found[url] = Outcome("in_doubt", name, tier, member.status.version, why=doubts[url])
        elif url in dropped:
            found[url] = Outcome("dropped", name, tier, member.status.version, why=dropped[url])
        else:
            found[url] = Outcome("behind", name, tier, member.status.version, why=member.behind)
    return found


def in_doubt(version: int, doubts: Mapping[str, str], *, journalled: bool) -> InDoubt:
    """The error for a version that was decided, and that no server has confirmed."""
    kept = "the next connect() or push() with this journal completes it"
    lost = "without a journal nobody completes it: look at the servers' versions, and push again"
    return InDoubt(
        f"Version {version} was decided, and not confirmed by any server:",
        [Problem(url, why) for url, why in doubts.items()],
        f"It may serve there, or not; {kept if journalled else lost}.",
    )


def standing(round_: Round | None, decided: int | None, *, journalled: bool) -> str:
    """What a push that was interrupted leaves behind, for people. `decided`: its version, 0 before that; None: none was
    under way."""
    fenced = round_.fenced if round_ is not None else {}
    if decided is None:
        return ""
    if decided:
        rest = "the next hub with this journal completes it" if journalled else "push it again"
        fences = any(not m.staged for m in (round_.members if round_ is not None else ()))
        others = ", others may stay paused" if fences else ""
        return f"Version {decided} had been decided: some servers may serve it already{others}; {rest}."
    if fenced:
        return "Not every server goes on: " + "; ".join(f"{url} answers nobody: {why}" for url, why in fenced.items())
    return "Every server goes on with the weights that it had."


def statuses(fleet: Fleet) -> dict[str, Any]:
    """url → what that server says now, or {"error": …}."""
    found: dict[str, Any] = {}
    for member in fleet.members:
        try:
            status = member.status = member.sink.status()
            found[member.url] = dict(status.raw) or {"state": status.state, "version": status.version}
        except ConvertError as error:
            found[member.url] = {"error": str(error)}
    return found


def compare_digests(fleet: Fleet, agenda: Agenda) -> dict[str, str]:
    """Of every atom, as each server computes it from its own memory. Raises SyncError where two differ."""
    found = {m.url: cast("StagedSink", m.sink).digests() for m in fleet.members if m.url in agenda.urls}
    if not found:
        return {}
    (first, ours), *others = found.items()
    problems = Problems()
    for url, theirs in others:
        for name in sorted({*ours, *theirs}):
            if ours.get(name) != theirs.get(name):
                problems.add(name, f"is not the same at {first} and {url}")
    problems.raise_as(SyncError, f"Servers hold different weights as version {agenda.version}:")
    return ours


def behind(fleet: Fleet) -> list[Member]:
    """Servers that answer and do not have the last version that was decided."""
    found = []
    for member in fleet.members:
        try:
            member.status = member.sink.status()
        except ConvertError:
            continue
        if member.status.version < fleet.journal.known.version:
            found.append(member)
    return found


def catch_up(
    fleet: Fleet, how: How, layout: SinkLayout, snapshot: Callable[[], Source | None], snapshot_version: int | None
) -> list[str]:
    """Push the snapshot to the servers that are behind, and to no other, in an epoch of their own.

    snapshot_version  what the snapshot is; None: nobody knows, so its digest has to be the decided one. No server must
                      have other weights under the same version
    """
    late = behind(fleet)
    version = fleet.journal.known.version
    for member in late:
        fleet.leases.take(member.sink)
    if not late:
        return []
    source = snapshot() if snapshot_version in (None, version) else None
    if source is None:
        raise SyncError(
            f"There is no snapshot of version {version}: {', '.join(m.url for m in late)} cannot catch up.",
            hint="Pass retain=DIRECTORY when the source is a live model; or push again.",
        )
    try:
        _catch_up(fleet, how, layout, source, late, known=snapshot_version is not None)
    finally:
        source.close()
    return [m.url for m in late]


def _catch_up(fleet: Fleet, how: How, layout: SinkLayout, source: Source, late: list[Member], *, known: bool) -> None:
    alone = Round(how, Peers(), fleet)
    version, root = fleet.journal.known.version, fleet.journal.known.root
    planned = plan(source, layout)
    agenda = alone.agree_on(version, late)
    try:
        staged = alone.stage(source, planned, agenda, Clock())
        if not known and staged.root != root:
            raise SyncError(
                f"{source.label} is not what was pushed as version {version}: {', '.join(m.url for m in late)} cannot "
                "catch up from it.",
                hint="Push it as a version of its own.",
            )
        fleet.decide(late, staged.manifest.epoch, version, staged.root)
    except BaseException as error:
        alone.call_off(None, error)
        raise
    _, doubts = fleet.commit(late, version, staged.root)
    alone.close_transport("all have caught up")
    for member in late:
        member.joined = None
    if doubts:
        raise next(iter(doubts.values()))
