"""One rank of `areal-convert train`: from a RunConfig to a trained model.

Everything that can be wrong is looked at before it costs anything: first the configuration, then the data, then the
process groups and the model.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..converter.errors import ConfigError, ConvertError
from .api.base import TrainEngine
from .api.checks import check
from .api.configs import ParallelStrategy
from .api.metas import FinetuneSpec, SaveLoadMeta
from .api.reading import dump_config, to_dict
from .api.run import DataConfig, LossConfig, RunConfig
from .data.batches import Batch
from .data.chat import Encoder
from .data.loader import Loader
from .data.policy import Completion, needed
from .data.sft import SFTDataset
from .flops import Architecture, peak_tflops
from .loop import Evaluation, Outcome, Trainer
from .losses import PolicyLoss, sft_loss, sft_weight
from .metrics import Meter, Reduce, alone
from .model_files import model_config, tokenizer_of
from .profiling import ProfilerWindow
from .run_lock import only_run_in
from .states import RunStates
from .tracking import Console, JsonLines, TensorBoard, Trackers, WeightsAndBiases
from .watchdog import Watchdog, shared_store

__all__ = ["Prepared", "check_engine", "make_engine", "prepare", "train"]


ENGINES = {
    "fsdp": (".fsdp.engine", "FSDPEngine"),
    "megatron": (".megatron.engine", "MegatronEngine"),
    "archon": (".archon.engine", "ArchonEngine"),
}
"""Backend → where its engine is, from this package."""


def make_engine(backend: str, config: RunConfig) -> TrainEngine:
    """The engine of a backend. Raises ConfigError for one that there is not."""
    if backend not in ENGINES:
        raise ConfigError(f"There is no engine for {backend!r} yet.", hint=f"Known: {', '.join(ENGINES)}.")
    module, name = ENGINES[backend]
    return getattr(import_module(module, __package__), name)(config.engine)


# ------------------------------------------------------------------------------------------------ before any model


def check_engine(config: RunConfig, backend: str, ranks: int) -> ParallelStrategy:
    """The sizes of the run on so many ranks. Raises ConfigError with all that the engine cannot run."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return check(config.engine, model_config(config.engine.path), ranks, backend, device=device)


@dataclass(frozen=True)
class Prepared:
    """What a run is made of, before there is a model: data, tokenizer, and the number of steps."""

    config: RunConfig
    model: dict[str, Any]
    tokenizer: Any
    data: SFTDataset
    eval_data: SFTDataset | None
    total: int
    notes: list[str] = field(default_factory=list)


def prepare(config: RunConfig) -> Prepared:
    """Read and tokenise the data. Raises ConfigError and SourceError with all that is wrong."""
    config.check()
    model = model_config(config.engine.path)
    tokenizer = tokenizer_of(config.tokenizer or config.engine.path)
    data = _dataset(config.data, tokenizer, model, config)
    other = _dataset(config.eval_data, tokenizer, model, config) if config.eval_data else None
    notes = []
    for name, found in (("data", data), ("eval_data", other)):
        if found is not None:
            counts = ", ".join(f"{count:,} {what}" for what, count in found.counts.items() if count)
            notes.append(f"{name}: {counts}")
    return Prepared(config, model, tokenizer, data, other, _total_steps(config, len(data)), notes)


def _dataset(config: DataConfig, tokenizer: Any, model: Mapping[str, Any], run: RunConfig) -> SFTDataset:
    loss = run.loss
    encoder = Encoder(tokenizer, config.as_chat, config.add_eos, config.train_on_prompt)
    return SFTDataset.make(
        config.path,
        encoder,
        split=config.split,
        max_length=config.max_length or run.engine.mb_spec.max_tokens_per_mb,  # longer ones would fit no micro-batch
        too_long=config.too_long,
        vocab_size=model.get("vocab_size"),
        limit=config.limit,
        policy=loss.kind != "sft",
        needed=needed(loss),
    )


def _total_steps(config: RunConfig, samples: int) -> int:
    """`epochs` or `max_steps`, whichever is reached first; one epoch when neither is given."""
    per_epoch = samples // config.data.batch_size
    if per_epoch < 1:
        raise ConfigError(
            f"data.batch_size is {config.data.batch_size}, but the data has only {samples} samples: no step to take."
        )
    epochs = config.epochs or (1 if config.max_steps is None else None)
    return min(n for n in (epochs and epochs * per_epoch, config.max_steps) if n is not None)


# ------------------------------------------------------------------------------------------------ one rank


def train(config: RunConfig, backend: str, until: int | None = None) -> Outcome:
    """Run this rank from beginning to end; all ranks of the job call it.

    Raises what is wrong with the configuration, the data or the model, Diverged, and RankError when another rank fails.
    """
    prepared = prepare(config)
    config.engine.seed = config.seed
    engine = make_engine(backend, config)
    engine.create_process_group()
    try:
        lock = only_run_in(Path(config.dir)) if _rank()[0] == 0 else contextlib.nullcontext()
        with _watchdog(config) as watchdog, lock:
            return _train(prepared, engine, watchdog, until)
    finally:
        engine.destroy()


def _train(prepared: Prepared, engine: TrainEngine, watchdog: Watchdog, until: int | None) -> Outcome:
    config, total = prepared.config, prepared.total
    size = config.data.batch_size
    # The schedule ends with the run: it is told the steps that will be taken, not those of the epochs.
    engine.initialize(None, FinetuneSpec(1, total * size, size))
    _seed(config.seed + engine.data_parallel_rank)
    rank, ranks = _rank()
    folder = Path(config.dir)
    meter = _meter(prepared, engine, ranks)
    trackers = _trackers(prepared, folder, rank)
    states = RunStates(engine, config, folder / "checkpoints")
    trainer = Trainer(
        engine,
        config,
        _loader(prepared, engine),
        total,
        *_loss(config.loss),
        evaluation=_evaluation(prepared, engine),
        states=states,
        trackers=trackers,
        meter=meter,
        profiler=_profiler(config, engine, folder, rank),
        watchdog=watchdog,
        prepare=Completion(engine, config.loss) if config.loss.kind != "sft" else None,
        reduce=reducer(engine),
    )
    with contextlib.closing(trackers), contextlib.closing(states):
        outcome = trainer.run(until)
        if outcome.step >= total and config.save.hf_at_end:
            _export(prepared, engine, folder, trackers)
    return outcome


def _rank() -> tuple[int, int]:
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _watchdog(config: RunConfig) -> Watchdog:
    rank, ranks = _rank()
    store = shared_store() if ranks > 1 else None
    return Watchdog(store, rank, ranks, silent=min(60.0, config.timeout))


def _seed(seed: int) -> None:
    """Python's and numpy's generators; torch's are the engine's, which knows which ranks must draw the same."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)


def _loader(prepared: Prepared, engine: TrainEngine) -> Loader:
    config = prepared.config
    return Loader(
        prepared.data,
        config.data.batch_size,
        seed=config.seed if config.data.seed is None else config.data.seed,
        shuffle=config.data.shuffle,
        rank=engine.data_parallel_rank,
        ranks=engine.data_parallel_world_size,
        group=config.loss.group_size if config.loss.kind == "grpo" else 1,
    )


def _loss(config: LossConfig) -> tuple[Any, Any]:
    if config.kind == "sft":
        return sft_loss, sft_weight
    names = (
        "eps_clip", "eps_clip_higher", "dual_clip", "behaviour_cap", "kl_coef", "kl_estimator", "entropy_coef",
        "normalization", "ratio_level",
    )  # fmt: skip
    loss = PolicyLoss(**{name: getattr(config, name) for name in names})
    return loss, loss.weight


def _evaluation(prepared: Prepared, engine: TrainEngine) -> Evaluation | None:
    data, config = prepared.eval_data, prepared.config
    if data is None or config.eval_data is None:
        return None
    rank, ranks, size = engine.data_parallel_rank, engine.data_parallel_world_size, config.eval_data.batch_size
    complete = Completion(engine, config.loss) if config.loss.kind != "sft" else None

    def batches() -> Iterator[Batch]:
        starts = range(0, len(data), size)[: config.eval.max_batches]
        for start in starts:
            mine = range(start, min(start + size, len(data)))[rank::ranks]
            batch = data.batch(mine or [0])
            if not mine:  # fewer samples than ranks: this one takes part with nothing to count
                batch["loss_mask"] = batch["loss_mask"] & False
            yield complete(batch) if complete else batch

    return Evaluation(batches)


# ------------------------------------------------------------------------------------------------ numbers


def reducer(engine: TrainEngine) -> Reduce:
    """Numbers of a rank → of the run: sums over data-parallel ranks (of ranks with the same data one counts), the
    largest over all."""
    import torch
    import torch.distributed as dist

    if _rank()[1] == 1:
        return alone

    def reduce(values: Sequence[float], how: str) -> list[float]:
        counts = how == "max" or engine.is_data_parallel_head()
        own = torch.tensor([v if counts else 0.0 for v in values], dtype=torch.float64)
        dist.all_reduce(own, dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM, group=engine.cpu_group)
        return own.tolist()

    return reduce


def _meter(prepared: Prepared, engine: TrainEngine, ranks: int) -> Meter:
    """What cannot be counted or is not known is left out of the log; the notes say why."""
    config = prepared.config
    try:
        architecture = Architecture.of(prepared.model)
    except ConfigError as error:
        architecture = None
        prepared.notes.append(f"no FLOPs, no MFU: {error}")
    peak = config.log.peak_tflops or _peak(prepared.notes)
    recompute, frozen = config.engine.gradient_checkpointing, config.engine.use_lora
    return Meter(architecture, peak, ranks, recompute, reducer(engine), frozen=frozen)


def _peak(notes: list[str]) -> float | None:
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = peak_tflops(name)
    if peak is None:
        notes.append(f"no MFU: the peak of {name or 'a CPU'} is not known (--peak-tflops, log.peak_tflops)")
    return peak


# ------------------------------------------------------------------------------------------------ what is written


def _trackers(prepared: Prepared, folder: Path, rank: int) -> Trackers:
    """On rank 0: the run's directory with its configuration and environment, and where numbers go."""
    config = prepared.config
    if rank != 0:
        return Trackers()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        (folder / "env.json").write_text(json.dumps(environment(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConvertError(f"{error.filename or folder}: cannot be written: {error.strerror}.") from error
    log, made = config.log, Trackers()
    if log.jsonl:
        made.trackers.append(JsonLines(folder / "metrics.jsonl"))
    if log.console:
        made.trackers.append(Console(prepared.total))
    if log.tensorboard:
        made.trackers.append(TensorBoard(folder / "tensorboard"))
    if log.wandb:
        made.trackers.append(WeightsAndBiases(log.wandb_project, folder.name, folder, to_dict(config)))
    for note in prepared.notes:
        made.say(note)
    return made


def environment() -> dict[str, Any]:
    """Versions, devices and the command: what one wants to know of a run a year later."""
    import torch

    def of(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    names = ("areal-convert", "torch", "transformers", "safetensors", "tokenizers", "datasets", "peft", "megatron-core")
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: of(name) for name in names},
        "cuda": torch.version.cuda,
        "devices": devices or [platform.processor() or platform.machine()],
        "cores": os.cpu_count(),
        "ranks": _rank()[1],
        "command": sys.argv,
    }


def _profiler(config: RunConfig, engine: TrainEngine, folder: Path, rank: int) -> ProfilerWindow | None:
    """`profile.start` counts from 0, as positions do; the window from 1, as the log does."""
    wanted, path = config.profile, folder / "profile"
    if wanted.start is None:
        return None
    pipeline = None
    if getattr(engine, "pipeline", None) is not None:
        from .archon.timing import PipelineWindow

        pipeline = PipelineWindow(engine, path / "pipeline.json")
    return ProfilerWindow(path, wanted.start + 1, wanted.start + wanted.steps, rank, wanted.memory, pipeline)


def _export(prepared: Prepared, engine: TrainEngine, folder: Path, trackers: Trackers) -> None:
    """The trained model; of a run with adapters these too, by themselves."""
    config, path = prepared.config.engine, folder / "model"
    meta = SaveLoadMeta(str(path), "hf", tokenizer=prepared.tokenizer, base_model_path=config.path)
    if config.use_lora:
        engine.save(replace(meta, path=str(folder / "adapter")))
        trackers.say(f"adapter: {folder / 'adapter'}")
        meta.merge_adapters = True
    engine.save(meta)
    trackers.say(f"trained model: {path}")
