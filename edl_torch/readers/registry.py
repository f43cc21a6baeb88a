"""The table of readers, and the choice of one by what the data is.

It must not know how any reader works: a reader that can open a bare path says so with the class method
`arguments_for(data, mode, given)`, which returns None for data that is not its own.
"""

from __future__ import annotations

import glob
import importlib
import inspect
import os
from collections.abc import Mapping
from typing import Any, cast

from edl_torch.errors import InvalidArgument, ReaderError, ReaderUnavailable
from edl_torch.readers.base import AbstractDataReader
from edl_torch.readers.reader_params import parse_reader_params
from edl_torch.readers.storage import is_url
from edl_torch.shard import TaskType

# Kind to class. `open_reader` asks in this order: readers of a special layout stand before general ones.
READERS: dict[str, str] = {
    "python_custom": "edl_torch.readers.python_custom:PythonCustomReader",
    "odps": "edl_torch.readers.odps.reader:ODPSDataReader",
    "recordio": "edl_torch.readers.recordio.reader:RecordIODataReader",
    "image_manifest": "edl_torch.readers.images.manifest:ImageManifestReader",
    "coco_captions": "edl_torch.readers.images.coco:CocoCaptionsReader",
    "coco_detection": "edl_torch.readers.images.coco:CocoDetectionReader",
    "voc": "edl_torch.readers.images.voc:VocReader",
    "parquet": "edl_torch.readers.parquet.reader:ParquetReader",
    "csv": "edl_torch.readers.text.csv_reader:CsvReader",
    "text": "edl_torch.readers.text.text_reader:TextReader",
    "image_folder": "edl_torch.readers.images.folder:ImageFolderReader",
    "map_dataset": "edl_torch.readers.map_dataset:MapDatasetReader",
}


def open_reader(
    data: str | os.PathLike[str], mode: TaskType = TaskType.TRAINING, **params: Any
) -> AbstractDataReader:
    """The reader for a path or address, chosen by what is there; `params` go to its constructor.

    An `odps://` table, a `.py` file, RecordIO (a file, folder, glob), a `.csv` list of images or other table,
    a text file, a folder of tables or text files, a COCO `.json` (or a folder with one in `annotations/`), a
    Pascal VOC folder, Parquet (a file, folder, glob or URL), a folder of images or of class folders. Raises
    ReaderError for data that no reader knows, InvalidArgument for parameters that the chosen one does not
    take, and what its constructor raises.
    """
    path = os.fspath(data)
    for target in READERS.values():
        reader = _load_class(target)
        arguments_for = getattr(reader, "arguments_for", None)
        try:
            arguments = None if arguments_for is None else arguments_for(path, mode, params)
        except OSError as exc:
            raise ReaderError(f"'{exc.filename or path}' cannot be looked at: {exc.strerror or exc}") from exc
        if arguments is not None:
            return _construct(reader, arguments | params)
    if not (os.path.exists(path) or is_url(path) or glob.glob(path, recursive=True)):
        raise ReaderError(
            f"the data '{path}' does not exist; check the path, or name a reader as module:Class"
        )
    raise ReaderError(
        f"no reader knows '{path}': expected an odps:// table, a .py file, RecordIO, a .csv list of images "
        "or other table, a .txt or .jsonl file, a COCO .json, Parquet, a Pascal VOC folder, a folder of "
        "images, tables or text files; for other data write a reader and name it as module:Class"
    )


def load_reader(reader: str, params: Mapping[str, Any] | str | None = None) -> AbstractDataReader:
    """Make a reader of the class `module:Class`, or of a kind in `READERS`.

    `params` are keyword arguments, as a mapping or as text for `parse_reader_params`. Raises InvalidArgument
    for a name or parameters that cannot be used and ReaderUnavailable for a module that cannot be imported.
    """
    arguments = parse_reader_params(params) if isinstance(params, str) else dict(params or {})
    return _construct(_load_class(READERS.get(reader, reader)), arguments)


def _load_class(target: str) -> Any:
    module_name, colon, class_name = target.partition(":")
    if not (module_name and colon and class_name):
        raise InvalidArgument(f"reader {target!r}: expected module:Class or one of {', '.join(READERS)}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as exc:
        raise ReaderUnavailable(
            f"reader {target!r}: cannot import {module_name!r}: {exc}; is it on PYTHONPATH?"
        ) from exc
    found = getattr(module, class_name, None)
    if found is None:
        raise InvalidArgument(f"reader {target!r}: the module {module_name} has no class {class_name}")
    if not all(callable(getattr(found, method, None)) for method in ("create_shards", "read_records")):
        raise InvalidArgument(f"{target!r} is no reader: it needs create_shards and read_records")
    return found


def _construct(reader: Any, arguments: dict[str, Any]) -> AbstractDataReader:
    """Only the call itself is judged here: a TypeError inside a constructor is the reader's own."""
    try:
        inspect.signature(reader).bind(**arguments)
    except TypeError as exc:
        raise InvalidArgument(
            f"{reader.__name__} does not take {', '.join(arguments) or 'no arguments'}: {exc}"
        ) from exc
    return cast(AbstractDataReader, reader(**arguments))
