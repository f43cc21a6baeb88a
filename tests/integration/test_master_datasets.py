"""`edl-torch master` makes the shards of every reader's data itself; trainers only name the dataset."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from every_reader import KINDS, made

from edl_torch import DataShardService, ElasticDataLoader, MasterClient, ShardedDataset, TaskType
from edl_torch.readers import load_reader, open_reader
from edl_torch.testing import wait_until

ROOT = Path(__file__).parents[2]
NAMES = {"training": TaskType.TRAINING, "evaluation": TaskType.EVALUATION, "prediction": TaskType.PREDICTION}
OWN_READER = """
from edl_torch import AbstractDataReader


class Numbers(AbstractDataReader):
    def __init__(self, data_origin, step=1):
        super().__init__()
        self.name, self.step = data_origin, step

    def create_shards(self, mode):
        return [(self.name, 100, 4 * int(mode))]

    def read_records(self, task):
        return (self.step * number for number in range(task.start, task.end))
"""


@contextmanager
def master(folder: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """A master process; its address."""
    file = folder / "address"
    path = os.pathsep.join([str(ROOT), str(folder)])
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "edl_torch", "master", "--addr", "127.0.0.1:0"),
            *("--address-file", str(file), *arguments),
        ],
        env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        wait_until(lambda: file.exists() or process.poll() is not None, timeout_s=60)
        assert process.poll() is None, process.communicate()[1].decode()
        yield file.read_text().strip()
    finally:
        process.terminate()
        process.communicate(timeout=20)


def drain(address: str, name: str, reader: Any) -> tuple[list[tuple[int, str, int]], Any]:
    """All of a dataset by a trainer that knows its name and how to read: (epoch, source, record), status."""
    client = MasterClient(address, "test", master_timeout_s=10)
    seen = []
    try:
        with DataShardService(2, client, dataset_name=name, task_type=NAMES[name]) as service:
            loader = ElasticDataLoader(ShardedDataset(service, reader), collate_fn=list)
            while not service.finished:
                for batch in loader:
                    assert len(batch) == len(loader.records)
                    seen += [(loader.epoch, *record) for record in loader.records]
            return seen, service.progress()
    finally:
        client.close()


@pytest.mark.parametrize("kind", KINDS)
def test_trainers_of_every_reader_only_name_the_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with made(kind, tmp_path / "data") as data:
        for name, value in data.environment.items():
            monkeypatch.setenv(name, value)
        options = (f"--{name}_data={data.data}" for name in ("training", "validation", "prediction"))
        with master(tmp_path, *options, "--records_per_task", "3", "--num_epochs", "2") as address:
            for (name, mode), count in zip(NAMES.items(), data.counts, strict=True):
                reader = open_reader(data.data, mode)
                assert type(reader).__name__ == data.reader
                seen, status = drain(address, name, reader)
                epochs = 1 if name == "prediction" else 2
                assert (status.size, status.num_epochs, status.task_type) == (count, epochs, mode)
                assert status.shards >= -(-count // 3)
                assert len(seen) == len(set(seen)) == count * epochs == status.acknowledged


def test_a_reader_of_ones_own_gets_path_mode_and_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_reader.py").write_text(OWN_READER)
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = (
        *("--training_data", "here", "--prediction_data", "there"),
        *("--custom_data_reader", "own_reader:Numbers", "--custom_data_reader_params", "step=5"),
    )
    with master(tmp_path, *arguments) as address:
        for name, place in (("training", "here"), ("prediction", "there")):
            reader = load_reader("own_reader:Numbers", {"data_origin": place, "step": 5})
            seen, _ = drain(address, name, reader)
            assert sorted(seen) == [(0, place, 100 + n) for n in range(4 * int(NAMES[name]))]
