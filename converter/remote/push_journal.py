"""What an unfinished push has uploaded already, so that the same push again makes and sends only the rest.

One file of JSON lines for each pair of (what is pushed, to which branch). A line stands there only after the Hub had
the file; whether it still has it is asked again, since it may clear away what was never committed.
"""

from __future__ import annotations

import base64
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from .remote_tree import Uploaded

SCHEMA = 1


@dataclass(frozen=True)
class Entry:
    """A file that was uploaded, and the digests of the atoms that it holds."""

    uploaded: Uploaded
    digests: dict[str, str]


class Journal:
    """The journal of one push. `identity`: all that must be the same for its entries to count."""

    def __init__(self, root: Path, *identity: str) -> None:
        name = xxhash.xxh3_128("\0".join((str(SCHEMA), *identity)).encode(errors="surrogateescape")).hexdigest()
        self.path = root / "push" / f"{name}.jsonl"

    def read(self) -> dict[str, Entry]:
        """Entries by path. A line that a kill cut in two is passed over, and so is anything else that is not ours."""
        try:
            lines = self.path.read_bytes().splitlines()
        except FileNotFoundError:
            return {}
        found: dict[str, Entry] = {}
        for line in lines:
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                entry = _entry(json.loads(line))
                found[entry.uploaded.path] = entry
        return found

    def add(self, uploaded: Uploaded, digests: dict[str, str]) -> None:
        """Write down that a file has arrived; on disk when this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        facts = asdict(uploaded) | {"sample": base64.b64encode(uploaded.sample).decode(), "digests": digests}
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(fd, b"\n" + json.dumps(facts).encode() + b"\n")  # first an end for what a kill may have left
            os.fsync(fd)
        finally:
            os.close(fd)

    def remove(self) -> None:
        """The push is through."""
        self.path.unlink(missing_ok=True)


def _entry(facts: dict[str, Any]) -> Entry:
    digests = {str(atom): str(digest) for atom, digest in facts["digests"].items()}
    sample = base64.b64decode(facts["sample"])
    sha256 = bytes.fromhex(facts["sha256"]).hex()
    return Entry(Uploaded(str(facts["path"]), int(facts["size"]), sha256, sample), digests)
