"""Archon's models: the numbers of transformers for every family, from files that the hub reads under Archon's names.

Logits and gradients are compared on packed rows of sequences, on models that were built on the meta device.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import models
from areal_convert.converter.errors import PlanError
from areal_convert.converter.opening import open_checkpoint
from areal_convert.engines.archon.model import Decoder, Part, positions_of
from areal_convert.engines.archon.specs import SPECS, Cut, cut_of, elsewhere, spec_for, split, tensor_plan
from areal_convert.engines.packed_attention import Packing

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 7}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((family, {"layers": 4 if family.endswith("mixed") else 2}) for family in models.FAMILIES),
    ("llama", {"layers": 1, "attention_bias": True, "head_dim": 12}),
    ("llama", {"layers": 1, "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}}),
    ("qwen3", {"layers": 1, "rope_parameters": {k: v for k, v in YARN.items() if "mscale" not in k}}),
    ("deepseek_v3", {"layers": 2, "rope_parameters": YARN}),
    ("mistral", {"layers": 2, "sliding_window": 7}),
    ("qwen2", {"layers": 3, **WINDOW, "max_window_layers": 1}),
    ("qwen3", {"layers": 2, **WINDOW, "layer_types": ["sliding_attention", "full_attention"]}),
    ("qwen3_moe", {"layers": 2, **WINDOW}),
]
LENGTHS = (9, 24, 1, 14)


def config_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


def load(path: Path, part: Part | None = None) -> Decoder:
    """From meta device to weights, as an engine does it."""
    spec = spec_for(config_of(path))
    args = spec.args(config_of(path))
    model = spec.build(args, part)
    model.materialize("cpu")
    skip = elsewhere(args, part) if part else []
    open_checkpoint(path).load_into(model, naming="archon", skip=skip)
    return model


def packing_of(lengths: tuple[int, ...]) -> tuple[Packing, torch.Tensor]:
    bounds = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    cu = torch.tensor(bounds, dtype=torch.int32)
    return Packing(bounds, cu, "sdpa"), positions_of(cu)


def packed_tokens(lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    return models.sample_tokens(1, sum(lengths))


@pytest.mark.parametrize(("family", "options"), CASES, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_logits_are_those_of_transformers(family: str, options: dict[str, Any]) -> None:
    path = models.cached_model(family, **options)
    tokens = models.sample_tokens(2, 24)
    expected = models.logits(path, tokens)
    with torch.no_grad():
        found = load(path).eval()(tokens.reshape(1, -1), *packing_of((24, 24)))
    assert found.shape == (1, 48, models.VOCAB)
    torch.testing.assert_close(found.view_as(expected), expected, atol=1e-5, rtol=1e-5)


GRADIENTS = ("llama_rope", "qwen2_tied", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe_mixed", "deepseek_v3")


@pytest.mark.parametrize("family", GRADIENTS)
def test_gradients_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """The hub carries transformers' gradients to Archon's names, as if they were weights."""
    path = models.cached_model(family, layers=2)
    tokens = models.sample_tokens(2, 24)
    pull = torch.randn(2, 24, models.VOCAB, generator=torch.Generator().manual_seed(3)) / 48
    theirs = _gradients_of_transformers(path, tokens, pull, tmp_path / "gradients")
    model = load(path)
    model(tokens.reshape(1, -1), *packing_of((24, 24))).backward(pull.reshape(1, 48, -1))
    kept = {name: torch.zeros_like(buffer) for name, buffer in model.named_buffers() if name in model.state_dict()}
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    open_checkpoint(theirs).load_into({**expected, **kept}, naming="archon")
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        largest = float(expected[name].abs().max())
        assert largest > 1e-4, name
        worst = float((parameter.grad - expected[name]).abs().max())
        assert worst <= 1e-5 * largest, (name, worst, largest)


def _gradients_of_transformers(path: Path, tokens: Any, pull: torch.Tensor, target: Path) -> Path:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model.config._experts_implementation = "eager"
    model(input_ids=tokens, use_cache=False).logits.backward(pull)
    tensors = {name: p.grad.contiguous() for name, p in model.named_parameters()}
    tensors |= {name: b.clone() for name, b in model.named_buffers() if name in model.state_dict()}
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text((path / "config.json").read_text())
    return target


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_packed_is_unpacked(family: str) -> None:
    """Sequences of one row see nothing of each other: not in the logits, not in the gradients."""
    model = load(models.cached_model(family, layers=2)).eval()
    tokens = packed_tokens()
    row = model(tokens, *packing_of(LENGTHS))
    row.square().mean().backward()
    together = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    parts = [model(part, *packing_of((part.shape[1],))) for part in tokens.split(LENGTHS, 1)]
    alone = torch.cat(parts, 1)
    alone.square().mean().backward()
    torch.testing.assert_close(row, alone, atol=1e-5, rtol=1e-5)
    for name, p in model.named_parameters():
        torch.testing.assert_close(together[name], p.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama_tied", "llama", "qwen3_moe_mixed", "deepseek_v3"])
def test_stages_in_a_row_are_the_model(family: str) -> None:
    """Each filled from the checkpoint alone, strictly: with what it has, and nothing else."""
    path = models.cached_model(family, layers=4)
    whole = load(path).eval()
    x, packing, names = packed_tokens(), packing_of(LENGTHS), set[str]()
    for part in split(4, 3):
        stage = load(path, part).eval()
        names |= set(stage.state_dict())
        assert not stage.tied
        with torch.no_grad():
            x = stage(x, *packing)
    assert names == set(whole.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(x, whole(packed_tokens(), *packing), atol=0, rtol=0)


def test_a_stage_must_have_all_that_no_other_stage_has() -> None:
    """A tied head on the last stage is the embedding: it may not be missing there."""
    args = {
        family: spec_for(config).args(config)
        for family in ("llama", "llama_tied")
        for config in [config_of(models.cached_model(family, layers=4))]
    }
    layers = [r"layers\.0\..*", r"layers\.1\..*"]
    assert elsewhere(args["llama"], Part(2, 4, first=False)) == [*layers, "embed"]
    assert elsewhere(args["llama_tied"], Part(2, 4, first=False)) == layers
    ends = [r"layers\.1\..*", r"layers\.2\..*", r"layers\.3\..*", "head", "final_norm"]
    assert elsewhere(args["llama_tied"], Part(0, 1, last=False)) == ends


def test_a_stage_that_lacks_something_is_not_filled() -> None:
    path = models.cached_model("llama", layers=4)
    args = spec_for(config_of(path)).args(config_of(path))
    stage = SPECS["llama"].build(args, Part(0, 2, last=False))
    stage.materialize("cpu")
    with pytest.raises(PlanError, match=r"layers\.2\.attn\.k"):
        open_checkpoint(path).load_into(stage, naming="archon", skip=elsewhere(args, Part(0, 3, last=False)))


def test_one_rank_fills_both_of_its_stages_at_once() -> None:
    """The first and the last, as a V-shaped schedule deals them: a tied head is a copy of the embedding then."""
    path = models.cached_model("llama_tied", layers=4)
    args = spec_for(config_of(path)).args(config_of(path))
    parts = Part(0, 1, last=False), Part(3, 4, first=False)
    stages = [SPECS["llama"].build(args, part) for part in parts]
    for stage in stages:
        stage.materialize("cpu")
    absent = set(elsewhere(args, parts[0])) & set(elsewhere(args, parts[1]))
    open_checkpoint(path).load_into(stages, naming="archon", skip=sorted(absent))
    whole = load(path).state_dict()
    for stage in stages:
        for name, value in stage.state_dict().items():
            torch.testing.assert_close(value, whole[name], atol=0, rtol=0)


def test_a_model_from_the_meta_device_is_one_from_the_cpu() -> None:
    """Nothing is left as memory happened to be: buffers that no checkpoint has are computed again."""
    path = models.cached_model("deepseek_v3", layers=2)
    args = spec_for(config_of(path)).args(config_of(path))
    direct = Decoder(args)
    open_checkpoint(path).load_into(direct, naming="archon")
    model = SPECS["deepseek_v3"].build(args)
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.fill_(float("nan"))
    model.reset_buffers()
    open_checkpoint(path).load_into(model, naming="archon")
    assert dict(model.named_buffers()).keys() == dict(direct.named_buffers()).keys()
    for name, buffer in direct.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer, atol=0, rtol=0)


def test_a_tied_head_stays_the_embedding() -> None:
    model = load(models.cached_model("llama_tied", layers=1))
    assert model.tied
    assert model.output is not None
    assert model.tok_embeddings is not None
    assert model.output.weight is model.tok_embeddings.weight
    model.tok_embeddings.weight = torch.nn.Parameter(model.tok_embeddings.weight + 1)
    model.tie()
    assert model.output.weight is model.tok_embeddings.weight
    untied = load(models.cached_model("llama", layers=1))
    assert not untied.tied


def test_positions_start_anew_in_every_sequence() -> None:
    """Logits would not show it: rotations only know distances."""
    found = positions_of(torch.tensor([0, 3, 3, 4, 6], dtype=torch.int32))
    assert found.tolist() == [0, 1, 2, 0, 0, 1]


def test_dropout_is_for_training() -> None:
    path = models.cached_model("qwen3", layers=1)
    config = config_of(path) | {"attention_dropout": 0.5}
    dropping = Decoder(spec_for(config).args(config))
    dropping.load_state_dict(load(path).state_dict())
    given = packed_tokens(), *packing_of(LENGTHS)
    with torch.no_grad():
        still = load(path)(*given)
        torch.manual_seed(0)
        assert float((dropping.train()(*given) - still).abs().max()) > 1e-2
        torch.testing.assert_close(dropping.eval()(*given), still, atol=0, rtol=0)


def test_a_critic_has_one_value_a_token() -> None:
    config = config_of(models.cached_model("qwen3", layers=1))
    spec = spec_for(config)
    with torch.no_grad():
        critic = Decoder(spec.args(config), head="value")
        values = critic(packed_tokens(), *packing_of(LENGTHS))
    assert values.shape == (1, sum(LENGTHS), 1)
    assert {name for name, _ in critic.named_parameters() if name.startswith(("score", "output"))} == {
        "score.weight",
        "score.bias",
    }


def test_parameters_have_the_wanted_type_and_buffers_stay_exact() -> None:
    config = config_of(models.cached_model("deepseek_v3", layers=2))
    spec = spec_for(config)
    model = spec.build(spec.args(config), dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in model.buffers()} == {torch.float32}


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2_moe_mixed", "qwen3_moe", "deepseek_v3", "deepseek_v3_noq"])
def test_every_module_with_parameters_is_cut_in_one_way(family: str) -> None:
    config = config_of(models.cached_model(family, layers=4 if family.endswith("mixed") else 2))
    spec = spec_for(config)
    args = spec.args(config)
    plan = tensor_plan(args)
    for head in ("vocabulary", "value"):
        model = spec.build(args, head=head)
        owners = [name for name, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))]
        for name in owners:
            matching = [pattern for pattern in plan if cut_of({pattern: plan[pattern]}, name)]
            assert len(matching) == 1, (name, matching)


# ------------------------------------------------------------------------------------------------ tensor parallelism


class OnRanks(nn.Module):
    """A block on two tensor-parallel ranks in one process: each has its part of the weights, results are summed."""

    def __init__(self, block: nn.Module, name: str, plan: dict[str, Cut]) -> None:
        super().__init__()
        self.ranks = nn.ModuleList(self._cut(copy.deepcopy(block), name, plan, rank) for rank in range(2))

    @staticmethod
    def _cut(block: nn.Module, name: str, plan: dict[str, Cut], rank: int) -> nn.Module:
        for inner, module in block.named_modules():
            cut = cut_of(plan, f"{name}.{inner}" if inner else name)
            for key, p in list(module.named_parameters(recurse=False)):
                if (dim := cut_dim(cut, key)) is not None:
                    module.register_parameter(key, nn.Parameter(p.detach().chunk(2, dim)[rank].clone()))
                elif cut is Cut.INPUTS and rank:  # one rank adds the bias
                    module.register_parameter(key, None)
        return block

    def forward(self, *given: Any) -> torch.Tensor:
        return self.ranks[0](*given) + self.ranks[1](*given)


def cut_dim(cut: Cut | None, key: str) -> int | None:
    if cut is Cut.EXPERTS:
        return 2 if key == "w2" else 1
    if cut is Cut.INPUTS:
        return 1 if key == "weight" else None
    return 0 if cut is Cut.OUTPUTS else None


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"attention_bias": True}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen2_moe", {}),
        ("qwen3_moe", {}),
        ("deepseek_v3", {}),
        ("deepseek_v3_noq", {}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_plan_cuts_the_model_into_parts_of_a_sum(family: str, options: dict[str, Any]) -> None:
    """Logits and all gradients of the two ranks, joined as each module's cut says, are those of the whole."""
    model = load(models.cached_model(family, layers=2, **options))
    plan = tensor_plan(model.args)
    ranks = copy.deepcopy(model)
    blocks = [name for name, _ in model.named_modules() if cut_of(plan, name) is Cut.BLOCK]
    assert len(blocks) == 4
    for name in blocks:
        owner, _, key = name.rpartition(".")
        setattr(ranks.get_submodule(owner), key, OnRanks(model.get_submodule(name), name, plan))
    for one in (model, ranks):
        out = one(packed_tokens(), *packing_of(LENGTHS))
        out.square().mean().backward()
    for name, p in model.named_parameters():
        module, _, key = name.rpartition(".")
        block = next((b for b in blocks if module.startswith(b + ".")), None)
        if block is None:
            found: Any = ranks.get_parameter(name).grad
        else:
            inner = name.removeprefix(block + ".")
            states = [dict(ranks.get_submodule(f"{block}.ranks.{r}").named_parameters()) for r in range(2)]
            grads: list[Any] = [state[inner].grad for state in states if inner in state]
            cut = cut_of(plan, module)
            dim = cut_dim(cut, key)
            found = sum(grads) if dim is None else torch.cat(grads, dim)
            assert cut in (Cut.OUTPUTS, Cut.INPUTS, Cut.EXPERTS, Cut.SUMMED)
        assert p.grad is not None
        assert float((found - p.grad).abs().max()) <= 2e-5 * float(p.grad.abs().max()), name
