"""The embedded master: the same answers without a server."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from edl_torch.core.calls import Acknowledgement, GiveBack, PassState
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.errors import ServiceClosed
from edl_torch.master.embedded import LocalMaster
from edl_torch.testing import wait_until
from edl_torch.testing.fake_master import Listening


@pytest.fixture
def master():
    return LocalMaster(dispatcher=Dispatcher(ledger_id="ledger"))


@pytest.fixture
def grant(master, calls):
    """The lease of "a", which has all records; "b" has registered, too."""
    for session in "ab":
        master.call(calls.register(session, size=2))
    (grant,) = master.call(calls.lease(1, "a")).grants
    return grant


def drain(master, calls, session):
    """Lease and acknowledge until the data is finished; the slices, in order."""
    slices, request = [], 0
    while True:
        request += 1
        answer = master.call(calls.lease(request, session, count=2), wait_s=1.0)
        if answer.state is not PassState.OPEN:
            return slices
        slices += [g.slice for g in answer.grants]
        done = tuple(
            Acknowledgement(task=g.task, attempt=g.attempt, upto=g.slice.stop) for g in answer.grants
        )
        master.call(calls.report(request, session, acknowledgements=done))


def test_two_sessions_drain_a_dataset_exactly_once(master, calls):
    taken = {}
    for session in "ab":
        master.call(calls.register(session, size=101))
    threads = [threading.Thread(target=lambda s=s: taken.update({s: drain(master, calls, s)})) for s in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    seen = sorted(s.shard * 4 + p for slices in taken.values() for s in slices for p in range(s.skip, s.stop))
    assert seen == list(range(101))
    assert master.dataset_status("d").finished


def test_sessions_tell_what_they_have_kept_back_before_anything_is_answered_but_reports(master, calls):
    master.call(calls.register("a", size=80, records_per_shard=40))
    (grant,) = master.call(calls.lease(1, "a")).grants
    master.call(calls.register("b", size=80, records_per_shard=40))
    told = []

    def tell():
        told.append(len(told) + 1)
        done = Acknowledgement(task=grant.task, attempt=grant.attempt, upto=told[-1])
        master.call(calls.report(told[-1], "a", acknowledgements=(done,)))

    listening = Listening(1)
    listening.tell = tell
    master.attend("a", 1, listening)
    begun = len(told)
    assert master.dataset_status("d").acknowledged == begun + 1
    assert master.status().datasets[0].acknowledged == begun + 2
    master.call(calls.report(9, "b"))
    assert len(told) == begun + 2
    master.call(calls.lease(1, "b"))
    assert len(told) == begun + 3
    master.leave("a", 1)
    master.status()
    assert len(told) == begun + 4, "with its goodbye"


def test_status_has_what_sessions_have_measured_by_now(master, calls):
    master.call(calls.register("a", size=2))
    assert master.status().trainers[0].measures is None
    listening = Listening(1)
    master.attend("a", 1, listening)
    for batches in (1, 2):
        listening.measuring.reported(1)
        assert master.status().trainers[0].measures.batches == batches


def test_waiting_lease_wakes_when_records_come_back(master, calls, grant):
    wanted = threading.Event()
    master.attend("a", 1, Listening(1, lambda dataset: wanted.set()))
    answers = []
    waiting = threading.Thread(
        target=lambda: answers.append(master.call(calls.lease(1, "b", epoch=0), wait_s=20))
    )
    waiting.start()
    assert wanted.wait(60)
    back = GiveBack(task=grant.task, attempt=grant.attempt, start=0)
    master.call(calls.report(1, "a", give_backs=(back,)))
    waiting.join(60)
    assert [g.slice for g in answers[0].grants] == [grant.slice]


def test_waiting_ends_with_an_empty_answer_of_an_open_pass(master, calls, grant):
    assert master.call(calls.lease(1, "b", epoch=0), wait_s=0.01).nothing_yet


def test_close_ends_waiting_calls(master, calls, grant):
    caught = []

    def wait():
        try:
            master.call(calls.lease(1, "b", epoch=0), wait_s=20)
        except ServiceClosed as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: master._dispatcher._waiters.get("d"))
    master.close()
    thread.join(60)
    assert len(caught) == 1
    master.leave("b", 2)
    with pytest.raises(ServiceClosed):
        master.status()


def test_embedded_master_imports_neither_grpc_nor_torch():
    code = (
        "import sys, edl_torch.master.embedded as e; e.LocalMaster().status(); "
        "found = {'grpc', 'torch', 'cv2', 'google.protobuf'} & set(sys.modules); "
        "sys.exit(str(found) if found else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_master_whose_change_a_handler_broke_off_answers_nothing_more():
    def terminated(dispatcher, now):
        raise SystemExit

    master = LocalMaster()
    with pytest.raises(SystemExit):
        master.apply(terminated)
    with pytest.raises(ServiceClosed, match="a change of the embedded master was cut off"):
        master.status()
