"""Whether a manifest may be believed: before memory is taken for it, and before any byte of it moves."""

from __future__ import annotations

from typing import Any

from ..errors import ConvertError, Problems
from .blocks import NUMBER_BYTES, Blocks, check_tiling
from .refusals import Refused, refuse
from .staging import Staging
from .wire import Manifest, ProtocolError

LARGEST_BUCKET = 1 << 30
SMALLEST_BLOCK = 64
MOST_BLOCKS = 1 << 24
"""A ledger of so many takes 300 MB; at 256 KiB a block it is a model of 4 TB."""
MOST_SENDERS = 1 << 14
LARGEST_NUMBER = (1 << 63) - 1
"""Of an epoch, a version: what a header can carry, with a bit to spare."""


class _Tiling(ConvertError):
    """Only to collect what `check_tiling` finds."""


def read_manifest(data: Any) -> Manifest:
    """Raises Refused (`bad_manifest`) naming the field that is no such thing."""
    try:
        manifest = Manifest.from_json(data)
    except ProtocolError as error:
        raise Refused("bad_manifest", str(error)) from error
    problems = Problems()
    for name, value, lowest, highest in (
        ("epoch", manifest.epoch, 1, LARGEST_NUMBER),
        ("version", manifest.version, 1, LARGEST_NUMBER),
        ("block", manifest.block, SMALLEST_BLOCK, manifest.bucket),
        ("bucket", manifest.bucket, SMALLEST_BLOCK, LARGEST_BUCKET),
        ("senders", len(manifest.senders), 1, MOST_SENDERS),
        ("atoms", len(manifest.atoms), 0 if manifest.mode == "lora" else 1, MOST_BLOCKS),  # none: an adapter goes
    ):
        if not lowest <= value <= highest:
            problems.add(name, f"is {value}; between {lowest} and {highest} was expected")
    if (manifest.mode == "delta") != (manifest.base is not None):
        problems.add("base", f"is {manifest.base} in a push of mode {manifest.mode}")
    refuse(problems, "bad_manifest", "The manifest cannot be used:")
    return manifest


def check_manifest(manifest: Manifest, staging: Staging) -> Blocks:
    """Compare the manifest with the server's tensors, and cut it into blocks.

    Raises Refused: `mismatch` with every atom that does not fit, `bad_manifest` when boxes overlap or leave holes.
    """
    problems = Problems()
    staging.check(manifest, problems)
    refuse(
        problems,
        "mismatch",
        "The manifest does not fit this server's model:",
        "Is it the same model, in the same element types? GET /ws/layout tells what this server has.",
    )
    try:
        check_tiling(manifest, _Tiling, "The boxes of the senders do not make up the model:")
    except _Tiling as error:
        raise Refused("bad_manifest", error.what, error.problems) from None
    blocks = Blocks(manifest)
    if blocks.count > MOST_BLOCKS:
        text = f"The manifest has {blocks.count} blocks of at most {manifest.block} bytes; {MOST_BLOCKS} are the most."
        raise Refused("bad_manifest", text, hint="Larger blocks.")
    return blocks


def largest_payload(manifest: Manifest, blocks: Blocks) -> int:
    """Bytes that a bucket may have: one that holds a single block may be longer by that block's number."""
    return max(manifest.bucket, blocks.largest + NUMBER_BYTES)


def number(body: Any, name: str, lowest: int = 0) -> int:
    """A field of a request that must be a number. Raises Refused."""
    value = body.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= LARGEST_NUMBER:
        raise Refused("bad_request", f"{name}: {_shown(value)} is no number of at least {lowest}.")
    return value


def text(body: Any, name: str, default: str | None = None, longest: int = 1000) -> str:
    """A field that must be text. Raises Refused."""
    value = body.get(name, default)
    if not isinstance(value, str) or not value or len(value) > longest:
        raise Refused("bad_request", f"{name}: {_shown(value)} is no text of 1 to {longest} letters.")
    return value


def seconds(body: Any, name: str, default: float, longest: float = 86400.0) -> float:
    """A field that must be a duration. Raises Refused."""
    value = body.get(name, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= longest:
        raise Refused("bad_request", f"{name}: {_shown(value)} is no number of seconds up to {longest:g}.")
    return float(value)


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)[:80]
