"""Fields of samples for policy-gradient training, beside their tokens, and what they are held as."""

from __future__ import annotations

__all__ = ["PER_SAMPLE", "PER_TOKEN"]

PER_TOKEN = {
    "advantages": "float32",
    "old_logprobs": "float32",
    "prox_logprobs": "float32",
    "ref_logprobs": "float32",
    "versions": "int64",
}
"""A value for each token, at that token."""

PER_SAMPLE = {"reward": "float32"}
"""One value."""
