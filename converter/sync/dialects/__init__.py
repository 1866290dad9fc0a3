"""Servers of others: which one speaks at an address, and a sink for it. All are fenced in place (`fenced.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..client import Client
    from .fenced import Fenced


def probe(client: Client, hub: str, options: Mapping[str, Any]) -> Fenced:
    """A sink for whatever server this is. Raises ServerRefused (`wrong_dialect`) that says what was found instead."""
    from .base import Choices, detect

    del hub  # none of these servers knows of leases
    found = detect(client)
    choices = Choices.of(options)
    kinds: dict[str, type[Fenced]] = {}
    if found.kind.startswith("areal"):
        from .areal import ArealSglang, ArealVllm

        kinds = {"areal-vllm": ArealVllm, "areal-sglang": ArealSglang}
    elif found.kind.startswith("vllm"):
        from .vllm import Vllm019, Vllm030

        kinds = {"vllm-0.19": Vllm019, "vllm-0.30": Vllm030}
    else:
        from .sglang import Sglang0510, Sglang0523

        kinds = {"sglang-0.5.10": Sglang0510, "sglang-0.5.23": Sglang0523}
    return kinds[found.kind](client, found, choices)
