"""What a loop does, and what becomes of its batches: a table for the pure trainer and for the real loader.

A script is a line of words. A letter asks for a batch and names it. After `=` stand the batches that the
master was told of as trained on, after `bad=` those that failed, and after `held=` those that the trainer
still holds when its loop is left. After each script the loop trains on to the end of the data: then each
record of each epoch has had one outcome.

| word | the loop |
| --- | --- |
| `a` … `z`, `R` | asks for a batch; reads all batches that are left of the pass, and its end |
| `.` | asks, and hears that the pass is over |
| `stuck` | asks, and hears that its own batches are all that is left: AccountingError |
| `open`, `leave` | begins a pass (as asking does where none is open); is left, with the batch in hand |
| `attach`, `step`, `detach` | does so with its optimizer; `step:slow` with one named `slow` |
| `train` | reads what is left of the pass, and steps on each batch |
| `report`, `fail`, `token` | reports the batch in hand; as bad; takes a token |
| `back`, `window` | gives the batch in hand back; all that wait for a step |
| `pass` | passes on a batch that its wrapper has read ahead |
| `refused` | gives the batch in hand back, which counts already: AccountingError |
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from edl_torch.errors import AccountingError
from edl_torch.testing.fake_master import Outcomes, Record

BATCH, SHARD = 4, 8
Batch = frozenset[Record]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A script; how its loader was made: batches of data, epochs, batches that a wrapper reads ahead (None:
    it tells); what it is warned of, also where gradients are seen; and what the error of `stuck` says."""

    script: str
    batches: int = 8
    epochs: int = 1
    lookahead: int | None = 0
    warned: tuple[str, ...] = ()
    warned_where_seen: tuple[str, ...] = ()
    stuck: str = ""


AGAIN = (r"stepped on gradients of \d record\(s\) of 'training' that went back",)
IDLE = r"did not step since the last pass began.*loader\.detach\(optimizer\)"
LEFT = (
    "the loop was left with the batch in hand of 'training', which goes back and is read again"
    r".*loader\.attach\(optimizer\).*loader\.stepped\(\) before leaving it",
)
TOO_LATE = (r"err_msg=…\) came after a step on the batch in hand of 'training'.*before optimizer\.step\(\)",)
STUCK = r"\d record\(s\) of 'training' were handed out after the last optimizer\.step\(\)"

TABLE = {
    # Without an optimizer -----------------------------------------------------------------------------------
    "asking for the next batch acknowledges the one before": Row(script="a = b =a c =ab"),
    "the end of a pass acknowledges all": Row(script="a b . =ab", batches=2),
    "a loop that is left gives back the batch in hand": Row(
        script="a b c leave =ab held= R =abR", warned=LEFT
    ),
    "a loop that is left before its first batch holds nothing": Row(script="open leave = held="),
    "a later pass ends the one before": Row(script="a b open =a R", warned=LEFT),
    "a report counts the batch in hand": Row(script="a report =a b report =ab"),
    "a batch that was reported does not go back": Row(script="a b report leave =ab held="),
    "a token counts the batch in hand": Row(script="a token =a b leave =a held=", warned=LEFT),
    "a batch that was counted in a token does not go back": Row(script="a b token leave =ab held="),
    "a batch that failed is bad, and no other": Row(script="a b fail bad=b =a c =a leave bad=b", warned=LEFT),
    "a loop that is left with one that failed loses nothing": Row(script="a b fail leave =a bad=b held="),
    "a batch that is given back is read again": Row(script="a b back =a R =aR"),
    "a loop that is left is warned of once": Row(script="a b leave c leave =a held=", warned=LEFT),
    "a batch is given back once": Row(script="a b back back =a leave held="),
    "a batch that was reported is none that failed": Row(script="a report fail =a", warned=TOO_LATE),
    "a batch that counts already cannot be given back": Row(script="a report refused =a"),
    "of a window that counts nothing is given back": Row(script="a report window =a"),
    "epochs follow each other": Row(script="a b . =ab c d . =abcd", batches=2, epochs=2),
    "a pass after the last epoch is warned of once": Row(
        script="a b . . . =ab",
        batches=2,
        warned=(r"all 1 epoch\(s\) of 'training' are over.*num_epochs=.*for epoch in loader\.epochs\(\)",),
    ),
    # With one -----------------------------------------------------------------------------------------------
    "an attached optimizer decides": Row(script="attach a b = step =ab c =ab step =abc"),
    "one that never steps is warned of once": Row(
        script="attach a . b . c report =abc",
        batches=1,
        epochs=3,
        warned=(rf"SGD, attached for 'training', {IDLE}",),
    ),
    "a batch that was stepped on cannot be given back": Row(script="attach a step refused =a"),
    "two steps on a batch are one": Row(script="attach a step step =a b =a"),
    "of a loop that is left only what was not stepped on goes back": Row(
        script="attach a step b step c leave =ab held="
    ),
    "a batch that was stepped on does not go back": Row(script="attach a b step leave =ab held="),
    "what was gathered outlives the loop, and the batch in hand does not": Row(
        script="attach a b c d leave = held=abc step =abc held=", warned_where_seen=AGAIN
    ),
    "a window is gathered across the end of an epoch": Row(
        script="attach a . = held=a b = step =ab . c step . =abc",
        batches=1,
        epochs=3,
        warned=(f"SGD, attached for 'training', {IDLE}",),
    ),
    "a token counts no batch that a step is due on": Row(script="attach a step b token =a step token =ab"),
    "a report counts as a step": Row(script="attach a b report =ab"),
    "a batch that failed does not take those with it that were gathered before": Row(
        script="attach a b fail bad=b = step =a"
    ),
    "nor where it fails twice": Row(script="attach a b fail fail bad=b = step =a"),
    "nor does it where the loop is left": Row(script="attach a b fail leave bad=b = held=a step =a"),
    "nor where it gives back, too": Row(script="attach a b fail back bad=b leave held=a step =a"),
    "a batch that was stepped on is none that failed": Row(
        script="attach a step =a fail =a b fail bad=b", warned=TOO_LATE
    ),
    "nor is one that one of two optimizers has stepped on": Row(
        script="attach attach:slow a step fail = step:slow =a", warned=TOO_LATE
    ),
    "no step is due on a batch that was given back": Row(
        script="attach a b back = step =a", warned_where_seen=AGAIN
    ),
    "a window is given back as a whole": Row(script="attach a b window = leave held="),
    "a window is given back after the end of its pass": Row(
        script="attach a b . held=ab window held= train =R", batches=2, warned_where_seen=AGAIN
    ),
    "an optimizer that is attached in the loop counts from then on": Row(script="a b attach c =a step =abc"),
    "one that is attached in the midst of a batch decides on it": Row(script="a attach = b = step =ab"),
    "one that is attached in the midst of a batch has not stepped on it": Row(
        script="a attach fail bad=a b step =b"
    ),
    "what the last optimizer left waits for a later one": Row(
        script="attach a b detach c = attach:new = step:new =abc"
    ),
    "what it left and went back waits for none": Row(script="attach a detach back = b c =b"),
    "nor does what it left and failed": Row(script="attach a detach fail bad=a b c =b"),
    "without an optimizer left batches count as without one": Row(script="attach a step detach b =a c =ab"),
    "batches that no step ever comes for are an error": Row(
        script="attach a b . = stuck report =ab",
        batches=2,
        stuck=rf"{STUCK} \(SGD\) and nothing else is left",
    ),
    "and no error after the last epoch, where all others were stepped on": Row(
        script="attach a step b c . . =abc", batches=3, warned=(STUCK,)
    ),
    # With several -------------------------------------------------------------------------------------------
    "two optimizers must both step": Row(
        script="attach attach:slow a step = step:slow =a b step:slow =a step =ab"
    ),
    "the slowest of several decides": Row(
        script="attach attach:slow a step b step = c step step:slow =abc d step leave =abc held="
    ),
    "one that is detached holds back nothing more": Row(
        script="attach attach:slow a step b = detach:slow =a step =ab"
    ),
    "one that takes part later decides on what waits": Row(
        script="attach a attach:new detach = b = step:new =ab"
    ),
    "one that steps no more is named": Row(
        script="attach attach:slow a step step:slow b step step:slow . =ab "
        "c step d step . =ab stuck detach:slow =abcd",
        batches=2,
        epochs=2,
        warned=(f"slow {IDLE}",),
        stuck=rf"{STUCK} \(slow\) and nothing else is left",
    ),
    "a new one in each epoch counts from then on": Row(
        script="attach a b step . detach attach:new c =ab d step:new . =abcd", batches=2, epochs=2
    ),
    # Behind a wrapper that reads ahead ----------------------------------------------------------------------
    "what a wrapper reads ahead is not done with": Row(script="a b c = d =a e =ab", lookahead=2),
    "it goes back where the loop is left": Row(script="a b c leave =a held=", lookahead=1, warned=LEFT),
    "so do several": Row(script="attach a b step = c step =a leave held=", lookahead=2),
    "a step does not pass on what was read ahead": Row(script="attach a b step =a c step =ab", lookahead=1),
    "nor does a step before there is any": Row(script="attach a step step = b step =a", lookahead=1),
    "steps after the last batch do": Row(script="attach a b step . =a step =ab", batches=2, lookahead=1),
    "each of them passes on one more": Row(
        script="attach a b c d . step =abc step =abcd", batches=4, lookahead=2
    ),
    "once all optimizers have made it": Row(
        script="attach attach:slow a b c d . step = step:slow =abc step =abc step:slow =abcd",
        batches=4,
        lookahead=2,
    ),
    "without an optimizer the next pass does": Row(
        script="a b . =a open =ab", batches=2, epochs=2, lookahead=1
    ),
    "a report leaves what was read ahead": Row(script="attach a b report =a", lookahead=1),
    "the batch in hand is the one that fails": Row(script="a b c fail bad=b =a", lookahead=1),
    "the batch in hand alone goes back": Row(
        script="attach a b back = c step =b", lookahead=1, warned_where_seen=AGAIN
    ),
    # Behind one that tells ----------------------------------------------------------------------------------
    "of a wrapper that tells what it passes on counts": Row(
        script="a b = pass = pass =a pass =ab", lookahead=None
    ),
    "what it has read and not passed on no step is on": Row(
        script="attach a b step = pass step =a pass step =ab", lookahead=None
    ),
    "all that it has passed on counts": Row(script="a b . pass pass pass =ab", batches=2, lookahead=None),
    "what it has passed on is in hand until more is asked of it": Row(
        script="attach a b pass pass pass leave held=ab step =ab", lookahead=None
    ),
    "and still is where the wrapper asks for itself": Row(
        script="attach a b pass c leave held=", lookahead=None
    ),
    "what it has read and passed none on of goes back": Row(
        script="a b . open = held=", batches=2, lookahead=None
    ),
    "what it has not passed on goes back with the next pass": Row(
        script="a b . pass pass =a open =a held=", batches=2, lookahead=None, warned=LEFT
    ),
    "with an optimizer so does what was not stepped on": Row(
        script="attach a b . pass step =a pass open =a held=", batches=2, lookahead=None
    ),
    "nor do steps after the end count more than it has passed on": Row(
        script="attach a b . pass step =a step =a pass step =ab", batches=2, lookahead=None
    ),
    "what failed is the batch that was passed on": Row(
        script="attach a b c pass pass fail bad=b = step =a", lookahead=None
    ),
}

rows = pytest.mark.parametrize(
    "row", [pytest.param(row, id=name.replace(" ", "_")) for name, row in TABLE.items()]
)


class TabledLoop(ABC):
    """A loop that does what a script says. What it was handed is named; a name holds on to its records."""

    sees_gradients = False

    def __init__(self, row: Row) -> None:
        self.row = row
        self.named: dict[str, Counter[Record]] = {}
        self.warned: list[str] = []
        self._attached: list[str] = []

    @property
    @abstractmethod
    def outcomes(self) -> Outcomes:
        """What the master was told."""

    @abstractmethod
    def flush(self) -> None:
        """Wait until the master has heard all."""

    @abstractmethod
    def held(self) -> int:
        """How many records the trainer holds."""

    @abstractmethod
    def is_finished(self) -> bool:
        """Whether all epochs are over."""

    @abstractmethod
    def open(self) -> None:
        """Begin a pass."""

    @abstractmethod
    def next(self) -> Batch | None:
        """Ask for a batch; None at the end. Begin a pass where none is open."""

    @abstractmethod
    def leave(self) -> None:
        """Leave the loop, where there is one."""

    @abstractmethod
    def do(self, word: str, optimizer: str) -> None:
        """Do one word: attach, step, detach, report, fail, token, back, window or pass."""

    def run(self) -> None:
        """Do the whole script; then train on to the end of the data, and look at what came of it."""
        for word in self.row.script.split():
            try:
                self.do_word(word)
            except AssertionError as error:
                raise AssertionError(f"at {word!r} of {self.row.script!r}: {error}") from error
        self.flush()
        expected = [*self.row.warned, *(self.row.warned_where_seen if self.sees_gradients else ())]
        assert len(self.warned) == len(expected), self.warned
        for warning, pattern in zip(self.warned, expected, strict=True):
            assert re.search(pattern, warning), warning
        self._finish()

    def do_word(self, word: str) -> None:
        what, equal, names = word.partition("=")
        if equal:
            self.flush()
            wanted = sum((self.named[name] for name in names), Counter[Record]())
            if what == "held":
                assert self.held() == wanted.total(), f"{self.held()} records are held"
            else:
                told = self.outcomes.quarantined if what == "bad" else self.outcomes.acknowledged
                by_name = {name for name, records in self.named.items() if records <= told}
                assert told == wanted, f"the master was told of {sorted(by_name)}, {told.total()} records"
        elif word in ("R", "train"):
            while (batch := self.next()) is not None:
                self.named.setdefault("R", Counter()).update(batch)
                if word == "train":
                    self.do("step", "")
        elif word == ".":
            assert self.next() is None
        elif word in ("stuck", "refused"):
            ask: Callable[[], object] = self.next if word == "stuck" else lambda: self.do("back", "")
            with pytest.raises(
                AccountingError, match=self.row.stuck or "no batch of 'training' to give back"
            ):
                ask()
        elif len(word) == 1:
            batch = self.next()
            assert batch is not None, "the pass is over"
            assert self.named.setdefault(word, Counter(batch)) == Counter(batch), "another batch than before"
        elif word in ("open", "leave"):
            getattr(self, word)()
        else:
            name, _, optimizer = word.partition(":")
            self.do(name, optimizer)
            if name == "attach":
                self._attached.append(optimizer)
            elif name == "detach":
                self._attached.remove(optimizer)

    def _finish(self) -> None:
        self.leave()
        for optimizer in self._attached:
            self.do("detach", optimizer)
        self.do("report", "")
        tells = self.row.lookahead is None
        while not self.is_finished():
            while self.next() is not None:
                if tells:
                    self.do("pass", "")
                self.do("report", "")
            if self.row.lookahead:
                self.open()
        self.flush()
        self.outcomes.check_complete(self.row.epochs)
