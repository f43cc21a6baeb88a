"""Mixtures whose trainers and master are killed while their weights change, and what was trained on in
the end."""

from __future__ import annotations

import json
import random
import sys
import uuid
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import preloaded
import pytest
from cases import cases
from master_kit import EDL, MasterProcess
from mixture_process import BATCH, RECORDS, WEIGHTS
from test_mixtures import Book, Found, loader, proven, records_of, turns_of

from edl_torch.cli.main import main
from edl_torch.testing import wait_until

TRAINER = Path(__file__).with_name("mixture_process.py")
LEASE = 8 * BATCH
CHANGES = [
    {"web": 0.1, "code": 0.8, "math": 0.1},
    {"web": 0.5, "code": 0.0, "math": 0.5},
    {"web": 1.0, "code": 1.0, "math": 1.0},
]


class Job:
    """Trainers that come and go around one master."""

    def __init__(self, master: MasterProcess, folder: Path, *, by_turns: bool) -> None:
        self.master = master
        self.client = master.client(master_timeout_s=60)
        self.by_turns = by_turns
        self.folder = folder
        self.trainers: list[Any] = []
        self.killed: set[int] = set()
        self.starts: list[int] = []  # of the segments
        self.workers: list[int] = []  # of loaders

    def start(self, workers: int) -> None:
        place = self._output(len(self.trainers))
        self.workers.append(workers)
        with place.open("w") as output, place.with_suffix(".log").open("w") as log:
            arguments = [self.master.address, str(self.folder / "audit"), str(workers), str(self.by_turns)]
            self.trainers.append(
                preloaded.Popen(
                    [sys.executable, "-W", "ignore", str(TRAINER), *arguments],
                    stdout=output,
                    stderr=log,
                )
            )

    def _output(self, number: int) -> Path:
        return self.folder / f"trainer-{number}"

    def kill(self, number: int) -> None:
        self.killed.add(number)
        self.trainers[number].kill()
        self.trainers[number].wait(20)

    def acknowledged(self) -> int:
        found = self.client.status().datasets
        return found[0].acknowledged if found else 0

    def wait_for(self, records: int) -> None:
        wait_until(lambda: self.acknowledged() >= records, timeout_s=60, poll_s=0.05)

    def set_weights(self, weights: dict[str, float]) -> None:
        self.starts.append(self.client.set_weights("training", weights, key=uuid.uuid4().hex).start)

    def printed(self, number: int) -> Counter[Found]:
        found: Counter[Found] = Counter()
        for line in self._output(number).read_text().splitlines():
            component, turn, record = line.split()
            found[component, int(turn), int(record)] += 1
        return found

    def audit(self) -> tuple[int, dict[str, Any]]:
        done = preloaded.run(
            [*EDL, "audit", str(self.folder / "audit"), "--state", str(self.master.state), "--json"],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert not done.stderr, done.stderr
        (said,) = json.loads(done.stdout)["datasets"]
        return done.returncode, said


@cases("seed, by_turns", [(1, True)], product(range(30), [False, True]))
def test_every_record_of_the_plan_is_trained_on_once_whoever_dies(
    start_master: Callable[..., MasterProcess], tmp_path: Path, seed: int, by_turns: bool
) -> None:
    noise = random.Random(seed)
    # Who dies shortly before the master is missed when its lease ends, and others wait for that in the end.
    master = start_master("--grace-s", "0.1", "--lease-timeout-s", "10", durable=True)
    job = Job(master, tmp_path, by_turns=by_turns)
    for _ in range(3):
        job.start(noise.choice((0, 0, 2)))
    events = ["weights"] * 3 + ["trainer"] * 3 + ["master"] * 2
    noise.shuffle(events)
    changes = iter(CHANGES)
    for number, event in enumerate(events, 1):
        job.wait_for(number * 400)
        if event == "weights":
            job.set_weights(next(changes))
        elif event == "trainer":
            living = [n for n, one in enumerate(job.trainers) if one.poll() is None]
            if living:
                job.kill(noise.choice(living))
            job.start(noise.choice((0, 2)))
        else:
            job.master.kill()
            job.master.start()
    for number, one in enumerate(job.trainers):
        if number not in job.killed:
            assert one.wait(120) == 0, (tmp_path / f"trainer-{number}.log").read_text()[-3000:]

    book, turn = Book(WEIGHTS), BATCH if by_turns else 1
    for start, weights in zip(job.starts, CHANGES, strict=False):
        book.upto(start // turn).leave(weights)
    expected = Counter(turns_of(book, RECORDS // turn, turn))
    printed = {number: job.printed(number) for number in range(len(job.trainers))}
    ended = sum((found for number, found in printed.items() if number not in job.killed), Counter[Found]())
    everything = sum(printed.values(), Counter[Found]())
    assert not ended - expected  # nobody who lived had a record twice, or one that is not in the plan
    assert set(everything) == set(expected)
    assert job.acknowledged() == RECORDS
    status, said = job.audit()
    assert (status, said["verdict"]) == (4, "DELIVERED"), said
    proof = proven(tmp_path / "audit")
    assert Counter(proof.found) == expected
    assert proof.said["records"] == RECORDS
    assert proof.said["missing"] == 0
    # A trainer has two leases at most, and a loader worker two more of its own; what the dead had comes back.
    leases = sum(2 + 2 * workers for workers in job.workers)
    assert proof.said["in_flight"] <= leases * LEASE


def test_the_command_line_gives_it_other_weights(
    start_master: Callable[..., MasterProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    master = start_master()
    with loader(master_client=master.client(), records_per_shard=20) as one:
        where = ["--addr", master.address]
        assert main(["weights", *where, "web=1"]) == 1
        assert "has no mixture 'training' (it has none). One is there when" in capsys.readouterr().err
        loop = iter(one)
        found = records_of(one, next(loop))
        assert main(["weights", *where, "web=1", "code=1"]) == 2
        assert "math: no weight" in capsys.readouterr().err
        assert main(["weights", *where, "web=1", "code=1", "math=x"]) == 2
        assert "'math=x' is no weight" in capsys.readouterr().err
        assert main(["weights", *where, "web=1", "code=1", "math=inf"]) == 2
        assert "'math=inf' is no weight" in capsys.readouterr().err
        assert main(["weights", *where, "web=1", "code=1", "math=2", "web=2"]) == 2
        assert "'web' has two weights, 1 and 2: give it one" in capsys.readouterr().err
        assert main(["weights", *where, "web=1", "code=1", "math=2"]) == 0
        said = capsys.readouterr().out
        start = int(said.partition("from index ")[2].partition(" ")[0])
        assert said == f"training: code 1, math 2, web 1 from index {start} on, in parts of 4\n"
        found += [record for batch in loop for record in records_of(one, batch)]
    book = Book(WEIGHTS).upto(start)
    book.weigh({"web": 1, "code": 1, "math": 2})
    assert found == book.upto(1000).found
