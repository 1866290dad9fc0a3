"""Imported by the fork server of `engine_worker` before it forks: whatever every rank would import anyway."""

from __future__ import annotations

import importlib
import warnings

for _name in ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"):
    importlib.import_module(f"transformers.models.{_name}.modeling_{_name}")
importlib.import_module("areal_convert.engines.fsdp.engine")
importlib.import_module("areal_convert.engines.megatron.engine")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # without Transformer Engine, Megatron-Core warns of every fallback
    for _name in ("models.gpt", "models.gpt.gpt_layer_specs", "optimizer", "distributed", "pipeline_parallel"):
        importlib.import_module(f"megatron.core.{_name}")
