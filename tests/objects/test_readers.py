"""Every reader at every place: records and fingerprints are those of the same files here."""

from __future__ import annotations

import gzip
import io
import pickle
import random
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from image_files import encode, render, write_coco, write_manifest, write_voc
from stores import BUCKET, files_below, put, web_server
from tar_files import write_tar

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.checking.check import Cost, cost_of_epoch
from edl_torch.errors import ReaderError, SourceChanged, SourceUnavailable
from edl_torch.readers import (
    CocoCaptionsReader,
    CocoDetectionReader,
    CsvReader,
    ImageFolderReader,
    ImageManifestReader,
    ParquetReader,
    RecordIODataReader,
    RecordIOWriter,
    TarReader,
    TextReader,
    VocReader,
    open_reader,
)
from edl_torch.readers.base import AbstractDataReader, IndexedReader, changed_since, reader_fingerprint
from edl_torch.shard import Shard, Task, TaskType
from edl_torch.testing.check_reader import check_reader, records_equal

ROWS = 1500


@dataclass(frozen=True)
class Case:
    """A reader's files, and it over the place where they are. `names` says that it lists no folder."""

    write: Callable[[Path], object]
    make: Callable[[str, dict[str, Any]], AbstractDataReader]
    names: bool = True


def csv_files(folder: Path) -> None:
    """Two files with quoted line ends, and Windows' line ends in one; a third is packed."""
    chance = random.Random(1)
    for number, end in enumerate(["\n", "\r\n", "\n"]):
        rows = [f'{n},"a ""b""{end}{"x" * chance.randrange(90)}",{n / 4}' for n in range(ROWS // 3)]
        data = ("n,text,half" + end + end.join(rows) + end).encode()
        name, data = ("2.csv.gz", gzip.compress(data)) if number == 2 else (f"{number}.csv", data)
        (folder / name).write_bytes(data)


def text_files(folder: Path) -> None:
    lines = [f"line {n} " + "ä" * (n % 300) for n in range(ROWS)]
    (folder / "0.txt").write_bytes("\r\n".join(lines[: ROWS // 2]).encode())
    (folder / "1.txt").write_bytes(b"\xef\xbb\xbf" + "\n".join(lines[ROWS // 2 :]).encode())
    (folder / "_SUCCESS").write_bytes(b"")


def recordio_files(folder: Path) -> None:
    chance = random.Random(2)
    for number, (dialect, compressor) in enumerate(
        [("python", "snappy"), ("go", "gzip"), ("python", "none")]
    ):
        path = folder / f"{number}.recordio"
        with RecordIOWriter(path, dialect=dialect, compressor=compressor, max_chunk_bytes=1 << 13) as writer:
            for _ in range(ROWS // 3):
                writer.write(chance.randbytes(chance.randrange(400)))


def parquet_files(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for day in range(3):
        (folder / f"day={day}").mkdir()
        rows = {"n": np.arange(500), "text": [f"row {n} of {day}" for n in range(500)]}
        pq.write_table(pa.table(rows), folder / f"day={day}" / "part.parquet", row_group_size=120)


def tar_files(folder: Path) -> None:
    """Tars of three formats; one has no sample."""
    for number, size in enumerate((30, 0, 45)):
        chance = random.Random(number)
        content = [("README", b"nothing")]
        for n in range(size):
            content += [(f"{number}{n:04}.bin", chance.randbytes(chance.choice([10, 3000, 80_000])))]
            content += [(f"{number}{n:04}.cls", b"%d" % (100 * number + n))]
        write_tar(folder / f"{number}.tar", content, format=number)
    (folder / ".hidden.tar").write_bytes(b"")
    (folder / "notes.txt").write_bytes(b"")


# Names that sort otherwise as keys of a store than as files; of the others none is an image of the dataset.
IMAGES = ("a/1.png", "a/10.png", "a/2.PNG", "a/deep/0.png", "a/deep-er/0.png", "a-b/x.png", "a.b/ü é+%20.png")
NO_IMAGES = ("a/.x.png", ".git/x.png", "a/notes.txt", "a/.cache/z.png")


def image_files(folder: Path) -> None:
    for number, name in enumerate(IMAGES + NO_IMAGES):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(encode(render(number), ".png"))


NUMBERS = "/{0..2}"
CASES = {
    "csv": Case(
        csv_files, lambda at, how: CsvReader([f"{at}/{n}.csv" for n in (0, 1)] + [f"{at}/2.csv.gz"], **how)
    ),
    "csv folder": Case(csv_files, lambda at, how: CsvReader(at, **how), names=False),
    "text": Case(text_files, lambda at, how: TextReader(f"{at}/{{0,1}}.txt", **how)),
    "text folder": Case(text_files, lambda at, how: TextReader(at, **how), names=False),
    "recordio": Case(recordio_files, lambda at, how: RecordIODataReader(f"{at}{NUMBERS}.recordio", **how)),
    "recordio folder": Case(recordio_files, lambda at, how: RecordIODataReader(at, **how), names=False),
    "parquet": Case(parquet_files, lambda at, how: ParquetReader(f"{at}/day={{0..2}}/part.parquet", **how)),
    "parquet folder": Case(parquet_files, lambda at, how: ParquetReader(at, **how), names=False),
    "tar": Case(tar_files, lambda at, how: TarReader(f"{at}{NUMBERS}.tar", **how)),
    "tar folder": Case(tar_files, lambda at, how: TarReader(at, **how), names=False),
    "voc": Case(write_voc, lambda at, how: VocReader(f"{at}/VOCdevkit/VOC2012", **how)),
    "voc folder": Case(write_voc, lambda at, how: VocReader(at, **how), names=False),
    "image folder": Case(image_files, lambda at, how: ImageFolderReader(at, **how), names=False),
    "manifest": Case(write_manifest, lambda at, how: ImageManifestReader(f"{at}/manifest.csv", **how)),
    "captions": Case(
        write_coco,
        lambda at, how: CocoCaptionsReader(f"{at}/images", f"{at}/annotations/captions.json", **how),
    ),
    "captions of images": Case(
        write_coco,
        lambda at, how: CocoCaptionsReader(f"{at}/images", f"{at}/annotations/captions.json", "image", **how),
    ),
    "detection": Case(
        write_coco,
        lambda at, how: CocoDetectionReader(
            f"{at}/images", f"{at}/annotations/instances.json", masks=True, **how
        ),
    ),
}


def whole(reader: AbstractDataReader) -> list[list[Any]]:
    """The records of each source."""
    counts = reader.create_shards()
    assert isinstance(counts, dict)
    tasks = [Task(shard=Shard(name=name, start=0, end=count)) for name, count in counts.items()]
    return [list(reader.read_records(task)) for task in tasks]


def without_place(records: list[list[Any]]) -> list[list[Any]]:
    return [[{**one, "__url__": ""} if isinstance(one, dict) else one for one in each] for each in records]


def at_places() -> Iterator[Any]:
    """Each reader at each place. All share the finder and the storage: each reader at a store, and each place
    for one of them, are enough, and the rest are further cases."""
    for kind, place in product(CASES, ("file", "memory", "s3", "http", "gs", "hf")):
        if place == "http" and not CASES[kind].names:  # a web server lists no files
            continue
        if place == "http":
            usual = kind in ("tar", "manifest")
        elif place == "s3":
            usual = f"{kind} folder" not in CASES  # its twin lists, and shares all else
        else:
            usual = place in ("file", "memory") and kind == "image folder"
        yield pytest.param(kind, place, marks=[] if usual else pytest.mark.long, id=f"{kind}-{place}")


@pytest.mark.parametrize(("kind", "place"), list(at_places()), indirect=["place"])
def test_the_records_and_the_fingerprint_are_those_of_the_same_files_here(kind, place, tmp_path, monkeypatch):
    case = CASES[kind]
    monkeypatch.setenv("EDL_INDEX_DIR", str(tmp_path / "kept"))
    (tmp_path / "data").mkdir()
    case.write(tmp_path / "data")
    here = case.make(str(tmp_path / "data"), {})
    at, how = place.of(tmp_path / "data"), {"storage_options": place.options}
    there = case.make(at, how)
    assert records_equal(without_place(whole(there)), without_place(whole(here)))
    assert there.fingerprint() == here.fingerprint()
    assert there.fingerprint(whole=True) == here.fingerprint(whole=True)
    if isinstance(there, IndexedReader):
        order = random.Random(5).sample(range(there.count), there.count)
        begun, loaded = there.begin(order), [there.load(index) for index in order]
        found = loaded if begun is None else [begun.record(number) for number in range(len(order))]
        assert records_equal(found, loaded)
    check_reader(lambda: case.make(at, how))
    with ElasticDataLoader(there, batch_size=16, shuffle=True, collate_fn=len) as loader:
        assert sum(loader) == sum(map(len, whole(here)))


@pytest.mark.parametrize("kind", ["image folder", "manifest", "detection", "voc", "tar"])
def test_a_dry_run_says_what_an_epoch_asks_for(kind, bucket, weed, proxy, tmp_path):
    """The store's log is the judge; readers of blocks are judged in `test_listings`."""
    CASES[kind].write(tmp_path)
    prefix = f"dry-{kind.replace(' ', '-')}"
    put(bucket, {f"{prefix}/{name}": data for name, data in files_below(tmp_path).items()})
    reader = CASES[kind].make(f"s3://{BUCKET}/{prefix}", {"storage_options": weed.options(proxy.url)})
    assert isinstance(reader, IndexedReader)
    sizes = {f"/{BUCKET}/{prefix}/{name}": len(data) for name, data in files_below(tmp_path).items()}
    for shuffled in (False, True):
        order = np.random.default_rng(0).permutation(reader.count) if shuffled else range(reader.count)
        proxy.log.clear()
        cost = cost_of_epoch(reader, shuffled=shuffled)
        assert not proxy.log, "it was to ask for nothing"
        assert sum(1 for _ in reader.load_each(list(map(int, order)))) == reader.count <= 256
        asked = {(unquote(one.path), one.range) for one in proxy.gets()}  # a slow one is sent twice
        ends = [(sizes[path], part.removeprefix("bytes=").split("-")) for path, part in asked]
        found = [int(end[1]) - int(end[0]) + 1 if len(end) == 2 else size for size, end in ends]
        assert cost == Cost(requests=len(found), nbytes=sum(found))


@pytest.mark.parametrize("kind", [kind for kind, case in CASES.items() if not case.names])
def test_a_web_server_lists_no_files(kind, tmp_path):
    with web_server(tmp_path) as url, pytest.raises(ReaderError):
        CASES[kind].make(url, {})


# Requests, faults, changes ----------------------------------------------------------------------------------

CSV = {"dtypes": {"n": "int64", "text": "str"}, "header": True}
BLOCKS: dict[str, tuple[str, Callable[[str, dict[str, Any]], AbstractDataReader], Callable[[Any], int]]] = {
    "csv": ("big.csv", lambda url, how: CsvReader(url, **CSV, **how), lambda row: row["n"]),
    "text": ("big.txt", lambda url, how: TextReader(url, **how), lambda line: int(line.split()[0])),
    "recordio": (
        "big.recordio",
        lambda url, how: RecordIODataReader(url, **how),
        lambda it: int(it.split()[0]),
    ),
    "parquet": ("big.parquet", lambda url, how: ParquetReader(url, **how), lambda row: row["n"]),
}
BIG = 20_000


def write_big(kind: str, path: Path) -> None:
    """Some 3 MB; each record begins with its number."""
    lines = [f"{n} {'x' * 140}" for n in range(BIG)]
    if kind == "csv":
        path.write_text("n,text\r\n" + "\r\n".join(line.replace(" ", ",") for line in lines), newline="")
    elif kind == "text":
        path.write_text("\n".join(lines))
    elif kind == "recordio":
        with RecordIOWriter(path, compressor="none", max_chunk_bytes=20_000) as writer:
            for line in lines:
                writer.write(line.encode())
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        noise = np.random.default_rng(0).bytes(100 * BIG)
        rows = {"n": np.arange(BIG), "x": [noise[100 * n : 100 * n + 100] for n in range(BIG)]}
        pq.write_table(pa.table(rows), path, row_group_size=1000)


@pytest.fixture
def big(request: pytest.FixtureRequest, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of one large file of the kind that is the parameter."""
    monkeypatch.setenv("EDL_INDEX_DIR", str(tmp_path / "kept"))
    kind = request.param
    path = tmp_path / BLOCKS[kind][0]
    write_big(kind, path)
    put(bucket, {f"big/{path.name}": path.read_bytes()})
    return f"s3://{BUCKET}/big/{path.name}"


EACH_KIND = pytest.mark.parametrize(("kind", "big"), [(kind, kind) for kind in BLOCKS], indirect=["big"])


@EACH_KIND
def test_records_that_lie_together_are_few_requests_and_an_index_is_kept(kind, big, weed, proxy):
    _, make, number_of = BLOCKS[kind]
    how = {"storage_options": weed.options(proxy.url)}
    make(big, how)
    proxy.log.clear()
    reader = make(big, how)
    assert len(proxy.ranges()) <= (60 if kind == "parquet" else 3), "its index was kept"
    proxy.log.clear()
    records = reader.read_records(Task(shard=Shard(name=big, start=0, end=BIG)))
    assert [number_of(record) for record in records] == list(range(BIG))
    assert len(proxy.ranges()) <= (21 if kind == "parquet" else 4)
    with DataShardService(
        50, reader=reader, shuffle_shards=True, shuffle_window=4, records_per_shard=500
    ) as service:
        dataset = ShardedDataset(service, reader, shuffle=True)
        proxy.log.clear()
        seen = [
            number_of(record) for batch in ElasticDataLoader(dataset, collate_fn=list) for record in batch
        ]
    assert sorted(seen) == list(range(BIG))
    assert seen != sorted(seen)
    assert len(proxy.gets()) <= 40 + 1 + 20, "the shards of a window are read once"
    proxy.log.clear()
    with ElasticDataLoader(make(big, how), batch_size=50, shuffle=True, collate_fn=list) as loader:
        assert sorted(number_of(record) for batch in loader for record in batch) == list(range(BIG))
    assert len(proxy.gets()) <= 150, "a shuffle in one line mixes windows"


@EACH_KIND
def test_what_the_network_breaks_is_read_again_and_never_quarantined(kind, big, weed, proxy, monkeypatch):
    monkeypatch.setattr("edl_torch.readers.storage.storage.PATIENCE_S", 2.0)
    _, make, number_of = BLOCKS[kind]
    reader = make(big, {"storage_options": weed.options(proxy.url)})
    chance = random.Random(kind)
    kinds = ["503", "500", "reset", "short", "wrong"]
    proxy.fault = lambda request: chance.choice(kinds) if chance.random() < 0.3 else ""
    with DataShardService(50, reader=reader, records_per_shard=1000, max_bad_records=BIG) as service:
        dataset = ShardedDataset(service, reader, on_bad_record="quarantine")
        with ElasticDataLoader(dataset, collate_fn=list) as loader:
            batches = iter(loader)
            seen = [number_of(record) for batch in islice(batches, 300) for record in batch]
            assert seen == list(range(300 * 50))
            proxy.fault = lambda request: "reset"
            with pytest.raises(SourceUnavailable):
                list(batches)
        assert service.progress().quarantined == 0


@EACH_KIND
def test_an_object_that_is_written_over_in_the_middle_ends_the_job(kind, big, weed, bucket, tmp_path):
    _, make, _ = BLOCKS[kind]
    reader = make(big, {"storage_options": weed.options()})
    with DataShardService(50, reader=reader, records_per_shard=1000, max_bad_records=BIG) as service:
        dataset = ShardedDataset(service, reader, on_bad_record="quarantine")
        with ElasticDataLoader(dataset, collate_fn=list) as loader:
            batches = iter(loader)
            next(batches)
            data = (tmp_path / BLOCKS[kind][0]).read_bytes()
            put(bucket, {f"big/{BLOCKS[kind][0]}": data.replace(b"x", b"y")})
            with pytest.raises(SourceChanged, match="of the same size, but not the same"):
                list(batches)
        assert service.progress().quarantined == 0


KINDS = {
    "csv": CsvReader,
    "text": TextReader,
    "tar": TarReader,
    "recordio": RecordIODataReader,
    "parquet": ParquetReader,
}


def untagged(kind: str, digit: str, records: int = 20) -> bytes:
    """A file whose records are a digit; a name in fsspec's memory, where it goes, has no tag."""
    file = io.BytesIO()
    if kind == "tar":
        with tarfile.open(fileobj=file, mode="w") as tar:
            for number in range(records):
                member = tarfile.TarInfo(f"{number:02}.txt")
                member.size = 1
                tar.addfile(member, io.BytesIO(digit.encode()))
        return file.getvalue()
    if kind == "parquet":
        pq.write_table(pa.table({"x": [int(digit)] * records}), file, row_group_size=100)
        return file.getvalue()
    if kind == "recordio":
        with tempfile.TemporaryDirectory() as folder:
            with RecordIOWriter(f"{folder}/x", compressor="none", max_chunk_bytes=7) as writer:
                for _ in range(records):
                    writer.write(digit.encode())
            return Path(folder, "x").read_bytes()
    return b"word\n" + f"{digit}\n".encode() * records


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_changed", [True, False])
def test_an_object_without_a_tag_that_is_written_over_is_seen_by_the_next_look(kind, is_changed):
    """A read sees only another size of it."""
    store = fsspec.filesystem("memory")
    name = f"memory://untagged-{kind}-{is_changed}"
    store.pipe(name, untagged(kind, "1"))
    reader = KINDS[kind](name)
    then = reader_fingerprint(reader)
    store.pipe(name, untagged(kind, "2" if is_changed else "1"))
    copy = pickle.loads(pickle.dumps(reader))  # as a loader worker has, which has not looked yet
    assert bool(changed_since(reader, then)) == bool(changed_since(copy, then)) == is_changed


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_without_a_tag_that_is_shorter_is_another_one_at_once(kind):
    store = fsspec.filesystem("memory")
    name = f"memory://shorter-{kind}"
    store.pipe(name, untagged(kind, "1", 2000))
    reader = KINDS[kind](name)
    store.pipe(name, untagged(kind, "1", 2))
    began = time.monotonic()
    with pytest.raises(SourceChanged, match="has changed since it was listed"):
        reader.read_record(next(iter(reader.create_shards())), 1500)
    assert time.monotonic() - began < 20.0  # of the patience that a busy store gets


def test_readers_are_chosen_by_what_lies_at_a_url(bucket, weed, tmp_path):
    options = {"storage_options": weed.options()}
    for name, case in {
        "csv": csv_files,
        "text": text_files,
        "recordio": recordio_files,
        "voc": write_voc,
        "manifest": write_manifest,
    }.items():
        (tmp_path / name).mkdir()
        case(tmp_path / name)
        put(bucket, {f"chosen/{name}/{key}": data for key, data in files_below(tmp_path / name).items()})
    base = f"s3://{BUCKET}/chosen"
    for url, reader in {
        f"{base}/csv": CsvReader,
        f"{base}/csv/0.csv": CsvReader,
        f"{base}/text": TextReader,
        f"{base}/text/1.txt": TextReader,
        f"{base}/recordio": RecordIODataReader,
        f"{base}/recordio/0.recordio": RecordIODataReader,
        f"{base}/voc/VOCdevkit": VocReader,
        f"{base}/manifest/manifest.csv": ImageManifestReader,
    }.items():
        assert type(open_reader(url, **options)) is reader, url
    assert open_reader(f"{base}/voc/VOCdevkit", TaskType.EVALUATION, **options).name.endswith("Main/val.txt")
    put(bucket, {"chosen/list.txt": f"# mine\r\ncsv/0.csv\r\n\r\n{base}/csv/1.csv\r\n".encode()})
    listed = CsvReader(f"@{base}/list.txt", **options)
    assert list(listed.create_shards()) == [f"{base}/csv/0.csv", f"{base}/csv/1.csv"]
    assert type(open_reader(f"@{base}/list.txt", **options)) is CsvReader
