"""docker/compose.yaml and the Kubernetes manifest: names that must agree, and commands that work.

`make lint` holds the manifest against Kubernetes' own schemas; a schema knows nothing of these.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
KUBERNETES = list(yaml.safe_load_all((ROOT / "docker/kubernetes/byteps.yaml").read_text()))
RUNS = ("Deployment", "StatefulSet", "Job")


def of_kind(*kinds: str) -> list[dict[str, Any]]:
    found = [one for one in KUBERNETES if one["kind"] in kinds]
    assert found, kinds
    return found


def template(workload: dict[str, Any]) -> dict[str, Any]:
    return workload["spec"]["template"]


def container(workload: dict[str, Any]) -> dict[str, Any]:
    (only,) = template(workload)["spec"]["containers"]
    return only


def component(one: dict[str, Any]) -> str:
    return one["metadata"]["labels"]["app.kubernetes.io/component"]


def workload(name: str) -> dict[str, Any]:
    (found,) = [one for one in of_kind(*RUNS) if component(one) == name]
    return found


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


@pytest.mark.parametrize("service", of_kind("Service"), ids=lambda one: one["metadata"]["name"])
def test_a_service_finds_its_pods(service: dict[str, Any]) -> None:
    selected = [
        one
        for one in of_kind(*RUNS)
        if matches(service["spec"]["selector"], template(one)["metadata"]["labels"])
    ]
    assert [component(one) for one in selected] == [component(service)]
    ports = {port["containerPort"] for port in container(selected[0])["ports"]}
    assert {port["port"] for port in service["spec"]["ports"]} <= ports


@pytest.mark.parametrize("one", of_kind(*RUNS), ids=component)
def test_a_pod_is_confined(one: dict[str, Any]) -> None:
    pod, inside = template(one)["spec"], container(one)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert inside["securityContext"]["allowPrivilegeEscalation"] is False
    assert inside["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert inside["resources"]["limits"], "a pod without limits takes a node's memory"
    mounted = {mount["name"] for mount in inside["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    for policy in of_kind("NetworkPolicy"):
        allowed = policy["spec"]["podSelector"]["matchLabels"]
        assert matches(allowed, template(one)["metadata"]["labels"])


@pytest.mark.parametrize("name", ["scheduler", "server"])
def test_a_node_is_asked_how_it_is(name: str) -> None:
    inside = container(workload(name))
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert inside[probe]["exec"]["command"] == ["byteps-server", "--health"]


def test_the_numbers_agree() -> None:
    (settings,) = [one["data"] for one in of_kind("ConfigMap")]
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
        one["metadata"]["name"] for one in of_kind("Service") if component(one) == "scheduler"
    ]
    composed = COMPOSE["services"]
    nodes = [name for name in composed if name.startswith("worker-")]
    assert int(composed["scheduler"]["environment"]["DMLC_NUM_WORKER"]) == len(nodes)
    assert sorted(composed[name]["environment"]["PET_NODE_RANK"] for name in nodes) == ["0", "1"]


def commands() -> dict[str, list[str]]:
    found = {f"kubernetes-{component(one)}": container(one)["args"] for one in of_kind(*RUNS)}
    return found | {f"compose-{n}": one["command"] for n, one in COMPOSE["services"].items()}


@pytest.mark.parametrize("name", commands())
def test_a_command_is_one_that_the_image_knows(name: str) -> None:
    """The entry points take these arguments; Megatron's own are tried by `make test-images`."""
    (settings,) = [one["data"] for one in of_kind("ConfigMap")]
    command = commands()[name]
    if "worker" in name:
        line = [str(ROOT / "scripts/worker.sh"), "--dry-run", *command]
    else:
        line = [str(ROOT / "build/venv/bin/byteps-server"), "--print-config", *command]
    done = subprocess.run(
        line,
        env={**os.environ, **settings, "BYTEPS_SECRET": "a secret that both manifests ask for"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    if "worker" in name:
        assert "--use-dpu-reduce" in done.stdout
        assert (ROOT / "build/Megatron-LM" / "pretrain_dpu_gpt.py").is_file()
    else:
        assert "DMLC_NUM_SERVER=2" in done.stdout.replace('"', "").replace(" ", "")
