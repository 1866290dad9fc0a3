"""Is the source still what was planned? Its files' states, asked before, after, and by a resume."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import xxhash

from .errors import SourceError
from .human import ranks_text
from .remote.mounts import remote_file, shown

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .convert import Planned


def identity(planned: Planned) -> str:
    """What a resumed conversion must find unchanged: the plan, and the source's files with sizes and times."""
    h = xxhash.xxh3_128(f"{planned.plan.digest}{ranks_text(planned.ranks)}".encode())
    for name, state in planned.states.items():
        h.update(f"{name} {state}".encode(errors="surrogateescape"))
    return h.hexdigest()


def file_states(ckpt: Checkpoint) -> dict[str, str]:
    """Size, time and inode of every file of the source. Raises SourceError when one is gone, or has another size than
    it had when its header was read."""
    states = {}
    for name, size in sorted(ckpt.found.files.items()):
        place = remote_file(name)
        if place is not None:
            states[name] = place[0].state(place[1])
            continue
        try:
            stat = os.stat(name)
        except OSError as error:
            raise SourceError(f"{name}: cannot be read: {error.strerror}.") from error
        if stat.st_size != size:
            raise SourceError(
                f"{name}: has {stat.st_size} bytes, it had {size} a moment ago.", hint="Something writes to it."
            )
        states[name] = f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"
    return states


def check_unchanged(planned: Planned) -> None:
    """A source that was written since it was planned gave half old and half new weights, whatever the digests say."""
    changed = [shown(name) for name, state in file_states(planned.source).items() if planned.states[name] != state]
    places = [(name, place) for name in planned.states if (place := remote_file(name)) is not None]
    changed += [shown(name) for name, (mirror, inside) in places if not mirror.store.unchanged(inside)]
    if changed:
        raise SourceError(
            f"{planned.source.path} was changed while it was converted: {', '.join(changed[:4])}",
            hint="Convert it when nothing writes to it.",
        )
