"""The small files of a model: its configuration and its tokenizer, wherever and in whatever format it lies."""

from __future__ import annotations

from typing import Any

from ..converter.errors import SourceError
from ..converter.remote.mounts import ensure_all, mount
from ..converter.sidefiles import above, collect, find_hf, read_config

__all__ = ["model_config", "tokenizer_of"]


def model_config(path: str) -> dict[str, Any]:
    """`config.json`. Raises SourceError when there is none."""
    where = mount(path)
    found = find_hf(where, *above(where))
    if found is None:
        what = "no such directory" if not where.exists() else "has no config.json, nor a directory hf/ with one"
        raise SourceError(f"{path}: {what}.", hint="engine.path names the model.")
    return read_config(found)


def tokenizer_of(path: str) -> Any:
    """The tokenizer beside the weights, or a directory's of its own. Raises SourceError when there is none."""
    from transformers import AutoTokenizer

    where = mount(path)
    directory = find_hf(where, *above(where)) or where
    if not directory.is_dir():
        raise SourceError(f"{path}: no such directory.", hint="tokenizer=DIR or hf://OWNER/NAME names one.")
    names, _ = collect(directory)
    if not any(name.startswith(("tokenizer", "vocab", "spiece", "tekken")) for name in names):
        raise SourceError(f"{path}: there is no tokenizer in it.", hint="tokenizer=DIR or hf://OWNER/NAME names one.")
    ensure_all({file: [None] for file in names.values()})
    try:
        return AutoTokenizer.from_pretrained(str(directory))
    except Exception as error:  # tokenizers raises a bare Exception for a broken file
        raise SourceError(f"{path}: the tokenizer cannot be loaded: {error}") from error
