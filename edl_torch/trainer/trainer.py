"""One trainer of one dataset: its parts, and the procedures that no single part has."""

from __future__ import annotations

from dataclasses import replace

from edl_torch.core.calls import NEW_PASS
from edl_torch.core.plan import Plan
from edl_torch.errors import EdlError
from edl_torch.shard import Shard
from edl_torch.trainer.elastic import ElasticPasses
from edl_torch.trainer.foreign_loop import PlainPasses, Reading
from edl_torch.trainer.leasing import Leasing
from edl_torch.trainer.liveness import Liveness
from edl_torch.trainer.position import Position
from edl_torch.trainer.registrar import Confirmer, Registrar
from edl_torch.trainer.reporter import Reporter
from edl_torch.trainer.state import State, TrainerConfig
from edl_torch.trainer.vocabulary import Logged, Procedure, Wait, runs_of


class Trainer:
    """What one process knows and decides of a dataset.

    Its methods, and those of its parts, are procedures (see `trainer.vocabulary`), or answer at once. The
    shell runs them under one lock, tells the time in `state.now`, and writes down `state.facts`.
    """

    def __init__(self, config: TrainerConfig, liveness: Liveness | None = None) -> None:
        self.state = State(config, liveness)
        self.registrar = Registrar(self.state)
        self.reporter = Reporter(self.state, self.registrar)
        self.leasing = Leasing(self.state, self.registrar, self.reporter)
        self.confirmer = Confirmer(self.state, self.registrar)
        self.plain = PlainPasses(self.state, self.reporter, self.confirmer)
        self.elastic = ElasticPasses(self.state, self.reporter, self.leasing, self.confirmer, self.plain)
        self.position = Position(self.state, self.registrar, self.reporter, self.elastic)

    def __repr__(self) -> str:
        return f"<Trainer {self.state.config.session[:8]} {self.state}>"

    def follow(self) -> None:
        """Leave leases and reports to another trainer, which holds the records of this one's batches."""
        self.state.config = replace(self.state.config, in_process=True, audited=False)
        if self.state.registered.plan is not None:
            self.state.liveness = None  # else nobody has asked yet whether it is ever in doubt

    # The loop -----------------------------------------------------------------------------------------------

    def open(self, epoch: int = NEW_PASS) -> Procedure[int]:
        """Begin an elastic pass over `epoch`, or the one that runs. Returns its number."""
        yield from self.registrar.plan()
        return (yield from self.elastic.open(epoch))

    def report(self, batch_size: int | None) -> Procedure[int]:
        """Note that a batch was trained on. Returns how many leases that completed."""
        if self.state.elastic:
            return (yield from self.elastic.report())
        return (yield from self.plain.report(batch_size))

    def fail_batch(self, batch_size: int | None, reason: str) -> Procedure[None]:
        """Put the batch in hand into quarantine: it could not be trained on."""
        if self.state.elastic:
            yield from self.elastic.fail_batch(reason)
        else:
            yield from self.plain.fail_batch(batch_size, reason)

    def close(self, timeout_s: float) -> Procedure[None]:
        """Give back what was not trained on, within `timeout_s` seconds. Raises what reporting it raises.

        What a master does not answer it takes back by itself when the session ends.
        """
        state, outbox = self.state, self.state.outbox
        try:
            state.close_pass()
            state.count_bad(at_end=True)
            self.elastic.count_without_steps()
            returned = runs_of(batch.ticket for batch in state.batches.touched())
            plan, current = state.registered.plan, state.supply.current
            is_over = plan is not None and 0 < plan.spec.num_epochs <= current.epoch + 1
            waits = state.batches.ended and is_over and state.batches.attached
            waiting = sum([batch.records for batch in state.batches.unfinished]) if waits else 0
            slowest = state.batches.slowest
            state.batches.clear()
            state.forget_counts()
            outbox.note(give_backs=state.inflight.give_back_unacknowledged(), returned=returned)
            outbox.forget_unavailable()
            yield from self.reporter.post()
            yield Wait(lambda: not outbox.unanswered or outbox.error, timeout_s)
        finally:
            state.closed = True
        outbox.raise_error()
        yield from self.elastic.warnings.of_no_step_at_the_end(waiting, slowest)

    def fail(self, error: Exception) -> None:
        """Keep an error of a thread beside the loop, for the loop to raise."""
        self.state.outbox.error = error

    # What reads ---------------------------------------------------------------------------------------------

    def begin_stream(self) -> Procedure[tuple[int, Plan]]:
        """Begin a stream of an elastic pass. Returns the number of the pass, and the dataset."""
        plan = yield from self.registrar.plan()
        return self.state.supply.current.number, plan

    def begin_plain(self, reading: Reading) -> Procedure[tuple[int, Plan]]:
        """Begin a stream of a plain pass. Returns the number of the pass, and the dataset."""
        plan = yield from self.registrar.plan()
        if not self.plain.is_late(reading):
            yield from self.elastic.supersede()
        return (yield from self.plain.begin(reading)), plan

    def fail_record(self, task: int, position: int, reason: str) -> Procedure[None]:
        """Put a record into quarantine that cannot be read."""
        state = self.state
        state.quarantine([(task, position, position + 1)], reason)
        state.plain.fail(task, position)
        yield from self.reporter.send()

    def data_changed(self, said: str) -> Procedure[None]:
        """Note what of its copy of the data a reading process finds changed."""
        self.state.data_changed(said)
        yield from ()

    def stream_broke(self, stream: str, ended_by: str = "") -> Procedure[None]:
        """Note that a reading process ended by an error, or hung up without a word: it died if its pass is
        open."""
        state = self.state
        if not state.supply.current.is_open:
            return
        plan = yield from self.registrar.plan()
        current = state.supply.current
        if current.is_open and not state.closed and stream not in current.broken:
            where = self._whereabouts(plan, stream) + (f" as {ended_by} ended it" if ended_by else "")
            current.broken[stream] = where
            state.facts.append(Logged(f"loader {stream} ended before its pass: {where}"))

    def _whereabouts(self, plan: Plan, stream: str) -> str:
        shards = [plan.shard(part) for part in self.state.inflight.unhanded(stream)]
        *before, at = map(_described, shards) if shards else ("no record",)
        return f"{at} (before them {', '.join(before)}, not delivered yet)" if before else at

    def broken_streams(self, timeout_s: float) -> Procedure[dict[str, str]]:
        """Return the reading processes of this pass that died, and what they were at; wait for the first."""
        broken = self.state.supply.current.broken
        yield Wait(lambda: broken, timeout_s)
        return dict(broken)

    # Beside the loop ----------------------------------------------------------------------------------------

    def wanted(self) -> Procedure[None]:
        """Give back what is not drawn: another trainer waits. The loop hears what reporting raises."""
        self.state.release_undrawn()
        yield from self.reporter.post()

    @property
    def has_work(self) -> bool:
        """Whether there is something to do beside the loop, where calls to the master take time."""
        return self.state.outbox.sendable or self.state.supply.wants_ahead

    def work(self) -> Procedure[None]:
        """Do what there is to do beside the loop, until the trainer is closed."""
        while True:
            yield Wait(lambda: self.state.closed or self.has_work)
            try:
                if self.state.outbox.sendable:
                    yield from self.reporter.send_one()
                elif self.state.closed:
                    return
                else:
                    yield from self.leasing.fetch_ahead()
            except EdlError as exc:
                self.state.outbox.error = exc


def _described(shard: Shard) -> str:
    """Return the shard's records, for people."""
    some = "some of " if shard.shuffled else ""
    return f"{some}records {shard.start} to {shard.end - 1} of {shard.name!r}"
