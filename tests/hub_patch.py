"""Point the huggingface_hub of this process at another Hub, until a test ends.

The library reads its environment once, when it is imported, into `huggingface_hub.constants`, and builds from that
what other modules hold: the default client `hf_api.api` behind the functions of the package, the default file system,
and the origins that may see a token.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

NAMES = ("HF_ENDPOINT", "HF_HOME", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_XET")


def patch(monkeypatch: pytest.MonkeyPatch, url: str, settings: dict[str, str]) -> None:
    from huggingface_hub import HfFileSystem, constants, hf_api, hf_file_system
    from huggingface_hub.utils import _http

    for name in {*NAMES, *settings}:
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)

    home = Path(settings["HF_HOME"])
    values = {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HUGGINGFACE_HUB_CACHE": str(home / "hub"),
        "HF_ASSETS_CACHE": str(home / "assets"),
        "HF_XET_CACHE": str(home / "xet"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_STORED_TOKENS_PATH": str(home / "stored_tokens"),
    }
    for name, value in values.items():
        monkeypatch.setattr(constants, name, value)
    origins = getattr(_http, "_HUB_ORIGINS", frozenset())
    monkeypatch.setattr(_http, "_HUB_ORIGINS", origins | {("http", "127.0.0.1", int(url.rpartition(":")[2]))})
    monkeypatch.setattr(hf_api.api, "endpoint", url)
    monkeypatch.setattr(hf_file_system.hffs, "endpoint", url)
    monkeypatch.setattr(hf_file_system.hffs, "_api", hf_api.HfApi(endpoint=url))
    hf_file_system.hffs.invalidate_cache()
    HfFileSystem.clear_instance_cache()
    _http.close_session()
