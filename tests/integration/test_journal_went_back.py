"""A master whose journal went back in time, with real processes: nobody goes on as if that were nothing."""

from __future__ import annotations

import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import preloaded
import pytest
from master_kit import EDL, MakeMaster, MasterProcess

from edl_torch import DataShardService, ElasticDataLoader, MasterClient, ShardedDataset
from edl_torch.audit.verdict import audit
from edl_torch.errors import JournalWentBack, StaleLease
from edl_torch.master.journal import FILE, LOG, Journal
from edl_torch.readers import MapDatasetReader

SIZE = 400
BATCH = 4
PATIENCE_S = 60.0

Damage = Callable[[Path, Path], None]


class Trainer(threading.Thread):
    """Trains the job in this process. Stops with a batch in hand after so many, until it `may_go_on`."""

    def __init__(self, master: MasterProcess, audit_dir: Path, *stops: int, token: str | None = None) -> None:
        super().__init__(daemon=True)
        self.trained: list[int] = []
        self.tokens: list[str] = []  # taken at each stop, before the batch in hand counts
        self.error: Exception | None = None
        self._audit_dir = audit_dir
        self._stops = list(stops)
        self._token = token
        self._stopped = threading.Semaphore(0)
        self._go_on = threading.Semaphore(0)
        self._client = MasterClient(master.address, "trainer", master_timeout_s=PATIENCE_S)
        self._reader = MapDatasetReader(range(SIZE))
        self.start()

    def run(self) -> None:
        try:
            self._train()
        except Exception as error:  # noqa: BLE001  the top of a thread: `done` raises it
            self.error = error
        finally:
            self._client.close()

    def _train(self) -> None:
        options = {"records_per_shard": 20, "audit_dir": self._audit_dir}
        with DataShardService(BATCH, self._client, reader=self._reader, **options) as service:
            if self._token is not None:
                service.load_state_dict(self._token)
            loader = ElasticDataLoader(ShardedDataset(service, self._reader))
            while not service.finished:
                for batch in loader:
                    self.trained += batch.tolist()
                    if self._stops and len(self.trained) // BATCH == self._stops[0]:
                        self._stops.pop(0)
                        self.tokens.append(service.state_dict())
                        self._stopped.release()
                        assert self._go_on.acquire(timeout=PATIENCE_S)

    def wait_stopped(self) -> None:
        assert self._stopped.acquire(timeout=PATIENCE_S), self.error

    def may_go_on(self) -> None:
        self._go_on.release()

    def done(self) -> Trainer:
        self.join(PATIENCE_S)
        assert not self.is_alive(), "it waits for ever"
        if self.error is not None:
            raise self.error
        return self

    def end(self) -> None:
        """It waits for nobody any more."""
        self.may_go_on()
        self._client.close()
        self.join(PATIENCE_S)
        assert not self.is_alive()


MakeTrainer = Callable[..., Trainer]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[MakeTrainer]:
    """Makes trainers that begin at once, none of which outlives the test."""
    made: list[Trainer] = []

    def make(master: MasterProcess, *stops: int, token: str | None = None) -> Trainer:
        made.append(Trainer(master, tmp_path / "audit", *stops, token=token))
        return made[-1]

    yield make
    for trainer in made:
        trainer.end()


def put_back(state: Path, copy: Path) -> None:
    """A copy of the whole folder, made while the master ran."""
    shutil.rmtree(state)
    shutil.copytree(copy, state)


def put_back_journal_alone(state: Path, copy: Path) -> None:
    """The file, without its log, as one copies it who does not know that there is one."""
    put_back(state, copy)
    (state / LOG).unlink()
    (state / "lock").unlink()


def lose_log(state: Path, copy: Path) -> None:
    (state / LOG).unlink()


def empty_log(state: Path, copy: Path) -> None:
    os.truncate(state / LOG, 0)


def cut_log(state: Path, copy: Path) -> None:
    os.truncate(state / LOG, _last_commit(state) // 2)


def damage_log(state: Path, copy: Path) -> None:
    _overwrite(state / LOG, _last_commit(state) // 2, b"\xff" * 4096)


def lose_last_commit(state: Path, copy: Path) -> None:
    os.truncate(state / LOG, _last_commit(state) - 1)


def _overwrite(path: Path, at: int, what: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(what)


def _last_commit(state: Path) -> int:
    """Where the last transaction of the log ends: frames of 24 bytes and a page, after 32 bytes."""
    log = (state / LOG).read_bytes()
    salts, end = log[16:24], 0
    for start in range(32, len(log) - 4119, 4120):
        if log[start + 8 : start + 16] != salts:
            break
        if log[start + 4 : start + 8] != b"\0\0\0\0":
            end = start + 4120
    return end


@pytest.mark.parametrize(
    "damage",
    [
        *[put_back, lose_log],
        *(
            pytest.param(damage, marks=pytest.mark.long)
            for damage in (cut_log, put_back_journal_alone, empty_log, damage_log, lose_last_commit)
        ),
    ],
)
def test_trainers_of_a_journal_that_went_back_end_with_a_remedy(
    make_master: MakeMaster, begin: MakeTrainer, tmp_path: Path, damage: Damage
) -> None:
    master = make_master("--grace-s", "0.5", durable=True)
    assert master.state is not None
    master.start()
    trainers = [begin(master, 10, 30) for _ in range(2)]
    for trainer in trainers:
        trainer.wait_stopped()
    master.stop()
    master.start()  # so that the file itself knows the dataset
    shutil.copytree(master.state, tmp_path / "copy")
    for trainer in trainers:
        trainer.may_go_on()
    for trainer in trainers:
        trainer.wait_stopped()
    token = trainers[1].tokens[-1]
    master.kill()
    damage(master.state, tmp_path / "copy")
    master.start()
    for trainer in trainers:
        trainer.may_go_on()
        with pytest.raises(StaleLease, match=r"load_state_dict"):
            trainer.done()
    trained = Counter(record for trainer in trainers for record in trainer.trained)
    assert max(trained.values()) == 1, "records were lent twice"
    assert not audit([tmp_path / "audit"])[0].delivered
    shown = status(master)
    assert "SUSPENDED: training: the master's journal is older than what its trainers were told" in shown
    assert "--accept-older-journal" in shown
    assert ("of session" in shown) is (damage is put_back), "else it was known at the start"

    with pytest.raises(JournalWentBack, match="older than what its trainers were told") as refused:
        begin(master).done()  # one that begins without a checkpoint
    assert refused.value.__cause__ is None, "grpc has nothing to add but the same text, twice"
    master.kill()
    master.start()  # it does not forget
    with pytest.raises(JournalWentBack, match="older than what its trainers were told"):
        begin(master).done()

    last = begin(master, token=token).done()
    assert "restored dataset=training" in master.log
    assert len(last.trained) == len(set(last.trained))
    assert audit([tmp_path / "audit"])[0].delivered
    assert "SUSPENDED" not in status(master)
    assert "finished" in status(master)


def status(master: MasterProcess) -> str:
    command = [*EDL, "status", "--addr", master.address]
    return preloaded.run(command, capture_output=True, text=True, timeout=30, check=True).stdout


def test_an_older_journal_that_is_accepted_is_a_new_lineage(
    make_master: MakeMaster, begin: MakeTrainer, tmp_path: Path
) -> None:
    master = make_master("--grace-s", "0.5", durable=True)
    assert master.state is not None
    master.start()
    trainer = begin(master, 10, 30)
    trainer.wait_stopped()
    shutil.copytree(master.state, tmp_path / "copy")
    trainer.may_go_on()
    trainer.wait_stopped()
    master.kill()
    put_back(master.state, tmp_path / "copy")
    master.arguments = (*master.arguments, "--accept-older-journal")
    master.start()
    assert "--accept-older-journal: goes on from the journal as ledger=" in master.log
    trainer.may_go_on()
    with pytest.raises(StaleLease, match=r"load_state_dict"):
        trainer.done()
    other = begin(master).done()
    assert len(other.trained) == len(set(other.trained))
    assert set(trainer.trained) | set(other.trained) == set(range(SIZE)), "nothing is lost"


def test_without_a_journal_there_is_none_to_accept(make_master: MakeMaster) -> None:
    command = [*EDL, "master", "--addr", "127.0.0.1:0", "--accept-older-journal"]
    done = preloaded.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "needs --state" in done.stderr


def test_a_page_that_does_not_say_what_was_written_is_named_at_the_start(
    make_master: MakeMaster, begin: MakeTrainer
) -> None:
    """Its shape is right, so that SQLite has nothing to say."""
    master = make_master(durable=True)
    assert master.state is not None
    master.start()
    trainer = begin(master, 10)
    trainer.wait_stopped()
    master.stop()
    path = master.state / FILE
    content = path.read_bytes()
    at = content.index(b'["head","training"]') + len(b'["head","training"]')
    number = next(place for place in range(at, len(content)) if content[place : place + 1] in b"123456789")
    _overwrite(path, number, b"9" if content[number : number + 1] != b"9" else b"8")
    with suppress(AssertionError):
        master.start()
    assert master.process.wait(PATIENCE_S) == 1
    assert "is damaged: its rows are not what was written" in master.log


def test_a_second_master_is_kept_out_though_the_lock_file_was_removed(make_master: MakeMaster) -> None:
    master = make_master(durable=True)
    assert master.state is not None
    master.start()
    (master.state / "lock").unlink()
    command = [*EDL, "master", "--addr", "127.0.0.1:0", "--state", str(master.state)]
    done = preloaded.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "another master uses the journal" in done.stderr
    with master.client() as client:
        assert client.status().durable


@pytest.mark.parametrize("name", [FILE, LOG])
@pytest.mark.parametrize("replaced", [True, False])
def test_a_master_whose_journal_is_taken_away_stops(
    make_master: MakeMaster, begin: MakeTrainer, tmp_path: Path, name: str, replaced: bool
) -> None:
    master = make_master(durable=True)
    assert master.state is not None
    master.start()
    trainer = begin(master, 10)
    trainer.wait_stopped()
    (master.state / name).rename(tmp_path / "taken")
    if replaced:
        shutil.copy(tmp_path / "taken", master.state / name)
    trainer.may_go_on()
    assert master.process.wait(PATIENCE_S) == 1
    assert "was removed or replaced while the master ran" in master.log.splitlines()[-1]
    assert "Traceback" not in master.log


def test_a_clean_end_leaves_a_whole_journal_without_its_log(
    make_master: MakeMaster, begin: MakeTrainer, tmp_path: Path
) -> None:
    master = make_master(durable=True)
    assert master.state is not None
    master.start()
    trainer = begin(master, 10)
    trainer.wait_stopped()
    master.stop()
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(master.state / FILE, tmp_path / "elsewhere")
    journal = Journal(tmp_path / "elsewhere")
    assert not journal.lost
    journal.close()
    master.start()
    trainer.may_go_on()
    assert len(trainer.done().trained) == SIZE
