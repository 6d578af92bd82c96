"""The manifests of deploy/ are what Kubernetes takes, and agree with the server, with each other and with the image.

Documents of Kubernetes' own kinds are checked against its schemas (tests/data/kubernetes_1_37.json). There is none for
KubeRay here: its pods are checked as pods, the application's arguments by the builder's own checks, and the rest
against the fields of its Go types, listed below."""

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from saccade.cli.parser import settings_from
from saccade.cli.serve import new_parser
from saccade.errors import ConfigError
from saccade.ray.deploy_plan import DeployPlan, read_plan
from saccade.server.http.auth import OPEN_PATHS
from saccade.server.server_settings import ServerSettings
from saccade.wire.engine_settings import SchedulerSettings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
OTHERS = ("compose.yaml", "prometheus.yaml")  # of Docker and Prometheus
FILES = tuple(path for path in sorted(DEPLOY.glob("*.yaml")) if path.name not in OTHERS)
SCHEMAS: dict[str, Any] = json.loads((ROOT / "tests/data/kubernetes_1_37.json").read_text())

RAY_SERVICE = {"serveConfigV2", "rayClusterConfig", "serveService"}
RAY_CLUSTER = {"rayVersion", "headGroupSpec", "workerGroupSpecs", "enableInTreeAutoscaling", "autoscalerOptions"}
HEAD_GROUP = {"rayStartParams", "template", "serviceType", "headService"}
WORKER_GROUP = {"groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "rayStartParams", "template"}
SERVE_CONFIG = {"proxy_location", "http_options", "grpc_options", "logging_config", "applications"}
SERVE_APPLICATION = {"name", "import_path", "route_prefix", "args", "runtime_env", "deployments"}

Document = dict[str, Any]


def documents(path: Path) -> list[Document]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


@cache
def validator(kind: str) -> Any:
    return jsonschema_rs.validator_for(
        {"$ref": f"#/definitions/{SCHEMAS['kinds'][kind]}", "definitions": SCHEMAS["definitions"]}
    )


def problems(kind: str, document: Document) -> list[str]:
    return [f"{list(error.instance_path)}: {error.message}" for error in validator(kind).iter_errors(document)]


def named(kind: str) -> Document:
    [found] = [one for path in FILES for one in documents(path) if one["kind"] == kind]
    return found


def templates() -> Iterator[tuple[str, Document]]:
    yield "deployment", named("Deployment")["spec"]["template"]
    cluster = named("RayService")["spec"]["rayClusterConfig"]
    yield "head", cluster["headGroupSpec"]["template"]
    for group in cluster["workerGroupSpecs"]:
        yield group["groupName"], group["template"]


TEMPLATES = dict(templates())
each_template = pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)


def gibibytes(quantity: str) -> float:
    found = re.fullmatch(r"(\d+)Gi", quantity)
    assert found, f"{quantity} is not in Gi"
    return float(found[1])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_documents_are_what_kubernetes_takes(path: Path) -> None:
    found = documents(path)
    assert found, f"{path} is empty"
    for document in found:
        if document["kind"] != "RayService":
            assert problems(document["kind"], document) == []
        assert document["metadata"]["labels"]["app.kubernetes.io/name"].startswith("saccade")


@each_template
def test_pods_are_what_kubernetes_takes(template: Document) -> None:
    assert problems("PodTemplateSpec", template) == []


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("spec", "replicas"), "two"),
        (("spec", "template", "spec", "containers", 0, "readinessProbe", "httpGet", "pth"), "/ready"),
        (("spec", "template", "spec", "terminationGracePeriod"), 90),
        (("spec", "template", "spec", "volumes", 0, "name"), 7),
        (("metadata", "labels", "app.kubernetes.io/name"), 1),
    ],
)
def test_the_schemas_find_mistakes(place: tuple[str | int, ...], value: object) -> None:
    document = deepcopy(named("Deployment"))
    part: Any = document
    for step in place[:-1]:
        part = part[step]
    part[place[-1]] = value
    assert problems("Deployment", document)


@each_template
def test_pods_may_do_little(template: Document) -> None:
    pod = template["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False  # SACCADE_PORT of a Service is no --port
    context = pod["securityContext"]
    assert context["runAsNonRoot"] and context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert f"--uid {context['runAsUser']} saccade" in (ROOT / "Dockerfile").read_text()
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@each_template
def test_pods_can_write_where_they_must_and_volumes_are_there(template: Document) -> None:
    pod = template["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    [container] = pod["containers"]
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert {mount["name"] for mount in mounts.values()} == set(volumes)
    for path in ("/home/saccade", "/home/saccade/.cache", "/tmp", "/dev/shm", "/home/saccade/.cache/huggingface"):
        assert not mounts[path].get("readOnly")
    for path in mounts:  # a folder that is made for a mount belongs to root, and nothing else can be written into it
        around = [str(parent) for parent in Path(path).parents if str(parent) in mounts]
        assert not around or around[0] == str(Path(path).parent)
    assert volumes[mounts["/dev/shm"]["name"]]["emptyDir"]["medium"] == "Memory"
    claims = [
        volume["persistentVolumeClaim"]["claimName"] for volume in volumes.values() if "persistentVolumeClaim" in volume
    ]
    assert claims == [named("PersistentVolumeClaim")["metadata"]["name"]]


@each_template
def test_no_secret_is_written_into_a_manifest(template: Document) -> None:
    for variable in template["spec"]["containers"][0].get("env", ()):
        assert "secretKeyRef" in variable["valueFrom"]
    text = (DEPLOY / "kuberay.yaml").read_text()
    assert not re.search(r"^\s*(admin-)?api[-_]key:", text, re.MULTILINE)


def test_the_servers_flags_are_flags_and_its_requests_end_before_its_pod_does() -> None:
    pod = named("Deployment")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["args"][0] == "serve"
    flags = new_parser("serve").read(container["args"][1:])
    server = settings_from(flags, ServerSettings)
    assert server.host == "0.0.0.0"
    assert {"name": "http", "containerPort": server.port} in container["ports"]
    wait_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert wait_s + server.shutdown_timeout_s < pod["terminationGracePeriodSeconds"]
    limits = settings_from(flags, SchedulerSettings)
    shared = gibibytes(pod["volumes"][-1]["emptyDir"]["sizeLimit"])
    held = (limits.max_media_bytes + server.max_pending_bytes) / 2**30 + shared
    assert held < gibibytes(container["resources"]["limits"]["memory"]) - 8  # libraries, tokenizer, weights being read


def test_probes_need_no_key_and_wait_for_a_first_start() -> None:
    [container] = named("Deployment")["spec"]["template"]["spec"]["containers"]
    probes = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    paths = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
    assert paths == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
    assert set(paths.values()) <= OPEN_PATHS
    assert {probe["httpGet"]["port"] for probe in probes.values()} == {"http"}
    assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] >= 600


def test_documents_refer_to_each_other() -> None:
    deployment, service = named("Deployment"), named("Service")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels == deployment["spec"]["selector"]["matchLabels"]
    assert service["spec"]["ports"][0]["targetPort"] == "http"
    assert named("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    target = named("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", deployment["metadata"]["name"])
    policies = {one["metadata"]["name"]: one["spec"] for one in documents(DEPLOY / "network-policy.yaml")}
    assert policies["saccade"]["podSelector"]["matchLabels"] == labels
    assert policies["saccade-ray"]["podSelector"]["matchLabels"] == TEMPLATES["head"]["metadata"]["labels"]
    assert all(policy["policyTypes"] == ["Ingress", "Egress"] for policy in policies.values())


def test_clients_reach_one_port_of_a_cluster_and_nobody_reaches_private_networks() -> None:
    for policy in documents(DEPLOY / "network-policy.yaml"):
        for rule in policy["spec"]["ingress"]:
            is_own = rule["from"] == [{"podSelector": policy["spec"]["podSelector"]}]
            assert is_own or rule["ports"], "others reach every port"
            if {"podSelector": {"matchLabels": {"saccade-client": "true"}}} in rule["from"]:
                assert rule["ports"] == [{"protocol": "TCP", "port": 8000}]
        blocks = [to["ipBlock"] for rule in policy["spec"]["egress"] for to in rule["to"] if "ipBlock" in to]
        assert all({"10.0.0.0/8", "169.254.0.0/16"} <= set(block["except"]) for block in blocks)


def serve_config() -> Document:
    found: Document = yaml.safe_load(named("RayService")["spec"]["serveConfigV2"])
    return found


def plan() -> DeployPlan:
    [application] = serve_config()["applications"]
    return read_plan(application["args"])


def test_the_ray_service_has_fields_that_kuberay_knows() -> None:
    service = named("RayService")
    assert service["apiVersion"] == "ray.io/v1"
    cluster = service["spec"]["rayClusterConfig"]
    assert service["spec"].keys() <= RAY_SERVICE
    assert cluster.keys() <= RAY_CLUSTER
    assert cluster["headGroupSpec"].keys() <= HEAD_GROUP
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    for group in cluster["workerGroupSpecs"]:
        assert group.keys() <= WORKER_GROUP
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    pins = f'"ray[serve]=={cluster["rayVersion"]}"'
    assert pins in (ROOT / "pyproject.toml").read_text() and pins in (DEPLOY / "ray.Dockerfile").read_text()


def test_the_application_is_ours_and_its_arguments_are_settings() -> None:
    config = serve_config()
    assert config.keys() <= SERVE_CONFIG
    [application] = config["applications"]
    assert application.keys() <= SERVE_APPLICATION
    assert application["import_path"] == "saccade.ray:app"
    found = plan()
    mounts = {mount["mountPath"] for mount in TEMPLATES["gpu"]["spec"]["containers"][0]["volumeMounts"]}
    assert str(Path(found.server.limits).parent) in mounts
    assert found.server.allowed_hosts == ("*",)
    with pytest.raises(ConfigError, match="unknown setting replica"):
        read_plan({**application["args"], "replica": 4})


def test_the_cluster_has_room_for_the_application() -> None:
    found, cluster = plan(), named("RayService")["spec"]["rayClusterConfig"]
    num_gpus, num_cpus = 0.0, 0.0
    for group in cluster["workerGroupSpecs"]:
        [container] = group["template"]["spec"]["containers"]
        requests = container["resources"]["requests"]
        num_gpus += group["replicas"] * requests["nvidia.com/gpu"]
        num_cpus += group["replicas"] * float(requests["cpu"])
    deploy = found.deploy
    assert num_gpus == deploy.most_replicas * found.num_gpus
    assert num_cpus >= deploy.most_replicas * deploy.replica_cpus + deploy.ingress_replicas * deploy.ingress_cpus
    gpu = TEMPLATES["gpu"]["spec"]
    assert found.server.shutdown_timeout_s < gpu["terminationGracePeriodSeconds"]
    shared = gibibytes(gpu["volumes"][-1]["emptyDir"]["sizeLimit"])
    held = (found.limits.max_media_bytes + found.server.max_pending_bytes) / 2**30 + shared
    assert held < gibibytes(gpu["containers"][0]["resources"]["limits"]["memory"]) - 8
