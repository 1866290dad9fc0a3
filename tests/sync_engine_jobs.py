"""What engines do in `test_sync_engines`; run by `engine_worker.run_ranks`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

MAKERS = {"fsdp": "engine_jobs", "megatron": "megatron_jobs", "archon": "archon_jobs"}


class Rollout:
    """An inference engine of AReaL's, as far as a trainer looks at it."""

    def __init__(self, url: str) -> None:
        self.addresses = [url.removeprefix("http://")]


def make(backend: str, path: str, **kinds: Any) -> Any:
    jobs = import_module(MAKERS[backend])
    return jobs.make_engine(jobs.Case(path, **kinds))


def updates(backend: str, path: str, other: str, url: str, folder: str, kinds: dict[str, Any]) -> list[Any]:
    """Versions 1 (the model as it was loaded), 2 and 3 (other weights), by collectives and then by disk."""
    from areal_convert.engines.api.metas import SaveLoadMeta, WeightUpdateMeta

    engine = make(backend, path, **kinds)
    meta = WeightUpdateMeta.from_fsdp_xccl(None)
    engine.connect_engine(Rollout(url), meta)
    reports = [engine.update_weights(meta.with_version(1))]
    engine.load(SaveLoadMeta(other, "hf"))
    reports.append(engine.update_weights(meta.with_version(2)))
    engine.set_version(2)
    disk = WeightUpdateMeta(type="disk", path=f"{folder}/weight_update")
    engine.connect_engine(Rollout(url), disk)
    reports.append(engine.update_weights(disk.with_version(3)))
    left = Path(folder, "weight_update_v3").exists()
    engine.destroy()
    return [(r.version, r.mode, r.senders, r.complete, r.sent_bytes == r.bytes) for r in reports] + [left]


def adapters(path: str, url: str, folder: str) -> float:
    """A push of the adapter alone, by collectives; how large its second half is."""
    import torch

    from areal_convert.engines.api.metas import SaveLoadMeta, WeightUpdateMeta
    from lora_jobs import LORA

    engine = make("fsdp", path, dp=2, config=LORA)
    with torch.no_grad():
        for name, value in engine.lora.adapters().items():
            if "lora_B" in name:
                getattr(value, "_local_tensor", value).fill_(0.01)
    meta = WeightUpdateMeta.from_fsdp_xccl(None, use_lora=True, lora_name="policy")
    engine.connect_engine([url], meta)
    report = engine.update_weights(meta.with_version(4))
    engine.save(SaveLoadMeta(folder, "hf"))
    engine.destroy()
    return report.bytes


def refusals(path: str, url: str) -> list[str]:
    """What is said to calls that make no sense."""
    from areal_convert.converter.errors import ConvertError
    from areal_convert.engines.api.metas import WeightUpdateMeta

    engine = make("fsdp", path)
    xccl, disk = WeightUpdateMeta(type="xccl"), WeightUpdateMeta(type="disk")

    def said(method: Any, *arguments: Any) -> str:
        try:
            method(*arguments)
        except ConvertError as error:
            return str(error)
        return ""

    found = [
        said(engine.update_weights, xccl),
        said(engine.update_weights, disk),
        said(engine.connect_engine, object(), xccl),
        said(engine.connect_engine, None, xccl),
        said(engine.connect_engine, url, WeightUpdateMeta(type="awex")),
        said(engine.connect_engine, "127.0.0.1:9", xccl),
    ]
    engine.connect_engine(url, xccl)
    found += [said(engine.update_weights, disk), said(engine.update_weights, WeightUpdateMeta("xccl", use_lora=True))]
    engine.destroy()
    return found
