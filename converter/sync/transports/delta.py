"""Delta pushes: which blocks have changed since the version that the servers hold, and whether these may go alone.

A hub remembers the digests of all blocks of the version that it committed last. The next push hashes all blocks anyway;
those whose digest is the same are left out. Servers check the version and the root of their own copy, and the root of
the whole target, unchanged blocks included. Whatever makes a delta impossible makes the push a full one, and is said.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ...codecs import Array


@dataclass(frozen=True, eq=False)
class Base:
    """What the hub committed last.

    key      says how atoms are cut into blocks (`ledger.layout_key`): numbers mean the same only where it is the same
    digests  a row of 16 bytes for every block; on a sender rank those of its own blocks are enough
    since    delta pushes since the last whole one
    """

    version: int
    root: str
    key: str
    digests: Array
    since: int = 0


class Holds(NamedTuple):
    """What a server says that it serves: its URL, and (version, root) of its committed weights."""

    url: str
    version: int
    root: str


class Choice(NamedTuple):
    """Whether only changed blocks are sent; if not although it was wanted, `why` not."""

    delta: bool
    why: str = ""


def choose(wanted: str, base: Base | None, key: str, servers: Iterable[Holds], anchor: int = 0) -> Choice:
    """Whether a push can be a delta.

    wanted  full, delta or auto (delta where possible; the reasons then are notes all the same)
    anchor  every so many pushes a whole one; 0: only when it must be
    """
    if wanted == "full":
        return Choice(False)
    if base is None:
        return Choice(False, "there is no earlier version to be changed: the first push of a hub is a whole one")
    if base.key != key:
        return Choice(False, f"the blocks are cut otherwise than those of version {base.version}")
    for server in servers:
        if server.version != base.version:
            return Choice(
                False, f"{server.url} holds version {server.version}, the changes are those of {base.version}"
            )
        if server.root != base.root:
            return Choice(False, f"{server.url} holds another version {base.version} (root {server.root or 'unknown'})")
    if anchor and base.since + 1 >= anchor:
        return Choice(False, f"every {anchor} versions a whole one is sent (anchor)")
    return Choice(True)
