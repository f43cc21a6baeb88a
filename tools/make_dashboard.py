"""Grafana dashboard of the metrics: `python tools/make_dashboard.py` writes it anew."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

from edl_torch.master.web.metrics import METRICS, Metric

FILE = Path(__file__).resolve().parents[1] / "deploy" / "grafana" / "edl-torch.json"
WIDTH, HEIGHT = 8, 8  # of a panel; a row has 24
_SOURCE = {"type": "prometheus", "uid": "${source}"}


def dashboard() -> dict[str, Any]:
    """Return the dashboard: a panel for each group of metrics."""
    shown = sorted((metric for metric in METRICS if metric.panel), key=lambda metric: metric.panel)
    groups = {title: list(metrics) for title, metrics in groupby(shown, lambda metric: metric.panel)}
    titles = list(dict.fromkeys(metric.panel for metric in METRICS if metric.panel))
    return {
        "title": "edl-torch",
        "uid": "edl-torch",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}]
        },
        "panels": [_panel(place, title, groups[title]) for place, title in enumerate(titles)],
    }


def _panel(place: int, title: str, metrics: list[Metric]) -> dict[str, Any]:
    return {
        "id": place + 1,
        "title": title,
        "type": "timeseries",
        "datasource": _SOURCE,
        "description": "\n\n".join(metric.says for metric in metrics),
        "gridPos": {"x": place % 3 * WIDTH, "y": place // 3 * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": metrics[0].unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": _SOURCE,
                "expr": _query(metric),
                "legendFormat": _legend(metric),
            }
            for i, metric in enumerate(metrics)
        ],
    }


def _query(metric: Metric) -> str:
    if metric.kind == "histogram":  # the share of the time that the loop spent so
        waited, step = f"rate({metric.name}_sum[1m])", "rate(edl_trainer_step_seconds_sum[1m])"
        return f"{waited} / ({waited} + {step})"
    if metric.name.endswith("_seconds_total"):  # of a batch
        return f"rate({metric.name}[5m]) / rate(edl_trainer_timed_batches_total[5m])"
    return f"increase({metric.name}[5m])" if metric.kind == "counter" else metric.name


def _legend(metric: Metric) -> str:
    labels = [label for label in metric.labels if label != "session"]
    return " ".join(f"{{{{{label}}}}}" for label in labels) or metric.name


def main() -> None:
    """Write the file."""
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(json.dumps(dashboard(), indent=1) + "\n")


if __name__ == "__main__":
    main()
