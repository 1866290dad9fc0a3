"""What lies in a repository, and which of it a push makes stale. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import Problems
from ..formats.hf import BIN_INDEX
from ..sidefiles import INDEX

INDICES = (INDEX, BIN_INDEX)

_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|pytorch_model(-\d+-of-\d+)?\.bin")
"""What transformers loads a model from, at the top of a repository."""

_OTHERS = re.compile(r"[^/]+\.(safetensors|bin|pt|pth|h5|msgpack|gguf|onnx)")


@dataclass(frozen=True)
class RemoteFile:
    """A file at the Hub: `sha256` of one in LFS, `oid` git's name for what lies in git itself."""

    size: int
    oid: str
    sha256: str | None = None


@dataclass(frozen=True)
class Uploaded:
    """A file that the Hub has, though no commit names it yet."""

    path: str
    size: int
    sha256: str
    sample: bytes


@dataclass(frozen=True)
class Meant:
    """What a file must be once the commit is made; `oid` None: it lies in LFS."""

    size: int
    sha256: str
    oid: str | None

    def fits(self, found: RemoteFile) -> bool:
        """Whether this is it."""
        same = found.sha256 == self.sha256 if found.sha256 is not None else found.oid == self.oid
        return same and found.size == self.size


@dataclass(frozen=True)
class Place:
    """Where a push goes: a branch, the commit that it builds upon (None: the repository is still to be made), and the
    files in that commit."""

    repo: str
    branch: str
    user: str
    head: str | None = None
    new_branch: bool = False
    create_pr: bool = False
    private: bool = False
    files: Mapping[str, RemoteFile] = field(default_factory=dict)

    def __str__(self) -> str:
        made = "new repository" if self.head is None else "new branch" if self.new_branch else f"at {self.head[:8]}"
        kind = ", private" if self.private else ""
        return f"{self.repo}, branch {self.branch} ({made}{kind}){', as a pull request' if self.create_pr else ''}"


@dataclass(frozen=True)
class Committed:
    """A commit that was made, or the one that was there already when nothing had changed."""

    oid: str
    url: str
    pr_url: str | None = None
    pr_ref: str | None = None


def named_by(index: str) -> set[str]:
    """The files that an index of shards names; none where it is no index."""
    try:
        parsed: Any = json.loads(index)
        return {str(file) for file in parsed["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()


def stale(files: Iterable[str], new: Iterable[str], indices: Iterable[str] = ()) -> tuple[list[str], list[str]]:
    """Of the files of a repository: those that a push of the files `new` makes stale, and other weights, which stay.

    Stale are weights that transformers would look for, or that an index which is there now names, and these indices
    themselves. Nothing else is ever deleted: adapters, GGUF files and other folders are somebody's.

    >>> stale(["model-00001-of-00002.safetensors", "a.gguf", "x/model.safetensors", "README.md"], ["model.safetensors"])
    (['model-00001-of-00002.safetensors'], ['a.gguf'])
    """
    old, fresh = set[str]().union(*map(named_by, indices)), set(new)
    left = sorted(set(files) - fresh)
    named = {f for f in old if _OTHERS.fullmatch(f)}
    gone = [f for f in left if _WEIGHTS.fullmatch(f) or f in INDICES or f in named]
    return gone, [f for f in left if _OTHERS.fullmatch(f) and f not in gone]


def faults(found: Mapping[str, RemoteFile], meant: Mapping[str, Meant], deleted: Iterable[str]) -> Problems:
    """In what a commit differs from what was meant."""
    problems = Problems()
    for path, file in meant.items():
        there = found.get(path)
        if there is None:
            problems.add(path, "is not there")
        elif not file.fits(there):
            have, want = there.sha256 or there.oid, file.sha256 if there.sha256 else file.oid
            problems.add(path, f"has {there.size} bytes and the digest {have}; meant were {file.size} and {want}")
    for path in deleted:
        if path in found:
            problems.add(path, "is still there, though it was to be deleted")
    return problems
