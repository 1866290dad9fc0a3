"""A transfer engine for vLLM that takes weights from a torch process group, gloo or NCCL. Runs inside vLLM's workers.

    vllm … --weight-transfer-config '{"backend": "gloo"}'
           --worker-extension-cls areal_convert.converter.sync.dialects.vllm_gloo.Extension

The file stands alone: vLLM's environment needs either areal-convert installed without its dependencies, or a copy of
this file on its PYTHONPATH (`--worker-extension-cls vllm_gloo.Extension`).

A bucket is received whole before any of it is loaded: a name or a shape that vLLM refuses then leaves nobody waiting.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass
class Init:
    """Where the trainer waits; it is rank 0."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str = "gloo"
    timeout: float = 60.0


@dataclass
class Update:
    """A bucket."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise ValueError(f"{len(self.names)} names, {len(self.dtype_names)} types, {len(self.shapes)} shapes")


class GlooEngine:
    """See the module; `register` puts it in front of vLLM's base class, which sets `parallel_config`, `model`, ….

    digest  of the names, types, shapes and bytes since the last receipt; `landing` the device that they come to
    """

    init_info_cls = Init
    update_info_cls = Update
    parallel_config: Any
    model: Any
    model_config: Any
    landing: Any
    group: Any = None
    digest: Any = None
    tensors = 0
    last: GlooEngine | None = None

    def init_transfer_engine(self, init_info: Init) -> None:
        import torch
        from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

        self.shutdown()
        parallel, wait = self.parallel_config, timedelta(seconds=init_info.timeout)
        index = getattr(parallel, "data_parallel_index", None)
        data = parallel.data_parallel_rank if index is None else index
        rank = init_info.rank_offset + data * parallel.world_size + parallel.rank
        store = TCPStore(init_info.master_address, init_info.master_port, None, False, wait, wait_for_workers=False)
        prefix = PrefixStore(init_info.group_name, store)
        if init_info.backend == "nccl":
            from torch.distributed import ProcessGroupNCCL

            self.group = ProcessGroupNCCL(prefix, rank, init_info.world_size, ProcessGroupNCCL.Options())
            self.landing = torch.device("cuda", torch.cuda.current_device())
        else:
            self.group = ProcessGroupGloo(prefix, rank, init_info.world_size, wait)
            self.landing = torch.device("cpu")
        GlooEngine.last = self

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload  # type: ignore[import-not-found]

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload  # type: ignore[import-not-found]

        finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(self, update_info: Update, load_weights: Callable[[Any], Any] | None = None) -> None:
        """`load_weights` is how vLLM before 0.30 has it."""
        import torch

        if self.group is None:
            raise RuntimeError("init_weight_transfer_engine has to be called first")
        found = []
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.landing)
            raw = tensor.reshape(-1).view(torch.uint8)
            if raw.numel():
                self.group.broadcast(raw, 0).wait()
            self._note(f"{name} {dtype} {list(shape)}", raw)
            found.append((name, tensor.to(getattr(self, "device", self.landing))))
        load: Callable[[Iterable[Any]], Any] = load_weights or self.model.load_weights
        load(found)

    def _note(self, title: str, raw: torch.Tensor) -> None:
        if self.digest is None:
            self.digest, self.tensors = hashlib.blake2b(digest_size=16), 0
        self.digest.update(title.encode())
        self.digest.update(raw.cpu().numpy().data)
        self.tensors += 1

    def shutdown(self) -> None:
        self.group = None


class Extension:
    """What a worker can be asked besides, over `/collective_rpc`."""

    def areal_convert_receipt(self) -> dict[str, Any]:
        """The digest of everything since the last receipt, which this ends."""
        engine = GlooEngine.last
        if engine is None or engine.digest is None:
            return {"engine": "areal-convert", "digest": "", "tensors": 0}
        said = {"engine": "areal-convert", "digest": engine.digest.hexdigest(), "tensors": engine.tensors}
        engine.digest = None
        return said


def register() -> None:
    """Tell vLLM of the engine, as `gloo`."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory  # type: ignore[import-not-found]
    from vllm.distributed.weight_transfer.base import WeightTransferEngine  # type: ignore[import-not-found]

    engine = type("GlooWeightTransferEngine", (GlooEngine, WeightTransferEngine), {})
    WeightTransferEngineFactory.register_engine("gloo", engine)


if "vllm" in sys.modules:  # a worker that looks for its extension; whoever else imports this need not have vLLM
    register()
