"""Names of all metrics, in one list, of which `/metrics`, their page and the Grafana dashboard are made."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """Kind of a metric, in Prometheus' words."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """Metric: its name, kind, labels, and what it says. `panel` groups metrics of a dashboard."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    says: str
    panel: str = ""
    unit: str = "short"  # in Grafana's words


_D, _T = ("dataset",), ("trainer", "session")
G, C, H = Kind.GAUGE, Kind.COUNTER, Kind.HISTOGRAM

METRICS = (
    Metric(
        "edl_master_info", G, ("version", "ledger", "durable"), "Always 1; the master's version and ledger."
    ),
    Metric(
        "edl_master_start_time_seconds",
        G,
        (),
        "When the master started, in seconds since 1970.",
        "",
        "dateTimeAsIso",
    ),
    Metric(
        "edl_records_total",
        C,
        ("dataset", "outcome"),
        "Records with an outcome: acknowledged, quarantined or dropped. A restore takes it back.",
        "Outcomes",
    ),
    Metric(
        "edl_records_rate",
        G,
        _D,
        "Records trained on a second, over the last 10 to 20 s.",
        "Records a second",
    ),
    Metric(
        "edl_records_in_progress",
        G,
        ("dataset", "state"),
        "Records of the epochs begun that wait or are lent.",
        "In progress",
    ),
    Metric("edl_dataset_size_records", G, _D, "Records of one epoch."),
    Metric("edl_dataset_epoch", G, _D, "Epoch that is read now, from 0.", "Epoch"),
    Metric("edl_dataset_epochs_done", G, _D, "Epochs that the outcomes make up."),
    Metric(
        "edl_dataset_done_ratio",
        G,
        _D,
        "Part of all records that has an outcome, 0 to 1; of an endless dataset, of this epoch.",
        "Done",
        "percentunit",
    ),
    Metric(
        "edl_dataset_eta_seconds",
        G,
        _D,
        "Seconds to the end at the present rate; absent where there is none.",
        "Time to the end",
        "s",
    ),
    Metric("edl_dataset_finished", G, _D, "1 when every record of every epoch has an outcome."),
    Metric("edl_dataset_suspended", G, _D, "1 while nothing is lent before a restore.", "Trouble"),
    Metric("edl_dataset_failed", G, _D, "1 when more records are bad than are allowed.", "Trouble"),
    Metric("edl_dataset_trainers", G, _D, "Trainers that take part.", "Trainers"),
    Metric("edl_leases", G, _D, "Live leases."),
    Metric(
        "edl_returned_records_total",
        C,
        _D,
        "Records taken from trainers that died, left or stalled.",
        "Came back",
    ),
    Metric("edl_returned_slices_total", C, _D, "Slices taken from trainers that died, left or stalled."),
    Metric("edl_given_back_records_total", C, _D, "Records that trainers gave back themselves.", "Came back"),
    Metric("edl_checkpoints_total", C, _D, "Tokens given for checkpoints.", "Checkpoints"),
    Metric(
        "edl_restores_total",
        C,
        _D,
        "Times that a dataset was taken back to a checkpoint, or the beginning.",
        "Checkpoints",
    ),
    Metric(
        "edl_events_total",
        C,
        ("kind",),
        "Events since the master's start, by kind: joined, left, died, stalled, …",
        "Events",
    ),
    Metric(
        "edl_trainer_pace_records",
        G,
        _T,
        "Records that the trainer trains on a second, over the last 10 to 20 s.",
        "Pace of trainers",
    ),
    Metric("edl_trainer_leases", G, _T, "Leases that it holds."),
    Metric("edl_trainer_oldest_lease_seconds", G, _T, "Age of the oldest of them.", "Oldest lease", "s"),
    Metric("edl_trainer_heard_seconds", G, _T, "Time since it was last heard of.", "", "s"),
    Metric(
        "edl_trainer_progress_seconds",
        G,
        _T,
        "Time since its loop was last known to move on.",
        "Without progress",
        "s",
    ),
    Metric("edl_trainer_slow", G, _T, "1 while its pace is below half of the median."),
    Metric("edl_trainers", G, ("state",), "Trainers by state: live, stream_gone, stalled."),
    Metric("edl_trainer_batches_total", C, _T, "Batches that its loop was given."),
    Metric(
        "edl_trainer_batch_wait_seconds",
        H,
        _T,
        "How long its loop waited for each batch.",
        "Waiting for data",
        "percentunit",
    ),
    Metric("edl_trainer_step_seconds", H, _T, "How long its loop worked on each batch."),
    Metric("edl_trainer_timed_batches_total", C, _T, "Batches whose reading was timed: one each 0.1 s."),
    Metric(
        "edl_trainer_read_seconds_total",
        C,
        _T,
        "Time in which the reader read the records of these batches, one after the other.",
        "Reading and transforming a batch",
        "s",
    ),
    Metric(
        "edl_trainer_transform_seconds_total",
        C,
        _T,
        "Time in which these records were transformed, one after the other.",
        "Reading and transforming a batch",
        "s",
    ),
)
BY_NAME = {metric.name: metric for metric in METRICS}
