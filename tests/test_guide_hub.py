"""docs/guides/hub.md: every command of it works, in its order, on a Hub, and prints what the guide says.

Our own commands run in this process, which saves starting Python for each; what sets the environment, and the shell's
and others' commands, run as they stand.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from areal_convert.converter import Mesh, convert
from areal_convert.converter.cli import cli
from areal_convert.converter.remote.mounts import unmount_all
from hub_server import HubServer

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "hub.md"
SECOND = "\n## pull\n"
"""The guide in two halves; the second one needs nothing of the first but the directory `merged`."""

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.timeout(120),
    # How huggingface_hub hands a file to its HTTP client.
    pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning"),
]


def commands(text: str) -> list[tuple[str, str]]:
    """What stands in console blocks: commands, each with the output that the guide shows for it."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
        before, *parts = re.split(r"^\$ ", block, flags=re.MULTILINE)
        assert before == ""
        found += [(command, shown.strip()) for command, _, shown in (part.partition("\n") for part in parts)]
    return found


def run(hub: HubServer, work: Path, listed: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    work.mkdir(exist_ok=True)
    monkeypatch.chdir(work)
    hub.patch(monkeypatch)
    for command, shown in listed:
        code, out, err = _ours(command) if command.startswith("areal-convert ") else _shell(hub, command)
        assert code == 0, f"{command}\n{out}{err}"
        assert shown in out, f"{command}\n{out}"


def _ours(command: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(cli, shlex.split(command)[1:])
    unmount_all()
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def _shell(hub: HubServer, command: str) -> tuple[int, str, str]:
    env = hub.env(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    done = subprocess.run(["sh", "-c", command], env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout, done.stderr


def test_converting_from_the_hub(model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"
    listed = commands(GUIDE.read_text(encoding="utf-8").partition(SECOND)[0])
    with HubServer(tmp_path / "hub") as hub:
        hub.add_repo("org/model", model("qwen3", side_files=True))
        run(hub, work, listed, monkeypatch)
    assert len(listed) > 10 and {"inspect", "plan", "convert", "verify"} <= {c.split()[1] for c, _ in listed}
    assert not (work / "node0" / "areal_manifest.json").exists()


def test_pull_and_push(model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = model("qwen3", side_files=True)
    convert(source, tmp_path / "work" / "merged", "torch_dist", Mesh(tp=4, pp=2))
    listed = commands(GUIDE.read_text(encoding="utf-8").partition(SECOND)[2])
    with HubServer(tmp_path / "hub") as hub:
        hub.add_repo("org/model", source)
        run(hub, tmp_path / "work", listed, monkeypatch)
        assert hub.files("org/model-sft", "main")["model.safetensors"]
        assert hub.read("org/model-sft", "model.safetensors") != hub.read("org/model-sft", "model.safetensors", "fp16")
    assert {"pull", "push"} <= {c.split()[1] for c, _ in listed}
