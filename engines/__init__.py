"""Train models on the hub's checkpoints: one API, three backends.

    from areal_convert.engines import FSDPEngine, ParallelStrategy, TrainEngineConfig

Names are imported when they are first used: importing this package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api.allocation import ModelAllocation, parse_allocations
    from .api.base import TrainEngine
    from .api.checks import check
    from .api.configs import (
        ArchonEngineConfig,
        ArchonFP8Config,
        DistributedDataParallelConfig,
        FP8EngineConfig,
        FSDPEngineConfig,
        FSDPWrapPolicy,
        MegatronEngineConfig,
        MicroBatchSpec,
        OptimizerConfig,
        ParallelStrategy,
        TrainEngineConfig,
    )
    from .api.metas import DeviceStats, FinetuneSpec, ParamSpec, SaveLoadMeta, StepInfo, WeightUpdateMeta
    from .api.reading import dump_config, read_config
    from .api.run import RunConfig
    from .archon.dims import ArchonParallelDims
    from .archon.engine import ArchonEngine
    from .fsdp.engine import FSDPEngine
    from .megatron.engine import MegatronEngine

_HOMES = {
    "api.allocation": ("ModelAllocation", "parse_allocations"),
    "api.base": ("TrainEngine",),
    "api.checks": ("check",),
    "api.configs": (
        "ArchonEngineConfig",
        "ArchonFP8Config",
        "DistributedDataParallelConfig",
        "FP8EngineConfig",
        "FSDPEngineConfig",
        "FSDPWrapPolicy",
        "MegatronEngineConfig",
        "MicroBatchSpec",
        "OptimizerConfig",
        "ParallelStrategy",
        "TrainEngineConfig",
    ),
    "api.metas": ("DeviceStats", "FinetuneSpec", "ParamSpec", "SaveLoadMeta", "StepInfo", "WeightUpdateMeta"),
    "api.reading": ("dump_config", "read_config"),
    "api.run": ("RunConfig",),
    "archon.dims": ("ArchonParallelDims",),
    "archon.engine": ("ArchonEngine",),
    "fsdp.engine": ("FSDPEngine",),
    "megatron.engine": ("MegatronEngine",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "ArchonEngine",
    "ArchonEngineConfig",
    "ArchonFP8Config",
    "ArchonParallelDims",
    "DeviceStats",
    "DistributedDataParallelConfig",
    "FP8EngineConfig",
    "FSDPEngine",
    "FSDPEngineConfig",
    "FSDPWrapPolicy",
    "FinetuneSpec",
    "MegatronEngine",
    "MegatronEngineConfig",
    "MicroBatchSpec",
    "ModelAllocation",
    "OptimizerConfig",
    "ParallelStrategy",
    "ParamSpec",
    "RunConfig",
    "SaveLoadMeta",
    "StepInfo",
    "TrainEngine",
    "TrainEngineConfig",
    "WeightUpdateMeta",
    "check",
    "dump_config",
    "parse_allocations",
    "read_config",
]


def __getattr__(name: str) -> Any:
    """PEP 562: import a public name from its module the first time that somebody asks for it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
