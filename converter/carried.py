"""What travels with a conversion besides tensors: the small files, read, with the config as the target needs it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .errors import SourceError
from .remote.mounts import ensure_all
from .sidefiles import HF, INDEX, collect
from .target import side_config

if TYPE_CHECKING:
    from .convert import Planned


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """As transformers writes it. What UTF-8 cannot say stays escaped."""
    try:
        return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(value, indent=2) + "\n").encode()


def side_texts(planned: Planned) -> tuple[dict[str, bytes], list[str]]:
    """Small files for the target, by their path there, and what is left behind."""
    ckpt = planned.source
    files, left = collect(ckpt.found.hf) if ckpt.found.hf else ({}, [])
    ensure_all({path: [None] for path in files.values()})
    prefix = "" if planned.format == "hf" else f"{HF}/"
    texts = {}
    for name, path in files.items():
        if name == INDEX and planned.format == "hf":
            continue
        try:
            texts[prefix + name] = path.read_bytes()
        except OSError as error:
            raise SourceError(f"{path}: cannot be read: {error.strerror}.") from error
    changed = side_config(ckpt, planned.options)
    if changed is not None:
        texts[prefix + "config.json"] = json_bytes(changed)
    return texts, left
