"""The manifests as values: every document, and the pods in them."""

from __future__ import annotations

from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "kubernetes"


def documents(path):
    return [document for document in yaml.safe_load_all(path.read_text()) if document is not None]


def files():
    return sorted(path for path in FOLDER.rglob("*.yaml") if path.name != "kustomization.yaml")


def load(kind, name):
    found = [
        document
        for path in files()
        for document in documents(path)
        if (document["kind"], document["metadata"]["name"]) == (kind, name)
    ]
    assert len(found) == 1, f"{len(found)} manifests are {kind}/{name}"
    return found[0]


def pod_template(document):
    """The pod template of a workload; None of anything else."""
    spec = document["spec"]
    if document["kind"] == "TrainingRuntime":
        (node,) = spec["template"]["spec"]["replicatedJobs"]
        return node["template"]["spec"]["template"]
    return spec.get("template") if document["kind"] in ("StatefulSet", "Job") else None


def trainers(kind):
    """The pod template, and the container with its command and arguments, of a job of trainers."""
    if kind == "Job":
        template = pod_template(load("Job", "coco"))
        return template, template["spec"]["containers"][0]
    job = load("TrainJob", "coco")["spec"]
    template = pod_template(load(job["runtimeRef"]["kind"], job["runtimeRef"]["name"]))
    (container,) = template["spec"]["containers"]
    return template, container | {name: job["trainer"][name] for name in ("command", "args")}


WORKLOADS = [
    (f"{document['kind']}/{document['metadata']['name']}", pod_template(document))
    for path in files()
    for document in documents(path)
    if pod_template(document) is not None
]
