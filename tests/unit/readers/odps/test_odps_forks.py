"""Forked processes beside each other and beside their parent: each row once, always."""

from __future__ import annotations

import multiprocessing

import numpy as np
import pytest

from edl_torch.readers.odps.reader import ODPSDataReader
from edl_torch.shard import Shard, Task

ROUNDS, CHILDREN, ROWS, RUN = 50, 4, 800, 100
NAME = "demo.big"


def read_share(reader, child, pipe):
    """Every fourth run, half of it in each way; the text of each row must be its number's."""
    found = []
    for start in range(RUN * child, ROWS, RUN * CHILDREN):
        batch = reader.read_batch(NAME, np.arange(start, start + RUN // 2))
        found += list(zip(batch["i"].tolist(), batch["s"].tolist(), strict=True))
        task = Task(shard=Shard(name=NAME, start=start + RUN // 2, end=start + RUN))
        found += [(row["i"], row["s"]) for row in reader.read_records(task)]
    pipe.send(found)
    pipe.close()


@pytest.mark.slow
def test_four_forked_processes_read_each_row_once_in_fifty_rounds(server):
    rows = {"i": list(range(ROWS)), "s": [f"row {row}" for row in range(ROWS)]}
    server.add_table("big", {"i": "bigint", "s": "string"}, rows)
    expected = list(zip(rows["i"], rows["s"], strict=True))
    reader = ODPSDataReader("big", block_rows=2 * RUN)
    context = multiprocessing.get_context("fork")
    for round_ in range(ROUNDS):
        reader.read_batch(NAME, np.array([round_, ROWS - 1]))  # the parent's connections are open and warm
        pipes, children = [], []
        for child in range(CHILDREN):
            ours, theirs = context.Pipe(duplex=False)
            children.append(context.Process(target=read_share, args=(reader, child, theirs), daemon=True))
            children[-1].start()
            theirs.close()
            pipes.append(ours)
        mine = reader.table.fetch("", 200 * (round_ % 4), 200)  # and used while the children read
        found = [row for pipe in pipes if pipe.poll(60) for row in pipe.recv()]
        for child in children:
            child.join(30)
        assert [child.exitcode for child in children] == [0] * CHILDREN, round_
        assert sorted(found) == expected, round_
        assert mine["i"].to_pylist() == list(range(200 * (round_ % 4), 200 * (round_ % 4) + 200))
    assert server.requests["session"] == 1
    assert reader.retries == 0
