"""Adapter pushes: delivered as PEFT would apply them, replaced, removed; refused whole when they do not fit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import models
import sync_threads
from areal_convert.converter.cli import cli
from areal_convert.converter.errors import ConvertError, ServerRefused
from areal_convert.converter.sync.hub import WeightSync
from areal_convert.converter.sync.server.adapters import Adapters
from areal_convert.converter.sync.transports.adapter_source import adapter_source
from areal_convert.converter.sync.transports.lora import AdapterStage
from sync_parts import module_of

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.filterwarnings("ignore::UserWarning:peft.*"),
]
IDS = torch.tensor([[5, 6, 7, 900]])


@pytest.fixture(scope="module")
def model() -> Path:
    return models.cached_model("qwen3", layers=2)


def write_adapter(model: Path, out: Path, seed: int, rank: int = 4, **changes: Any) -> Path:
    """PEFT's own files, with random A and B."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    targets = ["q_proj", "down_proj"]
    config = LoraConfig(r=rank, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    get_peft_model(module_of(model), config).save_pretrained(str(out))
    if changes:
        fields = json.loads((out / "adapter_config.json").read_text())
        (out / "adapter_config.json").write_text(json.dumps({**fields, **changes}))
    return out


def by_peft(model: Path, adapter: Path) -> torch.Tensor:
    from peft import PeftModel

    with torch.no_grad():
        return PeftModel.from_pretrained(module_of(model), str(adapter)).eval()(IDS).logits


class Served:
    """A receiver over a module with a place for adapters, at a URL."""

    def __init__(self, model: Path) -> None:
        self.module = module_of(model)
        self.adapters = Adapters(self.module)
        state = sync_threads.state_of(model, zero=False)
        self.server = sync_threads.start(model, state, adapters=AdapterStage(self.adapters))
        self.url = self.server.url

    def logits(self, name: str) -> torch.Tensor:
        with torch.no_grad(), self.adapters.active(self.adapters.get(name)):
            return self.module(IDS).logits


@pytest.fixture
def served(model: Path) -> Iterator[Served]:
    one = Served(model)
    yield one
    one.server.stop()


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_an_adapter_is_delivered_replaced_and_removed(
    model: Path, served: Served, tmp_path: Path, transport: str
) -> None:
    first, second = (write_adapter(model, tmp_path / str(seed), seed) for seed in (1, 2))
    before = served.logits("none")
    with WeightSync(model, served.url, transport=transport, block=1 << 10, bucket=8 << 10) as sync:
        report = sync.push_adapter("mine", first)
        assert (
            report.complete
            and report.mode == "lora"
            and report.bytes == sum(t.nbytes for t in load_file(first / "adapter_model.safetensors").values())
        )
        torch.testing.assert_close(served.logits("mine"), by_peft(model, first), rtol=1e-5, atol=1e-5)
        running = served.adapters.get("mine")
        assert sync.push_adapter("mine", second).version == report.version + 1
        torch.testing.assert_close(served.logits("mine"), by_peft(model, second), rtol=1e-5, atol=1e-5)
        assert served.adapters.get("mine") is not running, "who began with the first one keeps it"
        assert sync.push().complete, "whole weights go on as before"
        sync.push_adapter("other", first)
        sync.remove_adapter("mine")
        assert served.adapters.get("mine") is None and served.adapters.get("other") is not None
        with pytest.raises(ConvertError, match="no adapter of this name"):
            sync.remove_adapter("mine")
    assert torch.equal(served.logits("none"), before)


def test_tensors_in_memory_in_their_own_type(model: Path, served: Served, tmp_path: Path) -> None:
    path = write_adapter(model, tmp_path / "a", 3)
    config = json.loads((path / "adapter_config.json").read_text())
    tensors = {n.removeprefix("base_model.model."): t for n, t in load_file(path / "adapter_model.safetensors").items()}
    with WeightSync(model, served.url) as sync:
        sync.push_adapter("live", (config, tensors))
    torch.testing.assert_close(served.logits("live"), by_peft(model, path), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"r": 8}, "rank"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
    ],
)
def test_a_config_that_means_something_else_is_refused(
    model: Path, served: Served, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    path = write_adapter(model, tmp_path / "a", 1, **change)
    with WeightSync(model, served.url) as sync:
        with pytest.raises(ServerRefused, match=says):
            sync.push_adapter("mine", path)
        assert list(served.adapters) == [] and sync.push().complete


@pytest.mark.parametrize(("what", "says"), [("drop", "lora_"), ("shape", "expected"), ("name", "no such module")])
def test_tensors_that_do_not_fit_are_named(model: Path, served: Served, tmp_path: Path, what: str, says: str) -> None:
    path = write_adapter(model, tmp_path / "a", 1)
    tensors = load_file(path / "adapter_model.safetensors")
    name = next(n for n in tensors if "lora_B" in n)
    value = tensors.pop(name)
    if what != "drop":
        tensors[name if what == "shape" else name.replace("layers.0", "layers.9")] = value[:-1].contiguous()
    save_file(tensors, path / "adapter_model.safetensors")
    with WeightSync(model, served.url) as sync, pytest.raises(ServerRefused, match=says):
        sync.push_adapter("mine", path)
    assert list(served.adapters) == []


def test_what_is_not_finite_is_found_before_it_serves(model: Path, served: Served, tmp_path: Path) -> None:
    path = write_adapter(model, tmp_path / "a", 1)
    tensors = load_file(path / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, path / "adapter_model.safetensors")
    with WeightSync(model, served.url) as sync, pytest.raises(ConvertError, match=r"lora_.* holds NaN"):
        sync.push_adapter("mine", path)
    assert list(served.adapters) == []
    with WeightSync(model, served.url, allow_nan=True) as sync:
        sync.push_adapter("mine", path)
    assert served.adapters.get("mine") is not None


def test_a_server_without_a_place_for_adapters_says_so(model: Path, tmp_path: Path) -> None:
    adapter, refused = write_adapter(model, tmp_path / "a", 1), pytest.raises(ServerRefused, match="takes no adapters")
    with sync_threads.serving(model) as (server,), WeightSync(model, server.url) as sync, refused:
        sync.push_adapter("mine", adapter)


def test_what_is_no_adapter_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{")
    for source, says in ((model, "is no adapter"), (3, "is no adapter"), (({}, {}), "no rank")):
        with pytest.raises(ConvertError, match=says):
            adapter_source(source)


def test_by_the_command(model: Path, served: Served, tmp_path: Path) -> None:
    path = write_adapter(model, tmp_path / "a", 5)
    done = CliRunner().invoke(cli, ["sync", str(path), "--server", served.url, "--adapter", "mine"])
    assert done.exit_code == 0, done.output
    assert "lora by shm" in done.stdout and served.adapters.get("mine") is not None
