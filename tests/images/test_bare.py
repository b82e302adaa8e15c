"""The wheels, installed by pip in a Debian with Python and nothing that anybody builds with.

torch comes from elsewhere: for x86-64 out of the worker's image; for arm64 out of its own wheel,
with what it imports, which is Python alone, from this machine.
"""

from __future__ import annotations

import sysconfig
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import Cluster, Nursery, Spawned, wait_all
from containers import CACHE, Buildah, python_of, run

HERE = Path(__file__).parent
PROGRAMS = HERE.parent / "multiproc"
SUITE = "trixie"
PURE = (
    *("typing_extensions.py", "filelock", "fsspec", "jinja2", "markupsafe", "mpmath"),
    *("networkx", "sympy"),
)
"""What torch imports."""
ALONE = """
import torch, byteps.torch as bps
bps.init()
tensor = torch.arange(100_000, dtype=torch.float32)
assert torch.equal(bps.push_pull(tensor, average=False, name="t"), tensor)
bps.shutdown()
print("summed by", bps.__file__)
"""
"""One worker, in embedded mode: the wheel's own scheduler and server."""
BESIDE_ANOTHER = """
import pathlib, sys
from programs import sums
from programs.job import Job
import byteps.torch
print("summed by", byteps.torch.__file__)
sys.exit(Job(pathlib.Path("/run/job"), {"partition_bytes": 4096}).run(sums.every_dtype))
"""

pytestmark = [
    pytest.mark.requires("root", "images"),
    pytest.mark.thorough,
    pytest.mark.timeout(3600),
]


@pytest.fixture(scope="module")
def torch() -> Path:
    """A folder with arm64's torch, as its wheel has it."""
    requirements = HERE / "requirements-arm64.txt"
    folder = CACHE / "images/torch-2.8.0-aarch64"
    if not (folder / "torch/__init__.py").exists():
        made = folder.with_suffix(".new")
        run(
            python_of("3.13"), "-m", "pip", "download", "--quiet", "--no-deps",
            "--only-binary", ":all:", "--platform", "manylinux_2_28_aarch64",
            "--python-version", "3.13", "--require-hashes", "--requirement", requirements,
            "--dest", made,
        )  # fmt: skip
        (wheel,) = made.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(made)
        wheel.unlink()
        made.rename(folder)
    return folder


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
            mkdir /opt/pure /opt/programs /opt/torch /run/job
            /opt/venv/bin/byteps-server --features""",
        )  # fmt: skip
        assert "prometheus: yes" in said
        # Compiled in, and the system's libraries are not there to be loaded.
        assert "rdma: no: " in said
        yield container


def test_a_job_on_x86(
    worker_image: str, wheel_for: Callable[[str], Path], buildah: Buildah
) -> None:
    with buildah.container(worker_image, "amd64") as worker:
        torch = Path(buildah("mount", worker).strip()) / "opt/venv/lib/python3.13/site-packages"
        with bare(buildah, "amd64", wheel_for("x86_64")) as container:
            # After the environment's own packages: byteps is the one that was installed there.
            late = "echo /opt/torch >/opt/venv/lib/python3.13/site-packages/late.pth"
            buildah("run", container, "--", "sh", "-ec", late)
            said = buildah(
                "run", "--volume", f"{torch}:/opt/torch:ro", container, "--",
                "/opt/venv/bin/python", "-c", ALONE,
            )  # fmt: skip
    assert "summed by /opt/venv/" in said


@pytest.mark.usefixtures("emulator")
def test_an_arm64_worker_beside_one_of_x86(
    torch: Path,
    wheel_for: Callable[[str], Path],
    buildah: Buildah,
    nursery: Nursery,
    run_dir: Path,
) -> None:
    env = {"BYTEPS_PARTITION_BYTES": "4096", "BYTEPS_OP_TIMEOUT_S": "300"}
    env |= {"BYTEPS_START_TIMEOUT_S": "600"}
    with (
        bare(buildah, "arm64", wheel_for("aarch64")) as container,
        Cluster(run_dir / "cluster", nursery, workers=2, servers=1, env=env) as cluster,
    ):
        cluster.start_nodes()
        volumes = {torch: "/opt/torch", PROGRAMS: "/opt/programs"}
        pure = Path(sysconfig.get_path("purelib"))
        volumes |= {pure / name: f"/opt/pure/{name}" for name in PURE}
        mounts = [word for a, b in volumes.items() for word in ("--volume", f"{a}:{b}:ro")]
        settings = {
            name: value
            for name, value in cluster.node_environment().items()
            if name.startswith(("DMLC_", "BYTEPS_"))
        }
        settings |= {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
        settings |= {"PYTHONPATH": "/opt/programs:/opt/torch:/opt/pure", "OMP_NUM_THREADS": "1"}
        settings |= {"PYTHONDONTWRITEBYTECODE": "1"}
        words = [word for item in settings.items() for word in ("--env", "=".join(item))]
        job = ["--volume", f"{cluster.folder}:/run/job"]
        arm = Spawned(
            "arm64 worker",
            ["buildah", "run", *mounts, *job, *words, container, "--",
             "/opt/venv/bin/python", "-c", BESIDE_ANOTHER],
            {**cluster.node_environment(), **buildah.env},
            cluster.folder,
        )  # fmt: skip
        try:
            cluster.start_worker(0, "sums:every_dtype", partition_bytes=4096)
            assert arm.wait(2400) == 0, arm.text[-4000:]
            assert "summed by /opt/venv/" in arm.text
            cluster.finish()
            wait_all(cluster.servers, 60)
        finally:
            if arm.running:
                arm.send(9)
