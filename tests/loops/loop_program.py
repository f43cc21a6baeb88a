"""A training loop as a value: what it reads, how it steps, and what goes wrong in it.

Only data: `loop_strategies` makes programs, `loop_interpreter` runs them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum


class Value:
    """Shown without the fields that have their default value, as the code that makes it."""

    def __repr__(self) -> str:
        given = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given)})"


class Word(StrEnum):
    """Shown as the code that names it."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class Order(Word):
    STORED = "stored"
    SHARDS = "shards"  # shuffled shards
    IN_SHARD = "in_shard"  # records shuffled inside each shard
    WINDOWS = "windows"  # shuffled shards, and records inside windows of a few of them
    RECORDS = "records"  # one global shuffle


class Seed(Word):
    """How a loop seeds each of its passes alike."""

    NONE = ""
    GLOBAL = "torch.manual_seed"
    GENERATOR = "generator="


class Report(Word):
    """What the loop says by `report_batch_done()` after each batch."""

    NONE = "none"
    DEFAULT = "default"  # without a size
    OWN = "own"  # with the batch's size
    SMALL = "small"  # a record less
    LARGE = "large"  # three records more
    TWICE = "twice"  # without a size, two times


class Way(Word):
    """How the gradients of a batch are made."""

    PLAIN = "plain"
    PARTS = "parts"  # two losses, each with a backward pass of its own
    RETAIN = "retain_graph"  # two backward passes through one graph
    CHECKPOINT = "checkpoint"  # activations are computed again in the backward pass
    REENTRANT = "reentrant"  # in a backward pass of their own
    BY_HAND = "by hand"  # torch.autograd.grad, and the loop puts them in place


class Kind(Word):
    """What happens at one batch."""

    CONTINUE = "continue"  # the batch is skipped
    FAILS = "fails"  # the backward pass fails in its middle; the loop goes on to its step
    RETRIES = "retries"  # it throws away what that left, and tries again
    AGAIN = "again"  # it trains on the batch once more

    BREAK = "break"
    RAISE = "raise"  # an exception, caught around the loop
    QUARANTINE = "quarantine"  # report_batch_done(err_msg=…) instead of training on the batch
    GIVE_BACK = "give_back"  # instead of training on the batch
    ROLLBACK = "rollback"  # the model alone goes back to what was saved last
    ZERO_GRAD = "zero_grad"  # gradients gathered so far are thrown away
    OVERFLOW = "overflow"  # an infinite loss: a GradScaler skips the step
    REPORT = "report"  # report_batch_done() once
    SAVE = "save"  # token and a copy of the model
    RESTORE = "restore"  # the same service goes back to what was saved last


class Place(Word):
    """Where in the loop's body."""

    FETCHED = "fetched"  # before the batch was looked at
    BACKWARD = "backward"  # after its gradients were added, before any step
    STEPPED = "stepped"  # at the end of the body


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Incident(Value):
    """`at` counts the batches of the whole program from 0."""

    at: int
    kind: Kind
    place: Place = Place.STEPPED
    keep_iterator: bool = False  # of a loop that is left: the iterator stays referenced


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Data(Value):
    records: int = 8
    batch_size: int = 2
    epochs: int = 1
    records_per_shard: int = 4
    order: Order = Order.STORED
    picked: bool = True  # the reader can read a record by itself, by several threads
    unreadable: tuple[int, ...] = ()  # records that go to quarantine


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Loader(Value):
    """An `ElasticDataLoader`, or a plain `DataLoader` with a batch size of its own (0: None)."""

    plain: bool = False
    batch_size: int | None = None  # None: the service's
    workers: int = 0
    persistent: bool = False
    prefetch: int | None = None
    drop_last: bool = False
    seed: Seed = Seed.NONE
    in_process: bool = True  # as with an embedded master: no threads
    in_order: bool = True
    threads: int = 0  # that read, in the trainer or in each worker
    columnar: bool = False  # batch_size=None at an ElasticDataLoader


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Optimizer(Value):
    """Steps after every `every`-th batch (0: never), and at the end of the pass if the program flushes."""

    every: int = 1
    attached: bool = False
    closure: str = ""  # "": step(); "none": step(closure=None); "given": step(closure)
    rate: float = 0.125
    fused: bool = False
    trains: int = 1  # on every so many batches; it has no gradient of the others


class Flush(Word):
    """When gradients that wait for more batches are stepped on all the same."""

    PASS = "pass"
    END = "end"  # of the last epoch
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Program(Value):
    data: Data = Data()
    loader: Loader = Loader()
    optimizers: tuple[Optimizer, ...] = (Optimizer(),)
    weighed: bool = True  # loader.weigh and loader.scale_gradients
    scaler: bool = False  # a GradScaler
    way: Way = Way.PLAIN
    clips: bool = False  # gradients, after each backward pass
    looks: bool = False  # at each batch without gradients, before it trains on it
    freezes: bool = False  # a part of the model at every other batch
    swaps: bool = False  # parameters for others, and back, after each batch
    delayed: bool = False  # steps at the head of the body, on the batches before
    in_place: bool = False  # zero_grad(set_to_none=False)
    report: Report = Report.NONE
    counted_epochs: bool = False  # `for epoch in range(…)` instead of `while not service.finished`
    take: int = 0  # each pass is islice(loader, take)
    flush: Flush = Flush.PASS
    renew: str = ""  # new optimizers each epoch: "attach" them, or "detach" the old ones first
    lookahead: int = 0  # a wrapper asks for so many batches before it passes the first on
    told: bool = False  # and says of each when it does
    zeroes: bool = True  # a loop that is left throws its gradients away; else they stay
    incidents: tuple[Incident, ...] = ()
    saves_passes: bool = False  # a token and a copy of the model after each pass
    resume: bool = False  # afterwards what was saved last is trained to the end by another service
    forgets_model: bool = False  # which loads the token, and not the model

    def has(self, *kinds: Kind) -> bool:
        """Whether an incident is one of these."""
        return any(incident.kind in kinds for incident in self.incidents)

    @property
    def attached(self) -> frozenset[int]:
        """Optimizers that decide when a batch counts."""
        if self.loader.plain:
            return frozenset()
        return frozenset(n for n, optimizer in enumerate(self.optimizers) if optimizer.attached)

    @property
    def _deciding(self) -> list[Optimizer]:
        """Those that are attached; without any, the one that is the first to step attaches itself."""
        steppers = sorted((plan for plan in self.optimizers if plan.every), key=lambda plan: plan.every)
        return [self.optimizers[number] for number in sorted(self.attached)] or steppers[:1]

    @property
    def shows_gradients(self) -> bool:
        """Whether what is gathered can be told from what was made 0: else it is not proven, by decision 0056.

        What is in gradients that the loop puts in place by hand nobody can say, nor which batch a wrapper has
        that reads far ahead and does not tell. A loop that reports counts by its own word.
        """
        if self.has(Kind.REPORT):
            return False
        if self.way is Way.BY_HAND and (self.gathers or self.in_place):
            return False
        return not self.reads_far

    @property
    def reads_far(self) -> bool:
        """Whether nobody knows, at the end of a pass, which of several batches the loop has."""
        return self.lookahead > 1 and not self.told

    @property
    def is_guessed(self) -> bool:
        """Whether steps near the end of a pass may be taken for some on batches that they are not on: each
        counts as one of those that such a wrapper holds."""
        return self.reads_far and self.has(Kind.AGAIN, Kind.ZERO_GRAD)

    @property
    def is_left_early(self) -> bool:
        """Whether some pass ends before its data does."""
        return bool(self.take) or self.has(Kind.BREAK, Kind.RAISE)

    @property
    def says_what_is(self) -> bool:
        """Whether its reports, and its plain loader, are such that every record can be accounted for."""
        if not self.loader.plain:
            return True
        own_size = self.loader.batch_size in (None, self.data.batch_size)
        right = self.report is Report.OWN or (self.report is Report.DEFAULT and own_size)
        return right and not self.loader.drop_last

    @property
    def gathers(self) -> bool:
        """Whether some step is on the gradients of several batches."""
        return self.delayed or any(optimizer.every != 1 for optimizer in self.optimizers)

    @property
    def steps_on_all(self) -> bool:
        """Whether the model learns every batch that the loop is done with, by each of its optimizers."""
        if self.has(Kind.ZERO_GRAD, Kind.OVERFLOW, Kind.REPORT, Kind.CONTINUE, Kind.ROLLBACK):
            return False
        if any(optimizer.trains > 1 for optimizer in self.optimizers):
            return False
        if not all(optimizer.every for optimizer in self.optimizers):
            return False
        kept = any(incident.keep_iterator for incident in self.incidents)
        if self.is_left_early and self.way is Way.BY_HAND and not self.zeroes:
            return False  # before an optimizer attaches itself nobody sees what is added to what was left
        if self.is_left_early and (self.gathers or not self.zeroes) and (self.zeroes or kept):
            return False  # who throws gradients away has to say which; who keeps an iterator has not left
        return not self.gathers or self.flush is not Flush.NEVER

    @property
    def is_sound(self) -> bool:
        """Whether it must train to the end without an error."""
        if self.renew == "attach":
            return False
        return self._is_sound_plain if self.loader.plain else self._is_sound_elastic

    @property
    def _is_sound_plain(self) -> bool:
        if self.loader.workers < 2:
            return self.says_what_is
        # Such a batch cannot be named, and its reports prove little before the end of a pass.
        return self.says_what_is and not (self.has(Kind.QUARANTINE) or self.take)

    @property
    def _is_sound_elastic(self) -> bool:
        if self.weighed and self.gathers and len(self.attached) < len(self.optimizers) > 1:
            return False  # nothing says which batches are in an optimizer's gradients
        plans = self._deciding
        if not plans:
            return self.take != 1
        if any(plan.trains > 1 for plan in plans):
            return False
        longest = max(plan.every for plan in plans) + self.delayed
        if not all(plan.every for plan in plans) or self.has(Kind.ZERO_GRAD, Kind.OVERFLOW, Kind.CONTINUE):
            return False  # a batch without a step of its own
        if self.has(Kind.GIVE_BACK) and (self.counted_epochs or self.take):
            return False
        return longest == 1 or not (self.flush is Flush.NEVER or 0 < self.take < longest)

    @property
    def gets_nowhere(self) -> bool:
        """Whether each of its passes gives back all that it was given, so that it trains for ever."""
        if not self.take:
            return False
        if self.loader.plain:  # which worker's batch a report means is proved by later ones, which never come
            return self.loader.workers > 1
        plans = self._deciding  # a step at the head of the body leaves the batch in hand out
        return self.take < max((plan.every or self.take + 1 for plan in plans), default=2) + self.delayed

    @property
    def saves_exactly(self) -> bool:
        """Whether model and token are one instant by the loop's own doing."""
        if self.loader.plain:
            return self.loader.workers < 2 and not self.gathers
        if self.attached:
            return len(self.attached) == len(self.optimizers) == 1
        return not self.gathers and not self.lookahead
