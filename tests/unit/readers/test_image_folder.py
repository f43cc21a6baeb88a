from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from image_files import encode, render, write_image_folder

from edl_torch.errors import BadRecord, DataFormatError, InvalidArgument, ReaderError
from edl_torch.readers import ImageFolderReader, read_image
from edl_torch.shard import Shard, Task
from edl_torch.testing.check_reader import check_reader


def put(path: Path, seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(render(seed), ".png"))


def everything(reader: ImageFolderReader) -> list:
    task = Task(shard=Shard(name=reader.name, start=0, end=reader.count))
    return list(reader.read_records(task))


def files(reader: ImageFolderReader) -> list[str]:
    return list(reader._files)


def test_class_folders_keep_the_contract(tmp_path):
    check_reader(lambda: ImageFolderReader(write_image_folder(tmp_path, ("c", "a", "b"), 4)))


def test_flat_folder_keeps_the_contract(tmp_path):
    check_reader(lambda: ImageFolderReader(write_image_folder(tmp_path, (), 5)))


def test_labels_are_indices_of_sorted_class_names(tmp_path):
    reader = ImageFolderReader(write_image_folder(tmp_path, ("10", "9", "Zebra", "ant"), 2))
    assert reader.classes == ["10", "9", "Zebra", "ant"]
    assert reader.class_to_idx == {"10": 0, "9": 1, "Zebra": 2, "ant": 3}
    assert [label for _, label in everything(reader)] == [0, 0, 1, 1, 2, 2, 3, 3]
    for (image, _), file in zip(everything(reader), files(reader), strict=True):
        assert np.array_equal(image, read_image(str(tmp_path / file)))


def test_flat_folder_gives_images_alone(tmp_path):
    reader = ImageFolderReader(write_image_folder(tmp_path, (), 2))
    assert reader.classes == []
    assert reader.create_shards() == {str(tmp_path): 2}
    assert np.array_equal(reader.read_record(str(tmp_path), 1), render(1))


def test_order_is_that_of_torchvision(tmp_path):
    for name in ("b/2.png", "b/x/1.png", "b/x/y/0.png", "b/1.png", "b/x-y/9.png", "a/z.png"):
        put(tmp_path / name)
    expected = [
        os.path.relpath(os.path.join(folder, file), tmp_path)
        for name in ("a", "b")
        for folder, _, found in sorted(os.walk(tmp_path / name))
        for file in sorted(found)
    ]
    reader = ImageFolderReader(tmp_path)
    assert files(reader) == expected
    assert [label for _, label in everything(reader)] == [0, 1, 1, 1, 1, 1]


def test_endings_are_of_any_case_and_other_files_are_left_out(tmp_path):
    for name in ("a/1.PNG", "a/2.png"):
        put(tmp_path / name)
    (tmp_path / "a" / "notes.txt").write_text("x")
    assert files(ImageFolderReader(tmp_path)) == ["a/1.PNG", "a/2.png"]
    assert files(ImageFolderReader(tmp_path, extensions=["txt"])) == ["a/notes.txt"]


def test_one_string_of_extensions_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match="pass a sequence"):
        ImageFolderReader(tmp_path, extensions=".png")


def test_hidden_files_and_folders_are_skipped(tmp_path):
    for name in (".ipynb_checkpoints/1.png", "a/1.png", "a/._1.png", "a/.cache/1.png"):
        put(tmp_path / name)
    reader = ImageFolderReader(tmp_path)
    assert reader.classes == ["a"]
    assert files(reader) == ["a/1.png"]


def test_links_are_followed_and_loops_are_not(tmp_path):
    put(tmp_path / "store" / "1.png")
    root = tmp_path / "root"
    root.mkdir()
    (root / "a").symlink_to(tmp_path / "store")
    (tmp_path / "store" / "again").symlink_to(root)
    (tmp_path / "store" / "self").symlink_to(tmp_path / "store")
    assert files(ImageFolderReader(root)) == ["a/1.png"]


def test_undecodable_names_are_read(tmp_path):
    put(tmp_path / "é" / os.fsdecode(b"\xff\xfe.png"))
    reader = ImageFolderReader(tmp_path)
    assert np.array_equal(reader.read_record(reader.name, 0)[0], render(0))


def test_images_beside_class_folders_are_refused(tmp_path):
    put(tmp_path / "1.png")
    put(tmp_path / "a" / "1.png")
    with pytest.raises(DataFormatError, match="images of its own and folders with images"):
        ImageFolderReader(tmp_path)


def test_flat_folder_may_hold_folders_without_images(tmp_path):
    put(tmp_path / "1.png")
    (tmp_path / "annotations").mkdir()
    assert ImageFolderReader(tmp_path).classes == []


def test_splits_with_class_folders_are_not_classes(tmp_path):
    for split in ("train", "val"):
        put(tmp_path / split / "bee" / "0.png")
    with pytest.raises(DataFormatError, match=r"holds the splits \['train', 'val'\].*name one of them"):
        ImageFolderReader(tmp_path)
    put(tmp_path / "bee" / "0.png")
    assert ImageFolderReader(tmp_path).classes == ["bee", "train", "val"]


def test_classes_may_be_called_like_splits(tmp_path):
    for name in ("test", "train"):
        put(tmp_path / name / "0.png")
    assert ImageFolderReader(tmp_path).classes == ["test", "train"]


def test_class_without_images_is_refused_unless_allowed(tmp_path):
    put(tmp_path / "a" / "1.png")
    (tmp_path / "b").mkdir()
    with pytest.raises(DataFormatError, match=r"class folder\(s\) b; remove them"):
        ImageFolderReader(tmp_path)
    assert ImageFolderReader(tmp_path, allow_empty=True).classes == ["a", "b"]


def test_folder_without_images_is_refused(tmp_path):
    with pytest.raises(DataFormatError, match="has no image"):
        ImageFolderReader(tmp_path)


def test_missing_folder_and_file_as_folder_are_refused(tmp_path):
    put(tmp_path / "1.png")
    for path in (tmp_path / "nowhere", tmp_path / "1.png"):
        with pytest.raises(DataFormatError, match="cannot be listed"):
            ImageFolderReader(path)


def test_vanished_image_is_a_bad_record_and_the_others_are_read(tmp_path):
    reader = ImageFolderReader(write_image_folder(tmp_path))
    os.remove(tmp_path / "ant" / "0001.png")
    with pytest.raises(BadRecord, match=r"0001\.png"):
        reader.read_record(reader.name, 1)
    assert reader.read_record(reader.name, 2)[1] == 0


def test_ranges_and_names_outside_say_what_differs(tmp_path):
    reader = ImageFolderReader(write_image_folder(tmp_path))
    with pytest.raises(ReaderError, match="has the records 0 to 6 here, but record 6 was asked for"):
        reader.read_record(reader.name, 6)
    with pytest.raises(ReaderError, match="records 2 to 9"):
        reader.read_records(Task(shard=Shard(name=reader.name, start=2, end=9)))
    with pytest.raises(ReaderError, match="not 'other'"):
        reader.read_record("other", 0)


@pytest.mark.parametrize(("name", "classes", "count"), [("digits/train", 10, 200), ("coco_crops/val", 6, 8)])
def test_real_class_folders(samples, name, classes, count):
    root = samples / "imagefolder_mini" / name
    check_reader(lambda: ImageFolderReader(root), max_records=20)
    reader = ImageFolderReader(root)
    assert (len(reader.classes), reader.count) == (classes, count)
