"""What tensors are called and how they are cut: one table a family, found by the `model_type` of `config.json`.

A new family is one file, one line here and one golden.
"""

from __future__ import annotations

from importlib import import_module

from .schema import Table

FAMILIES: dict[str, str] = {
    "deepseek_v3": "deepseek_v3:TABLE",
    "llama": "llama:TABLE",
    "mistral": "mistral:TABLE",
    "mixtral": "mixtral:TABLE",
    "qwen2": "qwen2:TABLE",
    "qwen2_moe": "qwen2_moe:TABLE",
    "qwen3": "qwen3:TABLE",
    "qwen3_moe": "qwen3_moe:TABLE",
}
"""`model_type` → "module:name" of its table. Nothing is imported until it is asked for."""


def table(model_type: str) -> Table:
    """The table of a family. Raises KeyError when there is none."""
    module, _, name = FAMILIES[model_type].partition(":")
    return getattr(import_module(f".{module}", __package__), name)
