"""Multi-token prediction: Megatron-Core's block computes the logits of every depth, the loss is made here.

At depth d (from 1) position t predicts token t+1+d of its own sequence, from the hidden states of depth d−1 there and
the embedding of token t+d. Megatron-Core (0.16) makes the loss inside the model: with a mean over the micro-batch,
which is not the mean over the global batch, divided by a number of targets that may be 0, and where the loss of the
logits has to be made as well. Here the model gives out logits, and the loss is added to the one that is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ...converter.errors import ConfigError, Problems, SourceError
from ..api.configs import TrainEngineConfig
from ..api.parallel import ParallelStrategy
from ..data.batches import shift

__all__ = ["check", "check_own_loss", "depths_of", "future", "model_class", "targets"]


def depths_of(config: TrainEngineConfig, hf_config: Mapping[str, Any]) -> int:
    """Layers for multi-token prediction that are trained; 0: none."""
    return int(hf_config.get("num_nextn_predict_layers") or 0) if config.megatron.enable_mtp else 0


def check(
    config: TrainEngineConfig, hf_config: Mapping[str, Any], sizes: ParallelStrategy, found: Any, problems: Problems
) -> None:
    """What the layers cannot be trained with; `found` is the pipeline, None where that is wrong already."""
    name = "megatron.enable_mtp"
    if not config.megatron.enable_mtp:
        return
    if not depths_of(config, hf_config):
        family, have = hf_config.get("model_type"), hf_config.get("num_nextn_predict_layers")
        what = f"true: this {family} model has no such layers (num_nextn_predict_layers is {have!r})"
        problems.add(name, what, "false, or a checkpoint that has them, of deepseek_v3")
        return
    if sizes.cp_size > 1:
        what = f"{sizes.cp_size}: under enable_mtp every rank needs the next tokens of whole sequences"
        problems.add("context_parallel_size", what, "1, or enable_mtp=false")
    megatron = config.megatron
    full = config.gradient_checkpointing and megatron.recompute_granularity == "full"
    if full and (megatron.recompute_method, megatron.recompute_num_layers) != ("uniform", 1):
        what = f"{megatron.recompute_method}, {megatron.recompute_num_layers}: Megatron-Core recomputes each layer of "
        what += "multi-token prediction on its own, or none"
        problems.add("megatron.recompute_method, recompute_num_layers", what, "uniform, 1")
    if hf_config.get("tie_word_embeddings"):
        problems.add(name, "true: the head is tied to the embedding, which the last stage then has twice", "false")
    last = None if found is None else (found.pp - 1, found.vpp - 1)
    if found is not None and (found.find("mtp") != last or not found.chunks[-1][-1].layers):
        # Megatron-Core has the final norm where the last layer is, the hub where the loss is.
        what = "multi-token prediction layers (m) have to be where the loss (L) is, behind a layer (t)"
        problems.add("megatron.pipeline_model_parallel_layout", what, "…tmL")


def check_own_loss(config: TrainEngineConfig) -> None:
    """Raises ConfigError where gradients are asked for of another loss than `train_batch` makes."""
    if config.megatron.enable_mtp:
        raise ConfigError(
            "megatron.enable_mtp: forward_backward_batch has no multi-token prediction loss.",
            hint="train_batch adds it to yours, or enable_mtp=false.",
        )


@cache
def model_class() -> type:
    """GPTModel whose last stage gives out logits as a tuple: of the next token, and while gradients are made of every
    depth. Each is (1, tokens, columns of this rank)."""
    from megatron.core.models.gpt import GPTModel

    class MtpGPTModel(GPTModel):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            layers: Any = self.mtp.layers if self.mtp_process else ()
            for layer in layers:
                layer._checkpointed_forward = partial(_recomputed, layer._checkpointed_forward)

        def _postprocess(  # pyright: ignore[reportIncompatibleMethodOverride]
            self, hidden_states: Tensor, input_ids: Tensor, position_ids: Tensor, **rest: Any
        ) -> Any:
            if not self.post_process:
                return hidden_states
            found = (hidden_states,)
            if rest["mtp_in_postprocess"] and torch.is_grad_enabled():
                names = ("attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params")
                hidden = self.mtp(
                    input_ids=input_ids,
                    position_ids=position_ids,
                    hidden_states=hidden_states,
                    embedding=self.embedding,
                    **{name: rest[name] for name in names},
                )
                found = hidden.chunk(1 + int(self.config.mtp_num_layers or 0), 0)
            return tuple(self.output_layer(states)[0].transpose(0, 1).contiguous() for states in found)

    return MtpGPTModel


def _recomputed(checkpoint: Callable[..., Any], forward: Callable[..., Any], **inputs: Any) -> Any:
    """Full recomputation of a layer. Megatron-Core (0.16) hands autograd all that the layer takes, and what it has to
    know of packed sequences is no tensor."""
    tensors = {name: inputs.pop(name) for name in ("hidden_states", "decoder_input")}

    def run(hidden_states: Tensor, decoder_input: Tensor) -> Any:
        return forward(hidden_states=hidden_states, decoder_input=decoder_input, **inputs)

    return checkpoint(run, **tensors)


def future(values: Tensor, cu_seqlens: Tensor, depth: int) -> Tensor:
    """(T,) → (T,): at t the value of token t+1+depth of the same sequence, 0 where it has none."""
    for _ in range(1 + depth):
        values = shift(values, cu_seqlens)
    return values


def targets(batch: Mapping[str, Any], depths: int) -> Sequence[Tensor]:
    """For every depth (T,) bool: where the token that is predicted is one of the batch's `loss_mask`.

    Raises SourceError without a mask.
    """
    if "loss_mask" not in batch:
        raise SourceError("The batch has no loss_mask, from which multi-token prediction takes what counts.")
    return [future(batch["loss_mask"].bool(), batch["cu_seqlens"], depth) for depth in range(1, depths + 1)]
