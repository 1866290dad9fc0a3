"""What every test stands on: one thread per process, no network, and models that are built once per session."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before anything imports torch or transformers, and for the processes that tests start. Two cores do not gain from
# threads in tiny models, and gloo must not look for a network card.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # c10d asks for the names of those who connect
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # In the background of a shell; the processes that tests interrupt would inherit it, and never end.
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import settings

import models

# How long an example takes says more about the machine's other guests than about us.
settings.register_profile("areal", deadline=None)
settings.load_profile("areal")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first, then slow ones, then those that start several processes; GPU tests only where one is."""
    items.sort(key=lambda item: (bool(item.get_closest_marker("multiprocess")), bool(item.get_closest_marker("slow"))))
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not _has_gpu():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def session_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of this run, the same for all parallel workers."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base


@pytest.fixture(scope="session", autouse=True)
def _model_cache(session_dir: Path) -> None:
    os.environ[models.CACHE_ENV] = str(session_dir / "models")
    os.environ["AREAL_CACHE"] = str(session_dir / "areal-cache")


@pytest.fixture
def model() -> Callable[..., Path]:
    """`model("qwen3", dtype="bfloat16")`: a directory that tests share and must not write to."""
    return models.cached_model


@pytest.fixture
def model_copy(tmp_path: Path) -> Callable[..., Path]:
    """`model_copy("qwen3")`: the same in a directory of the test's own, to damage at will."""

    def copy(family: str, **kinds: Any) -> Path:
        return models.make_model(family, tmp_path / f"{family}-{len(list(tmp_path.iterdir()))}", **kinds)

    return copy
