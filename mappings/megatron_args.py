"""Megatron's arguments and Hugging Face's config: the fields in which both describe the same model.

Names: megatron/training/arguments.py; which of them `--use-checkpoint-args` takes from a checkpoint:
megatron/training/checkpointing.py, `load_args_from_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def config_from_args(found: Any) -> tuple[dict[str, Any], str] | None:
    """A `config.json` from a checkpoint's Megatron arguments, and a sentence on what was taken for granted.

    Returns None when there are no arguments, or none that describe a model that we know.
    """
    return None


def args_from_config(
    config: Mapping[str, Any], dims: Mapping[str, int], mesh: Any, vocab: int, *, dtype: str = "BF16"
) -> dict[str, Any]:
    """The arguments that a Megatron run needs in order to build this model with `--use-checkpoint-args`."""
    return {}
