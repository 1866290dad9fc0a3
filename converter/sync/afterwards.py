"""After a push: what became of every server, whether they hold the same, and those that have to catch up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from ..errors import ConvertError, Problems, SyncError
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
    fleet: Fleet, how: How, layout: SinkLayout, snapshot: Source | None, snapshot_version: int | None
) -> list[str]:
    """Push the snapshot to the servers that are behind, and to no other, in an epoch of their own."""
    late = behind(fleet)
    version = fleet.journal.known.version
    for member in late:
        fleet.leases.take(member.sink)
    if not late:
        return []
    if snapshot is None or (snapshot_version or version) != version:
        raise SyncError(
            f"There is no snapshot of version {version}: {', '.join(m.url for m in late)} cannot catch up.",
            hint="Pass retain=DIRECTORY when the source is a live model; or push again.",
        )
    alone = Round(how, Peers(), fleet)
    planned = plan(snapshot, layout)
    agenda = alone.agree_on(version, late)
    try:
        staged = alone.stage(snapshot, planned, agenda, Clock())
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
    return [m.url for m in late]
