"""A folder of images that is gone is told from one image that is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from image_files import write_coco, write_image_folder, write_manifest, write_voc

from edl_torch.errors import BadRecord, DataFormatError, SourceUnavailable
from edl_torch.readers import (
    CocoCaptionsReader,
    CocoDetectionReader,
    ImageFolderReader,
    ImageManifestReader,
    VocReader,
)


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
