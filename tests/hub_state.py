"""The Hub of the tests without its wires: repositories, people, and what was asked of it."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hub_faults import Fault, Ledger, Request, merged
from hub_store import GITATTRIBUTES, Blob, BlobStore, Files, Gated, Repo, apply, tracked_by_lfs

WRITE, READ, STRANGER, INVALID = "hf_write", "hf_read", "hf_stranger", "hf_unknown"
"""Tokens: alice's to write and to read (a member of all repositories), somebody else's, and one that is no token."""


@dataclass(frozen=True)
class Token:
    name: str
    role: str
    spaces: set[str] = field(default_factory=set)

    def may_write(self, space: str) -> bool:
        return self.role == "write" and (space == self.name or space in self.spaces)


class Hub:
    """The state of the server. The attributes may be changed at any time."""

    def __init__(
        self,
        root: Path,
        *,
        lfs_threshold: int = 10 << 20,
        multipart_threshold: int = 5 << 30,
        part_size: int = 8 << 20,
        page_size: int = 1000,
        url_lifetime: float = 3600.0,
        quota: int | None = None,
    ) -> None:
        self.root = Path(root)
        self.store = BlobStore(self.root / "blobs")
        self.lfs_threshold = lfs_threshold
        self.multipart_threshold = multipart_threshold
        self.part_size = part_size
        self.page_size = page_size
        self.url_lifetime = url_lifetime
        self.quota = quota
        self.repos: dict[tuple[str, str], Repo] = {}
        self.moved: dict[tuple[str, str], str] = {}
        spaces = {"org"}
        self.tokens = {
            WRITE: Token("alice", "write", spaces),
            READ: Token("alice", "read", spaces),
            STRANGER: Token("mallory", "write"),
        }
        self.uploads: dict[str, dict[int, tuple[str, str]]] = {}
        self.ledger = Ledger()
        self.leaks: list[Request] = []
        """Requests that carried a token to the CDN."""
        self.crashes: list[Exception] = []
        """What went wrong in this server without having been asked for; raised when it stops."""
        self.secret = secrets.token_bytes(16)
        self.lock = threading.RLock()
        self.url = self.cdn_url = ""

    # What it holds

    def add_repo(
        self,
        name: str,
        files: Mapping[str, bytes | str | Path] | Path | None = None,
        *,
        repo_type: str = "model",
        private: bool = False,
        gated: Gated = False,
        members: set[str] | None = None,
    ) -> str:
        """A repository with these files (or those of a directory) on `main`; the commit. `members` may write: alice."""
        repo = Repo(name, repo_type, private, gated, {"alice"} if members is None else members)
        with self.lock:
            if "alice" in repo.members:
                self.tokens[WRITE].spaces.add(name.split("/")[0])
            self.repos[repo_type, name] = repo
            attributes = {".gitattributes": self.store.blob(GITATTRIBUTES, lfs=False)}
            first = repo.commit("main", attributes, "initial commit")
        if isinstance(files, Path):
            files = {str(path.relative_to(files)): path for path in sorted(files.rglob("*")) if path.is_file()}
        return self.commit(name, files, message="Upload", repo_type=repo_type) if files else first.oid

    def commit(
        self,
        name: str,
        files: Mapping[str, bytes | str | Path] | None = None,
        *,
        delete: tuple[str, ...] = (),
        branch: str = "main",
        message: str = "a change",
        repo_type: str = "model",
    ) -> str:
        """Change files behind the clients' backs; the new commit."""
        repo = self.repos[repo_type, name]
        with self.lock:
            head = repo.resolve(branch).files
            fresh = {path: self._blob(repo, path, content) for path, content in (files or {}).items()}
            left = apply(head, [lambda result: result.update(fresh)])
            return repo.commit(branch, {path: blob for path, blob in left.items() if path not in delete}, message).oid

    def _blob(self, repo: Repo, path: str, content: bytes | str | Path) -> Blob:
        data = content.encode() if isinstance(content, str) else content
        size = data.stat().st_size if isinstance(data, Path) else len(data)
        lfs = size > 0 and (tracked_by_lfs(GITATTRIBUTES, path) or size > self.lfs_threshold)
        blob = self.store.blob(data, lfs)
        if lfs:
            repo.lfs[blob.sha256] = blob.size
        return blob

    def tamper(self, name: str, path: str, content: bytes, revision: str = "main", repo_type: str = "model") -> None:
        """Other content under the same commit: what git rules out, and caches and mirrors manage all the same."""
        repo = self.repos[repo_type, name]
        files: Any = repo.resolve(revision).files
        files[path] = self._blob(repo, path, content)

    def forget(self, name: str, commit: str, repo_type: str = "model") -> None:
        """As after a force push: the commit is no longer known."""
        del self.repos[repo_type, name].commits[commit]

    def rename(self, name: str, new: str, repo_type: str = "model") -> None:
        with self.lock:
            repo = self.repos.pop((repo_type, name))
            repo.id = new
            self.repos[repo_type, new] = repo
            self.moved[repo_type, name] = new

    def repo(self, name: str, repo_type: str = "model") -> Repo:
        return self.repos[repo_type, name]

    def head(self, name: str, revision: str = "main", repo_type: str = "model") -> str:
        return self.repos[repo_type, name].resolve(revision).oid

    def files(self, name: str, revision: str = "main", repo_type: str = "model") -> Files:
        return self.repos[repo_type, name].resolve(revision).files

    def read(self, name: str, path: str, revision: str = "main", repo_type: str = "model") -> bytes:
        return self.store.read(self.files(name, revision, repo_type)[path].sha256)

    # What it was asked

    def calls(self, kind: str = "*", path: str = "*", repo: str = "*", method: str = "*") -> list[Request]:
        """Requests so far; the arguments are patterns. `path` is the file, or the sha256 for uploads."""
        return self.ledger.select(kind, path, repo, method)

    def bytes_sent(self, path: str = "*", kind: str = "*", repo: str = "*") -> int:
        """Bytes of files that went out, whether or not the client took them."""
        return sum(call.sent for call in self.calls(kind, path, repo) if call.kind in ("file", "cdn"))

    def spans(self, path: str, repo: str = "*") -> list[tuple[int, int]]:
        """The parts of a file that went out, as disjoint ranges; less than `bytes_sent` says: some went out twice."""
        served = [call for call in self.calls("*", path, repo) if call.span is not None and call.sent]
        return merged((call.span[0], call.span[0] + call.sent) for call in served if call.span is not None)

    def reset(self) -> None:
        self.ledger.reset()

    def fault(self, kind: str = "*", path: str = "*", **how: Any) -> Fault:
        """Let matching requests go wrong from now on: see Fault."""
        return self.ledger.fault(kind, path, **how)

    def clear_faults(self) -> None:
        self.ledger.clear_faults()

    def web(self, name: str, repo_type: str) -> str:
        return f"{self.url}/{name}" if repo_type == "model" else f"{self.url}/{repo_type}s/{name}"
