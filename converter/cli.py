"""The command `areal-convert`. Commands only parse, call the library, and print what comes back.

Importing this module imports click and nothing heavier: everything else is imported by the command that needs it.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import click

from . import cli_hub, cli_serve, cli_sync, cli_sync_end
from . import cli_options as given
from .errors import ConvertError, TargetError, VerifyError

OK, DIFFERENT, REFUSED, BUG, INTERRUPTED, PIPE = 0, 1, 2, 70, 130, 141

EPILOG = """\b
Exit codes:
  0    done; the same; no problems
  1    verify, diff: different; inspect: problems; convert: what was written
       reads back differently
  2    refused: wrong usage, or a source, mesh or target that cannot be used;
       verify, diff: could not tell
  3    sync: a server failed, and nothing changed; it may work later
  70   a bug in areal-convert
  130  interrupted (Ctrl-C)

\b
Reports go to standard output, everything else to standard error. Progress is
drawn only on a terminal.
"""

_USERS_FAULT = {
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EIO,
    errno.EROFS,
    errno.ENOSPC,
}


ENGINES = {"train": "..engines.cli", "plot": "..engines.cli"}
"""Commands of the engines, which the converter does not know: imported when one of them is asked for."""


class Commands(click.Group):
    """Turns what commands raise into messages and exit codes."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ConvertError as error:
            from .cli_show import error_text

            click.echo(error_text(error), err=True)
            ctx.exit(DIFFERENT if isinstance(error, VerifyError) else REFUSED)
        except BrokenPipeError:
            # Whoever read our output has left (`| head`). Python would complain when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(PIPE)
        except OSError as error:
            if error.errno not in _USERS_FAULT or error.filename is None:
                raise
            click.echo(f"error: {error.filename}: {error.strerror}", err=True)
            ctx.exit(REFUSED)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(INTERRUPTED)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands, *ENGINES]  # in the order in which one meets them, not alphabetically

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in ENGINES:
            return getattr(import_module(ENGINES[cmd_name], __package__), cmd_name)
        return super().get_command(ctx, cmd_name)


@click.group(cls=Commands, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda ctx, parameter, value: _version(ctx, value),
    help="Show the version and exit.",
)
def cli() -> None:
    """Convert model checkpoints between Hugging Face, Megatron, FSDP2/DCP and Archon: any format, any mesh, proved bit
    for bit. Formats are detected when reading; no GPU is needed."""


def _version(ctx: click.Context, wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            click.echo(f"areal-convert {version('areal-convert')}")
        except PackageNotFoundError:
            click.echo("areal-convert (not installed)")
        ctx.exit()


def main() -> None:
    """The entry point. An exception that nobody expected shows its traceback and leaves with 70, never with 1, which
    means `different`."""
    try:
        cli(prog_name="areal-convert")
    except SystemExit as end:
        cli_sync_end.let_go(end.code)
        raise
    except Exception:
        traceback.print_exc()
        click.echo("This is a bug in areal-convert. Please report it, with the lines above and the command.", err=True)
        sys.exit(BUG)


def show(lines: Iterable[str], err: bool = False) -> None:
    """Print lines."""
    for line in lines:
        click.echo(line, err=err)


def show_json(report: Any) -> None:
    """Print a report as JSON."""
    click.echo(json.dumps(report, indent=2, ensure_ascii=False, default=str))


# ------------------------------------------------------------------------------------------------ convert and plan


@cli.command(short_help="Convert a checkpoint into another format or mesh.")
@given.SOURCE
@click.argument("out", type=click.Path(path_type=Path))
@given.TO
@given.MESH
@given.RANK
@given.TARGET
@given.OPENING
@given.LIMITS
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint at OUT; it goes only when the new one is whole.")
@click.option("--resume", is_flag=True, help="Finish a conversion that was interrupted.")
@click.option("--no-verify", is_flag=True, help="Do not read back what was written.")
@click.option("--dry-run", is_flag=True, help="Print what would be done; write nothing.")
@given.JSON
def convert(source: str | Path, out: Path, **values: Any) -> None:
    """Convert the checkpoint SRC (any format) to a new directory OUT.

    SRC may lie elsewhere: hf://org/name[@revision][/directory], s3://bucket/directory, https://… Its bytes are placed
    as they come; no copy of it is made.

    OUT appears only when it is whole. Until then the work lies beside it, in OUT.areal-partial. It may be a directory
    elsewhere, too: s3://bucket/directory, gs://…; `push` uploads to the Hub.
    """
    if values["dry_run"]:
        _show_plan(source, values)
        return
    from . import convert as converting
    from .cli_progress import bars
    from .cli_show import result_line, result_notes

    mesh, target, limits = given.mesh(values), given.target(values), given.limits(values)
    switches = {"overwrite": values["overwrite"], "resume": values["resume"], "verify": not values["no_verify"]}
    try:
        with bars() as progress:
            result = converting(
                source,
                out,
                values["to"],
                mesh,
                target,
                limits=limits,
                progress=progress,
                ranks=given.ranks(values),
                **switches,
                **given.opening(values),
            )
    except KeyboardInterrupt:
        _interrupted(out)
    show(result_notes(result), err=True)
    if values["as_json"]:
        show_json(result.report())
    else:
        click.echo(result_line(result))


def _interrupted(out: Path) -> NoReturn:
    """Say what a conversion that was cut short leaves behind, and leave."""
    from .remote.urls import is_remote
    from .workdir import partial_of

    if is_remote(out):
        click.echo("Interrupted. What was sent is kept; the same command with --resume finishes it.", err=True)
        raise click.exceptions.Exit(INTERRUPTED)
    partial = partial_of(out)
    left = f"{partial} holds what was done; the same command with --resume finishes it."
    click.echo(f"Interrupted. {left if partial.exists() else 'Nothing was written.'}", err=True)
    raise click.exceptions.Exit(INTERRUPTED)


@cli.command(short_help="Show what a conversion would move where; draw it.")
@given.SOURCE
@given.TO
@given.MESH
@given.RANK
@given.TARGET
@given.OPENING
@given.LIMITS
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Draw the plan as a web page."
)
@given.JSON
def plan(source: str | Path, **values: Any) -> None:
    """Show what a conversion of SRC would move where: bytes, casts, fills, drops, ranks, memory, files."""
    _show_plan(source, values)


def _show_plan(source: str | Path, values: dict[str, Any]) -> None:
    from . import plan as planning
    from .cli_show import memory_estimate, plan_lines

    ranks = given.ranks(values)
    planned = planning(
        source, values["to"], given.mesh(values), given.target(values), ranks=ranks, **given.opening(values)
    )
    memory = memory_estimate(planned, given.limits(values))
    if values.get("html") is not None:
        from .drawing import draw

        try:
            values["html"].write_text(draw(planned), encoding="utf-8")
        except OSError as error:
            raise TargetError(f"{values['html']}: cannot be written: {error.strerror}.") from None
    if values["as_json"]:
        show_json(planned.report() | {"peak_memory": memory})
    else:
        show(plan_lines(planned, memory))


# ------------------------------------------------------------------------------------------------ reports


@cli.command(short_help="Show what a directory is, and what is wrong with it.")
@click.argument("source", metavar="DIR", type=given.PLACE)
@given.OPENING
@given.JSON
@click.pass_context
def inspect(ctx: click.Context, source: str | Path, as_json: bool, **values: Any) -> None:
    """Show what DIR is: format, dialect, family, mesh, types, parameters, side files, and every problem."""
    from . import inspect as inspecting
    from .cli_show import inspection_lines

    found = inspecting(source, **given.opening(values))
    if as_json:
        show_json(found.report())
    else:
        show(inspection_lines(found))
    ctx.exit(OK if found.ok else DIFFERENT)


def _pair(a: str | Path, b: str | Path, values: dict[str, Any]) -> list[Any]:
    from . import open_checkpoint

    return [open_checkpoint(path, **given.opening(values)) for path in (a, b)]


def _show_fetched(pair: list[Any]) -> None:
    from .cli_show import fetched_text

    for text in dict.fromkeys(f"{x.path}{fetched_text(x.fetched())}" for x in pair if x.fetched()):
        click.echo(f"note: {text}", err=True)


@cli.command(short_help="Are two checkpoints the same weights?")
@click.argument("a", type=given.PLACE)
@click.argument("b", type=given.PLACE)
@given.OPENING
@given.LIMITS
@given.JSON
@click.pass_context
def verify(ctx: click.Context, a: str | Path, b: str | Path, as_json: bool, **values: Any) -> None:
    """Are A and B the same weights, bit for bit, whatever their formats? Lists the atoms that differ."""
    from . import verify as verifying
    from .cli_progress import bars
    from .cli_show import comparison_lines

    pair = _pair(a, b, values)
    with bars() as progress:
        found = verifying(*pair, limits=given.limits(values), progress=progress)
    _show_fetched(pair)
    if as_json:
        show_json(found.report())
    else:
        show(comparison_lines(found))
    ctx.exit(OK if found.same else DIFFERENT)


@cli.command(short_help="By how much do two checkpoints differ?")
@click.argument("a", type=given.PLACE)
@click.argument("b", type=given.PLACE)
@click.option("--no-values", is_flag=True, help="Compare configs, names, shapes and types only; read no tensor.")
@given.OPENING
@given.LIMITS
@given.JSON
@click.pass_context
def diff(ctx: click.Context, a: str | Path, b: str | Path, no_values: bool, as_json: bool, **values: Any) -> None:
    """By how much do A and B differ? Config fields, names, shapes, types, and values by atom."""
    from . import diff as diffing
    from .cli_progress import bars
    from .cli_show import difference_lines

    pair = _pair(a, b, values)
    with bars() as progress:
        found = diffing(*pair, values=not no_values, limits=given.limits(values), progress=progress)
    _show_fetched(pair)
    if as_json:
        show_json(found.report())
    else:
        show(difference_lines(found))
    ctx.exit(DIFFERENT if not found.same else OK if found.sure else REFUSED)


@cli.command(short_help="Show every place of one tensor, with indices.")
@given.SOURCE
@click.argument("name")
@given.TO
@given.MESH
@given.TARGET
@given.OPENING
@click.option("--limit", type=given.COUNT, default=16, show_default=True, help="Places shown for each atom and side.")
@given.JSON
def explain(source: str | Path, name: str, limit: int, as_json: bool, **values: Any) -> None:
    """Show every place that the tensor or atom NAME of SRC comes from and goes to, with indices and byte offsets."""
    from . import explain as explaining
    from .cli_show import explanation_lines

    found = explaining(source, name, values["to"], given.mesh(values), given.target(values), **given.opening(values))
    if as_json:
        show_json(found.report())
    else:
        show(explanation_lines(found, limit))


cli.add_command(cli_hub.pull)
cli.add_command(cli_hub.push)
cli.add_command(cli_serve.serve)
cli.add_command(cli_sync.sync)


FORMATS = {
    "hf": "Hugging Face: safetensors, single or sharded; .bin is read",
    "torch_dist": "Megatron-Core distributed checkpoint (also: megatron)",
    "mp_rank": "Megatron's file for every rank, mp_rank_*/model_optim_rng.pt",
    "dcp": "torch distributed checkpoint with Hugging Face's names, as FSDP2 saves it",
    "archon": "torch distributed checkpoint with Archon's names",
}


@cli.command()
@given.JSON
def archs(as_json: bool) -> None:
    """List the families of models and the formats."""
    from .cli_show import archs_lines

    report = {"families": _families(), "formats": FORMATS}
    if as_json:
        show_json(report)
    else:
        show(archs_lines(report))


def _families() -> dict[str, Any]:
    from ..mappings import FAMILIES, table

    found = {}
    for name, place in FAMILIES.items():
        module = import_module(f"..mappings.{place.partition(':')[0]}", __package__)
        t = table(name)
        needs = {"hf": t.hf, "dcp": t.hf, "torch_dist": t.megatron, "mp_rank": t.megatron, "archon": t.archon}
        formats = [f for f in FORMATS if needs[f]]
        found[name] = {"about": (module.__doc__ or "").strip().splitlines()[0], "formats": formats}
    return found


if __name__ == "__main__":
    main()
