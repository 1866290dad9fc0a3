"""The small files of a model directory: config, tokenizer, chat template, custom code. Carried byte for byte, never
re-saved: a conversion that loses `generation_config.json` or edits a config has changed the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .remote.mounts import ensure

HF = "hf"
"""The directory inside every target of ours that holds them."""

LIMIT = 256 * 1024 * 1024
"""Bytes; anything larger is no side file. The largest tokenizers are some 40 MB."""

MANIFEST = "areal_manifest.json"
RANK_MANIFEST = "areal_manifest.rank-{rank}.json"
"""Where only some ranks' files were made: one for each of these ranks, so that directories can be copied together."""

WEIGHTS = {
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".ggml",
    ".onnx",
    ".onnx_data",
    ".h5",
    ".msgpack",
    ".distcp",
    ".npz",
}
_SKIP = {MANIFEST, ".areal-journal", ".git", ".cache", ".gitattributes", "__pycache__", ".DS_Store"}
INDEX = "model.safetensors.index.json"


def collect(directory: Path) -> tuple[dict[str, Path], list[str]]:
    """Side files of a Hugging Face directory, by their path inside it, and the names of what is left behind.

    The index of the weights travels too: it says how the source was cut into shards.
    """
    found: dict[str, Path] = {}
    left: list[str] = []
    for path in sorted(directory.rglob("*")):
        relative = path.relative_to(directory)
        if path.is_dir() or _SKIP & set(relative.parts) or relative.name == "pytorch_model.bin.index.json":
            continue
        if path.suffix in WEIGHTS or not path.is_file() or path.stat().st_size > LIMIT:
            if relative.suffix not in {".safetensors", ".bin"} or len(relative.parts) > 1:
                left.append(str(relative))
            continue
        found[str(relative)] = path
    return found, left


def above(where: Path) -> tuple[Path, ...]:
    """The root of a Megatron run, when `where` is one of its iterations: what belongs to all of them lies there."""
    return (where.parent,) if where.name == "release" or where.name.startswith("iter_") else ()


def rank_manifests(directory: Path) -> list[Path]:
    """The manifests of single ranks in a directory."""
    return sorted(directory.glob(RANK_MANIFEST.format(rank="*")))


def find_hf(*places: Path) -> Path | None:
    """The first place, or `hf/` inside one, that holds a `config.json`."""
    for place in places:
        for directory in (place, place / HF):
            if (directory / "config.json").is_file():
                return directory
    return None


def read_json(path: Path) -> Any:
    """The contents of a JSON file. Raises ValueError for anything that is none, however it is broken."""
    ensure(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_index(directory: Path) -> bytes | None:
    """The index of a directory's shards as it stands there, or None."""
    ensure(directory / INDEX)
    try:
        return (directory / INDEX).read_bytes()
    except OSError:
        return None


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json` as a dict. Raises ConfigError when it is no JSON object."""
    path = directory / "config.json"
    try:
        config = read_json(path)
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: holds a {type(config).__name__}, not an object")
    return config
