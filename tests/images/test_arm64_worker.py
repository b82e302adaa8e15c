"""The arm64 wheel, installed by pip in a bare arm64 Debian, in a worker beside an x86-64 one.

Of torch's requirements those come from this machine that are Python alone.
"""

from __future__ import annotations

import sysconfig
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import Cluster, Nursery, Spawned, wait_all
from containers import CACHE, Buildah, python_of, run

HERE = Path(__file__).parent
PROGRAMS = HERE.parent / "multiproc"
PURE = (
    *("typing_extensions.py", "filelock", "fsspec", "jinja2", "markupsafe", "mpmath"),
    *("networkx", "sympy"),
)
"""What torch imports."""
PROGRAM = """
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


@pytest.fixture
def bare(buildah: Buildah, emulator: None) -> Iterator[str]:
    """A container of Debian for arm64 with Python and nothing that anybody builds with."""
    image = buildah.base("trixie", "arm64", "python3", "python3-venv")
    with buildah.container(image, "arm64") as container:
        look = "! command -v g++ gcc cc make; ! ldconfig -p | grep -E 'zmq|verbs|rdmacm|prometheus'"
        buildah("run", container, "--", "sh", "-ec", look)
        yield container


def test_a_worker_beside_one_of_x86(
    bare: str,
    torch: Path,
    wheel_for: Callable[[str], Path],
    buildah: Buildah,
    nursery: Nursery,
    run_dir: Path,
) -> None:
    wheel = wheel_for("aarch64")
    buildah("copy", bare, wheel, f"/tmp/{wheel.name}")
    install = f"""
        python3 -m venv /opt/venv
        /opt/venv/bin/pip install --quiet --no-deps --no-index /tmp/{wheel.name}
        /opt/venv/bin/byteps-server --features
        mkdir /opt/pure /opt/programs /opt/torch /run/job"""
    said = buildah("run", bare, "--", "sh", "-ec", install)
    assert "additions: armv8-a" in said
    assert "rdma: no" in said, "the system's libraries are not there to be loaded"

    env = {"BYTEPS_PARTITION_BYTES": "4096", "BYTEPS_OP_TIMEOUT_S": "300"}
    env |= {"BYTEPS_START_TIMEOUT_S": "600"}
    with Cluster(run_dir / "cluster", nursery, workers=2, servers=1, env=env) as cluster:
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
            ["buildah", "run", *mounts, *job, *words, bare, "--",
             "/opt/venv/bin/python", "-c", PROGRAM],
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
