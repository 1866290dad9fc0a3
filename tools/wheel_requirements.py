"""Print what a wheel requires, without some packages that are installed another way (see test_vllm.sh)."""

from __future__ import annotations

import argparse
import email
import re
import zipfile
from pathlib import Path


def requirements(wheel: Path, without: set[str]) -> list[str]:
    """The wheel's Requires-Dist as it stands, extras and the packages named in `without` left out."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        said = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    kept = []
    for line in said:
        package = re.split(r"[^A-Za-z0-9._-]", line.strip(), maxsplit=1)[0].lower().replace("_", "-")
        if package not in without and not re.search(r"\bextra\s*==", line):
            kept.append(line)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--without", nargs="*", default=[])
    args = parser.parse_args()
    print("\n".join(requirements(args.wheel, set(args.without))))


if __name__ == "__main__":
    main()
