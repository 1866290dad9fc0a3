"""`load_into` and `read`: from any format into plain tensors, DTensors and Megatron's own names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_convert.converter import ConfigError, Mesh, MeshError, PlanError, SourceError, convert, open_checkpoint
from areal_convert.converter.loading import load_into, read
from areal_convert.converter.loading_targets import local_pieces
from models import FAMILIES, _set_layout, add_mtp, logits, sample_tokens, tensors
from oracles.fsdp import Torch

Model = Callable[..., Path]


def empty(path: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """The model of a directory, as transformers builds it, with nothing right in it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    _set_layout(config)
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    for value in module.state_dict().values():
        value.fill_(float("nan"))
    return module.eval()


def rank_files(path: Path) -> list[Path]:
    return sorted(path.rglob("model_optim_rng.pt"))


def megatron_state(file: Path, chunk: str = "model") -> dict[str, torch.Tensor]:
    """What a Megatron rank would hold: the tensors of its file."""
    return torch.load(file, weights_only=False)[chunk]


# ------------------------------------------------------------------------------------------------ plain modules


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_module_from_its_own_files(model: Model, family: str) -> None:
    path = model(family)
    module = empty(path)
    done = load_into(open_checkpoint(path), module)
    assert done.naming == "hf" and not done.casts and not done.missing and not done.unknown
    with torch.no_grad():
        found = module(input_ids=sample_tokens(), use_cache=False).logits
    assert torch.equal(found, logits(path, sample_tokens()))


@pytest.mark.parametrize("to", ["torch_dist", "mp_rank", "dcp", "archon"])
@pytest.mark.parametrize("family", ["qwen3_moe", "llama_tied"])
def test_the_same_from_every_format(model: Model, tmp_path: Path, family: str, to: str) -> None:
    path = model(family)
    meshes = {"dcp": Mesh(dp_shard=3), "archon": Mesh(dp_shard=2, tp=2)}
    convert(path, tmp_path / "out", to, meshes.get(to, Mesh(tp=2, pp=2)), verify=False)
    module = empty(path)
    done = load_into(open_checkpoint(tmp_path / "out"), module)
    right = empty(path)
    load_into(open_checkpoint(path), right)
    assert all(torch.equal(v, right.state_dict()[n]) for n, v in module.state_dict().items())
    assert done.bytes_read == sum({v.data_ptr(): v.nbytes for v in module.state_dict().values()}.values())


def test_a_meta_module_once_it_has_memory(model: Model) -> None:
    path = model("qwen2")
    module = empty(path, device="meta")
    with pytest.raises(PlanError, match="to_empty") as refused:
        load_into(open_checkpoint(path), module)
    assert len(refused.value.problems) == len(module.state_dict())
    load_into(open_checkpoint(path), module.to_empty(device="cpu"))
    wanted = tensors(path)
    assert all(torch.equal(v, wanted[n]) for n, v in module.state_dict().items())


def test_views_and_other_strides_are_filled_in_place(model: Model) -> None:
    path = model("qwen2")
    wanted = tensors(path)
    target = {n: torch.full((*t.shape, 2), float("nan"))[..., 0] for n, t in wanted.items()}
    target["model.embed_tokens.weight"] = torch.zeros(64, 1003).T
    load_into(open_checkpoint(path), target)
    assert all(torch.equal(target[n], t) for n, t in wanted.items())


def test_wrapped_and_rooted_names(model: Model) -> None:
    path = model("qwen2")
    wanted = tensors(path)
    target = {f"module._orig_mod.{n}": torch.zeros_like(t) for n, t in wanted.items()}
    target |= {"module._orig_mod.model.rotary_emb.inv_freq": torch.ones(8)}
    done = load_into(open_checkpoint(path), target)
    assert all(torch.equal(target[f"module._orig_mod.{n}"], t) for n, t in wanted.items())
    assert list(done.skipped) == ["module._orig_mod.model.rotary_emb.inv_freq"]


# ------------------------------------------------------------------------------------------------ types


def test_widening_is_free_and_narrowing_is_asked_for(model: Model) -> None:
    narrow, wide = model("qwen2", dtype="bfloat16"), model("qwen2")
    module = empty(wide)
    done = load_into(open_checkpoint(narrow), module)
    assert done.casts == {"BF16 → F32": 51} and done.bytes_read * 2 == sum(t.nbytes for t in tensors(wide).values())
    assert all(torch.equal(module.state_dict()[n], t.float()) for n, t in tensors(narrow).items())
    module = empty(wide, torch.bfloat16)
    with pytest.raises(PlanError, match="rounded") as refused:
        load_into(open_checkpoint(wide), module)
    assert len(refused.value.problems) == 51 and all(v.isnan().all() for v in module.state_dict().values())
    load_into(open_checkpoint(wide), module, allow_cast=True)
    assert all(torch.equal(module.state_dict()[n], t.bfloat16()) for n, t in tensors(wide).items())


# ------------------------------------------------------------------------------------------------ strictness


def test_all_that_does_not_fit_is_listed_and_nothing_is_written(model: Model) -> None:
    path = model("qwen2")
    target = {n: torch.full_like(t, 7) for n, t in tensors(path).items()}
    del target["model.layers.1.mlp.up_proj.weight"]
    target["model.layers.2.self_attn.k_proj.weight"] = torch.full((7, 64), 7.0)
    target["model.extra.weight"] = torch.full((3,), 7.0)
    with pytest.raises(PlanError) as refused:
        load_into(open_checkpoint(path), target)
    about = {p.about for p in refused.value.problems}
    assert about == {"layers.1.mlp.up", "model.layers.2.self_attn.k_proj.weight", "model.extra.weight"}
    assert all((t == 7).all() for t in target.values())


def test_not_strict_loads_what_is_there(model: Model) -> None:
    path = model("qwen2")
    wanted = tensors(path)
    target = {"model.norm.weight": torch.zeros(64), "model.extra.weight": torch.zeros(3)}
    done = load_into(open_checkpoint(path), target, strict=False)
    assert torch.equal(target["model.norm.weight"], wanted["model.norm.weight"])
    assert len(done.missing) == 50 and list(done.unknown) == ["model.extra.weight"] and done.bytes_read == 256
    skipped = load_into(
        open_checkpoint(path), {"model.norm.weight": torch.zeros(64)}, skip=["layers.*", "embed", "head"]
    )
    assert skipped.tensors == 1


def test_a_module_that_ties_what_the_checkpoint_does_not(model: Model) -> None:
    untied, tied = model("llama"), empty(model("llama_tied"))
    with pytest.raises(PlanError, match="shares its memory"):
        load_into(open_checkpoint(untied), tied)


def test_a_head_of_its_own_gets_the_tied_embedding(model: Model) -> None:
    path = model("llama_tied")
    module = empty(model("llama"))
    load_into(open_checkpoint(path), module)
    state = module.state_dict()
    assert torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])


def test_padded_embeddings_end_in_zeros(model: Model) -> None:
    path = model("qwen2")
    target = {n: torch.full_like(t, 7) for n, t in tensors(path).items()}
    target |= {n: torch.full((1024, 64), 7.0) for n in ("model.embed_tokens.weight", "lm_head.weight")}
    done = load_into(open_checkpoint(path), target)
    assert done.filled == 2 * 21 * 64 * 4 and not target["lm_head.weight"][1003:].any()
    assert torch.equal(target["lm_head.weight"][:1003], tensors(path)["lm_head.weight"])


def test_mtp_layers_may_be_left_out(model_copy: Model) -> None:
    path = add_mtp(model_copy("deepseek_v3"))
    done = load_into(open_checkpoint(path), empty(path))
    assert "MTP" in done.notes[0]


def test_refusals(model: Model, model_copy: Model) -> None:
    path = model("qwen2")
    ckpt = open_checkpoint(path)
    with pytest.raises(ConfigError, match="in any naming"):
        load_into(ckpt, {"transformer.h.0.attn.c_attn.weight": torch.zeros(1)})
    with pytest.raises(ConfigError, match="no naming 'gguf'"):
        load_into(ckpt, {"model.norm.weight": torch.zeros(64)}, naming="gguf")
    with pytest.raises(MeshError, match="no rank 2"):
        load_into(ckpt, {"decoder.final_layernorm.weight": torch.zeros(64)}, Mesh(tp=2), 2)
    broken = model_copy("qwen2")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    with pytest.raises(SourceError):
        load_into(open_checkpoint(broken), {"model.norm.weight": torch.zeros(64)})


# ------------------------------------------------------------------------------------------------ Megatron's names


@pytest.mark.parametrize(
    ("family", "mesh"), [("qwen2", Mesh(tp=2, pp=2)), ("qwen3_moe", Mesh(tp=2, ep=2)), ("llama_tied", Mesh(tp=2, pp=2))]
)
def test_a_megatron_rank_reads_its_own_part(model: Model, tmp_path: Path, family: str, mesh: Mesh) -> None:
    path = model(family)
    convert(path, tmp_path / "out", "mp_rank", mesh, verify=False)
    seen = 0
    for rank, file in _by_rank(tmp_path / "out", mesh):
        right = megatron_state(file)
        target = {n: torch.full_like(t, float("nan")) for n, t in right.items()}
        done = load_into(open_checkpoint(path), target, mesh, rank)
        assert done.naming == "megatron"
        assert all(torch.equal(target[n], t) for n, t in right.items())
        seen += done.bytes_read
        assert done.bytes_read + done.filled == sum(t.nbytes for t in right.values())
    assert seen < 2 * sum(t.nbytes for t in tensors(path).values())


def _by_rank(path: Path, mesh: Mesh) -> Iterator[tuple[int, Path]]:
    """Every file with the number of a rank that would read it: TP first, then EP, then PP."""
    for file in rank_files(path):
        numbers = [int(x) for x in file.parent.name.split("_")[2:]] + [0]
        tp, second = numbers[0], numbers[1]
        stage, ep = (second, 0) if mesh.pp > 1 else (0, second)
        yield stage * mesh.stage_ranks + ep * mesh.tp + tp, file


def test_virtual_chunks_are_a_list(model: Model, tmp_path: Path) -> None:
    path, mesh = model("qwen2"), Mesh(pp=2, vpp=2)
    convert(path, tmp_path / "out", "mp_rank", mesh, verify=False)
    for rank, file in enumerate(rank_files(tmp_path / "out")):
        right = [megatron_state(file, f"model{n}") for n in range(2)]
        target = [{n: torch.zeros_like(t) for n, t in part.items()} for part in right]
        load_into(open_checkpoint(path), target, mesh, rank)
        assert all(torch.equal(b, a[n]) for a, part in zip(target, right, strict=True) for n, b in part.items())


def test_a_tensor_of_another_stage_is_refused(model: Model) -> None:
    target = {
        "embedding.word_embeddings.weight": torch.zeros(512, 64),
        "decoder.final_layernorm.weight": torch.zeros(64),
    }
    with pytest.raises(PlanError, match="not on this rank") as refused:
        load_into(open_checkpoint(model("qwen2")), target, Mesh(tp=2, pp=2), 0)
    assert "layers.0.attn.q" in {p.about for p in refused.value.problems}


def test_plain_shards_of_an_fsdp_rank(model: Model) -> None:
    path = model("qwen2")
    wanted = tensors(path)
    for rank in range(3):
        target = {n: torch.zeros_like(t.chunk(3)[rank] if t.shape[0] >= 3 else t) for n, t in wanted.items()}
        load_into(open_checkpoint(path), target, Mesh(dp_shard=3), rank)
        assert all(torch.equal(target[n], t.chunk(3)[rank]) for n, t in wanted.items())


# ------------------------------------------------------------------------------------------------ reading one tensor


def test_read_by_every_name(model: Model, tmp_path: Path) -> None:
    path = model("qwen3_moe")
    wanted = tensors(path)
    convert(path, tmp_path / "out", "torch_dist", Mesh(tp=2, ep=2), verify=False)
    ckpt = open_checkpoint(tmp_path / "out")
    assert all(torch.equal(read(ckpt, name), tensor) for name, tensor in wanted.items())
    q = read(ckpt, "layers.1.attn.q")
    assert q.shape == (4, 2, 16, 64)
    assert torch.equal(q.reshape(128, 64), wanted["model.layers.1.self_attn.q_proj.weight"])
    fused = read(ckpt, "model.layers.2.mlp.experts.gate_up_proj")
    assert torch.equal(fused[3, 48:], wanted["model.layers.2.mlp.experts.3.up_proj.weight"])
    stacked = (
        read(ckpt, "decoder.layers.input_layernorm.weight")
        if "decoder.layers.input_layernorm.weight" in {s.name for s in ckpt.found.tensors}
        else read(ckpt, "decoder.layers.self_attention.linear_qkv.layer_norm_weight")
    )
    assert torch.equal(stacked[3], wanted["model.layers.3.input_layernorm.weight"])
    assert read(ckpt, "layers.0.attention.wq.weight", dtype="bfloat16").dtype == torch.bfloat16
    with pytest.raises(ConfigError, match=r"wk\.bias"):
        read(ckpt, "layers.0.attention.wk.bias")


# ------------------------------------------------------------------------------------------------ DTensors


def test_rows_of_an_uneven_strided_shard() -> None:
    """1003 rows, cut by TP 2 into 502 and 501, then by FSDP 3: torch's own arithmetic is wrong for the last one."""
    shapes = {(2, 0): (336, 166), (2, 1): (836, 167), (1, 1): (669, 167), (0, 1): (502, 167)}
    for (dp, tp), (first, count) in shapes.items():
        fake = _FakeDTensor((1003, 4), (3, 2), (dp, tp), count, split_factor=2)
        (piece,) = local_pieces(fake)
        assert (piece.lo, piece.hi, piece.at) == ((first, 0), (first + count, 4), (0, 0))
    with pytest.raises(MeshError, match="do not explain"):
        list(local_pieces(_FakeDTensor((1003, 4), (3, 2), (0, 0), 5, split_factor=2)))


class _FakePlacement:
    def __init__(self, dim: int, split_factor: int = 0) -> None:
        self.dim = dim
        if split_factor:
            self.split_factor = split_factor

    def is_partial(self) -> bool:
        return False


class _FakeDTensor:
    """As much of a DTensor as tells where its rows are, without a process group."""

    def __init__(self, shape: Any, mesh: Any, at: Any, rows: int, split_factor: int) -> None:
        self.shape, self.mesh, self.at, self.rows = shape, mesh, at, rows
        self.placements = [_FakePlacement(0, split_factor), _FakePlacement(0)]
        self.device_mesh = self

    def get_coordinate(self) -> Any:
        return self.at

    def size(self, dim: int) -> int:
        return self.mesh[dim]

    def detach(self) -> _FakeDTensor:
        return self

    def to_local(self) -> torch.Tensor:
        return torch.zeros(self.rows, self.shape[1])


@pytest.fixture(scope="module")
def ranks() -> Iterator[Torch]:
    with Torch() as torch_:
        yield torch_


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("family", "mesh", "job"),
    [
        ("qwen3", {"dp": 2}, {}),
        ("llama_tied", {"dp": 3}, {"meta": True}),
        ("llama", {"dp": 2, "tp": 2}, {}),
        ("qwen3", {"dp": 3, "tp": 2}, {"logits": False}),
        ("mixtral", {"dp": 2, "replicate": 2}, {}),
        ("deepseek_v3", {"dp": 2}, {}),
        ("qwen3_moe", {"dp": 2, "tp": 2, "ep": 2}, {"naming": "archon", "logits": False}),
    ],
)
def test_fsdp2_modules_are_filled_in_place(
    ranks: Torch, model: Model, tmp_path: Path, family: str, mesh: dict[str, int], job: dict[str, Any]
) -> None:
    """torch distributes the module, ours fills it, torch gathers it again and compares with transformers."""
    path = model(family)
    convert(path, tmp_path / "out", "torch_dist", Mesh(tp=2, pp=2), verify=False)
    for found in ranks.run("load", path, mesh, dir=tmp_path / "out", via="load_into", **job):
        assert found["differ"] == []
        assert found.get("logits", 0.0) <= 1e-5 * found.get("scale", 1.0)
