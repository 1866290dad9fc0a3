"""The status page in a real browser: what it shows before and after a push, with a token, and without a server."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import requests

from sync_parts import module_of
from sync_server import RunningServer, running_server
from test_server_versions import Pusher

CHROMIUM = shutil.which("chromium")
PAGE = Path(__file__).parents[1] / "converter/sync/server/page.html"

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(90)]
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")


@pytest.fixture(scope="module")
def where() -> Path:
    import models

    return models.cached_model("qwen3", side_files=True)


@pytest.fixture(scope="module")
def server(where: Path) -> Iterator[RunningServer]:
    with running_server(where, names=("policy <b>",)) as running:
        yield running


def browse(url: str, profile: Path, *options: str) -> str:
    """What chromium prints. Time in the page runs as fast as it can."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
               "--disable-background-networking", "--disable-component-update", "--disable-sync",
               f"--user-data-dir={profile}", "--virtual-time-budget=2500", "--window-size=1100,1000"]  # fmt: skip
    done = subprocess.run([*command, *options, url], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    errors = [line for line in done.stderr.splitlines() if "CONSOLE" in line and "Uncaught" in line]
    assert errors == [], errors
    return done.stdout


class _Texts(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: dict[str, str] = {}
        self.hidden: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag not in ("meta", "input", "br", "line", "polygon", "polyline", "link"):
            self.open.append(given.get("id") or "")
        if given.get("id") and "hidden" in given:
            self.hidden.add(str(given["id"]))

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "polygon", "polyline"):
            self.open.pop()

    def handle_data(self, data: str) -> None:
        for name in filter(None, self.open):
            self.found[name] = " ".join(f"{self.found.get(name, '')} {data}".split())


def texts(html: str) -> _Texts:
    """The text below every element that has an id."""
    parser = _Texts()
    parser.feed(html)
    return parser


@in_browser
def test_the_page_shows_versions_pushes_and_traffic(server: RunningServer, where: Path, tmp_path: Path) -> None:
    before = texts(browse(server.url, tmp_path / "a", "--dump-dom"))
    assert before.found["model"] == "policy <b>"
    assert before.found["version"] == "0" and "no push yet" in before.found["root"]
    assert (
        before.found["sync"].startswith("State serving Epoch 0") and "finish on the old weights" in before.found["sync"]
    )
    assert before.hidden >= {"trouble", "pushes"} and "nopush" not in before.hidden

    module, pusher = module_of(where), Pusher(server, where)
    pusher.stage(module)
    receipt = pusher.commit()
    pusher.stage(module)
    pusher.call("abort", {"hub": "hub-1", "epoch": pusher.epoch, "reason": "changed my mind"})
    for _ in range(4):
        server.generate([5, 6], 25)
    html = browse(server.url, tmp_path / "b", "--dump-dom")
    after = texts(html)
    assert after.found["version"] == "1" and after.found["root"] == receipt["root"]
    size = sum(p.numel() * 4 for p in module.parameters()) / 1e6
    rows = re.findall(r"<tr>(.*?)</tr>", html.partition("<tbody>")[2], re.DOTALL)
    cells = [[re.sub(r"<[^>]+>", "", c) for c in re.findall(r"<td.*?</td>", row)] for row in rows]
    assert [row[1:4] for row in cells] == [["aborted", "2", "–"], ["committed", "1", "full"]]
    assert float(cells[1][4].removesuffix(" MB")) == pytest.approx(size, rel=0.05)
    assert cells[1][7].endswith("ms") and cells[1][8] == f"{receipt['root'][:12]}…"
    assert "changed my mind" in rows[0] and "Lease hub-1" in after.found["sync"]
    figures = after.found["figures"].split(" ")
    assert int(figures[figures.index("tokens") - 1]) == 100 and int(figures[figures.index("requests") - 1]) == 4
    assert len(re.search(r'class="line" points="([^"]+)"', html)[1].split()) == 120  # type: ignore[index]
    assert '<line class="mark"' in html and "peak" in after.found
    assert "nopush" in after.hidden and "pushes" not in after.hidden


@in_browser
def test_light_and_dark_are_two_pictures(server: RunningServer, tmp_path: Path) -> None:
    from PIL import Image

    grounds = []
    for name, options in (("light", []), ("dark", ["--blink-settings=preferredColorScheme=0"])):
        browse(server.url, tmp_path / name, f"--screenshot={tmp_path}/{name}.png", *options)
        image = Image.open(tmp_path / f"{name}.png").convert("L")
        grounds.append(image.getpixel((5, 5)))
        assert len(image.getcolors(65536)) > 50  # type: ignore[arg-type]
    assert grounds[0] > 230 and grounds[1] < 40


@in_browser
def test_a_token_is_asked_for(where: Path, tmp_path: Path) -> None:
    with running_server(where, token="s3cret") as server:
        found = texts(browse(server.url, tmp_path / "profile", "--dump-dom"))
    assert found.found["why"] == "This server wants a token." and not found.hidden & {"trouble", "ask"}
    assert found.found["version"] == "–"


def test_the_page_is_one_file_that_asks_nobody_else(server: RunningServer) -> None:
    answer = requests.get(server.url, timeout=10)
    assert answer.text == PAGE.read_text(encoding="utf-8")
    assert "connect-src 'self'" in answer.headers["content-security-policy"]
    assert not re.search(r"https?://|//[a-z]+\.", answer.text)
    assert "<script src" not in answer.text and "<link" not in answer.text
