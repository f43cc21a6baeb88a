"""Master's status in the text format of Prometheus. Labels are bounded: of more trainers there is a sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from edl_torch import __version__
from edl_torch.core.calls import DatasetStatus, MasterStatus, TrainerState, TrainerStatus
from edl_torch.core.measures import BOUNDS_S, Histogram
from edl_torch.core.printable import printable
from edl_torch.master.web.names import METRICS, Kind

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
MOST = 1_000  # trainers with labels of their own; the others are one, named OTHERS
MOST_DATASETS = 200
LABEL_CHARS = 120
OTHERS = "(others)"

_Samples = Iterator[tuple[Sequence[str], float | Histogram]]
_LESS = BOUNDS_S[1::2]  # bounds that are shown: each second one


def exposition(status: MasterStatus) -> bytes:
    """Return all metrics of a status, as Prometheus reads them."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(status))
    return generate_latest(registry)


class StatusCollector(Collector):
    """Collector of one status."""

    def __init__(self, status: MasterStatus) -> None:
        self._status = status
        self._datasets = status.datasets[:MOST_DATASETS]
        self._trainers = status.trainers[:MOST]

    def collect(self) -> Iterator[Family]:
        """Return each metric of `names.METRICS`."""
        for metric in METRICS:
            labels = metric.labels
            family: Family
            if metric.kind is Kind.HISTOGRAM:
                histogram = HistogramMetricFamily(metric.name, metric.says, labels=labels)
                for values, value in self._samples(metric.name):
                    assert isinstance(value, Histogram)
                    histogram.add_metric(list(values), *_buckets(value))
                family = histogram
            else:
                make = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
                numbers = make(metric.name, metric.says, labels=labels)
                for values, value in self._samples(metric.name):
                    assert not isinstance(value, Histogram)
                    numbers.add_metric(list(values), value)
                family = numbers
            yield family

    def _samples(self, name: str) -> _Samples:
        """Return label values and value of each sample of a metric."""
        if name in _OF_DATASET:
            for dataset in self._datasets:
                found = _OF_DATASET[name](dataset)
                if found is not None:
                    yield (_label(dataset.dataset),), found
        elif name in _OF_TRAINER:
            for trainer in self._trainers:
                value = _OF_TRAINER[name](trainer)
                if value is not None:
                    yield (_label(trainer.worker_id), _label(trainer.session)), value
            yield from self._others(name)
        else:
            yield from getattr(self, f"_{name}")()

    def _others(self, name: str) -> _Samples:
        """Return the sum of what can be summed over the trainers without labels of their own."""
        summed = {"edl_trainer_pace_records": "pace", "edl_trainer_leases": "leases"}
        rest = self._status.trainers[MOST:]
        if rest and name in summed:
            yield (OTHERS, OTHERS), sum(getattr(trainer, summed[name]) for trainer in rest)

    def _edl_master_info(self) -> _Samples:
        yield (__version__, self._status.ledger, str(self._status.durable).lower()), 1

    def _edl_master_start_time_seconds(self) -> _Samples:
        yield (), self._status.started_at

    def _edl_records_total(self) -> _Samples:
        for dataset in self._datasets:
            for outcome in ("acknowledged", "quarantined", "dropped"):
                yield (_label(dataset.dataset), outcome), getattr(dataset, outcome)

    def _edl_records_in_progress(self) -> _Samples:
        for dataset in self._datasets:
            yield (_label(dataset.dataset), "waiting"), dataset.todo
            yield (_label(dataset.dataset), "lent"), dataset.leased

    def _edl_dataset_suspended(self) -> _Samples:
        for dataset in self._datasets:
            yield (_label(dataset.dataset),), dataset.dataset in self._status.suspended

    def _edl_events_total(self) -> _Samples:
        for kind, count in sorted(self._status.event_counts.items()):
            yield (kind,), count

    def _edl_trainers(self) -> _Samples:
        states = Counter(trainer.state for trainer in self._status.trainers)
        for state in TrainerState:
            yield (state.value,), states[state]


_OF_DATASET: dict[str, Callable[[DatasetStatus], float | None]] = {
    "edl_records_rate": lambda d: d.rate,
    "edl_dataset_size_records": lambda d: d.size,
    "edl_dataset_epoch": lambda d: d.epoch,
    "edl_dataset_epochs_done": lambda d: d.epochs_done,
    "edl_dataset_done_ratio": lambda d: d.percent / 100,
    "edl_dataset_eta_seconds": lambda d: d.eta_s,
    "edl_dataset_finished": lambda d: d.finished,
    "edl_dataset_failed": lambda d: bool(d.failure),
    "edl_dataset_trainers": lambda d: d.trainers,
    "edl_leases": lambda d: d.leases,
    "edl_returned_records_total": lambda d: d.returned_records,
    "edl_returned_slices_total": lambda d: d.returned_slices,
    "edl_given_back_records_total": lambda d: d.given_back,
    "edl_checkpoints_total": lambda d: d.checkpoints,
    "edl_restores_total": lambda d: d.restores,
}
_OF_TRAINER: dict[str, Callable[[TrainerStatus], float | Histogram | None]] = {
    "edl_trainer_pace_records": lambda t: t.pace,
    "edl_trainer_leases": lambda t: t.leases,
    "edl_trainer_oldest_lease_seconds": lambda t: t.oldest_lease_s,
    "edl_trainer_heard_seconds": lambda t: t.idle_s,
    "edl_trainer_progress_seconds": lambda t: t.since_progress_s,
    "edl_trainer_slow": lambda t: t.slow,
    "edl_trainer_batches_total": lambda t: None if t.measures is None else t.measures.batches,
    "edl_trainer_batch_wait_seconds": lambda t: None if t.measures is None else t.measures.waited,
    "edl_trainer_step_seconds": lambda t: None if t.measures is None else t.measures.stepped,
    "edl_trainer_timed_batches_total": lambda t: None if t.measures is None else t.measures.timed,
    "edl_trainer_read_seconds_total": lambda t: None if t.measures is None else t.measures.read_s,
    "edl_trainer_transform_seconds_total": lambda t: None if t.measures is None else t.measures.transform_s,
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
