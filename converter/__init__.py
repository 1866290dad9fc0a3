"""Convert, compare and load model checkpoints of any format.

    from areal_convert.converter import Mesh, convert, open_checkpoint

    convert("model/", "out/", "torch_dist", Mesh(tp=4, pp=2))
    open_checkpoint("out/").load_into(module)

Names are imported when they are first used: importing this package costs next to nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .convert import Planned, Result, convert, plan
    from .diffing import Difference, diff
    from .errors import (
        ConfigError,
        ConvertError,
        CorruptFile,
        InDoubt,
        LeaseHeld,
        MeshError,
        NoAccess,
        NotACheckpoint,
        PlanError,
        Problem,
        RankError,
        RemoteChanged,
        RemoteError,
        ServerRefused,
        ServerUnreachable,
        SourceError,
        SyncAborted,
        SyncError,
        TargetError,
        UnknownFamily,
        Unreachable,
        UnsafePickle,
        VerifyError,
    )
    from .execute import Limits
    from .explaining import Explanation, explain
    from .hub import Pulled, Pushed, pull, push
    from .inspecting import Inspection, inspect
    from .live import Exported, export_hf
    from .loading import Loaded
    from .mesh import Mesh
    from .opening import open_checkpoint
    from .sync.hub import WeightSync
    from .target import Options
    from .verify import Comparison, verify

__all__ = [
    "Checkpoint",
    "Comparison",
    "ConfigError",
    "ConvertError",
    "CorruptFile",
    "Difference",
    "Explanation",
    "Exported",
    "InDoubt",
    "Inspection",
    "LeaseHeld",
    "Limits",
    "Loaded",
    "Mesh",
    "MeshError",
    "NoAccess",
    "NotACheckpoint",
    "Options",
    "PlanError",
    "Planned",
    "Problem",
    "Pulled",
    "Pushed",
    "RankError",
    "RemoteChanged",
    "RemoteError",
    "Result",
    "ServerRefused",
    "ServerUnreachable",
    "SourceError",
    "SyncAborted",
    "SyncError",
    "TargetError",
    "UnknownFamily",
    "Unreachable",
    "UnsafePickle",
    "VerifyError",
    "WeightSync",
    "convert",
    "diff",
    "explain",
    "export_hf",
    "inspect",
    "open_checkpoint",
    "plan",
    "pull",
    "push",
    "verify",
]

_HOMES = {
    "checkpoint": ("Checkpoint",),
    "convert": ("Planned", "Result", "convert", "plan"),
    "diffing": ("Difference", "diff"),
    "execute": ("Limits",),
    "explaining": ("Explanation", "explain"),
    "hub": ("Pulled", "Pushed", "pull", "push"),
    "inspecting": ("Inspection", "inspect"),
    "live": ("Exported", "export_hf"),
    "loading": ("Loaded",),
    "mesh": ("Mesh",),
    "opening": ("open_checkpoint",),
    "sync.hub": ("WeightSync",),
    "target": ("Options",),
    "verify": ("Comparison", "verify"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """PEP 562: import a public name from its module the first time that somebody asks for it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME.get(name, 'errors')}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """The import system binds every submodule to its package: importing `convert`, `plan` or `verify` would put the
    module in the place of the function of that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in __all__):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
