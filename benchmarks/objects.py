"""Processor time of a client for each object that it reads from an S3 store, beside other clients.

    python benchmarks/objects.py --endpoint http://127.0.0.1:8333 --key … --secret … --bucket bucket

It puts `--count` objects of `--size` bytes there, and reads all of them with each client in turn, in
`--rounds` rounds; the order of the clients changes from round to round. The time is this process' alone, of
all its threads: the store must run elsewhere, and may run on the same machine. Each client has as many
requests under way.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from edl_torch.readers.storage import Storage

Client = Callable[[], int]  # reads all, and returns how many bytes came


def main() -> None:
    """Print medians and quartiles, in milliseconds an object."""
    options = parse()
    names = [f"objects/{number:06d}" for number in range(options.count)]
    client = boto3_client(options)
    body = os.urandom(options.size)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: client.put_object(Bucket=options.bucket, Key=name, Body=body), names))
    made = {
        "obstore, bare": bare(options, names),
        "edl_torch": ours(options),
        "boto3": boto3s(options, client, names),
        "s3fs": s3fs(options, names),
    }
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    for number in range(options.rounds + 1):
        order = list(made)[number % len(made) :] + list(made)[: number % len(made)]
        for name in order:
            began, used = time.perf_counter(), processor_s()
            assert made[name]() == options.count * options.size
            if number:  # the first round opens connections
                spent[name].append((processor_s() - used, time.perf_counter() - began))
    base = statistics.median(used for used, _ in spent["obstore, bare"])
    for name, rounds in spent.items():
        each_ms = [1000 * used / options.count for used, _ in rounds]
        wall_ms = statistics.median(1000 * wall / options.count for _, wall in rounds)
        low, middle, high = statistics.quantiles(each_ms, n=4)
        ratio = middle * options.count / 1000 / base
        print(
            f"{name:14} {middle:.3f} [{low:.3f} … {high:.3f}] ms of processor, {wall_ms:.3f} by the clock, "
            f"{ratio:.2f} × bare"
        )


def bare(options: argparse.Namespace, names: list[str]) -> Client:
    """A loop over obstore in threads."""
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        options.bucket,
        endpoint=options.endpoint,
        access_key_id=options.key,
        secret_access_key=options.secret,
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
    """What readers ask."""
    storage = Storage({"endpoint_url": options.endpoint, "key": options.key, "secret": options.secret})
    found = list(storage.listing(f"s3://{options.bucket}/objects"))
    return lambda: sum(map(len, storage.read_many([(one, 0, one.size) for one in found])))


def boto3_client(options: argparse.Namespace) -> Any:
    """A client with as many connections."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=options.endpoint,
        aws_access_key_id=options.key,
        aws_secret_access_key=options.secret,
        region_name="us-east-1",
        config=Config(max_pool_connections=options.under_way),
    )


def boto3s(options: argparse.Namespace, client: Any, names: list[str]) -> Client:
    """boto3 in threads."""

    def read(name: str) -> int:
        return len(client.get_object(Bucket=options.bucket, Key=name)["Body"].read())

    def run() -> int:
        with ThreadPoolExecutor(options.under_way) as pool:
            return sum(pool.map(read, names))

    return run


def s3fs(options: argparse.Namespace, names: list[str]) -> Client:
    """fsspec's file system, many objects at once."""
    from s3fs import S3FileSystem

    async def read() -> int:
        files = S3FileSystem(
            key=options.key,
            secret=options.secret,
            endpoint_url=options.endpoint,
            asynchronous=True,
            config_kwargs={"max_pool_connections": options.under_way},
            skip_instance_cache=True,
        )
        session = await files.set_session()
        gate = asyncio.Semaphore(options.under_way)

        async def one(name: str) -> int:
            async with gate:
                return len(await files._cat_file(f"{options.bucket}/{name}"))

        total = sum(await asyncio.gather(*map(one, names)))
        await session.close()
        return total

    return lambda: asyncio.run(read())


def processor_s() -> float:
    """What this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--secret", required=True)
    parser.add_argument("--bucket", default="bucket")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--size", type=int, default=100_000)
    parser.add_argument("--under-way", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


if __name__ == "__main__":
    main()
