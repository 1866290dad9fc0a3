"""The training states of a run: `engines.state` as the loop wants it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..converter.errors import ConfigError
from .api.reading import dump_config
from .api.run import RunConfig
from .state.directory import latest
from .state.entries import TrainState
from .state.loading import load
from .state.saving import Progress, Saver

if TYPE_CHECKING:
    from .api.base import TrainEngine
    from .api.metas import SaveLoadMeta

__all__ = ["RunStates", "load_state", "save_state", "state_of"]


def state_of(engine: Any) -> TrainState:
    """What of an engine is saved: what its `train_state()` says, else its model or its adapters, and the optimizer.

    Raises ConfigError when it has no base checkpoint to take names and config from.
    """
    if (own := engine.train_state()) is not None:
        return own
    if engine.checkpoint is None:
        raise ConfigError(
            "A model that was not loaded from a checkpoint has no base for its training states.",
            hint="Export it first (SaveLoadMeta(…, 'hf')), and train that; or save.at_end=false, save.every=0.",
        )
    sizes = engine.strategy
    names = ("dp_size", "dp_replicate_size", "cp_size", "tp_size", "pp_size", "ep_size")
    lora = getattr(engine, "lora", None)  # then nothing else is trained: the base model stays where it is
    return TrainState(
        parts=[engine.model] if lora is None else [],
        extra={} if lora is None else lora.adapters(),
        naming=None if lora is None else "hf",
        base=engine.checkpoint,
        optimizers=[engine.optimizer] if engine.optimizer is not None else [],
        topology={name: getattr(sizes, name) for name in names},
        stream=engine.data_parallel_rank,
        group=engine.cpu_group,
    )


def _tools(engine: TrainEngine) -> tuple[Any, type[Saver], Any]:
    """What describes, saves and loads the state of an engine: Megatron-Core has a format of its own."""
    if engine.backend != "megatron":
        return state_of, Saver, load
    from .megatron import checkpoint

    return checkpoint.state_of, checkpoint.MegatronSaver, checkpoint.load_state


_WRITERS = {"archon": "process"}
"""What writes states behind training's back where nothing is configured and it is not a thread."""

_OF_THE_CALL = ("dir", "resume", "log", "save", "profile", "timeout")
"""Fields that say nothing about what is computed."""


def _changes(saved: str, now: str) -> list[str]:
    """What of the configuration is not as it was when the state was saved, a note a field."""
    if not saved:
        return []
    from omegaconf import OmegaConf

    before, after = (_flat(OmegaConf.to_container(OmegaConf.create(text))) for text in (saved, now))
    names = [n for n in {**before, **after} if n.split(".")[0] not in _OF_THE_CALL]
    return [f"{n} was {before.get(n)}, is {after.get(n)}" for n in names if before.get(n) != after.get(n)]


def _flat(tree: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(tree, Mapping):
        return {name: tree}
    return {key: v for k, sub in tree.items() for key, v in _flat(sub, f"{name}.{k}" if name else str(k)).items()}


def save_state(engine: Any, meta: SaveLoadMeta) -> None:
    """`engine.save(meta)` of a training state: into this very directory, complete when it returns."""
    saver = Saver()
    progress = Progress(version=engine.get_version(), schedule={"step": engine.lr_step}, seed=engine.config.seed)
    try:
        saver.save(state_of(engine), progress, meta.path, optimizer=meta.with_optim)
    finally:
        saver.close()


def load_state(engine: Any, meta: SaveLoadMeta) -> None:
    """`engine.load(meta)` of a training state: on any topology."""
    restored = load(state_of(engine), meta.path, optimizer=meta.with_optim, rng=meta.with_optim)
    if meta.with_optim:
        engine.lr_step = int(restored.progress.schedule["step"])
    engine.set_version(restored.progress.version)


class RunStates:
    """Saves to `root/step-000012` and resumes as `resume` says: `auto`, `never`, or the path of a state or run."""

    def __init__(self, engine: TrainEngine, config: RunConfig, root: Path) -> None:
        self.engine, self.config, self.root = engine, config, root
        save = config.save
        timeout = timedelta(seconds=config.timeout)
        self._describe, make_saver, self._load = _tools(engine)
        asynchronous = save.async_save or (engine.backend == "megatron" and config.engine.megatron.async_save)
        if engine.backend == "megatron" and save.async_in == "thread":
            raise ConfigError("save.async_in: Megatron-Core writes from processes.", hint="save.async_in=null")
        process = engine.backend != "megatron" and (save.async_in or _WRITERS.get(engine.backend)) == "process"
        self.saver = make_saver(
            asynchronous=asynchronous, process=process, keep_latest_k=save.keep_latest_k or None, timeout=timeout
        )
        self.notes: list[str] = []

    def save(self, step: int, trainer: Mapping[str, Any]) -> Path:
        """The state of this step; complete when it returns, or after `wait` when saving is asynchronous."""
        engine: Any = self.engine
        progress = Progress(
            step=step,
            version=engine.get_version(),
            schedule={"step": engine.lr_step},
            data=trainer["data"],
            counters={name: value for name, value in trainer.items() if name != "data"},
            config=dump_config(self.config),
            seed=self.config.seed,
        )
        return self.saver.save_step(self._describe(engine), progress, self.root)

    def load(self) -> Mapping[str, Any] | None:
        """Bring the engine back; what the trainer gave to `save`, or None when there is nothing to resume."""
        path = latest(self.root) if self.config.resume == "auto" else Path(self.config.resume)
        if path is None or self.config.resume == "never":
            return None
        engine: Any = self.engine
        restored = self._load(self._describe(engine), path)
        progress = restored.progress
        if engine.backend != "megatron" or engine.config.megatron.use_checkpoint_opt_param_scheduler:
            engine.lr_step = int(progress.schedule["step"])
        engine.set_version(progress.version)
        # The learning rate is set before every step, by the schedule that is configured now.
        notes = [note for note in restored.notes if ": lr is " not in note]
        self.notes = notes + _changes(progress.config, dump_config(self.config))
        return {**progress.counters, "data": progress.data}

    def poll(self) -> None:
        """Between steps: complete a save that has been written meanwhile, hear of one that failed."""
        self.saver.poll()

    def wait(self) -> None:
        self.saver.wait()

    def close(self) -> None:
        """Wait for what is being written, and let go of the saver's group."""
        self.saver.close()
