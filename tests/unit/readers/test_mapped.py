"""Arrays in a file: what is written is what is mapped, in every process, and never a half."""

import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from edl_torch.errors import DataFormatError, SourceChanged
from edl_torch.readers.shared.mapped import MappedArrays, write_arrays

ARRAYS = {
    "offsets": np.arange(1000, dtype=np.int64),
    "empty": np.empty((0, 3), dtype=np.uint32),
    "table": np.arange(12, dtype=np.float32).reshape(3, 4),
    "scalar": np.array(7, dtype=np.uint8),
}


def test_arrays_and_header_come_back(tmp_path: Path) -> None:
    write_arrays(tmp_path / "a", ARRAYS, {"größe": 3})
    mapped = MappedArrays(tmp_path / "a")
    assert dict(mapped.header) == {"größe": 3}
    assert list(mapped) == list(ARRAYS)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(mapped[name], array, strict=True)
        assert not mapped[name].flags.writeable


def test_arrays_are_aligned(tmp_path: Path) -> None:
    write_arrays(tmp_path / "a", {"odd": np.zeros(3, np.uint8), "next": np.zeros(5)}, {})
    assert MappedArrays(tmp_path / "a")["next"].ctypes.data % 64 == 0


def test_a_pickle_is_a_path(tmp_path: Path) -> None:
    write_arrays(tmp_path / "a", ARRAYS)
    mapped = MappedArrays(tmp_path / "a")
    assert mapped["offsets"][999] == 999
    data = pickle.dumps(mapped)
    assert len(data) < 300
    assert pickle.loads(data)["offsets"][999] == 999


def test_a_copy_refuses_the_index_of_other_data(tmp_path: Path) -> None:
    write_arrays(tmp_path / "a", ARRAYS, {"size": 1})
    copy = pickle.loads(pickle.dumps(MappedArrays(tmp_path / "a", {"size": 1})))
    write_arrays(tmp_path / "a", ARRAYS, {"size": 2})
    with pytest.raises(SourceChanged, match="other data"):
        copy["offsets"]


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b'{"what": "else"}\n', b"[1]\n"])
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(DataFormatError, match="no index of this version"):
        MappedArrays(tmp_path / "a")["offsets"]


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    write_arrays(tmp_path / "a", ARRAYS)
    whole = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(whole[:-1])
    with pytest.raises(DataFormatError, match="cut short"):
        MappedArrays(tmp_path / "a")["offsets"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write_arrays(tmp_path / "a", {"n": np.arange(3)})
    with pytest.raises(TypeError, match="Python objects"):
        write_arrays(tmp_path / "a", {"n": np.array([object()])})
    assert os.listdir(tmp_path) == ["a"]
    assert MappedArrays(tmp_path / "a")["n"].tolist() == [0, 1, 2]


def _last(mapped: MappedArrays) -> int:
    return int(mapped["offsets"][-1])


def _answer(mapped: MappedArrays, answers: Connection) -> None:
    answers.send((int(mapped["offsets"][-1]), _is_mapped("edl_torch-here-") or _is_mapped("(deleted)")))


def _is_mapped(part: str) -> bool:
    maps = Path("/proc/self/maps")
    return not maps.exists() or part in maps.read_text()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_started_processes_map_a_spilled_file(method: str) -> None:
    mapped = MappedArrays.spill(ARRAYS, label="here")
    context = multiprocessing.get_context(method)
    for _ in range(2):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_answer, args=(mapped, sender))
        process.start()
        assert receiver.poll(60)
        assert receiver.recv() == (999, True)
        process.join(timeout=30)
        assert process.exitcode == 0
    assert mapped["offsets"][999] == 999, "the child's end took nothing from its parent"


def test_a_spilled_file_has_no_name_that_a_killed_process_could_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mapped = MappedArrays.spill(ARRAYS)
    assert os.listdir(tmp_path) == []
    assert mapped["offsets"][999] == 999


def test_a_pickle_for_elsewhere_holds_the_arrays() -> None:
    """A process that was not started by this one, on another machine perhaps."""
    mapped = MappedArrays.spill(ARRAYS)
    data = pickle.dumps(mapped)
    del mapped
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer)['offsets'][-1])"
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True)
    assert done.stdout.strip() == b"999"


def test_the_descriptor_goes_with_the_object() -> None:
    mapped = MappedArrays.spill(ARRAYS)
    descriptor = mapped._descriptor
    assert descriptor is not None
    os.fstat(descriptor)
    del mapped
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
