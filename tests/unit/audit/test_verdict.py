"""What is proven, what is refuted, and how the records are called."""

from __future__ import annotations

import time
from dataclasses import asdict, replace

import numpy as np
import pytest
from audited_job import SMALL, WORD, Job, Writer, findings, one
from hypothesis import given
from hypothesis import strategies as st

from edl_torch.audit import log, models
from edl_torch.audit.chain import FinalWord
from edl_torch.audit.intervals import Intervals, covered
from edl_torch.audit.log import LEDGERS, write_event
from edl_torch.audit.models import are_replicas, is_copy
from edl_torch.audit.reading import Seen
from edl_torch.audit.verdict import Outcome, audit
from edl_torch.cli.main import main
from edl_torch.cli.verdict_words import grounds
from edl_torch.core.calls import Failure
from edl_torch.core.codec import object_of
from edl_torch.errors import AuditError
from edl_torch.shard import DatasetSpec, Source
from edl_torch.trainer.vocabulary import ModelSeen


def test_a_record_in_quarantine_that_another_lease_trained_on_is_doubled(tmp_path):
    first, second = Writer(tmp_path, "one"), Writer(tmp_path, "two")
    first.take(1, 0, 0, 8)
    first.log.intent(failures=[Failure(task=1, attempt=1, position=2, reason="broken")])
    first.say(1, 8)
    second.whole(2, 1)
    assert (one(tmp_path).proven, one(tmp_path).quarantined) == (True, 1)
    second.whole(3, 0, 2, 1)
    assert findings(one(tmp_path), "doubled") == [(0, "a.csv", 102, 103)]


def test_a_long_list_is_cut_and_says_how_much_is_left(tmp_path):
    writer = Writer(tmp_path)
    for position in range(1, 16, 2):
        writer.whole(position, position // 8, position % 8, 1)
    verdict = one(tmp_path, listed=3)
    assert findings(verdict, "lost") == [(0, "a.csv", n, n + 1) for n in (100, 102, 104)]
    assert verdict.unnamed == {"lost": 5}


# Reports without an answer ----------------------------------------------------------------------------


def test_a_report_cut_off_does_not_count_where_somebody_else_has_its_records(tmp_path):
    killed, other = Writer(tmp_path, "killed"), Writer(tmp_path, "other")
    killed.whole(1, 0, answered=False)
    other.whole(2, 0, 0, 5)
    other.whole(3, 1)
    verdict = one(tmp_path)
    assert (verdict.proven, verdict.unsettled, verdict.assumed, verdict.doubled) == (True, 8, 3, 0)


def test_the_masters_journal_settles_what_a_kill_cut_off(tmp_path):
    writer = Writer(tmp_path)
    writer.whole(1, 0)
    writer.take(2, 1, 0, 8)
    writer.say(2, 2)
    writer.say(2, 8, answered=False)
    word = FinalWord(settled={(2, 1): [(0, 5)]})
    verdict = one(tmp_path, words={"training": word})
    assert findings(verdict, "lost") == [(0, "a.csv", 113, 116)]
    assert verdict.unsettled == 0


# Several datasets -------------------------------------------------------------------------------------


def test_logs_of_trainers_that_never_joined_are_refused(tmp_path):
    Writer(tmp_path).log.path.write_text('{"edl_audit":3,"session":"s","worker_id":"w","opened":1.0}\n')
    with pytest.raises(AuditError, match="nothing to audit"):
        audit([tmp_path])


# Interval arithmetic against Python's sets ------------------------------------------------------------------


runs = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda r: (r[0], r[0] + r[1])), max_size=12
)


def arrays(pairs):
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def numbers(found: Intervals) -> set[int]:
    return {number for start, end in found for number in range(start, end)}


def check_form(found: Intervals) -> None:
    assert (found.starts < found.ends).all()
    assert (found.ends[:-1] < found.starts[1:]).all()


@given(runs, st.integers(1, 4))
def test_covered_counts_how_often_a_number_is_there(pairs, times):
    often = [number for start, end in pairs for number in range(start, end)]
    found = covered(*arrays(pairs), times)
    check_form(found)
    assert numbers(found) == {number for number in often if often.count(number) >= times}
    assert found.count == len(numbers(found))


@given(runs, runs)
def test_sets_of_intervals_are_sets(first, second):
    a, b = covered(*arrays(first)), covered(*arrays(second))
    for found, wanted in (
        (a | b, numbers(a) | numbers(b)),
        (a & b, numbers(a) & numbers(b)),
        (a - b, numbers(a) - numbers(b)),
    ):
        check_form(found)
        assert numbers(found) == wanted
    assert (a == b) == (numbers(a) == numbers(b))


def test_numbers_near_the_largest_are_exact():
    top = 2**63 - 1
    found = Intervals.run(top - 10, top) - Intervals.run(top - 5, top - 4)
    assert list(found) == [(top - 10, top - 5), (top - 4, top)]


@given(runs, st.integers(-2, 40), st.integers(-2, 40))
def test_what_lies_between_two_numbers(pairs, low, high):
    records = covered(*arrays(pairs))
    found = records.between(low, high)
    check_form(found)
    assert numbers(found) == {number for number in numbers(records) if low <= number < high}


# Which of several runs is judged: tokens and the folder say it, and no clock does ---------------------------


@pytest.fixture
def clock(monkeypatch):
    """The clock of the machines: the first run's is an hour ahead."""
    times = {"now": 10_000.0}
    monkeypatch.setattr(log.time, "time", lambda: times["now"])
    return times


def whole(folder, session, ledger):
    writer = Writer(folder, session, ledger=ledger)
    writer.whole(1, 0)
    writer.whole(2, 1)


def half(folder, session, ledger):
    Writer(folder, session, ledger=ledger).whole(1, 0)


@pytest.mark.parametrize("folders", [1, 2])
def test_a_run_that_began_from_a_token_is_later_whatever_clocks_say(tmp_path, clock, folders):
    job = Job(tmp_path / "0", SMALL, trainers=1)
    job.train_batches(2)
    token = job.checkpoint(0)
    clock["now"] -= 3600
    job.directory = tmp_path / str(folders - 1)
    job.restart(token)
    job.finish()
    (verdict,) = audit(sorted(tmp_path.iterdir()))
    assert (verdict.outcome, verdict.ledger) == (Outcome.PROVEN, "ledger2")


@pytest.mark.parametrize(("first", "second"), [(half, whole), (whole, half)])
def test_of_two_runs_in_one_folder_the_later_is_judged_whatever_clocks_say(tmp_path, clock, first, second):
    first(tmp_path, "yesterday", "b")
    clock["now"] -= 3600
    second(tmp_path, "today", "a")
    verdict = one(tmp_path)
    assert (verdict.ledger, verdict.outcome) == ("a", Outcome.PROVEN if second is whole else Outcome.REFUTED)
    learnt = 16 if first is whole else 8
    assert any(
        f"left out: {learnt} record(s) of ledger b, a run over" in ground for ground in grounds(verdict)
    )


def test_runs_that_nothing_ties_are_inexact_and_the_journal_tells(tmp_path, capsys):
    whole(tmp_path / "one", "s", "a")
    whole(tmp_path / "two", "t", "b")
    folders = [tmp_path / "one", tmp_path / "two"]
    (verdict,) = audit(folders)
    assert (verdict.outcome, sorted(verdict.unordered)) == (Outcome.INEXACT, ["a", "b"])
    assert main(["audit", *map(str, folders)]) == 3
    assert "2 runs lie here (a, b), and no token ties them" in capsys.readouterr().out
    (known,) = audit(folders, words={"training": FinalWord(ledger="a")})
    assert (known.outcome, known.ledger) == (Outcome.PROVEN, "a")


def test_a_run_that_goes_on_after_another_one_has_no_order(tmp_path):
    whole(tmp_path, "s", "a")
    half(tmp_path, "t", "b")
    Writer(tmp_path, "again", ledger="a")
    assert (tmp_path / LEDGERS).read_text() == "a\nb\na\n"
    assert one(tmp_path).outcome in (Outcome.INEXACT, Outcome.REFUTED)
    assert len(one(tmp_path).unordered) == 2


def test_a_start_that_learnt_nothing_leaves_the_verdict_on_the_job_before_it(tmp_path):
    """As one that found the wrong model, or other data, and ended at its checkpoint."""
    whole(tmp_path, "s", "a")
    Writer(tmp_path, "t", ledger="b")
    Writer(tmp_path, "u", spec=replace(SMALL, seed=9), ledger="c")
    verdict = one(tmp_path)
    assert (verdict.outcome, verdict.ledger, verdict.untouched) == (Outcome.PROVEN, "a", ("b", "c"))
    assert "left out: 2 start(s) in which nothing was learnt" in grounds(verdict)


def test_a_token_that_a_later_run_took_as_well_ties_nothing_to_it(tmp_path):
    """Another run, begun anew, was at the same position, and so had the same token."""
    job = Job(tmp_path, SMALL, trainers=1)
    job.train_batches(2)
    token = job.checkpoint(0)
    job.restart(token)
    job.finish()
    job.restart(None)
    job.train_batches(2)
    assert job.checkpoint(0) == token
    job.finish()
    assert (one(tmp_path).outcome, one(tmp_path).ledger) == (Outcome.PROVEN, "ledger3")


# Ranks that have a shard of the model each ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replica_differs", "said"),
    [(False, "PROVEN"), (True, "DELIVERED: each record was trained on once, by 2 trainers")],
)
def test_of_shards_replicas_alone_are_compared_and_the_verdict_says_so(
    tmp_path, capsys, replica_differs, said
):
    """Ranks 0 and 2 have the one half of the parameters, 1 and 3 the other."""
    half, places = np.arange(32) < 16, [0, 1, 0, 1]
    for rank, place in enumerate(places):
        writer = Writer(tmp_path, f"s{rank}", member=rank + 1)
        for steps, values in ((0, BEFORE), (1, AFTER)):
            values = values + (replica_differs and rank == 3 and steps == 1)
            mine = np.where(half == (place == 0), values, np.nan)
            at = "step" if steps else "begin"
            model = asdict(replace(seen(mine), at=at, sharded=True, steps=steps, sums=b""))
            model.pop("line")
            writer.log.model(ModelSeen(**model))
            if not steps:
                writer.whole(rank + 1, rank // 2, skip=4 * (rank % 2), limit=4)
    main(["audit", str(tmp_path)])
    told = capsys.readouterr().out
    assert told.startswith(f"dataset 'training': {said}")
    assert "parameters were sharded: ranks with the same shard were compared, the others compute" in told


def test_of_many_ranks_with_a_shard_each_only_replicas_are_compared(tmp_path, monkeypatch):
    """The work grows with the ranks, not with the pairs of them."""
    compared = []
    monkeypatch.setattr(models, "is_copy", lambda *pair: compared.append(pair) or is_copy(*pair))
    spec = replace(SMALL, sources=(replace(SMALL.sources[0], count=8 * 60),))
    for rank in range(60):
        writer = Writer(tmp_path, f"s{rank}", spec, member=rank + 1)
        for steps in range(3):
            mine = np.where(np.arange(32) == rank % 30, BEFORE + steps, np.nan)
            at = "step" if steps else "begin"
            model = asdict(replace(seen(mine), at=at, sharded=True, steps=steps, sums=b""))
            model.pop("line")
            writer.log.model(ModelSeen(**model))
            if not steps:
                writer.whole(rank + 1, rank)
    assert one(tmp_path).proven
    assert 3 * 30 <= len(compared) <= 10 * 60


# When two samples are of one model: to the bit, but for how unlike processors round -------------------------


RNG = np.random.default_rng(5)
BEFORE = RNG.normal(size=32)
AFTER = BEFORE + RNG.normal(size=32)
FP32, BF16 = 2.0**-23, 2.0**-7


def seen(values: np.ndarray, *, eps: float = FP32, processor: str = "cpu AVX512", shape: str = "s") -> Seen:
    return Seen(
        at="token",
        steps=4,
        number=0,
        shape=shape,
        sharded=False,
        eps=eps,
        processor=processor,
        values=values.astype("<f4").tobytes(),
        sums=np.array([values.sum()], dtype="<f8").tobytes(),
        word="",
        line=1,
    )


def one_ulp(values: np.ndarray) -> np.ndarray:
    return values * (1 + FP32 * RNG.integers(-1, 2, size=values.shape))


COARSE = (AFTER.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (seen(AFTER), True),
        (seen(one_ulp(AFTER) * (1 + 2 * FP32)), False),
        # One more entry of a large table has learnt: no sampled place shows it, one sum does.
        (replace(seen(AFTER), sums=(seen(AFTER).totals + 1.0).tobytes()), False),
        (seen(COARSE, eps=BF16), True),  # as far as a coarser type tells
        (seen(COARSE * 1.1, eps=BF16), False),
        (seen(AFTER, shape="t"), False),
    ],
)
def test_a_copy_is_equal_to_the_bit(other, same):
    assert is_copy(seen(AFTER), other) is same


def test_what_cannot_be_looked_at_is_never_the_same():
    nothing = replace(seen(np.empty(0)), shape="")
    assert is_copy(nothing, nothing) is False


def near(place: int) -> tuple[Seen, Seen, Seen]:
    """A small value is far from the replica's, and nothing beside the others."""
    before, after = BEFORE * 1000, AFTER * 1000
    before[place], after[place] = 1e-4, 2e-4
    other = after.copy()
    other[place] = 3e-4
    return seen(after), seen(other, processor="cpu NEON"), seen(before)


@pytest.mark.parametrize(
    ("samples", "same"),
    [
        # On one kind of processor to the bit: two models of much the same data are as near.
        *(
            ((seen(AFTER, eps=eps), seen(AFTER * (1 + eps), eps=eps), seen(BEFORE, eps=eps)), False)
            for eps in (FP32, BF16)
        ),
        ((seen(AFTER), seen(one_ulp(AFTER), processor="cpu NEON"), seen(BEFORE)), True),
        (near(0), False),
        (near(31), False),
    ],
)
def test_replicas_on_unlike_processors_may_round_otherwise(samples, same):
    assert are_replicas(*samples) is same


def test_numbers_that_no_trainer_wrote_are_no_sample():
    with pytest.raises(ValueError, match="no float32 and float64"):
        replace(seen(AFTER), sums=b"1234567")


# 2·10^7 records in 6·10^5 acknowledgements are judged in a second or so, not record by record ---------------


BATCH, SHARD, RECORDS, TRAINERS = 32, 256, 20_000_000, 4
GENEROUS_S = 40.0


def write_log(folder, spec: DatasetSpec, trainer: int) -> int:
    """Every fourth shard of a permuted order, in batches, each answered. Returns the number of batches."""
    shards = np.random.default_rng(0).permutation(-(-RECORDS // SHARD))[trainer::TRAINERS]
    lines = []
    for task, shard in enumerate(shards.tolist()):
        length = min(SHARD, RECORDS - shard * SHARD)
        number = trainer + TRAINERS * task
        lines += [
            f"0 {shard} {start} {min(start + BATCH, length)} {number} 1 {task} {task}\n=\n"
            for start in range(0, length, BATCH)
        ]
    header = {"edl_audit": 3, "session": f"s{trainer}", "worker_id": f"w{trainer}", "opened": 1.0}
    fence = {"ledger": "L", "lineage": 1, "member": 1}
    dataset = {"batch_size": BATCH, "known_by": "none", "dataset": object_of(spec)}
    head = write_event(header) + write_event({"event": "joined", **fence, **dataset, "ms": 0})
    head += write_event({"event": "model", **object_of(WORD), "ms": 0})
    head += write_event({"event": "way", "way": "step", "ms": 0})
    (folder / f"w{trainer}.audit").write_bytes(head + "".join(lines).encode())
    return len(lines)


def test_twenty_million_records_are_proven_in_seconds(tmp_path):
    sources = tuple(Source(name=f"part-{n}", count=RECORDS // 1000) for n in range(1000))
    spec = DatasetSpec(name="d", sources=sources, records_per_shard=SHARD, shuffle=True, shuffle_shards=True)
    batches = sum(write_log(tmp_path, spec, trainer) for trainer in range(TRAINERS))
    started = time.perf_counter()
    (verdict,) = audit([tmp_path])
    took = time.perf_counter() - started
    print(f"{batches} acknowledgements of {RECORDS} records judged in {took:.1f} s")
    assert verdict.outcome is Outcome.PROVEN
    assert (verdict.acknowledged, batches) == (RECORDS, RECORDS // BATCH)
    assert took < GENEROUS_S
