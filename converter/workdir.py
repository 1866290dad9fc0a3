"""Where a conversion writes until it is whole: a directory beside the target, with a journal of what is done.

The target appears by one rename, after every byte was synced. A conversion that was killed leaves only the directory
beside it; `--resume` reads the journal and does what is left.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from .errors import ConvertError, RemoteChanged, RemoteError, SourceError, TargetError, VerifyError
from .human import size_text
from .sidefiles import MANIFEST, rank_manifests

PARTIAL, REPLACED = ".areal-partial", ".areal-replaced"
JOURNAL = ".areal-journal"


def partial_of(target: Path) -> Path:
    """The directory in which `target` is being made."""
    return target.with_name(target.name + PARTIAL)


def settle_target(target: str | Path) -> Path:
    """The target as an absolute path. Raises TargetError for one that a rename could not make: a link, a mount point,
    a name that is too long."""
    path = Path(os.path.abspath(target))
    if "\0" in str(path) or len(os.fsencode(path.name + PARTIAL)) > 255 or not path.name:
        raise TargetError(f"{str(target)!r} is no name for a new directory.", hint="Choose another target.")
    if path.is_dir() and path.samefile(Path.cwd()):
        raise TargetError(f"{path} is the current directory, which would be renamed away.", hint="Name a new one.")
    if path.is_symlink():
        raise TargetError(f"{path} is a symbolic link.", hint=f"Give the directory itself: {path.resolve()}")
    if os.path.ismount(path) or (path.is_dir() and path.stat().st_dev != path.parent.stat().st_dev):
        raise TargetError(
            f"{path} is a mount point, which nothing can be renamed to.", hint="Choose a directory inside it."
        )
    return path


def check_target(target: Path, *, overwrite: bool, resume: bool) -> None:
    """Refuse a target that is in the way. Raises TargetError; changes nothing but what a kill left half-done."""
    partial, replaced = partial_of(target), target.with_name(target.name + REPLACED)
    if replaced.exists() and not target.exists():
        os.rename(replaced, target)  # killed between the two renames of an overwrite: the old one comes back
    check_replaceable(target, overwrite=overwrite)
    # Between the last two steps of a conversion the journal is gone already; the manifest is there.
    marked = any((partial / name).is_file() for name in (JOURNAL, MANIFEST)) or bool(rank_manifests(partial))
    ours = partial.is_dir() and not partial.is_symlink() and (marked or not any(partial.iterdir()))
    if (partial.exists() or partial.is_symlink()) and not ours:
        raise TargetError(
            f"{partial} is in the way, and no unfinished conversion (it has no journal).", hint="Move it away yourself."
        )
    if partial.exists() and not (overwrite or resume):
        raise TargetError(
            f"{partial} is an unfinished conversion.", hint="Pass --resume to finish it, or --overwrite to start again."
        )


def refuse_overlap(inputs: Sequence[Path], target: Path) -> None:
    """Raise TargetError when a target lies in one of the sources, or the other way round."""
    b = target.resolve()
    for source in dict.fromkeys(inputs):
        a = source.resolve()
        if a == b or a in b.parents or b in a.parents:
            raise TargetError(f"{target} and the source {source} lie inside each other.", hint="Choose another target.")


def check_replaceable(target: Path, *, overwrite: bool) -> None:
    """Raise TargetError unless the target is free, or a checkpoint that the user wants replaced."""
    if target.exists() and not target.is_dir():
        raise TargetError(f"{target} is a file, not a directory.", hint="Choose another target.")
    if not target.exists() or not any(target.iterdir()):
        return
    if not overwrite:
        raise TargetError(
            f"{target} exists and is not empty.", hint="Pass --overwrite to replace it, or choose another."
        )
    if not is_checkpoint_itself(target):
        raise TargetError(
            f"{target} is not a checkpoint, and --overwrite replaces only checkpoints.", hint="Delete it yourself."
        )


def is_checkpoint_itself(path: Path) -> bool:
    """Whether a directory is one checkpoint, ours or with weights directly in it; a run's root with several, or a
    directory that merely has one somewhere inside, is not."""
    if (path / MANIFEST).is_file() or rank_manifests(path):
        return True
    names = [p.name for p in path.iterdir()]
    return any(
        n == ".metadata" or n.endswith((".safetensors", ".distcp")) or n.startswith(("mp_rank_", "pytorch_model"))
        for n in names
    )


def begun_from(target: Path) -> str | None:
    """What the unfinished conversion of `target` converts: a remote source with its commit. None when there is none."""
    try:
        with (partial_of(target) / JOURNAL).open(encoding="utf-8", errors="replace") as journal:
            found = json.loads(journal.readline()).get("source")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


class WorkDir:
    """The unfinished target. Use as a context manager: it holds a lock, so that two conversions cannot share it.

    identity   what must be the same for a resume: the plan, and the source's files with their sizes and times
    source     what is converted, for `begun_from`
    """

    def __init__(self, target: Path, identity: str, *, resume: bool, overwrite: bool, source: str = "") -> None:
        self.target, self.path, self.identity, self.source = target, partial_of(target), identity, source
        self.resume, self.overwrite = resume, overwrite
        self.done: dict[str, str] = {}
        self._pending: list[tuple[str, str, tuple[str, ...]]] = []
        self._lock, self._wake, self._over = threading.Lock(), threading.Event(), False
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None

    def __enter__(self) -> WorkDir:
        with explained(self.path):
            new = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            try:
                self._begin()
            except BaseException:
                if new:
                    shutil.rmtree(self.path, ignore_errors=True)
                self._release()
                raise
        self._thread = threading.Thread(target=self._flush_loop, name="areal-flush", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_flushing()
        self._journal.close()
        later = isinstance(error, RemoteError) and not isinstance(error, RemoteChanged)
        hopeless = (isinstance(error, SourceError | VerifyError) and not later) or not (self.done or self._pending)
        if kind is not None and hopeless and self.path.exists():
            shutil.rmtree(self.path, ignore_errors=True)  # resuming would end the same way, or gain nothing
        self._release()

    def _begin(self) -> None:
        """Clear away what is not resumed, under the lock, and open the journal."""
        if not self.resume:
            # The journal last: a kill in between leaves a directory that is still known as ours.
            for path in sorted(self.path.iterdir(), key=lambda p: p.name == JOURNAL):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        self._read_journal()
        self._journal = open(self.path / JOURNAL, "a", encoding="utf-8")  # noqa: SIM115 - closed in __exit__
        try:
            if not self.done:
                self._journal.truncate(0)
                self._append({"plan": self.identity, "source": self.source})
        except BaseException:
            self._journal.close()
            raise

    # ---- lock

    def _take_lock(self) -> None:
        self._fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            os.close(self._fd)
            if problem.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise TargetError(f"{self.target}: another conversion is writing it at this moment.") from None

    def _release(self) -> None:
        os.close(self._fd)

    # ---- journal

    def _read_journal(self) -> None:
        path = self.path / JOURNAL
        if not path.exists():
            return
        entries: list[dict[str, Any]] = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                break  # a line that a kill cut short; what follows was never written
            if not isinstance(entry, dict):
                break
            entries.append(entry)
        if entries and entries[0].get("plan") != self.identity:
            raise TargetError(
                f"{self.path} was begun with another source, other options or another version.",
                hint="Repeat the command as it was, or pass --overwrite to start again.",
            )
        for entry in entries[1:]:
            done = entry.get("done")
            if isinstance(done, dict):
                self.done.update({str(atom): str(digest) for atom, digest in done.items()})

    def _append(self, entry: dict[str, Any]) -> None:
        self._journal.write(json.dumps(entry) + "\n")
        self._journal.flush()
        os.fdatasync(self._journal.fileno())

    def finished(self, atom: str, digest: str, files: Iterable[str]) -> None:
        """An atom is in its files. It is journalled once those are on disk."""
        with self._lock:
            self._pending.append((atom, digest, tuple(files)))

    def _flush_loop(self) -> None:
        try:
            while not self._over:
                self._wake.wait(1.0)
                self._flush()
        except BaseException as problem:
            self._failed = problem

    def _flush(self) -> None:
        """Sync the files that changed, then write down what is in them: this order makes the journal true."""
        with self._lock:
            pending, self._pending = self._pending, []
        if not pending:
            return
        for name in sorted({f for _, _, files in pending for f in files}):
            sync_file(self.path / name)
        self._append({"done": {atom: digest for atom, digest, _ in pending}})
        self.done.update({atom: digest for atom, digest, _ in pending})

    def _stop_flushing(self) -> None:
        self._over = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # ---- files

    def allocate(self, name: str, size: int) -> bool:
        """Make a file of `size` zero bytes with its blocks reserved, so that a full disk shows before any work.

        Returns False when a resumed run finds the file as it left it.
        """
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.done and path.is_file() and not path.is_symlink() and path.stat().st_size == size:
            return False
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            os.ftruncate(fd, size)
            try:
                if size:
                    os.posix_fallocate(fd, 0, size)
            except OSError as problem:
                if problem.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
        finally:
            os.close(fd)
        return True

    def forget_all_but(self, atoms: set[str]) -> None:
        """Take back what the journal says of other atoms: their file is gone, or the plan does not know them."""
        self.done = {atom: digest for atom, digest in self.done.items() if atom in atoms}

    def keep_only(self, names: set[str]) -> None:
        """Remove what an earlier, killed run (or somebody else) left here and this run does not write."""
        for path in sorted(self.path.rglob("*"), reverse=True):
            relative = str(path.relative_to(self.path))
            if path.is_dir() and not path.is_symlink():
                if not any(path.iterdir()):
                    path.rmdir()
            elif relative not in names and relative != JOURNAL:
                path.unlink()

    def write_text(self, name: str, data: bytes) -> None:
        """A small file, whole."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def sync(self) -> None:
        """Every file and directory on disk."""
        self._stop_flushing()
        if self._failed is not None:
            raise self._failed
        self._flush()
        files = [p for p in self.path.rglob("*") if p.is_file()]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(sync_file, files))
        for directory in [self.path, *(p for p in self.path.rglob("*") if p.is_dir())]:
            sync_file(directory)

    def publish(self) -> None:
        """The target appears, whole. An older one that is replaced goes only then."""
        check_replaceable(self.target, overwrite=self.overwrite)  # again: it may have appeared meanwhile
        replaced = self.target.with_name(self.target.name + REPLACED)
        (self.path / JOURNAL).unlink()
        sync_file(self.path)
        if self.target.exists() and any(self.target.iterdir()):
            if replaced.exists():
                shutil.rmtree(replaced)
            os.rename(self.target, replaced)
        try:
            os.rename(self.path, self.target)
        except BaseException:
            if replaced.exists():
                os.rename(replaced, self.target)  # the old one comes back
            raise
        sync_file(self.target.parent)
        if replaced.exists():
            shutil.rmtree(replaced)


def sync_file(path: Path) -> None:
    """fsync a file or a directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class explained:
    """Turns an OSError from writing a target into a TargetError that says what happened and what to do."""

    def __init__(self, path: Path, needed: int = 0) -> None:
        self.path, self.needed = path, needed

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, OSError) or isinstance(error, ConvertError):
            return
        place = error.filename or self.path
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise TargetError(f"{place}: the disk (or the quota) is full.", hint=self._room()) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise TargetError(
                f"{place}: cannot be written: {error.strerror}.", hint="Check its owner and mount."
            ) from error
        raise TargetError(f"{place}: {error.strerror or error}.") from error

    def _room(self) -> str:
        parent = next(p for p in (self.path, *self.path.parents) if p.exists())
        free = shutil.disk_usage(parent).free
        needed = f"{size_text(self.needed)} are needed, " if self.needed else ""
        return f"{needed}{size_text(free)} are free. Make room and pass --resume, or choose another target."


def check_room(target: Path, needed: int, hint: str = "Choose another target.") -> None:
    """Raise TargetError when the file system has not enough room, before anything is written."""
    parent = next(p for p in (target, *target.absolute().parents) if p.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise TargetError(
            f"{target}: {size_text(needed)} are needed, {size_text(free)} are free.",
            hint=hint,
        )
