"""A large index is one file for all processes: small in a pickle, and no memory of a worker's own."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import pickle
from multiprocessing.connection import Connection
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl_torch.readers import ImageManifestReader
from edl_torch.readers.shared.mapped import SPILL_BYTES, MappedArrays, StringTable, shared

FILES = 300_000


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> ImageManifestReader:
    """A list of many files, none of which exists: names of 29 bytes, bounds and labels of 8."""
    path = tmp_path_factory.mktemp("many") / "list.csv"
    path.write_text("".join(f"folder-{n % 100:02}/image-{n:011}.jpg,{n % 7}\n" for n in range(FILES)))
    return ImageManifestReader(path, has_header=False)


class Popen:
    """Stands for a process that is being started, as far as pickling asks it."""

    def duplicate_for_child(self, descriptor: int) -> int:
        return descriptor

    def DupFd(self, descriptor: int) -> Any:
        return descriptor


def test_small_arrays_stay_in_memory_and_large_ones_are_mapped():
    small = {"a": np.zeros(SPILL_BYTES, np.uint8)}
    assert shared(small, "x") == small
    large = shared({**small, "b": np.arange(3)}, "x")
    assert isinstance(large, MappedArrays)
    assert large["b"].tolist() == [0, 1, 2]


def test_a_started_process_gets_a_pickle_without_the_index(manifest):
    set_spawning_popen(Popen())
    try:
        data = bytes(ForkingPickler.dumps(manifest))
    finally:
        set_spawning_popen(None)
    assert len(data) < 2000
    assert len(pickle.dumps(manifest)) > FILES * 45, "any other pickle is whole"


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def measure(reader: ImageManifestReader | None, answers: Connection) -> None:
    import edl_torch.readers.images.manifest  # noqa: F401  what a reader's pickle imports, for both

    if reader is not None:
        assert reader._files[FILES - 1].endswith(f"image-{FILES - 1:011}.jpg")
        assert sum(len(name) for name in reader._files) > 8_000_000, "every page is touched"
        assert int(reader._labels["labels"].sum()) > FILES
    answers.send(anonymous_bytes())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux' account of memory")
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_workers_own_memory_does_not_grow_with_the_index(manifest, method):
    context = multiprocessing.get_context(method)
    used = []
    for reader in (None, manifest):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=measure, args=(reader, sender))
        process.start()
        assert receiver.poll(60)
        used.append(receiver.recv())
        process.join(timeout=30)
    assert used[1] - used[0] < 3 << 20, f"{used} bytes, the index has {FILES * 45}"


def test_a_spilled_table_is_the_same_sequence():
    names = [f"名-{n}" * 3 for n in range(60_000)]
    table = StringTable(names)
    assert isinstance(table._arrays, MappedArrays)
    assert list(table) == names
    assert list(pickle.loads(pickle.dumps(table))) == names


def test_without_room_for_a_file_the_index_stays_in_memory(monkeypatch, caplog):
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with caplog.at_level(logging.WARNING):
        table = StringTable(str(n) for n in range(200_000))
    assert table[199_999] == "199999"
    assert "TMPDIR names another folder" in caplog.text
