from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from image_files import render, write_image_folder, write_manifest

from edl_torch.errors import DataFormatError, InvalidArgument
from edl_torch.readers import ImageManifestReader
from edl_torch.shard import Shard, Task
from edl_torch.testing.check_reader import check_reader


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_image_folder(tmp_path / "images", (), 3)
    return tmp_path


def manifest(folder: Path, content: str | bytes, **options) -> ImageManifestReader:
    path = folder / "list.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return ImageManifestReader(path, **options)


def labels(reader: ImageManifestReader) -> list:
    task = Task(shard=Shard(name=reader.name, start=0, end=reader.count))
    return [label for _, label in reader.read_records(task)]


@pytest.mark.parametrize("header", [True, False])
def test_manifest_keeps_the_contract(tmp_path, header):
    check_reader(lambda: ImageManifestReader(write_manifest(tmp_path, header=header)))


def test_shard_is_named_by_the_manifest(tmp_path):
    path = write_manifest(tmp_path, (5, 6))
    assert ImageManifestReader(path).create_shards() == {path: 2}


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


def test_quoted_names_with_commas(root):
    (root / "images" / "0000.png").rename(root / "images" / "a, b.png")
    assert labels(manifest(root, '"images/a, b.png",4\n')) == [4]


def test_heading_is_recognised_unless_told(root):
    (root / "plain").write_bytes((root / "images" / "0000.png").read_bytes())
    assert labels(manifest(root, "file,label\nplain,1\n")) == [1]
    assert labels(manifest(root, "plain,1\nplain,2\n")) == [1, 2]
    assert labels(manifest(root, "images/0000.png,1\nplain,2\n", has_header=True)) == [2]
    assert manifest(root, "missing,1\nplain,2\n", has_header=False).count == 2


def test_one_column_is_images_without_labels(root):
    reader = manifest(root, "file\nimages/0000.png\nimages/0002.png\n")
    assert np.array_equal(reader.read_record(reader.name, 1), render(2))


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


def test_real_class_folder_through_a_manifest(samples, tmp_path):
    base = samples / "imagefolder_mini" / "digits" / "val"
    rows = sorted(f"{path.relative_to(base)},{path.parent.name}" for path in base.glob("*/*.png"))
    path = tmp_path / "digits.csv"
    path.write_text("\n".join(rows))
    check_reader(lambda: ImageManifestReader(path, root=base))
    assert labels(ImageManifestReader(path, root=base)) == [number // 5 for number in range(50)]
