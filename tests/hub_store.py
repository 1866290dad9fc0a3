"""What the Hub of the tests keeps: repositories with a linear history a branch, and content-addressed blobs on disk.

Object ids are those of git: a small file is named by the sha1 of its blob, an LFS file by the sha1 of its pointer (and
its ETag is the sha256), a folder by its tree, a commit by its text. Content lies once in `blobs/<sha256>`, for all.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO, Literal

Gated = Literal[False, "auto", "manual"]

LFS_PATTERNS = """
*.7z *.arrow *.bin *.bz2 *.ckpt *.ftz *.gz *.h5 *.joblib *.lfs.* *.mlmodel *.model *.msgpack *.npy *.npz *.onnx *.ot
*.parquet *.pb *.pickle *.pkl *.pt *.pth *.rar *.safetensors saved_model/**/* *.tar.* *.tar *.tflite *.tgz *.wasm *.xz
*.zip *.zst *tfevents*
"""
GITATTRIBUTES = "".join(f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in LFS_PATTERNS.split()).encode()
"""What the Hub writes into a new repository."""


class HubError(Exception):
    """An answer that is an error: status, the Hub's own code (`X-Error-Code`) and its message (`X-Error-Message`)."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        body: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.headers, self.body = headers or {}, body or {}


def git_hash(kind: str, content: bytes) -> str:
    return hashlib.sha1(f"{kind} {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()


def pointer(sha256: str, size: int) -> bytes:
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


def iso(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"


@dataclass(frozen=True)
class Blob:
    """One version of a file. `oid` is git's name for it; the ETag is the sha256 where the content lies in LFS."""

    sha256: str
    size: int
    oid: str
    lfs: bool

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.oid

    @property
    def pointer_size(self) -> int:
        return len(pointer(self.sha256, self.size))


class BlobStore:
    """Content by sha256, one file each."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.root.mkdir(parents=True, exist_ok=True)

    def path(self, sha256: str) -> Path:
        return self.root / sha256

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A path for content that is still arriving; what is left there at the end is removed."""
        path = self.root / f"incoming-{uuid.uuid4().hex}"
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def adopt(self, scratch: Path, sha256: str) -> None:
        os.replace(scratch, self.path(sha256))

    def put(self, content: bytes | Path) -> tuple[str, int]:
        """Content, or the file that holds it (linked where that is possible, so it must not be changed afterwards)."""
        if isinstance(content, bytes):
            sha256 = hashlib.sha256(content).hexdigest()
            if not self.path(sha256).exists():
                with self.scratch() as scratch:
                    scratch.write_bytes(content)
                    self.adopt(scratch, sha256)
            return sha256, len(content)
        source = content.resolve()
        with source.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if not self.path(sha256).exists():
            with self.scratch() as scratch:
                try:
                    os.link(source, scratch)
                except OSError:
                    shutil.copyfile(source, scratch)
                self.adopt(scratch, sha256)
        return sha256, source.stat().st_size

    def read(self, sha256: str) -> bytes:
        return self.path(sha256).read_bytes()

    def open(self, sha256: str) -> BinaryIO:
        return self.path(sha256).open("rb")

    def blob(self, content: bytes | Path, lfs: bool) -> Blob:
        sha256, size = self.put(content)
        return self.known(sha256, size, lfs)

    def known(self, sha256: str, size: int, lfs: bool) -> Blob:
        """The blob of content that is already here."""
        return Blob(sha256, size, git_hash("blob", pointer(sha256, size) if lfs else self.read(sha256)), lfs)


Files = Mapping[str, Blob]


def tree_oid(files: Files, folder: str = "") -> str:
    """git's name for a folder (`""` is the root) of these files."""
    entries: dict[str, tuple[str, str, str]] = {}
    for name, path in _children(files, folder).items():
        if path in files:
            entries[name] = ("100644", name, files[path].oid)
        else:
            entries[name + "/"] = ("40000", name, tree_oid(files, path))
    listing = b"".join(
        f"{mode} {name}\0".encode() + bytes.fromhex(oid) for _, (mode, name, oid) in sorted(entries.items())
    )
    return git_hash("tree", listing)


def _children(files: Files, folder: str) -> dict[str, str]:
    """The names directly in a folder, each with its whole path."""
    prefix = f"{folder}/" if folder else ""
    names = {path[len(prefix) :].split("/", 1)[0] for path in files if path.startswith(prefix)}
    return {name: prefix + name for name in sorted(names)}


def walk(files: Files, folder: str, recursive: bool) -> Iterator[str]:
    """Paths of a folder as the Hub lists them: at every level folders first."""
    children = list(_children(files, folder).values())
    for path in sorted(children, key=lambda path: (path in files, path)):
        yield path
        if recursive and path not in files:
            yield from walk(files, path, recursive)


@dataclass(frozen=True)
class Commit:
    oid: str
    parent: str | None
    files: Files
    title: str
    body: str
    author: str
    date: datetime


def make_commit(parent: str | None, files: Files, title: str, body: str, author: str) -> Commit:
    now = time.time()
    text = f"tree {tree_oid(files)}\n" + (f"parent {parent}\n" if parent else "")
    text += f"author {author} {now:.6f} +0000\n\n{title}\n\n{body}\n"
    oid = git_hash("commit", text.encode())
    return Commit(oid, parent, files, title, body, author, datetime.fromtimestamp(now, UTC))


@dataclass
class Discussion:
    num: int
    title: str
    description: str
    author: str
    pull_request: bool
    status: str
    base: str = "main"
    created: datetime = field(default_factory=lambda: datetime.now(UTC))


@dataclass
class Repo:
    """A repository: refs, commits, and the LFS objects that were uploaded to it (committed or not)."""

    id: str
    type: str = "model"
    private: bool = False
    gated: Gated = False
    members: set[str] = field(default_factory=set)
    granted: set[str] = field(default_factory=set)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    pulls: dict[int, str] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)
    discussions: dict[int, Discussion] = field(default_factory=dict)
    lfs: dict[str, int] = field(default_factory=dict)
    created: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def api(self) -> str:
        return f"{self.type}s/{self.id}"

    @property
    def url(self) -> str:
        return self.id if self.type == "model" else self.api

    def ref(self, revision: str) -> str | None:
        """The commit that a branch, tag or pull request stands at."""
        if revision.startswith("refs/pr/"):
            number = revision.removeprefix("refs/pr/")
            return self.pulls.get(int(number)) if number.isdecimal() else None
        name = revision.removeprefix("refs/heads/")
        return self.branches.get(name) or self.tags.get(revision.removeprefix("refs/tags/"))

    def resolve(self, revision: str) -> Commit:
        oid = self.ref(revision)
        if oid is None and len(revision) >= 7:
            oid = next((oid for oid in self.commits if oid.startswith(revision.lower())), None)
        if oid is None or oid not in self.commits:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.commits[oid]

    def move(self, ref: str, oid: str) -> None:
        if ref.startswith("refs/pr/"):
            self.pulls[int(ref.removeprefix("refs/pr/"))] = oid
        else:
            self.branches[ref.removeprefix("refs/heads/")] = oid

    def commit(self, ref: str, files: Files, title: str, body: str = "", author: str = "alice") -> Commit:
        """Files become the content of a ref, on top of what it stood at."""
        commit = make_commit(self.ref(ref), files, title, body, author)
        self.commits[commit.oid] = commit
        self.move(ref, commit.oid)
        return commit

    def history(self, commit: Commit) -> Iterator[Commit]:
        """A commit and those before it."""
        at: Commit | None = commit
        while at is not None:
            yield at
            at = self.commits.get(at.parent) if at.parent else None

    def last_change(self, commit: Commit, path: str) -> Commit:
        """The last commit up to this one that touched a file, or anything below a folder."""
        last = commit
        seen = _below(commit.files, path)
        for earlier in self.history(commit):
            if _below(earlier.files, path) != seen:
                break
            last = earlier
        return last

    def new_discussion(self, title: str, description: str, author: str, pull_request: bool) -> Discussion:
        number = len(self.discussions) + 1
        status = "draft" if pull_request else "open"
        self.discussions[number] = Discussion(number, title, description, author, pull_request, status)
        return self.discussions[number]

    def used(self) -> int:
        return sum(self.lfs.values())


def _below(files: Files, path: str) -> dict[str, str]:
    return {name: blob.oid for name, blob in files.items() if name == path or name.startswith(path + "/")}


def tracked_by_lfs(attributes: bytes, path: str) -> bool:
    """Whether `.gitattributes` sends a path to LFS."""
    verdict = False
    for line in attributes.decode(errors="replace").splitlines():
        pattern, _, rest = line.strip().partition(" ")
        if pattern and not pattern.startswith("#") and "filter" in rest and _matches(pattern, path):
            verdict = "filter=lfs" in rest
    return verdict


def ignored(gitignore: str, path: str) -> bool:
    verdict = False
    for line in (line.strip() for line in gitignore.splitlines()):
        if line and not line.startswith("#") and _matches(line.lstrip("!").rstrip("/"), path):
            verdict = not line.startswith("!")
    return verdict


def _matches(pattern: str, path: str) -> bool:
    if "/" in pattern.strip("/"):
        return fnmatch(path, pattern.lstrip("/").replace("**/*", "*"))
    return any(fnmatch(part, pattern.lstrip("/")) for part in path.split("/"))


def apply(files: Files, changes: Iterable[Callable[[dict[str, Blob]], None]]) -> dict[str, Blob]:
    """A copy of files with all changes applied, or none: the first that fails raises."""
    result = dict(files)
    for change in changes:
        change(result)
    return dict(sorted(result.items()))
