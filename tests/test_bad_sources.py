"""Damaged, contradictory and hostile input: each gives a message that names it, leaves nothing behind, changes nothing.

`refused` does the same for all: convert, expect an error of ours with these words, look at what is on disk afterwards.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pickle
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import models
from areal_convert.converter import Limits, Mesh, Options, convert, open_checkpoint, plan, verify
from areal_convert.converter.convert import run
from areal_convert.converter.errors import (
    ConfigError,
    ConvertError,
    CorruptFile,
    MeshError,
    NotACheckpoint,
    PlanError,
    SourceError,
    TargetError,
    UnknownFamily,
    UnsafePickle,
    VerifyError,
)

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
Q = "model.layers.1.self_attn.q_proj.weight"
RANK_FILE = "model_optim_rng.pt"


# ------------------------------------------------------------------------------------------------ helpers


@pytest.fixture
def source(model_copy: Callable[..., Path]) -> Path:
    """A small llama in one safetensors file, to be damaged."""
    return model_copy("llama", dtype="bfloat16", layers=2)


@pytest.fixture
def sharded(model_copy: Callable[..., Path]) -> Path:
    """The same in several shards with an index."""
    path = model_copy("llama", dtype="bfloat16", layers=2, max_shard_size=150_000)
    assert len(list(path.glob("model-*.safetensors"))) > 2
    return path


def content(path: Path) -> dict[str, Any]:
    """Everything below a directory: names, kinds and bytes."""
    found: dict[str, Any] = {}
    for p in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if p.is_symlink():
            found[str(p)] = os.readlink(p)
        elif p.is_file():
            found[str(p)] = hashlib.sha256(p.read_bytes()).hexdigest()
        else:
            found[str(p)] = "directory" if p.is_dir() else "other"
    return found


def refused(
    source: Path, *words: str, error: type[ConvertError] = SourceError, to: str = "torch_dist", **how: Any
) -> ConvertError:
    """Converting is refused with all of `words` in the message; nothing is left behind, the source is untouched."""
    before = content(source)
    with tempfile.TemporaryDirectory(prefix="refused-") as scratch:
        with pytest.raises(error) as caught:
            convert(source, Path(scratch) / "target", to, **how)
        assert os.listdir(scratch) == [], "something was left behind"
    assert content(source) == before, "the source was changed"
    text = str(caught.value)
    assert all(word in text for word in words), text
    text.encode()  # whatever stands in a file can be printed
    return caught.value


def accepted(source: Path, **how: Any) -> Any:
    """Converting goes through, and the result is the same weights."""
    before = content(source)
    with tempfile.TemporaryDirectory(prefix="accepted-") as scratch:
        result = convert(source, Path(scratch) / "target", "torch_dist", **how)
        assert result.verified
    assert content(source) == before
    return result


def read_raw(file: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_raw(file: Path, header: dict[str, Any] | bytes, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def edit_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    header, data = read_raw(path / FILE)
    change(header)
    write_raw(path / FILE, header, data)


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], Any], file: str = FILE) -> None:
    tensors = load_file(path / file)
    change(tensors)
    save_file(tensors, path / file, metadata={"format": "pt"})


def edit_json(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def edit_torch(file: Path, change: Callable[[Any], Any]) -> None:
    tree = torch.load(file, weights_only=False)
    change(tree)
    torch.save(tree, file)


def cut(file: Path, count: int = 10) -> None:
    os.truncate(file, file.stat().st_size - count)


def grow(file: Path, count: int = 10) -> None:
    file.write_bytes(file.read_bytes() + bytes(count))


class Evil:
    """Runs a command in whoever unpickles it."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


# ------------------------------------------------------------------------------------------------ Hugging Face: files


def test_truncated(source: Path) -> None:
    """B80: eight shards of a hundred were short, and a memory-mapping reader gave noise for weeks."""
    cut(source / FILE)
    refused(source, FILE, "truncated", "expected", "found", "model.norm.weight")


def test_longer_than_its_header(source: Path) -> None:
    grow(source / FILE)
    refused(source, FILE, "longer")


def test_empty_file(source: Path) -> None:
    (source / FILE).write_bytes(b"")
    error = refused(source, FILE, "0 bytes")
    assert str(error).count(str(source / FILE)) == 1, "the path stands twice in one line"


def test_every_bad_shard_is_listed(sharded: Path) -> None:
    first, second, third, *_ = sorted(sharded.glob("model-*.safetensors"))
    cut(first)
    grow(second)
    third.unlink()
    refused(sharded, first.name, "truncated", second.name, "longer", third.name, "not there")


def test_missing_shard(sharded: Path) -> None:
    gone = sorted(sharded.glob("model-*.safetensors"))[1]
    gone.unlink()
    refused(sharded, gone.name, "tensors")


def test_git_lfs_pointer(source: Path) -> None:
    (source / FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    refused(source, FILE, "LFS")


def test_equal_shard_twice(sharded: Path) -> None:
    """B76: a folder put together by hard links. Equal content does no harm and is told."""
    some = sorted(sharded.glob("model-*.safetensors"))[1]
    shutil.copy(some, sharded / "model-00099-of-00099.safetensors")
    result = accepted(sharded)
    assert any("model-00099-of-00099" in note for note in result.planned.source.notes)


def test_tensor_twice_with_other_content(sharded: Path) -> None:
    """B76: whichever file a reader opens last wins; nobody may decide that silently."""
    some = sorted(sharded.glob("model-*.safetensors"))[1]
    name = next(iter(load_file(some)))
    save_file({name: load_file(some)[name] + 1}, sharded / "stale.safetensors")
    refused(sharded, name, some.name, "stale.safetensors")


def test_stale_index_beside_a_single_file(sharded: Path, model: Callable[..., Path]) -> None:
    """B77: saved in five shards, then in one. transformers leaves the old index; the single file is what counts."""
    shutil.copy(model("llama", dtype="bfloat16", layers=2) / FILE, sharded / FILE)
    for shard in sharded.glob("model-0*.safetensors"):
        shard.unlink()
    result = accepted(sharded)
    assert any(INDEX in note for note in result.planned.source.notes)


def test_stale_shards_beside_a_single_file(sharded: Path, model: Callable[..., Path]) -> None:
    """The old shards are still there, and differ: no guess."""
    shutil.copy(model("llama", dtype="bfloat16", layers=2) / FILE, sharded / FILE)
    edit_tensors(sharded, lambda t: t["model.norm.weight"].add_(1))
    refused(sharded, "model.norm.weight", FILE)


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("other", ["consolidated.safetensors", "adapter_model.safetensors"])
def test_weights_under_other_names_beside_the_model(indexed: bool, other: str, source: Path, sharded: Path) -> None:
    """Mistral's repositories hold the weights twice, once under Mistral's own names. transformers reads what the index
    names, or `model.safetensors`, and so do we."""
    path = sharded if indexed else source
    save_file({"layers.0.attention.wq.weight": torch.ones(3)}, path / other)
    result = accepted(path)
    assert any(other in note for note in result.planned.source.notes)


def test_one_file_under_any_name(source: Path) -> None:
    """B83: a model in one file needs no index, whatever the file is called."""
    (source / FILE).rename(source / "my weights (final).safetensors")
    accepted(source)


def test_path_of_the_file_itself(source: Path) -> None:
    accepted(source / FILE)


def test_not_a_regular_file(source: Path) -> None:
    """Opening a named pipe would wait for ever."""
    (source / FILE).unlink()
    os.mkfifo(source / FILE)
    refused(source, FILE)


def test_directory_named_like_weights(source: Path) -> None:
    (source / FILE).unlink()
    (source / FILE).mkdir()
    refused(source, FILE)


# ------------------------------------------------------------------------------------------------ Hugging Face: index


def _moved(index: dict[str, Any], sharded: Path) -> None:
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"][Q] = next(f for f in files if f != index["weight_map"][Q])


def _named_nowhere(index: dict[str, Any], sharded: Path) -> None:
    del index["weight_map"][Q]


@pytest.mark.parametrize("change", [_moved, _named_nowhere])
def test_index_disagrees_with_the_shards(change: Callable[..., None], sharded: Path) -> None:
    edit_json(sharded / INDEX, lambda index: change(index, sharded))
    refused(sharded, Q, "index")


def test_index_names_a_tensor_that_no_shard_has(sharded: Path) -> None:
    """B47: ghost entries of a model whose MTP layer was left out."""
    edit_json(sharded / INDEX, lambda i: i["weight_map"].update(ghost=next(iter(i["weight_map"].values()))))
    refused(sharded, "ghost", "index")


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/etc/passwd", "..", ".", "", "sub/../../x", "a\0b", "x" * 5000, "config.json", "\ud800"],
    ids=["up", "root", "dots", "dot", "empty", "inside", "nul", "long", "config", "surrogate"],
)
def test_index_names_a_file_that_is_none(name: str, sharded: Path) -> None:
    """Never opened outside of the directory, never a crash."""
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update({Q: name}))
    refused(sharded, str(sharded))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 60_000]
)
def test_index_is_no_index(text: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(text)
    refused(sharded, INDEX)


# ------------------------------------------------------------------------------------------------ Hugging Face: headers


def _overlap(header: dict[str, Any]) -> None:
    begin, end = header[Q]["data_offsets"]
    header[Q]["data_offsets"] = [0, end - begin]


def _beyond(header: dict[str, Any]) -> None:
    begin, end = header[Q]["data_offsets"]
    header[Q]["data_offsets"] = [10**9, 10**9 + end - begin]


def _negative(header: dict[str, Any]) -> None:
    begin, end = header[Q]["data_offsets"]
    header[Q]["data_offsets"] = [begin - end, 0]


def _backwards(header: dict[str, Any]) -> None:
    header[Q]["data_offsets"].reverse()


def _unknown_type(header: dict[str, Any]) -> None:
    header[Q]["dtype"] = "Q4_K"


def _other_size(header: dict[str, Any]) -> None:
    header[Q]["shape"][0] += 1


def _huge_shape(header: dict[str, Any]) -> None:
    header[Q]["shape"] = [2**40, 2**40, 2**40]


def _no_offsets(header: dict[str, Any]) -> None:
    del header[Q]["data_offsets"]


@pytest.mark.parametrize(
    "change",
    [_overlap, _beyond, _negative, _backwards, _unknown_type, _other_size, _huge_shape, _no_offsets],
)
def test_wrong_entry_in_a_header(change: Callable[[dict[str, Any]], None], source: Path) -> None:
    edit_header(source, change)
    refused(source, Q)


def test_key_twice_in_a_header(source: Path) -> None:
    """JSON readers keep the last one without a word."""
    header, data = read_raw(source / FILE)
    text = json.dumps(header)[:-1] + "," + json.dumps({Q: header[Q]})[1:]
    write_raw(source / FILE, text.encode(), data)
    refused(source, Q, "twice")


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**8 + 1, 10**6, 0, 1])
def test_absurd_header_length(length: int, source: Path) -> None:
    raw = (source / FILE).read_bytes()
    (source / FILE).write_bytes(struct.pack("<Q", length) + raw[8:])
    refused(source, FILE)


@pytest.mark.parametrize(
    "text",
    [
        b"{bad",
        b"[]",
        b"5",
        b'{"a": 5}',
        b"[" * 60_000,
        b'{"a": {' * 30_000,
        b"\xff\xfe{}",
        b'{"a":{"shape":[' + b"9" * 6000,
    ],
    ids=["json", "list", "number", "entry", "deep", "deeper", "utf", "digits"],
)
def test_header_is_no_header(text: bytes, source: Path) -> None:
    write_raw(source / FILE, text, b"")
    refused(source, FILE if not text.startswith(b'{"a": 5') else "a")


@pytest.mark.parametrize("dtype", ["C64", "F8_E8M0", "F4", "F6_E2M3"])
def test_type_that_is_not_converted(dtype: str, source: Path) -> None:
    """The format knows more types than a language model has."""
    header, data = read_raw(source / FILE)
    parts, at = [], 0
    for name in sorted((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"]):
        begin, end = header[name]["data_offsets"]
        part = data[begin:end]
        if name == Q:
            header[name]["dtype"] = dtype
            part = (part * 4)[: len(part) // 2 * {"C64": 64, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6}[dtype] // 8]
        header[name]["data_offsets"] = [at, at + len(part)]
        parts.append(part)
        at += len(part)
    write_raw(source / FILE, header, b"".join(parts))
    refused(source, Q, dtype)


# ------------------------------------------------------------------------------------------------ names, shapes, values


def test_all_unknown_and_missing_tensors_at_once(source: Path) -> None:
    """One run, one list: names that mean nothing, and what the model lacks without them."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.bogus.weight"] = tensors.pop("model.layers.0.self_attn.k_proj.weight")
        tensors["transformer.h.0.weight"] = tensors.pop("model.norm.weight")
        del tensors[Q]

    edit_tensors(source, change)
    unknown = ("model.layers.0.self_attn.bogus.weight", "transformer.h.0.weight")
    missing = ("model.layers.0.self_attn.k_proj.weight", "model.norm.weight", Q)
    refused(source, *unknown, *missing)


def test_all_wrong_shapes_at_once(source: Path) -> None:
    names = ("model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[names[0]] = tensors[names[0]].T.contiguous()
        tensors[names[1]] = tensors[names[1]][:, :-1].contiguous()
        tensors[names[2]] = tensors[names[2]][None]

    edit_tensors(source, change)
    refused(source, *names, "[64, 32]", "[32, 64]", "[64, 95]", "[1, 64]")


def test_b101_empty_tensors(source: Path) -> None:
    """B101: ZeRO-3 saved some tensors with shape [0]; safetensors writes that without complaint."""
    edit_tensors(source, lambda t: t.update({Q: torch.empty(0), "model.norm.weight": torch.empty(0)}))
    refused(source, Q, "model.norm.weight", "empty")


@pytest.mark.parametrize("name", ["model.layers.01.self_attn.q_proj.weight", "model.layers.١.self_attn.q_proj.weight"])
def test_layer_number_in_another_spelling(name: str, source: Path) -> None:
    edit_header(source, lambda h: h.update({name: h.pop(Q)}))
    refused(source, name)


@pytest.mark.parametrize(
    "name",
    ["model.layers.-1.x", "model.layers." + "9" * 5000 + ".self_attn.q_proj.weight", "", "\x1b[31m\n", "a" * 10_000],
    ids=["negative", "digits", "empty", "escape", "long"],
)
def test_hostile_names(name: str, source: Path) -> None:
    """A name is text from a file: it neither crashes anything nor writes to the terminal as it likes."""
    edit_header(source, lambda h: h.update({name: h.pop(Q)}))
    text = str(refused(source))
    assert not any(ord(c) < 32 and c != "\n" for c in text)
    assert len(text) < 5000


def test_nan(source: Path) -> None:
    """Every poisoned tensor is named; whoever wants them nevertheless says so."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[Q][5, 7] = torch.nan
        tensors["model.norm.weight"][0] = torch.nan

    edit_tensors(source, change)
    refused(source, Q, "model.norm.weight", "NaN")
    accepted(source, options=Options(allow_nan=True))


def test_infinities_are_values(source: Path) -> None:
    edit_tensors(source, lambda t: t[Q].view(-1).__setitem__(0, torch.inf))
    accepted(source)


def test_mixed_types_within_one_target_tensor(source: Path) -> None:
    """Megatron keeps q, k and v in one tensor: fp32 beside bf16 has no place there, and every such tensor is named."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[Q] = tensors[Q].float()
        tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].half()

    edit_tensors(source, change)
    refused(source, "linear_qkv", "linear_fc1", "F32", "F16", "BF16", "--dtype", error=PlanError)
    accepted(source, options=Options(dtype="float32"))


def test_vocabulary_larger_than_the_config_says(source: Path) -> None:
    """B10: transformers refuses such a pair. Rows of a model must not vanish without a word."""
    edit_json(source / "config.json", lambda c: c.update(vocab_size=1000))
    try:
        result = accepted(source)
    except SourceError as error:
        assert "model.embed_tokens.weight" in str(error)
    else:
        assert any("model.embed_tokens.weight" in note for note in result.planned.source.notes)


@pytest.mark.parametrize("to", ["dcp", "archon", "torch_dist", "mp_rank"])
def test_vocabulary_smaller_in_the_config_than_in_the_files(to: str, source: Path, tmp_path: Path) -> None:
    """Only Megatron pads, and its arguments say the true size: no row is cut off on a config's word alone."""
    convert(source, tmp_path / "ckpt", to, Mesh(tp=2))
    (tmp_path / "ckpt" / "areal_manifest.json").unlink()
    edit_json(tmp_path / "ckpt" / "hf" / "config.json", lambda c: c.update(vocab_size=1000))
    refused(tmp_path / "ckpt", "1003", "1000", to="hf", error=ConvertError)


# ------------------------------------------------------------------------------------------------ config.json


def config_with(source: Path, **fields: Any) -> Path:
    def change(config: dict[str, Any]) -> None:
        for name, value in fields.items():
            config[name] = value
            if value is KeyError:
                del config[name]

    edit_json(source / "config.json", change)
    return source


def test_no_config(source: Path) -> None:
    (source / "config.json").unlink()
    refused(source, "config.json", "--hf-config", error=ConfigError)


def test_config_from_elsewhere(source: Path, tmp_path: Path) -> None:
    """B100: `--hf-config` needs no weights."""
    (tmp_path / "config").mkdir()
    (source / "config.json").rename(tmp_path / "config" / "config.json")
    accepted(source, hf_config=tmp_path / "config")


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "null", "\xff\xfe", "[" * 60_000], ids=range(7))
def test_config_is_no_config(text: str, source: Path) -> None:
    (source / "config.json").write_text(text, encoding="latin-1")
    refused(source, "config.json", error=ConfigError)


@pytest.mark.parametrize("field", ["hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"])
def test_config_lacks_a_field(field: str, source: Path) -> None:
    refused(config_with(source, **{field: KeyError}), "config.json", field, error=ConfigError)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "wide"),
        ("hidden_size", [64]),
        ("hidden_size", float("inf")),
        ("hidden_size", float("nan")),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 0),
        ("num_key_value_heads", 3),
        ("num_attention_heads", float("inf")),
        ("num_hidden_layers", True),
        ("vocab_size", True),
    ],
)
def test_config_with_a_senseless_size(field: str, value: Any, source: Path) -> None:
    refused(config_with(source, **{field: value}), "config.json", error=ConfigError)


@pytest.mark.timeout(10, method="signal")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10**8),
        ("num_hidden_layers", -1),
        ("hidden_size", -64),
        ("vocab_size", 0),
        ("head_dim", -8),
    ],
)
def test_config_with_an_impossible_size(field: str, value: int, source: Path) -> None:
    """A number that no model has ends in an error, not in hours of counting."""
    refused(config_with(source, **{field: value}), error=ConvertError)


@pytest.mark.timeout(10, method="signal")
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("qwen3_moe", {"num_experts": 10**8}),
        ("qwen3_moe", {"decoder_sparse_step": 0}),
        ("qwen3_moe", {"mlp_only_layers": 5}),
        ("qwen3_moe", {"moe_intermediate_size": KeyError}),
        ("deepseek_v3", {"kv_lora_rank": KeyError}),
        ("deepseek_v3", {"first_k_dense_replace": -3}),
        ("deepseek_v3", {"qk_rope_head_dim": "x"}),
    ],
)
def test_config_of_a_moe_is_wrong(family: str, fields: dict[str, Any], model_copy: Callable[..., Path]) -> None:
    source = model_copy(family, dtype="bfloat16", layers=2)
    refused(config_with(source, **fields), error=ConvertError)


def test_config_contradicts_the_tensors(source: Path) -> None:
    """Fewer layers than are stored, and then more: the tensors in question are named, or those that would be needed."""
    refused(config_with(source, num_hidden_layers=1), Q, "layers")
    refused(config_with(source, num_hidden_layers=3), "model.layers.2.self_attn.q_proj.weight")


def test_config_with_a_lone_surrogate(source: Path, tmp_path: Path) -> None:
    """JSON can say what UTF-8 cannot. The config is rewritten for the other type, with that in it."""
    (source / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | {"x": "\ud800"}))
    convert(source, tmp_path / "out", "hf", options=Options(dtype="float32"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["x"] == "\ud800"


def test_config_without_a_family(source: Path) -> None:
    error = refused(config_with(source, model_type=KeyError), "model_type", error=UnknownFamily)
    assert "llama" in str(error) and "deepseek_v3" in str(error)
    error = refused(config_with(source, model_type="gpt9"), "gpt9", error=UnknownFamily)
    assert "llama" in str(error) and "deepseek_v3" in str(error)


# ------------------------------------------------------------------------------------------------ meshes


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        (Mesh(tp=3), ("tp", "8 attention heads", "1, 2, 4, 8")),
        (Mesh(tp=16), ("tp", "8 attention heads")),
        (Mesh(pp=3), ("pp", "2 layers", "1, 2", "--pipeline-layout")),
        (Mesh(pp=2, vpp=2), ("vpp", "1 layers")),
        (Mesh(vpp=2), ("vpp",)),
        (Mesh(ep=2), ("ep", "no experts")),
        (Mesh(pp=2, layout="Et|t|L"), ("layout", "3 stages")),
        (Mesh(pp=2, layout="Et|tx"), ("layout", "'x'")),
        (Mesh(pp=2, layout="Ettt|tL"), ("layout", "4 decoder layers", "2")),
        (Mesh(pp=2, first=3), ("pp", "3 layers", "2")),
    ],
)
def test_mesh_that_does_not_fit(mesh: Mesh, words: tuple[str, ...], source: Path) -> None:
    """Refused at planning, with what would divide."""
    refused(source, *words, error=MeshError, mesh=mesh)
    with pytest.raises(MeshError):
        plan(source, "mp_rank", mesh)


def test_mesh_of_experts_that_does_not_fit(model: Callable[..., Path]) -> None:
    source = model("qwen3_moe", dtype="bfloat16", layers=2)
    refused(source, "ep", "4 experts", "1, 2, 4", error=MeshError, mesh=Mesh(ep=3))
    refused(source, "etp", "48", error=MeshError, mesh=Mesh(tp=1, etp=5))


@pytest.mark.parametrize("name", ["tp", "pp", "ep", "dp_shard"])
@pytest.mark.parametrize("size", [0, -1])
def test_mesh_with_a_senseless_size(name: str, size: int) -> None:
    sizes: dict[str, Any] = {name: size}
    with pytest.raises(MeshError, match=name):
        Mesh(**sizes)


@pytest.mark.parametrize(("to", "mesh"), [("hf", Mesh(tp=2)), ("dcp", Mesh(pp=2)), ("torch_dist", Mesh(dp_shard=2))])
def test_mesh_of_another_format(to: str, mesh: Mesh, source: Path) -> None:
    refused(source, error=ConvertError, to=to, mesh=mesh)


def test_no_such_format(source: Path) -> None:
    refused(source, "gguf", "torch_dist", error=ConfigError, to="gguf")


def test_no_such_dtype(source: Path) -> None:
    refused(source, "float7", "bfloat16", error=ConfigError, options=Options(dtype="float7"))


# ------------------------------------------------------------------------------------------------ senseless options


@pytest.mark.timeout(10, method="signal")
@pytest.mark.parametrize(
    "sizes",
    [
        {"pp": 2, "first": -1},
        {"pp": 2, "last": -1},
        {"pp": 2, "first": "x"},
        {"tp": 10**9},
        {"pp": 10**9},
        {"tp": "2"},
        {"layout": "Et*99999999999L"},
        {"layout": ""},
        {"layout": "|" * 100_000},
    ],
)
def test_mesh_that_nobody_has(sizes: dict[str, Any], source: Path) -> None:
    """Refused at once, and never counted through."""
    for to in ("torch_dist", "mp_rank"):
        with pytest.raises(MeshError):
            plan(source, to, Mesh(**sizes))


@pytest.mark.timeout(10, method="signal")
@pytest.mark.parametrize(
    ("to", "sizes"), [("mp_rank", {"ep": 10**9}), ("mp_rank", {"etp": 10**9}), ("dcp", {"dp_shard": 10**9})]
)
def test_mesh_of_experts_that_nobody_has(to: str, sizes: dict[str, Any], model: Callable[..., Path]) -> None:
    with pytest.raises(MeshError):
        plan(model("qwen3_moe", dtype="bfloat16", layers=2), to, Mesh(**sizes))


@pytest.mark.parametrize(
    ("to", "fields", "word"),
    [
        ("hf", {"dtype": "int8"}, "int8"),
        ("hf", {"dtype": "bool"}, "bool"),
        ("hf", {"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ("hf", {"experts": "bogus"}, "per_expert"),
        ("mp_rank", {"spec": "bogus"}, "local"),
        ("mp_rank", {"megatron_experts": "bogus"}, "grouped"),
        ("torch_dist", {"vocab_divisor": 0}, "0"),
        ("torch_dist", {"vocab_divisor": -128}, "-128"),
        ("hf", {"max_shard": 0}, "0"),
        ("hf", {"max_shard": -1}, "-1"),
    ],
)
def test_option_that_makes_no_sense(to: str, fields: dict[str, Any], word: str, model: Callable[..., Path]) -> None:
    """Said when planning, with the choices that there are, and not as a fault of the tables."""
    source = model("qwen3_moe", dtype="bfloat16", layers=2)
    with pytest.raises(ConvertError, match=word) as caught:
        plan(source, to, options=Options(**fields))
    assert "report this" not in str(caught.value)


def test_root_of_ones_own(source: Path, tmp_path: Path) -> None:
    """What we write under a root, we can read under it; or it is refused at once."""
    moved: list[Any] = []
    try:
        options = Options(root="policy.actor.")
        convert(source, tmp_path / "out", "dcp", options=options, progress=lambda *step: moved.append(step))
    except ConfigError:
        assert moved == []
    else:
        assert verify(source, tmp_path / "out").same


def test_drop_that_is_no_pattern(source: Path, tmp_path: Path) -> None:
    edit_tensors(source, lambda t: t.update(score=torch.ones(3)))
    with pytest.raises(ConfigError, match=r"\("):
        convert(source, tmp_path / "out", "hf", drop=["("])


def test_drop_that_drops_nothing(source: Path, tmp_path: Path) -> None:
    """Asked for and not done must not look like done."""
    try:
        result = convert(source, tmp_path / "out", "hf", drop=[r"vision\..*"])
    except ConfigError as error:
        assert "vision" in str(error)
    else:
        assert any("vision" in note for note in result.planned.source.notes)


def test_further_directory_that_is_not_there(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "a", "dcp")
    with pytest.raises(ConvertError, match="typo"):
        convert(tmp_path / "a", tmp_path / "out", "hf", also=[tmp_path / "typo"])


def test_source_that_goes_away_after_it_was_opened(source: Path, tmp_path: Path) -> None:
    """An opened checkpoint is headers; the weights are read later, and may be gone or cut by then."""
    opened = open_checkpoint(source)
    raw = (source / FILE).read_bytes()
    (source / FILE).write_bytes(raw[: len(raw) // 2])
    with pytest.raises(SourceError, match=FILE):
        convert(opened, tmp_path / "out", "torch_dist")
    (source / FILE).unlink()
    with pytest.raises(SourceError, match=FILE):
        convert(opened, tmp_path / "out", "torch_dist")
    assert not any("out" in p.name for p in tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["in place", "replaced"])
def test_source_that_changes_meanwhile(kind: str, source: Path, tmp_path: Path) -> None:
    """A trainer saves into the same directory while we read: half old, half new is neither, yet agrees with itself."""
    new = (source / FILE).read_bytes()
    start = 8 + int.from_bytes(new[:8], "little")
    new = new[:start] + bytes(b ^ (n % 2 == 0) for n, b in enumerate(new[start:]))
    seen: list[Any] = []

    def progress(phase: str, done: int, total: int) -> None:
        if phase == "convert" and done > total // 3 and not seen:
            seen.append(done)
            if kind == "replaced":
                (source / FILE).unlink()
            (source / FILE).write_bytes(new)

    try:
        convert(source, tmp_path / "out", "torch_dist", limits=Limits(workers=1), progress=progress)
    except SourceError as error:
        assert FILE in str(error)
        assert not any("out" in p.name for p in tmp_path.iterdir())
    else:
        assert verify(source, tmp_path / "out").same
    assert seen


@pytest.mark.parametrize("to", ["hf", "torch_dist", "mp_rank", "dcp"])
def test_a_disk_that_lies(to: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of a tensor reaches the disk wrongly. Reading back finds it, and the target does not appear."""
    pwrite, seen = os.pwrite, []

    def flipped(fd: int, data: Any, offset: int) -> int:
        if len(data) > 50_000 and not seen:  # the embedding; headers are shorter
            seen.append(offset)
            data = bytearray(data)
            data[3000] ^= 4
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", flipped)
    with pytest.raises(VerifyError):
        convert(source, tmp_path / "out", to)
    assert seen and not any("out" in p.name for p in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("to", "mesh"), [("hf", Mesh()), ("torch_dist", Mesh(tp=2)), ("mp_rank", Mesh(tp=2)), ("dcp", Mesh(dp_shard=3))]
)
def test_one_wrong_bit_is_found(to: str, mesh: Mesh, source: Path, tmp_path: Path) -> None:
    """`verify` names the tensor, whichever it is, and the first, a middle and the last of its bytes count."""
    convert(source, tmp_path / "out", to, mesh)
    opened = open_checkpoint(tmp_path / "out")
    assert verify(source, opened).same
    for name, slots in opened.slots.items():
        slot = slots[len(name) % len(slots)]
        inside = tuple((lo, (lo + hi - 1) // 2, hi - 1)[len(name) % 3] for lo, hi in zip(*slot.box, strict=True))
        with open(slot.buffer.file, "r+b", buffering=0) as file:
            file.seek(slot.at(inside) + len(name) % 2)
            old = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([old[0] ^ (1 << len(name) % 8)]))
            found = verify(source, tmp_path / "out")
            assert not found.same
            assert {*found.differ, *found.inconsistent} == {name}
            file.seek(-1, os.SEEK_CUR)
            file.write(old)
    assert verify(source, tmp_path / "out").same


# ------------------------------------------------------------------------------------------------ no checkpoint at all


def test_nothing_there(tmp_path: Path) -> None:
    refused(tmp_path / "nope", "nope", error=NotACheckpoint)


def test_directory_that_is_no_checkpoint(source: Path) -> None:
    (source / FILE).unlink()
    refused(source, "config.json", "torch_dist", error=NotACheckpoint)


def test_file_that_is_no_checkpoint(source: Path) -> None:
    refused(source / "config.json", "config.json", error=NotACheckpoint)


@pytest.mark.parametrize("name", ["empty", "with\0nul", "x" * 300])
def test_path_that_is_no_path(name: str, tmp_path: Path) -> None:
    if name == "empty":
        (tmp_path / name).mkdir()
    with pytest.raises(NotACheckpoint):
        open_checkpoint(tmp_path / name)


# ------------------------------------------------------------------------------------------------ links (B127)


def hub_cache(source: Path, root: Path) -> Path:
    """The source as Hugging Face's cache keeps it: snapshots/<commit>/x → ../../blobs/y."""
    snapshot, blobs = root / "snapshots" / "0123abcd", root / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in source.iterdir():
        blob = hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, blobs / blob)
        (snapshot / file.name).symlink_to(f"../../blobs/{blob}")
    return snapshot


def test_b127_links_are_followed_and_files_written(source: Path, tmp_path: Path) -> None:
    """B127: a snapshot is links to blobs; the target must hold the files."""
    snapshot = hub_cache(source, tmp_path / "cache")
    convert(snapshot, tmp_path / "out", "hf")
    assert not any(p.is_symlink() for p in (tmp_path / "out").rglob("*"))
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert verify(snapshot, tmp_path / "out").same
    manifest = json.loads((tmp_path / "out" / "areal_manifest.json").read_text())
    assert manifest["source"]["revision"] == "0123abcd"


@pytest.mark.parametrize("kind", ["deleted", "wrong", "loop"])
def test_b127_dangling_weights_are_named(kind: str, sharded: Path, tmp_path: Path) -> None:
    snapshot = hub_cache(sharded, tmp_path / "cache")
    link = sorted(snapshot.glob("model-*.safetensors"))[1]
    if kind == "deleted":
        link.resolve().unlink()
    else:
        link.unlink()
        link.symlink_to("blobs/y" if kind == "wrong" else link.name)
    refused(snapshot, link.name, "link")


def test_b127_a_dangling_single_file_is_named(source: Path, tmp_path: Path) -> None:
    snapshot = hub_cache(source, tmp_path / "cache")
    (snapshot / FILE).resolve().unlink()
    refused(snapshot, FILE)


def test_b127_a_dangling_config_is_named(source: Path, tmp_path: Path) -> None:
    snapshot = hub_cache(source, tmp_path / "cache")
    (snapshot / "config.json").resolve().unlink()
    refused(snapshot, "config.json", error=ConfigError)


def test_b127_a_dangling_side_file_is_told(source: Path, tmp_path: Path) -> None:
    """A model without its tokenizer is half a model: the report must say that it could not be copied."""
    (source / "tokenizer.json").write_text("{}")
    snapshot = hub_cache(source, tmp_path / "cache")
    (snapshot / "tokenizer.json").resolve().unlink()
    try:
        report = convert(snapshot, tmp_path / "out", "hf").report()
    except SourceError as error:
        assert "tokenizer.json" in str(error)
    else:
        assert "tokenizer.json" in " ".join([*report["left_behind"], *report["notes"]])


# ------------------------------------------------------------------------------------------------ .bin


def as_bin(source: Path, change: Callable[[dict[Any, Any]], Any] = lambda tensors: None) -> Path:
    tensors: dict[Any, Any] = dict(load_file(source / FILE))
    changed = change(tensors)
    (source / FILE).unlink()
    torch.save(tensors if changed is None else changed, source / "pytorch_model.bin")
    return source


def test_bin_shapes(source: Path) -> None:
    """Views, expanded and transposed tensors, parameters, an enclosing dictionary: all of them are read."""

    def change(tensors: dict[Any, Any]) -> Any:
        tensors[Q] = tensors[Q].T.contiguous().T
        tensors["model.norm.weight"] = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16).expand(64))
        return {"state_dict": tensors, "epoch": 3, "args": argparse.Namespace(lr=1.0)}

    wanted = load_file(source / FILE)[Q]
    with tempfile.TemporaryDirectory() as scratch:
        convert(as_bin(source, change), Path(scratch) / "out", "hf")
        have = load_file(Path(scratch) / "out" / FILE)
    assert torch.equal(have[Q], wanted)
    assert torch.equal(have["model.norm.weight"], torch.ones(64, dtype=torch.bfloat16))


def test_bin_with_one_row_for_all(model_copy: Callable[..., Path], tmp_path: Path) -> None:
    """An expanded tensor with long rows: the stride along its first axis is zero."""
    source = model_copy("llama", dtype="bfloat16", layers=1, intermediate_size=20_000)
    name = "model.layers.0.mlp.down_proj.weight"
    wide = torch.randn(1, 20_000).bfloat16().expand(64, 20_000)
    convert(as_bin(source, lambda tensors: tensors.update({name: wide})), tmp_path / "out", "hf")
    assert torch.equal(load_file(tmp_path / "out" / FILE)[name], wide)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda t: t.update({Q: torch.zeros(64, 64, dtype=torch.complex64)}), Q),
        (lambda t: t.update({Q: torch.tensor(1.0)}), Q),
        (lambda t: t.update({Q: torch.empty(0)}), Q),
        (lambda t: t.update({Q: "text"}), Q),
        (lambda t: t.update({Q: torch.eye(64).to_sparse()}), Q),
        (lambda t: t.update({5: torch.ones(3)}), "5"),
        (lambda t: list(t.values()), "list"),
        (lambda t: t[Q], "pytorch_model.bin"),
        (lambda t: {}, "model.norm.weight"),
    ],
    ids=["complex", "scalar", "empty", "text", "sparse", "number", "list", "tensor", "nothing"],
)
def test_bin_with_something_else(change: Callable[[dict[Any, Any]], Any], word: str, source: Path) -> None:
    refused(as_bin(source, change), word)


@pytest.mark.parametrize("count", [10, 1000, 200_000])
def test_bin_cut(count: int, source: Path) -> None:
    as_bin(source)
    cut(source / "pytorch_model.bin", count)
    refused(source, "pytorch_model.bin", "truncated")


def test_bin_longer(source: Path) -> None:
    as_bin(source)
    grow(source / "pytorch_model.bin")
    refused(source, "pytorch_model.bin")


def test_bin_shard_missing(source: Path) -> None:
    models.to_bin(source, shards=2)
    (source / "pytorch_model-00002-of-00002.bin").unlink()
    refused(source, "pytorch_model-00002-of-00002.bin")


def test_bin_of_old_torch(source: Path) -> None:
    """Before torch 1.6 the format was another: refused, with the line that converts it."""
    tensors = load_file(source / FILE)
    (source / FILE).unlink()
    torch.save(tensors, source / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    refused(source, "pytorch_model.bin", "torch.save")


# ------------------------------------------------------------------------------------------------ torch DCP


@pytest.fixture(params=["dcp", "archon", "torch_dist"])
def distributed(request: pytest.FixtureRequest, model: Callable[..., Path], tmp_path: Path) -> Path:
    """A checkpoint of several `.distcp` files: the directory with `.metadata` (whose parent, or itself, has `hf/`)."""
    mesh = Mesh(tp=2) if request.param == "torch_dist" else Mesh(dp_shard=3)
    convert(model("llama", dtype="bfloat16", layers=2), tmp_path / "ckpt", request.param, mesh)
    return tmp_path / "ckpt" / ("release" if request.param == "torch_dist" else "")


def root_of(distributed: Path) -> Path:
    return distributed.parent if distributed.name == "release" else distributed


def edit_metadata(distributed: Path, change: Callable[[Any], Any]) -> None:
    metadata = pickle.loads((distributed / ".metadata").read_bytes())
    change(metadata)
    (distributed / ".metadata").write_bytes(pickle.dumps(metadata))


def a_tensor(metadata: Any) -> str:
    """The embedding, whatever it is called."""
    return next(n for n, t in metadata.state_dict_metadata.items() if "embed" in n and len(t.chunks) > 1)


def test_dcp_files_missing_and_cut(distributed: Path) -> None:
    cut(distributed / "__0_0.distcp", 100_000)
    (distributed / "__1_0.distcp").unlink()
    refused(root_of(distributed), "__0_0.distcp", "truncated", "__1_0.distcp", "missing", "embed")


def test_dcp_file_longer(distributed: Path) -> None:
    """Bytes that nothing names: a mixture of two saves. Refused, or at least told."""
    grow(distributed / "__1_0.distcp")
    try:
        result = accepted(root_of(distributed))
    except CorruptFile as error:
        assert "__1_0.distcp" in str(error)
    else:
        assert any("__1_0.distcp" in note for note in result.planned.source.notes)


def test_dcp_file_of_zeros(distributed: Path) -> None:
    """What a file system leaves after a crash: the right size, no content."""
    file = distributed / "__1_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    refused(root_of(distributed), "__1_0.distcp")


def test_dcp_stray_file(distributed: Path) -> None:
    """Saved at world 4, then at world 3: `__3_0.distcp` stays behind and is not read, but told."""
    (distributed / "__7_0.distcp").write_bytes(b"x")
    result = accepted(root_of(distributed))
    assert any("__7_0.distcp" in note for note in result.planned.source.notes)


@pytest.mark.parametrize(
    "content_", [b"", b"\x80\x04", b"garbage" * 50, pickle.dumps({"a": 1}), pickle.dumps([]), b"\0" * 99]
)
def test_dcp_metadata_is_none(content_: bytes, distributed: Path) -> None:
    (distributed / ".metadata").write_bytes(content_)
    refused(root_of(distributed), ".metadata")


def test_dcp_metadata_cut(distributed: Path) -> None:
    cut(distributed / ".metadata", 100)
    refused(root_of(distributed), ".metadata")


def test_dcp_metadata_missing(distributed: Path) -> None:
    (distributed / ".metadata").unlink()
    refused(root_of(distributed), ".metadata", ".distcp", "--also", error=NotACheckpoint)


def _lose_chunk(metadata: Any) -> None:
    metadata.state_dict_metadata[a_tensor(metadata)].chunks.pop()


def _lose_place(metadata: Any) -> None:
    name = a_tensor(metadata)
    del metadata.storage_data[next(key for key in metadata.storage_data if key.fqn == name)]


def _chunk_twice(metadata: Any) -> None:
    chunks = metadata.state_dict_metadata[a_tensor(metadata)].chunks
    chunks.append(chunks[0])


def _another_rank(metadata: Any) -> None:
    entry = metadata.state_dict_metadata[a_tensor(metadata)]
    entry.size = torch.Size([1, *entry.size])


def _larger(metadata: Any) -> None:
    entry = metadata.state_dict_metadata[a_tensor(metadata)]
    entry.size = torch.Size([entry.size[0] + 1, *entry.size[1:]])


def _negative_offset(metadata: Any) -> None:
    metadata.state_dict_metadata[a_tensor(metadata)].chunks[0].offsets = torch.Size([-1, 0])


def _no_length(metadata: Any) -> None:
    name = a_tensor(metadata)
    next(place for key, place in metadata.storage_data.items() if key.fqn == name).length = 0


def _elsewhere(metadata: Any) -> None:
    name = a_tensor(metadata)
    next(p for key, p in metadata.storage_data.items() if key.fqn == name).relative_path = "../../../etc/passwd"


@pytest.mark.parametrize(
    "change",
    [_lose_chunk, _lose_place, _chunk_twice, _another_rank, _larger, _negative_offset, _no_length, _elsewhere],
)
def test_dcp_metadata_contradicts_itself(change: Callable[[Any], None], distributed: Path) -> None:
    metadata = pickle.loads((distributed / ".metadata").read_bytes())
    edit_metadata(distributed, change)
    refused(root_of(distributed), a_tensor(metadata))


@pytest.mark.parametrize("path", ["x" * 5000, "\ud800", "a\0b", ""], ids=["long", "surrogate", "nul", "empty"])
def test_dcp_file_name_that_is_none(path: str, distributed: Path) -> None:
    def change(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).relative_path = path

    edit_metadata(distributed, change)
    refused(root_of(distributed))


def test_dcp_place_that_is_not_there(distributed: Path) -> None:
    def beyond(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).offset = 10**15

    def shifted(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).offset = 64

    raw = (distributed / ".metadata").read_bytes()
    edit_metadata(distributed, beyond)
    refused(root_of(distributed), ".distcp")
    (distributed / ".metadata").write_bytes(raw)
    edit_metadata(distributed, shifted)
    refused(root_of(distributed), ".distcp")


@pytest.mark.parametrize("format_name", ["dcp", "torch_dist"])
def test_b88_files_on_two_nodes(format_name: str, model: Callable[..., Path], tmp_path: Path) -> None:
    """B88: without a shared disk every node keeps its own files, and one of them `.metadata`."""
    source = model("llama", dtype="bfloat16", layers=2)
    convert(source, tmp_path / "a", format_name, Mesh(tp=2))
    inside = tmp_path / "a" / ("release" if format_name == "torch_dist" else "")
    other = tmp_path / "b"
    other.mkdir()
    (inside / "__1_0.distcp").rename(other / "__1_0.distcp")
    refused(tmp_path / "a", "__1_0.distcp", "embed", "--also")
    convert(tmp_path / "a", tmp_path / "one", "hf", also=[other])
    assert verify(source, tmp_path / "one").same
    (inside / ".metadata").rename(other / ".metadata")
    refused(tmp_path / "a", "--also", error=NotACheckpoint)
    convert(tmp_path / "a", tmp_path / "two", "hf", also=[other])
    assert verify(source, tmp_path / "two").same


# ------------------------------------------------------------------------------------------------ torch_dist: roots


@pytest.fixture
def megatron(model: Callable[..., Path], tmp_path: Path) -> Path:
    convert(model("llama", dtype="bfloat16", layers=2), tmp_path / "run", "torch_dist", Mesh(tp=2))
    return tmp_path / "run"


TRACKER = "latest_checkpointed_iteration.txt"


def test_b70_root_iteration_and_tracker(megatron: Path) -> None:
    """B70: the root, the iteration, a root without tracker: all name the same weights."""
    accepted(megatron)
    accepted(megatron / "release")
    (megatron / "release").rename(megatron / "iter_0000010")
    (megatron / TRACKER).write_text("10\n")
    accepted(megatron)
    accepted(megatron / "iter_0000010")
    (megatron / TRACKER).unlink()
    accepted(megatron)


def test_tracker_names_an_iteration_that_is_not_there(megatron: Path) -> None:
    """A copied run whose newest iteration was left out: another one is not what the user meant."""
    (megatron / TRACKER).write_text("1000")
    refused(megatron, TRACKER, "iter_0001000")


@pytest.mark.parametrize("text", ["", "../run", "/etc", "²", "9" * 5000, "x" * 5000, "\xff\xfe"], ids=range(7))
def test_tracker_is_none(text: str, megatron: Path) -> None:
    """A file of garbage: refused, or passed over with a note; never followed, never a crash."""
    (megatron / TRACKER).write_bytes(text.encode("latin-1"))
    try:
        result = accepted(megatron)
    except SourceError as error:
        assert TRACKER in str(error)
    else:
        assert any(TRACKER in note for note in result.planned.source.notes)


def test_tracker_among_several_iterations(megatron: Path) -> None:
    shutil.copytree(megatron / "release", megatron / "iter_0000010")
    (megatron / "release").rename(megatron / "iter_0000020")
    (megatron / TRACKER).write_text("30")
    refused(megatron, TRACKER, "iter_0000030")


def test_zarr_is_named(megatron: Path) -> None:
    """Megatron's older backend keeps a directory per tensor and no `.metadata`."""
    inside = megatron / "release"
    for file in [*inside.glob("*.distcp"), inside / ".metadata"]:
        file.unlink()
    (inside / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    (inside / "decoder.final_layernorm.weight").mkdir()
    (inside / "decoder.final_layernorm.weight" / ".zarray").write_text("{}")
    refused(megatron, "zarr")
    refused(inside, "zarr")


@pytest.mark.parametrize("gone", [("common.pt",), ("metadata.json",), ("common.pt", "metadata.json")])
def test_megatron_without_its_small_files(gone: tuple[str, ...], megatron: Path) -> None:
    """The tensors say enough: what is missing costs a note at most."""
    for name in gone:
        (megatron / "release" / name).unlink()
    accepted(megatron)
    accepted(megatron / "release")


@pytest.mark.parametrize("text", ["", "{", "[1]", "5", "[" * 60_000])
def test_megatron_backend_file_is_none(text: str, megatron: Path) -> None:
    (megatron / "release" / "metadata.json").write_text(text)
    try:
        accepted(megatron)
    except SourceError as error:
        assert "metadata.json" in str(error)


def test_megatron_common_file_cut(megatron: Path) -> None:
    cut(megatron / "release" / "common.pt")
    refused(megatron, "common.pt", "truncated")


def test_megatron_common_file_holds_something_else(megatron: Path) -> None:
    torch.save([1, 2], megatron / "release" / "common.pt")
    accepted(megatron)


# ------------------------------------------------------------------------------------------------ mp_rank


@pytest.fixture
def per_rank(model: Callable[..., Path], tmp_path: Path) -> Path:
    """TP 2, PP 2, two chunks on each stage."""
    convert(model("llama", dtype="bfloat16", layers=4), tmp_path / "run", "mp_rank", Mesh(tp=2, pp=2, vpp=2))
    return tmp_path / "run" / "release"


QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
NORM = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"


@pytest.mark.parametrize("gone", ["mp_rank_00_000", "mp_rank_01_000", "mp_rank_00_001", "mp_rank_01_001"])
def test_mp_rank_missing(gone: str, per_rank: Path) -> None:
    shutil.rmtree(per_rank / gone)
    refused(per_rank.parent, gone)


def test_mp_rank_all_of_one_tp_rank_missing(per_rank: Path) -> None:
    """Half of every tensor. The arguments in the other files tell how many ranks there were."""
    for stage in ("000", "001"):
        shutil.rmtree(per_rank / f"mp_rank_01_{stage}")
    refused(per_rank.parent, "TP 2")


def test_mp_rank_all_of_one_stage_missing(per_rank: Path) -> None:
    for rank in ("00", "01"):
        shutil.rmtree(per_rank / f"mp_rank_{rank}_001")
    refused(per_rank.parent, "PP 2")


def test_mp_rank_files_cut(per_rank: Path) -> None:
    for name in ("mp_rank_00_000", "mp_rank_01_001"):
        cut(per_rank / name / RANK_FILE)
    refused(per_rank.parent, "mp_rank_00_000", "mp_rank_01_001", "truncated")


@pytest.mark.parametrize(
    ("stage", "chunk"), [("000", "embedding.word_embeddings.weight"), ("001", "output_layer.weight")]
)
def test_b50_chunks_swapped(stage: str, chunk: str, per_rank: Path) -> None:
    """B50: layer numbers are local to a chunk, so only the ends of the model can tell."""

    def swap(tree: Any) -> None:
        tree["model0"], tree["model1"] = tree["model1"], tree["model0"]

    for rank in ("00", "01"):
        edit_torch(per_rank / f"mp_rank_{rank}_{stage}" / RANK_FILE, swap)
    refused(per_rank.parent, chunk)


def test_mp_rank_stages_swapped(per_rank: Path) -> None:
    for rank in ("00", "01"):
        a, b = (per_rank / f"mp_rank_{rank}_{stage}" for stage in ("000", "001"))
        a.rename(per_rank / "x")
        b.rename(a)
        (per_rank / "x").rename(b)
    refused(per_rank.parent, "embedding.word_embeddings.weight", "output_layer.weight")


def test_mp_rank_chunk_lost(per_rank: Path) -> None:
    for rank in ("00", "01"):
        edit_torch(per_rank / f"mp_rank_{rank}_001" / RANK_FILE, lambda tree: tree.pop("model1"))
    refused(per_rank.parent, "layers")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update({QKV: m[QKV][:-8].clone()}), (QKV, "[56, 64]", "[64, 64]")),
        (lambda m: m.pop(QKV), ("linear_qkv",)),
        (lambda m: m.update({"decoder.layers.0.bogus.weight": torch.ones(3)}), ("bogus",)),
        (lambda m: m.update({"decoder.layers.7.self_attention.linear_qkv.weight": m[QKV]}), ("layers",)),
        (lambda m: m.update({f"decoder.layers.{10**19}.self_attention.linear_qkv.weight": m[QKV]}), ()),
        (lambda m: m.update({"embedding.word_embeddings.weight": torch.tensor(1.0)}), ("embedding.word_embeddings",)),
        (lambda m: m.update({"embedding.word_embeddings.weight": torch.ones(4, 64)}), ("embedding.word_embeddings",)),
        (lambda m: m[NORM].add_(1), (NORM, "mp_rank_01_000")),
    ],
    ids=["shape", "lost", "unknown", "layer", "number", "scalar", "vocabulary", "replica"],
)
def test_mp_rank_tensors_that_do_not_fit(change: Callable[[Any], Any], words: tuple[str, ...], per_rank: Path) -> None:
    edit_torch(per_rank / "mp_rank_01_000" / RANK_FILE, lambda tree: change(tree["model0"]))
    refused(per_rank.parent, *words)


@pytest.mark.parametrize("tree", [[1], 5, {}, {"model": [1]}, {"model0": None, "model1": {}}], ids=range(5))
def test_mp_rank_file_with_something_else(tree: Any, per_rank: Path) -> None:
    torch.save(tree, per_rank / "mp_rank_01_000" / RANK_FILE)
    refused(per_rank.parent, "mp_rank_01_000")


@pytest.mark.timeout(10, method="signal")
def test_mp_rank_directory_with_an_absurd_number(per_rank: Path) -> None:
    shutil.copytree(per_rank / "mp_rank_01_000", per_rank / "mp_rank_99_99999999")
    refused(per_rank.parent)


def test_mp_rank_backup_beside_it(per_rank: Path) -> None:
    shutil.copytree(per_rank / "mp_rank_01_000", per_rank / "mp_rank_01_000.bak")
    accepted(per_rank.parent)


# ------------------------------------------------------------------------------------------------ pickles that run code


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """A file that only run code makes."""
    yield tmp_path / "canary"
    assert not (tmp_path / "canary").exists(), "code from a file was run"


def test_b86_metadata_that_runs_code(canary: Path, distributed: Path) -> None:
    """B86: torch itself reads `.metadata` with the plain unpickler."""
    (distributed / ".metadata").write_bytes(pickle.dumps(Evil(canary)))
    refused(root_of(distributed), ".metadata", "system", error=UnsafePickle)
    metadata = pickle.loads(pickle.dumps({"x": 1}))
    (distributed / ".metadata").write_bytes(pickle.dumps({**metadata, "planner_data": Evil(canary)}))
    refused(root_of(distributed), ".metadata", "system", error=UnsafePickle)


def test_distcp_entry_that_runs_code(canary: Path, distributed: Path) -> None:
    """An entry's own pickle, in the middle of a `.distcp`."""
    file, raw = distributed / "__0_0.distcp", (distributed / "__0_0.distcp").read_bytes()
    call, evil = b"ctorch._utils\n_rebuild_tensor_v2\n", b"cposix\nsystem\n"
    assert call in raw
    evil = b"cposix\n" + b"system".ljust(len(call) - len(b"cposix\n\n"), b"_") + b"\n"
    file.write_bytes(raw.replace(call, evil))
    refused(root_of(distributed), "__0_0.distcp", "posix")


def test_common_file_that_runs_code(canary: Path, megatron: Path) -> None:
    torch.save({"args": argparse.Namespace(x=Evil(canary))}, megatron / "release" / "common.pt")
    refused(megatron, "common.pt", "system", error=UnsafePickle)


def test_mp_rank_that_runs_code(canary: Path, per_rank: Path) -> None:
    edit_torch(per_rank / "mp_rank_01_001" / RANK_FILE, lambda tree: tree.update(rng_state=Evil(canary)))
    refused(per_rank.parent, "mp_rank_01_001", "system")


def test_b85_bin_that_runs_code(canary: Path, source: Path) -> None:
    """B85: only `pytorch_model.bin` is there; the way out must not be an unsafe switch."""
    refused(as_bin(source, lambda t: t.update(x=Evil(canary))), "pytorch_model.bin", "system")


def test_b85_bin_with_a_foreign_class_and_arguments(source: Path) -> None:
    """B85: an argparse.Namespace is data and is let through; any other class is named."""
    import fractions

    clean = load_file(source / FILE)
    as_bin(source, lambda t: t.update(args=argparse.Namespace(lr=1)))
    accepted(source)
    torch.save({**clean, "x": fractions.Fraction(1, 3)}, source / "pytorch_model.bin")
    refused(source, "pytorch_model.bin", "fractions.Fraction")


# ------------------------------------------------------------------------------------------------ manifests


@pytest.mark.parametrize(
    "manifest",
    [
        "[" * 60_000,
        "5",
        '{"atoms": {}, "source": 5}',
        '{"atoms": {}, "source": {"format": "hf", "dialect": [1]}}',
        '{"atoms": {}, "source": {"format": "hf", "dialect": {"forms": null}}}',
        '{"atoms": {"embed": 5}, "source": {"origin": {"origin": []}}}',
        '{"atoms": {}, "source": {"format": "hf", "name": "\\ud800"}}',
    ],
    ids=range(7),
)
def test_manifest_of_somebody_else(manifest: str, model: Callable[..., Path], tmp_path: Path) -> None:
    """A manifest is a help, never a condition."""
    source = model("qwen3_moe", dtype="bfloat16", layers=2)
    convert(source, tmp_path / "ckpt", "torch_dist")
    (tmp_path / "ckpt" / "areal_manifest.json").write_text(manifest)
    convert(tmp_path / "ckpt", tmp_path / "back", "hf")
    assert verify(source, tmp_path / "back").same


# ------------------------------------------------------------------------------------------------ reading fails


def test_source_that_cannot_be_read_is_blamed(source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A bad block of the source's disk is no fault of the target."""
    monkeypatch.setattr(os, "preadv", _no_reading)
    with pytest.raises(SourceError, match=FILE):
        convert(source, tmp_path / "out" / "x", "torch_dist")


def _no_reading(*_: Any) -> int:
    raise OSError(5, "Input/output error")


def test_side_file_that_cannot_be_read_is_named(source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (source / "tokenizer.json").write_text("{}")
    read = Path.read_bytes

    def read_bytes(self: Path) -> bytes:
        if self.name == "tokenizer.json":
            raise OSError(5, "Input/output error", str(self))
        return read(self)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with pytest.raises(SourceError, match=r"tokenizer\.json"):
        convert(source, tmp_path / "out", "torch_dist")


@contextmanager
def nobody(*directories: Path) -> Iterator[None]:
    """As a user without rights (root may read and write everything); the directories' parents are opened for it."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A directory that other users can reach (pytest's own are closed to them)."""
    with tempfile.TemporaryDirectory(prefix="areal-open-") as scratch:
        os.chmod(scratch, 0o777)
        yield Path(scratch)


def copied(source: Path, path: Path) -> Path:
    """Where everybody may read it."""
    shutil.copytree(source, path).chmod(0o755)
    for file in path.iterdir():
        file.chmod(0o644)
    return path


def test_directory_without_permission(source: Path, open_dir: Path) -> None:
    path = copied(source, open_dir / "source")
    convert(source, open_dir / "warm", "torch_dist")  # everything is imported now
    path.chmod(0)
    with nobody(), pytest.raises(SourceError, match=r"source.*[Pp]ermission"):
        convert(path, open_dir / "out", "torch_dist")
    path.chmod(0o755)


def test_source_without_permission(source: Path, sharded: Path, open_dir: Path) -> None:
    path = copied(sharded, open_dir / "source")
    secret = sorted(path.glob("model-*.safetensors"))[1]
    convert(source, open_dir / "warm", "torch_dist")  # everything is imported now
    secret.chmod(0)
    with nobody(), pytest.raises(SourceError, match=rf"{secret.name}.*[Pp]ermission"):
        convert(path, open_dir / "out", "torch_dist")


def test_distcp_without_permission(source: Path, open_dir: Path) -> None:
    convert(source, open_dir / "source", "dcp", Mesh(dp_shard=2))
    (open_dir / "source" / "__1_0.distcp").chmod(0)
    with nobody(), pytest.raises(SourceError, match=r"__1_0\.distcp.*[Pp]ermission"):
        convert(open_dir / "source", open_dir / "out", "torch_dist")


# ------------------------------------------------------------------------------------------------ targets


def test_target_that_may_not_be_written(source: Path, open_dir: Path) -> None:
    path = copied(source, open_dir / "source")
    convert(path, open_dir / "warm", "torch_dist")
    (open_dir / "closed").mkdir(mode=0o755)
    if os.geteuid() != 0:
        (open_dir / "closed").chmod(0o555)
    with nobody(), pytest.raises(TargetError, match=r"closed.*cannot be written"):
        convert(path, open_dir / "closed" / "out", "torch_dist")
    assert list((open_dir / "closed").iterdir()) == []


@contextmanager
def mounted(at: Path, options: str) -> Iterator[Path]:
    """A small file system of its own; the test is skipped where we may not mount one."""
    at.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(at)], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("no right to mount a file system")
    try:
        yield at
    finally:
        subprocess.run(["umount", str(at)], check=True)


@pytest.mark.skipif(shutil.which("mount") is None, reason="no mount here")
@pytest.mark.parametrize(
    ("options", "words"),
    [("size=100k", "needed"), ("size=4m,nr_inodes=8", "full"), ("size=4m,ro", "cannot be written")],
    ids=["small", "inodes", "read-only"],
)
def test_target_on_a_bad_file_system(options: str, words: str, source: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", options) as disk:
        with pytest.raises(TargetError, match=words):
            convert(source, disk / "out", "torch_dist")
        assert not (disk / "out").exists()


@pytest.mark.skipif(shutil.which("mount") is None, reason="no mount here")
def test_disk_that_fills_up_meanwhile(source: Path, tmp_path: Path) -> None:
    """There was room when it began. Once there is room again, `resume` goes on."""
    with mounted(tmp_path / "disk", "size=800k") as disk:

        def progress(phase: str, done: int, total: int) -> None:
            if not (disk / "other").exists() and phase == "convert":
                with open(disk / "other", "wb", buffering=0) as file, pytest.raises(OSError):
                    while True:
                        file.write(bytes(4096))

        try:
            convert(source, disk / "out", "torch_dist", progress=progress)
        except TargetError as error:
            assert "full" in str(error)
        assert not (disk / "out").exists()
        (disk / "other").unlink()
        convert(source, disk / "out", "torch_dist", resume=True)
        assert verify(source, disk / "out").same


@pytest.mark.skipif(shutil.which("mount") is None, reason="no mount here")
def test_target_that_is_a_mount_point(source: Path, tmp_path: Path) -> None:
    """`docker run -v /data:/out`, target /out: no rename can lead there. Said at once, not after hours of work."""
    moved = []
    with mounted(tmp_path / "out", "size=4m") as disk, pytest.raises(TargetError, match="mount"):
        convert(source, disk, "torch_dist", progress=lambda *step: moved.append(step))
    assert moved == []
    assert [p.name for p in tmp_path.iterdir() if "areal" in p.name] == []


def test_target_exists(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", "hf")
    before = content(tmp_path / "out")
    with pytest.raises(TargetError, match="--overwrite"):
        convert(source, tmp_path / "out", "torch_dist")
    assert content(tmp_path / "out") == before


def test_target_is_a_file(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    for overwrite in (False, True):
        with pytest.raises(TargetError, match="file"):
            convert(source, tmp_path / "out", "torch_dist", overwrite=overwrite)
    assert (tmp_path / "out").read_text() == "x"


def test_target_below_a_file(source: Path, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    with pytest.raises(TargetError):
        convert(source, tmp_path / "f" / "out", "torch_dist")


def test_target_and_source_in_each_other(source: Path) -> None:
    before = content(source.parent)
    (source.parent / "link").symlink_to(source)
    for target in (source, source / "sub", source.parent, source.parent / "link", source / ".." / source.name):
        with pytest.raises(TargetError):
            convert(source, target, "torch_dist", overwrite=True)
    with pytest.raises(TargetError):
        convert(source / FILE, source, "torch_dist", overwrite=True)
    (source.parent / "link").unlink()
    assert content(source.parent) == before


def test_target_is_another_input(source: Path, tmp_path: Path) -> None:
    """`--also` and `--hf-config` name input as well: overwriting it would destroy it."""
    convert(source, tmp_path / "a", "dcp", Mesh(dp_shard=2))
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "__1_0.distcp").rename(tmp_path / "b" / "__1_0.distcp")
    before = content(tmp_path / "b")
    with pytest.raises(TargetError):
        convert(tmp_path / "a", tmp_path / "b", "hf", overwrite=True, also=[tmp_path / "b"])
    assert content(tmp_path / "b") == before
    before = content(source)
    with pytest.raises(TargetError):
        convert(tmp_path / "a", source, "hf", overwrite=True, hf_config=source, also=[tmp_path / "b"])
    assert content(source) == before


@pytest.mark.parametrize("kind", ["empty", "full", "dangling"])
def test_target_is_a_link(kind: str, source: Path, tmp_path: Path) -> None:
    """Written through to what it points at, or refused before the work; never a broken half of either."""
    if kind != "dangling":
        (tmp_path / "real").mkdir()
    if kind == "full":
        (tmp_path / "real").rmdir()
        convert(source, tmp_path / "real", "hf")
    (tmp_path / "out").symlink_to("real")
    moved: list[Any] = []
    try:
        convert(source, tmp_path / "out", "torch_dist", overwrite=True, progress=lambda *step: moved.append(step))
    except TargetError:
        assert moved == []
    else:
        assert verify(source, tmp_path / "out").same
    assert (tmp_path / "out").is_symlink()
    assert [p.name for p in tmp_path.iterdir() if "areal" in p.name] == []


@pytest.mark.parametrize("name", [".", "", "x/..", "y/", "deep/er/z"])
def test_target_in_the_current_directory(
    name: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    try:
        convert(source, name, "torch_dist")
    except TargetError:
        assert name in (".", "", "x/..")
        assert list((tmp_path / "here").iterdir()) == []
    else:
        assert verify(source, Path(name)).same


@pytest.mark.parametrize("name", ["x" * 250, "x" * 300, "a\0b", "x" * 5000])
def test_target_with_an_impossible_name(name: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(TargetError):
        convert(source, str(tmp_path / "sub") + "/" + name, "torch_dist")
    assert not (tmp_path / "sub").exists() or list((tmp_path / "sub").iterdir()) == []


def test_target_with_an_odd_name(source: Path, tmp_path: Path) -> None:
    """Spaces, accents, and bytes that are no UTF-8: a path is a path."""
    target = tmp_path / "Modèle final (2) \udcff"
    convert(source, target, "torch_dist")
    assert verify(source, target).same


def test_side_files_that_are_none(source: Path, tmp_path: Path) -> None:
    """A pipe, a link to itself, a link to a directory above: nothing waits, nothing loops, nothing is copied twice."""
    os.mkfifo(source / "pipe.json")
    (source / "loop.json").symlink_to("loop.json")
    (source / "up").symlink_to("..")
    convert(source, tmp_path / "out", "hf")
    assert not (tmp_path / "out" / "pipe.json").exists()
    assert len(list((tmp_path / "out").rglob("config.json"))) == 1


# ------------------------------------------------------------------------------------------------ last look


def test_source_replaced_between_plan_and_run(source: Path, tmp_path: Path) -> None:
    """The offsets are those of the file that was planned; another one in its place must not be read with them."""
    planned = plan(source, "torch_dist")
    data = (source / FILE).read_bytes()
    (source / FILE).unlink()
    (source / FILE).write_bytes(data[:-64] + bytes(64))
    with pytest.raises(SourceError, match=FILE):
        run(planned, tmp_path / "out")
    assert not any("out" in p.name for p in tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["directory", "link"])
def test_partial_name_of_somebody_else(kind: str, source: Path, tmp_path: Path) -> None:
    """What merely has the name of an unfinished conversion is not cleared away, not even to overwrite."""
    held = tmp_path / ("out.areal-partial" if kind == "directory" else "elsewhere")
    held.mkdir()
    (held / "thesis.txt").write_text("years of work")
    if kind == "link":
        (tmp_path / "out.areal-partial").symlink_to(held)
    for overwrite, resume in ((True, False), (False, True), (False, False)):
        with pytest.raises(TargetError, match="journal"):
            convert(source, tmp_path / "out", "torch_dist", overwrite=overwrite, resume=resume)
    assert (held / "thesis.txt").read_text() == "years of work"


def test_side_file_with_the_name_of_the_journal(source: Path, tmp_path: Path) -> None:
    """A stray journal beside the weights is no side file: it must not write over the target's own."""
    (source / ".areal-journal").write_text('{"plan": "x"}\n')
    convert(source, tmp_path / "out", "hf")
    assert not (tmp_path / "out" / ".areal-journal").exists()
    assert verify(source, tmp_path / "out").same


def test_manifest_of_another_format_excuses_nothing(source: Path, tmp_path: Path) -> None:
    """What a manifest says was left out holds for the weights that it describes, not for others beside it."""
    edit_tensors(source, lambda t: t.pop("model.norm.weight"))
    (source / "areal_manifest.json").write_text(
        json.dumps({"format": "torch_dist", "atoms": {}, "left_out": ["final_norm"]})
    )
    with pytest.raises(SourceError, match=r"model\.norm\.weight"):
        convert(source, tmp_path / "out", "torch_dist")
