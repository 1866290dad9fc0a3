"""What ranks do in the tests of multi-token prediction: transformers' parts with DeepSeek-V3's MTP written out, and the
same through MegatronEngine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine_jobs import LR, sequences
from megatron_jobs import Case, make_engine

COEFF = 0.3


def loss_mask(row: Tensor) -> Tensor:
    """A prompt and some tokens between are no targets: another mask for every depth."""
    at = torch.arange(len(row))
    return ((at >= 3) & (at % 4 != 1)).long()


# ------------------------------------------------------------------------------------------------ transformers


class Reference(nn.Module):
    """DeepSeek-V3 (technical report, 2.2): h' = layer(eh_proj([enorm(emb(t+1)); hnorm(h)])), logits head(norm(h'))."""

    def __init__(self, path: str) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

        from models import tensors

        config = AutoConfig.from_pretrained(path)
        config._experts_implementation = "eager"
        self.trunk: Any = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32)
        self.prefix, width = f"model.layers.{config.num_hidden_layers}.", config.hidden_size
        self.enorm, self.hnorm, self.norm = (DeepseekV3RMSNorm(width, config.rms_norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.layer: Any = DeepseekV3DecoderLayer(self.trunk.config, config.num_hidden_layers)
        stored = {k.removeprefix(self.prefix): v for k, v in tensors(Path(path)).items() if k.startswith(self.prefix)}
        with torch.no_grad():
            for name, values in self.written():
                for key, value in values:
                    value.copy_(stored[key])
                    assert name
            self.layer.mlp.gate.e_score_correction_bias.copy_(stored["mlp.gate.e_score_correction_bias"])

    def written(self, *, grads: bool = False) -> Iterator[tuple[str, list[tuple[str, Tensor]]]]:
        """Every parameter of the MTP layer (or its gradient) as the checkpoint names its parts."""
        norms = {"enorm": self.enorm, "hnorm": self.hnorm, "shared_head.norm": self.norm, "eh_proj": self.eh_proj}
        named = [(f"{name}.weight", module.weight) for name, module in norms.items()]
        for name, parameter in (*named, *self.layer.named_parameters()):
            value = parameter.grad if grads else parameter
            yield name, list(_parts(name, value))

    def forward(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the next token (T, V), and of the one behind it (T − 1, V)."""
        ids, model = row[None], self.trunk.model
        hidden = model(input_ids=ids, use_cache=False).last_hidden_state
        both = torch.cat([self.enorm(model.embed_tokens(ids[:, 1:])), self.hnorm(hidden[:, :-1])], -1)
        states = self.eh_proj(both)
        places = torch.arange(states.shape[1])[None]
        mask = torch.full((states.shape[1],) * 2, float("-inf")).triu(1)[None, None]
        states = self.layer(
            states,
            attention_mask=mask,
            position_ids=places,
            position_embeddings=model.rotary_emb(states, places),
        )
        states = states[0] if isinstance(states, tuple) else states
        return self.trunk.lm_head(hidden)[0], self.trunk.lm_head(self.norm(states))[0]

    def losses(self, step: int) -> tuple[Tensor, Tensor]:
        """Means over the targets of all sequences."""
        sums, counts = [torch.zeros(()), torch.zeros(())], [0, 0]
        for row in sequences(step):
            for depth, logits in enumerate(self(row)):
                n = len(row) - 1 - depth
                wanted = loss_mask(row)[1 + depth :].bool()
                nll = nn.functional.cross_entropy(logits[:n], row[1 + depth :], reduction="none")
                sums[depth] = sums[depth] + nll[wanted].sum()
                counts[depth] += int(wanted.sum())
        return sums[0] / counts[0], sums[1] / counts[1]


def _parts(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """transformers has all experts in one tensor, the checkpoint each on its own."""
    if name == "mlp.experts.gate_up_proj":
        for n, both in enumerate(value):
            for part, half in zip(("gate_proj", "up_proj"), both.chunk(2, 0), strict=True):
                yield f"mlp.experts.{n}.{part}.weight", half
    elif name == "mlp.experts.down_proj":
        for n, one in enumerate(value):
            yield f"mlp.experts.{n}.down_proj.weight", one
    else:
        yield name, value


def reference(path: str, steps: int) -> dict[str, Any]:
    """AdamW steps; and, by the checkpoint's names, the gradients of the first."""
    model = Reference(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    answer: dict[str, Any] = {"losses": [], "mtp_losses": [], "norms": []}
    for step in range(steps):
        main, mtp = model.losses(step)
        optimizer.zero_grad()
        (main + COEFF * mtp).backward()
        if step == 0:
            answer["grads"] = _gradients(model)
        norm = torch.stack([p.grad.double().norm() for p in model.parameters() if p.grad is not None]).norm()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        answer["losses"].append(main.item())
        answer["mtp_losses"].append(mtp.item())
        answer["norms"].append(norm.item())
    return answer


def _gradients(model: Reference) -> dict[str, Tensor]:
    found = {model.prefix + key: value for _, values in model.written(grads=True) for key, value in values}
    for name, parameter in model.trunk.named_parameters():
        prefix, _, rest = name.partition("mlp.experts.")
        short = "mlp.experts." + rest if rest else name
        found |= {prefix + key if rest else key: value for key, value in _parts(short, parameter.grad)}
    for copy, own in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        found[f"{model.prefix}{copy}.weight"] = found[f"{own}.weight"]
    return {name: value.clone() for name, value in found.items()}


# ------------------------------------------------------------------------------------------------ the engine


def batch_of(engine: Any, step: int) -> Any:
    from areal_convert.engines.data.batches import from_sequences

    rows = sequences(step)[engine.data_parallel_rank :: engine.data_parallel_world_size]
    return from_sequences(rows, loss_mask=[loss_mask(row) for row in rows])


def train(cases: Sequence[Case]) -> list[dict[str, Any]]:
    from areal_convert.converter.errors import ConfigError
    from areal_convert.engines.data.batches import from_sequences
    from areal_convert.engines.losses import sft_loss, sft_weight

    found = []
    for case in cases:
        engine = make_engine(case)
        results = [engine.train_batch(batch_of(engine, step), sft_loss, sft_weight) for step in range(case.steps)]
        names = {"losses": "loss", "mtp_losses": "mtp_loss", "norms": "grad_norm"}
        answer: dict[str, Any] = {key: [result.get(name) for result in results] for key, name in names.items()}
        answer["evaluated"] = [float(engine.eval_batch(batch_of(engine, 0), sft_loss, sft_weight))]
        short = from_sequences([torch.arange(a, a + 2) for a in (5, 8)], loss_mask=[torch.ones(2).long()] * 2)
        last = engine.train_batch(short, sft_loss, sft_weight)  # no token has one two places behind it
        try:
            engine.forward_backward_batch([batch_of(engine, 0)], lambda logits, ctx: None)
        except ConfigError as error:
            answer["refused"] = str(error)
        answer["short"] = [last.get("mtp_loss"), last["update_successful"]]
        found.append(answer)
        engine.destroy()
    return found


def stepped(cases: Sequence[Case], outs: Sequence[str]) -> None:
    """One step of plain gradient descent at rate 1: what is saved differs by the gradient."""
    from areal_convert.engines.api.metas import SaveLoadMeta
    from areal_convert.engines.losses import sft_loss, sft_weight

    for case, out in zip(cases, outs, strict=True):
        engine = make_engine(case)
        for _ in range(case.steps):
            engine.train_batch(batch_of(engine, 0), sft_loss, sft_weight)
        engine.save(SaveLoadMeta(out))
        engine.destroy()


def resumed(cases: Sequence[Case], path: str) -> list[list[tuple[float, float, float]]]:
    """Three steps of the first case and a state, and two more; those two of every case, fresh engines that load it."""
    from areal_convert.engines.api.metas import SaveLoadMeta
    from areal_convert.engines.losses import sft_loss, sft_weight
    from megatron_state_jobs import writers

    def steps(engine: Any, begin: int, end: int) -> list[tuple[float, float, float]]:
        results = [engine.train_batch(batch_of(engine, n), sft_loss, sft_weight) for n in range(begin, end)]
        return [(r["loss"], r["mtp_loss"], r["grad_norm"]) for r in results]

    meta = SaveLoadMeta(path, "dcp", with_optim=True)
    with writers():
        engine = make_engine(cases[0])
        steps(engine, 0, 3)
        engine.save(meta)
        found = [steps(engine, 3, 5)]
        engine.destroy()
        for case in cases:
            engine = make_engine(case)
            engine.load(meta)
            found.append(steps(engine, 3, 5))
            engine.destroy()
    return found
