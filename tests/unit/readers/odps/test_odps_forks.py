"""Forked processes beside each other and beside their parent: each row once, always."""

from __future__ import annotations

import multiprocessing

import numpy as np
import pytest

from edl_torch.readers.odps import ODPSDataReader
from edl_torch.shard import Shard, Task

ROUNDS, CHILDREN, ROWS = 50, 4, 4000
NAME = "demo.big"


def read_share(reader, child, pipe):
    """Every fourth run of 250 rows, in both ways; the text of each row must be its number's."""
    found = []
    for start in range(250 * child, ROWS, 250 * CHILDREN):
        batch = reader.read_batch(NAME, np.arange(start, start + 125))
        found += list(zip(batch["i"].tolist(), batch["s"].tolist(), strict=True))
        task = Task(shard=Shard(name=NAME, start=start + 125, end=start + 250))
        found += [(row["i"], row["s"]) for row in reader.read_records(task)]
    pipe.send(found)
    pipe.close()


@pytest.mark.slow
def test_four_forked_processes_read_each_row_once_in_fifty_rounds(server):
    rows = {"i": list(range(ROWS)), "s": [f"row {row}" for row in range(ROWS)]}
    server.add_table("big", {"i": "bigint", "s": "string"}, rows)
    expected = list(zip(rows["i"], rows["s"], strict=True))
    reader = ODPSDataReader("big", block_rows=500)
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
        mine = reader.table.fetch("", 1000 * (round_ % 4), 1000)  # and used while the children read
        found = [row for pipe in pipes if pipe.poll(60) for row in pipe.recv()]
        for child in children:
            child.join(30)
        assert [child.exitcode for child in children] == [0] * CHILDREN, round_
        assert sorted(found) == expected, round_
        assert mine["i"].to_pylist() == list(range(1000 * (round_ % 4), 1000 * (round_ % 4) + 1000))
    assert server.requests["session"] == 1
    assert reader.retries == 0
