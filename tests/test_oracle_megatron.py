"""Oracles 1 and 2: Megatron-Core itself loads what we write and computes transformers' logits, and the other way round.

The worker (tests/oracles) fills every parameter with NaN before it loads, loads `torch_dist` with Megatron-LM's default
strictness and per-rank files with `strict=True`, and runs the real pipeline forward on gloo.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_convert.converter.convert import Mesh, Options, convert
from areal_convert.converter.verify import verify
from models import add_mtp, cached_model, logits, make_model, sample_tokens, tensors
from oracles.mcore import padded_vocab, run_jobs

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

TOLERANCE = 1e-5

DENSE: dict[str, dict[str, Any]] = {
    "tp1": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "tp2pp2": {"tp": 2, "pp": 2},
    "pp2vpp2": {"pp": 2, "vpp": 2},
}
MOE: dict[str, dict[str, Any]] = DENSE | {"ep2": {"ep": 2}, "tp2ep2etp1": {"tp": 2, "ep": 2, "etp": 1}}
MESHES = {
    "llama": DENSE | {"tp4": {"tp": 4}, "layout": {"pp": 4, "layout": "E|t*2|t*2|L"}},  # 2 KV heads at TP 4
    "llama_tied": DENSE,
    "llama_rope": {"tp2pp2": {"tp": 2, "pp": 2}},
    "mistral": DENSE,
    "qwen2": DENSE,
    "qwen3": DENSE,
    "mixtral": MOE,
    "qwen2_moe": MOE,
    "qwen2_moe_mixed": {"tp2pp2": {"tp": 2, "pp": 2}, "ep2": {"ep": 2}},
    "qwen3_moe": MOE,
    "deepseek_v3": MOE,
    "deepseek_v3_noq": {"tp2": {"tp": 2}, "ep2": {"ep": 2}},
}


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    # Megatron-Core ranks groups by their best (experts per token // groups taken) experts, transformers by two.
    "deepseek_v3": {"topk_group": 1},
    "deepseek_v3_noq": {"topk_group": 1},
    "llama_rope": {"rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 65536},  # Megatron-Core knows only 8192
}


def mesh_of(sizes: dict[str, Any]) -> Mesh:
    return Mesh(**sizes)


def forward(source: Path, jobs: list[dict[str, Any]], work: Path) -> list[torch.Tensor]:
    """Logits that Megatron-Core computes for each job, on the same tokens."""
    tokens = work / "tokens.safetensors"
    save_file({"tokens": sample_tokens()}, tokens)
    vocab = json.loads((source / "config.json").read_text())["vocab_size"]
    full = [
        {
            "mode": "forward",
            "hf_dir": str(source),
            "out": str(work / f"out{n}"),
            "tokens": str(tokens),
            "vocab": padded_vocab(vocab, job["mesh"].get("tp", 1)),
            **job,
        }
        for n, job in enumerate(jobs)
    ]
    for job in full:
        Path(job["out"]).mkdir()
    results = []
    for ranks in run_jobs(full, timeout=540):
        for rank in ranks:
            assert not rank.get("still_nan"), rank["still_nan"]
        (path,) = (rank["logits"] for rank in ranks if "logits" in rank)
        results.append(load_file(path)["logits"])
    return results


@pytest.mark.parametrize("family", sorted(MESHES))
def test_megatron_computes_the_same_logits(family: str, tmp_path: Path) -> None:
    source = cached_model(family, **OVERRIDES.get(family, {}))
    wanted = logits(source, sample_tokens())
    jobs, names = [], []
    for name, sizes in MESHES[family].items():
        # A torch_dist of one mesh is loaded on another: it holds whole tensors.
        stored = {"tp": 2, "pp": 2} if name in ("tp1", "tp2") else sizes
        for form, cut in (("torch_dist", stored), ("mp_rank", sizes)):
            out = tmp_path / f"{form}-{name}"
            convert(source, out, form, mesh_of(cut), Options(spec="local"))
            jobs.append({"mesh": sizes, "load": form, "dir": str(out / "release")})
            names.append(f"{form} {name}")
    for name, found in zip(names, forward(source, jobs, tmp_path), strict=True):
        worst = float((found - wanted).abs().max())
        assert worst <= TOLERANCE, f"{family} {name}: logits differ by {worst}"


def test_bfloat16_and_mtp(tmp_path: Path) -> None:
    """DeepSeek-V3 with an MTP layer in bf16: Megatron loads it strictly, and every stored value is the source's."""
    source = add_mtp(make_model("deepseek_v3", tmp_path / "hf", dtype="bfloat16", topk_group=1))
    sizes = {"tp": 2, "pp": 2}
    jobs = []
    for form in ("torch_dist", "mp_rank"):
        convert(source, tmp_path / form, form, mesh_of(sizes), Options(spec="local"))
        jobs.append(
            {"mesh": sizes, "load": form, "dir": str(tmp_path / form / "release"), "mtp": 1, "dtype": "bfloat16"}
        )
    a, b = forward(source, jobs, tmp_path)
    assert torch.equal(a, b)
    assert torch.isfinite(a.float()).all()


SAVED = {
    "llama": [{"tp": 2, "pp": 2}, {"tp": 4}, {"pp": 2, "vpp": 2}],
    "llama_tied": [{"tp": 2, "pp": 2}],
    "qwen2": [{"tp": 2, "pp": 2}],
    "qwen3_moe": [{"ep": 2}, {"tp": 2, "pp": 2}],
    "deepseek_v3": [{"ep": 2}, {"tp": 2, "pp": 2}],
    "qwen2_moe": [{"tp": 2, "ep": 2, "etp": 1}],
}


@pytest.mark.parametrize("family", sorted(SAVED))
def test_what_megatron_saves_is_read(family: str, tmp_path: Path) -> None:
    source = cached_model(family, **OVERRIDES.get(family, {}))
    vocab = json.loads((source / "config.json").read_text())["vocab_size"]
    jobs = [
        {
            "mode": "save",
            "mesh": sizes,
            "hf_dir": str(source),
            "out": str(tmp_path / f"saved{n}"),
            "vocab": padded_vocab(vocab, sizes.get("tp", 1)),
            "formats": ["torch_dist", "mp_rank"],
        }
        for n, sizes in enumerate(SAVED[family])
    ]
    for job in jobs:
        Path(job["out"]).mkdir()
    run_jobs(jobs, timeout=540)
    wanted, originals = logits(source, sample_tokens()), tensors(source)
    for job in jobs:
        for form in ("torch_dist", "mp_rank"):
            back = tmp_path / f"back-{Path(job['out']).name}-{form}"
            convert(Path(job["out"]) / form, back, "hf", hf_config=source)
            assert verify(source, back).same
            found = tensors(back)
            assert found.keys() == originals.keys()
            assert all(torch.equal(found[name], value) for name, value in originals.items())
            assert torch.equal(logits(back, sample_tokens()), wanted)
