"""A process that writes one rank's file of a state from memory that it shares with the rank: nothing of torch in it.

    python -m areal_convert.engines.state.writer FD

It reads a line of JSON for each file, {"path": …, "size": …}, writes so many bytes of FD to the path, and answers with
a line: {"digest": …} or {"error": …, "errno": …}. It ends when there are no more lines, so also with its rank.
"""

from __future__ import annotations

import json
import mmap
import os
import sys

import xxhash

_STEP = 8 << 20


def write(fd: int, path: str, size: int) -> str:
    """The file, on disk when this returns; its digest."""
    h = xxhash.xxh3_128()
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        if size:
            with mmap.mmap(fd, size, prot=mmap.PROT_READ) as shared, memoryview(shared) as whole:
                at = 0
                while at < size:
                    with whole[at : at + _STEP] as part:
                        at += (done := os.write(out, part))
                        h.update(part[:done])
        os.fsync(out)
    finally:
        os.close(out)
    return h.hexdigest()


def main() -> None:
    fd = int(sys.argv[1])
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer: dict[str, object] = {"digest": write(fd, job["path"], job["size"])}
        except OSError as error:
            answer = {"error": str(error), "errno": error.errno}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
