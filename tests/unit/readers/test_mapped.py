"""Arrays in a file: what is written is what is mapped, in every process, and never a half."""

import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edl_torch.errors import DataFormatError
from edl_torch.readers.mapped import MappedArrays, write_arrays

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
    with pytest.raises(DataFormatError, match="other data"):
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


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_spilled_file_serves_other_processes_and_outlives_them(method: str) -> None:
    mapped = MappedArrays.spill(ARRAYS)
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply(_last, (mapped,)) == 999
        pool.close()
        pool.join()
    assert os.path.exists(mapped.path), "a child must not remove its parent's file"
    path = mapped.path
    del mapped
    assert not os.path.exists(path)


def test_a_spilled_file_goes_with_its_process() -> None:
    code = (
        "import numpy as np; from edl_torch.readers.mapped import MappedArrays\n"
        "kept = MappedArrays.spill({'n': np.arange(3)}); print(kept.path)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not os.path.exists(done.stdout.strip())
