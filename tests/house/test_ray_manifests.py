"""deploy/ray: names that must agree, pods that Kubernetes takes, and a command that parses.

Both KubeRay manifests passed its resource definitions; those are not here.
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

ROOT = Path(__file__).resolve().parents[2]
CLUSTER, JOB, ANYSCALE = (
    yaml.safe_load((ROOT / "deploy/ray" / f"{name}.yaml").read_text())
    for name in ("raycluster", "rayjob", "anyscale")
)
VERSIONS = dict(
    line.split("=", 1)
    for line in (ROOT / "docker/versions.env").read_text().splitlines()
    if "=" in line
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
names = ("entry", "ranks", "spares", "servers", "server_resource", "gpus_per_rank", "arguments")
print(json.dumps({name: getattr(settings, name) for name in names} | {"address": options.address}))
"""


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["spec"]["containers"]
    return only


def test_the_job_makes_the_same_cluster() -> None:
    assert JOB["spec"]["rayClusterSpec"] == CLUSTER["spec"]


def test_versions_are_those_of_this_release() -> None:
    (ray,) = re.findall(r"^ray==(\S+)", (ROOT / "locks/ray.lock").read_text(), re.M)
    assert CLUSTER["spec"]["rayVersion"] == ray
    image = f"megatron-byteps-worker-ray:{VERSIONS['IMAGE_TAG']}"
    assert {container(pod)["image"] for pod in PODS.values()} == {image}
    assert ANYSCALE["image_uri"] == f"REGISTRY/{image}"


@pytest.mark.parametrize("name", PODS)
def test_a_pod_is_one_that_kubernetes_takes_and_confines(name: str) -> None:
    pod = PODS[name]
    whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": pod["spec"]}
    kubernetes_validate.validate(whole, "1.33", strict=True)
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    inside = container(pod)
    assert inside["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert inside["resources"]["limits"]["memory"]
    mounted = {mount["name"] for mount in inside["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}


@pytest.mark.parametrize("name", ENTRYPOINTS)
def test_the_job_s_command_parses_and_fits_the_cluster(name: str) -> None:
    words = ENTRYPOINTS[name].split()
    assert words[:3] == ["python", "-m", "megatron_byteps_ray"]
    done = subprocess.run(
        [sys.executable, "-c", PARSE, *words[3:]],
        env={**os.environ, "PYTHONPATH": str(ROOT / "integrations/ray")},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    job = json.loads(done.stdout)
    assert job["address"] == "auto"
    assert job["entry"] == "/opt/Megatron-LM/pretrain_dpu_gpt.py"
    training, servers = GROUPS["training"], GROUPS["servers"]
    gpus = int(container(training["template"])["resources"]["limits"]["nvidia.com/gpu"])
    assert (job["ranks"] + job["spares"]) * job["gpus_per_rank"] <= training["replicas"] * gpus
    offered = json.loads(json.loads(servers["rayStartParams"]["resources"]))
    # The scheduler and each server take one.
    assert job["servers"] + 1 <= servers["replicas"] * offered[job["server_resource"]]
    arguments = job["arguments"]
    saved, loaded = (arguments[arguments.index(f"--{n}") + 1] for n in ("save", "load"))
    assert saved == loaded, "a restart must load what the job saved"
    if name == "kuberay":
        mounts = {mount["mountPath"] for mount in container(training["template"])["volumeMounts"]}
        assert any(saved.startswith(f"{path}/") for path in mounts)
