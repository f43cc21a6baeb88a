"""COCO files and lists of images in a store; `test_readers` reads the same files at every place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import write_coco, write_manifest
from stores import BUCKET, put, web_server

from edl_torch.errors import BadRecord, DataFormatError, ReaderError, SourceChanged
from edl_torch.readers import (
    CocoCaptionsReader,
    CsvReader,
    ImageManifestReader,
    open_reader,
)
from edl_torch.shard import TaskType


def manifest(at: str, **more: Any) -> ImageManifestReader:
    return ImageManifestReader(f"{at}/manifest.csv", **more)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(np.array_equal(one, other))


@pytest.fixture
def both(tmp_path: Path, bucket: Any, request: pytest.FixtureRequest) -> tuple[str, str]:
    """The files here, and the URL of the same files there."""
    write_coco(tmp_path)
    write_manifest(tmp_path)
    prefix = f"lists/{request.node.name}"
    files = {str(f.relative_to(tmp_path)): f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}
    put(bucket, {f"{prefix}/{name}": data for name, data in files.items()})
    return str(tmp_path), f"s3://{BUCKET}/{prefix}"


def test_a_web_server_lists_none_and_is_asked_for_each(tmp_path):
    write_manifest(tmp_path, [1, 2, 3, 0, 2])
    (tmp_path / "images" / "0001.png").rename(tmp_path / "images" / "a b%20ü.png")
    listed = (tmp_path / "manifest.csv").read_text().replace("0001.png", "a b%20ü.png")
    (tmp_path / "manifest.csv").write_text(listed)
    local = manifest(str(tmp_path))
    with web_server(tmp_path) as url:
        stored = manifest(url)
        assert all(same(stored.load(n), local.load(n)) for n in range(local.count))
        assert stored.fingerprint() == local.fingerprint()
        (tmp_path / "images" / "a b%20ü.png").unlink()
        with pytest.raises(SourceChanged, match="it is gone"):
            stored.load(1)
        with pytest.raises(BadRecord, match="the file is missing"):
            manifest(url).load(1)


def test_a_list_here_may_have_its_images_there(both, weed):
    here, there = both
    reader = ImageManifestReader(f"{here}/manifest.csv", there, storage_options=weed.options())
    local = ImageManifestReader(f"{here}/manifest.csv")
    assert all(same(reader.load(n), local.load(n)) for n in range(local.count))


def test_an_image_that_is_not_there_is_its_records_fault(both, weed, bucket):
    _, there = both
    reader = manifest(there, storage_options=weed.options())
    name = reader.image_files.path(1)
    bucket.delete_object(Bucket=BUCKET, Key=name.removeprefix(f"s3://{BUCKET}/"))
    reader = manifest(there, storage_options=weed.options())
    begun = reader.begin(range(4))
    for read in (reader.load, begun.record):
        with pytest.raises(BadRecord, match=f"image '{name}' cannot be read: the file is missing"):
            read(1)
        assert len(read(0)) == 2


def test_what_is_wrong_with_lists_there(both, weed, bucket):
    _, there = both
    options = weed.options()
    with pytest.raises(DataFormatError, match=r"none.json' cannot be read: it does not exist in its store"):
        CocoCaptionsReader(f"{there}/images", f"{there}/none.json", storage_options=options)
    with pytest.raises(DataFormatError, match="no-images' has no file; check the bucket and the path"):
        CocoCaptionsReader(
            f"{there}/no-images", f"{there}/annotations/captions.json", storage_options=options
        )
    put(bucket, {"lists/rows.csv": b"a,b,c\n1,2,3\n"})
    assert type(open_reader(f"s3://{BUCKET}/lists/rows.csv", storage_options=options)) is CsvReader
    with pytest.raises(ReaderError, match="none' does not exist: no object has that name"):
        open_reader(f"s3://{BUCKET}/lists/none", storage_options=options)


def test_of_a_table_the_first_lines_tell_that_it_lists_no_images(bucket, weed, proxy):
    put(bucket, {"lists/long.csv": b"a,b\n" + b"1,2\n" * 300_000})
    options = weed.options(proxy.url)
    assert (
        ImageManifestReader.arguments_for(
            f"s3://{BUCKET}/lists/long.csv", TaskType.TRAINING, {"storage_options": options}
        )
        is None
    )
    (head,) = proxy.gets()
    assert head.range == "bytes=0-65535"
