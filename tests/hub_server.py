"""A Hub for tests, on loopback: it speaks the API that the installed huggingface_hub calls, and goes wrong on demand.

    with HubServer(tmp_path) as hub:
        sha = hub.add_repo("org/model", {"config.json": b"{}", "model.safetensors": path})
        subprocess.run([...], env=hub.env())               # another process: HF_ENDPOINT, HF_TOKEN, HF_HOME, …
        hub.api().model_info("org/model")                  # this process: clients that are told the endpoint,
        hub.patch(monkeypatch)                             # or all of huggingface_hub pointed here until the test ends
        hub.fault("cdn", "*.safetensors", drop_after=1000, times=1)
        assert hub.bytes_sent("*.safetensors") < 5000 and not hub.calls(kind="cdn", path="*.bin")

LFS files are served and taken by a second port (the "CDN"), another origin that refuses tokens. Nothing is in Xet:
downloads see that by themselves, uploads need HF_HUB_DISABLE_XET=1, which `env` and `patch` set. What a Fault can do
stands in hub_faults.

As a program: `python hub_server.py ROOT [--model ORG/NAME=DIR …]` prints one line of JSON (what `env` gives) and serves
until its input ends.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import hub_bucket
import hub_routes
from hub_faults import Fault, Request
from hub_http import Listener
from hub_state import INVALID, READ, STRANGER, WRITE, Hub

if TYPE_CHECKING:
    import pytest
    from huggingface_hub import HfApi, HfFileSystem

__all__ = ["INVALID", "READ", "STRANGER", "WRITE", "Fault", "HubServer", "Request"]


class HubServer(Hub):
    """Serves from `with` to its end; `root` keeps the blobs, and the HF_HOME of those who use `env` or `patch`."""

    def __init__(self, root: Path, **options: Any) -> None:
        super().__init__(root, **options)
        self._listeners = (Listener(self, hub_routes.find), Listener(self, hub_bucket.find))
        self.url, self.cdn_url = (listener.url for listener in self._listeners)

    def __enter__(self) -> Self:
        for listener in self._listeners:
            threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for listener in self._listeners:
            listener.stop()
        if self.crashes and error is None:
            raise self.crashes[0]

    # How to get here

    def env(self, token: str | None = WRITE, home: Path | None = None, **more: str) -> dict[str, str]:
        """The environment of another process (all of it: what this one has, without its Hub settings)."""
        base = {name: text for name, text in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        base.pop("TRANSFORMERS_OFFLINE", None)
        return base | self.settings(token, home) | more

    def settings(self, token: str | None = WRITE, home: Path | None = None) -> dict[str, str]:
        known = {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home or self.root / "home"),
            "AREAL_CACHE": str(home or self.root / "home") + "/areal",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        return known | ({"HF_TOKEN": token} if token else {})

    def api(self, token: str | bool = WRITE) -> HfApi:
        from huggingface_hub import HfApi

        return HfApi(endpoint=self.url, token=token)

    def fs(self, token: str | bool = WRITE, **options: Any) -> HfFileSystem:
        from huggingface_hub import HfFileSystem

        return HfFileSystem(endpoint=self.url, token=token, skip_instance_cache=True, **options)

    def patch(self, monkeypatch: pytest.MonkeyPatch, token: str | None = WRITE, home: Path | None = None) -> None:
        """Point huggingface_hub, which reads its environment when it is imported, here for the rest of the test."""
        from hub_patch import patch

        patch(monkeypatch, self.url, self.settings(token, home))


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a Hub on loopback until the input ends.")
    parser.add_argument("root", type=Path)
    parser.add_argument("--model", action="append", default=[], metavar="ORG/NAME=DIR")
    arguments = parser.parse_args()
    with HubServer(arguments.root) as hub:
        for name, _, folder in (model.partition("=") for model in arguments.model):
            hub.add_repo(name, Path(folder) if folder else None)
        print(json.dumps(hub.settings()), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
