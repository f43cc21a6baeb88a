"""`DataShardService`: what a training script holds of a dataset, and the progress that it is told.

The public face of a `Session`; it does not know torch, and decides nothing about accounting.
"""

from __future__ import annotations

import logging
import uuid
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from threading import get_ident
from typing import Literal, Self, Unpack

from edl_torch.client.description import Description, check_count, option_parameters, order_of, shows
from edl_torch.client.ending import ServiceEnd, close_what_was_put_off
from edl_torch.client.environment import (
    finds_master_through_torchrun,
    master_address_from_env,
    master_protocol_from_env,
    master_timeout_from_env,
    page_address_from_env,
    trainer_name_from_env,
)
from edl_torch.client.optimizers import Optimizers, SteppingOptimizer, SteppingScaler
from edl_torch.client.position import SessionPosition
from edl_torch.client.session import Session
from edl_torch.client.workers.links import DirectLink
from edl_torch.core.calls import MasterApi
from edl_torch.core.quarantine import QuarantinedRecord
from edl_torch.core.status import DatasetStatus, Measures
from edl_torch.errors import (
    InvalidArgument,
    MasterStartError,
    ServiceClosed,
    TokenError,
    TooManyBadRecords,
)
from edl_torch.protocols import OURS, door
from edl_torch.readers.base import AbstractDataReader
from edl_torch.shard import DatasetOptions, Shard, TaskType
from edl_torch.system.user_warnings import warn_user
from edl_torch.trainer.inflight import Mode

log = logging.getLogger("edl_torch.client")


class ServiceKeywords(DatasetOptions, total=False):
    """Keywords of a `DataShardService` that a loader hands on to it."""

    master_client: MasterApi | None
    dataset_name: str
    num_minibatches_per_shard: int | None
    data_changed: Literal["new_epoch"] | None
    lookahead: int | Literal["manual"]
    master_timeout_s: float | None
    audit_dir: str | Path | None


@shows(option_parameters())
class DataShardService:
    """Fetches shards from the master and tells it which records were trained on.

    Without `master_client` the master's address comes from `EDL_MASTER_ADDR`; without that torchrun's workers
    start one for all of them, and elsewhere a master is embedded in this process. The plan comes from
    `reader`, or is `dataset_size` records without a name; where the master knows `dataset_name` already,
    neither is needed. The dataset is registered at first use.

    Args:
        batch_size: records in a batch of this trainer.
        master_client: a `MasterClient`, a `LocalMaster`, or a master of `edl_torch.testing`.
        reader: gives names and sizes of the sources through `create_shards()`.
        dataset_size: number of records, where there is no reader.
        dataset_name: datasets live side by side in a master under their names.
        shuffle: a global shuffle of records, for readers with random access.
        shuffle_shards: another order of shards in each epoch.
        num_minibatches_per_shard: `records_per_shard`, in batches.
        data_changed: "new_epoch": a checkpoint of other data goes on with these in the epoch after its own;
            records that are left of that have the outcome `abandoned`. Default: `TokenError`.
        lookahead: batches that a wrapper around the loader asks for ahead of the training step; so many
            of the newest are not acknowledged yet. Those that it has read at the end of a pass are taken for
            passed on when the next pass begins; of several nobody knows which a step is on, so that the audit
            says `DELIVERED`. "manual": the wrapper calls `loader.passed_on()` for each batch that it passes
            on to its loop, and nothing is guessed.
        master_timeout_s: without `master_client`, how long the master may be away before calls raise
            MasterUnavailable; default: `EDL_MASTER_TIMEOUT_S`, else 600, and 30 for a torchrun job's own.
        audit_dir: a folder where this trainer writes down what it reports, for `edl-torch audit`.
        options: those of `DatasetOptions`.

    Raises:
        InvalidArgument: an argument has a value that cannot be used.
    """

    def __init__(
        self,
        batch_size: int,
        master_client: MasterApi | None = None,
        reader: AbstractDataReader | None = None,
        dataset_size: int | None = None,
        dataset_name: str = "training",
        *,
        shuffle: bool = False,
        shuffle_shards: bool = False,
        num_minibatches_per_shard: int | None = None,
        data_changed: Literal["new_epoch"] | None = None,
        lookahead: int | Literal["manual"] = 0,
        master_timeout_s: float | None = None,
        audit_dir: str | Path | None = None,
        **options: Unpack[DatasetOptions],
    ) -> None:
        if isinstance(lookahead, str) and lookahead != "manual":
            raise InvalidArgument(f"lookahead must be a number of batches or 'manual', not {lookahead!r}")
        if lookahead != "manual":
            check_count("lookahead", lookahead, least=0)
        if num_minibatches_per_shard is not None:
            check_count("num_minibatches_per_shard", num_minibatches_per_shard)
            check_count("batch_size", batch_size)
            if options.get("records_per_shard") is not None:
                raise InvalidArgument("give records_per_shard or num_minibatches_per_shard, not both")
            options["records_per_shard"] = num_minibatches_per_shard * batch_size
        self._description = Description(
            name=dataset_name,
            batch_size=batch_size,
            reader=reader,
            dataset_size=dataset_size,
            shuffle=shuffle,
            shuffle_shards=shuffle_shards,
            data_changed=data_changed,
            **options,
        )
        close_what_was_put_off()
        if audit_dir is not None and (not str(audit_dir) or "://" in str(audit_dir)):
            raise InvalidArgument(f"audit_dir is {str(audit_dir)!r}: give a folder of this machine, or None")
        master = _choose_master(master_client, master_timeout_s, audited=audit_dir is not None)
        self._session = Session(
            master, self._description, None if lookahead == "manual" else lookahead, audit_dir
        )
        self.optimizers = Optimizers(self._session)
        self._position = SessionPosition(self._session)
        self._raw = DirectLink(self._session.readers)
        self._raw_open = False
        self._end = ServiceEnd(
            self._session, self.optimizers, self._position, owns_master=master_client is None
        )
        weakref.finalize(self, self._end.put_off).atexit = False

    # What it is -----------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """Records in a batch."""
        return self._description.batch_size

    @property
    def dataset_name(self) -> str:
        """The dataset's name in the master."""
        return self._description.name

    @property
    def lookahead(self) -> int | Literal["manual"]:
        """How many batches a wrapper around the loader reads ahead; "manual" where it says when it passes one
        on."""
        lookahead = self._session.trainer.state.batches.lookahead
        return "manual" if lookahead is None else lookahead

    @property
    def task_type(self) -> TaskType:
        """What the dataset is for."""
        return self._description.task_type

    @property
    def session(self) -> Session:
        """The session underneath, for loaders and integrations. A pass that lost its iterator is ended.

        Raises ServiceClosed.
        """
        self._check_open()
        self._session.end_abandoned()
        return self._session

    @property
    def position(self) -> SessionPosition:
        """Where the session is in its data, for loaders and integrations; as `session` otherwise."""
        _ = self.session
        return self._position

    @property
    def record_count(self) -> int:
        """Records leased by this trainer and not yet acknowledged."""
        self._session.end_abandoned()
        return self._leased

    @property
    def _leased(self) -> int:
        return self._session.do(lambda: self._session.trainer.state.inflight.records)

    @property
    def size(self) -> int:
        """Records in one epoch."""
        return self.session.plan().size

    @property
    def epoch(self) -> int:
        """The epoch that the next pass reads; `num_epochs` after the last one."""
        return self.progress().epoch

    @property
    def finished(self) -> bool:
        """Whether every record of every epoch has an outcome, here and on every other trainer.

        Raises TooManyBadRecords when the job has failed, MasterUnavailable when the master does not answer,
        StaleLease when another trainer has taken the data back to a checkpoint: this one's model is not of
        that history; AccountingError where ten passes in a row were left before any batch counted.
        On synchronous ranks it is what they agreed on at the end of the last pass: no call, one answer. Where
        they have loaded no position, all of them call it before the first pass, or none.
        """
        session = self.session
        if session.lockstep is not None:
            self._position.begin_together(session.lockstep)
            return session.lockstep.finished
        is_new = not session.joined
        session.do(session.passes.warnings.check_gets_on)
        progress = self.progress()
        if progress.failure:
            raise TooManyBadRecords(progress.failure)
        if is_new and progress.finished:
            log.warning(
                "dataset %s was finished before this trainer came: nothing is left", self.dataset_name
            )
        return progress.finished

    def set_weights(self, weights: Mapping[str, float]) -> int:
        """Give a mixture other weights, from the first record on that is not lent to any trainer yet.

        What is lent comes first: a few leases of `records_per_shard` at each trainer. Weights that
        it has already change nothing, so each of several ranks may set them, or one.

        Args:
            weights: A weight for each component, in any unit; 0 leaves it out.

        Returns:
            The index of the mixture from which on they hold; its end where all is lent, and nothing changes.

        Raises:
            InvalidArgument: No such weights, or no mixture; with a stopping strategy weights with which it
                would never end.
            StaleLease: The data went back to a checkpoint, or others set weights at the same time.
        """
        if not isinstance(weights, Mapping):
            raise InvalidArgument(
                f"weights are {weights!r:.60}: give one for each component by name, as {{'web': 0.5, …}}. A "
                f"schedule stands in the mixture: Mixture(…, weights=[(0, {{…}}), (index, {{…}})])"
            )
        session = self.session
        session.plan()
        # A rank without leases has no fence: it gets the batches of one that has.
        fence = session.trainer.state.fence if session.trainer.state.fence.ledger else None
        name, key = session.description.name, uuid.uuid4().hex
        return session.master.set_weights(name, weights, key=key, fence=fence).start

    def progress(self) -> Progress:
        """Counts and rate of the dataset over all trainers, as the master has them now, and how long this
        trainer waits for data. A call to the master: not for each batch. Raises what `finished` does,
        TooManyBadRecords apart."""
        session = self.session
        session.plan()
        session.flush()
        return Progress.of(self._position.progress(), session.trainer.state.measuring.measures())

    def quarantined(self) -> list[QuarantinedRecord]:
        """The records that could not be read, of all trainers, in the order in which that was told.

        Each has `name`, `index` and `reason`, and `epoch`, the first that met it. A call to the master, which
        raises what `progress` does.
        """
        status: DatasetStatus = self.progress()
        told = sum([bad.times for bad in status.quarantine])
        if told < status.quarantined:  # of long ones trainers are told the beginning
            whole = self._session.master.status().datasets
            (status,) = [dataset for dataset in whole if dataset.dataset == self.dataset_name]
        found: dict[tuple[str, int], QuarantinedRecord] = {}
        for bad in status.quarantine:
            found.setdefault((bad.name, bad.index), bad)
        return list(found.values())

    def __repr__(self) -> str:
        state = "closed" if self._end.came else "open" if self._session.joined else "new"
        return (
            f"<DataShardService {self.dataset_name!r} {state} batch_size={self.batch_size} "
            f"held={self._leased} master={self._session.master!r}>"
        )

    # Shards, for loops that read by themselves ---------------------------------------------------------

    def fetch_shard(self) -> Shard | None:
        """The next shard to read, or None when this trainer has nothing more to fetch now.

        None ends a pass; the next call begins another. Waits while the epoch is not over, nothing is to be
        had, and this trainer holds no unacknowledged record. Raises MasterUnavailable, TooManyBadRecords.
        """
        self._check_open()
        plan = self._raw.begin(Mode.PLAIN) if not self._raw_open else self._session.plan()
        self._raw_open = True
        grant = self._raw.next()
        if grant is None:
            self._raw_open = False
            return None
        return plan.shard(grant.slice)

    def report_batch_done(self, batch_size: int | None = None, err_msg: str = "") -> bool:
        """Say that one batch was trained on. True when that completed a task.

        Needed with a plain `DataLoader` and with `fetch_shard`; an `ElasticDataLoader` reports by itself,
        and takes this as "done with the batch in hand". `batch_size` is the batch's number of records where
        it is not the service's. With `err_msg` the batch's records go to quarantine instead, unless an
        attached optimizer has stepped on it: then it counts, with a warning.
        """
        session = self.session
        if batch_size is not None and batch_size < 0:
            raise InvalidArgument(f"batch_size must be 0 or more, not {batch_size}")
        if err_msg:
            session.run(session.trainer.fail_batch(batch_size, err_msg))
            return False
        session.loop_thread = get_ident()
        return session.run(session.trainer.report(batch_size)) > 0

    def abandon_pass(self) -> None:
        """Say that a loop over a plain pass was left: what it has not reported is given back.

        Not needed with torch, where the next iteration says so. Pipelines that read ahead in threads of
        their own (`tf.data`) do not.
        """
        self.session.run(self._session.trainer.plain.finish(abandoned=True))
        self._raw_open = False

    def attach(
        self, optimizer: SteppingOptimizer, *, scaler: SteppingScaler | None = None, one_model: str = ""
    ) -> None:
        """Acknowledge the batches of an `ElasticDataLoader` after each `optimizer.step()`, not before.

        An optimizer that steps on the batch in hand attaches itself, where none is attached. Say it before
        the loop with gradient accumulation, a `GradScaler`, several optimizers, or several loaders in a loop.

        With several optimizers a batch counts once each of them has stepped. A step that a `GradScaler` skips
        counts nothing, fused or not: the batch waits for the next step, as does one whose gradients
        `zero_grad()` threw away. Given as `scaler`, a step that it skips counts as one: the loop is done with
        the batch. Of a wrapper with the optimizer inside (Accelerate's, DeepSpeed's) that one is attached. An
        engine of DeepSpeed's counts at the end of each accumulation, overflows included.
        Attaching does not keep an optimizer alive, and attaching twice is attaching once.

        With `audit_dir` the audit log gets samples of the optimizers' parameters, by which `edl-torch audit`
        shows that all trainers had one model. Where that cannot show, as with local SGD or a checkpoint that
        is loaded in part, `one_model` says why it is one; the verdict repeats it.
        """
        self._check_open()
        self.optimizers.attach(optimizer, scaler, one_model)

    def detach(self, optimizer: SteppingOptimizer) -> None:
        """Let an attached optimizer decide no more, as when another takes its place.

        Batches that the others have stepped on are acknowledged. With none left, a batch counts again when
        the next one is asked for; but where the last had batches to step on, these and later ones wait for a
        step of an optimizer that is attached then, or for `report_batch_done()`. Raises InvalidArgument for
        one that is not attached.
        """
        self._check_open()
        self.optimizers.detach(optimizer)

    # Checkpoints ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, str]:
        """The data position as `{"token": <JSON string>}`, to be saved with the model.

        Called in the loop's body it counts the batch in hand as trained on, unless an attached optimizer
        has not stepped on it yet. Raises StaleLease where the position is not this model's: another trainer
        has taken the data back to a checkpoint, or this one was away for so long that others get records
        again that it has trained on.
        """
        session = self.session
        if not session.do(lambda: session.trainer.state.exact):
            warn_user(
                "a plain DataLoader with several workers does not say which records were trained on, so this "
                "token is not exact: use ElasticDataLoader"
            )
        return {"token": self._position.snapshot()}

    def load_state_dict(self, state: Mapping[str, str] | str | None) -> None:
        """Make the master go back to `state`; None is the beginning of the data.

        Leases and batches of before are void, those of other trainers too: one of them restores, before the
        others register. Raises TokenError, field by field, for another dataset's token, StaleLease where
        another trainer has gone back since this one registered.
        """
        token = state["token"] if isinstance(state, Mapping) and "token" in state else state
        if token is not None and not isinstance(token, str):
            raise TokenError("load_state_dict() takes what state_dict() returned, a token, or None")
        self.position.restore(token)
        self._raw_open = False

    @property
    def order(self) -> str:
        """How the records are shuffled, for people: "all records", "windows of 16 shards", "in_shard" (inside
        each shard), "shards" (their order only), or '' for not at all."""
        plan = self._session.trainer.state.registered.plan
        if plan is None:
            return self._description.order
        return order_of(plan.order, plan.spec.window, shards=plan.spec.shuffle_shards)

    # The end --------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._end.came:
            raise ServiceClosed(f"the DataShardService of {self.dataset_name!r} is closed: make a new one")
        if not self._end.is_ours:
            raise ServiceClosed(
                f"the DataShardService of {self.dataset_name!r} belongs to the process that this one was "
                f"forked from: use it there. A child that trains too needs a service of its own, with the "
                f"address of a master"
            )

    def close(self) -> None:
        """Give back what was not trained on and leave the master, within seconds. May be called again."""
        self._end.come()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _choose_master(given: MasterApi | None, master_timeout_s: float | None, *, audited: bool) -> MasterApi:
    """The master that the service was given, or the environment's. Raises InvalidArgument."""
    if given is not None and master_timeout_s is not None:
        raise InvalidArgument("master_timeout_s is that of the master_client: give it to MasterClient(…)")
    if given is not None and not isinstance(given, MasterApi):
        raise InvalidArgument(
            f"master_client must be a MasterClient or a LocalMaster, not {given!r}: "
            "MasterClient('host:port') makes one of an address"
        )
    master = default_master(master_timeout_s) if given is None else given
    if audited and not master.keeps_ledger:
        if given is None:
            master.close()
        raise InvalidArgument(
            f"audit_dir needs an edl_torch master: {master!r} does not tell epochs, so that nothing could be "
            f"proven from the log"
        )
    return master


def default_master(master_timeout_s: float | None = None) -> MasterApi:
    """Return a client for the master of the environment, or of the torchrun job; else a `LocalMaster`.

    `master_timeout_s` is the client's; None takes it from the environment too. Raises InvalidArgument for
    what cannot be used of the environment.
    """
    protocol = master_protocol_from_env()
    if protocol == OURS and finds_master_through_torchrun():
        from edl_torch.client.torchrun.sidecar import master_of_job

        address: str | None
        address, credentials = master_of_job()
    else:
        address, credentials = master_address_from_env(), None
    if address is None:
        if protocol != OURS:
            raise InvalidArgument(
                f"EDL_MASTER_PROTOCOL is {protocol!r}, but no master is named: give EDL_MASTER_ADDR=HOST:PORT"
            )
        return _embedded_master()
    timeout_s = master_timeout_from_env() if master_timeout_s is None else master_timeout_s
    if protocol != OURS:
        return door(protocol).connect(address, timeout_s)
    from edl_torch.client.grpc.client import MasterClient

    return MasterClient(address, master_timeout_s=timeout_s, credentials=credentials)


def _embedded_master() -> MasterApi:
    """Return a master in this process, with a page where `EDL_HTTP` asks for one."""
    from edl_torch.master.embedded import LocalMaster

    master, page = LocalMaster(trainer_name_from_env()), page_address_from_env()
    if page is not None:
        from edl_torch.master.web import show

        try:
            show(master, page)
        except MasterStartError as error:  # another service, or trainer, of the same environment has the port
            log.warning("no page of this process's master: %s", error)
    return master


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(DatasetStatus):
    """State of a dataset, with the counts of all its trainers, and what this trainer has measured.

    Attributes:
        measures: of this trainer alone, since its service was made.
    """

    measures: Measures

    @classmethod
    def of(cls, status: DatasetStatus, measures: Measures) -> Self:
        """Return the progress of a dataset, and of the trainer with these measures."""
        counts = {field.name: getattr(status, field.name) for field in fields(DatasetStatus)}
        return cls(**counts, measures=measures)

    def __repr__(self) -> str:
        total = "endless" if self.total is None else self.total
        bad = f"quarantined={self.quarantined} " if self.quarantined else ""
        return (
            f"<Progress {self.dataset!r} epoch={self.epoch} records={self.n}/{total} {bad}"
            f"percent={self.percent:.1f} rate={self.rate:.1f}/s trainers={self.trainers}>"
        )

    @property
    def n(self) -> int:
        """Records with an outcome, of all epochs: trained on, in quarantine, or dropped."""
        return self.outcomes

    @property
    def waiting_share(self) -> float | None:
        """The share of its time that this trainer's loop waited for data; see `Measures`."""
        return self.measures.waiting_share

    def as_dict(self) -> dict[str, float]:
        """Return what is known as numbers by name, for loggers: `writer.add_scalar(name, value, step)`."""
        values = {
            "data/epoch": self.epoch,
            "data/records": self.n,
            "data/percent": self.percent,
            "data/records_per_s": self.rate,
            "data/eta_s": self.eta_s,
            "data/quarantined": self.quarantined,
            "data/trainers": self.trainers,
            "data/batches": self.measures.batches,
            "data/waited_s": self.measures.waited.sum_s,
            "data/waited_for_ranks_s": self.measures.waited_for_ranks_s,
            "data/stepped_s": self.measures.stepped.sum_s,
            "data/mean_read_s": self.measures.mean_read_s,
            "data/mean_transform_s": self.measures.mean_transform_s,
            "data/waiting_share": self.waiting_share,
        }
        return {name: float(value) for name, value in values.items() if value is not None}
