"""Predictions on disk: each trainer appends to a file of its own, and `merge` makes one table of all.

A batch is written, and synced to the disk, before it is acknowledged. A trainer that dies between the two
leaves results of a batch that somebody else is given again: lines have the key (name, index), and `merge` has
each key once.

    python result_log.py predictions/ --expect 1000 > predictions.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import uuid
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

Key = tuple[str, int]  # a record: the storage it is in, and its number there


class ResultLog:
    """Lines `{"name": …, "index": …, "value": …}` in a new file of the folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        os.makedirs(folder, exist_ok=True)
        self.path = Path(folder) / f"part-{uuid.uuid4().hex}.jsonl"
        self._file = open(self.path, "x", encoding="ascii")  # noqa: SIM115  closed by __exit__
        _sync_folder(folder)  # the file's name

    def write(self, records: Iterable[Key], values: Iterable[Any]) -> None:
        """Write the results of one batch; they are on the disk when this returns."""
        for (name, index), value in zip(records, values, strict=True):
            self._file.write(json.dumps({"name": name, "index": index, "value": value}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> ResultLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _sync_folder(folder: str | os.PathLike[str]) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def merge(folder: str | os.PathLike[str]) -> dict[Key, Any]:
    """One result for each record, by storage and number. A line that was cut off was never acknowledged."""
    results: dict[Key, Any] = {}
    for path in sorted(Path(folder).glob("part-*.jsonl")):
        for line in path.read_text(encoding="ascii").splitlines(keepends=True):
            if line.endswith("\n"):
                entry = json.loads(line)
                results[entry["name"], entry["index"]] = entry["value"]
    return dict(sorted(results.items()))


def main(arguments: list[str] | None = None) -> int:
    """Print all results as JSON lines; status 1 when there are not as many as expected."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--expect", type=int, metavar="N", help="the number of records that there must be")
    options = parser.parse_args(arguments)
    results = merge(options.folder)
    for (name, index), value in results.items():
        print(json.dumps({"name": name, "index": index, "value": value}))
    if options.expect is not None and len(results) != options.expect:
        print(f"{len(results)} results, expected {options.expect}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
