"""The model card's section, the journal and the choice of what goes: pure, without a Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from areal_convert.converter.errors import TargetError
from areal_convert.converter.remote.card import BEGIN, END, digest_of, head_of, section, update
from areal_convert.converter.remote.push_journal import Journal
from areal_convert.converter.remote.remote_tree import Meant, RemoteFile, Uploaded, faults, named_by, stale
from areal_convert.converter.remote.upload_errors import explain, may_pass
from areal_convert.converter.sidefiles import INDEX

MANIFEST: dict[str, Any] = {
    "tool": "areal-convert 1",
    "family": "llama",
    "source": {
        "name": "a|b`c\n<!-- areal-convert:end -->",
        "format": "mp_rank",
        "revision": None,
        "dialect": {"mesh": "tp2"},
        "origin": {"name": "org/base", "format": "hf", "revision": "f" * 40},
    },
    "plan": "0123",
    "digest": "xxh3_128",
    "left_out": [],
    "atoms": {f"layers.{n}.q": ["BF16", f"{n:032x}"] for n in range(40)},
}


@pytest.mark.parametrize(
    "card",
    [
        "---\nlicense: mit\n---\n# A\n\ntext\n",
        "---\r\nlicense: mit\r\n---\r\n# A\r\n\r\ntext\r\n",
        "---\nlicense: mit\n---",
        "---\n---\n",
        "---\na: '---'\nb: |\n  x\n---\n\n---\nruled\n",
    ],
    ids=repr,
)
def test_what_others_wrote_stays(card: str) -> None:
    once = update(card, "first", "t")
    assert once.startswith(card.rstrip()) and once.endswith(f"\n\n{BEGIN}\nfirst\n{END}\n")
    below = once + "\nbelow\n"
    twice = update(below, "second", "t")
    assert twice == below.replace("first", "second") and update(twice, "second", "t") == twice


@pytest.mark.parametrize("card", [None, "", "  \n", "# A\n", "text --- text\n---\n", "--\n---\n"], ids=repr)
def test_a_card_without_a_head_is_given_one(card: str | None) -> None:
    once = update(card, "s", "title")
    assert once.startswith("---\nlibrary_name: transformers\n---\n\n") and (card or "").strip() in once
    assert ("# title" in once) == (not (card or "").strip())
    assert head_of(once) == "library_name: transformers" and update(once, "s", "title") == once


@pytest.mark.parametrize("card", [BEGIN, END, f"{END}{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_marks_that_do_not_pair(card: str) -> None:
    with pytest.raises(TargetError, match="do not pair"):
        update(card, "s", "t")


def test_the_section_says_all_and_cannot_be_broken_by_a_name() -> None:
    text = section(MANIFEST, "bitwise")
    assert all(
        word in text for word in ("mp_rank", "`tp2`", "`org/base` (hf) at `ffff", "BF16 × 40", "bitwise", "all 40")
    )
    assert digest_of(MANIFEST["atoms"]) in text and text.count("`layers.") == 5
    assert END not in update(None, text, "t").replace(f"\n{END}\n", "")
    assert update(update(None, text, "t"), text, "t") == update(None, text, "t")


def test_digests_depend_on_all_they_are_made_of() -> None:
    one = {"a": ["BF16", "0"], "b": ["F32", "1"]}
    others = [{"a": ["BF16", "0"]}, one | {"b": ["F32", "2"]}, one | {"b": ["F16", "1"]}]
    assert len({digest_of(x) for x in [one, *others]}) == 4 and digest_of(dict(reversed(one.items()))) == digest_of(one)


def test_the_journal_survives_a_cut_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "plan", "repo")
    assert journal.read() == {}
    journal.add(Uploaded("a", 3, "ab" * 32, b"\0\xff"), {"x": "1"})
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole + whole[: len(whole) // 2])
    journal.add(Uploaded("b", 4, "cd" * 32, b""), {})
    found = Journal(tmp_path, "plan", "repo").read()
    assert (
        found["a"].uploaded.sample == b"\0\xff" and found["a"].digests == {"x": "1"} and found["b"].uploaded.size == 4
    )
    assert Journal(tmp_path, "plan", "other").read() == Journal(tmp_path, "planrepo").read() == {}
    for damage in (b"[]", b"{}", b'{"path": 1}', b"\xff\xfe", json.dumps({"sha256": "zz"}).encode()):
        journal.path.write_bytes(damage)
        assert journal.read() == {}
    journal.remove()
    journal.remove()


def test_which_files_go() -> None:
    shards = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    old = json.dumps({"weight_map": {"a": "odd.safetensors", "b": "../x.safetensors", "c": "config.json"}})
    other = [
        "config.json",
        "training_args.bin",
        "optimizer.pt",
        "model.fp16.safetensors",
        "tf_model.h5",
        "x/model.safetensors",
    ]
    files = [*shards, "odd.safetensors", INDEX, *other]
    gone, stay = stale(files, ["model.safetensors", shards[0]], [old])
    assert gone == sorted([*shards[1:], "odd.safetensors", INDEX])
    assert stay == ["model.fp16.safetensors", "optimizer.pt", "tf_model.h5", "training_args.bin"]
    assert stale(files, files, [old]) == ([], [])
    assert named_by("[") == named_by("[]") == named_by('{"weight_map": 3}') == set()


def test_what_differs_from_what_was_meant() -> None:
    there = {"a": RemoteFile(1, "o", "s"), "b": RemoteFile(1, "o"), "c": RemoteFile(2, "o", "s")}
    meant = {"a": Meant(1, "s", None), "b": Meant(1, "s", "o"), "c": Meant(1, "s", None), "d": Meant(1, "s", None)}
    assert [p.about for p in faults(there, meant, ["b", "e"]).found] == ["c", "d", "b"]
    assert not faults(there, {"b": Meant(1, "x", "o")}, [])
    assert faults(there, {"b": Meant(1, "o", None)}, []), "git's name is no sha256"


def test_troubles_without_a_status() -> None:
    import httpx2

    cut = httpx2.ConnectError("[Errno 111] Connection refused")
    tls = httpx2.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")
    xet = ConnectionError("Network error: xet-write-token")
    wrapped = RuntimeError("Error while uploading 'x'")
    wrapped.__cause__ = cut
    assert may_pass(cut) and may_pass(wrapped) and not may_pass(tls) and not may_pass(ValueError())
    for error, words in (
        (cut, "Check the network"),
        (wrapped, "Check the network"),
        (tls, "SSL_CERT_FILE"),
        (xet, "XET=1"),
    ):
        said = explain(error, "org/m")
        assert said is not None and words in said[1], error
    assert explain(KeyError("x"), "org/m") is None
