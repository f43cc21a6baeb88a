"""Chain of lineages from the final one back to the beginning of the data, token by token.

A lineage began from a token; the records that have an outcome in it must have got it in the lineage in which
that token was taken. What that lineage did beyond the token is rolled back, and proves nothing. All who took
the token must have had its records in their model: no log says which of their checkpoints was loaded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from edl_torch.audit.intervals import Coordinates, Intervals, covered
from edl_torch.audit.lineage import DatasetHistory, Key, Lineage, Taken
from edl_torch.audit.log import token_digest
from edl_torch.audit.reading import Answer, Kind, Reports
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.leases import Range
from edl_torch.core.ledger import ShardLedger
from edl_torch.core.registration import but_looks, differences, identity
from edl_torch.core.token import Token
from edl_torch.errors import AuditError, TokenError
from edl_torch.trainer.vocabulary import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalWord:
    """Final state of a dataset by the master; it decides what no log can.

    `token` is its position: exactly what has an outcome in it must have one in the logs. `settled` says what
    of each lease has its outcome, for reports whose answer a kill cut off. `ledger` and
    `lineage` are those that it speaks of, where it says so: the logs must end in them.
    """

    token: str | None = None
    settled: Settled = field(default_factory=dict)
    ledger: str | None = None
    lineage: int | None = None


_UNSURE = Answer.NONE, Answer.LOST  # an earlier try may have been heard

Settled = Mapping[tuple[int, int], list[Range]]  # (task, attempt) -> positions of a lease with outcomes


class Part:
    """What one lineage did with the records that it is answerable for: those that are `required` of it.

    `begun` had their outcome before. `outcomes` includes them; `certain` are those that are not assumed.
    """

    def __init__(
        self,
        line: Coordinates,
        lineage: Lineage,
        *,
        required: Intervals,
        begun: Intervals,
        later: Token | None,
        settled: Settled,
        left: Mapping[int, int],
    ) -> None:
        """Count the outcomes.

        Args:
            line: The numbers of records.
            lineage: What was told.
            required: The records that must have an outcome from it, or before it.
            begun: Those that had one before it.
            later: The token that requires them, where one does.
            settled: What the master knows of reports without an answer.
            left: The line of each log with the token by which the model left the lineage: what a log has
                after it is not in the model.
        """
        self.lineage = lineage
        self.required = required
        self.begun = begun
        began_from = Token.decode(lineage.token) if lineage.token is not None else None
        acknowledged = _settle(lineage.acknowledged, settled, line)
        accepted = acknowledged.answered(Answer.ACCEPTED)
        bad = records_of(lineage.quarantined.answered(Answer.ACCEPTED))
        self.contradictions: list[str] = []
        if later is not None:
            reported = records_of(lineage.quarantined.answered(Answer.ACCEPTED, *_UNSURE))
            in_token = line.quarantine(later.quarantine, reported, lineage.segments)
            if denied := ((bad & required) - begun - in_token).count:
                self.contradictions.append(
                    f"the logs have {denied} record(s) in quarantine that a token has as trained on"
                )
            bad |= in_token - begun
        starts = np.concatenate((accepted.starts, bad.starts, begun.starts))
        ends = np.concatenate((accepted.ends, bad.ends, begun.ends))
        self.certain = covered(starts, ends)
        self.doubled = covered(starts, ends, 2) & required
        unsure, unsure_bad = acknowledged.answered(*_UNSURE), lineage.quarantined.answered(*_UNSURE)
        self.unsettled = unsure.records + unsure_bad.records
        # Of two trainers that reported a record and were never answered, at most one was heard.
        assumed = (records_of(unsure) | records_of(unsure_bad)) - self.certain
        self.outcomes = self.certain | assumed
        missing = required - self.outcomes
        remainders = records_of(lineage.told[Kind.REMAINDER])
        if began_from is not None:
            remainders |= line.slices(began_from.remainders)
        self.dropped = _dropped(line, missing & remainders, lineage.batch_size)
        self.missing = missing - self.dropped
        # Of the assumed: others may have had them last, as a remainder.
        untold = (missing | assumed) & required
        self.perhaps_dropped = _dropped(line, untold & remainders, lineage.batch_size) - self.dropped
        self.quarantined = ((bad - begun) | (records_of(unsure_bad) & assumed)) & required
        trained = self.own - self.quarantined
        # How the records came to be acknowledged that have their outcome from here.
        self.ways = _ways(acknowledged.at(acknowledged.answers != Answer.REFUSED), trained)
        told = {kind: records_of(lineage.told[kind].until(left)) for kind in Kind if kind > Kind.REMAINDER}
        # What loops had before others had it: given back, taken back, and reported in vain.
        self.returned = told[Kind.RETURNED]
        self.void = told[Kind.VOID]
        self.late = _late(lineage.acknowledged.until(left), required)
        self.unlearnt = told[Kind.UNLEARNT] & trained  # acknowledged by a step without gradients of them
        self.several = told[Kind.SEVERAL] & trained  # an optimizer stepped on them more than once
        self.partly = told[Kind.PARTLY] & trained  # of several optimizers some alone used their gradients
        notes = [note for place, note in lineage.notes if note.line < left.get(place, note.line + 1)]
        # Records reported in vain, nobody knows which; padding batches that were trained on like any other.
        self.uncounted = sum(note.said for note in notes if note.kind == "uncounted")
        self.padding = sum(note.said for note in notes if note.kind == "padding")
        self.changed = [note.said for note in notes if note.kind == "changed"]  # of the data
        self.doubt = ""  # what makes the token that the lineage began from inexact

    @property
    def sound(self) -> bool:
        """Whether every required record has exactly one outcome."""
        return not (self.missing or self.doubled or self.contradictions)

    @property
    def assumed(self) -> Intervals:
        """Records reported without an answer, required, and reported by nobody else."""
        return (self.outcomes - self.certain) & self.required

    @property
    def repeated(self) -> Intervals:
        """Records that a loop had, and may have trained on, without an outcome from that."""
        return self.returned | self.void | self.late

    @property
    def own(self) -> Intervals:
        """The required records that have their outcome from this lineage."""
        return (self.outcomes - self.begun) & self.required


def _late(reported: Reports, required: Intervals) -> Intervals:
    """Return records that a trainer reported in vain: it lives, and the lease was another's by then."""
    refused, unheard = records_of(reported.answered(Answer.REFUSED)), reported.answered(Answer.LOST)
    lost, twice = records_of(unheard), covered(unheard.starts, unheard.ends, 2)
    # What an earlier try may have told has its outcome from that, unless others have it, or no token has.
    return refused | (lost & records_of(reported.answered(Answer.ACCEPTED))) | (lost - required) | twice


def _ways(reports: Reports, trained: Intervals) -> dict[Evidence, int]:
    """How many of the records were acknowledged in which way; of several the one that proves the least."""
    used = [way for way in sorted(Evidence, reverse=True) if (reports.ways == way).any()]
    if len(used) == 1:
        return {used[0]: trained.count}
    ways = {}
    for way in used:
        ways[way] = (records_of(reports.at(reports.ways == way)) & trained).count
        trained = trained - records_of(reports.at(reports.ways == way))
    return ways


def all_reports(lineage: Lineage) -> Reports:
    """Return all reports of a lineage that may have been heard, of bad records too."""
    reports = lineage.outcomes
    return reports.at(reports.answers != Answer.REFUSED)


def records_of(reports: Reports) -> Intervals:
    """Return the records that were reported, each once."""
    return covered(reports.starts, reports.ends)


def _settle(reports: Reports, settled: Settled, line: Coordinates) -> Reports:
    """Answer what had no answer and the master's journal knows: what has its outcome there was heard."""
    unsure = reports.answered(*_UNSURE)
    leases = list(zip(unsure.tasks.tolist(), unsure.attempts.tolist(), strict=True))
    known = np.array([lease in settled for lease in leases], dtype=np.bool_)
    if not known.any():
        return reports
    told = unsure.at(known)
    bases = line.window_starts(told.starts).tolist()
    parts: list[tuple[int, int, int, Answer]] = []
    for place, lease in enumerate(itertools.compress(leases, known)):
        run = Intervals.run(int(told.starts[place]), int(told.ends[place]))
        heard = run & Intervals.of(
            [(bases[place] + first, bases[place] + after) for first, after in settled[lease]]
        )
        parts += [(place, *piece, Answer.ACCEPTED) for piece in heard]
        parts += [(place, *piece, Answer.REFUSED) for piece in run - heard]
    places, starts, ends, answers = np.array(parts, dtype=np.int64).reshape(-1, 4).T
    told = told.at(places)
    told.starts, told.ends, told.answers = starts, ends, answers
    return Reports.join([reports.answered(Answer.ACCEPTED, Answer.REFUSED), unsure.at(~known), told])


def _dropped(line: Coordinates, remainders: Intervals, batch_size: int) -> Intervals:
    """Remainders that nobody trained on: `drop_last` dropped them where an epoch has too few for a batch."""
    epochs = remainders.blocks(line.size)
    return Intervals.union(part for _, part in epochs if part.count < batch_size)


class LineageChain:
    """Lineages that made the final model, the final one first."""

    def __init__(self, history: DatasetHistory, word: FinalWord) -> None:
        self._history = history
        self._line = history.coordinates
        self._word = word

    def parts(self) -> list[Part]:
        """Return what each lineage did. Raises AuditError where the logs of a lineage are missing."""
        self._check_word()
        token = self._decode(self._word.token)
        return self._back_from(token, self._final_part(self._history.lineages[self._history.final], token))

    def left_for(self, later: Part, text: str) -> list[Part]:
        """Return what each lineage did up to a token with which these data were left for those of `later`."""
        token = self._decode(text)
        assert token is not None
        first = self._origin(later, text, self._line.done(token), set())
        return [] if first is None else self._back_from(token, first)

    def _back_from(self, token: Token | None, part: Part) -> list[Part]:
        parts, tokens = [part], [token]
        while True:
            token, text = self._decode(part.lineage.token), part.lineage.token or ""
            if token is not None and token.before:  # the records before it are of other data
                break
            visited = {each.lineage.key for each in parts}
            origin = self._origin(part, text, part.begun, visited)
            if origin is None:
                break
            tokens.append(token)
            parts.append(part := origin)
        _compare(tokens, parts)
        return parts

    def _check_word(self) -> None:
        """The master must speak of the lineage that the logs end in."""
        word, name = self._word, self._history.spec.name
        ledger, lineage = self._history.final
        if word.ledger not in (None, ledger):
            raise AuditError(
                f"the master keeps ledger {word.ledger}, dataset {name!r} of the logs is of ledger {ledger}: "
                f"give the journal and the logs of one job"
            )
        if word.lineage not in (None, lineage):
            raise AuditError(
                f"the master keeps lineage {word.lineage} of dataset {name!r}, the logs end in lineage "
                f"{lineage}: give the logs of all trainers, and the journal as it was left by their master"
            )

    def _final_part(self, lineage: Lineage, said: Token | None) -> Part:
        if said is not None:
            return self._part(lineage, self._line.done(said), said, self._word.settled)
        epochs = self._history.spec.num_epochs or -(-self._last(lineage) // self._history.spec.size)
        # A job that is told to have fewer epochs than its checkpoint has those of that too.
        epochs = max(epochs, -(-int(self.begun(lineage).ends.max(initial=0)) // self._history.spec.size))
        self._line.check_epochs(epochs)
        spec = self._history.spec
        endless = spec.components and not spec.num_epochs
        required = Intervals.run(0, self._last(lineage) if endless else epochs * spec.size)
        return self._part(lineage, required, None, self._word.settled)

    def _last(self, lineage: Lineage) -> int:
        """The number after that of the last record with an outcome."""
        return max(int(lineage.outcomes.ends.max(initial=0)), int(self.begun(lineage).ends.max(initial=0)))

    def _part(
        self,
        lineage: Lineage,
        required: Intervals,
        later: Token | None,
        settled: Settled | None = None,
        left: Mapping[int, int] | None = None,
    ) -> Part:
        """The part of a lineage for `required`, which is what has an outcome in `later` if that is given."""
        return Part(
            self._line,
            lineage,
            required=required,
            begun=self.begun(lineage),
            later=later,
            settled=settled or {},
            left=left or {},
        )

    def begun(self, lineage: Lineage) -> Intervals:
        """Return what has an outcome before the lineage's first. Raises AuditError where no log says."""
        if not lineage.restored and lineage.key[1] != 1:
            raise AuditError(
                f"no log says from which token {self._called(lineage)} began: give the audit directories of "
                f"all trainers, and of every restart of the job. A job whose master went on with "
                f"--accept-older-journal has none, and cannot be proven"
            )
        token = self._decode(lineage.token)
        return Intervals() if token is None else self._line.done(token)

    def _origin(self, part: Part, text: str, begun: Intervals, visited: set[Key]) -> Part | None:
        """The part of the lineage in which the token `text` was taken, that `part`'s lineage began from with
        `begun`; None where that is the beginning of the data, which nobody took."""
        began = part.lineage
        taken = [one for one in self.taken(began, text) if one.key not in visited]
        if not taken and not begun:
            return None
        keys = {one.key for one in taken} & self._history.lineages.keys()
        lineages = self._history.lineages
        latest_first = sorted(keys, key=lambda key: (lineages[key].age, key), reverse=True)
        candidates = [
            self._explain(key, text, begun, taken)
            for key in latest_first or self._told_before(began, visited)
        ]
        if not candidates:
            raise AuditError(
                f"{self._called(began)} began from a token, and no log says where that was taken: "
                f"give the audit directories of all earlier runs of the job too"
            )
        _doubt(part, taken)
        part.contradictions += [fault for one in taken if (fault := self._fault(one, begun))]
        sound = [candidate for candidate in candidates if candidate.sound]
        if sound and taken:
            part.contradictions += [_unexplained(other) for other in candidates if not other.sound]
        return sound[0] if sound else candidates[0]

    def taken(self, began: Lineage, text: str) -> list[Taken]:
        """Return all who took the token `text` that a lineage began from: before it, where lineages of one
        ledger have an order; ledgers have none."""
        found = self._history.taken.get(token_digest(text), ())
        ledger, number = began.key
        return [one for one in found if one.key[0] != ledger or one.key[1] < number]

    def _told_before(self, began: Lineage, visited: set[Key]) -> list[Key]:
        """Return the lineage before, where its logs can explain a token: a job that restores first leaves an
        empty one behind."""
        key = began.key[0], began.before
        found = self._history.lineages.get(key)
        if found is None or key in visited:
            return []
        has_told = found.token is not None or len(found.acknowledged) or len(found.quarantined)
        return [key] if has_told else []

    def _explain(self, key: Key, text: str, required: Intervals, taken: Sequence[Taken]) -> Part:
        """The part of lineage `key` that was left by a token; the last time that each log has it counts."""
        lines = sorted((one.place, one.snapshot.line) for one in taken if one.key == key)
        lineage = self._history.lineages[key]
        return self._part(lineage, required, self._decode(text), left=dict(lines))

    def _fault(self, taken: Taken, done: Intervals) -> str:
        """Why the model of the session that took a token, of `done`, cannot have been what it says."""
        found = taken.snapshot
        trainer = self._history.trainers[taken.place]
        who = f"the token was taken by {trainer} (lineage {found.lineage}, member {found.member})"
        if found.late or taken.key not in self._history.lineages:
            return f"{who}, which was superseded and knew it"
        lineage = self._history.lineages[taken.key]
        told = lineage.acknowledged  # what loader workers fail to read may be heard at any time
        own = told.at((told.who == taken.place) & (told.settled < found.line))
        trained = records_of(own.answered(Answer.ACCEPTED)) | self.begun(lineage)
        beyond = (trained - done).count
        if not beyond:
            return ""
        return f"{who} when {beyond} record(s) were trained on there that it has not: superseded by then"

    def _called(self, lineage: Lineage) -> str:
        return f"lineage {lineage.key[1]} of dataset {self._history.spec.name!r}"

    def _decode(self, text: str | None) -> Token | None:
        if text is None:
            return None
        try:
            token = Token.decode(text)
            of_data, of_it = but_looks(identity(self._history.spec)), but_looks(token.identity)
            if differing := differences(of_data, of_it, asked_is_older=True, may_change=True):
                raise TokenError("; ".join(differing))
            token.check_within(self._line.plan)
        except TokenError as exc:
            raise AuditError(f"a token of dataset {self._history.spec.name!r} cannot be used: {exc}") from exc
        return token


def _doubt(part: Part, taken: Sequence[Taken]) -> None:
    """Note what is inexact in the token that `part`'s lineage began from."""
    counted = [one.snapshot for one in taken if not one.snapshot.exact]
    part.uncounted += max((snapshot.uncounted for snapshot in counted), default=0)
    half_stepped = max((one.snapshot.half_stepped for one in taken), default=0)
    if counted:
        part.doubt = (
            "was taken while reports were counted over several loader workers. Those of "
            "ElasticDataLoader(dataset, …) are exact"
        )
    elif half_stepped:
        part.doubt = (
            f"was taken when one attached optimizer had stepped on {half_stepped} record(s) and another had "
            f"not: it learns them again. Call loader.state_dict() once all have stepped"
        )
    elif not taken:
        part.doubt = (
            "was taken by nobody whose log is here: give the audit directories of all trainers and runs"
        )


def _unexplained(part: Part) -> str:
    which = f"lineage {part.lineage.key[1]} of ledger {part.lineage.key[0]}"
    many = f", and on {part.doubled.count} more than once" if part.doubled else ""
    missing = f"which had not trained on {part.missing.count} of its record(s){many}"
    return f"the token was also taken in {which}, {missing}"


def _compare(tokens: Sequence[Token | None], parts: Sequence[Part]) -> None:
    """What each token says was dropped against what the lineages up to it did, as far as those are sound.

    Its other counts follow from its position, which `Token.check_within` has compared.
    """
    dropped = perhaps = 0
    for token, part in zip(reversed(tokens), reversed(parts), strict=True):
        dropped += part.dropped.count
        perhaps += part.perhaps_dropped.count
        if not part.sound:
            return
        if token is not None and not dropped <= token.dropped <= dropped + perhaps:
            part.contradictions.append(
                f"a token has {token.dropped} dropped record(s), the logs have {dropped}"
            )


def final_words(dispatcher: Dispatcher) -> dict[str, FinalWord]:
    """Return the final state of each dataset by the master's journal. Raises AuditError where that went back.

    A trainer that was killed between its report and the answer cannot know whether it was heard. The master
    wrote down what it heard before it answered, so its state says.
    """
    if dispatcher.suspended:
        names = ", ".join(map(repr, sorted(dispatcher.suspended)))
        raise AuditError(
            f"the master's journal is older than what its trainers were told, and {names} is suspended: "
            f"audit the job once that has been restored from a checkpoint"
        )
    return {
        ledger.spec.name: FinalWord(
            token=ledger.snapshot().encode(),
            settled=dict(_settled(ledger)),
            ledger=dispatcher.ledger_id,
            lineage=ledger.lineage,
        )
        for ledger in dispatcher.ledgers
    }


def _settled(ledger: ShardLedger) -> Iterator[tuple[tuple[int, int], list[Range]]]:
    """What has an outcome of each lease of which the master still knows: those that live or just ended."""
    for lease in ledger.leases:
        yield (lease.task, lease.attempt), list(lease.outcomes())
    for session in ledger.participants.sessions:
        for task, attempt in ledger.leases.ended(session).items():
            yield (task, attempt), [(0, ledger.plan.size)]  # to wherever it ended
