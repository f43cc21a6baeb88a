"""Words for verdicts, on the terminal and the page: what one says, rests on and lacks, with the remedy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from edl_torch.audit.verdict import Outcome, Verdict
from edl_torch.shard import TaskType
from edl_torch.trainer.vocabulary import Evidence

_NAMED = 8  # models in a headline
_MOST_COMPONENTS = 20

_WAYS = {
    Evidence.STEP.label: "when an attached optimizer had stepped",
    Evidence.SKIPPED.label: "when a GradScaler had skipped the step of an attached optimizer",
    Evidence.UNSEEN.label: "when one had stepped, though no gradient of theirs was seen",
    Evidence.NEXT.label: "when the next batch was asked for",
    Evidence.TOKEN.label: "by a token taken in the loop's body",
    Evidence.REPORT.label: "by the loop's reports",
    Evidence.COUNT.label: "by counting reports over several loader workers",
    Evidence.UNSTEPPED.label: "at the end of the job, without a step on them",
}
_ALL = 'to compare all bytes give fingerprint="…"; for files `edl-torch check DATA --whole` prints one'
# By how the data of all sessions were compared: what the first line says of that, and what the grounds say
_DATA = {
    "whole": ("", "whole: checksums or versions of all of them were compared"),
    "sampled": ("the same by samples", "sampled: samples of their bytes were compared"),
    "names": (
        "the same by names",
        "names: names were compared, with sizes at most, and nothing that is in the files",
    ),
    "given": ("the same by fingerprint=", "given: what fingerprint= says was compared"),
    "partly": ("partly looked at", "partly: not all of them was compared"),
    "none": ("not known to be the same", "not compared: other data would not be noticed"),
}
# What would show more, of a dataset and of components of a mixture, whose readers of files take none
_MORE = {
    "sampled": (_ALL, ""),
    "names": (_ALL, ""),
    "partly": (
        'with fingerprint="v1" at the loader they would be compared',
        'with MapDatasetReader(…, fingerprint="v1") for each they would be compared',
    ),
    "none": (
        'with fingerprint="v1" at the loader they would be compared',
        'with MapDatasetReader(…, fingerprint="v1") for each they would be compared',
    ),
}


def worst(verdicts: Sequence[Verdict]) -> Outcome:
    """What several verdicts come to."""
    best_first = list(Outcome)
    return max((verdict.outcome for verdict in verdicts), key=best_first.index)


def headline(verdict: Verdict) -> str:
    """The verdict in a word; to whom what was delivered, what no model has learnt, and how data that are read
    by several sessions, or again, were seen to be the same."""
    said = verdict.outcome.label
    if verdict.outcome is Outcome.DELIVERED:
        said += f": {delivered(verdict)}"
    if verdict.proven and verdict.models.perhaps_trained:
        said += ", if its model was new"
    if verdict.quarantined:
        said += f", {verdict.quarantined:,} of {verdict.records:,} in quarantine"
    if verdict.dropped:
        said += f", {verdict.dropped:,} of {verdict.records:,} dropped"
    if skipped := verdict.rests_on.get(Evidence.SKIPPED.label):
        said += f", {skipped:,} of {verdict.records:,} stepped over by a GradScaler"
    if verdict.several:
        said += f", {verdict.several:,} of {verdict.records:,} in several steps"
    if verdict.partly:
        said += f", {verdict.partly:,} of {verdict.records:,} by some of the optimizers"
    if verdict.abandoned:
        said += f", {verdict.abandoned:,} more abandoned for other data"
    is_read_again = verdict.trainers > 1 or (verdict.known_by == "none" and verdict.num_epochs != 1)
    if is_read_again and verdict.outcome in (Outcome.PROVEN, Outcome.DELIVERED):
        how, _ = _DATA[verdict.known_by]
        said += f", data {how}" if how else ""
    return said


def _shares(verdict: Verdict) -> Iterator[str]:
    given = sum(one.acknowledged * one.mean_length for one in verdict.components)
    wanted = sum(one.wanted * one.mean_length for one in verdict.components)
    for one in verdict.components[:_MOST_COMPONENTS]:
        said = f"{one.name} {one.acknowledged:,} of {one.wanted:,.1f} wanted, in {one.passes:,.2f} passes"
        if given and wanted:
            tokens = one.acknowledged * one.mean_length
            of_all = f"{tokens / given:.2%} of all, {one.wanted * one.mean_length / wanted:.2%} wanted"
            said += f", {tokens:,.0f} tokens ({of_all})"
        yield said
    if len(verdict.components) > _MOST_COMPONENTS:
        yield "… (--json has all)"


def _weakest(verdict: Verdict) -> str:
    """Name the components of which as little is known as of the mixture: of others more is."""
    least = [one.name for one in verdict.components if one.known_by == verdict.known_by]
    if len(least) == len(verdict.components):
        return ""
    return (
        f" of {', '.join(least[:_NAMED])}{', …' * (len(least) > _NAMED)} (of other components more is known)"
    )


def delivered(verdict: Verdict) -> str:
    """Return what is known of a dataset of which it is not shown that one model has all."""
    if verdict.task_type is not TaskType.TRAINING:
        return "each record went to a loop once"
    shares = verdict.models.shares
    if len(shares) < 2:
        return "each record was trained on once, as the loop says"
    named = [f"{'+'.join(share.trainers)} {share.records:,}" for share in shares[:_NAMED]]
    named += ["…"] if len(shares) > _NAMED else []
    trainers = {name for share in shares for name in share.trainers}
    whose = f"by {len(shares)} trainers with models of their own"
    if len(trainers) < len(shares):
        whose = f"by {len(shares)} models, as {len(trainers)} trainer(s) made others on the way"
    return f"each record was trained on once, {whose}: {', '.join(named)}"


def grounds(verdict: Verdict) -> Iterator[str]:
    """Yield what the verdict rests on."""
    rests_on = [f"{count} {_WAYS[way]}" for way, count in verdict.rests_on.items()]
    if rests_on:
        yield f"acknowledged: {'; '.join(rests_on)}"
    if verdict.several:
        yield (
            f"on {verdict.several} an optimizer stepped more than once, on new gradients each time: it "
            f"learnt chunks of the batch, or all of it again"
        )
    if verdict.partly:
        yield (
            f"on {verdict.partly} some of the attached optimizers stepped without a gradient of them: what "
            f"those train has not learnt them"
        )
    if verdict.components:
        yield f"of {len(verdict.components)} components: " + "; ".join(_shares(verdict))
    yield from verdict.models.shown
    if verdict.models.perhaps_trained:
        yield (
            f"{', '.join(verdict.models.perhaps_trained[:_NAMED])} began at the beginning of the data after "
            f"an earlier run, and nothing shows that with a new model: torch.manual_seed(…) before the model "
            f"is made would, as both runs then begin with the same one; so would another audit_dir"
        )
    remedy = _MORE.get(verdict.known_by, ("", ""))[bool(verdict.components)]
    yield f"data{_weakest(verdict)}: {'; '.join(filter(None, (_DATA[verdict.known_by][1], remedy)))}"
    if verdict.untouched:
        yield f"left out: {len(verdict.untouched)} start(s) in which nothing was learnt"
    for ledger, records in itertools.islice(verdict.left_out.items(), _NAMED):
        yield (
            f"left out: {records} record(s) of ledger {ledger}, a run over the same data, or from a token of "
            f"this job, that this one did not go on from: of such the last is judged alone"
        )
    if verdict.beside:
        yield (
            f"other data or settings lie here under this name (ledger {', '.join(verdict.beside[:_NAMED])}), "
            f"and have a verdict of their own. Give each loader of a program a name of its own: "
            f"dataset_name=…; and each job a folder: audit_dir=…"
        )
    if verdict.judged:
        yield "by the logs and the master's own word"
    if verdict.unsettled:
        counting = "the master has heard" if verdict.judged else "nobody else has, and count as acknowledged"
        yield f"{verdict.unsettled} were reported without an answer; {verdict.assumed} of them {counting}"


def undecided(verdict: Verdict) -> Iterator[str]:
    """Yield why it is not shown that one model has all, with the line of code that would show it."""
    if verdict.task_type is not TaskType.TRAINING:
        yield "it is no training data, and has no model: this is the best verdict that it can get"
        return
    if verdict.models.unattached:
        yield (
            f"{verdict.models.unattached} record(s) were acknowledged as the loop asked for the next batch, "
            f"or said so: no step shows that a model learnt them. Before the loop: loader.attach(optimizer), "
            f"of an ElasticDataLoader"
        )
    yield from verdict.models.reasons


def inexact(verdict: Verdict) -> Iterator[str]:
    """Yield what keeps the proof from being exact, with its remedy."""
    if verdict.repeated:
        why = {
            "given back after a loop had them (before the loop: loader.attach(optimizer))": verdict.returned,
            "taken back by the master while a loop had them (go back to the last checkpoint)": verdict.void,
            "reported too late (go back to the last checkpoint)": verdict.late,
        }
        reasons = "; ".join(f"{count} {what}" for what, count in why.items() if count)
        yield f"{verdict.repeated} record(s) may have been trained on once more than is counted: {reasons}"
    if verdict.counted:
        yield (
            f"{verdict.counted} record(s) were acknowledged by counting: a plain DataLoader with several "
            f"workers does not say which records a batch holds. ElasticDataLoader(dataset, …) does"
        )
    if verdict.uncounted:
        yield (
            f"{verdict.uncounted} record(s) were reported so and read again: the reports do not say which. "
            f"ElasticDataLoader(dataset, …) does"
        )
    if verdict.padding:
        yield (
            f"{verdict.padding} padding batch(es) were trained on like any other: copies of batches that "
            f"count, whose records were learnt once more; nothing says which they are. Backpropagate "
            f"loader.weigh(loss), and call loader.scale_gradients(optimizer) before each optimizer.step()"
        )
    if verdict.unstepped:
        yield (
            f"{verdict.unstepped} record(s) were handed out after the last optimizer.step() of the job, or "
            f"of an epoch before zero_grad(): the model had not learnt from them. Call optimizer.step() "
            f"once more at the end of each epoch, before the next begins"
        )
    if verdict.unordered:
        yield (
            f"{len(verdict.unordered)} runs lie here ({', '.join(verdict.unordered[:_NAMED])}), and no token "
            f"ties them: which is the last nobody can tell, and {verdict.ledger} was judged. Give each run a "
            f"folder of its own: audit_dir=…; or name the last one's journal: --state STATE_DIR"
        )
    for said in verdict.changed[:_NAMED]:
        yield (
            f"the data were changed while they were read ({said}), so a record may be another one in each "
            f"epoch. Data must stay as they are while a job runs; to some that change on purpose give "
            f'fingerprint="v1"'
        )
    yield from verdict.doubts
