"""What a user may choose when a hub is made, looked at before anybody is asked anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from ..errors import ConfigError, Problems
from .commits import POLICIES

PushMode = Literal["full", "delta", "auto"]
OnFailure = Literal["abort", "drop"]

SMALLEST_BUCKET, LARGEST_BUCKET = 4096, 1 << 30
SMALLEST_BLOCK = 64
LONGEST = 1e6
"""Seconds: neither infinity nor what no clock takes."""


def check_choices(
    urls: Sequence[str],
    mode: str,
    on_failure: str,
    in_flight: str,
    bucket: int,
    block: int,
    **seconds: float,
) -> None:
    """Raise ConfigError with all that cannot be. `seconds`: options that are times."""
    problems = Problems()
    if not urls:
        problems.add("servers", "is empty; at least one address was expected")
    for name, value, choices in (
        ("mode", mode, get_args(PushMode)),
        ("on_failure", on_failure, get_args(OnFailure)),
        ("in_flight", in_flight, POLICIES),
    ):
        if value not in choices:
            problems.add(name, f"is {value!r}; known are {', '.join(choices)}")
    if not SMALLEST_BUCKET <= bucket <= LARGEST_BUCKET:
        problems.add("bucket", f"is {bucket} bytes; between {SMALLEST_BUCKET} and {LARGEST_BUCKET} were expected")
    if block < SMALLEST_BLOCK:  # one that is larger than a bucket is cut to it
        problems.add("block", f"is {block} bytes; at least {SMALLEST_BLOCK} were expected")
    for name, value in seconds.items():
        if not 0 < value <= LONGEST:
            problems.add(name, f"is {value} s; more than 0 and at most {LONGEST:.0f} were expected")
    problems.raise_as(ConfigError, "These options cannot be:")
