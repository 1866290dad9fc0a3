"""Training state: bit for bit on the same ranks, by box on others, whole or not there, refused when it is not ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from areal_convert.converter import open_checkpoint, verify
from areal_convert.converter.cli import cli
from areal_convert.converter.errors import (
    ConvertError,
    CorruptFile,
    NotACheckpoint,
    PlanError,
    SourceError,
    TargetError,
)
from areal_convert.engines.state import directory
from areal_convert.engines.state.directory import latest, read_marker
from areal_convert.engines.state.entries import TrainState
from areal_convert.engines.state.loading import load
from areal_convert.engines.state.saving import Progress, Saver
from models import logits, sample_tokens, tensors
from oracles.fsdp import Torch, TorchFailed

Model = Callable[..., Path]
WORKER = Path(__file__).with_name("state_worker.py")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Torch]:
    with Torch(worker=WORKER) as torch_:
        yield torch_


# ------------------------------------------------------------------------------------------------ several ranks


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("family", "mesh", "how"),
    [
        ("llama_tied", {"dp": 2}, {"asynchronous": True}),
        ("qwen3_moe", {"dp": 2, "tp": 2}, {"asynchronous": True}),
    ],
)
def test_resumed_equals_uninterrupted_bit_for_bit(
    ranks: Torch, model: Model, tmp_path: Path, family: str, mesh: dict[str, int], how: dict[str, Any]
) -> None:
    base = model(family)
    through = ranks.run("resume", base, mesh, dir=tmp_path / "run", options={"steps": 4, "save": [2], **how})
    again = ranks.run("resume", base, mesh, dir=tmp_path / "run", options={"steps": 4, "load": True, "seed": 9})
    for whole, rest in zip(through, again, strict=True):
        assert rest["same"] and rest["losses"] == whole["losses"][2:]
        assert rest["digest"] == whole["digest"]
        assert rest["lr"] == 1e-3 / 2 and rest["notes"] == [
            "parameter group 0: lr is 0.0005 as it was saved, not 0.001"
        ]
        assert rest["progress"]["data"] == {"epoch": 0, "index": 16} and rest["progress"]["version"] == 3
        assert rest["progress"]["counters"] == {"tokens": 48} and rest["progress"]["config"] == "a: 1\n"


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        ("llama_tied", {"dp": 2, "tp": 2}, {"dp": 1}),
        ("qwen2", {"dp": 1}, {"dp": 3}),
        ("qwen3_moe", {"dp": 4}, {"dp": 2}),
    ],
)
def test_resumed_on_other_ranks(
    ranks: Torch, model: Model, tmp_path: Path, family: str, before: dict[str, int], after: dict[str, int]
) -> None:
    """Losses go on as if nothing had been; torch's own loader finds the same tensors."""
    base, quiet = model(family), {"noise": False}
    through = ranks.run("resume", base, before, dir=tmp_path, options={"steps": 4, "save": [2], **quiet})
    rest = ranks.run("resume", base, after, dir=tmp_path, options={"steps": 4, "load": True, "seed": 9, **quiet})
    assert not rest[0]["same"] and any("anew" in note for note in rest[0]["notes"])
    wanted = [float.fromhex(x) for x in through[0]["losses"][2:]]
    assert [float.fromhex(x) for x in rest[0]["losses"]] == pytest.approx(wanted, rel=1e-5)
    assert all(found["wrong"] == [] for found in ranks.run("torch_loads", base, after, dir=tmp_path))


@pytest.mark.multiprocess
def test_an_asynchronous_save_is_of_its_step(ranks: Torch, model: Model, tmp_path: Path) -> None:
    base, run = model("qwen2"), tmp_path / "run"
    (found, _) = ranks.run("overlap", base, {"dp": 2}, dir=run)
    assert found["early"] == ["step-000001.partial"]
    now, behind = (directory.read_marker(p / "step-000001") for p in (tmp_path / "run-now", run))
    weights = [name for name in now.files if name.startswith("dcp/")]
    assert len(weights) == 3 and all(now.files[name] == behind.files[name] for name in weights)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("where", "asynchronous"), [("write", False), ("publish", True)])
def test_a_kill_keeps_the_last_whole_state(
    ranks: Torch, model: Model, tmp_path: Path, where: str, asynchronous: bool
) -> None:
    base = model("qwen2")
    with pytest.raises(TorchFailed):
        ranks.run("kill", base, {"dp": 2}, dir=tmp_path, options={"where": where, "asynchronous": asynchronous})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001", "step-000002.partial"]
    assert latest(tmp_path) == tmp_path / "step-000001"
    with pytest.raises(NotACheckpoint, match="cut short"):
        load(state_of(base), tmp_path / "step-000002.partial")
    found = ranks.run("resume", base, {"dp": 2}, dir=tmp_path, options={"steps": 2, "load": True, "save": [2]})
    assert found[0]["progress"]["step"] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001", "step-000002"]


@pytest.mark.multiprocess
def test_no_space_left(ranks: Torch, model: Model, tmp_path: Path, rank: int = 1) -> None:
    """What went wrong behind training's back is raised by the next save, on every rank; the one after that works."""
    found = ranks.run("full", model("qwen2"), {"dp": 2}, dir=tmp_path, options={"rank": rank})
    assert [answer["error"] for answer in found] == ["TargetError" if n == rank else "RankError" for n in range(2)]
    assert "File too large" in found[0]["message"]
    assert found[0]["left"] == ["step-000001"] and found[0]["after"] == ["step-000004"]


# ------------------------------------------------------------------------------------------------ one process


def state_of(base: Path, *, seed: int = 0, steps: int = 0, **more: Any) -> TrainState:
    """A transformers model with AdamW, trained a little."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        tokens = torch.randint(3, 1000, (1, 8), generator=torch.Generator().manual_seed(step))
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return TrainState([model], open_checkpoint(base), [optimizer], **more)


@pytest.fixture
def saved(model: Model, tmp_path: Path) -> tuple[Path, Path]:
    """A base model and a state of it."""
    base = model("qwen2", layers=2)
    return base, Saver().save_step(state_of(base, steps=1), Progress(1), tmp_path / "run")


@pytest.mark.parametrize("family", ["llama_tied", "qwen3_moe"])
def test_the_command_line_converts_a_state(model: Model, tmp_path: Path, family: str) -> None:
    base = model(family, layers=2, side_files=True)
    state = state_of(base, steps=2)
    where = Saver().save_step(state, Progress(2), tmp_path)
    done = CliRunner().invoke(cli, ["convert", str(where), str(tmp_path / "out"), "--to", "hf"])
    assert done.exit_code == 0, done.output + repr(done.exception)
    module: Any = state.parts[0]
    with torch.no_grad():
        expected = module.eval()(input_ids=sample_tokens(), use_cache=False).logits
    torch.testing.assert_close(logits(tmp_path / "out", sample_tokens()), expected, rtol=1e-5, atol=1e-5)
    assert tensors(tmp_path / "out").keys() == tensors(base).keys()
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert verify(where, tmp_path / "out").same


def test_generators_go_on_where_they_were(saved: tuple[Path, Path], tmp_path: Path) -> None:
    import random

    import numpy as np

    base, _ = saved
    state = state_of(base, steps=1, rng={"tracker": torch.arange(9, dtype=torch.uint8)})
    np.random.standard_normal(3)  # an odd number: both keep a second one
    random.gauss(0, 1)
    where = Saver().save(state, Progress(3), tmp_path / "here")
    wanted = torch.rand(4), np.random.standard_normal(5), [random.gauss(0, 1) for _ in range(5)]
    done = load(state, where)
    assert torch.equal(torch.rand(4), wanted[0]) and (np.random.standard_normal(5) == wanted[1]).all()
    assert [random.gauss(0, 1) for _ in range(5)] == wanted[2]
    assert torch.equal(done.rng["tracker"], torch.arange(9, dtype=torch.uint8))


def test_retention_and_the_order_of_saving(saved: tuple[Path, Path], tmp_path: Path) -> None:
    """A run resumed from an earlier step goes on from there: the latest is what was saved last, whatever its number."""
    base, _ = saved
    state, root = state_of(base), tmp_path / "kept"
    saver = Saver(keep_latest_k=2)
    for step in (5, 6, 7):
        saver.save_step(state, Progress(step), root)
    assert sorted(p.name for p in root.iterdir()) == ["step-000006", "step-000007"]
    saver.save_step(state, Progress(6), root)
    assert latest(root) == root / "step-000006" and len(list(root.iterdir())) == 2
    saver.save_step(state, Progress(8), root)
    assert sorted(p.name for p in root.iterdir()) == ["step-000006", "step-000008"]
    with pytest.raises(TargetError, match="keep_latest_k is 0"):
        Saver(keep_latest_k=0)


def test_a_kill_between_the_two_renames_of_a_replacement(saved: tuple[Path, Path]) -> None:
    base, where = saved
    away = where.rename(where.with_name(where.name + directory.REPLACED))
    assert latest(where.parent) == away and load(state_of(base), where.parent).progress.step == 1
    Saver().save_step(state_of(base), Progress(2), where.parent)
    assert sorted(p.name for p in where.parent.iterdir()) == ["step-000001", "step-000002"]


def test_what_is_in_the_way_stays(saved: tuple[Path, Path], tmp_path: Path) -> None:
    base, _ = saved
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    with pytest.raises(TargetError, match="no training state"):
        Saver().save(state_of(base), Progress(), tmp_path / "mine")
    with pytest.raises(TargetError, match="cannot be saved as JSON"):
        Saver().save(state_of(base), Progress(data={"x": object()}), tmp_path / "other")
    assert not (tmp_path / "other").exists()


# ------------------------------------------------------------------------------------------------ refusals


def refused(base: Path, path: Path, kind: type[ConvertError], match: str, **options: Any) -> None:
    """Loading fails, and has changed nothing."""
    state = state_of(base, seed=3)
    module: Any = state.parts[0]
    before = {n: t.clone() for n, t in module.state_dict().items()}
    with pytest.raises(kind, match=match):
        load(state, path, **options)
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())
    assert not state.optimizers[0].state


def test_damaged_states_are_refused(saved: tuple[Path, Path]) -> None:
    base, where = saved
    file = where / "dcp" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    refused(base, where, CorruptFile, r"__0_0\.distcp: has another content")
    file.write_bytes(data[:-100])
    refused(base, where, CorruptFile, r"__0_0\.distcp: has \d+ bytes, \d+ were saved", verify=False)
    file.unlink()
    refused(base, where, CorruptFile, r"__0_0\.distcp: is missing")


def test_no_file_is_believed_or_unpickled(saved: tuple[Path, Path], tmp_path: Path) -> None:
    """A `.metadata` that would run code, with a marker that vouches for it."""
    base, where = saved
    bad = b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR."
    marker = read_marker(where)
    files = dict(marker.files) | {"dcp/.metadata": directory.write_file(where / "dcp" / ".metadata", bad)}
    directory.write_file(where / "COMPLETE", directory.encode(directory.Marker(1, 1, files)))
    refused(base, where, SourceError, "system")
    assert not (tmp_path / "ran").exists()


def test_partial_and_foreign_directories_are_refused(saved: tuple[Path, Path], tmp_path: Path) -> None:
    base, where = saved
    refused(base, tmp_path / "nowhere", NotACheckpoint, "no such directory")
    refused(base, base, NotACheckpoint, "no training state")
    (where / "COMPLETE").rename(where / "x")
    refused(base, where, NotACheckpoint, "cut short")
    refused(base, where.parent, NotACheckpoint, "no COMPLETE")
    (where / "COMPLETE").write_text("[]")
    refused(base, where, CorruptFile, "no marker")
    text = (where / "x").read_text()
    (where / "COMPLETE").write_text(text.replace('"schema": 1', '"schema": 9'))
    refused(base, where, SourceError, "schema 9")
    (where / "COMPLETE").write_text(text.replace("trainer.json", "../trainer.json"))
    refused(base, where, CorruptFile, "outside")


def test_another_models_state_is_refused_by_field(saved: tuple[Path, Path], model: Model) -> None:
    _, where = saved
    refused(model("qwen2", layers=3), where, SourceError, r"num_hidden_layers: is 3 here, 2 in the state")
    refused(model("llama", layers=2), where, SourceError, r"family: is llama here, qwen2 in the state")


def test_another_optimizer_is_refused(saved: tuple[Path, Path], tmp_path: Path) -> None:
    base, where = saved
    state = state_of(base)
    module: Any = state.parts[0]
    state.optimizers = [torch.optim.SGD(module.parameters(), lr=0.1)]
    with pytest.raises(PlanError, match="belongs to SGD, was saved by AdamW"):
        load(state, where)
    state.optimizers = [torch.optim.AdamW(list(module.parameters())[:-1])]
    with pytest.raises(PlanError, match="parameters"):
        load(state, where)
    weights = Saver().save(state_of(base), Progress(), tmp_path / "weights", optimizer=False)
    refused(base, weights, SourceError, "without an optimizer")
    assert not load(state_of(base), weights, optimizer=False).with_optimizer
    assert load(state_of(base, seed=4), where, optimizer=False, rng=False).bytes_read > 0


def test_tensors_that_are_none_of_the_familys(saved: tuple[Path, Path], tmp_path: Path) -> None:
    base, where = saved
    state = state_of(base, extra={"score.weight": torch.arange(6.0)})
    with_extra = Saver().save(state, Progress(), tmp_path / "extra")
    refused(base, with_extra, PlanError, r"trainer_extra\.score\.weight: is in the saved state")
    with pytest.raises(PlanError, match=r"trainer_extra\.score\.weight: is not in the saved state"):
        load(state, where)
    module: Any = state.parts[0]
    module.register_parameter("score", torch.nn.Parameter(torch.ones(3)))  # a module's own: kept in the same way
    within = Saver().save(state, Progress(), tmp_path / "within")
    refused(base, within, PlanError, r"trainer_extra\.score: is in the saved state")
    other = state_of(base, extra={"score.weight": torch.zeros(6)})
    load(other, with_extra)
    assert torch.equal(other.extra["score.weight"], torch.arange(6.0))
    assert verify(with_extra, base).same
