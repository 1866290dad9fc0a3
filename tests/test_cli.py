"""The command line: exit codes, what goes to which stream, JSON, laziness."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import areal_convert.converter as converter
from areal_convert.converter import cli_options
from areal_convert.converter.cli import FORMATS, cli, main
from areal_convert.converter.cli_options import ALIASES
from areal_convert.converter.errors import VerifyError
from areal_convert.converter.human import parse_size
from areal_convert.converter.opening import ALIASES as CORE_ALIASES
from areal_convert.converter.opening import FORMATS as CORE_FORMATS

Model = Callable[..., Path]


def run(*args: Any) -> Result:
    """The command in this process. An exception that it did not turn into a message fails the test."""
    result = CliRunner().invoke(cli, [str(a) for a in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def run_process(*args: Any) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own."""
    command = [sys.executable, "-m", "areal_convert.converter.cli", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


# ------------------------------------------------------------------------------------------------ help


def test_help_is_light_and_tells_the_exit_codes() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "areal_convert.converter.cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    loaded = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "click" in loaded
    assert not loaded & {"torch", "numpy", "ml_dtypes", "xxhash", "rich", "safetensors"}
    assert "Exit codes:" in done.stdout and "130" in done.stdout


@pytest.mark.parametrize("command", list(cli.commands))
def test_every_command_has_help(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0 and result.stdout.startswith("Usage:")


def test_formats_are_those_of_the_library() -> None:
    assert cli_options.FORMATS == CORE_FORMATS == tuple(FORMATS)
    assert set(ALIASES) == set(CORE_ALIASES)


def test_version() -> None:
    assert run("--version").stdout.startswith("areal-convert")


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("384MiB", 384 << 20), ("1.5 kB", 1500), ("2k", 2000), ("2Ki", 2048), ("77", 77)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5 parsecs", "-3MB", "0", "1e9"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError):
        parse_size(text)


# ------------------------------------------------------------------------------------------------ convert


def test_convert_is_quiet_and_ends_with_one_line(model: Model, tmp_path: Path) -> None:
    done = run_process("convert", model("qwen3"), tmp_path / "out", "--to", "megatron", "--tp", 2, "--pp", 2)
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    assert "hf" in line and "torch_dist" in line and "tp2 pp2" in line and "bitwise equal" in line and "move" in line
    assert "\x1b" not in done.stdout


def test_progress_is_drawn_on_a_terminal_only(model: Model, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    args = ["convert", model("qwen3"), tmp_path / "out", "--to", "dcp"]
    command = [sys.executable, "-m", "areal_convert.converter.cli", *map(str, args)]
    env = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, text=True, env=env, timeout=120)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1 and "\x1b" not in done.stdout
    assert "convert" in shown and "verify" in shown and "B/s" in shown


def test_convert_round_trip_by_command(model: Model, tmp_path: Path) -> None:
    source, there, back = model("llama_tied", side_files=True), tmp_path / "there", tmp_path / "back"
    assert (
        run("convert", source, there, "--to", "mp_rank", "--tp", 2, "--layout", "E|t*2|t*2|L", "--pp", 2).exit_code == 0
    )
    assert run("convert", there, back, "--to", "hf", "--max-shard-size", "200kB").exit_code == 0
    assert len(list(back.glob("*.safetensors"))) > 1
    assert run("verify", source, back).exit_code == 0
    assert (back / "chat_template.jinja").read_bytes() == (source / "chat_template.jinja").read_bytes()


def test_convert_json(model: Model, tmp_path: Path) -> None:
    result = run(
        "convert", model("qwen2"), tmp_path / "out", "--to", "dcp", "--dp-shard", 2, "--dtype", "bf16", "--json"
    )
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and report["verified"] is True
    assert report["exactness"] == "narrow" and report["casts"] == {"F32 → BF16": report["atoms"]}
    assert {"move", "verify", "sync"} <= report["seconds"].keys()


def test_dry_run_writes_nothing(model: Model, tmp_path: Path) -> None:
    result = run("convert", model("qwen2"), tmp_path / "out", "--to", "archon", "--dry-run")
    assert result.exit_code == 0 and "every value keeps its bits" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_refusals_are_messages_not_tracebacks(model: Model, tmp_path: Path) -> None:
    source = model("qwen2")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    for args, words in (
        (("convert", source, tmp_path / "o", "--to", "torch_dist", "--tp", 3), "divide"),
        (("convert", source, tmp_path / "full", "--to", "torch_dist"), "--overwrite"),
        (("convert", tmp_path / "nothing", tmp_path / "o", "--to", "hf"), "no such file"),
        (("convert", source, tmp_path / "o", "--to", "hf", "--tp", 2), "no ranks"),
        (("plan", source, "--to", "hf", "--dtype", "bfloat17"), "bfloat17"),
        (("plan", source, "--to", "hf", "--html", tmp_path / "no" / "p.html"), "cannot be written"),
        (("explain", source, "model.layers.0.self_attn.q_proj", "--to", "hf"), "q_proj.weight"),
    ):
        done = run(*args)
        assert done.exit_code == 2 and words in done.stderr and done.stdout == "", (args, done.stderr)
        assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    assert (tmp_path / "full" / "x").read_text() == "mine" and not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    "args", [("convert",), ("plan", "x", "--to", "gguf"), ("plan", "x", "--to", "hf", "--tp", "0"), ("x",)]
)
def test_wrong_usage_is_2(args: tuple[str, ...]) -> None:
    assert run(*args).exit_code == 2


def test_a_layout_implies_the_chunks(model: Model) -> None:
    result = run("plan", model("qwen2"), "--to", "torch_dist", "--pp", 2, "--layout", "E|t*2|t*2|L", "--json")
    assert json.loads(result.stdout)["target"]["mesh"] == "pp2 vpp2"


# ------------------------------------------------------------------------------------------------ what goes wrong


def test_ctrl_c_tells_how_to_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*args: Any, **options: Any) -> None:
        (tmp_path / "out.areal-partial").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(converter, "convert", interrupted)
    result = run("convert", tmp_path / "in", tmp_path / "out", "--to", "hf")
    assert result.exit_code == 130 and "--resume" in result.stderr and "out.areal-partial" in result.stderr


def test_ctrl_c_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(converter, "inspect", interrupted)
    assert run("inspect", tmp_path).exit_code == 130


def test_a_failed_read_back_is_different_not_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise VerifyError("What was written is not what was read:")

    monkeypatch.setattr(converter, "convert", broken)
    assert run("convert", tmp_path / "in", tmp_path / "out", "--to", "hf").exit_code == 1


def test_a_bug_shows_its_traceback_and_is_70(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def bug(*args: Any, **options: Any) -> None:
        raise ZeroDivisionError("a slip")

    monkeypatch.setattr(converter, "inspect", bug)
    monkeypatch.setattr(sys, "argv", ["areal-convert", "inspect", "."])
    with pytest.raises(SystemExit) as left:
        main()
    shown = capsys.readouterr().err
    assert left.value.code == 70 and "ZeroDivisionError: a slip" in shown and "report" in shown


def test_a_reader_that_leaves_is_no_traceback(model: Model) -> None:
    args = ["explain", model("qwen2"), "embed", "--to", "dcp", "--dp-shard", "512", "--json"]
    command = [sys.executable, "-m", "areal_convert.converter.cli", *map(str, args)]
    # Unbuffered, Python takes a write that a pipe cut short for a whole one and never hears of the reader's leaving.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        shown = process.stderr.read()
    assert process.returncode == 141 and shown == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_source_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir(mode=0)
    assert run("inspect", tmp_path / "model").exit_code == 2


# ------------------------------------------------------------------------------------------------ reports


def test_plan_tells_what_moves(model: Model, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    args = ("plan", model("qwen3_moe"), "--to", "torch_dist", "--tp", 2, "--pp", 2, "--ep", 2)
    report = json.loads(run(*args, "--html", page, "--json").stdout)
    assert report["ranks"] == 8 and report["bytes_filled"] > 0 and report["peak_memory"]["buffers"] > 0
    text = run(*args).stdout
    for word in ("parameters", "moves", "padded to 1,024", "casts", "ranks", "peak memory", "largest"):
        assert word in text, word
    html = page.read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>") and html.count("<svg") == html.count("</svg>") > 4
    assert "http" not in html.replace("http-equiv", "") and "<script" not in html and "url(#hatch)" in html


def test_inspect(model: Model) -> None:
    result = run("inspect", model("qwen3_moe"), "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and report["format"] == "hf" and report["family"] == "qwen3_moe" and report["ok"]
    assert "no problems" in run("inspect", model("qwen3_moe")).stdout


def test_inspect_with_problems_is_1(model_copy: Model) -> None:
    path = model_copy("qwen2")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    result = run("inspect", path)
    assert result.exit_code == 1 and "problem" in result.stdout and "layers.4" in result.stdout


def test_verify_and_diff_exit_codes(model: Model, tmp_path: Path) -> None:
    a, b, empty = model("qwen2"), model("qwen2", dtype="bfloat16"), tmp_path / "empty"
    empty.mkdir()
    for command in ("verify", "diff"):
        assert run(command, a, a).exit_code == 0
        assert run(command, a, b).exit_code == 1
        assert run(command, a, empty).exit_code == 2
    report = json.loads(run("verify", a, b, "--json").stdout)
    assert report["same"] is False and len(report["dtypes"]) == 51
    assert json.loads(run("diff", a, b, "--json", "--no-values").stdout)["dtypes"].keys() == report["dtypes"].keys()
    assert "max abs" in run("diff", a, b).stdout


def test_explain(model: Model) -> None:
    args = ("explain", model("qwen2"), "model.layers.1.self_attn.k_proj.weight", "--to", "torch_dist", "--tp", 2)
    text = run(*args).stdout
    assert "layers.1.attn.k" in text and "g[0:1]" in text and "linear_qkv" in text and "tp 1" in text
    (way,) = json.loads(run(*args, "--json").stdout)["ways"]
    assert [p["rank"] for p in way["targets"]] == [0, 1]


def test_archs() -> None:
    report = json.loads(run("archs", "--json").stdout)
    assert set(report["formats"]) == set(CORE_FORMATS) and "hf" in report["families"]["deepseek_v3"]["formats"]
    assert "qwen3_moe" in run("archs").stdout


def test_every_option_has_help() -> None:
    silent = [
        (name, option.name)
        for name, command in cli.commands.items()
        for option in command.params
        if isinstance(option, click.Option) and not option.help
    ]
    assert silent == []
