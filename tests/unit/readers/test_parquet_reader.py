from __future__ import annotations

import logging
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from readers_kit import scan, table, write_hive, write_parquet

from edl_torch.errors import BadRecord
from edl_torch.readers import ParquetReader
from edl_torch.testing import check_reader


def test_hive_folders_become_columns(tmp_path):
    root = write_hive(tmp_path / "data")
    check_reader(lambda: ParquetReader(root))
    reader = ParquetReader(root)
    first, second = (
        f"{root}/year={year}" for year in ("2023/colour=light%20blue/a.parquet", "2024/colour=red/b.parquet")
    )
    assert reader.create_shards() == {first: 20, second: 15}, "neither empty files nor what is hidden"
    assert reader.columns == ["id", "half", "text", "vector", "many", "year", "colour"]
    batch = reader.read_batch(second, np.array([8, 0, 14]))
    assert batch["id"].tolist() == [28, 20, 34]
    assert batch["year"].tolist() == [2024] * 3
    assert batch["year"].dtype == np.int64
    assert reader.read_record(first, 0)["colour"] == "light blue"


def test_a_key_with_one_value_is_a_column_too(tmp_path):
    path = write_parquet(tmp_path / "day=3" / "a.parquet")
    for data in (tmp_path, f"{tmp_path}/*/a.parquet"):
        assert ParquetReader(data, ["id", "day"]).read_record(path, 6) == {"id": 6, "day": 3}


def test_a_partition_without_value_is_null(tmp_path):
    write_parquet(tmp_path / "k=7" / "a.parquet")
    null = write_parquet(tmp_path / "k=__HIVE_DEFAULT_PARTITION__" / "a.parquet")
    with pytest.raises(BadRecord, match=r"column 'k'.*fill_nulls"):
        ParquetReader(tmp_path).read_record(null, 0)
    reader = ParquetReader(tmp_path, fill_nulls={"k": -1})
    assert reader.read_record(null, 0)["k"] == -1


def test_a_column_of_the_files_stands_above_a_folder_of_that_name(tmp_path):
    path = write_parquet(tmp_path / "id=999" / "a.parquet")
    reader = ParquetReader(tmp_path)
    assert reader.columns.count("id") == 1
    assert [row["id"] for row in scan(reader, path, 3, 5)] == [3, 4]


def test_columns_are_read_in_the_order_asked_for(tmp_path):
    path = write_parquet(tmp_path / "a.parquet")
    reader = ParquetReader(path, ["text", "id"])
    assert reader.read_record(path, 6) == {"text": "r6", "id": 6}
    assert list(reader.read_batch(path, np.array([1]))) == ["text", "id"]


def test_only_the_chosen_columns_are_decoded(tmp_path):
    """A damaged column that nobody reads does no harm."""
    path = tmp_path / "a.parquet"
    write_parquet(path, (0, 400), 400, compression="none", use_dictionary=False)
    chunk = pq.read_metadata(path).row_group(0).column(2)
    assert chunk.path_in_schema == "text"
    content = bytearray(path.read_bytes())
    for place in range(chunk.data_page_offset, chunk.data_page_offset + chunk.total_compressed_size):
        content[place] = 0xFF
    path.write_bytes(content)
    assert [row["id"] for row in scan(ParquetReader(path, ["id", "half"]), path, 10, 12)] == [10, 11]
    with pytest.raises(BadRecord):
        ParquetReader(path, ["text"]).read_record(str(path), 0)


def test_row_labels_of_pandas_are_not_data(tmp_path):
    path = write_parquet(
        tmp_path / "a.parquet", table(0, 9).append_column("__index_level_0__", pa.array(range(9)))
    )
    assert "__index_level_0__" not in ParquetReader(path).columns
    assert ParquetReader(path, ["__index_level_0__"]).read_record(path, 4) == {"__index_level_0__": 4}


def test_nested_names_do_not_bring_other_columns(tmp_path):
    rows = pa.table({"a": pa.array([{"b": 1}, {"b": 2}]), "a.b": pa.array([10, 20])})
    path = write_parquet(tmp_path / "a.parquet", rows)
    assert ParquetReader(path, ["a"]).read_record(path, 1) == {"a": {"b": 2}}
    assert ParquetReader(path, ["a.b"]).read_record(path, 1) == {"a.b": 20}


def test_a_batch_keeps_the_order_asked_for_across_row_groups(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", (0, 100), 7)
    reader = ParquetReader(path)
    wanted = np.random.default_rng(0).permutation(100)[:60]
    batch = reader.read_batch(path, wanted)
    assert batch["id"].tolist() == wanted.tolist()
    assert batch["vector"][:, 1].tolist() == wanted.tolist()
    assert batch["text"].tolist() == [None if i % 5 == 0 else f"r{i}" for i in wanted.tolist()]
    assert reader.read_batch(path, np.array([5, 5, 6, 8, 5]))["id"].tolist() == [5, 5, 6, 8, 5]


def test_each_row_group_is_decoded_once_for_a_shuffled_shard(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", (0, 96), 8)
    reader = ParquetReader(path)
    order = np.random.default_rng(1).permutation(48)
    for start in range(0, 48, 4):
        reader.read_batch(path, order[start : start + 4])
    for number in order.tolist():
        reader.read_record(path, number)
    assert reader.groups_decoded == 6


def test_memory_of_decoded_row_groups_is_bounded(tmp_path, caplog):
    path = write_parquet(tmp_path / "a.parquet", (0, 96), 8)
    reader = ParquetReader(path, ["id"], cache_bytes=3 * 8 * 8)
    groups = reader._groups
    for number in range(96):
        reader.read_record(path, number)
        assert (
            groups.tables.nbytes == sum(table.nbytes for table in groups.tables._kept.values()) <= 3 * 8 * 8
        )
    assert reader.groups_decoded == 12


def test_row_groups_decoded_for_few_of_their_rows_are_warned_of_once(tmp_path, caplog):
    path = write_parquet(tmp_path / "a.parquet", (0, 400), 20)
    reader = ParquetReader(path, ["id"], cache_bytes=3 * 20 * 8)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):  # epochs, in order: each row is wanted
            scan(reader, path)
        for start in range(0, 400, 40):  # shards of two row groups, shuffled
            reader.read_batch(path, start + np.random.default_rng(0).permutation(40))
        assert not caplog.records
        anywhere = ParquetReader(path, ["id"], cache_bytes=3 * 20 * 8)
        for number in np.random.default_rng(0).permutation(400).tolist():
            anywhere.read_record(path, number)
    assert len(caplog.records) == 1
    assert "records_per_shard=reader.rows_per_group" in caplog.text


def test_a_row_group_larger_than_the_bound_is_still_read_once(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", (0, 50), 50)
    reader = ParquetReader(path, cache_bytes=1)
    for number in range(50):
        reader.read_record(path, number)
    assert reader.groups_decoded == 1


def test_the_usual_row_group_is_advised(tmp_path):
    write_parquet(tmp_path / "a.parquet", (0, 100), 30)
    write_parquet(tmp_path / "b.parquet", (0, 61), 30)
    assert ParquetReader(tmp_path).rows_per_group == 30
    assert ParquetReader(write_parquet(tmp_path / "one" / "c.parquet", (0, 5), 30)).rows_per_group == 5


def test_pickles_small_with_nothing_open(tmp_path):
    for number in range(200):
        write_parquet(tmp_path / f"part-{number:05}.parquet", table(0, 6), 2)
    reader = ParquetReader(tmp_path)
    reader.read_record(f"{tmp_path}/part-00003.parquet", 0)
    data = pickle.dumps(reader)
    assert len(data) < 2000 + 200 * 84
    assert pickle.loads(data).groups_decoded == 0


def test_closed_readers_read_again(tmp_path):
    path = write_parquet(tmp_path / "a.parquet")
    reader = ParquetReader(path)
    reader.read_record(path, 0)
    reader.close()
    assert reader.read_record(path, 3)["id"] == 3


def test_repr_says_how_much_and_no_secret(tmp_path):
    write_parquet(tmp_path / "a.parquet")
    reader = ParquetReader(tmp_path, storage_options={"secret": "hunter2"})
    assert repr(reader) == f"<ParquetReader '{tmp_path}/' files=1 records=20>"
    assert "hunter2" not in repr(reader._groups._storage)
