"""Images in folders and in lists: which files, labels, what is missing, and what the page says."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from image_files import encode, render, write_coco, write_image_folder, write_manifest, write_voc
from readers_kit import everything

from edl_torch.errors import BadRecord, DataFormatError, InvalidArgument, SourceUnavailable
from edl_torch.readers import (
    CocoCaptionsReader,
    CocoDetectionReader,
    ImageFolderReader,
    ImageManifestReader,
    VocReader,
    read_image,
)


def put(path: Path, seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(render(seed), ".png"))


def files(reader: ImageFolderReader) -> list[str]:
    return list(reader._files)


def test_labels_are_indices_of_sorted_class_names(tmp_path):
    reader = ImageFolderReader(write_image_folder(tmp_path, ("10", "9", "Zebra", "ant"), 2))
    assert reader.classes == ["10", "9", "Zebra", "ant"]
    assert reader.class_to_idx == {"10": 0, "9": 1, "Zebra": 2, "ant": 3}
    assert [label for _, label in everything(reader)] == [0, 0, 1, 1, 2, 2, 3, 3]
    for (image, _), file in zip(everything(reader), files(reader), strict=True):
        assert np.array_equal(image, read_image(str(tmp_path / file)))


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


def test_missing_folder_and_file_as_folder_are_refused(tmp_path):
    put(tmp_path / "1.png")
    for path in (tmp_path / "nowhere", tmp_path / "1.png"):
        with pytest.raises(DataFormatError, match="cannot be listed"):
            ImageFolderReader(path)


# Image manifest ---------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_image_folder(tmp_path / "images", (), 3)
    return tmp_path


def manifest(folder: Path, content: str | bytes, **options) -> ImageManifestReader:
    path = folder / "list.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return ImageManifestReader(path, **options)


def labels(reader: ImageManifestReader) -> list:
    return [label for _, label in everything(reader)]


def test_integer_labels_stay_integers(root):
    reader = manifest(root, "images/0000.png,7\nimages/0001.png,-2\nimages/0002.png,007\n")
    assert labels(reader) == [7, -2, 7]
    assert reader.classes == []
    image, label = reader.read_record(reader.name, 1)
    assert np.array_equal(image, render(1))
    assert type(label) is int


def test_names_become_indices_of_sorted_names(root):
    reader = manifest(root, "images/0000.png,dog\nimages/0001.png,cat\nimages/0002.png,3\n")
    assert reader.classes == ["3", "cat", "dog"]
    assert reader.class_to_idx == {"3": 0, "cat": 1, "dog": 2}
    assert labels(reader) == [2, 1, 0]


def test_given_classes_fix_the_indices(root):
    reader = manifest(root, "images/0000.png,dog\n", classes=["ant", "bee", "dog"])
    assert labels(reader) == [2]
    with pytest.raises(DataFormatError, match="the label 'cat', which is not in classes"):
        manifest(root, "images/0000.png,cat\n", classes=["ant", "bee", "dog"])


@pytest.mark.parametrize(
    "content",
    [
        "file,label\r\nimages/0000.png,1\r\nimages/0001.png,2\r\n",
        b"\xef\xbb\xbffile,label\nimages/0000.png,1\nimages/0001.png,2",
        b"\xef\xbb\xbfimages/0000.png,1\nimages/0001.png,2",
        "\n\nimages/0000.png,1\n   \n,\nimages/0001.png,2\n\n",
        '"images/0000.png","1"\n"images/0001.png", 2 \n',
        "images\\0000.png,1\nimages\\0001.png,2\n",
    ],
)
def test_line_ends_marks_quotes_blanks_and_backslashes(root, content):
    reader = manifest(root, content)
    assert labels(reader) == [1, 2]


def test_heading_is_recognised_unless_told(root):
    (root / "plain").write_bytes((root / "images" / "0000.png").read_bytes())
    assert labels(manifest(root, "file,label\nplain,1\n")) == [1]
    assert labels(manifest(root, "plain,1\nplain,2\n")) == [1, 2]
    assert labels(manifest(root, "images/0000.png,1\nplain,2\n", has_header=True)) == [2]
    assert manifest(root, "missing,1\nplain,2\n", has_header=False).count == 2


def test_root_and_delimiter(root):
    reader = manifest(root, "0002.png\t9\n", root=root / "images", delimiter="\t")
    image, label = reader.read_record(reader.name, 0)
    assert label == 9
    assert np.array_equal(image, render(2))
    with pytest.raises(InvalidArgument, match="not one character"):
        manifest(root, "x.png,1\n", delimiter="||")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "lists no image"),
        ("file,label\n", "lists no image"),
        ("a.png,1\nb.png\n", "line 2 has 1 fields, expected file,label"),
        ("a.png\nb.png,1\n", "line 2 has 2 fields, expected file"),
        ("a.png,1,x\n", "line 1 has 3 fields"),
        ("a.png,1\n\nb.png,\n", "line 3 has no label"),
        ("a.png,1\n../b.png,2\n", r"line 2 names the file '../b.png'"),
        ("a.png,1\n/etc/x.png,2\n", r"line 2 names the file '/etc/x.png'"),
        ("a.png,1\nhttp://h/x.png?sig=s3cret,1\n", r"line 2 names the URL 'http://h/x.png': write"),
        ('a.png,1\n"b.png,2\n', "is not CSV"),
        (b"a.png,1\n\xff\xfe.png,2\n", "is not UTF-8"),
    ],
)
def test_bad_lists_name_file_and_line(root, content, message):
    with pytest.raises(DataFormatError, match=message) as caught:
        manifest(root, content)
    assert "list.csv" in str(caught.value)


def test_missing_manifest_is_refused(tmp_path):
    with pytest.raises(DataFormatError, match="cannot be read"):
        ImageManifestReader(tmp_path / "nothing.csv")


# A folder of images that is gone is told from one image that is ---------------------------------------------


@pytest.fixture(params=["folder", "manifest", "coco", "voc"])
def in_a_folder(request, tmp_path):
    """A reader, and the folder of its images."""
    if request.param == "folder":
        root = write_image_folder(tmp_path / "data")
        return ImageFolderReader(root), root
    if request.param == "manifest":
        path = write_manifest(tmp_path)
        (tmp_path / "manifest.csv").write_text(Path(path).read_text().replace("images/", ""))
        return ImageManifestReader(path, tmp_path / "images"), str(tmp_path / "images")
    if request.param == "voc":
        reader = VocReader(write_voc(tmp_path))
        return reader, reader.root
    folder, captions, _ = write_coco(tmp_path)
    return CocoCaptionsReader(folder, captions), folder


@pytest.mark.parametrize("emptied", [False, True], ids=["gone", "empty"])
def test_a_folder_that_is_gone_is_no_records_fault(in_a_folder, emptied):
    reader, folder = in_a_folder
    shutil.rmtree(folder)
    if emptied:
        os.mkdir(folder)
    with pytest.raises(SourceUnavailable, match=r"gone or empty.*mounted"):
        reader.read_record(reader.name, 1)


def test_one_file_that_is_gone_is_its_records_fault(in_a_folder):
    reader, folder = in_a_folder
    victim = sorted(Path(folder).rglob("*.*g"))[1]
    os.remove(victim)
    bad = []
    for index in range(reader.count):
        try:
            reader.read_record(reader.name, index)
        except BadRecord as exc:
            bad.append(str(exc))
    assert set(bad) == {
        f"image '{victim}' cannot be read: the file is missing; restore it, or take it out of the dataset"
    }


def test_an_image_folder_that_is_none_is_refused_when_the_reader_is_made(tmp_path):
    manifest = write_manifest(tmp_path)
    folder, captions, instances = write_coco(tmp_path / "coco")
    for make in (
        lambda: CocoCaptionsReader(folder + "2", captions),
        lambda: CocoDetectionReader(folder + "2", instances),
        lambda: ImageManifestReader(manifest, folder + "2"),
    ):
        with pytest.raises(DataFormatError, match="images2' does not exist"):
            make()
    with pytest.raises(DataFormatError, match="is no folder"):
        CocoCaptionsReader(instances, captions)
