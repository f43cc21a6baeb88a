"""A master with a journal, killed at any moment and started again: what it answered stands."""

from __future__ import annotations

import random
import resource
import signal
import subprocess
import threading
import time
from collections import Counter

import preloaded
import pytest
from fences import Onlooker, fenced
from master_kit import EDL, write_rows_reader

from edl_torch.client.grpc.client import MasterClient
from edl_torch.core.calls import (
    NEW_PASS,
    Acknowledgement,
    LeaseCall,
    PassState,
    RegisterCall,
    Registration,
    ReportCall,
    RestoreCall,
)
from edl_torch.errors import MasterUnavailable, StaleLease
from edl_torch.shard import Source
from edl_torch.testing import wait_until
from edl_torch.testing.fake_master import Listening


@pytest.fixture
def master(make_master):
    return make_master(durable=True)


def register(client, session, size, *, per=4, **options):
    registration = Registration(
        name="d", sources=(Source(name="", count=size),), records_per_shard=per, **options
    )
    call = RegisterCall(session=session, worker_id=client.worker_id, batch_size=2, registration=registration)
    answer = client.call(call)
    FENCES[session] = answer.fence
    return answer


FENCES = {}  # of the sessions of the test that runs


def lease_call(session, request, **options):
    options = {"count": 1, "epoch": NEW_PASS} | fenced(FENCES[session], options)
    return LeaseCall(session=session, dataset="d", request=request, **options)


def report_call(session, request, grants, **options):
    done = tuple(Acknowledgement(task=g.task, attempt=g.attempt, upto=g.slice.stop) for g in grants)
    options = fenced(FENCES[session], options)
    return ReportCall(session=session, dataset="d", request=request, acknowledgements=done, **options)


class Trainer(threading.Thread):
    """A session that leases and reports as fast as it is answered, and repeats some of its calls."""

    def __init__(self, address, name, size, seed):
        super().__init__(name=name, daemon=True)
        self.client = MasterClient(address, name, master_timeout_s=60.0)
        self.trained = []
        self.tasks = []
        self.error = None
        self._random = random.Random(seed)
        register(self.client, name, size)
        self.client.attend(name, FENCES[name].member, Listening(FENCES[name].member))

    def run(self):
        try:
            for request in range(1, 100_000):
                call = lease_call(self.name, request, count=3)
                answer = self._ask(lambda call=call: self.client.call(call, 1.0))
                if answer.state is PassState.FINISHED:
                    return
                report = report_call(self.name, request, answer.grants)
                told = self._ask(lambda report=report: self.client.call(report))
                assert told.stale == ()
                self.tasks += [grant.task for grant in answer.grants]
                self.trained += [grant.slice for grant in answer.grants]
        except Exception as error:  # the top of a thread
            self.error = error
            raise

    def _ask(self, action):
        answer = action()
        if self._random.random() < 0.3:
            assert getattr(action(), "grants", None) == getattr(answer, "grants", None), "a repeat"
        return answer


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_killed_at_any_moment_it_loses_nothing_and_lends_nothing_twice(master, seed):
    size = 3_000
    chance = random.Random(seed)
    print(f"seed {seed}")
    master.start()
    trainers = [Trainer(master.address, name, size, seed) for name in ("a", "b", "c")]
    for trainer in trainers:
        trainer.start()

    def leases():
        assert all(trainer.is_alive() for trainer in trainers), master.log
        return sum(len(trainer.tasks) for trainer in trainers)

    for _ in range(4):  # of 750 leases at the least
        more = leases() + chance.randint(1, 150)
        wait_until(lambda more=more: leases() >= more, timeout_s=60, poll_s=0.001)
        master.kill()
        master.start()
    for trainer in trainers:
        trainer.join(60)
        assert not trainer.is_alive(), master.log
        assert trainer.error is None
    taken = Counter(s.shard * 4 + p for t in trainers for s in t.trained for p in range(s.skip, s.stop))
    assert taken == Counter(range(size))
    tasks = [task for trainer in trainers for task in trainer.tasks]
    assert len(tasks) == len(set(tasks)), "a task id was used again"
    status = trainers[0].client.status()
    assert status.durable
    assert (status.datasets[0].finished, status.datasets[0].acknowledged) == (True, size)
    for trainer in trainers:
        trainer.client.close()


def test_a_restart_is_invisible_but_for_the_time_it_takes(master):
    """Answers are repeated, leases live on, the lineage and the closed pages of the book stay."""
    master.start()
    client = MasterClient(master.address, "w")
    register(client, "a", 64)
    first = client.call(lease_call("a", 1, count=2))
    report = report_call("a", 1, first.grants[:1])
    told = client.call(report)
    onlooker = Onlooker(client, "d")
    token = onlooker.snapshot()
    master.kill()
    master.start()
    assert "resumed" in master.log
    assert client.call(lease_call("a", 1, count=2)) == first
    assert client.call(report) == told
    assert onlooker.snapshot() == token
    restore = RestoreCall(session="onlooker", dataset="d", fence=onlooker.fence, request=1, token=token)
    lineage = client.call(restore)
    assert lineage > 1
    master.kill()
    master.start()
    assert client.call(restore) == lineage, "a repeat"
    with pytest.raises(StaleLease, match=f"lineage {lineage}"):
        client.call(report_call("a", 2, first.grants))
    assert client.call(lease_call("a", 2, lineage=lineage)).grants[0].task > first.grants[-1].task
    client.close()


def test_journalled_leases_live_one_full_timeout_after_a_restart(make_master):
    master = make_master("--lease-timeout-s", "1.5", "--grace-s", "0.1", durable=True)
    master.start()
    client = MasterClient(master.address, "w")
    register(client, "a", 8)
    (grant,) = client.call(lease_call("a", 1)).grants
    heard = time.monotonic()
    master.kill()
    # Longer than the session may be silent: but nobody was there to hear it.
    wait_until(lambda: time.monotonic() - heard > 1.5)
    started = time.monotonic()
    master.start()
    leased = client.dataset_status("d").leased
    assert leased == grant.slice.limit or time.monotonic() - started > 1.5, "it was given up too soon"
    wait_until(lambda: not client.status().trainers, timeout_s=20)
    assert time.monotonic() - started > 1.5
    assert client.dataset_status("d").todo == 8
    master.kill()
    client.close()


def test_sigterm_commits_what_is_left_and_the_next_one_goes_on(master):
    master.start()
    client = MasterClient(master.address, "w")
    register(client, "a", 8)
    answer = client.call(lease_call("a", 1))
    master.process.send_signal(signal.SIGTERM)
    assert master.process.wait(60) == 0
    master.process.communicate()
    assert sorted(path.name for path in master.state.iterdir()) == ["journal.sqlite3", "lock"]
    master.start()
    assert client.call(lease_call("a", 1)) == answer
    client.close()


def test_ten_thousand_leases_in_flight_are_served_again(master):
    master.start()
    client = MasterClient(master.address, "w")
    for number in range(10):
        session = f"s{number}"
        register(client, session, 10**9, per=8)
        for request in range(1, 11):
            assert len(client.call(lease_call(session, request, count=100)).grants) == 100
    answer = client.call(lease_call("s9", 10, count=100))
    assert client.dataset_status("d").leases == 10_000
    master.kill()
    master.start()
    assert client.dataset_status("d").leases == 10_000
    assert client.call(lease_call("s9", 10, count=100)) == answer
    client.close()


def test_two_masters_cannot_share_a_journal(master):
    master.start()
    done = run_master(master.state)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("edl-torch: error: another master (process ")
    assert str(master.state) in done.stderr


def run_master(state, *arguments):
    command = [*EDL, "master", "--addr", "127.0.0.1:0", "--state", str(state), *arguments]
    return preloaded.run(command, capture_output=True, text=True, timeout=60)


def test_without_a_state_folder_it_says_once_that_it_is_not_durable(start_master):
    master = start_master()
    assert not master.client().status().durable
    master.stop()
    assert master.log.count("not durable") == 1


def test_a_dataset_of_the_command_line_must_be_that_of_the_journal(tmp_path, monkeypatch, make_master):
    reader = write_rows_reader(tmp_path, monkeypatch)

    def arguments(rows, epochs):
        data = ("--training-data", "t", *reader, "--custom-data-reader-params", f"rows={rows}")
        return *data, "--num-epochs", str(epochs)

    master = make_master(*arguments(30, 2), durable=True)
    master.start()
    master.kill()
    done = run_master(master.state, *arguments(40, 2))
    assert done.returncode == 1
    assert "size: registered 30, asked 40" in done.stderr.splitlines()[-1]
    master.arguments = arguments(30, 5)
    master.start()
    with MasterClient(master.address, "w") as client:
        assert client.dataset_status("training").num_epochs == 2
    master.kill()
    assert "goes on as it is: num_epochs: registered 2, asked 5" in master.log


# A disk that does not play ----------------------------------------------------------------------------------


def fill(client, master):
    """Lease until the master is gone; returns the answers that came. One that is only late is asked again."""
    answers, late = [], 0
    register(client, "s", 10**9, per=8)
    while len(answers) < 5000:
        try:
            answers.append(client.call(lease_call("s", len(answers) + 1, count=100)))
        except MasterUnavailable:
            if master.process.poll() is not None:
                return answers
            late += 1
            assert late < 40, "the master neither answers nor ends"
    raise AssertionError("the disk never became full")


def expect_clean_stop(master):
    assert master.process.wait(20) == 1
    master.process.communicate()
    last = master.log.splitlines()[-1]
    assert last.startswith("edl-torch: error: cannot write the journal in ")
    assert "Traceback" not in master.log


def expect_all_of(answers, client):
    tasks = [grant.task for answer in answers for grant in answer.grants]
    assert tasks == list(range(1, len(tasks) + 1))
    again = client.call(lease_call("s", len(answers), count=100))
    assert again == answers[-1]
    assert client.dataset_status("d").leases >= len(tasks)


def test_a_file_that_may_not_grow_stops_the_master_cleanly_and_loses_nothing_answered(master):
    limit = 400_000

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    master.start(preexec_fn=limited)
    client = MasterClient(master.address, "w", master_timeout_s=0.5)
    answers = fill(client, master)
    expect_clean_stop(master)
    client.close()
    master.start()
    with MasterClient(master.address, "w") as client:
        expect_all_of(answers, client)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB, where this user may make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True
    )
    if made.returncode:
        pytest.skip("mounting a file system is not permitted")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)  # a failed test may have left a master in it


def test_a_full_disk_stops_the_master_cleanly_and_loses_nothing_answered(small_disk, make_master):
    master = make_master(durable=True)
    master.state = small_disk / "state"
    master.start()
    client = MasterClient(master.address, "w", master_timeout_s=0.5)
    answers = fill(client, master)
    expect_clean_stop(master)
    client.close()
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    master.start()
    with MasterClient(master.address, "w") as client:
        expect_all_of(answers, client)
    master.kill()


def test_a_read_only_disk_is_refused_at_the_start(tmp_path, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    done = run_master(small_disk / "state")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("edl-torch: error: cannot keep a journal in ")
    assert "Read-only file system" in done.stderr
