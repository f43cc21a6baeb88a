"""A process with a MaxCompute service and one table of numbers in it: `python reader_tables.py ROWS`.

It prints its address, and serves until it is ended.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from reader_files import FEATURES, LABEL, numbers

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the service is a test's

from maxcompute import MaxComputeServer as MaxComputeServer

TABLE = "numbers"


def main() -> None:
    """Serve the table."""
    features, labels = numbers(int(sys.argv[1]))
    columns = dict(zip(FEATURES, features.T.tolist(), strict=True)) | {LABEL: labels.tolist()}
    types = dict.fromkeys(FEATURES, "double") | {LABEL: "bigint"}
    with MaxComputeServer(batch_rows=4096) as server:
        server.add_table(TABLE, types, columns)
        print(f"ready on {server.address}", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
