"""Sources: every block of every format, element type and shard reads as the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_convert.converter import Mesh, convert, open_checkpoint
from areal_convert.converter.errors import ConfigError, PlanError, Problems, SourceError
from areal_convert.converter.peers import Peers
from areal_convert.converter.slots import Box
from areal_convert.converter.sync.blocks import Blocks
from areal_convert.converter.sync.feed import SourceFeed
from areal_convert.converter.sync.planning import plan
from areal_convert.converter.sync.sink import SinkLayout
from areal_convert.converter.sync.source import Source, check_types, open_source
from areal_convert.converter.sync.source_live import _seen
from areal_convert.converter.sync.wire import Atom, Manifest
from sync_threads import state_of

Model = Callable[..., Path]


def layout_of(path: Path, dtype: str | None = None) -> SinkLayout:
    """What a server with this checkpoint's model would say."""
    ckpt = open_checkpoint(path)
    atoms = [Atom(n, tuple(shape), dtype or ckpt.dtypes()[n]) for n, (_, shape) in ckpt.atoms.items()]
    return SinkLayout({"family": ckpt.table.name, "sizes": ckpt.view.dims}, atoms)


def all_bytes(source: Source, layout: SinkLayout, block: int = 1000) -> dict[str, np.ndarray]:
    """Every atom, put together from its blocks as raw bytes."""
    planned = plan(source, layout)
    manifest = Manifest("r", 1, 1, "full", planned.atoms, planned.senders, block, 1 << 20)
    blocks = Blocks(manifest)
    torch_types = {"F32": np.uint32, "BF16": np.uint16}
    found = {a.name: np.zeros(a.shape, torch_types[a.dtype]) for a in planned.atoms}
    for n in range(blocks.count):
        number, lo, hi = blocks.box(n)
        atom = planned.atoms[number]
        out = np.empty(blocks.nbytes(n), np.uint8)
        source.read(atom.name, Box(lo, hi), atom.dtype, out)
        region = tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))
        found[atom.name][region] = out.view(found[atom.name].dtype).reshape(found[atom.name][region].shape)
    return found


def expected(path: Path, dtype: str | None = None) -> dict[str, np.ndarray]:
    ckpt = open_checkpoint(path)
    found = {}
    for name in ckpt.atoms:
        value = ckpt.read(name, dtype)
        found[name] = (
            value.view(torch.int32 if value.element_size() == 4 else torch.int16)
            .numpy()
            .view(f"u{value.element_size()}")
        )
    return found


def equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return set(a) == set(b) and all(np.array_equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama_tied", "deepseek_v3"])
def test_a_checkpoint_reads_the_same_in_blocks(model: Model, family: str) -> None:
    path = model(family, dtype="bfloat16", layers=2)
    assert equal(all_bytes(open_source(path), layout_of(path)), expected(path))


@pytest.mark.parametrize("fmt", ["torch_dist", "dcp", "mp_rank"])
def test_and_in_every_format(model: Model, tmp_path: Path, fmt: str) -> None:
    path = model("qwen3_moe", dtype="bfloat16", layers=2)
    mesh = Mesh(tp=2, ep=2) if fmt == "mp_rank" else Mesh()
    convert(path, tmp_path / "c", fmt, mesh)
    assert equal(all_bytes(open_source(tmp_path / "c"), layout_of(path)), expected(path))


def test_casts_are_those_of_torch_on_both_ways(model: Model) -> None:
    path = model("qwen3", layers=2)
    for source in (open_source(path), open_source(state_of(path, zero=False), base=path)):
        assert equal(all_bytes(source, layout_of(path, "BF16")), expected(path, "BF16"))


def test_several_ranks_share_a_checkpoint_out(model: Model) -> None:
    path = model("qwen3_moe", dtype="bfloat16", layers=2)
    senders = open_source(path, peers=Peers(1, 3, lambda x: [x] * 3)).senders()
    names = [name for boxes in senders for name, _ in boxes]
    assert sorted(names) == sorted(open_checkpoint(path).atoms) and all(senders)
    loads = [sum(box.volume for _, box in boxes) for boxes in senders]
    assert max(loads) < 1.3 * min(loads)


def test_what_is_no_source(model: Model, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="int is nothing to send weights from"):
        open_source(3)
    with pytest.raises(ConfigError, match="Pass base="):
        open_source({})
    with pytest.raises(SourceError):
        open_source(tmp_path / "nothing")


def test_a_directory_that_was_written_over_is_read_again(model: Model, model_copy: Model) -> None:
    path = model_copy("qwen3", dtype="bfloat16", layers=2)
    source = open_source(path)
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-2:] = b"\x01\x02"
    file.write_bytes(data)
    with pytest.raises(SourceError, match="was changed while it was sent"):
        source.check_unchanged()
    source.refresh()
    source.check_unchanged()
    assert equal(all_bytes(source, layout_of(path)), expected(path))
    given = open_source(open_checkpoint(path))
    data[-2:] = b"\x03\x04"
    file.write_bytes(data)
    with pytest.raises(SourceError, match="Open it again"):
        given.refresh()


def test_a_live_model_gives_only_what_it_holds(model: Model) -> None:
    path = model("qwen3", dtype="bfloat16", layers=2)
    source = open_source(state_of(path, zero=False), base=path)
    with pytest.raises(SourceError, match="rank 0 does not hold"):
        source.read("head", Box((0, 0), (5000, 64)), "BF16", np.empty(5000 * 128, np.uint8))
    source.close()
    with pytest.raises(SourceError):
        source.read("head", Box((0, 0), (1, 64)), "BF16", np.empty(128, np.uint8))


def test_replaced_tensors_are_found_by_a_refresh(model: Model) -> None:
    """An engine that offloads puts other memory behind the same names."""
    path = model("qwen3", dtype="bfloat16", layers=2)
    held = [{k: torch.zeros_like(v) for k, v in state_of(path).items()}]
    source = open_source(lambda: held[0], base=path)
    held[0] = state_of(path, zero=False)
    source.refresh()
    assert equal(all_bytes(source, layout_of(path)), expected(path))
    one = torch.ones(4)
    assert _seen({"a": one}) == _seen({"a": one.detach()}) != _seen({"a": torch.from_numpy(one.numpy())})
    nowhere = {"a": torch.empty(4, device="meta")}  # what wraps other tensors does not say where these are, either
    assert _seen(nowhere) != _seen(nowhere)


def test_memory_of_a_device_is_not_held_between_pushes(model: Model) -> None:
    path = model("qwen3", layers=2)
    source = open_source(state_of(path), base=path)
    box = Box((0,) * len(source.shapes["embed"]), source.shapes["embed"])
    source.let_go()
    assert source.flat("embed", box, source.dtypes["embed"]) is not None, "the CPU's may be held"
    held = source._own  # type: ignore[attr-defined]
    held["embed"] = [(box, torch.empty(box.sizes, device="meta"), None)]  # no CPU's, as a GPU's is not
    source.let_go()
    assert not source._own  # type: ignore[attr-defined]
    source.refresh()
    assert source.flat("embed", box, source.dtypes["embed"]) is not None


def test_types_that_are_another_model_are_refused(model: Model) -> None:
    source = open_source(model("qwen3", dtype="bfloat16", layers=2))
    problems = Problems()
    casts = check_types(source, {"head": "F8_E4M3", "final_norm": "F32", "embed": "BF16"}, problems)
    assert [p.about for p in problems.found] == ["head"] and "quantises" in problems.found[0].hint
    assert casts == {"BF16 → F8_E4M3": 1, "BF16 → F32": 1}


def test_everything_that_does_not_fit_is_told_at_once(model: Model) -> None:
    path = model("qwen3", dtype="bfloat16", layers=2)
    layout = layout_of(path)
    atoms = {a.name: a for a in layout.atoms}
    del atoms["layers.0.attn.k"]
    atoms["draft.fc"] = Atom("draft.fc", (3,), "BF16")
    atoms["head"] = Atom("head", (1, 64), "BF16")
    atoms["final_norm"] = Atom("final_norm", (64,), "F8_E4M3")
    with pytest.raises(PlanError) as caught:
        plan(open_source(path), SinkLayout(layout.model, list(atoms.values())))
    assert {p.about for p in caught.value.problems} == {
        "model.layers.0.self_attn.k_proj.weight",
        "draft.fc",
        "head",
        "final_norm",
    }


def test_whole_tensors_for_servers_of_others(model: Model) -> None:
    """Hugging Face's names and values, from a Megatron directory as from the model itself."""
    path = model("qwen3_moe", dtype="bfloat16", layers=2)
    feed = SourceFeed(open_source(path), Peers())
    wanted = feed.wanted()
    state = state_of(path, zero=False)
    assert {w.name: w.shape for w in wanted} == {k: tuple(v.shape) for k, v in state.items()}
    for want, data in feed.tensors(wanted):
        assert want.dtype == "BF16" and np.array_equal(data, state[want.name].view(torch.uint16).numpy()), want.name
    for want, data in feed.tensors(feed.wanted("float32")[:3]):
        assert np.array_equal(data.view(np.float32), state[want.name].float().numpy())


def test_whole_tensors_with_nan_are_named(model: Model, tmp_path: Path) -> None:
    """A live model may have got one since the send loop looked."""
    path = model("qwen3", dtype="bfloat16", layers=2)
    state = state_of(path, zero=False)
    feed = SourceFeed(open_source(state, base=path), Peers())
    state["model.layers.1.mlp.up_proj.weight"][2, 1] = torch.nan
    with pytest.raises(SourceError, match=r"model\.layers\.1\.mlp\.up_proj\.weight of .* holds NaN"):
        list(feed.tensors(feed.wanted()))
    allowed = SourceFeed(open_source(state, base=path), Peers(), allow_nan=True)
    assert len(list(allowed.tensors(allowed.wanted()))) == len(state)
