"""A job over tar shards that is killed again and again: the model has counted each record once an epoch."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch
from tar_files import samples_tar

from edl_torch import ElasticDataLoader
from edl_torch.cli.main import main
from edl_torch.readers import TarReader

PROGRAM = Path(__file__).with_name("tar_program.py")
EPOCHS = 2
PLACES = ("read", "backward", "step", "saved")


def shards(folder: Path, sizes: list[int]) -> int:
    """Tars of so many samples each, in pax and GNU form in turn; returns how many records they have."""
    folder.mkdir()
    for number, size in enumerate(sizes):
        samples_tar(folder / f"train-{number:03}.tar", size, begin=sum(sizes[:number]), format=1 + number % 2)
    return sum(sizes)


def run(*arguments: object) -> int:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("EDL_", "MASTER_"))}
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    ran = preloaded.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert ran.returncode in (0, -signal.SIGKILL), ran.stderr
    return ran.returncode


def kill_and_prove(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kills: int, workers: int, seed: int
) -> None:
    chance = random.Random(seed)
    records = shards(tmp_path / "data", [chance.randint(1, 30) for _ in range(4)])
    died = 0
    for _ in range(kills):
        place, last = chance.choice(PLACES), chance.randint(1, 12)
        last = last * 3 if place == "saved" else last
        print(f"seed {seed}: {place} {last}")
        died += run(tmp_path / "data", tmp_path, records, workers, place, last) != 0
    assert died
    assert run(tmp_path / "data", tmp_path, records, workers, "read", 0) == 0
    assert torch.load(tmp_path / "counts.pt").tolist() == [EPOCHS] * records
    assert main(["audit", str(tmp_path / "audit")]) == 0
    assert "PROVEN, data the same by samples" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kills", "workers", "seed"), [pytest.param(2, 0, 1, marks=pytest.mark.long), (1, 2, 2)]
)
def test_each_record_counts_once_though_the_job_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kills: int, workers: int, seed: int
) -> None:
    kill_and_prove(tmp_path, capsys, kills, workers, seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10, 14))
def test_each_record_counts_once_though_the_job_is_killed_often(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    kill_and_prove(tmp_path, capsys, kills=5, workers=seed % 2 * 2, seed=seed)


@pytest.mark.parametrize("seed", range(6))
def test_each_sample_is_seen_once_an_epoch_in_any_order(tmp_path: Path, seed: int) -> None:
    """The job's twin in one process: random shards, fields, orders and threads."""
    chance = random.Random(seed)
    sizes = [chance.randint(0, 40) for _ in range(chance.randint(1, 5))]
    records = shards(tmp_path / "data", [*sizes, 1])
    options: dict[str, Any] = {
        "shuffle": chance.choice([True, False, "shards", "in_shard"]),
        "records_per_shard": chance.choice([None, 1, 7]),
        "num_threads": chance.choice([0, 3]),
    }
    given = {name: value for name, value in options.items() if value}
    print(f"seed {seed}: {sizes} {given}")
    seen: list[Counter[int]] = []
    reader = TarReader(tmp_path / "data", ("cls", "txt"))
    with ElasticDataLoader(reader, batch_size=5, num_epochs=2, **given) as loader:
        for _ in loader.epochs():
            counts: Counter[int] = Counter()
            for numbers, texts in loader:
                assert [int(text) for text in texts] == numbers.tolist()
                counts.update(numbers.tolist())
            seen.append(counts)
    assert seen == [Counter(range(records))] * 2


def test_broken_samples_are_quarantined_by_name(tmp_path: Path) -> None:
    records = shards(tmp_path / "data", [20])
    path = tmp_path / "data" / "train-000.tar"
    content = bytearray(path.read_bytes())
    place = content.index(b"00007.cls") + 512
    content[place] = ord("x")
    path.write_bytes(content)
    with ElasticDataLoader(
        str(tmp_path / "data"), batch_size=4, on_bad_record="quarantine", max_bad_records=1
    ) as loader:
        seen = [number for batch in loader for number in batch["cls"].tolist()]
        (bad,) = loader.quarantined()
    assert sorted(seen) == [n for n in range(records) if n != 7]
    assert (bad.name, bad.index) == (str(tmp_path / "data"), 7)
    assert f"'{path}' sample '00007' member 'cls': is no whole number" in bad.reason
