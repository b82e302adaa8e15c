"""The wheels, installed by pip in a Debian with Python and nothing that anybody builds with.

torch comes out of the worker's image for x86-64. The arm64 wheel's module is loaded without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from containers import Buildah

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
LOAD = """
import importlib.machinery, importlib.util, pathlib, platform, byteps
folder = pathlib.Path(byteps.__file__).parent / "torch"
spec = importlib.machinery.PathFinder.find_spec("c_lib", [str(folder)])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(platform.machine(), module.built_with_prometheus())
"""
"""Finds the module as Python does, and runs its initialisation."""

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
        assert "prometheus: yes" in said
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
def test_the_arm64_module_loads(wheel_for: Callable[[str], Path], buildah: Buildah) -> None:
    with bare(buildah, "arm64", wheel_for("aarch64")) as container:
        said = buildah("run", container, "--", "/opt/venv/bin/python", "-c", LOAD)
    assert said.split() == ["aarch64", "True"]
