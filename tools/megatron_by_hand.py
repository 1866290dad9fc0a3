"""Megatron-Core driven by hand, without an engine: the other side of the benchmarks of MegatronEngine.

What one writes after Megatron-LM's examples: the model in `DistributedDataParallel`, `get_megatron_optimizer`,
`get_forward_backward_func`, and the loss that GPTModel computes itself when it is given labels. Model, layers and the
two Megatron configurations are the engine's, so that a difference in time is the engine's own doing. One rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["ByHand"]


class ByHand:
    """Call it with the rows of a step (1-D tensors): one training step, and its loss.

    Where a MegatronEngine lives in this process its parallel state is used: Megatron-Core has one in a process.
    """

    def __init__(self, path: Path, config: Any) -> None:
        from areal_convert.engines.megatron_cpu import cpu_megatron, hush

        hush()
        self._inside = cpu_megatron
        with self._inside():
            self._make(path, config)

    def _make(self, path: Path, config: Any) -> None:
        from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
        from megatron.core.optimizer import get_megatron_optimizer

        from areal_convert.converter.mesh import Mesh
        from areal_convert.engines import ParallelStrategy
        from areal_convert.engines.launching import device_of
        from areal_convert.engines.megatron import build, fp8, weights

        self.device = device_of()
        checkpoint = weights.open_model(str(path))
        self._state()
        core = build.core_config(config, checkpoint.config, ParallelStrategy(), self.device)
        self.vocabulary = int(checkpoint.config["vocab_size"])
        self.multiple = fp8.token_multiple(config.megatron.fp8_config)
        chunks = build.make_model(
            core,
            self.vocabulary,
            config.attn_impl,
            self.device,
            engine=build.uses_engine(config, self.device),
        )
        weights.load(chunks, checkpoint, Mesh(), 0, masters=False)
        model: Any = chunks[0]
        self.model = DistributedDataParallel(core.core, build.ddp_config(config), model)
        core.core.finalize_model_grads_func = finalize_model_grads
        settings = build.optimizer_config(config, config.optimizer)
        self.optimizer = get_megatron_optimizer(settings, [self.model], config_overrides={})
        self.model.train()

    @staticmethod
    def _state() -> None:
        """Process groups and random states, where there are none."""
        import torch.distributed as dist
        from megatron.core import parallel_state as ps
        from megatron.core import tensor_parallel

        if not dist.is_initialized():
            from areal_convert.engines.launching import device_of, start

            start(device_of(), 1)
        if not ps.model_parallel_is_initialized():
            ps.initialize_model_parallel()
            tensor_parallel.model_parallel_cuda_manual_seed(1)

    def __call__(self, rows: Sequence[Any]) -> float:
        with self._inside():
            return self._step(rows)

    def _step(self, rows: Sequence[Any]) -> float:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        batch = self._packed(rows)
        run: Any = get_forward_backward_func()
        found = run(
            forward_step_func=_forward,
            data_iterator=iter([batch]),
            model=self.model,
            num_microbatches=1,
            seq_length=batch["ids"].shape[1],
            micro_batch_size=1,
            forward_only=False,
        )
        self.optimizer.step()
        return float(found[0]["loss"])

    def _packed(self, rows: Sequence[Any]) -> dict[str, Any]:
        """All rows one after the other (thd): labels are the next tokens, and the last one of a row does not count."""
        import torch
        from megatron.core.packed_seq_params import PackedSeqParams

        rest = -sum(len(row) for row in rows) % self.multiple
        padded = [*rows, *([torch.zeros(rest, dtype=torch.int64)] if rest else [])]
        counts = torch.cat([_counts(row) for row in rows] + [torch.zeros(rest)])
        cu = torch.tensor([0, *(len(row) for row in padded)]).cumsum(0).int().to(self.device)
        longest = max(len(row) for row in padded)
        packing = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest
        )
        return {
            "ids": torch.cat(padded)[None].to(self.device),
            "labels": torch.cat([row.roll(-1) for row in padded])[None].to(self.device),
            "positions": torch.cat([torch.arange(len(row)) for row in padded])[None].to(self.device),
            "counts": counts[None].to(self.device),
            "packing": packing,
        }


def _counts(row: Any) -> Any:
    import torch

    counts = torch.ones(len(row))
    counts[-1] = 0
    return counts


def _forward(iterator: Iterator[dict[str, Any]], model: Any) -> Any:
    batch = next(iterator)
    losses = model(batch["ids"], batch["positions"], None, labels=batch["labels"], packed_seq_params=batch["packing"])

    def loss_of(losses: Any) -> Any:
        loss = (losses.float() * batch["counts"]).sum() / batch["counts"].sum()
        # Megatron-Core divides in place what is returned first.
        return loss.clone(), {"loss": loss.detach()}

    return losses, loss_of


if __name__ == "__main__":
    sys.exit(__doc__)
