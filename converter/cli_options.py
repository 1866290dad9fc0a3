"""The options that commands share, and what they become: a Mesh, Options, Limits, arguments of `open_checkpoint`.

Values travel as one dictionary, since a command has some thirty of them. Nothing here imports numpy or torch before a
command runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .human import parse_ranks, parse_size
from .remote.urls import is_remote

if TYPE_CHECKING:
    from .execute import Limits
    from .mesh import Mesh
    from .target import Options

Command = TypeVar("Command", bound=Callable[..., Any])
Decorator = Callable[[Command], Command]

FORMATS = ("hf", "torch_dist", "mp_rank", "dcp", "archon")
ALIASES = ("megatron",)
"""As in `opening`, which is too heavy to import for `--help`; a test compares the two."""


def size(value: str | int) -> int:
    """Bytes, as `5GB`, `384MiB` or a bare number."""
    try:
        return parse_size(str(value))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def group(*decorators: Callable[[Any], Any]) -> Decorator[Any]:
    """Several decorators as one, in the order in which help shows them."""

    def apply(function: Any) -> Any:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


class Seconds(click.FloatRange):
    """A time, at least `min`: neither NaN nor more than any clock takes."""

    name = "seconds"

    def __init__(self, min: float = 0.0) -> None:
        super().__init__(min, 1e6)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        return found if found == found else self.fail(f"{value!r} is no number of seconds.", param, ctx)


class Place(click.Path):
    """A path, or the URL of a place elsewhere, which stays the text that it is: `Path` would eat a slash."""

    name = "place"

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return str(value) if is_remote(value) else super().convert(value, param, ctx)


COUNT = click.IntRange(min=1)
PLACE = Place()
SOURCE = click.argument("source", metavar="SRC", type=PLACE)
JSON = click.option("--json", "as_json", is_flag=True, help="Print the report as JSON on standard output.")
TO = click.option(
    "--to", required=True, type=click.Choice([*FORMATS, *ALIASES]), help="Format to write; megatron = torch_dist."
)

OPENING = group(
    click.option(
        "--hf-config", type=PLACE, metavar="DIR", help="Directory (or hf://org/name) with config.json; no weights."
    ),
    click.option("--family", metavar="NAME", help="Table to use instead of the config's model_type; see `archs`."),
    click.option("--also", multiple=True, type=PLACE, metavar="DIR", help="Further directory of a DCP."),
    click.option(
        "--drop", multiple=True, metavar="REGEX", help="Stored names to leave behind (whole name, repeatable)."
    ),
    click.option(
        "--tie/--no-tie", default=None, help="The head is, or is not, the embedding, whatever the config says."
    ),
)

MESH = group(
    click.option("--tp", type=COUNT, default=1, metavar="N", help="Tensor parallel size."),
    click.option("--pp", type=COUNT, default=1, metavar="N", help="Pipeline stages."),
    click.option("--vpp", type=COUNT, metavar="N", help="Virtual chunks on each stage; a layout implies it."),
    click.option("--ep", type=COUNT, default=1, metavar="N", help="Expert parallel size."),
    click.option("--etp", type=COUNT, metavar="N", help="Tensor parallel size inside an expert; default: TP."),
    click.option("--dp-shard", type=COUNT, default=1, metavar="N", help="FSDP shards (dcp, archon)."),
    click.option(
        "--first-stage-layers", "first", type=click.IntRange(min=0), metavar="N", help="Layers on the first stage."
    ),
    click.option(
        "--last-stage-layers", "last", type=click.IntRange(min=0), metavar="N", help="Layers on the last stage."
    ),
    click.option(
        "--pipeline-layout", "--layout", "layout", metavar="TEXT", help="Explicit stages, such as E|t*2|t*2|L."
    ),
)

TARGET = group(
    click.option(
        "--dtype", metavar="NAME", help="Cast weights (bfloat16, float16, float32); default: keep every type."
    ),
    click.option(
        "--make-vocab-size-divisible-by",
        "vocab_divisor",
        type=COUNT,
        default=128,
        show_default=True,
        metavar="N",
        help="Megatron pads the vocabulary to a multiple of N × TP.",
    ),
    click.option(
        "--max-shard-size", "max_shard", type=size, default="5GB", show_default=True, help="hf: bytes in a file."
    ),
    click.option(
        "--experts",
        type=click.Choice(["per-expert", "fused"]),
        help="hf, dcp: how experts are held; default: as before.",
    ),
    click.option(
        "--spec", type=click.Choice(["te", "local"]), default="te", show_default=True, help="mp_rank: norm names."
    ),
    click.option(
        "--megatron-experts",
        type=click.Choice(["grouped", "sequential", "legacy"]),
        help="mp_rank: how experts are held; the default follows --spec.",
    ),
    click.option("--root", default="", metavar="TEXT", help="dcp: put before every name, `model.` say."),
    click.option("--allow-nan", is_flag=True, help="Convert a checkpoint that holds NaNs."),
)

LIMITS = group(
    click.option("--workers", type=COUNT, metavar="N", help="Threads; default: the cores, at most 8."),
    click.option(
        "--memory-budget",
        "memory",
        type=size,
        default="384MiB",
        show_default=True,
        help="Bytes that buffers may take.",
    ),
    click.option(
        "--connections",
        type=COUNT,
        default=8,
        show_default=True,
        metavar="N",
        help="Requests at the same time, for a source elsewhere.",
    ),
    click.option(
        "--max-gap",
        type=size,
        metavar="SIZE",
        help="Fetch gaps up to this size along with what is wanted: fewer requests, more bytes.",
    ),
)


RANK = click.option(
    "--rank",
    "ranks",
    multiple=True,
    metavar="N",
    help="Make only the files of these ranks: 3, 0-3 or 0-3,7 (repeatable). Reads only what they hold.",
)


def ranks(values: dict[str, Any]) -> list[int] | None:
    """The ranks whose files are wanted; None: all."""
    try:
        found = [rank for text in values["ranks"] for rank in parse_ranks(text)]
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--rank") from None
    return found or None


def opening(values: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `open_checkpoint`."""
    return {name: values[name] for name in ("hf_config", "family", "also", "tie", "drop")}


def mesh(values: dict[str, Any]) -> Mesh:
    """The target's mesh. A layout string says how many chunks there are, as in Megatron. Raises MeshError."""
    from .mesh import Mesh, expand_layout

    vpp, layout = values["vpp"], values["layout"]
    if vpp is None and layout:
        stages = len(expand_layout(layout))
        vpp = stages // values["pp"] if stages % values["pp"] == 0 else 1
    names = ("tp", "pp", "ep", "etp", "dp_shard", "first", "last", "layout")
    return Mesh(**{name: values[name] for name in names}, vpp=vpp or 1)


def target(values: dict[str, Any]) -> Options:
    """How the target is written."""
    from .target import Options

    names = ("dtype", "max_shard", "spec", "megatron_experts", "vocab_divisor", "root", "allow_nan")
    experts = values["experts"].replace("-", "_") if values["experts"] else None
    return Options(**{name: values[name] for name in names}, experts=experts)


def limits(values: dict[str, Any]) -> Limits:
    """Threads and memory."""
    from .execute import Limits

    given = {name: values[name] for name in ("memory", "connections", "max_gap")}
    given |= {"workers": values["workers"]} if values["workers"] else {}
    return Limits(**given)
