"""Google's store and the hub of Hugging Face, as far as their twins go; the readers are in `test_readers`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from other_stores import Gcs
from stores import BUCKET, Place, files_below

from edl_torch import ElasticDataLoader
from edl_torch.errors import ReaderError, SourceChanged
from edl_torch.readers import CsvReader, ImageFolderReader

TWINS = pytest.mark.parametrize("place", ["gs", "hf"], indirect=True)


def write(folder: Path) -> None:
    """40 pictures of two classes, and a table."""
    for number in range(40):
        path = folder / "train" / "ab"[number % 2] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), np.full((4, 4, 3), number, np.uint8))
    (folder / "rows.csv").write_text("n,x\r\n" + "".join(f"{n},{n / 4}\r\n" for n in range(100)))


@TWINS
def test_workers_read_each_record_once_an_epoch(place: Place, tmp_path: Path):
    write(tmp_path)
    at, how = place.of(tmp_path), place.options
    with ElasticDataLoader(
        f"{at}/train", batch_size=8, num_epochs=2, shuffle=True, storage_options=how, num_workers=2
    ) as loader:
        seen = [int(image[0, 0, 0]) for _ in loader.epochs() for images, _ in loader for image in images]
    assert Counter(seen) == dict.fromkeys(range(40), 2)
    with ElasticDataLoader(f"{at}/rows.csv", batch_size=8, storage_options=how) as loader:
        assert sorted(int(n) for rows in loader for n in rows["n"]) == list(range(100))


@TWINS
def test_what_is_not_there_is_said(place: Place, tmp_path: Path):
    write(tmp_path)
    at, how = place.of(tmp_path), {"storage_options": place.options}
    with pytest.raises(ReaderError, match="none' has no file; check the bucket and the path"):
        ImageFolderReader(f"{at}/none", **how)
    with pytest.raises(ReaderError, match=r"none\.csv' does not exist; check the path"):
        CsvReader(f"{at}/none.csv", **how)


@TWINS
def test_an_object_that_is_another_one_has_changed(place: Place, tmp_path: Path, request: Any):
    """Google tells it by its tag; of what fsspec has the size does."""
    write(tmp_path)
    at, changed = place.of(tmp_path), tmp_path / "train" / "a" / "00.png"
    reader = ImageFolderReader(f"{at}/train", storage_options=place.options)
    data = changed.read_bytes()
    changed.write_bytes(data[:-5] + b"other"[: 5 if place.kind == "gs" else 4])
    if place.kind == "gs":
        gcs: Gcs = request.getfixturevalue("gcs")
        prefix = at.removeprefix(f"gs://{BUCKET}/")
        gcs.put({f"{prefix}/{name}": body for name, body in files_below(tmp_path).items()})
    with pytest.raises(SourceChanged, match=r"a/00\.png' has changed since it was listed"):
        reader.load(0)
    assert reader.load(1)[0][0, 0, 0] == 2
