from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from image_files import encode, render, voc_xml, write_voc

from edl_torch.errors import BadRecord, DataFormatError
from edl_torch.readers import VocReader, read_image
from edl_torch.testing.check_reader import check_reader


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return Path(write_voc(tmp_path))


@pytest.fixture
def base(root: Path) -> Path:
    return root / "VOCdevkit" / "VOC2012"


def annotate(base: Path, content: str | bytes) -> VocReader:
    data = content if isinstance(content, bytes) else content.encode()
    (base / "Annotations" / "0000.xml").write_bytes(data)
    return VocReader(base)


def first(reader: VocReader):
    return reader.read_record(reader.name, 0)


def test_voc_keeps_the_contract(root):
    check_reader(lambda: VocReader(root))
    check_reader(lambda: VocReader(root, split="val"))


def test_the_three_ways_to_name_the_folder_agree(root, base):
    readers = [VocReader(root), VocReader(root / "VOCdevkit"), VocReader(base)]
    names = {reader.name for reader in readers}
    assert names == {str(base / "ImageSets" / "Main" / "train.txt")}
    assert [reader.count for reader in readers] == [3, 3, 3]


def test_targets_have_the_annotations_objects(root, base):
    reader = VocReader(root, "val")
    image, target = first(reader)
    assert np.array_equal(image, read_image(str(base / "JPEGImages" / "0003.jpg")))
    assert target["image_id"] == "0003"
    assert target["boxes"].tolist() == [[1.5, 2, 12.25, 14], [2.5, 3, 13.25, 15], [3.5, 4, 14.25, 16]]
    assert target["boxes"].dtype == np.float32
    assert target["names"] == ["dog", "cat", "dog"]
    assert target["labels"].tolist() == [12, 8, 12]
    assert target["labels"].dtype == np.int64
    assert [reader.classes[label] for label in target["labels"]] == target["names"]
    assert target["difficult"].tolist() == [False, True, False]
    assert target["truncated"].tolist() == [False, True, False]
    assert target["poses"] == ["Left"] * 3


def test_image_without_objects_has_empty_arrays(root):
    _, target = first(VocReader(root))
    assert target["boxes"].shape == (0, 4)
    assert target["labels"].shape == target["difficult"].shape == (0,)


def test_own_classes(root):
    reader = VocReader(root, "val", classes=["cat", "dog"])
    assert first(reader)[1]["labels"].tolist() == [2, 1, 2]
    with pytest.raises(BadRecord, match=r"0003\.xml' object 0 is of the class 'dog': pass classes"):
        first(VocReader(root, "val", classes=["cat"]))


def test_optional_elements_may_be_missing(base):
    box = "<bndbox><xmin>1</xmin><ymin>2</ymin><xmax>3</xmax><ymax>4</ymax></bndbox>"
    _, target = first(annotate(base, f"<annotation><object><name> dog </name>{box}</object></annotation>"))
    assert (target["names"], target["difficult"].tolist(), target["poses"]) == (
        ["dog"],
        [False],
        ["Unspecified"],
    )


@pytest.mark.parametrize(
    "content",
    [
        '<!DOCTYPE a [<!ENTITY x "dog">]><annotation><object><name>&x;</name></object></annotation>',
        '<!DOCTYPE a SYSTEM "file:///etc/passwd"><annotation/>',
        '<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><annotation>&x;</annotation>',
        "<!DOCTYPE annotation><annotation/>",
    ],
)
def test_document_types_and_entities_are_refused(base, content):
    with pytest.raises(BadRecord, match=r"0000\.xml' declares a document type or entity"):
        first(annotate(base, content))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "<annotation>",
        "text",
        b"\xff\xff",
        "<annotation>&x;</annotation>",
        '<?xml version="1.0" encoding="none"?><a/>',
    ],
)
def test_broken_xml_is_a_bad_record(base, content):
    with pytest.raises(BadRecord, match=r"0000\.xml' is not valid XML"):
        first(annotate(base, content))


def test_declared_encodings_are_understood(base):
    text = voc_xml(1).replace("VOC2012", "été")
    data = ('<?xml version="1.0" encoding="iso-8859-1"?>' + text).encode("latin-1")
    assert first(annotate(base, data))[1]["names"] == ["dog"]


@pytest.mark.parametrize(
    ("old", "new"), [("1.5", "wide"), ("1.5", "nan"), ("<xmin>1.5</xmin>", ""), ("bndbox>", "box>")]
)
def test_bad_boxes_name_file_and_object(base, old, new):
    with pytest.raises(BadRecord, match=r"0000\.xml' object 0 has xmin="):
        first(annotate(base, voc_xml(1).replace(old, new)))


def test_missing_annotation_and_image_are_bad_records(base):
    (base / "Annotations" / "0000.xml").unlink()
    with pytest.raises(BadRecord, match=r"annotation '.*0000\.xml' cannot be read"):
        first(VocReader(base))
    (base / "JPEGImages" / "0001.jpg").unlink()
    reader = VocReader(base)
    with pytest.raises(BadRecord, match=r"0001\.jpg' cannot be read: the file is missing"):
        reader.read_record(reader.name, 1)
    assert reader.read_record(reader.name, 2)[1]["image_id"] == "0002"


def test_png_images_are_found(base):
    (base / "JPEGImages" / "0000.jpg").unlink()
    (base / "JPEGImages" / "0000.png").write_bytes(encode(render(3), ".png"))
    assert np.array_equal(first(VocReader(base))[0], render(3))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("0000\n../../secret\n", r"line 2 names the file '../../secret'"),
        ("0000  1\n", "line 1 has 2 words"),
        ("\n\n", "lists no image"),
    ],
)
def test_bad_lists_name_file_and_line(base, content, message):
    path = base / "ImageSets" / "Main" / "train.txt"
    path.write_text(content)
    with pytest.raises(DataFormatError, match=message) as caught:
        VocReader(base)
    assert str(path) in str(caught.value)


def test_layouts_that_are_not_voc_are_refused(root, base, tmp_path):
    with pytest.raises(DataFormatError, match="check split="):
        VocReader(root, split="nothing")
    with pytest.raises(DataFormatError, match="split="):
        VocReader(root, split="../train")
    with pytest.raises(DataFormatError, match="no Pascal VOC folder"):
        VocReader(base / "JPEGImages")
    shutil.copytree(base, base.parent / "VOC2007")
    with pytest.raises(DataFormatError, match="the years 2007, 2012: pass year="):
        VocReader(root)
    assert "VOC2007" in VocReader(root, year=2007).name
    with pytest.raises(DataFormatError, match="pass year="):
        VocReader(root, year="1999")


def test_real_voc_layout(samples):
    root = samples / "voc_mini"
    check_reader(lambda: VocReader(root), max_records=6)
    counts = [VocReader(root, split).count for split in ("train", "val", "trainval")]
    assert counts == [12, 6, 18]
    reader = VocReader(root, "trainval")
    objects = [reader.read_record(reader.name, index)[1] for index in range(18)]
    assert sum(len(target["names"]) for target in objects) == 135
    assert len({name for target in objects for name in target["names"]}) == 15
