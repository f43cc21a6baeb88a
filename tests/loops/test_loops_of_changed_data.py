"""Generated jobs whose data change between runs: what the model has learnt against what the verdict says.

A record is a number that no other record is, so the model's own list says which it has learnt, whatever the
names and places of records are. A job is some runs from checkpoint to checkpoint, and maybe a change before
each: a record replaced, others in another order, more or fewer of them. No verdict may be PROVEN where the
list says otherwise; an unchanged job is proven, and so is one that went on with other data on purpose.
"""

from __future__ import annotations

import copy
import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from cases import cases

from edl_torch import ElasticDataLoader, LocalMaster
from edl_torch.audit.verdict import Outcome, audit
from edl_torch.errors import DatasetConflict, TokenError
from edl_torch.readers import CsvReader, ParquetReader, RecordIODataReader, RecordIOWriter, TextReader

Data = Any
Make = Callable[[Path, list[int]], tuple[Data, Callable[[Any], int]]]  # and what a record's number is


def text(at: Path, numbers: list[int]) -> tuple[Data, Callable[[Any], int]]:
    (at / "a.txt").write_text("".join(f"{number:04}\n" for number in numbers))
    return TextReader(at / "a.txt", index_dir=at), int


def rows(at: Path, numbers: list[int]) -> tuple[Data, Callable[[Any], int]]:
    (at / "a.csv").write_text("x,y\n" + "".join(f"{number},1\n" for number in numbers))
    return CsvReader(at / "a.csv", index_dir=at), lambda row: int(row["x"])


def columns(at: Path, numbers: list[int]) -> tuple[Data, Callable[[Any], int]]:
    plain: dict[str, Any] = {"row_group_size": 7, "use_dictionary": False, "compression": "none"}
    pq.write_table(pa.table({"x": np.array(numbers)}), at / "a.parquet", **plain, write_statistics=False)
    return ParquetReader(at / "a.parquet"), lambda row: int(row["x"])


def chunks(at: Path, numbers: list[int]) -> tuple[Data, Callable[[Any], int]]:
    (at / "a.rec").unlink(missing_ok=True)
    with RecordIOWriter(at / "a.rec", max_chunk_bytes=40) as writer:
        for number in numbers:
            writer.write(b"%04d" % number)
    return RecordIODataReader(at / "a.rec", index_dir=at), int


def images(at: Path, numbers: list[int]) -> tuple[Data, Callable[[Any], int]]:
    """A file is named by its number, so a record's place is its own."""
    folder = at / "images"
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    for number in numbers:
        pixel = np.full((1, 1, 3), (number // 256, number % 256, 0), np.uint8)
        cv2.imwrite(str(folder / f"{number:04}.png"), pixel)
    return str(folder), lambda image: int(image[0, 0, 2]) * 256 + int(image[0, 0, 1])


def array(at: Path, numbers: list[int]) -> tuple[Data, Callable[[Any], int]]:
    return np.array(numbers), int


def values(at: Path, numbers: list[int]) -> tuple[Data, Callable[[Any], int]]:
    return list(numbers), int


class Held:
    """A dataset of the user's own."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = torch.tensor(numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.numbers[index]


def held(at: Path, numbers: list[int]) -> tuple[Data, Callable[[Any], int]]:
    return Held(numbers), int


KINDS: list[Make] = [text, rows, columns, chunks, images, array, values, held]


def changed(draw: random.Random, numbers: list[int], make: Make) -> list[int]:
    """Other data: of equal length, mostly, and of names as before."""
    kind = draw.choice(["replaced", "replaced", "permuted", "more", "fewer"])
    new = max(numbers) + 1
    found = numbers.copy()
    if kind == "permuted" and make is not images:  # their order is that of their names
        draw.shuffle(found)
    elif kind == "more":
        found.append(new)
    elif kind == "fewer":
        del found[draw.randrange(len(found))]
    else:
        found[draw.randrange(len(found))] = new
    return found


class Job:
    """A model, and the runs that train it."""

    def __init__(self, folder: Path, seed: int, make: Make) -> None:
        self.draw = random.Random(seed)
        self.folder = folder
        self.make = make
        self.numbers = list(range(1, 1 + self.draw.randrange(20, 60)))
        self.epochs = self.draw.randrange(1, 4)
        self.options: dict[str, Any] = {
            "batch_size": self.draw.randrange(1, 6),
            "records_per_shard": 8,
            "num_epochs": self.epochs,
            "shuffle": self.draw.choice([False, True, "shards", "in_shard"]),
            "audit_dir": folder / "audit",
        }
        self.saved: tuple[Any, Any, list[int]] | None = None
        self.changes = 0

    def run(self, most: int | None, *, on_purpose: bool) -> list[int]:
        """Train so many batches, or to the end, from the last checkpoint; take the next one. Returns what the
        model has learnt."""
        data, number_of = self.make(self.folder, self.numbers)
        module = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
        learnt: list[int] = []
        how = "new_epoch" if on_purpose else None
        with ElasticDataLoader(data, transform=number_of, data_changed=how, **self.options) as loader:
            loader.attach(optimizer)
            if self.saved is not None:
                token, state, learnt = copy.deepcopy(self.saved)
                module.load_state_dict(state)
                loader.load_state_dict(token)
            for _ in loader.epochs():
                for batch in loader:
                    optimizer.zero_grad()
                    module(batch.float().reshape(-1, 1) / 100).square().mean().backward()
                    optimizer.step()
                    learnt += batch.tolist()
                    most = None if most is None else most - 1
                    if most == 0:
                        self.saved = copy.deepcopy((loader.state_dict(), module.state_dict(), learnt))
                        return learnt
        self.saved = None
        return learnt


@cases("seed", [0, 2, 26], [*range(5), 26])  # 0: never changed; 26: twice
@pytest.mark.parametrize("make", KINDS)
def test_other_data_are_refused_or_gone_on_with_on_purpose_and_then_proven(
    tmp_path: Path, make: Make, seed: int
) -> None:
    job = Job(tmp_path, seed, make)
    before: list[int] = []  # learnt of data that were left
    learnt: list[int] = []
    first_epoch = refused = 0
    for most in [*(job.draw.randrange(1, 8) for _ in range(2)), None]:
        was = job.numbers
        if job.saved is not None and seed and job.draw.random() < 0.7:
            job.numbers = changed(job.draw, was, make)
        if job.numbers != was:
            with pytest.raises(TokenError, match="data: "):
                job.run(most, on_purpose=False)
            refused += 1
            first_epoch += math.ceil((len(learnt) - len(before)) / len(was))  # epochs of the old data begun
            before = learnt
        learnt = job.run(most, on_purpose=True)
        if job.saved is None:
            break
    own = Counter(learnt[len(before) :])
    assert own == Counter(dict.fromkeys(job.numbers, job.epochs - first_epoch)) - Counter()
    verdicts = audit([tmp_path / "audit"])
    assert [verdict.outcome for verdict in verdicts] == [Outcome.PROVEN] * len(verdicts)
    assert verdicts[-1].first_epoch == first_epoch
    assert sum(verdict.acknowledged for verdict in verdicts) == len(learnt)
    assert len(verdicts) == 1 + refused


@cases("seed", [0, 3], range(5))
@pytest.mark.parametrize("make", KINDS)
def test_a_trainer_of_other_data_is_refused_and_one_of_the_same_is_not(
    tmp_path: Path, make: Make, seed: int
) -> None:
    draw = random.Random(seed)
    numbers = list(range(1, 1 + draw.randrange(20, 60)))
    master = LocalMaster()
    for others in (numbers, changed(draw, numbers, make)):
        for found in (numbers, others):
            data, number_of = make(tmp_path, found)
            options: dict[str, Any] = {
                "batch_size": 4,
                "dataset_name": str(len(others)),
                "transform": number_of,
            }
            with ElasticDataLoader(data, master_client=master, records_per_shard=8, **options) as loader:
                if found == numbers:
                    assert len(next(iter(loader))) == 4
                else:
                    with pytest.raises(DatasetConflict, match="data: "):
                        next(iter(loader))
