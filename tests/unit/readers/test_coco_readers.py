"""Readers of COCO and of Pascal VOC."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from image_files import encode, render, voc_xml, write_coco, write_voc
from readers_kit import everything

from edl_torch.errors import BadRecord, DataFormatError, InvalidArgument
from edl_torch.readers import CocoCaptionsReader, CocoDetectionReader, VocReader, read_image
from edl_torch.readers.images.coco import decode_segmentation


def change(path: str, edit) -> str:
    content = json.loads(Path(path).read_text())
    edit(content)
    Path(path).write_text(json.dumps(content))
    return path


@pytest.fixture
def coco(tmp_path: Path) -> tuple[str, str, str]:
    return write_coco(tmp_path)


def test_one_record_per_annotation_in_the_files_order(coco):
    reader = CocoCaptionsReader(coco[0], coco[1])
    annotations = json.loads(Path(coco[1]).read_text())["annotations"]
    assert reader.create_shards() == {coco[1]: len(annotations)}
    for (image, caption), annotation in zip(everything(reader), annotations, strict=True):
        file = f"{annotation['image_id'] - 100:04d}.jpg"
        assert caption == annotation["caption"]
        assert np.array_equal(image, read_image(os.path.join(coco[0], file)))


def test_one_record_per_image_with_all_its_captions(coco):
    records = everything(CocoCaptionsReader(coco[0], coco[1], per="image"))
    assert [len(captions) for _, captions in records] == [3, 2, 1, 0]
    assert records[1][1] == ["caption 1 of image 2: “été”", "caption 2 of image 2: “été”"]
    assert np.array_equal(records[0][0], read_image(os.path.join(coco[0], "0003.jpg")))


def test_anything_else_than_annotation_or_image_is_refused(coco):
    with pytest.raises(InvalidArgument, match="per='caption'"):
        CocoCaptionsReader(coco[0], coco[1], per="caption")


def test_targets_have_the_files_objects(coco):
    image, target = everything(CocoDetectionReader(coco[0], coco[2]))[0]
    assert image.shape == (24, 32, 3)
    assert set(target) == {"image_id", "boxes", "labels", "area", "iscrowd", "keypoints"}
    assert target["image_id"] == 103
    assert target["boxes"].tolist() == [[3, 3, 13, 11], [4, 4, 14, 12], [5, 5, 15, 13]]
    assert target["labels"].tolist() == [17, 3, 17]
    assert target["area"].tolist() == [80, 80, 80]
    assert target["iscrowd"].tolist() == [0, 0, 1]
    assert target["keypoints"].shape == (3, 3, 3)
    assert target["keypoints"][1].tolist() == [[4, 4, 2], [5, 5, 1], [0, 0, 0]]
    assert [target[key].dtype for key in ("boxes", "labels", "area")] == [np.float32, np.int64, np.float32]
    assert CocoDetectionReader(coco[0], coco[2]).categories == {3: "three", 17: "seventeen"}


def test_masks_of_polygons_and_crowds_cover_their_boxes(coco):
    for _, target in everything(CocoDetectionReader(coco[0], coco[2], masks=True)):
        assert target["masks"].dtype == np.uint8
        for mask, (x1, y1, x2, y2) in zip(target["masks"], target["boxes"].astype(int), strict=True):
            expected = np.zeros((24, 32), np.uint8)
            expected[y1:y2, x1:x2] = 1
            assert np.array_equal(mask, expected)


def test_a_records_arrays_may_be_changed_without_harm(coco):
    reader = CocoDetectionReader(coco[0], coco[2])
    _, first = reader.read_record(reader.name, 0)
    first["boxes"][:] = -1
    assert reader.read_record(reader.name, 0)[1]["boxes"].min() >= 0


def test_keypoints_are_absent_where_the_file_has_none_and_zero_where_an_object_has_none(coco):
    change(coco[2], lambda content: content["annotations"][4].pop("keypoints"))
    reader = CocoDetectionReader(coco[0], coco[2])
    assert reader.read_record(reader.name, 0)[1]["keypoints"][1].tolist() == [[0, 0, 0]] * 3
    change(coco[2], lambda content: [entry.pop("keypoints", None) for entry in content["annotations"]])
    assert "keypoints" not in CocoDetectionReader(coco[0], coco[2]).read_record(reader.name, 0)[1]


def test_area_and_iscrowd_may_be_missing(coco):
    def edit(content):
        for entry in content["annotations"]:
            del entry["area"], entry["iscrowd"]

    reader = CocoDetectionReader(coco[0], change(coco[2], edit))
    _, target = reader.read_record(reader.name, 0)
    assert target["area"].tolist() == [80, 80, 80]
    assert target["iscrowd"].tolist() == [0, 0, 0]


def test_masks_of_another_size_than_the_image_name_the_object(coco):
    def edit(content):
        content["annotations"][5]["segmentation"]["size"] = [32, 24]

    reader = CocoDetectionReader(coco[0], change(coco[2], edit), masks=True)
    with pytest.raises(BadRecord, match=r"object 2 of .*0003\.jpg.* has the size \[32, 24\]"):
        reader.read_record(reader.name, 0)


@pytest.mark.parametrize(
    "segmentation", [{}, {"size": [4, 4], "counts": "~~~~~"}, [["x"] * 6], 7, {"size": [4, 4]}]
)
def test_unreadable_segmentations_are_bad_records(segmentation):
    with pytest.raises(BadRecord, match="run-length mask"):
        decode_segmentation(segmentation, 4, 4)


@pytest.mark.parametrize(
    "counts", ["", "0", "PPYo0000000000", "oooooo", "é", [3, 50], [3, -2, 15], [3], [20, -4]]
)
def test_run_lengths_that_do_not_cover_the_image_are_bad_records(counts):
    with pytest.raises(BadRecord, match="mask"):
        decode_segmentation({"size": [4, 4], "counts": counts}, 4, 4)


def test_compressed_run_lengths_are_decoded():
    from pycocotools import mask

    expected = np.zeros((5, 7), np.uint8)
    expected[1:3, 2:6] = 1
    rle = mask.encode(np.asfortranarray(expected))
    text = {"size": rle["size"], "counts": rle["counts"].decode()}
    assert np.array_equal(decode_segmentation(json.loads(json.dumps(text)), 5, 7), expected)


@pytest.mark.parametrize("segmentation", [[], [[1, 1, 3, 3]], [[1, 1]]])
def test_degenerate_polygons_cover_nothing(segmentation):
    assert decode_segmentation(segmentation, 5, 7).sum() == 0


def test_the_other_kind_of_file_names_the_right_reader(coco):
    with pytest.raises(DataFormatError, match=r"no file of captions: .*'caption'; .*CocoDetectionReader"):
        CocoCaptionsReader(coco[0], coco[2])
    with pytest.raises(DataFormatError, match=r"no file of instances .*'bbox'; .*CocoCaptionsReader"):
        CocoDetectionReader(coco[0], coco[1])


def drop(key: str):
    return lambda content: content["annotations"][2].pop(key)


def put(key: str, value: object, where: str = "annotations"):
    return lambda content: content[where][2].__setitem__(key, value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda content: content.pop("annotations"), "has no 'annotations'"),
        (lambda content: content.pop("images"), "has no 'images'"),
        (lambda content: content["images"].clear(), "lists no image"),
        (lambda content: content["images"].append(7), "'images' is not a list of objects"),
        (drop("caption"), r"annotations\[2\] has no 'caption'"),
        (drop("image_id"), r"annotations\[2\] has no 'image_id'"),
        (put("image_id", 4711), r"annotations\[2\] has image_id 4711, which 'images' does not list"),
        (put("image_id", "103"), r"annotations\[2\] has image_id='103', expected int"),
        (put("caption", None), r"annotations\[2\] has caption=None, expected str"),
        (put("id", 900), r"annotations\[2\] has id 900, which an earlier entry has"),
        (put("id", 103, "images"), r"images\[2\] has id 103, which an earlier entry has"),
        (put("file_name", "../x.jpg", "images"), r"images\[2\] names the file '../x.jpg'"),
        (put("file_name", "/x.jpg", "images"), r"images\[2\] names the file '/x.jpg'"),
        (put("height", "tall", "images"), r"images\[2\] has height and width="),
    ],
)
def test_bad_captions_files_name_file_and_entry(coco, edit, message):
    with pytest.raises(DataFormatError, match=message) as caught:
        CocoCaptionsReader(coco[0], change(coco[1], edit))
    assert coco[1] in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda content: content.pop("categories"), "has no 'categories'"),
        (drop("bbox"), r"annotations\[2\] has bbox=None, expected numbers \[4\]"),
        (put("bbox", [1, 2, 3]), r"annotations\[2\] has bbox=\[1, 2, 3\]"),
        (put("bbox", "x"), r"annotations\[2\] has bbox='x'"),
        (put("bbox", [1, 2, 3, float("nan")]), r"annotations\[2\] has bbox=\[1, 2, 3, nan\]"),
        (put("area", [1]), r"annotations\[2\] has area=\[1\]"),
        (put("keypoints", [1, 2, 0]), r"annotations\[2\] has keypoints=\[1, 2, 0\]"),
        (drop("category_id"), r"annotations\[2\] has no 'category_id'"),
        (put("category_id", 99), r"annotations\[2\] has category_id 99, which 'categories' lacks"),
        (put("image_id", 4711), "which 'images' does not list"),
    ],
)
def test_bad_detection_files_name_file_and_entry(coco, edit, message):
    with pytest.raises(DataFormatError, match=message) as caught:
        CocoDetectionReader(coco[0], change(coco[2], edit))
    assert coco[2] in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b'{"images": [', "truncated"),
        (b"[]", "top level is a list"),
        (b"3", "top level is 3"),
        (b"\xff\xfe\xff", "^the annotation file '.*' is not UTF-8"),
        (b"[" * 100_000, "not valid JSON"),
        (None, "^the annotation file '.*' cannot be read: No such file or directory; check the path$"),
    ],
)
def test_files_that_are_no_coco_json_are_refused(tmp_path, content, message):
    path = tmp_path / "captions.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataFormatError, match=message):
        CocoCaptionsReader(tmp_path, path)


def test_lone_surrogates_in_captions_survive(coco):
    reader = CocoCaptionsReader(coco[0], change(coco[1], put("caption", "cut emoji \ud83d")))
    assert reader.read_record(reader.name, 2)[1] == "cut emoji \ud83d"


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of pycocotools' decode
@pytest.mark.parametrize(
    ("name", "images", "objects"), [("instances_mini", 57, 517), ("person_keypoints_mini", 25, 44)]
)
def test_real_detection_agrees_with_pycocotools(samples, name, images, objects, capfd):
    from pycocotools.coco import COCO

    base = samples / "coco_mini"
    path = base / "annotations" / f"{name}.json"
    reader = CocoDetectionReader(base / "images", path, masks=True)
    peer = COCO(str(path))
    capfd.readouterr()
    found = 0
    for image, target in everything(reader):
        expected = peer.loadAnns(peer.getAnnIds(imgIds=[target["image_id"]]))
        found += len(expected)
        assert target["labels"].tolist() == [entry["category_id"] for entry in expected]
        corners = [[x, y, x + w, y + h] for x, y, w, h in (entry["bbox"] for entry in expected)]
        assert np.allclose(target["boxes"], np.array(corners).reshape(-1, 4))
        assert target["masks"].shape[1:] == image.shape[:2]
        for mask, entry in zip(target["masks"], expected, strict=True):
            assert np.array_equal(mask, peer.annToMask(entry))
    assert (reader.count, found) == (images, objects)
    assert ("keypoints" in target) is (name == "person_keypoints_mini")


# Pascal VOC -------------------------------------------------------------------------------------------------


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


def first_of(reader: VocReader):
    return reader.read_record(reader.name, 0)


def test_the_three_ways_to_name_the_folder_agree(root, base):
    readers = [VocReader(root), VocReader(root / "VOCdevkit"), VocReader(base)]
    names = {reader.name for reader in readers}
    assert names == {str(base / "ImageSets" / "Main" / "train.txt")}
    assert [reader.count for reader in readers] == [3, 3, 3]


def test_targets_have_the_annotations_objects(root, base):
    reader = VocReader(root, "val")
    image, target = first_of(reader)
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


def test_own_classes(root):
    reader = VocReader(root, "val", classes=["cat", "dog"])
    assert first_of(reader)[1]["labels"].tolist() == [2, 1, 2]
    with pytest.raises(BadRecord, match=r"0003\.xml' object 0 is of the class 'dog': pass classes"):
        first_of(VocReader(root, "val", classes=["cat"]))


def test_optional_elements_may_be_missing(base):
    box = "<bndbox><xmin>1</xmin><ymin>2</ymin><xmax>3</xmax><ymax>4</ymax></bndbox>"
    _, target = first_of(annotate(base, f"<annotation><object><name> dog </name>{box}</object></annotation>"))
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
        first_of(annotate(base, content))


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
        first_of(annotate(base, content))


def test_declared_encodings_are_understood(base):
    text = voc_xml(1).replace("VOC2012", "été")
    data = ('<?xml version="1.0" encoding="iso-8859-1"?>' + text).encode("latin-1")
    assert first_of(annotate(base, data))[1]["names"] == ["dog"]


@pytest.mark.parametrize(
    ("old", "new"), [("1.5", "wide"), ("1.5", "nan"), ("<xmin>1.5</xmin>", ""), ("bndbox>", "box>")]
)
def test_bad_boxes_name_file_and_object(base, old, new):
    with pytest.raises(BadRecord, match=r"0000\.xml' object 0 has xmin="):
        first_of(annotate(base, voc_xml(1).replace(old, new)))


def test_missing_annotation_and_image_are_bad_records(base):
    (base / "Annotations" / "0000.xml").unlink()
    with pytest.raises(BadRecord, match=r"annotation '.*0000\.xml' cannot be read"):
        first_of(VocReader(base))
    (base / "JPEGImages" / "0001.jpg").unlink()
    reader = VocReader(base)
    with pytest.raises(BadRecord, match=r"0001\.jpg' cannot be read: the file is missing"):
        reader.read_record(reader.name, 1)
    assert reader.read_record(reader.name, 2)[1]["image_id"] == "0002"


def test_png_images_are_found(base):
    (base / "JPEGImages" / "0000.jpg").unlink()
    (base / "JPEGImages" / "0000.png").write_bytes(encode(render(3), ".png"))
    assert np.array_equal(first_of(VocReader(base))[0], render(3))


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
