"""A whole cluster on one thread: real trainers, the real dispatcher, random faults, every promise watched.

    python tests/simulation/run.py     # twenty small jobs, then a larger one
    python tests/simulation/run.py --trainers 10000 --shards 1000000 --seed 3
    python tests/simulation/run.py --trainers 12 --shards 3000 --seed 7 --faults 300 --restores 3
    python tests/simulation/run.py --models 500 --jobs 2     # jobs with one model, whose weights are watched
    python tests/simulation/run.py --models 1 --seed 17      # one of them again
    python tests/simulation/run.py --mixtures 100            # mixtures whose weights change

A seed and the numbers beside it fix every event; `digest` is of all of them. Time is the cluster's own.
"""

from __future__ import annotations

import argparse
import logging
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # for who runs it from a checkout
sys.path.insert(0, str(Path(__file__).parents[1]))

from sim_cluster import Cluster, Options, Result
from sim_mixture import MixtureModel
from sim_model import BrokenPromise
from sim_model_job import ModelJob, ModelResult, model_options
from sim_trainer import Job

SMALL = {"trainers": 12, "shards": 3000, "faults": 300, "restores": 3}
LARGE = {"trainers": 1000, "shards": 50_000, "faults": 1000, "restores": 0}
SEEDS = range(1, 21)


def options(seed: int, *, trainers: int, shards: int, faults: int, restores: int) -> Options:
    """What kind of job it is depends on the seed, so that a few seeds go through all kinds."""
    large = shards > 200_000
    batch = 8 if large else 4
    job = Job(
        size=8 * shards - 3,
        records_per_shard=8,
        batch=batch,
        epochs=1 if large else 2,
        seed=seed,
        shuffle_shards=seed % 5 != 0,
        shuffle_window=random.Random(seed).choice((None, 1, 2, 16, 10**6)),
        drop_last=seed % 2 == 1,
        bad_every=97 if seed % 3 == 0 else 0,
        breaks=0.002,
        saves=0.0005 if restores else 0.0,
        step_s=1.0 if large else 0.5,
    )
    return Options(seed=seed, trainers=trainers, job=job, faults=faults, restores=restores)


def mixture_options(seed: int, *, shards: int, faults: int, restores: int) -> Options:
    """A mixture of two to ten components, some read many times over, half by turns, under faults."""
    chance = random.Random(f"mixture {seed}")
    sizes = tuple(chance.choice((1, 3, 50, 700, 4000)) for _ in range(chance.randint(2, 10)))
    whole = options(seed, trainers=chance.randint(1, 12), shards=shards, faults=faults, restores=restores)
    job = replace(
        whole.job,
        components=sizes,
        turn=chance.choice((1, 1, 4, 8)),
        epochs=1,
        shuffle_shards=False,
        shuffle_window=None,
        drop_last=False,
        saves=0.01,
    )
    return replace(whole, job=job)


def report(seed: int, result: Result, wall_s: float) -> str:
    """One paragraph."""
    faults = ", ".join(f"{kind} {count}" for kind, count in sorted(result.faults.items()))
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 if sys.platform == "darwin" else 1024)
    twice = "" if result.faults["restore"] else f", trained twice {result.doubled} (at most {result.allowed})"
    return (
        f"seed {seed}: {result.records} records, none lost, none counted twice{twice}\n"
        f"  faults: {faults or 'none'}; {result.processes} trainer processes\n"
        f"  {result.events} events in {result.cpu_s:.1f} s of processor time ({wall_s:.1f} s), "
        f"{result.rate:.0f} a second, peak memory {peak_mb:.0f} MB; "
        f"{result.simulated_s:.0f} s simulated\n"
        f"  digest {result.digest}"
    )


def runs(arguments: argparse.Namespace) -> Iterator[Options]:
    """What was asked for, else the usual ones."""
    if arguments.trainers is None and arguments.seed is None:
        yield from (options(seed, **SMALL) for seed in SEEDS)
        yield options(1, **LARGE)
        return
    trainers = arguments.trainers or SMALL["trainers"]
    shards = arguments.shards or 250 * trainers
    faults = trainers // 2 if arguments.faults is None else arguments.faults
    yield options(
        arguments.seed or 1, trainers=trainers, shards=shards, faults=faults, restores=arguments.restores
    )


def mixtures(seeds: range) -> int:
    """Many of them. Returns the exit status."""
    began = time.process_time()
    sums: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for seed in seeds:
        cluster = Cluster(mixture_options(seed, shards=800, faults=150, restores=3))
        try:
            result = cluster.run()
        except BrokenPromise as broken:
            sums["broken"] += 1
            print(f"seed {seed}: BROKEN: {broken}", flush=True)
            continue
        assert isinstance(cluster.model, MixtureModel)
        sums.update(events=result.events, changes=cluster.model.changes, read=cluster.model.read)
        faults.update(result.faults)
    print(
        f"{len(seeds)} seeds, {sums['broken']} broken: {sums['events']} events in "
        f"{time.process_time() - began:.0f} s of processor time; {sums['changes']} changes of weights, "
        f"{sums['read']} records read, each the one that the book has\n  faults: {_listed(faults)}",
        flush=True,
    )
    return 1 if sums["broken"] else 0


def play(seed: int) -> ModelResult | str:
    """One job with one model; what was broken, as text."""
    logging.getLogger("edl_torch").setLevel(logging.ERROR)
    try:
        return ModelJob(model_options(seed)).run()
    except BrokenPromise as broken:
        return str(broken)


def models(seeds: range, jobs: int) -> int:
    """Many of them, in so many processes. Returns the exit status."""
    began = time.monotonic()
    sums: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    with get_context("spawn").Pool(jobs) as pool:
        for seed, result in zip(seeds, pool.imap(play, seeds), strict=True):
            if isinstance(result, str):
                sums["broken"] += 1
                print(f"seed {seed}: BROKEN: {result}", flush=True)
                continue
            sums.update(
                events=result.events,
                compared=result.compared,
                checkpoints=result.saved,
                incarnations=result.incarnations,
                zombies=result.zombies,
                commits=result.rolled_back,
            )
            faults.update(result.faults)
            ends.update(result.died_of)
            print(f"seed {seed}: {result.events} events, digest {result.digest}", flush=True)
    print(
        f"{len(seeds)} seeds, {sums['broken']} broken: {sums['events']} events in "
        f"{time.monotonic() - began:.0f} s; {sums['incarnations']} incarnations, {sums['zombies']} of them "
        f"superseded alive; {sums['commits']} commits taken back; {sums['checkpoints']} checkpoints, model "
        f"and token compared {sums['compared']} times\n  faults: {_listed(faults)}\n  ends: {_listed(ends)}",
        flush=True,
    )
    return 1 if sums["broken"] else 0


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def tell(line: str) -> None:
    """What is going on."""
    print(f"{time.process_time():.0f} s: {line}", file=sys.stderr, flush=True)


def main() -> int:
    """The exit status is 0 when every promise held; one that did not ends the program with its name."""
    parser = argparse.ArgumentParser(description="a cluster, simulated")
    parser.add_argument("--trainers", type=int)
    parser.add_argument("--shards", type=int, help="default: 250 for each trainer")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--faults", type=int, help="default: one for each two trainers")
    parser.add_argument("--restores", type=int, default=0, help="of the faults, so many go back to a token")
    parser.add_argument(
        "--models", type=int, metavar="SEEDS", help="so many jobs with one model, from --seed on (1)"
    )
    parser.add_argument("--mixtures", type=int, metavar="SEEDS", help="so many mixtures, from --seed on (1)")
    parser.add_argument("--jobs", type=int, default=1, help="processes for --models")
    parser.add_argument(
        "--progress", action="store_true", help="a line on stderr each 10 s of simulated time"
    )
    arguments = parser.parse_args()
    logging.getLogger("edl_torch").setLevel(logging.ERROR)  # leases that were taken back are what it is about
    if arguments.models:
        first = arguments.seed or 1
        return models(range(first, first + arguments.models), arguments.jobs)
    if arguments.mixtures:
        first = arguments.seed or 1
        return mixtures(range(first, first + arguments.mixtures))
    for each in runs(arguments):
        began = time.monotonic()
        cluster = Cluster(each, tell) if arguments.progress else Cluster(each)
        print(report(each.seed, cluster.run(), time.monotonic() - began), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
