"""There and back for every family, format and mesh: the Hugging Face directory comes back byte for byte.

Alone this would prove nothing, since inverse faults cancel; see `test_position_codes` and the oracles. What it adds is
breadth, and the promise that a user's files are as they were.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import models
from areal_convert.converter.convert import Options, convert
from areal_convert.converter.errors import ConfigError, ConvertError
from areal_convert.converter.mesh import Mesh
from areal_convert.converter.verify import verify

MANIFEST = "areal_manifest.json"
LOCAL = Options(spec="local")

EVERYWHERE: list[tuple[str, Mesh, Options]] = [
    ("mp_rank", Mesh(tp=2, pp=2), Options()),
    ("mp_rank", Mesh(tp=4, pp=2, vpp=2), LOCAL),
    ("torch_dist", Mesh(tp=2, pp=2, vpp=2), Options()),
    ("dcp", Mesh(dp_shard=3, tp=2), Options()),
    ("archon", Mesh(dp_shard=2, tp=2), Options()),
]
"""For every family."""

DENSE: list[tuple[str, Mesh, Options]] = [
    ("hf", Mesh(), Options(max_shard=100_000)),
    ("mp_rank", Mesh(), Options()),
    ("mp_rank", Mesh(tp=2), LOCAL),
    ("mp_rank", Mesh(tp=4), Options()),
    ("mp_rank", Mesh(pp=2), Options()),
    ("mp_rank", Mesh(pp=4), LOCAL),
    ("mp_rank", Mesh(pp=2, vpp=2), Options()),
    ("mp_rank", Mesh(pp=2, first=1), Options()),
    ("mp_rank", Mesh(tp=2, pp=4, layout="E|t*2|t*2|L"), Options()),
    ("mp_rank", Mesh(tp=2), Options(vocab_divisor=1)),
    ("torch_dist", Mesh(), Options()),
    ("torch_dist", Mesh(tp=4), Options()),
    ("torch_dist", Mesh(pp=4), Options()),
    ("torch_dist", Mesh(tp=2, pp=2), Options(vocab_divisor=8)),
    ("torch_dist", Mesh(tp=2, pp=2, vpp=2, layout="E|t*2|t*2|L"), Options()),
    *(("dcp", Mesh(dp_shard=n), Options()) for n in (1, 2, 3, 4, 5)),
    *(("dcp", Mesh(dp_shard=n, tp=4), Options()) for n in (1, 5)),
    ("dcp", Mesh(dp_shard=2), Options(root="model.")),
    ("archon", Mesh(), Options()),
    ("archon", Mesh(dp_shard=5), Options()),
]
"""For two families, besides."""

EXPERTS: list[tuple[str, Mesh, Options]] = [
    ("mp_rank", Mesh(ep=2), Options()),
    ("mp_rank", Mesh(ep=4), LOCAL),
    ("mp_rank", Mesh(tp=2, ep=2, etp=1), Options(megatron_experts="sequential")),
    ("mp_rank", Mesh(tp=4, ep=2, etp=2), Options(spec="local", megatron_experts="grouped")),
    ("torch_dist", Mesh(ep=2, etp=2), Options()),
    ("torch_dist", Mesh(tp=2, pp=2, ep=4, etp=1), Options()),
    ("dcp", Mesh(dp_shard=4, ep=2), Options()),
    ("dcp", Mesh(dp_shard=2, tp=2), Options(experts="per_expert")),
    ("archon", Mesh(dp_shard=2, ep=2), Options()),
]
"""For every family with experts, besides."""

MANY_EXPERTS: list[tuple[str, Mesh, Options]] = [
    ("mp_rank", Mesh(pp=2, ep=2), Options()),
    ("mp_rank", Mesh(tp=2, etp=1), Options()),
    ("mp_rank", Mesh(tp=2, ep=2, etp=2, pp=2, vpp=2), Options()),
    ("torch_dist", Mesh(ep=4), Options()),
    ("torch_dist", Mesh(tp=2, ep=2), Options()),
    ("torch_dist", Mesh(tp=2, ep=2, etp=4), Options()),
    ("dcp", Mesh(dp_shard=2, tp=2, ep=4, etp=1), Options()),
    ("dcp", Mesh(dp_shard=8, ep=2), Options()),
    ("archon", Mesh(dp_shard=2, tp=2, ep=2, etp=2), Options()),
    ("archon", Mesh(dp_shard=2, tp=2, ep=4, etp=1), Options()),
    ("hf", Mesh(), Options(experts="fused")),
]
"""For one of them."""


def moe(family: str) -> bool:
    return family.startswith(("mixtral", "deepseek")) or "moe" in family


def sweep() -> Iterator[Any]:
    for family in models.FAMILIES:
        cases = list(EVERYWHERE)
        cases += DENSE if family in ("llama", "qwen2_tied") else []
        cases += EXPERTS if moe(family) else []
        cases += MANY_EXPERTS if family == "qwen3_moe" else []
        for to, mesh, options in cases:
            extra = [f"{k}={v}" for k, v in vars(options).items() if v != getattr(Options(), k)]
            name = " ".join([family, to, str(mesh), *([mesh.layout] if mesh.layout else []), *extra])
            yield pytest.param(family, to, mesh, options, id=name.replace("\\", ""))


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory but our manifest."""
    found = {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}
    found.pop(MANIFEST, None)
    return found


def state(directory: Path) -> dict[str, tuple[int, int]]:
    """What any writing would change."""
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in sorted(directory.rglob("*"))}


def assert_same_files(have: Path, want: Path) -> None:
    a, b = contents(have), contents(want)
    assert a.keys() == b.keys()
    assert [name for name in a if a[name] != b[name]] == []


def there_and_back(source: Path, work: Path, to: str, mesh: Mesh, options: Options, **back: Any) -> None:
    before = state(source)
    result = convert(source, work / "there", to, mesh, options)
    assert result.verified
    assert result.planned.exactness() == "bitwise"
    convert(work / "there", work / "back", "hf", options=Options(**back))
    assert_same_files(work / "back", source)
    assert state(source) == before


@pytest.mark.parametrize(("family", "to", "mesh", "options"), list(sweep()))
def test_there_and_back(
    family: str, to: str, mesh: Mesh, options: Options, model: Callable[..., Path], tmp_path: Path
) -> None:
    back: dict[str, Any] = {"experts": "per_expert"} if options.experts == "fused" else {}
    if options.max_shard < 10**6:
        back["max_shard"] = 10**9  # else the shards stay
    there_and_back(model(family), tmp_path, to, mesh, options, **back)


@pytest.mark.parametrize("family", models.FAMILIES)
@pytest.mark.parametrize("to", ["mp_rank", "torch_dist", "dcp"])
def test_bf16_there_and_back(family: str, to: str, model: Callable[..., Path], tmp_path: Path) -> None:
    """Mixed with fp32 where a family keeps something in it (DeepSeek's selection bias)."""
    mesh = Mesh(dp_shard=3, tp=2) if to == "dcp" else Mesh(tp=2, pp=2)
    there_and_back(model(family, dtype="bfloat16"), tmp_path, to, mesh, Options())


@pytest.mark.parametrize("family", ["llama_tied", "qwen2_moe_mixed", "deepseek_v3", "mixtral"])
def test_from_format_to_format(family: str, model: Callable[..., Path], tmp_path: Path) -> None:
    """Not by way of Hugging Face: every hop reads what the one before it wrote, and each holds the same weights."""
    source = model(family, side_files=True)
    hops = [
        ("torch_dist", Mesh(tp=4, pp=2)),
        ("mp_rank", Mesh(tp=2, pp=2, vpp=2)),
        ("dcp", Mesh(dp_shard=3, tp=2)),
        ("archon", Mesh(dp_shard=4)),
        ("torch_dist", Mesh(pp=4)),
        ("dcp", Mesh(dp_shard=5)),
        ("mp_rank", Mesh(tp=4)),
        ("hf", Mesh()),
    ]
    place = source
    for n, (to, mesh) in enumerate(hops):
        convert(place, tmp_path / f"{n}", to, mesh)
        place = tmp_path / f"{n}"
        found = verify(source, place)
        assert found.same, found.report()
        assert found.equal == len(found.a.atoms)
    assert_same_files(place, source)


def test_verify_sees_one_changed_bit_in_any_format(model: Callable[..., Path], tmp_path: Path) -> None:
    source = model("qwen2")
    for to, mesh, file in [
        ("torch_dist", Mesh(tp=2), "release/__1_0.distcp"),
        ("mp_rank", Mesh(tp=2), "release/mp_rank_01/model_optim_rng.pt"),
        ("dcp", Mesh(dp_shard=2), "__1_0.distcp"),
    ]:
        result = convert(source, tmp_path / to, to, mesh)
        slot = next(s for s in result.planned.target.slots["layers.2.mlp.down"] if s.buffer.file == file)
        raw = bytearray((tmp_path / to / file).read_bytes())
        raw[slot.at(slot.box.lo)] ^= 1
        (tmp_path / to / file).write_bytes(raw)
        found = verify(source, tmp_path / to)
        assert not found.same
        assert found.differ == ["layers.2.mlp.down"]


# ------------------------------------------------------------------------------------------------ forms of the source


@pytest.mark.parametrize("to", ["mp_rank", "torch_dist", "dcp", "archon"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_fused_experts_on_disk_come_back_fused(
    family: str, to: str, model: Callable[..., Path], tmp_path: Path
) -> None:
    mesh = Mesh(dp_shard=2, ep=2) if to in ("dcp", "archon") else Mesh(tp=2, ep=2, etp=1)
    there_and_back(model(family, fused_experts=True), tmp_path, to, mesh, Options())


@pytest.mark.parametrize("to", ["mp_rank", "torch_dist", "dcp", "archon", "hf"])
def test_shards_and_small_files_come_back_as_they_were(to: str, model: Callable[..., Path], tmp_path: Path) -> None:
    source = model("qwen3", max_shard_size=60_000, side_files=True)
    assert len(list(source.glob("*.safetensors"))) > 3
    mesh = {"hf": Mesh(), "dcp": Mesh(dp_shard=2), "archon": Mesh(tp=2)}.get(to, Mesh(tp=2))
    there_and_back(source, tmp_path, to, mesh, Options())


def test_an_index_of_another_library_comes_back_as_it_was(model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """Older ones know no `total_parameters`, and not everybody sorts."""
    source = model_copy("llama", max_shard_size=200_000)
    file = source / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    old = {"metadata": {"total_size": index["metadata"]["total_size"]}, "weight_map": index["weight_map"]}
    file.write_text(json.dumps(old, indent=4))
    there_and_back(source, tmp_path, "torch_dist", Mesh(tp=2), Options())


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("to", ["mp_rank", "dcp", "hf"])
def test_torch_files_as_a_source(to: str, shards: int, model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """What comes back is safetensors: the file that transformers would have written."""
    source = model_copy("qwen2_moe_mixed")
    want = (source / "model.safetensors").read_bytes()
    models.to_bin(source, shards=shards)
    mesh = Mesh(tp=2, ep=2) if to == "mp_rank" else Mesh(dp_shard=3) if to == "dcp" else Mesh()
    convert(source, tmp_path / "there", to, mesh)
    convert(tmp_path / "there", tmp_path / "back", "hf")
    assert sorted(contents(tmp_path / "back")) == ["config.json", "generation_config.json", "model.safetensors"]
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == want
    assert verify(source, tmp_path / "back").same


# ------------------------------------------------------------------------------------------------ MTP


@pytest.mark.parametrize(
    ("to", "mesh", "options"),
    [
        ("mp_rank", Mesh(tp=2), Options()),
        ("mp_rank", Mesh(pp=2, vpp=2), LOCAL),
        ("mp_rank", Mesh(tp=2, pp=2, ep=2, etp=1), Options()),
        ("mp_rank", Mesh(pp=4, layout="E|t*2|t*2m|L"), Options()),
        ("torch_dist", Mesh(tp=2, pp=4), Options()),
        ("torch_dist", Mesh(pp=2, ep=4), Options()),
        ("dcp", Mesh(dp_shard=3), Options()),
    ],
    ids=lambda value: "" if isinstance(value, Options) else str(value),
)
def test_an_mtp_layer_there_and_back(
    to: str, mesh: Mesh, options: Options, model_copy: Callable[..., Path], tmp_path: Path
) -> None:
    source = models.add_mtp(model_copy("deepseek_v3"))
    there_and_back(source, tmp_path, to, mesh, options)


def test_mtp_copies_that_differ_are_refused(model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """Megatron shares embedding and head with the MTP block: two of them cannot be kept, and none is thrown away."""
    source = models.add_mtp(model_copy("deepseek_v3"), shared=False)
    with pytest.raises(ConvertError) as caught:
        convert(source, tmp_path / "mp", "mp_rank", Mesh(tp=2))
    text = str(caught.value)
    assert "model.layers.4.embed_tokens.weight" in text
    assert "model.layers.4.shared_head.head.weight" in text
    assert not (tmp_path / "mp").exists()


def test_archon_has_no_mtp_and_says_so(model_copy: Callable[..., Path], tmp_path: Path) -> None:
    source = models.add_mtp(model_copy("deepseek_v3"))
    with pytest.raises(ConvertError) as caught:
        convert(source, tmp_path / "archon", "archon")
    assert "mtp" in str(caught.value).lower()
    assert not (tmp_path / "archon").exists()


# ------------------------------------------------------------------------------------------------ element types


def test_a_narrower_type_and_back_is_declared(model: Callable[..., Path], tmp_path: Path) -> None:
    """fp32 → bf16 rounds; bf16 → fp32 gives the same values; both are said."""
    source, narrow = model("llama"), model("llama", dtype="bfloat16")
    result = convert(source, tmp_path / "bf16", "torch_dist", Mesh(tp=2), Options(dtype="bfloat16"))
    assert result.planned.exactness() == "narrow"
    assert result.report()["casts"] == {"F32 → BF16": len(result.planned.plan.atoms)}
    convert(tmp_path / "bf16", tmp_path / "back", "hf")
    have, want = models.tensors(tmp_path / "back"), models.tensors(narrow)
    assert all(have[name].equal(value) for name, value in want.items())
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    result = convert(tmp_path / "back", tmp_path / "wide", "hf", options=Options(dtype="float32"))
    assert result.planned.exactness() == "widen"


def test_what_a_table_keeps_in_fp32_stays(model: Callable[..., Path], tmp_path: Path) -> None:
    convert(model("deepseek_v3"), tmp_path / "bf16", "hf", options=Options(dtype="bf16"))
    have = models.tensors(tmp_path / "bf16")
    kept = {name for name, value in have.items() if str(value.dtype) == "torch.float32"}
    assert kept == {f"model.layers.{n}.mlp.gate.e_score_correction_bias" for n in (1, 2, 3)}


@pytest.mark.parametrize("dtype", ["int8", "int64", "bool", "uint16"])
def test_weights_are_not_cast_to_whole_numbers(dtype: str, model: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=dtype):
        convert(model("llama"), tmp_path / "out", "hf", options=Options(dtype=dtype))
    assert not (tmp_path / "out").exists()


def test_no_such_type(model: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bfloat12.*known.*bfloat16"):
        convert(model("llama"), tmp_path / "out", "hf", options=Options(dtype="bfloat12"))


# ------------------------------------------------------------------------------------------------ what means nothing


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"experts": "fussed"}, "fussed"),
        ({"spec": "TE"}, "TE"),
        ({"megatron_experts": "x"}, "'x'"),
        ({"vocab_divisor": 0}, "vocab"),
        ({"vocab_divisor": -3}, "vocab"),
        ({"max_shard": 0}, "shard"),
    ],
    ids=["experts", "spec", "megatron_experts", "vocab_divisor 0", "vocab_divisor -3", "max_shard"],
)
def test_an_option_that_means_nothing_is_named(options: dict[str, Any], says: str) -> None:
    """From Python as from the command line: not a plan that is not total, and not a division by zero."""
    with pytest.raises(ConfigError, match=says):
        Options(**options)


@pytest.mark.parametrize(
    ("to", "mesh"),
    [
        ("hf", Mesh(vpp=2)),
        ("hf", Mesh(layout="E|t*4|L")),
        ("dcp", Mesh(first=1)),
        ("dcp", Mesh(layout="E|t*4|L")),
        ("archon", Mesh(last=2)),
    ],
    ids=["hf vpp", "hf layout", "dcp first", "dcp layout", "archon last"],
)
def test_a_mesh_that_a_format_cannot_have_is_not_ignored(
    to: str, mesh: Mesh, model: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ConvertError):
        convert(model("llama"), tmp_path / "out", to, mesh)
    assert not (tmp_path / "out").exists()
