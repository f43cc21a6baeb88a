"""Readers: one file a source.

Names load on first use: importing this costs no OpenCV and no pycocotools.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edl_torch.readers.base import AbstractDataReader
    from edl_torch.readers.coco import CocoCaptionsReader, CocoDetectionReader
    from edl_torch.readers.csv_reader import CsvReader
    from edl_torch.readers.image_folder import ImageFolderReader
    from edl_torch.readers.image_manifest import ImageManifestReader
    from edl_torch.readers.images import decode_image, read_image
    from edl_torch.readers.map_dataset import MapDatasetReader
    from edl_torch.readers.odps import ODPSDataReader
    from edl_torch.readers.odps_iterator import ODPSReader
    from edl_torch.readers.parquet import ParquetReader
    from edl_torch.readers.python_custom import PythonCustomReader
    from edl_torch.readers.reader_params import parse_reader_params
    from edl_torch.readers.recordio import RecordIODataReader
    from edl_torch.readers.recordio_writer import RecordIOWriter
    from edl_torch.readers.registry import load_reader, open_reader
    from edl_torch.readers.text import TextReader
    from edl_torch.readers.voc import VocReader

_MODULES = {
    "AbstractDataReader": "base",
    "CocoCaptionsReader": "coco",
    "CocoDetectionReader": "coco",
    "CsvReader": "csv_reader",
    "ImageFolderReader": "image_folder",
    "ImageManifestReader": "image_manifest",
    "MapDatasetReader": "map_dataset",
    "ODPSDataReader": "odps",
    "ODPSReader": "odps_iterator",
    "ParquetReader": "parquet",
    "PythonCustomReader": "python_custom",
    "RecordIODataReader": "recordio",
    "RecordIOWriter": "recordio_writer",
    "TextReader": "text",
    "VocReader": "voc",
    "decode_image": "images",
    "load_reader": "registry",
    "open_reader": "registry",
    "parse_reader_params": "reader_params",
    "read_image": "images",
}

__all__ = [
    "AbstractDataReader",
    "CocoCaptionsReader",
    "CocoDetectionReader",
    "CsvReader",
    "ImageFolderReader",
    "ImageManifestReader",
    "MapDatasetReader",
    "ODPSDataReader",
    "ODPSReader",
    "ParquetReader",
    "PythonCustomReader",
    "RecordIODataReader",
    "RecordIOWriter",
    "TextReader",
    "VocReader",
    "decode_image",
    "load_reader",
    "open_reader",
    "parse_reader_params",
    "read_image",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
