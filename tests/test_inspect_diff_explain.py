"""`inspect`, `diff` and `explain`, and the picture of a plan."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from areal_convert.converter import (
    Mesh,
    NotACheckpoint,
    PlanError,
    convert,
    diff,
    explain,
    inspect,
    open_checkpoint,
    plan,
)
from areal_convert.converter.diffing import compare_values
from areal_convert.converter.drawing import draw
from areal_convert.converter.drawing_rooms import rooms
from areal_convert.converter.drawing_tensors import figures
from areal_convert.converter.explaining import AXES
from areal_convert.converter.human import ranges_text, size_text
from areal_convert.converter.inspecting import inspect_checkpoint
from areal_convert.converter.rawio import Files
from areal_convert.mappings import FAMILIES as TABLES
from areal_convert.mappings import table
from models import cached_model, tensors

Model = Callable[..., Path]


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def edit_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    have = tensors(path)
    change(have)
    save_file(have, path / "model.safetensors", {"format": "pt"})


# ------------------------------------------------------------------------------------------------ inspect


@pytest.mark.parametrize("family", ["llama_tied", "qwen3_moe", "deepseek_v3"])
def test_inspect_counts_what_is_stored(model: Model, family: str) -> None:
    path = model(family, dtype="bfloat16")
    found, have = inspect(path), tensors(path)
    assert found.ok and found.format == "hf" and found.parameters == sum(t.numel() for t in have.values())
    for name, dtype in (("BF16", torch.bfloat16), ("F32", torch.float32)):
        of_type = [t for t in have.values() if t.dtype == dtype]
        if of_type:
            held = found.dtypes[name]
            assert (held.tensors, held.bytes) == (len(of_type), sum(t.nbytes for t in of_type))
    assert json.loads(json.dumps(found.report()))["ok"] is True


@pytest.mark.parametrize("to", ["torch_dist", "mp_rank", "dcp", "archon"])
def test_look_alikes_are_told_apart(model: Model, tmp_path: Path, to: str) -> None:
    """B67: torch_dist and plain DCP look alike; what was seen is told."""
    convert(model("qwen3", side_files=True), tmp_path / "out", to, verify=False)
    found = inspect(tmp_path / "out")
    assert (found.format, found.family, found.ok) == (to, "qwen3", True)
    seen = ", ".join(found.because)
    wanted = {"torch_dist": "metadata.json", "mp_rank": "1 mp_rank_*", "dcp": "neither", "archon": "Archon's names"}
    assert wanted[to] in seen
    assert {"generation_config.json", "chat_template.jinja", "modeling_x.py"} <= set(found.side_files)  # B118


def test_an_untied_config_without_a_head(model_copy: Model) -> None:
    """B05: the contradiction is told, with the choice; nothing is invented."""
    path = model_copy("llama_tied")
    edit_config(path, tie_word_embeddings=False)
    (problem,) = inspect(path).problems
    assert problem.about == "head" and "lm_head.weight" in problem.hint and "tie_word_embeddings" in problem.hint
    assert inspect(path, tie=True).ok


def test_unknown_names_are_listed_together(model_copy: Model) -> None:
    """B68."""
    path = model_copy("qwen2")
    edit_weights(path, lambda have: have.update({f"vision.{n}.weight": torch.zeros(2) for n in range(3)}))
    found = inspect(path)
    assert [p.about for p in found.problems] == [f"vision.{n}.weight" for n in range(3)]
    assert found.dtypes["F32"].tensors == 54 and inspect(path, drop=[r"vision\..*"]).ok


def test_shards_on_two_disks(model: Model, tmp_path: Path) -> None:
    """B88: with `also` they are one checkpoint, without it the missing files are named with what they hold."""
    convert(model("qwen2"), tmp_path / "a", "dcp", Mesh(dp_shard=2), verify=False)
    (tmp_path / "b").mkdir()
    shutil.move(next((tmp_path / "a").rglob("__1_0.distcp")), tmp_path / "b" / "__1_0.distcp")
    found = inspect(tmp_path / "a")
    assert found.format == "dcp" and not found.ok
    assert any("__1_0.distcp" in p.about and "it holds" in p.what for p in found.problems)
    assert inspect(tmp_path / "a", also=[tmp_path / "b"]).ok


def test_storage_and_quantisation_are_told_apart(model: Model) -> None:
    """B62: trained in FP8, stored in bf16."""
    ckpt = open_checkpoint(model("qwen2", dtype="bfloat16"))
    ckpt.found.args = {"fp8": "hybrid", "fp8_recipe": "delayed", "tensor_model_parallel_size": 2, "fp4": None}
    found = inspect_checkpoint(ckpt)
    assert list(found.dtypes) == ["BF16"] and found.facts["saved_on"] == {"tp": 2}
    assert found.quantization["training"] == {"fp8": "hybrid", "fp8_recipe": "delayed"}
    assert "an export will hold, is BF16" in found.quantization["says"]


def test_what_cannot_be_opened_is_still_described(model_copy: Model) -> None:
    path = model_copy("qwen2")
    edit_config(path, model_type="gpt_neox")
    found = inspect(path)
    assert found.format == "hf" and found.family is None and found.dtypes["F32"].tensors == 51
    assert "gpt_neox" in found.problems[0].what and "qwen3" in found.problems[0].hint
    (path / "config.json").write_text("{")
    assert "JSON" in inspect(path).problems[0].what


def test_a_dtype_that_the_config_does_not_mean(model_copy: Model) -> None:
    path = model_copy("qwen2")
    edit_config(path, dtype="bfloat16")
    assert "stored as F32" in inspect(path).notes[0]


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint):
        inspect(tmp_path)


# ------------------------------------------------------------------------------------------------ diff


def test_same_across_formats(model: Model, tmp_path: Path) -> None:
    convert(model("qwen3_moe"), tmp_path / "out", "mp_rank", Mesh(tp=2, ep=2), verify=False)
    found = diff(model("qwen3_moe"), tmp_path / "out")
    assert found.same and found.sure and found.equal == len(found.a.atoms)


def test_values_are_measured(model: Model, model_copy: Model) -> None:
    path = model_copy("qwen2")
    name = "model.layers.1.self_attn.q_proj.weight"

    def change(have: dict[str, torch.Tensor]) -> None:
        have[name][5, 7] = 3.0
        have[name][6, 7] *= 1 + 1e-6
        have["model.norm.weight"][:2] = torch.tensor([float("nan"), float("inf")])
        have["lm_head.weight"][0, 0] = 0.0

    edit_weights(path, change)
    before = tensors(model("qwen2"))[name]
    found = diff(model("qwen2"), path)
    q = found.values["layers.1.attn.q"]
    assert (q.bits, q.values, q.nan, q.elements) == (2, 2, 0, 64 * 64)
    assert q.max_abs == pytest.approx(abs(3.0 - float(before[5, 7]))) and q.at == (0, 0, 5, 7)
    assert q.max_rel is not None and 0 < q.max_rel <= 2
    norm = found.values["final_norm"]
    assert (norm.nan, norm.values, norm.max_abs, norm.max_rel) == (1, 2, float("inf"), float("inf"))
    assert set(found.values) == {"layers.1.attn.q", "final_norm", "head"} and not found.same
    assert not diff(model("qwen2"), path, values=False).values


def test_zeros_of_both_signs_differ_in_bits_only(model_copy: Model) -> None:
    a, b = model_copy("qwen2"), model_copy("qwen2")
    edit_weights(a, lambda have: have["model.norm.weight"].fill_(0.0))
    edit_weights(b, lambda have: have["model.norm.weight"].fill_(-0.0))
    values = diff(a, b).values["final_norm"]
    assert (values.bits, values.values, values.max_abs) == (64, 0, None)


def test_types_names_and_config(model: Model, model_copy: Model) -> None:
    path = model_copy("qwen2", dtype="bfloat16")
    edit_config(path, rope_parameters={"rope_theta": 5.0}, transformers_version="0.1")
    found = diff(model("qwen2"), path)
    assert found.dtypes["embed"] == ("F32", "BF16") and len(found.dtypes) == 51 and found.equal == 0
    assert found.values["embed"].max_rel == pytest.approx(2**-8, rel=0.02)
    assert found.config["rope_parameters.rope_theta"][1] == 5.0 and "transformers_version" in found.about_file
    edit_weights(path, lambda have: have.__delitem__("model.norm.weight"))
    found = diff(model("qwen2"), path)
    assert found.only_a == ["final_norm"] and found.names_a == ["model.norm.weight"] and not found.sure


def test_values_are_compared_in_chunks(model: Model) -> None:
    a, b = open_checkpoint(model("qwen2")), open_checkpoint(model("qwen2", dtype="bfloat16"))
    files = Files()
    whole, cut = (
        compare_values(files, a.slots["embed"], b.slots["embed"], a.atoms["embed"][1], limit)
        for limit in (1 << 30, 1000)
    )
    files.close()
    assert whole == cut and whole.values > 0


# ------------------------------------------------------------------------------------------------ explain


def test_explain_points_at_the_bytes(model: Model, tmp_path: Path) -> None:
    """The offsets and strides that are told are those under which the values are found in the written files."""
    mesh = Mesh(tp=2, pp=2)
    convert(model("qwen2"), tmp_path / "out", "torch_dist", mesh, verify=False)
    name = "model.layers.3.self_attn.v_proj.weight"
    right = tensors(model("qwen2"))[name]
    found = explain(model("qwen2"), name, "torch_dist", mesh)
    (way,) = found.ways
    assert (found.kind, way.atom, way.axes, way.exactness) == (
        "source",
        "layers.3.attn.v",
        {"g": 2, "d": 8, "h": 64},
        "bitwise",
    )
    assert [(p.rank, p.coordinates, p.indices["g"]) for p in way.targets] == [
        (2, "tp 0 · pp 1", (0, 1)),
        (3, "tp 1 · pp 1", (1, 2)),
    ]
    for place in way.targets:
        data = (tmp_path / "out" / place.file).read_bytes()
        (g, _), d, h = place.indices["g"], 5, 9
        at = place.offset + d * place.strides["d"] + h * place.strides["h"]
        assert torch.frombuffer(bytearray(data[at : at + 4]), dtype=torch.float32)[0] == right[g * 8 + d, h]
        assert place.counted == {"i": 3} and place.pattern.startswith("{i} (g")


@pytest.mark.parametrize(
    ("name", "kind", "atoms"),
    [
        ("layers.0.attn.q", "atom", 1),
        ("decoder.layers.0.self_attention.linear_qkv.weight", "target", 3),
        ("layers.0.feed_forward.w1.weight", "name", 1),
        ("module.model.layers.0.mlp.gate_proj.weight", "name", 1),
    ],
)
def test_explain_knows_names_of_all_kinds(model: Model, name: str, kind: str, atoms: int) -> None:
    found = explain(model("qwen2"), name, "mp_rank")
    assert found.kind == kind and len(found.ways) == atoms
    assert json.loads(json.dumps(found.report()))["legend"]["h"] == "hidden"


def test_explain_without_such_a_name(model: Model) -> None:
    with pytest.raises(PlanError, match=r"q_proj\.weight"):
        explain(model("qwen2"), "model.layers.0.self_attn.q_proj", "hf")


def test_every_axis_has_a_meaning() -> None:
    for family in TABLES:
        for atom in table(family).atoms.values():
            assert set(atom.axes.split()) <= AXES.keys(), atom.name


# ------------------------------------------------------------------------------------------------ the picture


class _Page(HTMLParser):
    """Checks that tags close in order."""

    VOID = frozenset({"meta", "br", "link", "img", "input", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


MESHES = {
    "torch_dist": Mesh(tp=2, pp=2, ep=2),
    "mp_rank": Mesh(tp=4),
    "dcp": Mesh(dp_shard=3, tp=2),
    "archon": Mesh(dp_shard=128),
    "hf": Mesh(),
}


@pytest.mark.parametrize("to", MESHES)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "llama_tied"])
def test_a_page_of_its_own(model: Model, family: str, to: str) -> None:
    mesh = MESHES[to] if family != "llama_tied" else replace(MESHES[to], ep=1)
    page = draw(plan(model(family), to, mesh))
    parser = _Page()
    parser.feed(page)
    assert parser.open == []
    assert not re.search(r"https?://|<script|@import|src=", page)
    assert "nan" not in page.lower().replace("finance", "") and len(page) < 400_000


def test_rooms_hold_what_the_plan_writes(model: Model) -> None:
    planned = plan(model("qwen3_moe"), "torch_dist", MESHES["torch_dist"])
    found = rooms(planned)
    assert sum(r.total for r in found) == planned.plan.totals()["bytes_written"]
    assert [r.number for r in found] == list(range(8))
    assert found[2].experts == {2, 3} and found[0].layers == {0, 1} and found[0].held["embedding"] > 0


@pytest.mark.parametrize("to", ["torch_dist", "mp_rank", "dcp", "archon"])
def test_pictured_bands_cover_the_whole_and_lie_in_their_parts(to: str) -> None:
    """Painting every band: each element of the matrices once, each element of the parts at most once, padding aside."""
    planned = plan(cached_model("qwen2"), to, replace(MESHES[to], ep=1, dp_shard=3 if to in ("dcp", "archon") else 1))
    for figure in figures(planned):
        wholes = [torch.zeros(rows, cols, dtype=torch.int) for _, _, rows, cols in figure.atoms]
        for part in figure.parts:
            for piece in part.pieces.values():
                own = torch.zeros(piece.rows, piece.cols, dtype=torch.int)
                for band in piece.bands:
                    w, p = band.whole, band.part
                    wholes[band.atom][w.row : w.row + w.rows, w.col : w.col + w.cols] += 1
                    own[p.row : p.row + p.rows, p.col : p.col + p.cols] += 1
                    assert (w.rows, w.cols) == (p.rows, p.cols)
                assert own.max() <= 1 and (own == 1).all(), (figure.title, part.label)
        assert all((w == 1).all() for w in wholes), figure.title


def test_words_for_sizes_and_ranges() -> None:
    assert (size_text(2_471_645_608), size_text(999)) == ("2.47 GB", "999 B")
    assert ranges_text([0, 1, 2, 5, 7, 8]) == "0–2, 5, 7–8"
