"""ArchonEngine's training states and exports: the same ranks bit for bit, other ranks, every other format."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import archon_state_jobs as jobs
import models
from archon_jobs import Case
from areal_convert.converter.cli import cli
from areal_convert.converter.errors import TargetError
from areal_convert.engines.state import shards
from areal_convert.engines.state.beside import Beside
from areal_convert.engines.state.entries import Entry, pieces_of
from areal_convert.engines.state.shards import Key
from engine_worker import run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(120)]

BIAS = {"moe_router_bias_update_rate": 0.01}


def llama(**changes: Any) -> Case:
    return Case(str(models.cached_model("llama_tied", layers=4, side_files=True)), **changes)


def deepseek(**changes: Any) -> Case:
    return Case(str(models.cached_model("deepseek_v3", layers=4)), archon=BIAS, **changes)


SAVED = {
    "tp2": llama(tp=2),
    "pp2": llama(pp=2, schedule="interleaved_1f1b", n_mbs=2),
    "v2": llama(pp=2, schedule="dual_pipe_v", n_mbs=4),
    "ep2": deepseek(dp=2, ep=2),
    "ep2pp": deepseek(pp=2, schedule="1f1b", n_mbs=2),
}
MOVED = [
    ("tp2", llama(pp=2, schedule="1f1b", n_mbs=2)),
    ("pp2", llama(dp=2)),
    ("v2", llama(cp=2)),
    ("ep2", deepseek(dp=2)),
    ("ep2pp", deepseek(dp=2, ep=2)),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """States and exports of every layout of SAVED, and what each rank saw."""
    folder = tmp_path_factory.mktemp("archon")
    return folder, run_ranks(2, jobs.stop_and_go, cases=list(SAVED.items()), folder=str(folder))


@pytest.mark.parametrize("name", SAVED)
def test_the_same_ranks_go_on_bit_for_bit(saved: tuple[Path, list[dict[str, Any]]], name: str) -> None:
    for rank in saved[1]:
        one = rank[name]
        assert one["resumed"] == one["through"]
        assert one["digests_resumed"] == one["digests"]
        assert one["biases_resumed"] == one["biases"]
        assert (one["version"], one["lr_step"]) == (jobs.STOP, jobs.STOP)
        assert bool(one["biases"]) == name.startswith("ep")


def test_other_ranks_go_on_as_those_would_have(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, before = saved
    found = run_ranks(2, jobs.all_go_on, cases=MOVED, folder=str(folder))
    for name, _ in MOVED:
        for rank in found:
            assert rank[name]["resumed"] == pytest.approx(before[0][name]["through"], rel=2e-5), name
        after = {k: v for rank in found for k, v in rank[name]["biases_resumed"].items()}
        assert after == {k: v for rank in before for k, v in rank[name]["biases"].items()}


def test_a_save_from_a_process_lets_training_go_on(tmp_path: Path) -> None:
    case = llama(pp=2, schedule="1f1b", n_mbs=2)
    for one in run_ranks(2, jobs.beside, case=case, folder=str(tmp_path)):
        assert one["path"] == ["step-000003"]
        assert one["resumed"] == one["through"]
        assert one["ended"]


# ------------------------------------------------------------------------------------------------ other formats


def convert(*arguments: object) -> None:
    done = CliRunner().invoke(cli, ["convert", *map(str, arguments)])
    assert done.exit_code == 0, done.output + repr(done.exception)


@pytest.mark.parametrize("name", SAVED)
def test_exports_are_what_transformers_loads(saved: tuple[Path, list[dict[str, Any]]], name: str) -> None:
    from transformers import AutoModelForCausalLM

    from engine_jobs import _plain_logprobs

    folder, ranks = saved
    model = AutoModelForCausalLM.from_pretrained(folder / f"{name}-hf", dtype=torch.float32)
    expected = _plain_logprobs(model.eval())
    for rank in ranks:
        data = rank[name]["rank"]
        mine = expected[data::2] if SAVED[name].dp == 2 else expected
        for ours, theirs in zip(rank[name]["logprobs"], mine, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["pp2", "v2", "ep2"])
def test_a_state_is_a_checkpoint_to_the_hub(
    saved: tuple[Path, list[dict[str, Any]]], name: str, tmp_path: Path
) -> None:
    """To Hugging Face's form and back, to Megatron-Core's; the weights are those that the engine exported."""
    state, export = saved[0] / name, saved[0] / f"{name}-hf"
    convert(state, tmp_path / "hf", "--to", "hf")
    whole, exported = tensors(tmp_path / "hf"), tensors(export)
    assert whole.keys() == exported.keys()
    for to in ("torch_dist", "dcp", "archon"):
        convert(state, tmp_path / to, "--to", to)
        convert(tmp_path / to, tmp_path / f"{to}-hf", "--to", "hf")
        again = tensors(tmp_path / f"{to}-hf")
        assert all(torch.equal(again[key], value) for key, value in whole.items()), to
    for key, value in whole.items():  # the engine exports in the element types of the base model
        assert torch.equal(exported[key], value.to(exported[key].dtype)), key
    assert any("correction_bias" in key for key in whole) == name.startswith("ep")


def tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {key: value for file in path.glob("*.safetensors") for key, value in load_file(file).items()}


# ------------------------------------------------------------------------------------------------ beside training


def test_a_writer_writes_what_is_staged_and_says_when_it_cannot(tmp_path: Path) -> None:
    entries = {
        "model.a": Entry("model.a", (5, 3), torch.randn(5, 3), pieces_of(torch.empty(5, 3))),
        "model.b": Entry("model.b", (7,), torch.arange(7, dtype=torch.bfloat16), pieces_of(torch.empty(7))),
    }
    regions = {Key(name, box): region for name, entry in entries.items() for box, region in entry.regions()}
    layout = shards.lay_out([shards.say(entries, {})], 0)
    expected = shards.write(tmp_path / "here", layout, regions.__getitem__)
    beside = Beside()
    try:
        beside.stage(layout, regions.__getitem__)
        for region in regions.values():
            region.zero_()  # training goes on
        assert beside.write(tmp_path / "there") == expected
        assert (tmp_path / "there").read_bytes() == (tmp_path / "here").read_bytes()
        with pytest.raises(OSError, match="nowhere") as caught:
            beside.write(tmp_path / "nowhere" / "x")
        assert caught.value.errno == errno.ENOENT
        assert beside._process is not None
        beside._process.kill()
        with pytest.raises(TargetError, match="ended with -9"):
            beside.write(tmp_path / "killed")
        assert beside.write(tmp_path / "again") == expected, "the next save gets another process"
    finally:
        beside.close()
