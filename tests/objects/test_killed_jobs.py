"""Jobs over a store whose trainers, loader workers, master and store are killed: an oracle of weights."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import preloaded
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from master_kit import EDL, MasterProcess
from store_trainer import BATCH, EPOCHS
from stores import BUCKET, Proxy, Request, Weed, numbered, put
from tar_files import samples_tar

from edl_torch.readers import RecordIOWriter

RECORDS = 123
BATCHES = EPOCHS * -(-RECORDS // BATCH)
PROGRAM = Path(__file__).with_name("store_trainer.py")


PICTURES = {f"killed/{'ab'[n % 2]}/{n:03d}.png": numbered(n) for n in range(RECORDS)}


@pytest.fixture(scope="module")
def pictures(bucket: Any) -> str:
    put(bucket, PICTURES)
    return f"s3://{BUCKET}/killed"


@pytest.fixture(scope="module")
def learnt_from_files(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """What the model of a job over local files has learnt, which nobody kills."""
    folder = tmp_path_factory.mktemp("files")
    for name, data in PICTURES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    with Job(folder, {"url": str(folder / "killed"), "options": None, "workers": 0, "threads": 0}) as job:
        assert job.trains_to_the_end(), job.said
        return job.learnt()


class Job:
    """A trainer that dies and is started again until the job ends, with a master of its own or one beside."""

    def __init__(self, folder: Path, settings: dict[str, Any], master: MasterProcess | None = None) -> None:
        self.folder, self.master = folder, master
        self._settings = {"records": RECORDS, **settings}
        self.process: subprocess.Popen[str] | None = None
        self._said = folder / "said"

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        if self.master is not None:
            self.master.close()

    def start(self) -> None:
        """Begin where the last checkpoint is."""
        address = {} if self.master is None else {"EDL_MASTER_ADDR": self.master.address}
        with self._said.open("a") as said:
            self.process = preloaded.Popen(
                [sys.executable, str(PROGRAM), str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env={**os.environ, **address, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        assert self.process.stdin is not None
        with self.process.stdin as stdin:
            json.dump(self._settings, stdin)

    def trains(self, batches: int) -> bool:
        """Wait until so many more are trained on. Whether they were before the trainer ended."""
        if self.process is None:
            self.start()
        assert self.process is not None
        assert self.process.stdout is not None
        return sum(1 for _ in islice(self.process.stdout, batches)) == batches

    def end(self, *, kill: bool = True) -> int:
        """Its exit status; its loader workers may live on for a while."""
        if self.process is None:
            return 0
        process, self.process = self.process, None
        if kill:
            process.kill()
        status = process.wait(120)
        assert process.stdout is not None
        process.stdout.close()
        return status

    def loader_workers(self) -> list[int]:
        """Forks of the trainer."""
        assert self.process is not None
        of_trainer = Path(f"/proc/{self.process.pid}")
        children = " ".join(each.read_text() for each in of_trainer.glob("task/*/children")).split()
        own = (of_trainer / "cmdline").read_bytes()
        return [int(pid) for pid in children if Path(f"/proc/{pid}/cmdline").read_bytes() == own]

    def trains_to_the_end(self) -> bool:
        """Whether it comes to its end, as nobody kills it."""
        self.trains(sys.maxsize)
        return self.end(kill=False) == 0

    def learnt(self) -> torch.Tensor:
        found: torch.Tensor = torch.load(self.folder / "model.pt", weights_only=True)["learnt"]
        return found

    @property
    def said(self) -> str:
        return self._said.read_text()[-4000:]


class Deaths:
    """Kills at batches that a seed draws; the job goes on after each."""

    def __init__(self, seed: int, job: Job, weed: Weed, proxy: Proxy, away_s: float) -> None:
        self._chance, self._job, self._weed, self._proxy = random.Random(seed), job, weed, proxy
        self._away_s = away_s
        self._back: threading.Timer | None = None
        self._deaths = 3
        self._lock = threading.Lock()
        proxy.fault = self._fault

    def _fault(self, request: Request) -> str:
        with self._lock:
            if self._chance.random() < 0.05:
                return self._chance.choice(("503", "reset", "short", "500", "wrong"))
        return ""

    def kill_all(self) -> None:
        """Kill each kind once and the trainer twice, in an order that the seed says."""
        kinds = ["trainer", "trainer", "worker", "store", *["master"] * (self._job.master is not None)]
        self._chance.shuffle(kinds)
        for kind in kinds:
            after = self._chance.randrange(1, BATCHES // len(kinds))
            while not self._job.trains(after):  # it has died of what was killed before
                assert self._job.end(kill=False) != 0, "the job ended before all deaths"
            self._kill(kind)
        while not self._job.trains_to_the_end():
            assert self._deaths > 0, self._job.said
            self._deaths -= 1
        if self._back is not None:
            self._back.join()

    def _kill(self, kind: str) -> None:
        if kind == "trainer":
            assert self._job.end() == -9
        elif kind == "worker":
            for pid in self._job.loader_workers()[:1]:
                os.kill(pid, signal.SIGKILL)
        elif kind == "master":
            assert self._job.master is not None
            self._job.master.kill()
            self._job.master.start()
        else:
            self._weed.stop()
            self._back = threading.Timer(self._away_s, self._weed.start)
            self._back.start()


def proves(job: Job) -> bool:
    """Whether its audit does."""
    journal = () if job.master is None else ("--state", str(job.master.state))
    command = [*EDL, "audit", str(job.folder / "audit"), *journal, "--json"]
    done = preloaded.run(command, capture_output=True, text=True, timeout=120)
    (said,) = json.loads(done.stdout)["datasets"]
    return (done.returncode, said["verdict"]) == (0, "PROVEN")


LONG = pytest.mark.long
SEEDS = [1, *(pytest.param(seed, marks=LONG) for seed in (0, *range(2, 52)))]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_model_has_learnt_what_it_learns_from_files(
    weed, proxy, pictures, learnt_from_files, tmp_path, seed
):
    chance = random.Random(f"kind {seed}")
    workers, threads = chance.choice(((0, 0), (2, 0), (2, 0), (0, 2), (1, 2)))
    away_s = 2.0 if seed < 2 else chance.uniform(1, 30)
    settings = {"url": pictures, "options": weed.options(proxy.url), "workers": workers, "threads": threads}
    master = MasterProcess(tmp_path, "--grace-s", "0.2", state=tmp_path / "state") if seed % 2 else None
    if master is not None:
        master.start()
    with Job(tmp_path, settings, master) as job:
        Deaths(seed, job, weed, proxy, away_s).kill_all()
        assert torch.equal(job.learnt(), learnt_from_files)
    assert (learnt_from_files == EPOCHS).all()
    assert proves(job)


def write_blocks(kind: str, path: Path) -> None:
    """Records that tell their number, with lines that end as Windows' do."""
    lines = [f"{n} {'x' * (n % 70)}" for n in range(RECORDS)]
    if kind == "csv":
        path.write_bytes(("n,x\r\n" + "\r\n".join(line.replace(" ", ",x") for line in lines)).encode())
    elif kind == "tar":
        samples_tar(path, RECORDS)
    elif kind == "txt":
        path.write_bytes("\r\n".join(lines).encode())
    elif kind == "recordio":
        with RecordIOWriter(path, max_chunk_bytes=500) as writer:
            for line in lines:
                writer.write(line.encode())
    else:
        pq.write_table(pa.table({"n": np.arange(RECORDS)}), path, row_group_size=20)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["csv", "txt", "recordio", "parquet", "tar"])
def test_readers_of_blocks_learn_each_record_as_often(weed, proxy, bucket, tmp_path, kind):
    path = tmp_path / f"blocks.{kind}"
    write_blocks(kind, path)
    put(bucket, {path.name: path.read_bytes()})
    settings = {
        "url": f"s3://{BUCKET}/{path.name}",
        "options": weed.options(proxy.url),
        "workers": 2,
        "threads": 0,
    }
    with Job(tmp_path, settings) as job:
        Deaths(len(kind), job, weed, proxy, 2.0).kill_all()
        assert (job.learnt() == EPOCHS).all()
    assert proves(job)


def test_each_record_is_one_request(weed, proxy, pictures, learnt_from_files, tmp_path):
    """Of loader workers, too, without faults."""
    settings = {"url": pictures, "options": weed.options(proxy.url), "workers": 2, "threads": 0}
    with Job(tmp_path, settings) as job:
        assert job.trains_to_the_end(), job.said
        assert torch.equal(job.learnt(), learnt_from_files)
    assert EPOCHS * RECORDS <= len(proxy.gets()) <= 1.05 * EPOCHS * RECORDS
