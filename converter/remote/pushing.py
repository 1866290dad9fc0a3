"""A push from its beginning to its end: look, decide, make and send file by file, one commit, look again.

While a file is sent, the next one is made: at most two lie in the scratch directory. What has arrived is journalled,
so that the same push again neither makes nor sends it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..convert import Progress
from ..errors import RemoteError, TargetError
from ..execute import Limits
from ..formats.hf import BIN_INDEX
from ..manifest import ALGORITHM, build, encode, tool_version
from ..manifest import read as read_manifest
from ..sidefiles import INDEX, MANIFEST
from ..source_state import check_unchanged, identity
from ..workdir import check_room, explained
from .card import CARD, section, update
from .mirror import cache_directory
from .push_journal import Journal
from .remote_tree import Committed, Meant, Place, Uploaded, stale
from .shards import Cargo, Made, Maker, Shard
from .upload import Repo, meant_by, quiet

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd


@dataclass(frozen=True)
class Intent:
    """What a push is going to do. Sizes of files that are written last are not known before (None)."""

    place: Place
    cargo: Cargo
    files: dict[str, int | None]
    delete: dict[str, int]
    stay: list[str]
    notes: list[str]
    card: str | None

    def report(self) -> dict[str, Any]:
        """As plain data."""
        place = self.place
        return {
            "repo": place.repo,
            "branch": place.branch,
            "user": place.user,
            "parent": place.head,
            "creates": [n for n, new in (("repository", place.head is None), ("branch", place.new_branch)) if new],
            "private": place.private,
            "pull_request": place.create_pr,
            "as_is": self.cargo.as_is,
            "files": self.files,
            "bytes": sum(size or 0 for size in self.files.values()),
            "deletes": self.delete,
            "other_weights_that_stay": self.stay,
            "left_behind": self.cargo.left_behind,
            "notes": self.notes,
        }


def intend(repo: Repo, place: Place, cargo: Cargo) -> Intent:
    """What the push will send and delete. Raises TargetError for a card that the Hub would refuse."""
    texts: dict[str, int | None] = {name: len(data) for name, data in cargo.texts.items()}
    files = {s.path: s.size for s in cargo.shards} | texts | {MANIFEST: None, CARD: None}
    indices = [repo.text(name, place.head or "") for name in (INDEX, BIN_INDEX) if name in place.files]
    gone, stay = stale(place.files, files, indices)
    notes: list[str] = []
    card = _card(repo, place, cargo, notes)
    _check_card(update(card, "", "model"))
    delete = {path: place.files[path].size for path in gone}
    return Intent(place, cargo, dict(sorted(files.items())), delete, stay, notes, card)


def _card(repo: Repo, place: Place, cargo: Cargo, notes: list[str]) -> str | None:
    """The card to which our section belongs. A Hugging Face directory brings its own; what travels in another format
    is the card of the model from which that once came, and gives way to the repository's."""
    own = cargo.texts.get(CARD)
    there = repo.text(CARD, place.head or "") if CARD in place.files else None
    if own is None or (there is not None and cargo.planned.source.format != "hf"):
        if own is not None:
            notes.append(f"{CARD}: the repository's is kept, not the one that came along with the weights")
        return there
    try:
        return own.decode()
    except UnicodeDecodeError:
        raise TargetError(f"{CARD}: is no UTF-8 text.", hint="Mend it; the Hub shows it as the model's page.") from None


def _check_card(card: str) -> None:
    """The Hub refuses a commit whose card has a broken head: better now than after hours."""
    from huggingface_hub import ModelCard

    try:
        ModelCard(card, ignore_metadata_errors=True)
    except Exception as error:
        what = " ".join(str(error).split())
        raise TargetError(
            f"{CARD}: its head is no valid YAML, and the Hub would refuse it: {what}",
            hint="Mend what stands between the two lines of --- at its top.",
        ) from None


# ------------------------------------------------------------------------------------------------ doing it


UNKNOWN = "Whether the commit was made is not known: the same command again finds out, and sends nothing twice."
"""What somebody should know who interrupts a push at its very end."""


@dataclass
class Sent:
    """What a push has done so far.

    made    files with tensors that were made (or read) and sent
    before  those that had arrived in a push that was not finished; same: those that the branch held already
    """

    made: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    same: list[str] = field(default_factory=list)
    sent_bytes: int = 0
    digests: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    commit: Committed | None = None
    files: dict[str, Meant] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)


class Push:
    """Carries out an Intent. `scratch`: where files are made (default: in the cache)."""

    def __init__(
        self,
        repo: Repo,
        intent: Intent,
        limits: Limits,
        progress: Progress | None = None,
        scratch: Path | None = None,
    ) -> None:
        self.repo, self.intent, self.limits = repo, intent, limits
        self.planned, self.sent = intent.cargo.planned, Sent()
        self._progress, self._done, self._arrived = progress, 0, 0
        place = intent.place
        how = "as is" if intent.cargo.as_is else "made"
        target = f"{place.branch}{' pull request' if place.create_pr else ''}"
        self.journal = Journal(cache_directory(), identity(self.planned), how, repo.api.endpoint, place.repo, target)
        self.scratch = (scratch or self.journal.path.parent) / f"{self.journal.path.stem}.files"

    def run(self, message: str | None = None) -> Sent:
        """Send everything, commit, verify. Raises ConvertError; then there is no commit."""
        shards = self.intent.cargo.shards
        temporary = sorted((s.size for s in shards if not self._lies_here(s)), reverse=True)[:2]
        with explained(self.scratch, sum(temporary)), quiet(), self._own_scratch():
            check_room(self.scratch, sum(temporary), hint="--scratch names another directory for them.")
            place = self.repo.create(self.intent.place)
            start = time.perf_counter()
            ops = self._send_shards(place)
            ops += self._send_texts(place)
            self.sent.seconds["send"] = time.perf_counter() - start
        check_unchanged(self.planned)
        self._commit(place, ops, message or f"Upload weights with areal-convert {tool_version()}")
        self.journal.remove()
        return self.sent

    def _lies_here(self, shard: Shard) -> bool:
        from .mounts import remote_file

        return shard.source is not None and remote_file(shard.source) is None

    @contextmanager
    def _own_scratch(self) -> Iterator[None]:
        """The scratch directory, empty, ours alone, gone at the end. What a killed push left there goes first."""
        self.scratch.parent.mkdir(parents=True, exist_ok=True)
        lock = self._lock()
        try:
            shutil.rmtree(self.scratch, ignore_errors=True)
            self.scratch.mkdir()
            yield
        finally:
            shutil.rmtree(self.scratch, ignore_errors=True)
            self.scratch.with_suffix(".lock").unlink(missing_ok=True)
            os.close(lock)

    def _lock(self) -> int:
        """Raises TargetError while another process has it."""
        path = self.scratch.with_suffix(".lock")
        while True:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                raise TargetError(
                    f"{self.repo.repo}: the very same push is running already.", hint="Wait until it has ended."
                ) from None
            if path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
                return lock
            os.close(lock)  # the one before us removed it as we opened it

    # ---- files with tensors

    def _send_shards(self, place: Place) -> list[CommitOperationAdd]:
        ops: dict[str, CommitOperationAdd] = {}
        shards = {s.path: s for s in self.intent.cargo.shards}
        noted = {path: entry for path, entry in self.journal.read().items() if path in shards}
        noted = {path: e for path, e in noted.items() if e.uploaded.size == shards[path].size}
        there = self.repo.present([e.uploaded for e in noted.values()], place)
        for path in sorted(there):
            entry = noted[path]
            if {a.name for a in shards[path].atoms} <= entry.digests.keys():
                ops[path] = self.repo.known(entry.uploaded, place)
                self.sent.digests |= entry.digests
                self.sent.before.append(path)
                self._advance(shards[path].bytes)
                self._arrive(shards[path].size)
        for made in self._made([s for path, s in shards.items() if path not in ops]):
            ops[made.shard.path] = self._send(made, place)
        return [ops[path] for path in shards]

    def _made(self, shards: list[Shard]) -> Iterator[Made]:
        """The files one after the other, the next one in the making while the caller has one."""
        maker = Maker(self.planned, self.scratch, self.limits, self._advance)
        with ThreadPoolExecutor(1, thread_name_prefix="areal-make") as pool:
            try:
                coming: Future[Made] | None = None
                for after in [*shards, None]:
                    made = coming.result() if coming is not None else None
                    coming = pool.submit(maker.make, after) if after is not None else None
                    if made is not None:
                        yield made
                        made.discard()
            finally:
                maker.stop.set()

    def _send(self, made: Made, place: Place) -> CommitOperationAdd:
        from huggingface_hub import CommitOperationAdd

        path, size = made.shard.path, made.shard.size
        file = Uploaded(path, size, made.sha256, made.sample)
        there = place.files.get(path)
        self.sent.digests |= made.digests
        if there is not None and there.sha256 == made.sha256:
            self.sent.same.append(path)
            self._arrive(size)
            return self.repo.known(file, place)
        op = CommitOperationAdd(path, str(made.file))
        op.upload_info.sha256 = bytes.fromhex(made.sha256)
        self.repo.upload([op], place)
        if op._upload_mode == "lfs":
            self.journal.add(file, made.digests)
        else:  # so small that it goes into the commit itself, after its file is gone
            op.path_or_fileobj = made.file.read_bytes()
        self.sent.made.append(path)
        self.sent.sent_bytes += size
        self._arrive(size)
        return op

    # ---- small files

    def _send_texts(self, place: Place) -> list[CommitOperationAdd]:
        from huggingface_hub import CommitOperationAdd

        texts = {k: v for k, v in self.intent.cargo.texts.items() if k not in (CARD, MANIFEST)}
        self.sent.manifest, texts[MANIFEST] = self._manifest()
        about = section(self.sent.manifest, self._how())
        texts[CARD] = update(self.intent.card, about, place.repo.rpartition("/")[2]).encode()
        ops = [CommitOperationAdd(path, data) for path, data in sorted(texts.items())]
        self.repo.upload(ops, place)
        return ops

    def _how(self) -> str:
        cargo = self.intent.cargo
        return "none: the files are as they were" if cargo.as_is else cargo.exactness

    def _manifest(self) -> tuple[dict[str, Any], bytes]:
        """The manifest that lies there already, when it tells the truth; else a new one."""
        planned, digests = self.planned, self.sent.digests
        where = planned.source.found.where
        entries = {a.name: (a.target_dtype, digests[a.name]) for a in planned.plan.atoms}
        known = read_manifest(where) if self.intent.cargo.as_is else None
        if known is not None and (where / MANIFEST).is_file():
            said = {name: tuple(entry) for name, entry in known["atoms"].items()}
            if (known.get("format"), known.get("digest"), said) == ("hf", ALGORITHM, entries):
                return known, (where / MANIFEST).read_bytes()
            self.intent.notes.append(f"{MANIFEST}: the weights were changed since it was written; a new one is sent")
        built = build(planned.source, "hf", planned.dialect, planned.plan.digest, entries)
        return built, encode(built)

    # ---- the commit

    def _commit(self, place: Place, ops: list[CommitOperationAdd], message: str) -> None:
        start = time.perf_counter()
        sent, delete = self.sent, list(self.intent.delete)
        sent.files = {op.path_in_repo: meant_by(op) for op in ops}
        about = f"Made by areal-convert {tool_version()} (plan {self.planned.plan.digest})."
        try:
            sent.commit = self.repo.commit(place, ops, delete, message, about)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(UNKNOWN) from None
        sent.seconds["commit"] = time.perf_counter() - start
        start = time.perf_counter()
        try:
            self.repo.verify(sent.commit, place, sent.files, delete)
        except (RemoteError, TargetError) as error:
            raise type(error)(
                f"The commit was made ({sent.commit.url}), but could not be verified. {error.what}",
                hint="The same push again verifies it, and sends nothing twice.",
            ) from error
        sent.seconds["verify"] = time.perf_counter() - start

    # ---- progress

    def _advance(self, count: int) -> None:
        self._done += count
        self._report("convert", self._done, sum(s.bytes for s in self.intent.cargo.shards))

    def _arrive(self, count: int) -> None:
        self._arrived += count
        self._report("upload", self._arrived, sum(s.size for s in self.intent.cargo.shards))

    def _report(self, phase: str, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(phase, done, total)


Confirm = Callable[[Intent], None]
"""Asked before anything is sent; raises to stop the push."""
