"""Readers: one file a source.

Names load on first use: importing this costs no OpenCV and no pycocotools.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edl_torch.readers.base import AbstractDataReader as AbstractDataReader
    from edl_torch.readers.images.coco import CocoCaptionsReader as CocoCaptionsReader
    from edl_torch.readers.images.coco import CocoDetectionReader as CocoDetectionReader
    from edl_torch.readers.images.decode import decode_image as decode_image
    from edl_torch.readers.images.decode import read_image as read_image
    from edl_torch.readers.images.folder import ImageFolderReader as ImageFolderReader
    from edl_torch.readers.images.manifest import ImageManifestReader as ImageManifestReader
    from edl_torch.readers.images.voc import VocReader as VocReader
    from edl_torch.readers.map_dataset import MapDatasetReader as MapDatasetReader
    from edl_torch.readers.odps.reader import ODPSDataReader as ODPSDataReader
    from edl_torch.readers.odps.reader import ODPSReader as ODPSReader
    from edl_torch.readers.parquet.reader import ParquetReader as ParquetReader
    from edl_torch.readers.python_custom import PythonCustomReader as PythonCustomReader
    from edl_torch.readers.recordio.reader import RecordIODataReader as RecordIODataReader
    from edl_torch.readers.recordio.writer import RecordIOWriter as RecordIOWriter
    from edl_torch.readers.registry import load_reader as load_reader
    from edl_torch.readers.registry import open_reader as open_reader
    from edl_torch.readers.registry import parse_reader_params as parse_reader_params
    from edl_torch.readers.tar.reader import TarReader as TarReader
    from edl_torch.readers.text.csv_reader import CsvReader as CsvReader
    from edl_torch.readers.text.text_reader import TextReader as TextReader

_MODULES = {
    "AbstractDataReader": "base",
    "CocoCaptionsReader": "images.coco",
    "CocoDetectionReader": "images.coco",
    "CsvReader": "text.csv_reader",
    "ImageFolderReader": "images.folder",
    "ImageManifestReader": "images.manifest",
    "MapDatasetReader": "map_dataset",
    "ODPSDataReader": "odps.reader",
    "ODPSReader": "odps.reader",
    "ParquetReader": "parquet.reader",
    "PythonCustomReader": "python_custom",
    "RecordIODataReader": "recordio.reader",
    "RecordIOWriter": "recordio.writer",
    "TarReader": "tar.reader",
    "TextReader": "text.text_reader",
    "VocReader": "images.voc",
    "decode_image": "images.decode",
    "load_reader": "registry",
    "open_reader": "registry",
    "parse_reader_params": "registry",
    "read_image": "images.decode",
}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
