"""Imported by the fork server before it forks a server of `sync_server`: whatever every server would import anyway."""

from __future__ import annotations

import importlib

for _name in (
    "uvicorn.lifespan.on",
    "uvicorn.loops.auto",
    "uvicorn.protocols.http.auto",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    *(f"transformers.models.{x}.modeling_{x}" for x in ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3")),
    "areal_convert.converter.sync.server.app",
    "areal_convert.converter.loading",
):
    importlib.import_module(_name)
