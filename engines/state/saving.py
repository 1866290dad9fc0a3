"""Save a training state: into a directory of another name, with a marker last, and one rename.

`Saver(asynchronous=True)` copies this rank's boxes into host memory and lets training go on; a thread writes them, over
a process group of its own, or (`process=True`) has a process write them. What goes wrong there is raised by the next
`check`, `save` or `close`.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...converter.carried import json_bytes
from ...converter.errors import TargetError
from ...converter.manifest import tool_version
from ...converter.peers import Peers
from ...converter.remote.mounts import ensure
from ...converter.sidefiles import HF, INDEX, collect
from ...converter.target import Options, side_config
from ...converter.workdir import check_room, explained
from ..ranks import peers_of
from . import directory, shards
from .beside import Beside
from .directory import Marker, step_name
from .entries import TrainState
from .entries import collect as collect_entries
from .extras import capture_optimizers, capture_rng, united
from .shards import Key, Layout, Said

LARGEST_SIDE_FILE = 64 * 1024 * 1024


@dataclass
class Progress:
    """Where a run stands. Everything in it is plain data, as JSON has it.

    schedule   the learning rate's state; `data` the position in the data; `counters` whatever else counts (tokens)
    version    the engine's, which inference servers compare
    config     the run's resolved config, as YAML text
    seed       from which ranks are seeded anew when a state is loaded on another topology
    """

    step: int = 0
    version: int = 0
    schedule: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    counters: Mapping[str, Any] = field(default_factory=dict)
    config: str = ""
    seed: int = 0


@dataclass
class _Job:
    """One save, with all that it needs: training goes on and changes everything else."""

    target: Path
    keep: int | None
    layout: Layout
    data_of: Callable[[Key], torch.Tensor]
    rng: bytes
    texts: dict[str, bytes]
    step: int
    seconds: float = 0.0

    @property
    def partial(self) -> Path:
        return self.target.with_name(self.target.name + directory.PARTIAL)


class Saver:
    """Saves one run's states. Made on every rank at the same time; its methods are called by all ranks alike.

    asynchronous   write while training goes on
    process        from a process of its own, which shares no interpreter with training
    keep_latest_k  states that stay under a root, at least 1; None: all. Older ones go when a newer one is complete
    timeout        how long a rank waits for the others
    """

    def __init__(
        self,
        *,
        asynchronous: bool = False,
        process: bool = False,
        keep_latest_k: int | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        if keep_latest_k is not None and keep_latest_k < 1:
            raise TargetError(
                f"keep_latest_k is {keep_latest_k}: at least the newest state stays.", hint="Use 1 or more."
            )
        self.asynchronous, self.keep = asynchronous, keep_latest_k
        self._group: Any = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=timeout or timedelta(minutes=30))
        self.peers: Peers = peers_of(self._group)
        self._said: Said | None = None
        self._layout: Layout | None = None
        self._staged: dict[Key, torch.Tensor] = {}
        self._beside = Beside() if asynchronous and process else None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.seconds: dict[str, float] = {}

    # ---- saving

    def save_step(self, state: TrainState, progress: Progress, root: str | Path) -> Path:
        """Save to `root/step-000012`, and remove what retention no longer keeps; returns the path."""
        target = Path(root).absolute() / step_name(progress.step)
        self._save(state, progress, target, self.keep, optimizer=True)
        return target

    def save(self, state: TrainState, progress: Progress, target: str | Path, *, optimizer: bool = True) -> Path:
        """Save to this very directory, over an earlier state there."""
        path = Path(target).absolute()
        self._save(state, progress, path, None, optimizer=optimizer)
        return path

    def _save(self, state: TrainState, progress: Progress, target: Path, keep: int | None, *, optimizer: bool) -> None:
        self.wait()
        start = time.perf_counter()
        what, here = f"Describing the state of step {progress.step}", list[Any]()

        def look() -> None:
            found = collect_entries(state, optimizer=optimizer)
            described = capture_optimizers(state.optimizers, found) if optimizer else None
            here[:] = found, described, shards.say(found.entries, found.aliases)

        def describe() -> None:
            regions = {Key(n, box): region for n, e in here[0].entries.items() for box, region in e.regions()}
            texts = self._texts(state, progress, united(everywhere))
            rng = directory.json_bytes(capture_rng(state.rng), "the random states")
            here.append(_Job(target, keep, Layout(), regions.__getitem__, rng, texts, progress.step))

        self.peers.together(what, look)
        everywhere = self.peers.exchange(here[1])
        self.peers.together(what, describe)
        job: _Job = here[-1]
        job.layout = self._lay_out(here[2])
        self._together(job, "Beginning", lambda: self._begin(job))
        if not self.asynchronous:
            self._finish(job)
            self.seconds = {"save": time.perf_counter() - start}
            return
        self._together(job, "Copying", lambda: self._stage(job))
        self.seconds = {"blocked": time.perf_counter() - start}
        self._thread = threading.Thread(target=self._behind, args=(job,), name="areal-save")
        self._thread.start()

    def _lay_out(self, said: Said) -> Layout:
        """The layout stays as long as all ranks hold what they held at the last save."""
        same = self.peers.exchange(said == self._said and self._layout is not None)
        if not all(same) or self._layout is None:
            self._layout = shards.lay_out(self.peers.exchange(said), self.peers.rank)
            self._said = said
            self._staged.clear()
        return self._layout

    def _texts(self, state: TrainState, progress: Progress, optimizer: dict[str, Any] | None) -> dict[str, bytes]:
        """The small files; rank 0 writes them."""
        base = state.base
        config, changed = dict(base.config), side_config(base, Options())
        trainer = {
            "schema": directory.SCHEMA,
            "tool": f"areal-convert {tool_version()}",
            "torch": torch.__version__,
            **{k: v for k, v in asdict(progress).items() if k != "config"},
            "model": {"family": base.table.name, "config": config},
            "topology": {"world": self.peers.world, **state.topology},
            "optimizer": optimizer,
        }
        texts = {directory.TRAINER: directory.json_bytes(trainer, "the trainer's state")}
        if progress.config:
            texts[directory.CONFIG] = progress.config.encode()
        files, _ = collect(base.found.hf) if base.found.hf else ({}, [])
        for name, path in files.items() if self.peers.rank == 0 else ():
            if name != INDEX and path.stat().st_size <= LARGEST_SIDE_FILE:
                ensure(path)
                texts[f"{HF}/{name}"] = path.read_bytes()
        if changed is not None or f"{HF}/config.json" not in texts:
            texts[f"{HF}/config.json"] = json_bytes(changed or config)
        return texts

    def _begin(self, job: _Job) -> None:
        if self.peers.rank == 0:
            job.target.parent.mkdir(parents=True, exist_ok=True)
            directory.settle(job.target)
            directory.check_replaceable(job.target)
            check_room(job.target, job.layout.total)
            (job.partial / directory.DCP).mkdir(parents=True)
            (job.partial / directory.RNG).mkdir()

    def _stage(self, job: _Job) -> None:
        """Copy what this rank writes into host memory; the memory is kept for the next save."""
        if self._beside is not None:
            self._beside.stage(job.layout, job.data_of)
            return
        cuda = False
        for key, _, _ in job.layout.mine:
            region = job.data_of(key)
            held = self._staged.get(key)
            if held is None:
                pin = region.device.type == "cuda"
                held = self._staged[key] = torch.empty(region.shape, dtype=region.dtype, pin_memory=pin)
            held.copy_(region, non_blocking=True)
            cuda = cuda or region.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
        job.data_of = self._staged.__getitem__

    # ---- writing

    def _together(self, job: _Job, what: str, action: Callable[[], Any]) -> list[Any]:
        def act() -> Any:
            with explained(job.target, job.layout.total):
                return action()

        try:
            return self.peers.together(f"{what} the save of {job.target}", act)
        except BaseException:
            if self.peers.rank == 0:
                shutil.rmtree(job.partial, ignore_errors=True)  # room for what comes next; it could not be finished
            raise

    def _behind(self, job: _Job) -> None:
        start = time.perf_counter()
        try:
            self._finish(job)
        except BaseException as error:
            self._error = error
        self.seconds["behind"] = time.perf_counter() - start

    def _finish(self, job: _Job) -> None:
        """Write this rank's files; rank 0 then adds the small ones, the marker last, and lets the state appear."""

        def act() -> dict[str, tuple[int, str]]:
            files = {}
            if job.layout.mine:
                name = f"{directory.DCP}/{shards.file_of(self.peers.rank)}"
                path, beside = job.partial / name, self._beside
                files[name] = beside.write(path) if beside else shards.write(path, job.layout, job.data_of)
            name = f"{directory.RNG}/rank-{self.peers.rank:05d}.json"
            files[name] = directory.write_file(job.partial / name, job.rng)
            return files

        written = self._together(job, "Writing", act)
        files = {name: entry for found in written for name, entry in found.items()}
        self._together(job, "Finishing", lambda: self._complete(job, files))

    def _complete(self, job: _Job, files: dict[str, tuple[int, str]]) -> None:
        if self.peers.rank != 0:
            return
        texts = job.texts | self._index(job)
        for name, data in texts.items():
            files[name] = directory.write_file(job.partial / name, data)
        root = job.target.parent
        serial = max((marker.serial for _, marker in directory.complete(root)), default=0) + 1
        directory.sync_tree(job.partial)
        marker = directory.encode(Marker(job.step, serial, files))
        directory.write_file(job.partial / directory.MARKER, marker)
        directory.publish(job.partial, job.target)
        if job.keep is not None:
            directory.prune(root, job.keep)

    def _index(self, job: _Job) -> dict[str, bytes]:
        """What tells where tensors are: written when they are."""
        return {f"{directory.DCP}/.metadata": job.layout.index()}

    # ---- waiting

    def poll(self) -> None:
        """Called between steps, by all ranks: nothing to be done but to hear of a failure early."""
        self.check()

    def check(self) -> None:
        """Raise what went wrong behind training's back, once. Does not wait."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Until the last save has ended; raises what went wrong in it."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        self.check()

    def close(self) -> None:
        """Wait, and let go of the staged copies and the group."""
        try:
            self.wait()
        finally:
            self._staged.clear()
            if self._beside is not None:
                self._beside.close()
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
            self._group = None
