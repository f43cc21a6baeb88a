"""Master's status in the text format of Prometheus. Labels are bounded: of more trainers there is a sum.

All metrics stand in one table, of which the page about them and the Grafana dashboard are made too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from edl_torch import __version__
from edl_torch.core.limits import printable
from edl_torch.core.status import BOUNDS_S, DatasetStatus, Histogram, MasterStatus, TrainerState

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
MOST = 1_000  # trainers with labels of their own; the others are one, named OTHERS
MOST_DATASETS = 200
LABEL_CHARS = 120
OTHERS = "(others)"

_Samples = Iterator[tuple[Sequence[str], Any]]  # label values, and a number or a histogram
_LESS = BOUNDS_S[1::2]  # bounds that are shown: each second one
_SUMMED = ("edl_trainer_pace_records", "edl_trainer_leases")  # over the trainers without labels of their own
_FAMILIES: dict[str, Any] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}

# Name, kind, labels | attribute of a dataset or trainer; nothing for those in `_OWN` | panel of the dashboard
# | its unit in Grafana's words. Below stands what it says.
_TABLE = """\
edl_master_info gauge version ledger durable
    Always 1; the master's version and ledger.
edl_master_start_time_seconds gauge | | | dateTimeAsIso
    When the master started, in seconds since 1970.
edl_records_total counter dataset outcome | | Outcomes
    Records with an outcome: acknowledged, quarantined or dropped. A restore takes it back.
edl_records_rate gauge dataset | rate | Records a second
    Records trained on a second, over the last 10 to 20 s.
edl_records_in_progress gauge dataset state | | In progress
    Records of the epochs begun that wait or are lent.
edl_dataset_size_records gauge dataset | size
    Records of one epoch.
edl_dataset_epoch gauge dataset | epoch | Epoch
    Epoch that is read now, from 0.
edl_dataset_epochs_done gauge dataset | epochs_done
    Epochs that the outcomes make up.
edl_dataset_done_ratio gauge dataset | | Done | percentunit
    Part of all records that has an outcome, 0 to 1; of an endless dataset, of this epoch.
edl_dataset_eta_seconds gauge dataset | eta_s | Time to the end | s
    Seconds to the end at the present rate; absent where there is none.
edl_dataset_finished gauge dataset | finished
    1 when every record of every epoch has an outcome.
edl_dataset_suspended gauge dataset | | Trouble
    1 while nothing is lent before a restore.
edl_dataset_failed gauge dataset | | Trouble
    1 when more records are bad than are allowed.
edl_dataset_trainers gauge dataset | trainers | Trainers
    Trainers that take part.
edl_component_share_ratio gauge dataset component | share
    Share that a component of a mixture is to get now, of 1. The first 1,000 components have labels.
edl_component_wanted_records gauge dataset component | wanted
    Of the records that were lent or are done, how many should be of it by the weights since the beginning.
edl_component_given_records gauge dataset component | given | Components
    How many of them are.
edl_component_passes gauge dataset component | passes | Passes over components
    Passes over the component that these make.
edl_component_tokens gauge dataset component | tokens
    Tokens that these make by the component's mean length; 0 where weights are of records.
edl_leases gauge dataset | leases
    Live leases.
edl_returned_records_total counter dataset | returned_records | Came back
    Records taken from trainers that died, left or stalled.
edl_returned_slices_total counter dataset | returned_slices
    Slices taken from trainers that died, left or stalled.
edl_given_back_records_total counter dataset | given_back | Came back
    Records that trainers gave back themselves.
edl_checkpoints_total counter dataset | checkpoints | Checkpoints
    Tokens given for checkpoints.
edl_restores_total counter dataset | restores | Checkpoints
    Times that a dataset was taken back to a checkpoint, or the beginning.
edl_events_total counter kind | | Events
    Events since the master's start, by kind: joined, left, died, stalled, …
edl_trainer_pace_records gauge trainer session | pace | Pace of trainers
    Records that the trainer trains on a second, over the last 10 to 20 s.
edl_trainer_leases gauge trainer session | leases
    Leases that it holds.
edl_trainer_oldest_lease_seconds gauge trainer session | oldest_lease_s | Oldest lease | s
    Age of the oldest of them.
edl_trainer_heard_seconds gauge trainer session | idle_s | | s
    Time since it was last heard of.
edl_trainer_progress_seconds gauge trainer session | since_progress_s | Without progress | s
    Time since its loop was last known to move on.
edl_trainer_slow gauge trainer session | slow
    1 while its pace is below half of the median.
edl_trainers gauge state
    Trainers by state: live, stream_gone, stalled.
edl_trainer_batches_total counter trainer session | measures.batches
    Batches that its loop was given.
edl_trainer_batch_wait_seconds histogram trainer session | measures.waited | Waiting for data | percentunit
    How long its loop waited for each batch.
edl_trainer_step_seconds histogram trainer session | measures.stepped
    How long its loop worked on each batch.
edl_trainer_timed_batches_total counter trainer session | measures.timed
    Batches whose reading was timed: one each 0.1 s.
edl_trainer_read_seconds_total counter trainer session | measures.read_s | Reading a batch | s
    Time in which the reader read the records of these batches, one after the other.
edl_trainer_transform_seconds_total counter trainer session | measures.transform_s | Reading a batch | s
    Time in which these records were transformed, one after the other.
"""


@dataclass(frozen=True, slots=True)
class Metric:
    """Metric: its name, kind (in Prometheus' words), labels, and what it says. `panel` groups metrics."""

    name: str
    kind: str
    labels: tuple[str, ...]
    attribute: str
    panel: str
    unit: str
    says: str

    @classmethod
    def of(cls, row: str, says: str) -> Metric:
        """Return the metric of two lines of the table."""
        head, attribute, panel, unit = [*map(str.strip, row.split("|")), "", "", ""][:4]
        name, kind, *labels = head.split()
        return cls(name, kind, tuple(labels), attribute, panel, unit or "short", says.strip())


METRICS = tuple(map(Metric.of, _TABLE.splitlines()[::2], _TABLE.splitlines()[1::2]))


def exposition(status: MasterStatus) -> bytes:
    """Return all metrics of a status, as Prometheus reads them."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(status))
    return generate_latest(registry)


class StatusCollector(Collector):
    """Collector of one status."""

    def __init__(self, status: MasterStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Family]:
        """Return each metric of the table."""
        for metric in METRICS:
            family = _FAMILIES[metric.kind](metric.name, metric.says, labels=metric.labels)
            samples = _OWN[metric.name] if metric.name in _OWN else _samples_of(metric)
            for labels, value in samples(self._status):
                values = _buckets(value) if isinstance(value, Histogram) else (value,)
                family.add_metric(list(labels), *values)
            yield family


def _of_datasets(get: Callable[[MasterStatus, DatasetStatus], Any]) -> Callable[[MasterStatus], _Samples]:
    """Return what gives a sample for each dataset of which the value is known."""

    def samples(status: MasterStatus) -> _Samples:
        for dataset in status.datasets[:MOST_DATASETS]:
            if (value := get(status, dataset)) is not None:
                yield (_label(dataset.dataset),), value

    return samples


def _samples_of(metric: Metric) -> Callable[[MasterStatus], _Samples]:
    """Return what gives a sample for each dataset, component of one, or trainer."""
    get = attrgetter(metric.attribute)
    if metric.labels == ("dataset",):
        return _of_datasets(lambda _, dataset: get(dataset))

    def of_components(status: MasterStatus) -> _Samples:
        each = ((of, part) for of in status.datasets[:MOST_DATASETS] for part in of.components)
        for dataset, component in islice(each, MOST):
            yield (_label(dataset.dataset), _label(component.name)), get(component)

    def of_trainers(status: MasterStatus) -> _Samples:
        for trainer in status.trainers[:MOST]:
            if trainer.measures is not None or not metric.attribute.startswith("measures."):
                yield (_label(trainer.worker_id), _label(trainer.session)), get(trainer)
        if metric.name in _SUMMED and (rest := status.trainers[MOST:]):
            yield (OTHERS, OTHERS), sum(map(get, rest))

    return of_components if metric.labels == ("dataset", "component") else of_trainers


def _outcomes(status: MasterStatus) -> _Samples:
    for dataset in status.datasets[:MOST_DATASETS]:
        for outcome in ("acknowledged", "quarantined", "dropped"):
            yield (_label(dataset.dataset), outcome), getattr(dataset, outcome)


def _in_progress(status: MasterStatus) -> _Samples:
    for dataset in status.datasets[:MOST_DATASETS]:
        yield (_label(dataset.dataset), "waiting"), dataset.todo
        yield (_label(dataset.dataset), "lent"), dataset.leased


def _trainers(status: MasterStatus) -> _Samples:
    states = Counter(trainer.state for trainer in status.trainers)
    for state in TrainerState:
        yield (state.value,), states[state]


_OWN: dict[str, Callable[[MasterStatus], _Samples]] = {
    "edl_master_info": lambda status: iter([((__version__, status.ledger, str(status.durable).lower()), 1)]),
    "edl_master_start_time_seconds": lambda status: iter([((), status.started_at)]),
    "edl_records_total": _outcomes,
    "edl_records_in_progress": _in_progress,
    "edl_dataset_done_ratio": _of_datasets(lambda _, dataset: dataset.percent / 100),
    "edl_dataset_suspended": _of_datasets(lambda status, dataset: dataset.dataset in status.suspended),
    "edl_dataset_failed": _of_datasets(lambda _, dataset: bool(dataset.failure)),
    "edl_events_total": lambda status: (
        ((kind,), count) for kind, count in sorted(status.event_counts.items())
    ),
    "edl_trainers": _trainers,
}


def _buckets(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """Return the counts up to some of the bounds, and the sum, as Prometheus has them."""
    shown, below = [], 0
    for bound, count in zip(BOUNDS_S, histogram.counts, strict=False):
        below += count
        if bound in _LESS:
            shown.append((f"{bound:.12g}", float(below)))
    return [*shown, ("+Inf", float(histogram.count))], histogram.sum_s


def _label(name: str) -> str:
    """Return a name as a label: printable, and not too long."""
    name = printable(name)
    return name if len(name) <= LABEL_CHARS else f"{name[:LABEL_CHARS]}…"
