"""The hub's side of an adapter push: prepare everywhere, send, verify, and install everywhere, in an epoch of its own.

Nothing is journalled: an adapter that some servers have and others have not harms nobody, and pushing it again repairs
it. Versions of adapters are greater than those of the weights that they were pushed onto.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import PlanError, ServerRefused, SyncError
from ...peers import Peers
from ...slots import Box
from ..blocks import check_tiling
from ..fleet import Fleet, Member, each
from ..planning import Planned
from ..report import Outcome, PushReport
from ..rounds import Clock, How, Round, Staged
from ..wire import Atom, Manifest
from .adapter_source import AdapterSource, adapter_source, no_adapter
from .lora import MATTER

if TYPE_CHECKING:
    from ..sink import Receipt


def push_adapter(
    how: How, peers: Peers, fleet: Fleet | None, name: str, source: Any, version: int | None
) -> PushReport:
    """Bring an adapter to all servers under a name, or (`source` None) have them forget it. Every rank calls it.

    source  PEFT's directory, or (config, {name: tensor or the part of it that this rank has})

    Raises ServerRefused where a server takes no adapters, or this one does not fit it; nothing has changed then.
    """
    clock = Clock()
    with clock.phase("plan"):
        opened = no_adapter(peers) if source is None else adapter_source(source, peers)
        planned = _planned(name, opened, remove=source is None, allow_nan=how.allow_nan)
        round_ = Round(how, peers, fleet)
        members: list[Member] = []

        def look() -> int:
            if fleet is None:
                return 0
            members.extend(fleet.look())
            _check(members)
            return version if version is not None else 1 + max(map(_newest, members))

        wanted = peers.together("Asking the servers", look)[0]
        agenda = round_.agree_on(wanted, members)
    try:
        staged = round_.stage(opened, planned, agenda, clock)
        with clock.phase("commit"):
            receipts = round_.lead("Installing", lambda f: _install(f, members, staged))
    except BaseException as error:
        round_.call_off(agenda.version, error)
        raise
    finally:
        opened.close()
    round_.close_transport("the adapter is pushed")
    for member in members:
        member.joined = None
    outcomes = peers.exchange(_outcomes(members, receipts))[0]
    seconds, casts = clock.total(), planned.casts
    return PushReport(
        staged.manifest.version, "lora", agenda.kind, staged.blocks.total, staged.sent_bytes, staged.root,
        staged.manifest.epoch, seconds, outcomes, {}, casts, planned.notes, peers.world, staged.buckets,
    )  # fmt: skip


def _planned(name: str, source: AdapterSource, *, remove: bool, allow_nan: bool) -> Planned:
    atoms = [Atom(key, tuple(source.shapes[key]), source.dtypes[key]) for key in sorted(source.shapes)]
    numbers = {atom.name: n for n, atom in enumerate(atoms)}
    senders: list[list[tuple[int, tuple[int, ...], tuple[int, ...]]]] = [
        [(numbers[key], *_bounds(box)) for key, box in boxes] for boxes in source.senders()
    ]
    check_tiling(Manifest("", 0, 0, "lora", atoms, senders, 1, 1), PlanError, f"{source.label} is not whole:")
    config = {field: _plain(source.config[field]) for field in MATTER if field in source.config}
    lora = {"name": name, "config": config, "remove": remove} | ({"allow_nan": True} if allow_nan else {})
    return Planned(atoms, senders, {}, {}, list(source.notes), lora)


def _bounds(box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(box.lo), tuple(box.hi)


def _plain(value: Any) -> Any:
    """As JSON has it: PEFT holds targets as a set."""
    return sorted(value) if isinstance(value, (set, frozenset)) else value


def _newest(member: Member) -> int:
    adapters = member.status.raw.get("adapters") or {}
    return max(member.status.version, int(adapters.get("version") or 0))


def _check(members: list[Member]) -> None:
    """Only servers with our protocol, and a place for adapters, can be pushed to."""
    for member in members:
        if not member.staged or member.status.raw.get("adapters") is None:
            raise ServerRefused(
                "no_adapters",
                f"{member.url} ({member.sink.name}) takes no adapters from here.",
                hint="Push the merged weights instead, or load the adapter with the server's own endpoint.",
            )


def _install(fleet: Fleet, members: list[Member], staged: Staged) -> dict[str, Receipt]:
    """On every server; those that fail are named, the others have it."""
    found, failed = each(members, lambda m: m.sink.commit(staged.manifest.version, staged.root))
    if failed and not found:
        raise next(iter(failed.values()))
    if failed:
        why = "; ".join(error.what for error in failed.values())
        raise SyncError(
            f"The adapter is installed on {len(found)} of {len(members)} servers: {why}", hint="Push again."
        )
    return found


def _outcomes(members: list[Member], receipts: dict[str, Receipt]) -> dict[str, Outcome]:
    return {
        m.url: Outcome("committed", m.sink.name, m.sink.tier, r.version, r.pause_s, dict(r.in_flight))
        for m in members
        if (r := receipts.get(m.url)) is not None
    }
