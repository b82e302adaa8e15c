#!/usr/bin/env python3
"""Copies packages that Ray, Megatron-Bridge or verl needs, and a machine with PyTorch lacks, to a
bundle.

Run it with the Python of an environment that has these packages; scripts/bundle.sh does so.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True)
class Part:
    """Packages that one part of the project adds to a bundle."""

    package: str
    """The project's own package, in the checkout."""
    distributions: tuple[str, ...]
    """Distributions whose files are copied."""
    expected: tuple[str, ...]
    """Distributions that the machine must have, because they are large, or part of most
    installations of PyTorch."""
    needs: tuple[str, ...] = ()
    """Other parts that are included."""


PARTS = {
    "ray": Part(
        package="integrations/ray/megatron_byteps_ray",
        distributions=("ray", "jsonschema", "jsonschema-specifications", "referencing", "rpds-py"),
        expected=(
            *("attrs", "click", "filelock", "msgpack", "protobuf", "requests"),
            "typing-extensions",
        ),
    ),
    "hf": Part(
        package="integrations/hf/megatron_byteps_hf",
        distributions=(
            *("megatron-bridge", "nvidia-modelopt", "pulp", "nvidia-ml-py"),
            *("pydantic", "pydantic-core", "annotated-types", "typing-inspection"),
        ),
        expected=(
            *("accelerate", "peft", "safetensors", "scipy", "transformers"),
            *("numpy", "regex", "rich", "setuptools", "six", "tqdm"),
        ),
    ),
    "rl": Part(
        package="integrations/rl/megatron_byteps_rl",
        distributions=(
            *("verl", "tensordict", "torchdata", "codetiming", "datasets", "dill", "multiprocess"),
            *("hydra-core", "omegaconf", "antlr4-python3-runtime", "cachetools", "pyvers"),
            # tensordict, datasets and verl's servers import these.
            *("orjson", "importlib-metadata", "lazy-importer", "opentelemetry-api"),
            *("fastapi", "starlette", "uvicorn"),
            # verl accepts no later version of transformers.
            *("transformers", "tokenizers"),
            *("transferqueue", "msgspec", "prometheus-client", "pyzmq"),
            # Megatron-Bridge imports these when verl asks it for training settings.
            *("megatron-energon", "braceexpand", "filetype", "mfusepy", "rapidyaml", "deprecation"),
            *("webdataset", "multi-storage-client", "jmespath", "lark", "prettytable", "wcwidth"),
            *("pyroute2", "wcmatch", "bracex", "xattr", "cffi", "pycparser"),
        ),
        expected=(
            *("aiohttp", "cloudpickle", "h11", "pandas", "pyarrow", "tqdm", "xxhash"),
            *("annotated-doc", "anyio", "fsspec", "huggingface-hub", "pillow", "python-dateutil"),
            *("typer", "urllib3", "zipp"),
        ),
        needs=("ray", "hf"),
    ),
}
ALWAYS = ("torch", "einops", "omegaconf", "packaging", "psutil", "pyyaml")
"""Distributions available with any bundle: PyTorch on the machine, the others from
scripts/bundle.sh."""
UNNEEDED = (
    *("comet-ml", "mlflow", "tensorboard", "wandb"),  # record runs
    *("flash-linear-attention", "flashinfer-cubin", "flashinfer-python"),
    *("fast-hadamard-transform", "ninja", "pybind11"),  # build kernels
    *("diffusers", "mistral-common", "open-clip-torch", "qwen-vl-utils", "timm"),
    *("nvidia-resiliency-ext", "pylatexenc", "s3fs", "tzdata"),
    *("datasets", "hydra-core"),  # required only by Megatron-Bridge
    "megatron-core",  # the bundle has its own, patched
)
"""Requirements that only unused code imports."""
LEFT_OUT = (
    *("ray/jars/", "ray/cpp/", "ray/rllib/", "ray/dashboard/client/"),
    *("pulp/solverdir/", "multistorageclient/explorer/static/", "multiprocess/tests/", "tests/"),
)
"""Large folders that nothing needs: Java, C++, other libraries on Ray, the dashboard's pages,
solvers, and the tests of verl and others."""
_LARGE_BYTES = 1 << 20


def requirements(distribution: str) -> set[str]:
    """Return the names of a distribution's requirements in this environment."""
    required = map(Requirement, importlib.metadata.requires(distribution) or ())
    return {
        canonicalize_name(requirement.name)
        for requirement in required
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }


def forgotten(parts: Iterable[Part]) -> dict[str, set[str]]:
    """Return requirements of these parts' distributions that no list covers, by distribution."""
    parts = tuple(parts)
    copied = [name for part in parts for name in part.distributions]
    expected = [name for part in parts for name in part.expected]
    known = {canonicalize_name(name) for name in (*copied, *expected, *ALWAYS, *UNNEEDED)}
    missing = {name: requirements(name) - known for name in copied}
    return {distribution: names for distribution, names in missing.items() if names}


def copy(distribution: str, to: Path) -> None:
    """Copy a distribution's modules and its metadata, but not its programs.

    Raises:
        SystemExit: this environment does not have the distribution.
    """
    try:
        metadata = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(f"error: {sys.prefix} has no {distribution}: run make setup") from None
    for file in metadata.files or ():
        name = str(file)
        if name.startswith(("../", *LEFT_OUT)) or "__pycache__" in name:
            continue
        target = to / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(str(file.locate()), target)
        if target.stat().st_size > _LARGE_BYTES:
            _strip(target)


def _strip(file: Path) -> None:
    """Strip debug symbols from a file if it is a program or a library."""
    with file.open("rb") as opened:
        is_program = opened.read(4) == b"\x7fELF"
    if is_program:
        subprocess.run(["strip", "--strip-unneeded", str(file)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="PART", help=" ".join(PARTS))
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="of modules")
    options = parser.parse_args()
    parts = dict.fromkeys(part for name in options.parts for part in (*PARTS[name].needs, name))
    for distribution, names in forgotten(PARTS[name] for name in parts).items():
        raise SystemExit(
            f"error: {distribution} needs {', '.join(sorted(names))}: in {Path(__file__).name}, "
            "list each of them as copied, expected or unneeded"
        )
    for part in map(PARTS.__getitem__, parts):
        for distribution in part.distributions:
            copy(distribution, options.to)
        own = ROOT / part.package
        shutil.copytree(own, options.to / own.name, ignore=shutil.ignore_patterns("__pycache__"))
    expected = sorted({other for name in parts for other in PARTS[name].expected})
    print(f"expected there in addition to PyTorch: {' '.join(expected)}")


if __name__ == "__main__":
    main()
