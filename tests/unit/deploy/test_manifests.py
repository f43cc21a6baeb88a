"""The manifests against the published schemas, against each other, and against what clusters enforce."""

from __future__ import annotations

import copy
import importlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from edl_torch.cli.main import build_parser
from edl_torch.rpc.credentials import Credentials

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "kubernetes"


LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C it takes a tenth of the time


def documents(path):
    return [document for document in yaml.load_all(path.read_text(), LOADER) if document is not None]


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


# Schemas of Kubeflow Trainer's API --------------------------------------------------------------------------
# JSON schemas of Kubeflow Trainer's API, from the models of the published package `kubeflow-trainer-api`.
#
# The models are generated from that API. They leave out what they do not know; the schemas refuse it.


# Wrappers of the generator's around what may be a text or a number.
_SCALARS = ("IoK8sApimachineryPkgApiResourceQuantity", "IoK8sApimachineryPkgUtilIntstrIntOrString")


def schema_of(kind: str) -> dict[str, Any]:
    """Return the schema of `TrainJob` or `TrainingRuntime`, in its version v1alpha1."""
    module = "trainer_v1alpha1_" + re.sub(r"(?<!^)([A-Z])", r"_\1", kind).lower()
    models = importlib.import_module(f"kubeflow_trainer_api.models.{module}")
    schema: dict[str, Any] = getattr(models, f"TrainerV1alpha1{kind}").model_json_schema(by_alias=True)
    for model in (schema, *schema["$defs"].values()):
        if "properties" in model:
            model["additionalProperties"] = False
    for name in _SCALARS:
        schema["$defs"][name] = {"type": ["string", "number"]}
    return schema


# Tests ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def kubernetes():
    return pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")


@pytest.fixture(scope="session")
def validate(kubernetes):
    from kubernetes_validate import utils

    versions = [v for v in utils.all_versions() if tuple(map(int, v.split(".")[:2])) >= (1, 31)]
    assert len(versions) >= 3

    def check(document):
        if document["kind"] in ("TrainJob", "TrainingRuntime"):
            check_kubeflow(document, utils)
            return
        for version in versions:
            utils.validate(document, version, strict=True)

    return check


def check_kubeflow(document, utils):
    pytest.importorskip("kubeflow_trainer_api", reason="pip install kubeflow-trainer-api")
    jsonschema.Draft202012Validator(schema_of(document["kind"])).validate(document)
    template = pod_template(document)
    if template is not None:
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {}, "template": template}
        utils.validate(pod, utils.latest_version(), strict=True)


@pytest.mark.parametrize("path", files(), ids=lambda path: path.name)
def test_manifest_follows_the_published_schemas(path, validate):
    found = documents(path)
    assert found
    for document in found:
        validate(document)


def broken(kind, name, change):
    document = copy.deepcopy(load(kind, name))
    change(document)
    return document


@pytest.mark.parametrize(
    "document",
    [
        broken("StatefulSet", "edl-master", lambda d: d["spec"].update(replica=2)),
        broken("StatefulSet", "edl-master", lambda d: d["spec"].pop("selector")),
        broken("Service", "edl-master", lambda d: d["spec"]["ports"][0].update(port="50001")),
        broken("Job", "coco", lambda d: pod_template(d)["spec"]["containers"][0].update(readiness={})),
        broken("TrainJob", "coco", lambda d: d["spec"]["trainer"].update(numNode=1)),
        broken("TrainJob", "coco", lambda d: d["spec"].pop("runtimeRef")),
        broken("TrainJob", "coco", lambda d: d["spec"]["trainer"].update(numNodes="3")),
        broken("TrainingRuntime", "edl-torch", lambda d: d["spec"]["mlPolicy"]["torch"].update(elastic={})),
        broken("TrainingRuntime", "edl-torch", lambda d: pod_template(d)["spec"].update(tolerations={})),
    ],
)
def test_broken_manifests_do_not(document, validate):
    with pytest.raises(jsonschema.ValidationError):
        validate(document)


def test_kustomization_names_every_manifest_of_the_master():
    folder = FOLDER / "master"
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == sorted(p.name for p in folder.glob("*.yaml") if p.stem != "kustomization")


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_kustomization_builds_with_the_secrets_of_the_script(tmp_path, validate):
    shutil.copytree(FOLDER, tmp_path / "kubernetes", ignore=shutil.ignore_patterns("secrets"))
    script = tmp_path / "kubernetes" / "secrets.sh"
    subprocess.run([script, "jobs"], check=True, capture_output=True, timeout=60)
    built = subprocess.run(
        ["kubectl", "kustomize", tmp_path / "kubernetes" / "master"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    found = {(d["kind"], d["metadata"]["name"]): d for d in yaml.safe_load_all(built)}
    for document in found.values():
        validate(document)
    assert {name for kind, name in found if kind == "Secret"} == {"edl-master-tls", "edl-access"}
    assert set(found["Secret", "edl-access"]["data"]) == {"ca.crt", "token"}  # no key for trainers
    container = pod_template(found["StatefulSet", "edl-master"])["spec"]["containers"][0]
    assert re.fullmatch(r"edl-torch-master:\d+\.\d+\.\d+", container["image"])


@pytest.mark.parametrize(("name", "template"), WORKLOADS, ids=[name for name, _ in WORKLOADS])
def test_pods_keep_the_restricted_standard_and_have_bounds(name, template):
    spec = template["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False  # they would set EDL_MASTER_PORT and the like
    for container in spec["containers"]:
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]
        mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert "/tmp" in mounted  # the root is read-only


@pytest.mark.parametrize(("name", "template"), WORKLOADS, ids=[name for name, _ in WORKLOADS])
def test_what_a_pod_mounts_is_there(name, template):
    kustomization = yaml.safe_load((FOLDER / "master" / "kustomization.yaml").read_text())
    secrets = {secret["name"]: secret["files"] for secret in kustomization["secretGenerator"]}
    claims = {d["metadata"]["name"] for d in documents(FOLDER / "coco" / "data.yaml") if "Claim" in d["kind"]}
    own = {"state"} if name.startswith("StatefulSet") else set()
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    for container in template["spec"]["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys() | own
    for volume in volumes.values():
        if "secret" in volume:
            assert volume["secret"]["secretName"] in secrets
            assert volume["secret"]["defaultMode"] == 0o440
        if "persistentVolumeClaim" in volume:
            assert volume["persistentVolumeClaim"]["claimName"] in claims


def test_keys_of_the_master_reach_no_trainer():
    for name, template in WORKLOADS:
        mounted = {v["secret"]["secretName"] for v in template["spec"]["volumes"] if "secret" in v}
        assert ("edl-master-tls" in mounted) == (name == "StatefulSet/edl-master")


def test_master_is_one_reached_by_its_service_and_probed_without_tls():
    master = load("StatefulSet", "edl-master")
    pod = pod_template(master)
    container = pod["spec"]["containers"][0]
    assert master["spec"]["replicas"] == 1
    options = build_parser().parse_args(["master", *container["args"]])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert options.addr == f"0.0.0.0:{ports['grpc']}"
    assert options.health_addr == f"0.0.0.0:{ports['health']}"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"] == {"port": ports["health"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert mounts[str(options.state)] == master["spec"]["volumeClaimTemplates"][0]["metadata"]["name"]
    service = load("Service", "edl-master")
    labels = pod["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert service["spec"]["ports"][0]["targetPort"] in ports
    policy = load("NetworkPolicy", "edl-master")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert [port["port"] for rule in policy["ingress"] for port in rule["ports"]] == ["grpc"]
    assert policy["egress"] == []


@pytest.mark.parametrize("kind", ["Job", "TrainJob"])
def test_trainers_are_let_in_and_find_the_master(kind, tmp_path):
    template, container = trainers(kind)
    policy = load("NetworkPolicy", "edl-master")["spec"]
    allowed = policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    assert allowed.items() <= template["metadata"]["labels"].items()
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    service = load("Service", "edl-master")
    port = service["spec"]["ports"][0]["port"]
    assert environment["EDL_MASTER_ADDR"] == f"{service['metadata']['name']}:{port}"
    (tmp_path / "token").write_text("x" * 32)
    (tmp_path / "token").chmod(0o440)  # as the manifests have it
    files = {"/etc/edl/token": tmp_path / "token"}
    assert environment["EDL_MASTER_TLS_CA"] == "/etc/edl/ca.crt"
    read = Credentials.from_env({"EDL_MASTER_TOKEN_FILE": str(files[environment["EDL_MASTER_TOKEN_FILE"]])})
    assert read.token is not None
    assert "/dev/shm" in [mount["mountPath"] for mount in container["volumeMounts"]]


def test_torchrun_is_told_that_pods_come_and_go():
    from torch.distributed.run import parse_args

    _, container = trainers("TrainJob")
    torchrun, *command = container["command"]
    assert torchrun == "torchrun"
    options = parse_args([*command, *container["args"]])
    assert options.nnodes == f"1:{load('TrainJob', 'coco')['spec']['trainer']['numNodes']}"
    assert options.rdzv_endpoint == "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)"
    assert options.training_script == "/opt/coco/train.py"
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_kubeflow_finds_the_pods_and_the_container_of_trainers():
    (node,) = load("TrainingRuntime", "edl-torch")["spec"]["template"]["spec"]["replicatedJobs"]
    assert node["name"] == "node"
    labels = node["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    assert container["name"] == "node"


@pytest.mark.parametrize("kind", ["Job", "TrainJob"])
def test_arguments_of_the_trainers_are_those_of_the_example(kind, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples" / "coco")
    from options import parse

    _, container = trainers(kind)
    assert parse(container["args"]).epochs == 4


def test_replacement_of_a_trainer_resumes_where_there_is_a_checkpoint(tmp_path):
    shell, flag, script, name = pod_template(load("Job", "coco"))["spec"]["containers"][0]["command"]
    assert "exec python /opt/coco/train.py" in script  # so that SIGTERM reaches the trainer
    script = script.replace("/results", str(tmp_path)).replace("exec python /opt/coco/train.py", "echo")
    command = [shell, flag, script, name, "--epochs=4"]

    def said():
        done = subprocess.run(
            command, env={"JOB_COMPLETION_INDEX": "3"}, check=True, capture_output=True, text=True, timeout=10
        )
        return done.stdout.split()

    assert said() == ["--output", f"{tmp_path}/3", "--epochs=4"]
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "checkpoint.pt").touch()
    assert said() == ["--output", f"{tmp_path}/3", "--epochs=4", "--resume"]


def test_patch_of_the_page_names_fields_of_the_job(validate):
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    patch = json.loads(re.search(r"kubectl patch job coco --patch '(\{.*?\})'\n", page)[1])
    job = load("Job", "coco")
    assert patch["spec"].keys() == {"parallelism", "completions"}
    assert patch["spec"]["parallelism"] == patch["spec"]["completions"]
    job["spec"] |= patch["spec"]
    validate(job)
