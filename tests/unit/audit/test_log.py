"""What a trainer writes down, when it is on its way to the disk, and what reading it back gives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from audited_job import BATCH, SPEC, HandLog, grant_of

from edl_torch.audit import reading
from edl_torch.audit.log import SUFFIX, token_digest
from edl_torch.audit.reading import Answer, Kind, read_logs
from edl_torch.core.calls import Acknowledgement, Failure, GiveBack
from edl_torch.core.codec import object_of
from edl_torch.errors import AuditError
from edl_torch.testing import FakeClock
from edl_torch.trainer.vocabulary import (
    Evidence,
)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def log(tmp_path, clock):
    log = HandLog(tmp_path / "audit", "51f0", "host/0", clock=clock)
    log.joined(SPEC, ledger="L", lineage=1, batch_size=BATCH, member=6)
    log.granted(grant_of(7, 0, 2, 6, attempt=2))
    return log


def ack(upto, task=7, attempt=2):
    return [Acknowledgement(task=task, attempt=attempt, upto=upto)]


def lines(log):
    return log.path.read_text().splitlines()


def only(log):
    (found,) = read_logs([log.path.parent])
    return found


def runs(chapter):
    told = chapter.runs
    return list(zip(told.starts.tolist(), told.ends.tolist(), told.kinds.tolist(), strict=True))


def test_the_form_of_a_log(log, clock):
    clock.advance(1.5)
    log.intent(acknowledgements=ack(5), way=Evidence.STEP)
    log.answered()
    log.intent(acknowledgements=ack(8), way=Evidence.STEP)
    header, joined, way, first, answered, second = lines(log)
    assert (first, answered, second) == ("0 0 2 5 7 2 1 1500", "=", "0 0 5 8 7 2 2 1500")
    assert json.loads(way) == {"event": "way", "way": "step", "ms": 1500}
    assert json.loads(header)["edl_audit"] == 3
    assert json.loads(header)["session"] == "51f0"
    assert json.loads(joined)["dataset"] == json.loads(json.dumps(object_of(SPEC)))
    assert log.path.name == "host_0-51f0.audit"


def test_an_intent_is_written_before_it_returns_and_its_answer_decides(log):
    log.intent(acknowledgements=ack(5))
    assert only(log).chapters[0].runs.answers.tolist() == [Answer.NONE]
    log.answered()
    log.intent(acknowledgements=ack(6))
    log.answered([7])
    log.granted(grant_of(8, 1, 0, 8))
    log.intent(acknowledgements=ack(3, task=8, attempt=1))
    log.lost()
    assert only(log).chapters[0].runs.answers.tolist() == [Answer.ACCEPTED, Answer.REFUSED, Answer.LOST]


def test_a_report_sent_again_is_written_once_and_settled_by_the_later_answer(log):
    log.intent(acknowledgements=ack(5))
    log.unanswered()
    log.intent(acknowledgements=ack(8))
    log.answered()
    (chapter,) = only(log).chapters
    assert runs(chapter) == [(2, 5, Kind.ACKNOWLEDGED), (5, 8, Kind.ACKNOWLEDGED)]
    assert chapter.runs.answers.tolist() == [Answer.ACCEPTED] * 2


def test_a_refusal_of_what_may_have_been_heard_before_leaves_that_open(log):
    log.intent(acknowledgements=ack(8))
    log.unanswered()
    log.intent(acknowledgements=ack(8))
    log.answered([7])
    assert only(log).chapters[0].runs.answers.tolist() == [Answer.LOST]


def test_a_report_that_was_on_its_way_when_its_lease_became_void_is_no_acknowledgement(log):
    log.joined(SPEC, ledger="L", lineage=1, batch_size=BATCH)
    for _ in range(2):
        log.intent(acknowledgements=ack(5))
        log.intent(acknowledgements=ack(5, attempt=1))
        log.answered()
    before, after = only(log).chapters
    assert runs(before) == []
    assert runs(after) == [(2, 5, Kind.VOID)]


def test_of_leases_of_another_lineage_nothing_is_written(log):
    log.joined(SPEC, ledger="L", lineage=2, batch_size=BATCH)
    before = lines(log)
    log.intent(acknowledgements=ack(5))
    log.answered()
    log.restored(None, lineage=3)
    log.intent(acknowledgements=ack(5))
    assert lines(log)[: len(before)] == before
    assert [runs(c) for c in only(log).chapters] == [[]] * 3


def test_an_answer_that_comes_after_the_trainer_joined_anew_is_that_of_the_report_before(log):
    log.intent(acknowledgements=ack(5))
    log.joined(SPEC, ledger="L", lineage=1, batch_size=BATCH)
    log.answered([7])
    assert only(log).chapters[0].runs.answers.tolist() == [Answer.REFUSED]


def test_quarantine_remainders_tokens_and_restores_are_read_back(log):
    log.intent(failures=[Failure(task=7, attempt=2, position=3, reason="gone\nfor \udcff good")])
    log.intent(failures=[Failure(task=7, attempt=2, position=3, reason="again")])
    log.answered()
    log.intent(give_backs=[GiveBack(task=7, attempt=2, start=6, remainder=True)])
    log.intent(give_backs=[GiveBack(task=7, attempt=2, start=5)])
    log.answered()
    log.snapshot("{}")
    log.restored("{}", lineage=4)
    log.granted(grant_of(9, 0, 0, 3))
    log.intent(acknowledgements=ack(3, task=9, attempt=1))
    first, second = only(log).chapters
    assert runs(first) == [(3, 4, Kind.QUARANTINED), (6, 8, Kind.REMAINDER)]
    assert first.runs.answers.tolist()[0] == Answer.ACCEPTED
    reasons = [json.loads(line)["reason"] for line in log.path.read_bytes().splitlines() if b'"quar' in line]
    assert reasons == ["gone\nfor \udcff good"]
    assert (second.opened, second.token, second.before, second.lineage) == (True, "{}", 1, 4)
    (snapshot,) = first.snapshots
    assert (snapshot.ledger, snapshot.lineage, snapshot.member, snapshot.exact) == ("L", 1, 6, True)
    assert (first.member, second.member, snapshot.late) == (6, 6, False)
    assert second.runs.tasks.tolist() == [9]


def test_what_the_loop_had_is_written_once_before_it_is_given_back(log):
    back = GiveBack(task=7, attempt=2, start=4)
    for _ in range(2):  # repeated where no answer came
        log.intent(give_backs=[back], returned=[(7, 4, 6)])
        log.unanswered()
    log.answered()
    (chapter,) = only(log).chapters
    assert runs(chapter) == [(4, 6, Kind.RETURNED)]


def test_what_the_master_took_back_is_written_unless_a_restore_made_it_void_before(log):
    log.void([(7, 2, 4)])
    log.uncounted(3)
    log.padding(2)
    log.restored(None, lineage=2)
    log.void([(7, 4, 6)])
    log.uncounted(2)
    first, second = only(log).chapters
    assert runs(first) == [(2, 4, Kind.VOID)]
    assert [(note.kind, note.said) for note in first.notes] == [("uncounted", 3), ("padding", 2)]
    assert (runs(second), second.notes, second.before) == ([], [], 1)


def test_a_report_that_will_not_be_sent_again_is_not_settled_by_the_answer_to_a_later_one(log):
    log.intent(acknowledgements=ack(5))
    log.unanswered()
    log.dropped(ack(5), [], on_its_way=False)
    log.joined(SPEC, ledger="L", lineage=1, batch_size=BATCH)
    log.granted(grant_of(8, 1, 0, 8))
    log.intent(acknowledgements=ack(3, task=8, attempt=1))
    log.answered()
    assert [chapter.runs.answers.tolist() for chapter in only(log).chapters] == [
        [Answer.LOST],
        [Answer.ACCEPTED],
    ]


def test_a_report_on_its_way_is_settled_by_its_answer_though_later_ones_are_dropped(log):
    log.intent(acknowledgements=ack(5))
    log.dropped(ack(6), [], on_its_way=True)
    log.answered()
    assert only(log).chapters[0].runs.of(Kind.ACKNOWLEDGED).answers.tolist() == [Answer.ACCEPTED]


def test_nothing_is_made_before_a_dataset_is_joined(tmp_path):
    log = HandLog(tmp_path / "audit", "s", "w")
    log.close()
    assert not (tmp_path / "audit").exists()


def test_a_session_has_one_log(log):
    with pytest.raises(AuditError, match="cannot make the audit log"):
        HandLog(log.path.parent, "51f0", "host/0").joined(SPEC, ledger="L", lineage=1, batch_size=1)


def test_an_unusable_directory_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AuditError, match=r"file.*check audit_dir"):
        HandLog(tmp_path / "file", "s", "w").joined(SPEC, ledger="L", lineage=1, batch_size=1)


def test_nothing_follows_a_line_that_was_cut_off(log, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, text: write(file, text[:4]))
    with pytest.raises(AuditError, match="disk is full"):
        log.intent(acknowledgements=ack(5))
    monkeypatch.undo()
    with pytest.raises(AuditError, match="disk is full"):
        log.intent(acknowledgements=ack(6))
    with pytest.raises(AuditError, match="disk is full"):  # nor is what was not written reported again
        log.intent(acknowledgements=ack(5))
    assert runs(only(log).chapters[0]) == []


def test_a_full_device_is_an_error_that_names_the_log(log, tmp_path):
    files = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    (own,) = (link.name for link in files if link.readlink().is_relative_to(tmp_path))
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), int(own))
    with pytest.raises(AuditError, match=r"host_0-51f0.audit' cannot be written.*No space"):
        log.intent(acknowledgements=ack(5))


def test_a_closed_log_refuses_and_closes_again(log):
    log.close()
    log.close()
    with pytest.raises(AuditError, match="closed"):
        log.intent(acknowledgements=ack(5))


def test_facts_of_a_trainer_are_written_as_what_they_say(log):
    log.granted(grant_of(1, 0, 0, 4))
    log.granted(grant_of(2, 0, 1, 4))
    log.intent(acknowledgements=ack(1, task=1, attempt=1), way=Evidence.STEP)
    log.unanswered()
    log.intent(acknowledgements=ack(1, task=1, attempt=1), way=Evidence.STEP)
    log.answered((1,))
    log.intent(failures=[Failure(task=2, attempt=1, position=1, reason="bad")])
    log.lost()
    log.dropped(ack(3, task=2, attempt=1), ((2, 2, 3),), on_its_way=False)
    log.void([(2, 3, 4)])
    log.uncounted(3)
    log.snapshot("{}", exact=False, uncounted=3)
    log.restored(None, lineage=2)
    written = lines(log)[2:]
    assert written[1] == "0 0 0 1 1 1 1 0"
    events = [json.loads(line) for line in (written[0], *written[2:])]
    assert [event.pop("event") for event in events] == (
        ["way", "refused", "quarantined", "lost", "void", "void", "void", "uncounted", "snapshot", "restored"]
    )
    where = {"epoch": 0, "shard": 0, "ms": 0}
    assert events[1] == {"tasks": [], "unsure": [1], "ms": 0}
    assert events[2] == where | {"position": 1, "task": 2, "attempt": 1, "reason": "bad"}
    assert events[4:7] == [
        where | {"task": 2, "start": start, "upto": upto} for start, upto in ((2, 3), (2, 3), (3, 4))
    ]
    position = {"ledger": "L", "lineage": 1, "member": 6}
    said = {"exact": False, "uncounted": 3, "half_stepped": 0}
    assert events[8] == position | said | {"token": token_digest("{}"), "ms": 0}
    assert events[9] == {"lineage": 2, "replaced": 1, "token": None, "ms": 0}


KILLED = """
import os, signal, sys
sys.path[:] = sys.argv[2:]
from audited_job import BATCH, SPEC, HandLog, grant_of
from edl_torch.core.calls import Acknowledgement
log = HandLog(sys.argv[1], "s", "w")
log.joined(SPEC, ledger="L", lineage=1, batch_size=BATCH)
log.granted(grant_of(7, 0, 2, 6))
log.intent(acknowledgements=[Acknowledgement(task=7, attempt=1, upto=5)])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_does_not_lose_an_intent(tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), *sys.path], check=False)
    assert killed.returncode == -signal.SIGKILL
    (log,) = read_logs([tmp_path])
    assert runs(log.chapters[0]) == [(2, 5, Kind.ACKNOWLEDGED)]
    assert (log.chapters[0].epochs.tolist(), log.chapters[0].windows.tolist()) == ([0], [0])


# Damage -----------------------------------------------------------------------------------------------


def test_half_a_line_at_the_end_is_that_of_a_killed_process(log):
    log.intent(acknowledgements=ack(5))
    whole = log.path.read_bytes()
    for tail in (b"0 0 5", b"{", b"=", b"\0" * 40, b"0 0 5 8 7 2 40 1500"):
        log.path.write_bytes(whole + tail)
        assert runs(only(log).chapters[0]) == [(2, 5, Kind.ACKNOWLEDGED)]


def test_a_trainer_killed_in_its_first_line_is_no_log(log):
    log.path.write_bytes(log.path.read_bytes()[:20])
    assert read_logs([log.path.parent]) == []


BAD_LINES = [
    "0 0 2 5 7 2 1",
    "0 0 2 5 7 2 1 1500 3",
    "0 0 2 5  7 2 1",
    "0 0 2 5 7 2 1 ",
    "0 0 2 x 7 2 1 1500",
    "0 0 2 -5 7 2 1 1500",
    "= =",
    "0=0 2 5 7 2 1 1500",
    "",
    "\0\0\0",
    "{",
    '{"event":"whatever"}',
    '{"event":"joined"}',
    '{"event":"remainder","epoch":0}',
    '{"event":"way","way":"magic"}',
    '{"event":"returned","epoch":0}',
    '{"event":"uncounted"}',
    '{"no":"event"}',
    "[]",
]


@pytest.mark.parametrize("line", BAD_LINES)
@pytest.mark.parametrize("block", [1 << 24, 64])
def test_a_damaged_line_in_the_middle_is_named(log, line, block, monkeypatch):
    monkeypatch.setattr(reading, "BLOCK_BYTES", block)
    for upto in (4, 5, 6, 7):
        log.intent(acknowledgements=ack(upto))
        log.answered()
    written = lines(log)
    written.insert(7, line)
    log.path.write_text("".join(f"{text}\n" for text in written))
    with pytest.raises(AuditError, match=r"host_0-51f0.audit', line 8, is damaged"):
        read_logs([log.path.parent])


def test_small_blocks_read_the_same(log, monkeypatch):
    for upto in (4, 5, 6, 7):
        log.intent(acknowledgements=ack(upto))
        log.answered()
    log.snapshot("{}")
    log.intent(acknowledgements=ack(8))
    (whole,) = only(log).chapters
    monkeypatch.setattr(reading, "BLOCK_BYTES", 45)
    (parts,) = only(log).chapters
    assert runs(whole) == runs(parts)
    assert whole.lines.tolist() == parts.lines.tolist() == [3, 5, 7, 9, 12]
    assert whole.runs.settled.tolist() == parts.runs.settled.tolist() == [4, 6, 8, 10, 12]
    assert set(whole.runs.ways.tolist()) == set(parts.runs.ways.tolist()) == {Evidence.STEP}
    assert whole.runs.answers.tolist() == parts.runs.answers.tolist() == [1, 1, 1, 1, 0]


def test_a_file_without_a_header_or_of_another_version_is_refused(log):
    text = log.path.read_text()
    log.path.write_text("0 0 2 5 7 2 1 1500\n")
    with pytest.raises(AuditError, match="line 1, is damaged"):
        read_logs([log.path.parent])
    log.path.write_text(text.replace('"edl_audit":3', '"edl_audit":2'))
    with pytest.raises(AuditError, match="version 2, and this edl-torch reads 3: audit it with the edl-tor"):
        read_logs([log.path.parent])


def test_an_acknowledgement_before_any_dataset_is_damage(log):
    header = lines(log)[0]
    log.path.write_text(f"{header}\n0 0 2 5 7 2 1 1500\n")
    with pytest.raises(AuditError, match="line 2, is damaged"):
        read_logs([log.path.parent])


def test_missing_and_empty_directories_and_copies_are_refused(log, tmp_path):
    with pytest.raises(AuditError, match="not a directory"):
        read_logs([tmp_path / "none"])
    with pytest.raises(AuditError, match="no audit log"):
        read_logs([log.path.parent, tmp_path])
    (tmp_path / f"copy{SUFFIX}").write_bytes(log.path.read_bytes())
    with pytest.raises(AuditError, match="one session"):
        read_logs([log.path.parent, tmp_path])
    assert len(read_logs([log.path.parent, log.path.parent])) == 1


# The audit runs where neither torch nor grpc is installed ---------------------------------------------------


ALONE = """
import sys
import edl_torch.audit.log, edl_torch.audit.verdict, edl_torch.cli.audit
rooms = ("torch", "grpc", "cv2", "edl_torch.client", "edl_torch.rpc", "edl_torch.master", "edl_torch.data")
print([room for room in rooms if room in sys.modules])
"""


def test_the_audit_needs_only_errors_nouns_and_core():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
