"""`push` and `pull`: a model to the Hugging Face Hub and from it, in any format, whole or not at all.

push("out/", "org/model", branch="step-100")        # any format; converted to Hugging Face on the way
pull("org/model", "model/", revision="v1")           # the files of one commit, checked
pull("org/model", "out/", to="torch_dist", mesh=Mesh(tp=8))
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .convert import Planned, Progress, Result, convert
from .convert import plan as planning
from .errors import ConfigError
from .execute import Limits
from .mesh import Mesh
from .target import Options
from .workdir import begun_from, settle_target

if TYPE_CHECKING:
    from .remote.pulling import Taken
    from .remote.pushing import Intent, Sent

__all__ = ["Pulled", "Pushed", "pull", "push"]


@dataclass
class Pushed:
    """What a push did, or (`sent` None) would do."""

    intent: Intent
    sent: Sent | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def planned(self) -> Planned:
        return self.intent.cargo.planned

    @property
    def commit(self) -> str | None:
        """The commit that holds the model now."""
        return self.sent.commit.oid if self.sent is not None and self.sent.commit is not None else None

    @property
    def url(self) -> str | None:
        """Where to look at it: the pull request, or the commit."""
        made = self.sent.commit if self.sent is not None else None
        return None if made is None else made.pr_url or made.url

    @property
    def changed(self) -> bool:
        """Whether a commit was made; False when the repository held exactly this before."""
        return self.commit is not None and self.commit != self.intent.place.head

    def report(self) -> dict[str, Any]:
        """As plain data."""
        planned = self.planned
        known = self.intent.report() | {
            "source": {"path": str(planned.source.path), "format": planned.source.format},
            "family": planned.source.table.name,
            "exactness": self.intent.cargo.exactness,
            "dry_run": self.sent is None,
            "seconds": {k: round(v, 3) for k, v in self.seconds.items()},
        }
        if self.sent is None or self.sent.commit is None:
            return known
        made = self.sent.commit
        return known | {
            "commit": made.oid,
            "commit_url": made.url,
            "pr_url": made.pr_url,
            "pr_revision": made.pr_ref,
            "changed": self.changed,
            "files": {path: file.size for path, file in sorted(self.sent.files.items())},
            "sha256": {path: file.sha256 for path, file in sorted(self.sent.files.items())},
            "bytes": sum(file.size for file in self.sent.files.values()),
            "made": self.sent.made,
            "arrived_before": self.sent.before,
            "same_as_before": self.sent.same,
            "uploaded_bytes": self.sent.sent_bytes,
            "verified": True,
        }


def push(
    source: str | Path,
    repo: str,
    *,
    revision: str | None = None,
    branch: str | None = None,
    private: bool = False,
    create_pr: bool = False,
    options: Options | None = None,
    message: str | None = None,
    dry_run: bool = False,
    confirm: Callable[[Pushed], None] | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
    scratch: str | Path | None = None,
    token: str | None = None,
    **opening: Any,
) -> Pushed:
    """Push a checkpoint of any format to a repository on the Hub: one commit at the end, or none.

    source    a directory or a URL; a Hugging Face directory that needs no change is sent as its files are
    repo      `org/name`; made (`private`) if the user may and there is none
    revision  a branch that is there (default: main); `branch` is made when it is not
    create_pr propose the commit as a pull request
    options   dtype, max_shard, experts: how it is written
    confirm   called with what is intended before anything is made or sent; may raise
    scratch   directory for the two files that are there at a time (default: AREAL_CACHE)

    Rights, repository and branch are settled before a tensor is read. Weight files that the new model makes stale are
    deleted in the same commit, nothing else ever is. Raises TargetError with the cause and the way out (the same push
    again sends only what has not arrived), VerifyError if the commit is not what was meant.
    """
    from .remote.pushing import Push, intend
    from .remote.shards import cargo_of
    from .remote.upload import Repo

    start = time.perf_counter()
    name, ref = _repo_and(repo, revision, branch)
    where = Repo(name, token)
    place = where.look(ref, create_branch=branch is not None, create_pr=create_pr, private=private)
    planned = planning(source, "hf", None, options, **opening)
    pushed = Pushed(intend(where, place, cargo_of(planned)))
    pushed.seconds["look"] = time.perf_counter() - start
    if dry_run:
        return pushed
    if confirm is not None:
        confirm(pushed)
    work = Push(where, pushed.intent, limits or Limits(), progress, Path(scratch) if scratch is not None else None)
    pushed.sent = work.run(message)
    pushed.seconds |= pushed.sent.seconds
    return pushed


def _repo_and(text: str, revision: str | None, branch: str | None) -> tuple[str, str | None]:
    """The repository that a user means, and the branch. Raises ConfigError."""
    from .remote.urls import parse_hub

    if revision and branch:
        raise ConfigError("--revision and --branch both name the branch.", hint="--branch makes it if need be.")
    place = parse_hub(text, revision or branch)
    if place.kind != "model" or place.path or "/" not in place.repo:
        raise ConfigError(f"{text!r} is no model repository.", hint="Write org/name (or hf://org/name).")
    return place.repo, place.revision


# ------------------------------------------------------------------------------------------------ pull


@dataclass
class Pulled:
    """What a pull did: the files of one commit, or their conversion."""

    repo: str
    revision: str | None
    path: Path | str
    seconds: float
    taken: Taken | None = None
    converted: Result | None = None

    @property
    def notes(self) -> list[str]:
        """What a person should know besides."""
        if self.taken is not None:
            return self.taken.notes
        return self.converted.planned.source.notes if self.converted is not None else []

    def report(self) -> dict[str, Any]:
        """As plain data."""
        known = {"repo": self.repo, "revision": self.revision, "path": str(self.path)}
        if self.converted is not None:
            known |= self.converted.report()
        if self.taken is not None:
            known |= self.taken.report()
        return known | {"total_seconds": round(self.seconds, 3)}


def pull(
    repo: str,
    target: str | Path | None = None,
    *,
    revision: str | None = None,
    to: str | None = None,
    mesh: Mesh | None = None,
    options: Options | None = None,
    include_all: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    verify: bool = True,
    ranks: Sequence[int] | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
    token: str | None = None,
    **opening: Any,
) -> Pulled:
    """Fetch a model from the Hub: the exact files of one commit, or (`to`) converted on the way.

    target       the new directory (default: the model's name, in the current one)
    revision     branch, tag, commit or `refs/pr/N`; pinned to one commit before anything else, which the manifest names
    ranks        with `to`: only the files of these ranks, fetching what they hold
    include_all  also what is left out otherwise: weights that the index does not name, other formats, their folders

    The target appears when every file has the digest that the Hub says and they are a whole model. A pull that was
    killed or lost its connection goes on with `resume`, and with the commit that it began with. Raises RemoteError,
    SourceError or TargetError.
    """
    from .remote.pulling import take
    from .remote.store import open_hub
    from .remote.urls import as_begun, is_remote, parse_hub

    start = time.perf_counter()
    place = parse_hub(repo, revision)
    name = place.path.rstrip("/").rpartition("/")[2] or place.repo.rpartition("/")[2]
    path = target if target is not None else Path(name)
    if resume and not is_remote(path):
        place = parse_hub(as_begun(str(place), begun_from(settle_target(path))))
    store = open_hub(place, token=token)
    how: dict[str, Any] = {"overwrite": overwrite, "resume": resume, "limits": limits, "progress": progress}
    if to is not None:
        done = convert(store.url, path, to, mesh, options, ranks=ranks, verify=verify, **how, **opening)
        return Pulled(place.repo, store.revision, done.path, time.perf_counter() - start, converted=done)
    taken = take(store, Path(path), include_all=include_all, **how)
    return Pulled(place.repo, store.revision, taken.path, time.perf_counter() - start, taken=taken)
