"""New weights for running servers: versioned, verified, all or nothing.

    from areal_convert.converter.sync import WeightSync

    with WeightSync(module, ["http://127.0.0.1:8000"], base="model/") as sync:
        print(sync.push().version)

Names are imported when they are first used: importing this package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .hub import WeightSync
    from .receiver import Receiver
    from .report import Outcome, PushReport

__all__ = ["Outcome", "PushReport", "Receiver", "WeightSync"]

_HOME = {"Outcome": "report", "PushReport": "report", "Receiver": "receiver", "WeightSync": "hub"}


def __getattr__(name: str) -> Any:
    """PEP 562: import a public name from its module the first time that somebody asks for it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
