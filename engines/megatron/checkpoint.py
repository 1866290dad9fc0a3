"""Training states of Megatron-Core: its own `torch_dist`, written by itself, inside a state directory like all others.

    step-000012/
      iter_0000012/                       model and optimizer, fully reshardable: any TP, PP, EP, DP loads it
      latest_checkpointed_iteration.txt   so that Megatron-LM and `areal-convert` find it, given `step-000012`
      rng/ hf/ trainer.json config.yaml COMPLETE   as `engines.state` has them

`asynchronous` leaves the writing to processes that Megatron-Core forks. A state becomes complete when all ranks ask
for it together: in `poll`, `wait`, the next `save`, or `close`.
"""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...converter.errors import ConvertError, PlanError, Problems, SourceError, TargetError
from ...converter.execute import Limits
from ...converter.formats.dcpfile import read as read_index
from ..megatron_cpu import cpu_megatron
from ..ranks import peers_of
from ..state import directory
from ..state.entries import TrainState
from ..state.extras import capture_rng
from ..state.loading import Restored, _Loader
from ..state.saving import Progress, Saver, _Job
from ..state.shards import Layout
from . import groups
from .sharded import (
    ADAPTERS,
    OPTIMIZER,
    MegatronState,
    chunk_keys,
    content_metadata,
    copied,
    counted,
    counts,
    filled,
    optimizer_of,
    part_steps,
    replicas_group,
    rng_tracker,
    sharded_state,
    state_of,
)

if TYPE_CHECKING:
    from ..api.metas import SaveLoadMeta

__all__ = ["MegatronSaver", "load", "load_state", "save", "state_of"]

TRACKER = "latest_checkpointed_iteration.txt"
TORCH_DIST = ("torch_dist", 1)
_HERE = "optimizer of this rank"


def save(engine: Any, meta: SaveLoadMeta) -> None:
    """`engine.save(meta)`: the training state into this very directory, complete when it returns."""
    progress = Progress(version=engine.get_version(), schedule={"step": engine.lr_step}, seed=engine.config.seed)
    saver = MegatronSaver()
    try:
        saver.save(state_of(engine), progress, meta.path, optimizer=meta.with_optim)
    finally:
        saver.close()


def load(engine: Any, meta: SaveLoadMeta) -> None:
    """`engine.load(meta)`: on any topology."""
    restored = load_state(state_of(engine), meta.path, optimizer=meta.with_optim, rng=meta.with_optim)
    if meta.with_optim and engine.config.megatron.use_checkpoint_opt_param_scheduler:
        engine.lr_step = int(restored.progress.schedule["step"])
    engine.set_version(restored.progress.version)


# ------------------------------------------------------------------------------------------------ saving


class MegatronSaver(Saver):
    """As `Saver`; the tensors are Megatron-Core's business."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._queue: Any = None
        self._pending: _Job | None = None

    def _save(self, state: TrainState, progress: Progress, target: Path, keep: int | None, *, optimizer: bool) -> None:
        assert isinstance(state, MegatronState)
        with cpu_megatron():
            self.wait()
            start = time.perf_counter()
            made: list[_Job] = []

            def describe() -> None:
                wanted = optimizer and state.optimizer is not None
                described = (
                    {"saved_by": "megatron-core", **optimizer_of(state), **counts(state.optimizer)} if wanted else None
                )
                rng = directory.json_bytes(capture_rng(state.rng), "the random states")
                texts = self._texts(state, progress, described)
                made.append(_Job(target, keep, Layout(), lambda key: torch.empty(0), rng, texts, progress.step))

            self.peers.together(f"Describing the state of step {progress.step}", describe)
            (job,) = made
            self._together(job, "Beginning", lambda: self._begin(job))
            request = self._write(state, job, optimizer)
            if request is None:
                self._finish(job)
                self.seconds = {"save": time.perf_counter() - start}
                return
            self._schedule(request)
            self._pending = job
            self.seconds = {"blocked": time.perf_counter() - start}

    def _begin(self, job: _Job) -> None:
        if self.peers.rank == 0:
            job.target.parent.mkdir(parents=True, exist_ok=True)
            directory.settle(job.target)
            directory.check_replaceable(job.target)
            (job.partial / iteration(job.step)).mkdir(parents=True)
            (job.partial / directory.RNG).mkdir()

    def _write(self, state: MegatronState, job: _Job, optimizer: bool) -> Any:
        """Collective. The request that is still to be scheduled, or None when all is written."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

        strategies: Any = importlib.import_module("megatron.core.dist_checkpointing.serialization")
        whole = strategies.get_default_save_sharded_strategy(*TORCH_DIST)
        shared = FullyParallelSaveStrategyWrapper(whole, replicas_group())
        try:
            return dist_checkpointing.save(
                sharded_state(state, loading=False, optimizer=optimizer),
                str(job.partial / iteration(job.step)),
                shared,
                async_sharded_save=self.asynchronous,
                content_metadata=content_metadata(state),
            )
        except ConvertError:
            raise
        except Exception as error:
            raise TargetError(f"{job.target}: Megatron-Core could not save: {_said(error)}") from error

    def _schedule(self, request: Any) -> None:
        if self._queue is None:
            from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

            self._queue = AsyncCallsQueue()
        self._queue.schedule_async_request(request)

    def _finish(self, job: _Job) -> None:
        """All of Megatron-Core's files are there: take their digests, the ranks sharing the work, and complete."""

        def act() -> dict[str, tuple[int, str]]:
            files = {}
            folder = job.partial / iteration(job.step)
            for path in sorted(path for path in folder.rglob("*") if path.is_file())[
                self.peers.rank :: self.peers.world
            ]:
                name = path.relative_to(job.partial).as_posix()
                files[name] = (path.stat().st_size, directory.digest_of(path))
            name = f"{directory.RNG}/rank-{self.peers.rank:05d}.json"
            files[name] = directory.write_file(job.partial / name, job.rng)
            return files

        written = self._together(job, "Writing", act)
        files = {name: entry for found in written for name, entry in found.items()}
        self._together(job, "Finishing", lambda: self._complete(job, files))

    def _index(self, job: _Job) -> dict[str, bytes]:
        return {TRACKER: str(job.step).encode()}

    def _finalize(self, *, blocking: bool) -> None:
        """Collective. Complete the save that was left to run, when it has come to its end."""
        job = self._pending
        if job is None:
            return
        with cpu_megatron():
            try:
                ended = self._queue.maybe_finalize_async_calls(blocking=blocking)
            except Exception as error:
                self._pending = self._queue = None
                raise TargetError(f"{job.target}: Megatron-Core could not save: {_said(error)}") from error
            if ended:
                self._pending = None
                self._finish(job)

    def poll(self) -> None:
        self._finalize(blocking=False)

    def wait(self) -> None:
        self._finalize(blocking=True)

    def close(self) -> None:
        try:
            super().close()
        finally:
            # The process that collects what its writers did would outlive this one, were it to end at once.
            writing: Any = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
            writing._results_queue = None


def iteration(step: int) -> str:
    """Where Megatron-LM keeps the checkpoint of an iteration."""
    return f"iter_{step:07d}"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300] if str(error).strip() else ''}"


# ------------------------------------------------------------------------------------------------ loading


def load_state(
    state: TrainState,
    path: str | Path,
    *,
    optimizer: bool = True,
    rng: bool = True,
    verify: bool = True,
    limits: Limits | None = None,
) -> Restored:
    """As `engines.state.loading.load`: checked as a whole first; the same ranks go on bit for bit.

    Raises NotACheckpoint, CorruptFile or SourceError for a directory that is no whole state of this model.
    """
    peers = peers_of(state.group)
    where = directory.resolve(path)
    loader = _MegatronLoader(state, where, peers, optimizer, rng, limits)
    with cpu_megatron():
        peers.together(f"Opening {where}", loader.open)
        peers.agree("The state to load", (loader.marker.step, loader.marker.serial))
        peers.together(f"Checking {where}", lambda: loader.check(verify))
        peers.together(f"Loading {where}", loader.read)
    return loader.restored


class _MegatronLoader(_Loader):
    state: MegatronState

    def check(self, verify: bool) -> None:
        mine = sorted(self.marker.files)[self.peers.rank :: self.peers.world] if verify else []
        directory.check_files(self.path, self.marker, mine)
        self.folder = self.path / iteration(self.marker.step)
        saved = self.trainer["optimizer"]
        if not self.folder.is_dir():
            raise SourceError(
                f"{self.path} is the training state of another engine: it has no {self.folder.name}.",
                hint="Convert its weights (areal-convert convert), and start from them.",
            )
        # torch unpickles it, and would run what it says: first a reader looks at it that runs nothing.
        read_index(self.folder)
        if not self._wanted():
            return
        if saved is None:
            raise SourceError(f"{self.path} was saved without an optimizer.", hint="Load it with optimizer=False.")
        problems = Problems()
        for name, here in optimizer_of(self.state).items():
            if saved.get(name) != here:
                problems.add(name, f"is {saved.get(name)!r} there, {here!r} here")
        problems.raise_as(PlanError, "The saved optimizer is another one:", "Use the optimizer settings of that run.")

    def read(self) -> None:
        from megatron.core import dist_checkpointing

        trained: Any = self.state.optimizer
        saved: Any = self.trainer["optimizer"]
        frame: Any = None
        wanted = self._wanted()
        asked = sharded_state(self.state, loading=True, optimizer=wanted)
        if wanted:
            # Megatron-Core has what is no tensor under this name, as the ranks that saved it had their optimizers; with
            # other experts on a rank there are others. Tensors are found by their own names.
            asked[_HERE] = asked.pop(OPTIMIZER)
            frame = copied(asked[_HERE])
        complete = wanted or saved is None
        try:
            loaded: Any = dist_checkpointing.load(
                asked, str(self.folder), strict="raise_all" if complete else "raise_unexpected"
            )
        except Exception as error:
            raise SourceError(f"{self.folder}: Megatron-Core could not load it: {_said(error)}") from error
        if self.state.lora is not None:
            self.state.lora.fill(loaded[ADAPTERS])
        else:
            for key, chunk in zip(chunk_keys(len(self.state.chunks)), self.state.chunks, strict=True):
                chunk.load_state_dict(loaded[key], strict=True)
        done = self.restored
        if wanted:
            trained.load_state_dict(counted(filled(frame, loaded[_HERE]), saved or {}))
            part_steps(trained)
            done.with_optimizer = True
        elif trained is not None:
            trained.reload_model_params()
        done.bytes_read = sum(t.numel() * t.element_size() for c in self.state.chunks for t in c.parameters())
        if self.rng:
            self._random()

    def _wanted(self) -> bool:
        """Whether the optimizer is loaded."""
        return self.optimizer and self.state.optimizer is not None

    def _random(self) -> None:
        super()._random()
        done = self.restored
        if done.same_topology:
            rng_tracker().set_states(done.rng)
            return
        # As at the beginning: the same on all replicas, another for every stage, tensor parallel ranks by the tracker.
        groups.seed((done.progress.seed * 1_000_003 + done.progress.step) % (1 << 31))
