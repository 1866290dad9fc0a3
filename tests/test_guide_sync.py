"""docs/guides/sync.md: every command of it works, in order, against a real server, and prints what the guide says."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import models
from areal_convert.converter.cli import cli
from areal_convert.converter.sync.transport import KINDS
from sync_jobs import other_weights
from sync_server import running_server
from test_guide_hub import commands

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "sync.md"
SERVER = "http://127.0.0.1:8000"

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(90)]


def write_adapter(base: Path, out: Path) -> None:
    """A LoRA adapter of one linear layer, in PEFT's form."""
    import torch
    from safetensors.torch import load_file, save_file

    state = load_file(base / "model.safetensors")
    name = next(n for n in state if n.endswith("q_proj.weight")).removesuffix(".weight")
    rows, columns = state[f"{name}.weight"].shape
    out.mkdir()
    halves = {"A": torch.ones(4, columns), "B": torch.ones(rows, 4)}
    save_file(
        {f"base_model.model.{name}.lora_{half}.weight": t for half, t in halves.items()},
        out / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [name.rpartition(".")[2]]}
    (out / "adapter_config.json").write_text(json.dumps(config))


def run(command: str) -> Result | str:
    if not command.startswith("areal-convert "):
        return subprocess.run(["sh", "-c", command], check=True, capture_output=True, text=True).stdout
    done = CliRunner().invoke(cli, shlex.split(command)[1:])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def shows(out: str, shown: str) -> bool:
    """Whether the guide says what was printed; an ellipsis stands for whatever is there."""
    pattern = ".*".join(re.escape("".join(part.split())) for part in shown.split("…"))
    return re.search(pattern, "".join(out.split())) is not None


def test_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = GUIDE.read_text(encoding="utf-8")
    base = models.cached_model("qwen3", layers=2, side_files=True)
    for step in (100, 200, 300):
        other_weights(base, tmp_path / f"step-{step}", step)
    write_adapter(base, tmp_path / "adapter")
    monkeypatch.chdir(tmp_path)
    with running_server(base) as server:
        listed = commands(text)
        assert len(listed) >= 4
        for command, shown in listed:
            done = run(command.replace(SERVER, server.url))
            out = done if isinstance(done, str) else done.output
            assert isinstance(done, str) or done.exit_code == 0, f"{command}\n{out}"
            assert shows(out.replace(server.url, SERVER), shown), f"{command}\n{out}"
        program = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0].replace(SERVER, server.url)
        subprocess.run([sys.executable, "-c", program], check=True)
        assert server.version == 201 or server.version > 201


def test_its_table_has_every_option_and_transport() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    own = {"--watch", "--interval", "--settle", "--adapter", "--json", *given()}
    options = {o for p in cli.commands["sync"].params for o in p.opts if o.startswith("--")}
    assert {o for o in options - own if f"`{o}" not in text and f", `{o}" not in text} == set()
    assert all(f"`{kind}`" in text or kind in ("shm", "gloo") for kind in KINDS)


def given() -> set[str]:
    """Options that all commands share."""
    return {"--hf-config", "--family", "--also", "--drop", "--tie", "--no-tie"}
