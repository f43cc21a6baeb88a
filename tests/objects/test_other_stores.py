"""Google's store and the hub of Hugging Face, as far as their twins go; the readers are in `test_readers`."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from uuid import uuid4

import cv2
import numpy as np
import pytest
from other_stores import Gcs, GcsFront
from stores import BUCKET, Place, files_below
from tar_files import samples_tar

from edl_torch import ElasticDataLoader
from edl_torch.errors import ReaderError, SourceChanged
from edl_torch.readers import CsvReader, ImageFolderReader, TarReader
from edl_torch.readers.storage import Storage

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


def test_an_index_under_a_prefix_of_googles_is_made_once(gcs: Gcs, front: GcsFront, tmp_path: Path):
    """One listing for all that are made at once, until one refreshes it; and the index of a tar beside it."""
    write(tmp_path)
    at = f"indexed-{uuid4().hex}"
    gcs.put({f"{at}/{name}": body for name, body in files_below(tmp_path).items()})
    kept = Storage(gcs.options(front.url))
    options = {"storage_options": gcs.options(front.url), "index_dir": f"gs://{BUCKET}/{at}.indexes"}

    def count(**more: Any) -> int:
        return ImageFolderReader(f"gs://{BUCKET}/{at}/train", **options, **more).count

    def asked(kind: str) -> list[int]:
        """How its requests for indexes and listings were answered since it was asked last."""
        log = [one for one in front.log if one.method == kind]
        front.log.clear()
        if kind == "GET":
            return [one.status for one in log if "list-type" in one.path]
        return [one.status for one in log if unquote(one.path).endswith(".edl-index")]

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda _: count(), range(3))) == [40] * 3
    assert asked("PUT") == [200]
    assert len(list(kept.listing(options["index_dir"]))) == 1  # the claim is gone
    front.log.clear()
    gcs.put({f"{at}/train/a/40.png": (tmp_path / "train" / "a" / "00.png").read_bytes()})
    assert count() == 40
    assert asked("GET") == []
    assert count(refresh=True) == 41
    assert asked("PUT") == [200]
    assert count() == 41
    assert asked("GET") == []
    tar = Path(samples_tar(tmp_path / "1.tar", 300))
    gcs.put({f"{at}/1.tar": tar.read_bytes()})
    first = TarReader(f"gs://{BUCKET}/{at}/1.tar", **options)
    assert asked("PUT") == [200]
    again = TarReader(f"gs://{BUCKET}/{at}/1.tar", **options)
    assert asked("PUT") == []
    assert again.load(299) == first.load(299)


def test_google_lets_one_create_an_object(gcs: Gcs, front: GcsFront):
    storage, name = Storage(gcs.options(front.url)), f"gs://{BUCKET}/created-{uuid4().hex}"
    assert storage.put(name, b"first", new=True)
    assert not storage.put(name, b"second", new=True)
    found = storage.look(name)
    assert found is not None
    assert storage.read(found) == b"first"
    assert storage.put(name, b"third")
    with pytest.raises(SourceChanged):
        storage.read(found)
    storage.remove(name)
    storage.remove(name)
    assert storage.look(name) is None
