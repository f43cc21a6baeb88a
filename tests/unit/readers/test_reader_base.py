from __future__ import annotations

import sys

import numpy as np
import pytest

from edl_torch import readers
from edl_torch.errors import DataFormatError
from edl_torch.readers.base import (
    AbstractDataReader,
    has_batch_reads,
    has_random_access,
    import_for_reading,
    reader_sources,
    sources_of,
)
from edl_torch.shard import Source, TaskType


class WithoutMode(AbstractDataReader):
    def create_shards(self):
        return {"a": 3}

    def read_records(self, task):
        return iter(())


class WithMode(WithoutMode):
    def create_shards(self, mode=TaskType.TRAINING):
        return {mode.name: 3}

    def read_record(self, name, index):
        return index


class WithAnything(WithoutMode):
    def create_shards(self, *args):
        return {args[0].name: 3}

    def read_batch(self, name, indices):
        return indices


def test_both_signatures_of_create_shards_are_understood():
    assert reader_sources(WithoutMode(), TaskType.EVALUATION) == (Source(name="a", count=3),)
    for reader in (WithMode(), WithAnything()):
        assert reader_sources(reader, TaskType.EVALUATION) == (Source(name="EVALUATION", count=3),)


def test_optional_methods_are_noticed_only_where_written():
    assert [has_random_access(r) for r in (WithoutMode(), WithMode(), WithAnything())] == [False, True, False]
    assert [has_batch_reads(r) for r in (WithoutMode(), WithMode(), WithAnything())] == [False, False, True]


@pytest.mark.parametrize(
    ("shards", "rows"),
    [
        ({}, []),
        ({"a": 3, "b": (5, 2), "c": [7, np.int32(1)]}, [("a", 0, 3), ("b", 5, 2), ("c", 7, 1)]),
        ([("a", 0, 3), ("a", 3, 2)], [("a", 0, 3), ("a", 3, 2)]),
        ({"a": np.int64(4), "b": 0}, [("a", 0, 4), ("b", 0, 0)]),
    ],
)
def test_every_form_of_shards_is_normalised(shards, rows):
    sources = sources_of(shards, "Reader")
    assert [(source.name, source.start, source.count) for source in sources] == rows


@pytest.mark.parametrize(
    "shards",
    [
        None,
        5,
        {"a": None},
        {"a": 2.5},
        {"a": "5"},
        {"a": (1, 2, 3)},
        {"a": -1},
        {"a": (-1, 5)},
        [("a", 3)],
        ["a"],
    ],
)
def test_other_forms_name_the_reader(shards):
    with pytest.raises(DataFormatError, match=r"Reader\.create_shards\(\)"):
        sources_of(shards, "Reader")


def test_what_reading_imports_is_imported_ahead_and_what_is_not_there_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "edl_imported_ahead.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    reader = WithMode()
    reader.imports = ("edl_not_installed", "edl_imported_ahead")
    import_for_reading(reader)
    assert sys.modules.pop("edl_imported_ahead").__file__
    import_for_reading(object())


@pytest.mark.parametrize(
    "name", ["ImageFolderReader", "ImageManifestReader", "CocoCaptionsReader", "VocReader"]
)
def test_readers_of_images_say_that_they_import_opencv(name):
    assert getattr(readers, name).imports == ("cv2",)
