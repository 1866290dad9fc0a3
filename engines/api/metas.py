"""What is handed to an engine's methods: where to save, how to send weights, how long the training is."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal

from ...converter.errors import ConfigError, Problem

__all__ = ["DeviceStats", "FinetuneSpec", "ParamSpec", "SaveLoadMeta", "StepInfo", "WeightUpdateMeta"]

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int64": 8, "int32": 4, "int16": 2}


@dataclass(slots=True)
class SaveLoadMeta:
    """Where and in which form an engine saves or loads.

    `hf` is a Hugging Face directory (weights only), `dcp` the training state, with the optimizer's when `with_optim`.
    Of an engine with adapters, `hf` is the adapter in PEFT's form, or with `merge_adapters` the whole model with the
    adapters added to its weights.
    """

    path: str
    weight_format: Literal["hf", "dcp"] = "hf"
    with_optim: bool = False
    tokenizer: Any | None = None
    processor: Any | None = None
    base_model_path: str | None = None
    naive_distributed: bool = False
    merge_adapters: bool = False

    def __post_init__(self) -> None:
        self.path = str(self.path)
        problems = []
        if self.weight_format not in ("hf", "dcp"):
            problems.append(Problem("weight_format", f"{self.weight_format!r}, expected hf or dcp"))
        if self.weight_format == "hf" and self.with_optim:
            what = "a Hugging Face directory has no place for optimizer state"
            problems.append(Problem("with_optim", what, "weight_format='dcp' saves both"))
        if problems:
            raise ConfigError("SaveLoadMeta has mistakes.", problems)


@dataclass(slots=True)
class FinetuneSpec:
    """How long the training is; the learning rate's schedule needs it. Incomplete batches are dropped."""

    total_train_epochs: int
    dataset_size: int
    train_batch_size: int

    def __post_init__(self) -> None:
        least = {"total_train_epochs": 0, "dataset_size": 0, "train_batch_size": 1}
        problems = [
            Problem(name, f"{getattr(self, name)} is out of range, expected at least {limit}")
            for name, limit in least.items()
            if getattr(self, name) < limit
        ]
        if problems:
            raise ConfigError("FinetuneSpec has mistakes.", problems)

    @property
    def steps_per_epoch(self) -> int:
        return self.dataset_size // self.train_batch_size

    @property
    def total_train_steps(self) -> int:
        return self.total_train_epochs * self.steps_per_epoch


@dataclass(frozen=True, slots=True)
class StepInfo:
    """Where the training stands, all counted from 0."""

    epoch: int
    epoch_step: int
    global_step: int
    steps_per_epoch: int

    def next(self) -> StepInfo:
        """The step after this one."""
        last = self.epoch_step == self.steps_per_epoch - 1
        return StepInfo(
            epoch=self.epoch + last,
            epoch_step=0 if last else self.epoch_step + 1,
            global_step=self.global_step + 1,
            steps_per_epoch=self.steps_per_epoch,
        )


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A tensor as it travels: name, shape, and the dtype's name in torch (`bfloat16`)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """In bytes."""
        return _BYTES.get(self.dtype, 1) * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class DeviceStats:
    """Memory of one device, in bytes: torch's own (allocated, reserved, peak), everybody's (used), all there is.

    On the CPU the first four are this process's."""

    device: str
    allocated: int
    reserved: int
    peak: int
    used: int
    total: int


@dataclass(slots=True)
class WeightUpdateMeta:
    """How new weights reach the inference servers."""

    type: Literal["disk", "xccl", "awex"]
    path: str | None = None
    gen_allocation: Any | None = None
    nccl_master_address: str | None = None
    nccl_master_port: int | None = None
    nccl_group_name: str | None = None
    weight_chunked_mem_mb: int = 1024
    use_lora: bool = False
    lora_name: str = ""
    lora_int_id: int = 0
    base_model_name: str = ""
    peft_config: dict[str, Any] = field(default_factory=dict)
    lora_keep_versions: int = 0
    clear_checkpoint_after_load: bool = True
    version: int | None = None

    def with_version(self, version: int) -> WeightUpdateMeta:
        """A copy for this version; the directory's last part becomes `weight_update_v{version}`."""
        if version < 0:
            raise ConfigError(
                "WeightUpdateMeta", [Problem("version", f"{version} is out of range, expected at least 0")]
            )
        path = self.path and str(PurePosixPath(self.path).parent / f"weight_update_v{version}")
        return dataclasses.replace(self, version=version, path=path)

    @classmethod
    def from_disk(
        cls, experiment_name: str, trial_name: str, file_root: str, name: str = "default", **rest: Any
    ) -> WeightUpdateMeta:
        """Through a directory that trainer and servers see: `{file_root}/checkpoints/{experiment}/{trial}/{name}`."""
        path = PurePosixPath(file_root, "checkpoints", experiment_name, trial_name, name, "weight_update")
        return cls(type="disk", path=str(path), **{"lora_int_id": 1, **rest})

    @classmethod
    def from_fsdp_xccl(cls, gen_allocation: Any, weight_chunked_mem_mb: int = 1024, **rest: Any) -> WeightUpdateMeta:
        """By collectives, from an FSDP or Archon engine."""
        made = {"gen_allocation": gen_allocation, "weight_chunked_mem_mb": weight_chunked_mem_mb, "lora_int_id": 1}
        return cls(type="xccl", **{**made, **rest})

    @classmethod
    def from_megatron_xccl(
        cls, gen_allocation: Any, weight_chunked_mem_mb: int = 1024, **rest: Any
    ) -> WeightUpdateMeta:
        """By collectives, from a Megatron engine."""
        return cls.from_fsdp_xccl(gen_allocation, weight_chunked_mem_mb, **rest)

    @classmethod
    def from_awex(cls, meta_server_addr: str | None = None, **rest: Any) -> WeightUpdateMeta:
        """Through an Awex meta server."""
        return cls(type="awex", nccl_master_address=meta_server_addr, **{"lora_int_id": 1, **rest})
