"""docker/compose.yaml, the manifests for Kubernetes and Ray, and the dashboard.

Their names must agree, and their commands must work.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from scripts.children import captured
from scripts.releasekit.contents import ship_tools

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
KUBERNETES = list(yaml.safe_load_all((ROOT / "docker/kubernetes/byteps.yaml").read_text()))
VERSIONS = dict(
    line.split("=", 1)
    for line in (ROOT / "docker/versions.env").read_text().splitlines()
    if "=" in line
)
RUNS = ("Deployment", "StatefulSet", "Job")


def of_kind(*kinds: str) -> list[dict[str, Any]]:
    chosen = [manifest for manifest in KUBERNETES if manifest["kind"] in kinds]
    assert chosen, kinds
    return chosen


def template(workload: dict[str, Any]) -> dict[str, Any]:
    return workload["spec"]["template"]


def container_of(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["spec"]["containers"]
    return only


def container(workload: dict[str, Any]) -> dict[str, Any]:
    return container_of(template(workload))


def component(run: dict[str, Any]) -> str:
    return run["metadata"]["labels"]["app.kubernetes.io/component"]


def workload(name: str) -> dict[str, Any]:
    (run,) = [run for run in of_kind(*RUNS) if component(run) == name]
    return run


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


@pytest.mark.parametrize(
    "service", of_kind("Service"), ids=lambda service: service["metadata"]["name"]
)
def test_a_service_finds_its_pods(service: dict[str, Any]) -> None:
    selected = [
        run
        for run in of_kind(*RUNS)
        if matches(service["spec"]["selector"], template(run)["metadata"]["labels"])
    ]
    assert [component(run) for run in selected] == [component(service)]
    ports = {port["containerPort"] for port in container(selected[0])["ports"]}
    assert {port["port"] for port in service["spec"]["ports"]} <= ports


@pytest.mark.parametrize("run", of_kind(*RUNS), ids=component)
def test_a_pod_is_confined(run: dict[str, Any]) -> None:
    pod, inside = template(run)["spec"], container(run)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert inside["securityContext"]["allowPrivilegeEscalation"] is False
    assert inside["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert inside["resources"]["limits"], "a pod without limits takes a node's memory"
    mounted = {mount["name"] for mount in inside["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    for policy in of_kind("NetworkPolicy"):
        allowed = policy["spec"]["podSelector"]["matchLabels"]
        assert matches(allowed, template(run)["metadata"]["labels"])


@pytest.mark.parametrize("name", ["scheduler", "server"])
def test_a_node_is_asked_how_it_is(name: str) -> None:
    inside = container(workload(name))
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert inside[probe]["exec"]["command"] == ["byteps-server", "--health"]


def test_the_numbers_agree() -> None:
    (settings,) = [manifest["data"] for manifest in of_kind("ConfigMap")]
    workers = workload("worker")["spec"]
    words = container(workload("worker"))["args"]
    assert int(settings["DMLC_NUM_SERVER"]) == workload("server")["spec"]["replicas"]
    assert workers["completions"] == workers["parallelism"]
    assert f"--nnodes={workers['completions']}" in words
    per_node = next(int(word.split("=")[1]) for word in words if word.startswith("--nproc-per"))
    assert int(settings["DMLC_NUM_WORKER"]) == workers["completions"] * per_node
    assert words[words.index("--servers") + 1] == settings["DMLC_NUM_SERVER"]
    where = f"{settings['DMLC_PS_ROOT_URI']}:{settings['DMLC_PS_ROOT_PORT']}"
    assert words[words.index("--scheduler") + 1] == where
    assert settings["DMLC_PS_ROOT_URI"] in [
        service["metadata"]["name"]
        for service in of_kind("Service")
        if component(service) == "scheduler"
    ]
    composed = COMPOSE["services"]
    nodes = [name for name in composed if name.startswith("worker-")]
    assert int(composed["scheduler"]["environment"]["DMLC_NUM_WORKER"]) == len(nodes)
    assert sorted(composed[name]["environment"]["PET_NODE_RANK"] for name in nodes) == ["0", "1"]


def commands() -> dict[str, list[str]]:
    commands_of = {f"kubernetes-{component(run)}": container(run)["args"] for run in of_kind(*RUNS)}
    return commands_of | {
        f"compose-{n}": entry["command"] for n, entry in COMPOSE["services"].items()
    }


@pytest.mark.parametrize("name", commands())
def test_a_command_is_one_that_the_image_knows(name: str) -> None:
    """The entry points accept these arguments; `make test-images` tests Megatron's own."""
    (settings,) = [manifest["data"] for manifest in of_kind("ConfigMap")]
    command = commands()[name]
    if "worker" in name:
        line = [str(ROOT / "scripts/worker.sh"), "--dry-run", *command]
    else:
        line = [str(ROOT / "build/venv/bin/byteps-server"), "--print-config", *command]
    done = captured(
        line,
        60,
        env={**os.environ, **settings, "BYTEPS_SECRET": "a secret that both manifests ask for"},
    )
    assert done.returncode == 0, done.stderr
    if "worker" in name:
        assert "--use-dpu-reduce" in done.stdout
        assert (ROOT / "build/Megatron-LM" / "pretrain_dpu_gpt.py").is_file()
    else:
        assert "DMLC_NUM_SERVER=2" in done.stdout.replace('"', "").replace(" ", "")


# deploy/kubernetes: jobs of other operators, with servers on the hosts or on spare machines.


def read_jobs() -> dict[str, dict[str, Any]]:
    return {
        name: yaml.safe_load((ROOT / f"deploy/kubernetes/{name}.yaml").read_text())
        for name in ("trainjob", "jobset", "pytorchjob")
    }


JOBS = read_jobs()
SPARES = yaml.safe_load((ROOT / "deploy/kubernetes/spare-machines/kustomization.yaml").read_text())
PATCHES = [yaml.safe_load(patch["patch"]) for patch in SPARES["patches"]]


def pods_of_jobs() -> dict[str, dict[str, Any]]:
    """Get the pods that each operator makes; for the trainer, the pods' description in the
    TrainJob."""
    trainer = JOBS["trainjob"]["spec"]["trainer"]
    (patch,) = JOBS["trainjob"]["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]
    (inside,) = pod["spec"]["containers"]
    inside |= {key: trainer[key] for key in ("image", "command", "args", "env")}
    inside["resources"] = trainer["resourcesPerNode"]
    (workers,) = JOBS["jobset"]["spec"]["replicatedJobs"]
    replicas = JOBS["pytorchjob"]["spec"]["pytorchReplicaSpecs"]
    return {
        "trainjob": pod,
        "jobset": workers["template"]["spec"]["template"],
        "pytorchjob master": replicas["Master"]["template"],
        "pytorchjob worker": replicas["Worker"]["template"],
    }


def ranks_of_jobs() -> dict[str, tuple[int, int]]:
    """Get the numbers of hosts and of ranks per host."""
    trainer = JOBS["trainjob"]["spec"]["trainer"]
    (workers,) = JOBS["jobset"]["spec"]["replicatedJobs"]
    variables = {
        variable["name"]: variable.get("value")
        for variable in container_of(workers["template"]["spec"]["template"])["env"]
    }
    pods = workers["template"]["spec"]
    assert pods["completions"] == pods["parallelism"] == int(variables["PET_NNODES"])
    torch_job = JOBS["pytorchjob"]["spec"]
    return {
        "trainjob": (trainer["numNodes"], trainer["numProcPerNode"]),
        "jobset": (pods["completions"], int(variables["PET_NPROC_PER_NODE"])),
        "pytorchjob": (
            sum(replicas["replicas"] for replicas in torch_job["pytorchReplicaSpecs"].values()),
            int(torch_job["nprocPerNode"]),
        ),
    }


PODS_OF_JOBS = pods_of_jobs()


@pytest.mark.parametrize("name", PODS_OF_JOBS)
def test_a_job_s_pod_serves_itself_or_finds_the_spare_machines(name: str) -> None:
    pod = PODS_OF_JOBS[name]
    whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": pod["spec"]}
    kubernetes_validate.validate(whole, "1.33", strict=True)
    (policy,) = of_kind("NetworkPolicy")
    assert matches(policy["spec"]["podSelector"]["matchLabels"], pod["metadata"]["labels"])
    inside = container_of(pod)
    assert inside["image"] == f"megatron-byteps-worker:{VERSIONS['IMAGE_TAG']}"
    assert {"--use-dpu-reduce", "--dpu-reduce-wire-dtype=int8"} <= set(inside["args"])
    # Without a ConfigMap and a Secret for a cluster, ranks start their own servers.
    sources = [variable["valueFrom"] for variable in inside["env"] if "valueFrom" in variable]
    sources += inside.get("envFrom", [])
    references = [
        ref for variable in sources for kind, ref in variable.items() if kind != "fieldRef"
    ]
    assert {ref["name"] for ref in references} == {"byteps"}
    assert all(ref["optional"] for ref in references)
    (settings,) = [manifest["data"] for manifest in of_kind("ConfigMap")]
    assert {ref["key"] for ref in references if "key" in ref} <= {*settings, "secret"}
    assert any("secretKeyRef" in source for source in sources)


SCHEMAS = """
import json, sys
import kubernetes.client as kubernetes
from kubeflow.training import models as training
from kubeflow_trainer_api import models as trainer
from types import SimpleNamespace

for name in dir(training):
    vars(kubernetes.models).setdefault(name, getattr(training, name))
client, jobs = kubernetes.ApiClient(), json.load(sys.stdin)
text = SimpleNamespace(data=json.dumps(jobs["pytorchjob"]))
known = {
    "trainjob": trainer.TrainerV1alpha1TrainJob.from_dict(jobs["trainjob"]).to_dict(),
    "jobset": trainer.JobsetV1alpha2JobSet.from_dict(jobs["jobset"]).to_dict(),
    "pytorchjob": client.sanitize_for_serialization(
        client.deserialize(text, "KubeflowOrgV1PyTorchJob")
    ),
}
json.dump(known, sys.stdout)
"""
"""Reads the jobs by the operators' own models, and writes the fields that these know."""


@pytest.mark.slow
def test_operators_know_each_field_of_a_job() -> None:
    jobs = read_jobs()
    done = subprocess.run(
        [ship_tools() / "python", "-c", SCHEMAS],
        input=json.dumps(jobs), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == jobs


def test_jobs_are_of_the_versions_that_their_operators_serve() -> None:
    kinds = {(job["apiVersion"], job["kind"]) for job in JOBS.values()}
    assert kinds == {
        ("trainer.kubeflow.org/v1alpha1", "TrainJob"),
        ("jobset.x-k8s.io/v1alpha2", "JobSet"),
        ("kubeflow.org/v1", "PyTorchJob"),
    }
    assert JOBS["trainjob"]["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    (workers,) = JOBS["jobset"]["spec"]["replicatedJobs"]
    first = f"{JOBS['jobset']['metadata']['name']}-{workers['name']}-0-0"
    (address,) = [
        variable["value"]
        for variable in container_of(workers["template"]["spec"]["template"])["env"]
        if variable["name"] == "PET_MASTER_ADDR"
    ]
    assert address == f"{first}.{JOBS['jobset']['metadata']['name']}"


def test_the_spare_machines_serve_these_jobs() -> None:
    base = yaml.safe_load((ROOT / "docker/kubernetes/kustomization.yaml").read_text())
    assert base["resources"] == ["byteps.yaml"]
    there = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in KUBERNETES}
    assert {(patch["kind"], patch["metadata"]["name"]) for patch in PATCHES} <= there
    (settings,) = [patch["data"] for patch in PATCHES if patch["kind"] == "ConfigMap"]
    for hosts, ranks in ranks_of_jobs().values():
        assert int(settings["DMLC_NUM_WORKER"]) == hosts * ranks
    (replicas,) = SPARES["replicas"]
    assert ("StatefulSet", replicas["name"]) in there
    assert replicas["count"] == int(settings["DMLC_NUM_SERVER"])
    assert SPARES["images"] == [{"name": "byteps-server", "newTag": VERSIONS["IMAGE_TAG"]}]


# deploy/ray: names that must agree, pods that Kubernetes accepts, and a command that parses.


CLUSTER, JOB, ANYSCALE = (
    yaml.safe_load((ROOT / "deploy/ray" / f"{name}.yaml").read_text())
    for name in ("raycluster", "rayjob", "job")
)
GROUPS = {group["groupName"]: group for group in CLUSTER["spec"]["workerGroupSpecs"]}
PODS = {name: group["template"] for name, group in GROUPS.items()}
PODS["head"] = CLUSTER["spec"]["headGroupSpec"]["template"]
ENTRYPOINTS = {"kuberay": JOB["spec"]["entrypoint"], "anyscale": ANYSCALE["entrypoint"]}
PARSE = """
import json, sys
from megatron_byteps_ray.__main__ import parse
options = parse(sys.argv[1:])
settings = options.settings
others = {"address": options.address, "place": settings.limits.place}
print(json.dumps({"entry": settings.entry, "arguments": settings.arguments} | others))
"""


def test_the_job_makes_the_same_cluster() -> None:
    assert JOB["spec"]["rayClusterSpec"] == CLUSTER["spec"]


def test_versions_are_those_of_this_release() -> None:
    (ray,) = re.findall(r"^ray==(\S+)", (ROOT / "locks/ray.lock").read_text(), re.M)
    assert CLUSTER["spec"]["rayVersion"] == ray
    image = f"megatron-byteps-worker-ray:{VERSIONS['IMAGE_TAG']}"
    assert {container_of(pod)["image"] for pod in PODS.values()} == {image}
    assert ANYSCALE["image_uri"] == f"REGISTRY/{image}"


@pytest.mark.parametrize("name", PODS)
def test_a_pod_is_one_that_kubernetes_takes_and_confines(name: str) -> None:
    pod = PODS[name]
    whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": pod["spec"]}
    kubernetes_validate.validate(whole, "1.33", strict=True)
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    inside = container_of(pod)
    assert inside["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert inside["resources"]["limits"]["memory"]
    mounted = {mount["name"] for mount in inside["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}


@pytest.mark.parametrize("name", ENTRYPOINTS)
def test_the_job_s_command_parses(name: str) -> None:
    words = ENTRYPOINTS[name].split()
    assert words[:3] == ["python", "-m", "megatron_byteps_ray"]
    done = captured(
        [sys.executable, "-c", PARSE, *words[3:]],
        60,
        env={**os.environ, "PYTHONPATH": str(ROOT / "integrations/ray")},
    )
    assert done.returncode == 0, done.stderr
    job = json.loads(done.stdout)
    assert job["address"] == "auto"
    assert job["entry"] == "/opt/Megatron-LM/pretrain_dpu_gpt.py"
    assert job["place"] >= 1200, "a cloud's machine with GPUs takes minutes to come"
    arguments = job["arguments"]
    saved, loaded = (arguments[arguments.index(f"--{n}") + 1] for n in ("save", "load"))
    assert saved == loaded, "a restart must load what the job saved"
    if name == "kuberay":
        mounts = {mount["mountPath"] for mount in container_of(PODS["training"])["volumeMounts"]}
        assert any(saved.startswith(f"{path}/") for path in mounts)


def test_machines_come_and_go_with_jobs() -> None:
    """Autoscaling: of KubeRay, whose autoscaler in the head's pod asks Kubernetes, and Anyscale."""
    spec = CLUSTER["spec"]
    assert spec["enableInTreeAutoscaling"] and spec["autoscalerOptions"]["version"] == "v2"
    tokens = {name: pod["spec"].get("automountServiceAccountToken") for name, pod in PODS.items()}
    assert tokens == {"head": None, "training": False, "servers": False}
    machines = {
        name: (
            PODS[name]["spec"]["nodeSelector"]["node.kubernetes.io/instance-type"],
            group["minReplicas"],
            group["maxReplicas"],
        )
        for name, group in GROUPS.items()
    }
    theirs = ANYSCALE["compute_config"]["worker_nodes"]
    assert machines == {
        variable["name"]: (variable["instance_type"], variable["min_nodes"], variable["max_nodes"])
        for variable in theirs
    }
    offered = json.loads(json.loads(GROUPS["servers"]["rayStartParams"]["resources"]))
    (resources,) = [variable["resources"] for variable in theirs if "resources" in variable]
    assert offered.items() <= resources.items()
    # The driver forwards variables of NCCL to ranks.
    variables = {name: container_of(pod)["env"] for name, pod in PODS.items()}
    assert variables["training"] == variables["servers"] == variables["head"]
    names = {variable["name"] for variable in variables["head"]}
    assert {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} <= names
    assert ANYSCALE["env_vars"]["NCCL_SOCKET_IFNAME"].startswith("^lo")


# The Grafana dashboard and the alerts query existing metrics.


REPOSITORY = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads((REPOSITORY / "deploy/grafana/byteps.json").read_text())
ALERTS = yaml.safe_load((REPOSITORY / "deploy/prometheus/alerts.yaml").read_text())
SUFFIXES = ("_sum", "_count", "_bucket")


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def alerts() -> list[str]:
    return [rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]]


def test_alerts_fire_when_they_should() -> None:
    """promtool evaluates the alerts over made-up series: deploy/prometheus/alerts_test.yaml."""
    promtool = captured([ROOT / "scripts/tools.sh", "promtool"], 300).stdout.strip()
    assert promtool, "there is no promtool"
    done = captured(
        [promtool, "test", "rules", str(ROOT / "deploy/prometheus/alerts_test.yaml")], 60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_operator_scrapes_pods_of_this_name() -> None:
    monitor = yaml.safe_load((ROOT / "deploy/prometheus/podmonitor.yaml").read_text())
    assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "PodMonitor")
    wanted = monitor["spec"]["selector"]["matchLabels"]
    for run in of_kind(*RUNS):
        assert matches(wanted, template(run)["metadata"]["labels"])
    ports = {port["name"] for port in container(workload("server"))["ports"]}
    assert ports & {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}


def test_every_metric_exists() -> None:
    server = Path(sys.executable).parent / "byteps-server"
    table = subprocess.run(
        [server, "--metrics-markdown"], capture_output=True, text=True, check=True
    ).stdout
    kinds = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", table, re.M))
    texts = [*expressions(), *alerts()]
    names = {name for text in texts for name in re.findall(r"byteps_\w+", text)}
    assert len(names) >= 10
    for name in names:
        base = next((name.removesuffix(s) for s in SUFFIXES if name.endswith(s)), name)
        kind = kinds.get(name) or kinds.get(base)
        assert kind is not None, f"{name} is no metric of ours"
        assert (kind == "histogram") == (base != name and name not in kinds), name


def test_counters_are_asked_for_their_rates() -> None:
    failures = "byteps_server_failed_sums_total"  # shown as a number of its own
    for text in expressions():
        for name in re.findall(r"byteps_\w+(?:_total|_sum|_count|_bucket)\b", text):
            assert f"rate({name}" in text or failures in text, text
