"""The table of readers, and the choice of one by what the data is.

It must not know how any reader works: a reader that can open a bare path says so with the class method
`arguments_for(data, mode, given)`, which returns None for data that is not its own; one that was named asks
`arguments_named(data, mode)` then, where it has that.
"""

from __future__ import annotations

import ast
import glob
import inspect
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, cast

from edl_torch.errors import DataFormatError, InvalidArgument, ReaderError
from edl_torch.readers.base import AbstractDataReader, imported
from edl_torch.readers.images.decode import EXTENSIONS
from edl_torch.readers.shared.finder import expanded, first_of, is_glob, refuse_no_file
from edl_torch.readers.storage import Storage, StorageOptions, is_elsewhere, is_url
from edl_torch.shard import TaskType

# Kind to class. `open_reader` asks in this order: readers of a special layout stand before general ones.
READERS: dict[str, str] = {
    "python_custom": "edl_torch.readers.python_custom:PythonCustomReader",
    "odps": "edl_torch.readers.odps.reader:ODPSDataReader",
    "recordio": "edl_torch.readers.recordio.reader:RecordIODataReader",
    "tar": "edl_torch.readers.tar.reader:TarReader",
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

# What reads a folder in a store, by the endings of what lies in it.
_IN_FOLDERS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".tar": "tar",
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **dict.fromkeys((".txt", ".jsonl", ".ndjson"), "text"),
    ".recordio": "recordio",
    **dict.fromkeys(EXTENSIONS, "image_folder"),
}
_IN_VOC = re.compile(r"/(?:JPEGImages|Annotations|ImageSets)/")
_OF_COCO = re.compile(r"(?:^|/)annotations/[^/]*\.json$")
_ALONE = frozenset({"csv", "text"})  # read folders of nothing else
_PEEKED = 1000  # objects
_BY_NAME = (
    "--custom_data_reader csv, text … or module:Class for yours; in Python CsvReader(…), TextReader(…) …"
)
_BY_COCO = ", of COCO by CocoDetectionReader(images, annotations) or CocoCaptionsReader(…)"
# Runs of characters that are neither separator nor quote, or whole quoted strings.
_PIECE = re.compile(r"""(?:[^;"']|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')+""")


def open_reader(
    data: str | os.PathLike[str], mode: TaskType = TaskType.TRAINING, **params: Any
) -> AbstractDataReader:
    """The reader for a path or address, chosen by what is there; `params` go to its constructor.

    An `odps://` table, a `.py` file, RecordIO (a file, folder, glob), a `.csv` list of images or other table,
    a text file, a folder of tables or text files, a COCO `.json` (or a folder with one in `annotations/`), a
    Pascal VOC folder, Parquet, tars, a folder of images or of class folders (these by URL too). Raises
    ReaderError for data that no reader knows, InvalidArgument for parameters that the chosen one does not
    take, and what its constructor raises.
    """
    given = os.fspath(data)
    path = first_of(given, Storage(params.get("storage_options")))
    for target in READERS.values():
        reader = _load_class(target)
        arguments = _arguments_for(reader, path, mode, params)
        if arguments is not None:
            named = {name: given if value == path else value for name, value in arguments.items()}
            return _construct(reader, named | params)
    if not is_url(path):
        for name in expanded(path):
            found = glob.glob(name, recursive=True)
            if os.path.lexists(name):
                found = [name, *glob.glob(os.path.join(glob.escape(name), "*"))]
            for file in sorted(found):
                refuse_no_file(file)
            if not found and name != path and not is_glob(name):
                raise DataFormatError(f"the data file '{name}' of '{path}' does not exist; check the path")
    if is_url(path) and (kind := _kind_of_folder(path, params)) is not None:
        return load_reader(kind, params, data=path, mode=mode)
    if not (os.path.exists(path) or is_url(path) or glob.glob(path, recursive=True)):
        home = f" (a shell makes '{os.path.expanduser(path)}' of it)" if path.startswith("~") else ""
        raise ReaderError(
            f"the data '{path}' does not exist{home}; check the path, or name its reader ({_BY_NAME})"
        )
    if is_url(path):
        is_json = path.lower().endswith(".json")
        raise ReaderError(
            f"no reader knows '{path}': a file is known by its ending (.csv, .tsv, .txt, .jsonl, .recordio, "
            f".tar, .parquet), a folder by what lies in it. Name the reader ({_BY_NAME}){_BY_COCO * is_json}"
        )
    raise ReaderError(
        f"no reader knows '{path}': expected an odps:// table, a .py file, RecordIO, a .csv list of images "
        "or other table, a .txt or .jsonl file, a COCO .json, Parquet, tars, a Pascal VOC folder, a folder "
        f"of nothing but tables or text files, or one of images; else name its reader ({_BY_NAME})"
    )


def _kind_of_folder(url: str, params: Mapping[str, Any]) -> str | None:
    """The kind of reader for a folder in a store, by the first objects in it; None for another object."""
    with Storage(params.get("storage_options")).apart() as apart:
        names = [one.name for one in islice(apart.listing(url), _PEEKED)]
        if not names and apart.look(url) is not None:
            return None
    if not names:
        raise ReaderError(
            f"'{url}' does not exist: no object has that name, and none lies below it; check the path"
            + " and the bucket" * is_elsewhere(url)
        )
    if any(found := [*map(_IN_VOC.search, names)]):
        _check_alone(url, names, found)
        return "voc"
    if coco := next((name for name in names if _OF_COCO.search(name)), None):
        raise ReaderError(
            f"'{url}' holds COCO, as '{coco}': name the folder of images and the file{_BY_COCO}"
        )
    data = (name for name in names if not os.path.basename(name).startswith((".", "_")))
    endings = Counter(os.path.splitext(name.lower().removesuffix(".gz"))[1] for name in data)
    kinds = Counter(_IN_FOLDERS[ending] for ending in endings.elements() if ending in _IN_FOLDERS)
    kind = kinds.most_common(1)[0][0] if kinds else None
    others = sorted(ending for ending in endings if _IN_FOLDERS.get(ending) != kind)
    if kind in _ALONE and others:
        raise ReaderError(
            f"'{url}' holds files for the reader {kind!r} and others ({', '.join(others[:4])}): name the "
            "reader, or its files by a glob"
        )
    return kind


def _check_alone(url: str, names: Sequence[str], found: Sequence[re.Match[str] | None]) -> None:
    """Raise ReaderError where data lie beside the folders of Pascal VOC that were `found` in names."""
    roots = sorted({f"{name[: match.start()]}/" for name, match in zip(names, found, strict=True) if match})
    known = [name for name in names if os.path.splitext(name.lower().removesuffix(".gz"))[1] in _IN_FOLDERS]
    if others := [name for name in known if not name.startswith(tuple(roots))]:
        raise ReaderError(
            f"'{url}' holds Pascal VOC in '{roots[0]}' and other data, as '{others[0]}': give one's folder"
        )


def load_reader(
    reader: str,
    params: Mapping[str, Any] | str | None = None,
    data: str | None = None,
    mode: TaskType = TaskType.TRAINING,
) -> AbstractDataReader:
    """Make a reader of the class `module:Class`, or of a kind in `READERS`.

    `params` are keyword arguments, as a mapping or as text for `parse_reader_params`. `data` is what it is to
    read, and goes to its parameter `data_origin`; of one without, to where its `arguments_for` puts it, else
    to the only argument that it needs and `params` lack. Raises InvalidArgument for a name or parameters that
    cannot be used and ReaderUnavailable for a module that cannot be imported.
    """
    arguments = parse_reader_params(params) if isinstance(params, str) else dict(params or {})
    found = _load_class(READERS.get(reader, reader))
    return _construct(found, arguments if data is None else _with_data(found, data, mode, arguments))


def _with_data(reader: Any, data: str, mode: TaskType, given: dict[str, Any]) -> dict[str, Any]:
    parameters = _signature(reader).parameters
    if "data_origin" in parameters:
        return {"data_origin": data} | given
    named: Any = getattr(reader, "arguments_named", lambda data, mode: {})
    arguments = (_arguments_for(reader, data, mode, given) or named(data, mode)) | given
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in variable and name not in arguments
    ]
    if len(needed) == 1:
        return {needed[0]: data} | arguments
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {"data_origin": data} | arguments if takes_any else arguments


def _arguments_for(reader: Any, path: str, mode: TaskType, given: Mapping[str, Any]) -> dict[str, Any] | None:
    ask = getattr(reader, "arguments_for", None)
    try:
        return None if ask is None else ask(path, mode, given)
    except OSError as exc:
        raise ReaderError(f"'{exc.filename or path}' cannot be looked at: {exc.strerror or exc}") from exc


def _load_class(target: str) -> Any:
    found = imported(target, f"reader {target!r}", "Class", READERS)
    if not all(callable(getattr(found, method, None)) for method in ("create_shards", "read_records")):
        raise InvalidArgument(f"{target!r} is no reader: it needs create_shards and read_records")
    return found


def _signature(reader: Any) -> inspect.Signature:
    """Python's, with each of `StorageOptions` by its name for a reader that takes these."""
    found = inspect.signature(reader)
    parameters = list(found.parameters.values())
    if parameters and "StorageOptions" in str(parameters[-1].annotation):
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters[-1:] = [inspect.Parameter(n, kind, default=None) for n in StorageOptions.__annotations__]
    return found.replace(parameters=parameters)


def _construct(reader: Any, arguments: dict[str, Any]) -> AbstractDataReader:
    """Only the call itself is judged here: a TypeError inside a constructor is the reader's own."""
    signature = _signature(reader)
    try:
        signature.bind(**arguments)
    except TypeError as exc:
        takes = ", ".join(signature.parameters) or "none"
        raise InvalidArgument(f"{reader.__name__}: {exc}; its arguments are: {takes}") from exc
    return cast(AbstractDataReader, reader(**arguments))


def parse_reader_params(text: str) -> dict[str, Any]:
    """Parse `key=value` pairs that are separated by semicolons.

    A value is a Python literal (number, string in quotes, list, dict, None, True) or else the text itself
    without the blanks around it; semicolons inside quotes belong to the value. Raises InvalidArgument for
    an entry without `=`, a key that is no identifier, a key given twice and an unclosed quote.
    """
    params: dict[str, Any] = {}
    for place, entry in enumerate(_split(text), 1):
        key, equals, value = (part.strip() for part in entry.partition("="))
        if not equals or not key.isidentifier():
            # its text is not repeated: it may be part of a key to somebody's data
            raise InvalidArgument(
                f"reader parameter {place} is not key=value; separate pairs by ';', quote values with one"
            )
        if key in params:
            raise InvalidArgument(f"reader parameter {key!r} is given twice")
        params[key] = _value(value)
    return params


def _split(text: str) -> list[str]:
    pieces, position = [], 0
    while position < len(text):
        piece = _PIECE.match(text, position)
        if piece is None and text[position] != ";":
            raise InvalidArgument(f"reader parameters: the quote at character {position + 1} is not closed")
        if piece is not None:
            pieces.append(piece.group())
        position = piece.end() if piece is not None else position + 1
    return [piece for piece in pieces if piece.strip()]


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
