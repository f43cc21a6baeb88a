"""Random jobs: an honest log is always proven, and a falsified one is judged as sets of records judge it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from audited_job import BATCH, SPEC, Job
from hypothesis import example, given
from hypothesis import strategies as st
from naive_audit import Naive

from edl_torch.audit.chain import FinalWord
from edl_torch.audit.verdict import Outcome, Verdict, audit
from edl_torch.shard import DatasetSpec
from edl_torch.trainer.vocabulary import Evidence

COUNTS = (
    *("acknowledged", "quarantined", "dropped", "lost", "doubled", "refused", "rolled_back"),
    *("repeated", "returned", "void", "late", "counted", "uncounted", "inexact_tokens"),
)
INEXACT = ("repeated", "counted", "uncounted", "inexact_tokens")
EVENTS = (
    *("fetch", "train", "train", "train", "quarantine", "return_remainder"),
    *(
        "kill heard",
        "kill unheard",
        "stop",
        "leave",
        "cut off",
        "give up heard",
        "give up unheard",
        "count",
        "uncounted",
        "checkpoint",
        "checkpoint counted",
        "overtake",
        "restore",
        "restore none",
        "restart",
        "restart none",
    ),
)


def spec_of(
    shuffle: bool, shards: bool, inside: bool, epochs: int, barrier: bool, window: int
) -> DatasetSpec:
    return DatasetSpec(
        name="training",
        sources=SPEC.sources,
        records_per_shard=8,
        seed=7,
        shuffle=shuffle,
        shuffle_shards=shards,
        shuffle_in_shard=inside,
        num_epochs=epochs,
        epoch_barrier=barrier,
        max_bad_records=1000,
        shuffle_window=window,
    )


specs = st.builds(
    spec_of,
    *(st.booleans(), st.booleans(), st.booleans(), st.integers(1, 3), st.booleans(), st.integers(1, 3)),
)
histories = st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 1)), max_size=60)


def play(job: Job, events: list[tuple[str, int]]) -> None:
    """Let these things happen to a job, and train to its end."""
    for event, place in events:
        trainer = job.trainers[place]
        match event:
            case "fetch":
                job.fetch(trainer)
            case "train":
                if not trainer.held:
                    job.fetch(trainer)
                job.train(trainer)
            case "quarantine":
                job.quarantine(trainer)
            case "return_remainder":
                job.return_remainder(trainer)
            case "kill heard" | "kill unheard":
                job.kill(place, heard=event == "kill heard")
            case "stop":
                job.stop_and_go_on(place)
            case "leave":
                job.leave(trainer)
            case "cut off":
                job.cut_off(trainer)
            case "give up heard" | "give up unheard":
                job.give_up(trainer, heard=event == "give up heard")
            case "count":
                job.train(trainer, way=Evidence.COUNT)
            case "uncounted":
                trainer.log.uncounted(BATCH)
            case "checkpoint" | "checkpoint counted":
                job.checkpoint(place, exact=event == "checkpoint")
            case "overtake":
                job.overtake(place)
            case "restore" | "restore none":
                job.restore(place, job.token if event == "restore" else None)
            case _:
                job.restart(job.token if event == "restart" else None)
    job.finish()


def falsify(directory: Path, place: int, what: str) -> None:
    """Take a line out, or say it twice, or move the end of an acknowledgement."""
    paths = sorted(directory.glob("*.audit"))
    path = paths[place % len(paths)]
    lines = path.read_text().splitlines()
    rows = [i for i, line in enumerate(lines) if line[0].isdigit()]
    if not rows:
        return
    row = rows[place % len(rows)]
    if what == "remove":
        del lines[row]
    elif what == "twice":
        lines.insert(row, lines[row])
    else:
        fields = lines[row].split(" ")
        if int(fields[2]) + 1 < int(fields[3]):
            fields[3] = str(int(fields[3]) - 1)
        lines[row] = " ".join(fields)
    path.write_text("".join(f"{line}\n" for line in lines))


def agree(verdict: Verdict, naive: Naive) -> bool:
    """Compare counts and outcome with the other audit; returns whether that found a token's fault."""
    found = naive.verdict()
    assert {name: getattr(verdict, name) for name in COUNTS} == {name: found[name] for name in COUNTS}
    assert {name: count for name, count in verdict.rests_on.items() if count} == {
        way.label: found[way.label] for way in Evidence if found[way.label]
    }
    faults = [text for text in verdict.contradictions if "the token was" in text]
    assert bool(faults) == bool(found["faults"]), (faults, found)
    return bool(faults)


PLAIN, ONE_EPOCH_AFTER_THE_OTHER = (spec_of(False, False, False, 1, barrier, 1) for barrier in (False, True))


def story(text: str) -> list[tuple[str, int]]:
    """A history as a text: what happens, and to which trainer."""
    return [
        (event, int(place)) for event, _, place in (part.strip().rpartition(" ") for part in text.split(","))
    ]


@given(specs, histories)
@example(PLAIN, story("train 0, kill unheard 0, fetch 0, return_remainder 0"))
# Of records reported without an answer the token alone does not say that they were dropped.
@example(
    ONE_EPOCH_AFTER_THE_OTHER,
    story("fetch 1, give up unheard 1, fetch 0, fetch 0, return_remainder 0, train 0"),
)
# The token of a superseded trainer, which does not know what its lineage had dropped, or in quarantine.
@example(PLAIN, story("fetch 1, train 0, return_remainder 1, train 1, overtake 0, overtake 0"))
@example(PLAIN, story("fetch 1, train 0, quarantine 1, train 1, overtake 0, overtake 0"))
# Of two reports that nobody answered one was in vain; a repeated one may have been heard before.
@example(PLAIN, story("fetch 0, give up unheard 0, fetch 1, give up heard 1"))
@example(PLAIN, story("fetch 0, give up heard 0"))
@example(PLAIN, story("fetch 0, kill unheard 0"))
# What was given back counts if the checkpoint came after it, and not in a lineage that was left.
@example(PLAIN, story("fetch 0, leave 0, checkpoint 0, restart 0"))
@example(PLAIN, story("fetch 0, checkpoint 0, leave 0, restart 0"))
@example(PLAIN, story("fetch 0, leave 0, restore none 0"))
# A restore rolls back; of two from one token the later is the final one.
@example(PLAIN, story("train 0, checkpoint 0, train 1, train 0, restore 1"))
@example(PLAIN, story("train 0, checkpoint 0, restore 0, train 0, train 0, restore 0"))
@example(PLAIN, story("train 0, quarantine 0, return_remainder 0, checkpoint 1, restore 0"))
@example(PLAIN, story("train 0, checkpoint counted 0"))
def test_the_log_of_any_job_is_proven_and_counted_as_the_ledger_counts(spec, events):
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), spec)
        play(job, events)
        (verdict,) = audit([folder])
        faults = agree(verdict, Naive(Path(folder)))
        if "overtake" in dict(events) and (faults or verdict.lost or verdict.contradictions):
            assert verdict.outcome is Outcome.REFUTED  # a superseded trainer's token was loaded
            return
        assert verdict.delivered, verdict
        inexact = sum(getattr(verdict, name) for name in INEXACT)
        assert verdict.outcome is (Outcome.INEXACT if inexact else Outcome.PROVEN)
        # Without the master's word a report that it did not hear counts, though the records were dropped.
        assert 0 <= verdict.acknowledged - job.ledger.acknowledged <= verdict.assumed
        assert verdict.quarantined == len(job.ledger.quarantine)
        assert verdict.dropped - job.ledger.dropped == job.ledger.acknowledged - verdict.acknowledged
        assert verdict.acknowledged + verdict.quarantined + verdict.dropped == verdict.records
        word = FinalWord(token=job.ledger.snapshot().encode())
        (by_token,) = audit([folder], words={spec.name: word})
        assert by_token.delivered, by_token


@given(specs, histories, st.integers(0, 1000), st.sampled_from(["remove", "twice", "shorten"]))
def test_a_falsified_log_is_judged_as_sets_of_records_judge_it(spec, events, place, what):
    with tempfile.TemporaryDirectory() as folder:
        play(Job(Path(folder), spec), events)
        falsify(Path(folder), place, what)
        (verdict,) = audit([folder])
        agree(verdict, Naive(Path(folder)))
        assert verdict.refuted == bool(verdict.lost or verdict.doubled or verdict.contradictions)
