"""The wheels, installed by pip in a Debian with Python and nothing that anybody builds with.

torch comes out of the worker's image for x86-64. The arm64 wheel's worker sums without it:
importing torch takes too long on an emulated CPU.
"""

from __future__ import annotations

import platform
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.images.containers import Buildah
from tests.multiproc.cluster import Cluster, Nursery, Spawned, wait_all

SUITE, SITE = "trixie", "lib/python3.13/site-packages"
ALONE = """
import torch, byteps.torch as bps
bps.init()
tensor = torch.arange(100_000, dtype=torch.float32)
assert torch.equal(bps.push_pull(tensor, average=False, name="t"), tensor)
bps.shutdown()
print("summed by", bps.__file__)
"""
"""One worker, in embedded mode: the wheel's own scheduler and server."""
PROGRAM = Path(__file__).with_name("plain_worker.py")
PARTITION = 4096
MACHINES = ("x86_64", "aarch64")
OURS = ("DMLC_", "BYTEPS_")

pytestmark = [
    pytest.mark.requires("root", "images"),
    pytest.mark.thorough,
    pytest.mark.timeout(3600),
]


@contextmanager
def bare(buildah: Buildah, arch: str, wheel: Path) -> Iterator[str]:
    """A container with the wheel in an environment of its own, /opt/venv."""
    with buildah.container(buildah.base(SUITE, arch, "python3", "python3-venv"), arch) as container:
        buildah("copy", container, wheel, f"/tmp/{wheel.name}")
        said = buildah(
            "run", container, "--", "sh", "-ec",
            f"""
            for tool in gcc g++ cc make; do if command -v $tool; then exit 1; fi; done
            if ldconfig -p | grep -E 'zmq|verbs|rdmacm|prometheus|cuda'; then exit 1; fi
            python3 -m venv /opt/venv
            /opt/venv/bin/pip install --quiet --no-deps --no-index /tmp/{wheel.name}
            mkdir /opt/torch
            /opt/venv/bin/byteps-server --features""",
        )  # fmt: skip
        # Compiled in, and the system's libraries are not there to be loaded.
        assert "rdma: no: " in said
        yield container


def test_a_job_on_x86(
    worker_image: str, wheel_for: Callable[[str], Path], buildah: Buildah
) -> None:
    with buildah.container(worker_image, "amd64") as worker:
        torch = Path(buildah("mount", worker).strip()) / "opt/venv" / SITE
        with bare(buildah, "amd64", wheel_for("x86_64")) as container:
            # After the environment's own packages: byteps is the one that was installed there.
            late = f"echo /opt/torch >/opt/venv/{SITE}/late.pth"
            buildah("run", container, "--", "sh", "-ec", late)
            said = buildah(
                "run", "--volume", f"{torch}:/opt/torch:ro", container, "--",
                "/opt/venv/bin/python", "-c", ALONE,
            )  # fmt: skip
    assert "summed by /opt/venv/" in said


@pytest.mark.usefixtures("emulator")
def test_an_arm64_worker_beside_one_of_x86(
    wheel_for: Callable[[str], Path], buildah: Buildah, nursery: Nursery, run_dir: Path
) -> None:
    assert platform.machine() == "x86_64"
    folder, largest = run_dir / "cluster", str(5 * PARTITION + 24)
    env = {"BYTEPS_PARTITION_BYTES": str(PARTITION), "BYTEPS_OP_TIMEOUT_S": "300",
           "BYTEPS_START_TIMEOUT_S": "300"}  # fmt: skip
    with (
        bare(buildah, "arm64", wheel_for("aarch64")) as container,
        Cluster(folder, nursery, workers=2, servers=2, env=env) as cluster,
    ):
        buildah("copy", container, PROGRAM, "/opt/plain_worker.py")
        cluster.start_nodes()
        workers = []
        for rank, title in enumerate(("x86 worker", "arm64 worker")):
            own = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            full = {**cluster.node_environment(), **own}
            command = [sys.executable, str(PROGRAM), largest]
            if title.startswith("arm64"):
                told = [f"--env={k}={v}" for k, v in full.items() if k.startswith(OURS) or k in own]
                python = ["/opt/venv/bin/python", "/opt/plain_worker.py", largest]
                command = ["buildah", "run", *told, container, "--", *python]
                full |= buildah.env
            workers.append(Spawned(title, command, full, folder))
        try:
            wait_all(workers, 900)
        finally:
            for worker in workers:
                if worker.running:
                    worker.send(signal.SIGKILL)
        assert [worker.wait(0) for worker in workers] == [0, 0], [w.text[-2000:] for w in workers]
        said = [worker.text.splitlines()[-1] for worker in workers]
        assert said == [f"{m}: 24 tensors, 3 rounds, every value right" for m in MACHINES]
        cluster.finish()
