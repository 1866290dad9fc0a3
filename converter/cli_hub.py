"""The commands `pull` and `push`: models from the Hugging Face Hub and to it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import cli_options as given
from .errors import TargetError
from .human import plural, seconds_text, size_text

if TYPE_CHECKING:
    from .hub import Pulled, Pushed

TO = click.option(
    "--to",
    type=click.Choice([*given.FORMATS, *given.ALIASES]),
    help="Convert on the way; without it the files of the commit are fetched as they are.",
)
OUT = click.option(
    "-o", "--out", type=click.Path(path_type=Path), metavar="DIR", help="New directory; default: the model's name."
)
EVERYTHING = click.option(
    "--include-all", is_flag=True, help="Also weights that the index does not name, other formats and their folders."
)


@contextmanager
def interrupted(kept: str) -> Iterator[None]:
    """Say what Ctrl-C leaves behind, and leave."""
    from .cli import INTERRUPTED

    try:
        yield
    except KeyboardInterrupt as stopped:
        click.echo(f"Interrupted. {stopped.args[0] if stopped.args else kept}", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None


# ------------------------------------------------------------------------------------------------ pull


@click.command(short_help="Fetch a model from the Hub, as it is or converted.")
@click.argument("repo", metavar="ORG/MODEL")
@click.option("--revision", metavar="REV", help="Branch, tag or commit (default: main); or write ORG/MODEL@REV.")
@OUT
@TO
@given.MESH
@given.RANK
@given.TARGET
@given.OPENING
@given.LIMITS
@EVERYTHING
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint at DIR; it goes only when the new one is whole.")
@click.option("--resume", is_flag=True, help="Finish a pull that was interrupted.")
@click.option("--no-verify", is_flag=True, help="With --to: do not read back what was written.")
@given.JSON
def pull(repo: str, as_json: bool, **values: Any) -> None:
    """Fetch the model ORG/MODEL (or hf://ORG/MODEL@REV) from the Hub into a new directory: the files of one commit,
    each checked against its digest; or, with --to, converted while it is fetched.

    DIR appears only when it is whole. Until then the work lies beside it, in DIR.areal-partial.
    """
    from .cli import show, show_json
    from .cli_progress import bars
    from .cli_show import result_line, result_notes
    from .hub import pull as pulling

    mesh, target = given.mesh(values), given.target(values)
    if values["to"] is None:
        _refuse_without_to(mesh, target, values)
    names = ("revision", "to", "include_all", "overwrite", "resume")
    kept = "What has arrived is kept: the same command with --resume goes on from there."
    with interrupted(kept), bars() as progress:
        done = pulling(
            repo,
            values["out"],
            mesh=mesh,
            options=target,
            verify=not values["no_verify"],
            ranks=given.ranks(values),
            limits=given.limits(values),
            progress=progress,
            **{name: values[name] for name in names},
            **(given.opening(values) if values["to"] else {}),
        )
    notes = result_notes(done.converted) if done.converted is not None else (f"note: {note}" for note in done.notes)
    show(notes, err=True)
    if as_json:
        show_json(done.report())
    else:
        show([result_line(done.converted)] if done.converted is not None else pulled_lines(done))


def _refuse_without_to(mesh: Any, target: Any, values: dict[str, Any]) -> None:
    from .mesh import Mesh
    from .target import Options

    opening = [name for name in ("hf_config", "family", "also", "drop", "tie") if values[name] not in (None, ())]
    if mesh != Mesh() or target != Options() or opening or values["no_verify"] or values["ranks"]:
        raise click.UsageError(
            "Options of a conversion need --to FORMAT; without it the files are fetched as they are."
        )


def pulled_lines(done: Pulled) -> Iterator[str]:
    """What a pull fetched, and what it left."""
    taken = done.taken
    assert taken is not None
    came = [f"{size_text(taken.fetched)} fetched in {plural(taken.requests, 'request')}"]
    came += [f"{size_text(taken.cached)} from Hugging Face's cache"] if taken.cached else []
    came += [f"{size_text(taken.resumed)} there before"] if taken.resumed else []
    came += [plural(taken.retries, "retry").replace("retrys", "retries")] if taken.retries else []
    size = size_text(sum(taken.files.values()))
    kind = f"{taken.family or 'unknown family'}, {taken.format}"
    yield f"{done.repo} at {(done.revision or '')[:12]} → {done.path} ({kind}): {size} in " + (
        f"{plural(len(taken.files), 'file')}, digests checked; {', '.join(came)}; {seconds_text(done.seconds)}"
    )
    if taken.left:
        from .cli_show import SHOWN

        shown, more = taken.left[:SHOWN], len(taken.left) - SHOWN
        yield f"left out (--include-all fetches them): {', '.join(shown)}" + (f" and {more} more" if more > 0 else "")


# ------------------------------------------------------------------------------------------------ push


@click.command(short_help="Push a model of any format to the Hub.")
@click.argument("source", metavar="DIR")
@click.argument("repo", metavar="ORG/MODEL")
@click.option("--revision", metavar="BRANCH", help="Branch that is there (default: main).")
@click.option("--branch", metavar="BRANCH", help="Branch that is made from main if it is not there.")
@click.option("--private", is_flag=True, help="A repository that this push makes is private.")
@click.option("--create-pr", is_flag=True, help="Propose the commit as a pull request.")
@click.option("--message", metavar="TEXT", help="The commit's title.")
@click.option("--dtype", metavar="NAME", help="Cast weights (bfloat16, float16, float32); default: keep every type.")
@click.option(
    "--max-shard-size", "max_shard", type=given.size, default="5GB", show_default=True, help="Bytes in a file."
)
@click.option("--experts", type=click.Choice(["per-expert", "fused"]), help="How experts are held; default: as before.")
@click.option("--allow-nan", is_flag=True, help="Push a checkpoint that holds NaNs.")
@given.OPENING
@given.LIMITS
@click.option(
    "--scratch",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Where files are made (two at a time).",
)
@click.option("--dry-run", is_flag=True, help="Print what would be sent and deleted; change nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before old weight files are deleted.")
@given.JSON
def push(source: str, repo: str, as_json: bool, **values: Any) -> None:
    """Push the checkpoint DIR (any format, or a URL) to the repository ORG/MODEL on the Hub, as a Hugging Face model.

    One commit at the end, or none. It deletes the weight files that the new index no longer names, and nothing else.
    The same push again, after whatever went wrong, makes and sends only what is missing.
    """
    from .cli import show, show_json
    from .cli_progress import bars
    from .hub import push as pushing
    from .target import Options

    experts = values["experts"].replace("-", "_") if values["experts"] else None
    options = Options(experts=experts, **{n: values[n] for n in ("dtype", "max_shard", "allow_nan")})
    names = ("revision", "branch", "private", "create_pr", "message", "scratch", "dry_run")

    def confirm(pushed: Pushed) -> None:
        _ask(pushed, yes=values["yes"], quiet=as_json)

    kept = "Nothing was committed; the same command again sends only what has not arrived."
    with interrupted(kept), bars() as progress:
        done = pushing(
            source,
            repo,
            options=options,
            confirm=confirm,
            limits=given.limits(values),
            progress=progress,
            **{name: values[name] for name in names},
            **given.opening(values),
        )
    left = done.intent.cargo.left_behind
    notes = [*done.planned.source.notes, *done.intent.notes]
    notes += [f"not carried over: {', '.join(left[:20])}"] if left else []
    show((f"note: {note}" for note in notes), err=True)
    if as_json:
        show_json(done.report())
    else:
        show(intent_lines(done) if done.sent is None else pushed_lines(done))


def _ask(pushed: Pushed, *, yes: bool, quiet: bool) -> None:
    """Show what will be deleted, and have it confirmed. Raises TargetError when it is not."""
    doomed = pushed.intent.delete
    if not doomed:
        return
    if not quiet:
        for line in deletion_lines(pushed):
            click.echo(line, err=True)
    if yes:
        return
    what = f"{plural(len(doomed), 'weight file')} of {pushed.intent.place.repo} would be deleted"
    if not sys.stdin.isatty():
        raise TargetError(f"{what}: {', '.join(doomed)}.", hint="Pass --yes to agree. Nothing was sent.")
    if not click.confirm(f"{what}. Go on?", err=True):
        raise TargetError("Nothing was sent.")


def deletion_lines(pushed: Pushed) -> Iterator[str]:
    """The weight files that go, and those that stay although they are not of this model."""
    for path, size in pushed.intent.delete.items():
        yield f"  {click.style('delete', fg='red')} {path} ({size_text(size)})"
    for path in pushed.intent.stay:
        yield f"  stays  {path} (not of this push; delete it yourself if it is stale)"


def intent_lines(pushed: Pushed) -> Iterator[str]:
    """What a push would do."""
    intent, planned = pushed.intent, pushed.planned
    how = "as its files are" if intent.cargo.as_is else f"made from {planned.source.format} ({intent.cargo.exactness})"
    total = size_text(sum(size or 0 for size in intent.files.values()))
    yield f"{planned.source.path} → {intent.place}: {plural(len(intent.files), 'file')}, {total}, {how}"
    for path, size in intent.files.items():
        yield f"  send   {path} ({size_text(size) if size is not None else 'written at the end'})"
    yield from deletion_lines(pushed)
    yield "Nothing was changed (--dry-run)."


def pushed_lines(pushed: Pushed) -> Iterator[str]:
    """What a push did, and where it is."""
    intent, sent = pushed.intent, pushed.sent
    assert sent is not None and sent.commit is not None
    total = size_text(sum(file.size for file in sent.files.values()))
    parts = [f"{plural(len(sent.files), 'file')}, {total}; {size_text(sent.sent_bytes)} of weights sent"]
    parts += [f"{plural(len(sent.before), 'file')} had arrived before"] if sent.before else []
    parts += [f"{plural(len(sent.same), 'file')} the same as before"] if sent.same else []
    parts += [f"{plural(len(intent.delete), 'file')} deleted"] if intent.delete else []
    times = ", ".join(f"{phase} {seconds_text(s)}" for phase, s in pushed.seconds.items())
    parts += ["names, sizes and digests verified", times]
    yield f"{pushed.planned.source.path} → {intent.place}: {'; '.join(parts)}"
    yield str(pushed.url) if pushed.changed else f"Nothing had changed: {sent.commit.url}"
