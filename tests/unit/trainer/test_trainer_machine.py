"""Trainers on one dispatcher, whose procedures are begun, interleaved, cut off and repeated at random.

A reference notes which records went to a loop and which it was done with. No record is acknowledged that is
not among those; in the end each has exactly one outcome, and trainers and master agree on what is lent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from trainer_kit import Master, Running, Shell

from edl_torch.core.calls import Grant
from edl_torch.errors import EdlError, JournalWentBack, MasterUnavailable, StaleLease
from edl_torch.trainer.batches import Batch
from edl_torch.trainer.foreign_loop import OWN_STREAM, Reading
from edl_torch.trainer.vocabulary import Call, Procedure, Ticket

RECORDS, SHARD, EPOCHS, BATCH = 12, 5, 2, 2
STREAMS = ("worker 0", "worker 1")
PATIENCE = 2000  # actions after which what is under way is taken to be stuck

Position = tuple[int, int]  # task, position


class Watched(Master):
    """Sees that every acknowledgement is of records that their trainer's loop was done with."""

    def __init__(self) -> None:
        super().__init__(
            records=RECORDS,
            shard=SHARD,
            num_epochs=EPOCHS,
            lease_timeout_s=600.0,
            grace_s=600.0,
            progress_timeout_s=30.0,
        )
        self.loops: dict[str, Loop] = {}
        self.saved: dict[str | None, Counter[Any]] = {None: Counter()}
        self.undone: Counter[Any] = (
            Counter()
        )  # what was told and is not of the lineage that the dataset is in
        ledger = self.dispatcher.find_ledger("training")
        assert ledger is not None
        self.ledger = ledger

    def ask(self, call: Call) -> Any:
        if call.request.name() == "report":
            loop = self.loops[call.request.session]
            for done in call.request.acknowledgements:
                loop.check_done(done.task, done.start, done.upto)
            for failure in call.request.failures:
                assert (failure.task, failure.position) in loop.failed
        lineage = self.ledger.lineage
        answer = super().ask(call)
        if call.request.name() == "snapshot":
            self.saved[answer] = self.told
        if call.request.name() == "restore" and self.ledger.lineage != lineage:
            for loop in self.loops.values():
                loop.is_quiet = False
            self.undone = self.outcomes.acknowledged + self.outcomes.quarantined
            self.undone.subtract(self.saved[call.request.token])
        return answer

    @property
    def told(self) -> Counter[Any]:
        """Outcomes of the lineage that the dataset is in."""
        told = self.outcomes.acknowledged + self.outcomes.quarantined
        told.subtract(self.undone)
        return +told


@dataclass
class Pending:
    """A procedure under way, and what follows from its end."""

    running: Running[Any]
    on_done: Callable[[Any], object]
    on_error: Callable[[], object]
    on_its_way: list[Any] = field(default_factory=list)  # the answer, or the error, that the master sent


class Loop:
    """One trainer as those who drive it see it: its loop, the processes that read for it, and its work."""

    def __init__(self, master: Watched, session: str, kind: str, *, in_process: bool) -> None:
        self.kind = kind
        self.master = master
        ahead = None if kind == "tell" else 0
        self.shell = Shell(
            master, session, batch_size=BATCH, lookahead=ahead, in_process=in_process, audited=False
        )
        self.pending: dict[str, Pending] = {}
        self.granted: dict[int, Grant] = {}
        self.drawn: dict[str, list[Position]] = {stream: [] for stream in STREAMS}
        self.ended: set[str] = set()
        self.ahead: list[list[Position]] = []  # a wrapper that tells has them
        self.handed: list[list[Position]] = []
        self.has_hand = False  # the last of them was passed on by a wrapper, and nothing came after
        self.done: set[Position] = set()
        self.failed: set[Position] = set()
        self.number = 0
        self.at = "idle"
        self.is_asking = False
        self.exhausted = False  # the loop was told, or would have been, that all is handed out
        self.is_quiet = False  # nothing has happened at the master since a batch is on its way to the loop
        self.is_out = False  # of a history that another trainer has left
        self.optimizer = self.shell.state.batches.attach() if kind in ("step", "tell") else None
        master.loops[session] = self
        if not in_process:
            self.begin("work", self.shell.trainer.work())
            self.shell._worker = self.pending["work"].running

    def __repr__(self) -> str:
        return f"<Loop {self.shell.session} {self.kind} {self.at} {sorted(self.pending)}>"

    # The reference ----------------------------------------------------------------------------------------

    def check_done(self, task: int, start: int, upto: int) -> None:
        for position in range(max(start, self.granted[task].slice.skip), upto):
            assert (task, position) in self.done | self.failed, f"{(task, position)} is not trained on"

    def finish_with(self) -> None:
        """The loop is done with all that it was handed."""
        for batch in self.handed:
            self.done.update(batch)
        self.handed = []
        self.has_hand = False

    def leave_wrapper(self) -> None:
        """The batch in hand goes back, and what a wrapper has still."""
        self.ahead = []
        if self.has_hand:
            self.handed, self.has_hand = self.handed[:-1], False

    # Procedures -------------------------------------------------------------------------------------------

    def begin(
        self,
        name: str,
        procedure: Procedure[Any],
        on_done: Callable[[Any], object] = lambda _: None,
        on_error: Callable[[], object] = lambda: None,
    ) -> None:
        assert name not in self.pending
        try:
            running = self.shell.start(procedure)
        except (MasterUnavailable, StaleLease) as error:
            self._failed(error, on_error)
            return
        if running.is_done:
            on_done(running.finish())
        else:
            self.pending[name] = Pending(running, on_done, on_error)

    def _failed(self, error: EdlError, on_error: Callable[[], object]) -> None:
        assert not isinstance(error, JournalWentBack), error
        on_error()
        fence = self.shell.state.fence
        self.is_out = self.is_out or fence.lineage not in (0, self.master.ledger.lineage)

    def _go_on(self, name: str, resume: Callable[[], object]) -> None:
        pending = self.pending[name]
        try:
            resume()
        except (MasterUnavailable, StaleLease) as error:
            del self.pending[name]
            self._failed(error, pending.on_error)
            return
        if pending.running.is_done:
            del self.pending[name]
            pending.on_done(pending.running.finish())

    def _answer(self, action: Any) -> Any:
        """What comes of an action: its answer, or the error that ends it."""
        try:
            return self.shell.ask(action) if isinstance(action, Call) else self.shell.act(action)
        except EdlError as error:
            return error

    @property
    def able(self) -> list[str]:
        """The procedures that can go on."""
        return [name for name, pending in self.pending.items() if not pending.running.must_wait]

    def reach_master(self, name: str) -> None:
        """The call of a procedure reaches the master; its answer is on its way, and no earlier one."""
        pending = self.pending[name]
        if isinstance(pending.running.action, Call):
            pending.on_its_way = [self._answer(pending.running.action)]

    def step(self, name: str) -> None:
        """A procedure gets its answer."""
        pending = self.pending[name]
        answer = pending.on_its_way.pop() if pending.on_its_way else self._answer(pending.running.action)
        running = pending.running
        if isinstance(answer, EdlError):
            self._go_on(name, lambda: running.fail(answer))
        else:
            self._go_on(name, lambda: running.answer(answer))

    def lose(self, name: str) -> None:
        """A procedure gets no answer, whether its call reached the master or not."""
        pending = self.pending[name]
        if isinstance(pending.running.action, Call):
            pending.on_its_way = [MasterUnavailable("no answer")]
            self.step(name)

    def lose_answer(self, name: str) -> None:
        """The call of a procedure reaches the master, and the answer to it is lost."""
        self.reach_master(name)
        self.lose(name)

    def interrupt(self, name: str) -> None:
        if name != "work":
            pending = self.pending.pop(name)
            pending.running.interrupt()
            pending.on_error()

    # What reads -------------------------------------------------------------------------------------------

    @property
    def reads_batches(self) -> bool:
        return self.kind != "plain" and self.at in ("asking", "training")

    def draw(self, stream: str) -> None:
        if stream in self.pending or stream in self.ended or not self.reads_batches:
            return
        number = self.number

        def on_done(grant: Grant | None) -> None:
            if grant is not None:
                self.granted[grant.task] = grant
            if number != self.number or not self.reads_batches:
                return
            if grant is None:
                self.ended.add(stream)
            else:
                self.drawn[stream] += positions_of(grant)

        self.begin(
            stream, self.shell.trainer.leasing.next(stream, number), on_done, lambda: self.ended.add(stream)
        )

    def fail_record(self, stream: str, draw: st.DataObject) -> None:
        if "link" not in self.pending and self.drawn[stream]:
            places = self.drawn[stream]
            task, position = places.pop(draw.draw(st.integers(0, len(places) - 1)))
            self.failed.add((task, position))
            self.begin("link", self.shell.trainer.fail_record(task, position, "torn"))

    def be_wanted(self) -> None:
        if "wanted" not in self.pending:
            self.begin("wanted", self.shell.trainer.wanted())

    # The loop ---------------------------------------------------------------------------------------------

    def act(self, what: str, draw: st.DataObject) -> None:
        """Do something in the loop, where it is free and may."""
        if "loop" in self.pending or self.is_out:
            return
        if self.kind == "plain":
            self._act_plain(what, draw)
        elif what in ("open", "close", "snapshot", "restore", "step", "pass") or self.at in (
            "asking",
            "training",
        ):
            getattr(self, f"_{what}")(draw)

    def _loop(
        self,
        procedure: Procedure[Any],
        on_done: Callable[[Any], object] = lambda _: None,
        *,
        ends: bool = False,
    ) -> None:
        def leave() -> None:
            if ends:
                self.at = "left" if self.at != "idle" else "idle"

        self.begin("loop", procedure, on_done, leave)

    def _forget_drawn(self) -> None:
        self.drawn = {stream: [] for stream in STREAMS}

    def _open(self, _: st.DataObject) -> None:
        if self.at == "left":
            return
        self._forget_drawn()
        self.ended = set()
        self.at = "idle"
        self.exhausted = False
        if self.kind == "next":
            self.handed = []  # an open pass is ended, and they go back
        self.leave_wrapper()

        def on_done(number: int) -> None:
            self.number, self.at, self.is_asking = number, "asking", True

        self._loop(self.shell.trainer.open(), on_done)

    def _withdraw(self) -> None:
        """The loop is left: the batch in hand goes back."""
        self._forget_drawn()
        if self.kind == "next":
            self.handed = []
        elif self.kind == "tell":
            if self.at != "idle" and not (self.exhausted and self.is_asking):
                self.leave_wrapper()  # else it passes on what it has, and the next pass ends that
        elif self.at != "idle" and not self.is_asking:
            self.handed = self.handed[:-1]
        self.at = "idle"

    def _close(self, _: st.DataObject) -> None:
        self._withdraw()
        self._loop(self.shell.elastic.close(self.number))

    def _request(self, _: st.DataObject) -> None:
        self.is_asking = True
        if self.kind == "next":
            self.finish_with()

        def on_done(_: bool) -> None:
            self.at = "asking"

        self._loop(self.shell.elastic.request(self.number), on_done, ends=True)

    def _hand(self, draw: st.DataObject) -> None:
        streams = [stream for stream in STREAMS if self.drawn[stream]]
        if self.at != "asking" or not streams:
            return
        stream = draw.draw(st.sampled_from(streams))
        batch, self.drawn[stream] = self.drawn[stream][:BATCH], self.drawn[stream][BATCH:]
        if len(batch) < BATCH and stream in self.ended and draw.draw(st.booleans()):
            self._loop(self.shell.elastic.return_remainder(ticket_of(batch)), ends=True)
            return

        self.is_quiet = self.is_member

        def on_done(is_mine: bool) -> None:
            if is_mine:
                tasks = {task for task, _ in batch}
                assert not self.is_quiet or tasks <= {task for task, _ in self.lent}, f"{batch} is another's"
                (self.ahead if self.kind == "tell" else self.handed).append(batch)
                self.at, self.is_asking = "training", False

        self._loop(self.shell.elastic.hand(ticket_of(batch)), on_done, ends=True)

    def _pass(self, _: st.DataObject) -> None:
        """A wrapper passes on what it has read first; what is void by now, too."""
        if self.kind != "tell":
            return
        batch = self.ahead.pop(0) if self.ahead else None
        self.has_hand = batch is not None
        if batch is not None:
            self.handed.append(batch)

        def on_done(passed: Batch | None) -> None:
            assert batch is None or passed is None or passed.ticket in ((), ticket_of(batch))

        self._loop(self.shell.elastic.passed_on(), on_done, ends=True)

    def _look(self, _: st.DataObject) -> None:
        if self.at != "asking" or set(STREAMS) & set(self.pending):
            return
        self._forget_drawn()
        self.ended, self.exhausted = set(STREAMS), True  # all have read to the end, before the loop looks

        def on_done(more: bool) -> None:
            self.exhausted = not more
            if more:
                self.ended = set()

        self._loop(self.shell.elastic.look_for_more(), on_done, ends=True)

    def _step(self, _: st.DataObject) -> None:
        # Else it looks like a loop that is behind.
        if self.optimizer is not None and self.shell.state.batches.unfinished:
            self.finish_with()
            self._loop(self.shell.elastic.stepped(self.optimizer))

    def _report(self, _: st.DataObject) -> None:
        self.finish_with()
        self._loop(self.shell.trainer.report(None))

    def _fail_batch(self, _: st.DataObject) -> None:
        if self.at == "training" and self.handed and self.kind != "tell":
            self.failed.update(self.handed.pop())
            self._loop(self.shell.trainer.fail_batch(None, "NaN"))

    def _give_back(self, _: st.DataObject) -> None:
        is_near = self.at == "training" and self.kind != "tell"
        if is_near and self.handed and self.shell.state.batches.has_in_hand:
            self.handed.pop()
            self._loop(self.shell.elastic.give_back())

    def _snapshot(self, _: st.DataObject) -> None:
        if self.kind == "next":
            self.finish_with()
        self._loop(self.shell.trainer.position.snapshot())

    def _restore(self, draw: st.DataObject) -> None:
        held, ahead, has_hand = self.handed, self.ahead, self.has_hand
        self._withdraw()

        def on_done(_: None) -> None:
            self.handed, self.ahead, self.has_hand = [], [], False

        def on_error() -> None:  # a restore that fails leaves all as it was
            self.handed, self.ahead, self.has_hand = held, ahead, has_hand

        token = draw.draw(st.sampled_from(list(self.master.saved)))
        self.begin("loop", self.shell.trainer.position.restore(token), on_done, on_error)

    def _act_plain(self, what: str, draw: st.DataObject) -> None:
        queue = self.drawn["worker 0"]
        if what == "open":
            self._forget_drawn()
            self.at = "idle"

            def on_done(_: object) -> None:
                self.at = "reading"

            reading = Reading(stream=OWN_STREAM)
            self._loop(self.shell.trainer.begin_plain(reading), on_done)
        elif what == "hand" and self.at == "reading":
            number = self.shell.state.supply.current.number

            def on_grant(grant: Grant | None) -> None:
                if grant is not None:
                    self.granted[grant.task] = grant
                    queue.extend(positions_of(grant))

            self._loop(self.shell.trainer.leasing.next(OWN_STREAM, number), on_grant)
        elif what == "report" and self.at == "reading" and queue:
            count = draw.draw(st.integers(1, len(queue)))
            self.done.update(queue[:count])
            del queue[:count]
            self._loop(self.shell.trainer.report(count))
        elif what == "close" and self.at == "reading":
            self._forget_drawn()
            self.at = "idle"
            self._loop(self.shell.trainer.plain.finish(abandoned=True))
        elif what in ("snapshot", "restore"):
            getattr(self, f"_{what}")(draw)

    def go_on_training(self, draw: st.DataObject) -> None:
        """Do what a loop that nothing happens to does next, to its end."""
        self.begin_next(draw)
        self.come_to_rest()

    def begin_next(self, draw: st.DataObject) -> None:
        """Begin what a loop that nothing happens to does next."""
        for stream in STREAMS:
            if self.at == "asking" and not self.drawn[stream]:
                self.draw(stream)
        if self.kind == "plain":
            what = "report" if self.drawn["worker 0"] else "hand" if self.at == "reading" else "open"
        elif self.at != "left" and (len(self.ahead) > 1 or (self.exhausted and self.ahead)):
            what = "pass"
        elif self.at == "asking":
            what = "hand" if any(self.drawn.values()) else "look"
        elif self.at == "training":
            what = "step" if self.optimizer is not None and self.handed else "request"
        else:
            what = "close" if self.at == "left" else "open"
        self.act(what, draw)

    # The end ----------------------------------------------------------------------------------------------

    def come_to_rest(self) -> None:
        """Let all that is under way come to its end."""
        for count in range(PATIENCE):
            if not self.able:
                break
            if self.kind == "plain" and count > 8 and "loop" in self.pending:
                self.interrupt("loop")  # it waits for what others hold
            else:
                self.step(self.able[0])
        assert set(self.pending) <= {"work"}, f"{self} waits for what nobody does"

    @property
    def busy(self) -> bool:
        return isinstance(self.pending["work"].running.action, Call)

    def leases(self) -> set[tuple[int, int]]:
        return set(self.shell.state.inflight.leases())

    @property
    def lent(self) -> set[tuple[int, int]]:
        """What the master has lent to the session."""
        return {(lease.task, lease.attempt) for lease in self.master.ledger.leases.of(self.shell.session)}

    @property
    def is_member(self) -> bool:
        """Whether the master knows it as what it takes itself for."""
        member = self.master.dispatcher.members.get(self.shell.session)
        fence = self.shell.state.fence
        known = member is not None and member.number == fence.member
        return known and fence.lineage == self.master.ledger.lineage

    @property
    def is_at_rest(self) -> bool:
        state = self.shell.state
        busy = set(self.pending) - {"work"} or ("work" in self.pending and self.busy)
        owes = state.outbox.unanswered or state.supply.lost_in or self.shell.trainer.has_work
        return not (busy or owes)


def positions_of(grant: Grant) -> list[Position]:
    return [(grant.task, position) for position in range(grant.slice.skip, grant.slice.stop)]


def positions_in(ticket: Ticket) -> list[Position]:
    return [(task, position) for task, first, after in ticket for position in range(first, after)]


def ticket_of(batch: list[Position]) -> Ticket:
    """One run for each stretch of positions of a lease."""
    runs = []
    for _, found in groupby(enumerate(batch), lambda item: (item[1][0], item[1][1] - item[0])):
        run = [place for _, place in found]
        runs.append((run[0][0], run[0][1], run[-1][1] + 1))
    return tuple(runs)


which = st.integers(0, 2)
WHAT = ["open", "close", "request", "hand", "look", "step", "report", "snapshot", "restore"]
WHAT += ["fail_batch", "give_back", "pass"]
HOW = ["step"] * 5 + ["reach_master", "lose", "lose_answer", "interrupt"]


class TrainerMachine(RuleBasedStateMachine):
    """Three trainers and all that may happen to them."""

    def __init__(self) -> None:
        super().__init__()
        self.master = Watched()
        self.loops: list[Loop] = []

    @initialize(
        kinds=st.lists(st.sampled_from(["next", "step", "tell", "plain"]), min_size=3, max_size=3),
        in_process=st.lists(st.booleans(), min_size=3, max_size=3),
    )
    def begin(self, kinds: list[str], in_process: list[bool]) -> None:
        for number, (kind, near) in enumerate(zip(kinds, in_process, strict=True)):
            self.loops.append(Loop(self.master, f"s{number}", kind, in_process=near))

    @rule(
        which=which,
        what=st.sampled_from(WHAT),
        data=st.data(),
    )
    def act(self, which: int, what: str, data: st.DataObject) -> None:
        self.loops[which].act(what, data)

    @rule(which=which, count=st.integers(1, 12), data=st.data())
    def go_on_training(self, which: int, count: int, data: st.DataObject) -> None:
        for _ in range(count):
            self.loops[which].go_on_training(data)

    @rule(which=which, steps=st.integers(0, 3), how=st.sampled_from(HOW[-3:]), data=st.data())
    def go_on_badly(self, which: int, steps: int, how: str, data: st.DataObject) -> None:
        loop = self.loops[which]
        loop.begin_next(data)
        for do in [loop.step] * steps + [getattr(loop, how)]:
            if loop.able:
                do(data.draw(st.sampled_from(loop.able)))

    @rule(which=which, what=st.sampled_from(["draw", "fail", "want"]), data=st.data())
    def do_beside(self, which: int, what: str, data: st.DataObject) -> None:
        loop, stream = self.loops[which], data.draw(st.sampled_from(STREAMS))
        if what == "draw":
            loop.draw(stream)
        elif what == "fail":
            loop.fail_record(stream, data)
        else:
            loop.be_wanted()

    @rule(which=which, data=st.data(), how=st.sampled_from(HOW))
    def go_on(self, which: int, data: st.DataObject, how: str) -> None:
        loop = self.loops[which]
        if loop.able:
            getattr(loop, how)(data.draw(st.sampled_from(loop.able)))

    @rule(which=which, what=st.sampled_from(["give up", "give up and say so", "break", "stall"]))
    def trouble(self, which: int, what: str) -> None:
        """The master gives a session up, whose trainer may hear of it; or its stream breaks; or all stall."""
        loop = self.loops[which]
        member = self.master.dispatcher.members.get(loop.shell.session)
        for each in self.loops:
            each.is_quiet = False
        if what == "stall":
            self.master.stall()
        elif member is not None and what != "break":
            self.master.dispatcher.give_up(member, self.master.now)
            if what == "give up and say so" and loop.shell.state.liveness is not None:
                loop.shell.liveness.doubt()
        elif loop.is_member:
            loop.shell.break_stream()

    @invariant()
    def trainers_know_what_they_were_lent(self) -> None:
        """Nothing is on loan to a trainer at rest that does not know of it: it would be so for ever."""
        for loop in self.loops:
            if loop.is_at_rest and loop.is_member:
                assert loop.lent <= loop.leases(), loop

    def teardown(self) -> None:
        if not self.loops:
            return
        for loop in self.loops:
            loop.come_to_rest()
        for loop in self.loops:
            self._settle(loop)
        number = 0
        while not self.master.status.finished:
            number += 1
            assert number < 10, "it never ends"
            fresh = self.loops[0] if number < 5 and not self.loops[0].is_out else None
            if fresh is None:
                fresh = Loop(self.master, f"last {number}", "next", in_process=True)
            self._train_through(fresh)
        told = self.master.told
        assert not [record for record, count in told.items() if count > 1]
        assert len(told) + self.master.status.dropped == EPOCHS * RECORDS, "remainders alone may be dropped"
        assert self.master.status.leases == 0

    def _train_through(self, loop: Loop) -> None:
        """One pass of an elastic loader; whoever was a plain loop before may be one too."""
        shell = loop.shell
        number = shell.run(shell.trainer.open())
        while shell.run(shell.elastic.more_to_read()):
            while (grant := shell.next()) is not None:
                loop.granted[grant.task] = grant
                good = [place for place in positions_of(grant) if place not in loop.failed]
                if shell.run(shell.elastic.hand(ticket_of(good))):
                    loop.done.update(good)
                    if loop.kind == "tell":
                        shell.run(shell.elastic.passed_on())
                    if loop.optimizer is not None:
                        shell.run(shell.elastic.stepped(loop.optimizer))
                    shell.request()
        shell.run(shell.elastic.close(number))

    def _settle(self, loop: Loop) -> None:
        """The loop ends its pass. Then it and the master agree on what it holds."""
        shell, state = loop.shell, loop.shell.state
        if state.fence.lineage not in (0, self.master.ledger.lineage):
            loop.is_out = True
            with suppress(StaleLease):
                shell.run(shell.trainer.close(1.0))
            self.master.dispatcher.leave(shell.session, state.fence.member)
            return
        for _ in range(3):  # what an earlier report led to comes up, and is raised once
            try:
                loop.handed = loop.handed if loop.optimizer is not None else []
                if loop.kind == "plain":
                    shell.run(shell.trainer.plain.finish(abandoned=True))
                shell.run(shell.elastic.close(loop.number))
                while state.batches.ahead:
                    passed = shell.run(shell.elastic.passed_on())
                    loop.done.update(positions_in(passed.ticket if passed else ()))
                if loop.optimizer is not None and state.batches.unfinished:
                    loop.finish_with()
                    shell.run(shell.elastic.stepped(loop.optimizer))
                shell.run(shell.trainer.reporter.flush())
                shell.run(shell.trainer.registrar.plan())
                shell.liveness.doubt()
                shell.run(shell.trainer.confirmer.ensure())
                shell.run(shell.trainer.reporter.flush())
            except (MasterUnavailable, StaleLease):
                continue
            break
        assert loop.is_member
        if not state.supply.lost_in:  # else the next pass asks once more, and gives them back
            assert loop.lent == loop.leases() == set(), loop
        if loop is not self.loops[0]:
            shell.run(shell.trainer.close(1.0))
            self.master.dispatcher.leave(shell.session, state.fence.member)


TrainerMachine.TestCase.settings = settings(
    deadline=None,
    max_examples=60,
    stateful_step_count=60,
    print_blob=True,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestTrainerMachine = TrainerMachine.TestCase


@pytest.mark.long
def test_many_and_long_runs() -> None:
    more = settings(TrainerMachine.TestCase.settings, max_examples=3000, stateful_step_count=150)
    run_state_machine_as_test(TrainerMachine, settings=more)
