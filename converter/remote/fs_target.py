"""`convert SRC s3://bucket/dir`: a target elsewhere, that looks complete only when it is.

A Hugging Face target is made and sent shard by shard, at most two of them on this disk. Other formats are converted
into the cache first, where they are read back as a whole, and sent from there.

As long as the target is not whole an object UNFINISHED stands in it, which our readers refuse; what others look for
(config, index, `.metadata`, tracker) comes last. A checkpoint that is replaced stays until the new one is at the store,
beside it; then the store copies it over by itself, and only then what is left of the old one is deleted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoint
from ..convert import Planned, Progress, Result, plan, run
from ..errors import SourceError, TargetError, Unreachable, VerifyError
from ..execute import Limits
from ..formats.dcpfile import METADATA
from ..formats.torch_dist import BACKEND, TRACKER
from ..human import size_text
from ..manifest import manifests
from ..mesh import Mesh
from ..sidefiles import INDEX, MANIFEST
from ..source_state import check_unchanged, identity
from ..target import Options
from ..workdir import check_room, explained
from .fs_directory import Directory, Sums, sums_of, sums_of_file
from .fs_journal import Journal, MadeHere, Sent
from .fs_store import UNFINISHED
from .mounts import remote_file
from .shards import Cargo, Made, Maker, Shard, cargo_of
from .store import Entry
from .urls import is_remote, scheme_of, url_of

STAGED = ".areal-partial"
"""After the name of a target that is replaced: where the new one lies until it is whole."""

_LAST = {"config.json": 1, METADATA: 2, BACKEND: 2, INDEX: 2, TRACKER: 3, MANIFEST: 4}


def convert_to(
    source: str | Path | Checkpoint,
    target: str | Path,
    to: str,
    mesh: Mesh | None = None,
    options: Options | None = None,
    *,
    ranks: Sequence[int] | None = None,
    overwrite: bool = False,
    resume: bool = False,
    verify: bool = True,
    limits: Limits | None = None,
    progress: Progress | None = None,
    **opening: Any,
) -> Result:
    """Convert into a directory of a store. Arguments and result are `convert`'s; the result's path is the URL.

    Raises TargetError when the target is in the way or cannot be written, besides what `convert` raises.
    """
    url = url_of(target)
    if scheme_of(url) == "hf":
        repo = url.partition("://")[2]
        raise TargetError(f"{url}: a conversion makes no commits.", hint=f"`areal-convert push SRC {repo}` does.")
    inputs = [source.path if isinstance(source, Checkpoint) else source, *opening.get("also", ())]
    _refuse_overlap([x for x in (*inputs, opening.get("hf_config")) if x is not None], url)
    there = Directory(url)
    check_target(there, there.files(), overwrite=overwrite, resume=resume)
    planned = plan(source, to, mesh, options, ranks=ranks, **opening)
    upload = Upload(planned, there, limits or Limits(), progress, resume=resume, overwrite=overwrite, verify=verify)
    with upload.journal.held(), explained(upload.journal.scratch):
        return upload.run()


def _refuse_overlap(inputs: Iterable[Any], url: str) -> None:
    for source in inputs:
        if is_remote(str(source)):
            a = url_of(str(source))
            if a == url or a.startswith(url + "/") or url.startswith(a + "/"):
                raise TargetError(f"{url} and the source {a} lie inside each other.", hint="Choose another target.")


def check_target(there: Directory, files: Mapping[str, Entry], *, overwrite: bool, resume: bool) -> None:
    """Refuse a target that is in the way. Changes nothing."""
    if UNFINISHED in files:
        if not (overwrite or resume):
            raise TargetError(
                f"{there.url} is an unfinished conversion.",
                hint="Pass --resume to finish it, or --overwrite to start again.",
            )
    elif files and not overwrite:
        raise TargetError(
            f"{there.url} exists and is not empty.", hint="Pass --overwrite to replace it, or choose another."
        )
    elif files and not _is_checkpoint(files):
        raise TargetError(
            f"{there.url} is not a checkpoint, and --overwrite replaces only checkpoints.", hint="Delete it yourself."
        )


def _is_checkpoint(files: Iterable[str]) -> bool:
    """As for a directory here: ours, or with weights directly in it."""
    tops = {path for path in files if "/" not in path}
    first = {path.partition("/")[0] for path in files}
    return bool({MANIFEST, METADATA} & tops) or any(
        name.startswith(("mp_rank_", "pytorch_model", "areal_manifest.")) or name.endswith((".safetensors", ".distcp"))
        for name in tops | first
    )


def last(path: str) -> tuple[int, str]:
    """Sorts files: those that make a directory look complete come after all others."""
    return _LAST.get(path.rpartition("/")[2], 4 if path.startswith("areal_manifest.") else 0), path


class Upload:
    """One conversion into a store.

    there   the target; `to` where files are sent: the target, or beside it while an old one still stands there
    """

    def __init__(
        self,
        planned: Planned,
        there: Directory,
        limits: Limits,
        progress: Progress | None,
        *,
        resume: bool,
        overwrite: bool,
        verify: bool,
    ) -> None:
        self.planned, self.there, self.limits, self.progress = planned, there, limits, progress
        self.resume, self.overwrite, self.verify = resume, overwrite, verify
        self.journal = Journal(identity(planned), planned.format, there.url)
        self.result = Result(planned, there.url)
        self.sent: dict[str, Sent] = {}
        self._arrived = self._total = self._read = 0

    def run(self) -> Result:
        """Make, send, check, finish."""
        staged = self._settle()
        try:
            start = time.perf_counter()
            send = self._send_shards if self.planned.format == "hf" else self._send_made
            send()
            self._seconds("send", start)
            check_unchanged(self.planned)
        except (SourceError, VerifyError) as error:
            if not isinstance(error, Unreachable):
                self._take_back()
            raise
        start = time.perf_counter()
        if staged:
            self._replace()
        self._check_all(self.there)
        self.there.remove([UNFINISHED])
        if staged:
            self.to.remove(sorted(self.to.files(), key=lambda p: (p == UNFINISHED, p)))
        self._seconds("finish", start)
        self.journal.forget()
        self.result.verified = self.verify
        self.result.fetched = self.planned.source.fetched()
        return self.result

    def _take_back(self) -> None:
        """Resuming would end the same way: nothing stays."""
        self.to.remove([*sorted(self.sent), UNFINISHED])
        self.journal.forget()

    def _seconds(self, phase: str, start: float) -> None:
        self.result.seconds[phase] = time.perf_counter() - start

    # ---- where to

    def _settle(self) -> bool:
        """Decide where files go, clear away what is not resumed, and leave the mark. Whether an old one is replaced."""
        files, beside = self.there.files(), self.there.beside(STAGED)
        check_target(self.there, files, overwrite=self.overwrite, resume=self.resume)
        aside = beside.files()
        going_on = self.resume and self._is_ours(self.there if UNFINISHED in files else beside, {**files, **aside})
        if self.resume and not going_on and (UNFINISHED in files or UNFINISHED in aside):
            raise TargetError(
                f"{self.there.url} was begun with another source, other options or another version.",
                hint="Repeat the command as it was, or pass --overwrite to start again.",
            )
        if not going_on:
            self.journal.forget()
            beside.remove(sorted(aside, key=lambda p: (p == UNFINISHED, p)))
            if UNFINISHED in files:
                self.there.remove(sorted(files, key=lambda p: (p == UNFINISHED, p)))
                files = {}
            aside = {}
        staged = UNFINISHED in aside or (bool(files) and UNFINISHED not in files)
        self.to = beside if staged else self.there
        if UNFINISHED not in (aside if staged else files):
            self._mark(self.to)
        present = aside if staged else files
        for path, sent in self.journal.read().items() if going_on else ():
            if path in present and (present[path].size, present[path].etag) == (sent.sums.size, sent.etag):
                self.sent[path] = sent
        return staged

    def _is_ours(self, directory: Directory, files: Mapping[str, Entry]) -> bool:
        """Whether what is unfinished there was begun by this same command."""
        if UNFINISHED not in files:
            return False
        try:
            return json.loads(directory.read(UNFINISHED)).get("conversion") == self.journal.identity
        except (ValueError, AttributeError):
            return False

    def _mark(self, directory: Directory) -> None:
        text = {"conversion": self.journal.identity, "about": "areal-convert is writing here; not a whole checkpoint"}
        directory.put_bytes(UNFINISHED, json.dumps(text).encode())

    # ---- Hugging Face: shard by shard

    def _send_shards(self) -> None:
        cargo = cargo_of(self.planned)
        self.result.left_behind = cargo.left_behind
        self._total = sum(s.size for s in cargo.shards)
        todo = []
        for shard in cargo.shards:
            sent = self.sent.get(shard.path)
            if sent is None or not {a.name for a in shard.atoms} <= sent.digests.keys():
                todo.append(shard)
                continue
            self.result.digests |= sent.digests
            self.result.resumed += len(sent.digests)
            self._arrive(shard.size)
            self._advance(shard.bytes, cargo)
        scratch = self.journal.scratch
        made_here = (s.size for s in todo if s.source is None or remote_file(s.source))
        check_room(scratch, sum(sorted(made_here, reverse=True)[:2]))
        scratch.mkdir(parents=True, exist_ok=True)
        for old in scratch.iterdir():
            old.unlink()
        for made, sums in self._made(todo, cargo):
            self._note(Sent(made.shard.path, sums, self._put(made.shard.path, made.file, sums).etag, made.digests))
            self.result.digests |= made.digests
            self._arrive(sums.size)
        self._send_texts(cargo.texts | manifests(self.planned, self.result.digests))

    def _made(self, shards: list[Shard], cargo: Cargo) -> Iterator[tuple[Made, Sums]]:
        """Shards one after the other, the next one in the making while the caller sends one."""
        maker = Maker(self.planned, self.journal.scratch, self.limits, lambda n: self._advance(n, cargo))

        def make(shard: Shard) -> tuple[Made, Sums]:
            made = maker.make(shard)
            return made, sums_of_file(made.file)

        with ThreadPoolExecutor(1, thread_name_prefix="areal-make") as pool:
            try:
                coming: Future[tuple[Made, Sums]] | None = None
                for after in [*shards, None]:
                    ready = coming.result() if coming is not None else None
                    coming = pool.submit(make, after) if after is not None else None
                    if ready is not None:
                        yield ready
                        ready[0].discard()
            finally:
                maker.stop.set()

    def _send_texts(self, texts: Mapping[str, bytes]) -> None:
        for path in sorted(texts, key=last):
            sums = sums_of([texts[path]])
            if path not in self.sent or self.sent[path].sums != sums:
                self._note(Sent(path, sums, self.to.put_bytes(path, texts[path]).etag, {}))

    # ---- other formats: made here first

    def _send_made(self) -> None:
        made, before = self.journal.scratch, self.journal.made()
        if before is None or not all(self._is_here_or_there(p, size) for p, size in before.files.items()):
            before = self._make()
        self.result.digests = dict(before.digests)
        files = sorted((str(p.relative_to(made)) for p in made.rglob("*") if p.is_file()), key=last)
        self._total = sum((made / path).stat().st_size for path in files)
        for path in files:
            sums = sums_of_file(made / path)
            if path not in self.sent or self.sent[path].sums != sums:
                self._note(Sent(path, sums, self._put(path, made / path, sums).etag, {}))
            (made / path).unlink()
            self._arrive(sums.size)

    def _is_here_or_there(self, path: str, size: int) -> bool:
        here = self.journal.scratch / path
        return path in self.sent or (here.is_file() and here.stat().st_size == size)

    def _make(self) -> MadeHere:
        """The conversion, whole and read back, on this machine."""
        made, planned = self.journal.scratch, self.planned
        size = sum(f.size for f in planned.files)
        planned.source.notes.append(f"made in {made} first ({size_text(size)}), and sent from there")
        how: dict[str, Any] = {"resume": self.resume, "overwrite": True, "verify": self.verify}
        done = run(planned, made, limits=self.limits, progress=self.progress, **how)
        self.result.resumed, self.result.left_behind = done.resumed, done.left_behind
        self.result.seconds |= done.seconds
        files = {str(p.relative_to(made)): p.stat().st_size for p in made.rglob("*") if p.is_file()}
        whole = MadeHere(done.digests, files)
        self.journal.add_made(whole)
        return whole

    def _put(self, path: str, file: Path, sums: Sums) -> Entry:
        return self.to.put(path, file, sums)

    def _note(self, sent: Sent) -> None:
        self.journal.add(sent)
        self.sent[sent.path] = sent

    # ---- the end

    def _replace(self) -> None:
        """The store copies the new files over the old ones. What cannot be undone begins with the mark."""
        old = self.there.files()
        if UNFINISHED not in old:
            self._mark(self.there)
        seen = [path for path in old if last(path)[0]]
        kept = {p for p in self.sent if p in old and self._is_copy(self.sent[p], old[p])}
        self.there.remove([path for path in seen if path not in kept])
        copied = dict(self.sent)
        for path in sorted(self.sent, key=last):
            sums = self.sent[path].sums
            entry = old[path] if path in kept else self.there.copy_from(self.to, path, sums)
            copied[path] = Sent(path, sums, entry.etag, {})
        self.sent = copied
        self.there.remove(sorted(old.keys() - self.sent.keys() - {UNFINISHED}))

    @staticmethod
    def _is_copy(sent: Sent, entry: Entry) -> bool:
        return entry.size == sent.sums.size and entry.etag in (sent.sums.md5, sent.sums.parts)

    def _check_all(self, directory: Directory) -> None:
        """Everything must be there as it was when it was checked, and nothing else."""
        found = directory.files()
        wrong = [p for p, s in self.sent.items() if p not in found or found[p].etag != s.etag]
        wrong += sorted(found.keys() - self.sent.keys() - {UNFINISHED})
        if wrong:
            raise TargetError(
                f"{directory.url} was changed by somebody else meanwhile: {', '.join(wrong[:5])}.",
                hint="Look what else writes there; then --resume, or --overwrite.",
            )

    # ---- progress

    def _advance(self, count: int, cargo: Cargo) -> None:
        self._read += count
        self._report("convert", self._read, sum(s.bytes for s in cargo.shards))

    def _arrive(self, count: int) -> None:
        self._arrived += count
        self._report("upload", self._arrived, self._total)

    def _report(self, phase: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(phase, done, total)
