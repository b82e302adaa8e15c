"""Functional tests and examples of a Megatron-LM checkout, and how the flags apply to them.

A dry run shows the command that a script would start. It uses a restricted bash without programs,
which may set and expand variables, but cannot write, change folders or start anything. Functions
that print their arguments replace the launchers.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from scripts.recipekit.features import Outcome, setup_of_arguments, used

_ADDED = ("--micro-batch-size", "1", "--train-iters", "10", "--lr", "1e-4")
"""Arguments that a starting script adds to the list of another script, if the list lacks them."""
_LAUNCHERS = ("torchrun", "python", "python3", "uv", "srun", "numactl", "nohup")
_MARK = "\x1erecipe\x1f"
_LIMIT_S = 20.0
_GIVEN = "8"
"""Value for a variable that a user would set. It is valid as a number and as a path."""
_SAY = f'printf "%s" "{_MARK}"; printf "%s{chr(31)}"'
_PRELUDE = f"""
{"".join(f'{name}() {{ {_SAY} {name} "$@"; }}; ' for name in _LAUNCHERS)}
eval() {{ "$@"; }}
cd() {{ :; }}; pushd() {{ :; }}; popd() {{ :; }}; set() {{ :; }}; source() {{ :; }}; exit() {{ :; }}
command_not_found_handle() {{ :; }}
say_arrays() {{
  local name
  for name in $(compgen -v); do
    case $name in BASH_*) ;; *ARGS|*OPTIONS)
      local -n array=$name
      {_SAY} arrays ${{array[@]}};;
    esac
  done
}}
trap say_arrays EXIT
"""


@dataclass(frozen=True, kw_only=True)
class Started:
    """A training script with its arguments."""

    script: str
    """Path of the script. Empty if the shell script only lists arguments for another script."""
    arguments: tuple[str, ...]
    hosts: int
    gpus: int
    """Number of GPUs per host."""


def started(path: Path, folder: Path) -> list[Started]:
    """Return the training scripts that a shell script would start.

    Args:
        path: path of the shell script.
        folder: its expected working directory.
    """
    with tempfile.TemporaryDirectory() as scratch:
        prelude = Path(scratch) / "prelude"
        prelude.write_text(_PRELUDE)
        empty = Path(scratch) / "bin"
        empty.mkdir()
        text = path.read_text(errors="replace")
        environment = dict.fromkeys(_unset(text), _GIVEN) | {
            "PATH": str(empty), "HOME": scratch, "BASH_ENV": str(prelude), "USER": "nobody",
            "SLURM_NNODES": "1", "SLURM_JOB_ID": "1", "HOSTNAME": "host",
        }  # fmt: skip
        try:
            done = subprocess.run(
                ["/bin/bash", "-r", str(path), *([_GIVEN] * 9)],
                cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True,
                timeout=_LIMIT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return []
    starts, listed = [], []
    for call in done.stdout.decode(errors="replace").split(_MARK)[1:]:
        words = call.split("\x1f")[:-1]
        if words[:1] == ["arrays"]:
            listed += words[1:]
        elif (start := _read(words)) is not None:
            starts.append(start)
    if not starts and listed:
        # Some scripts of the checkout read this script, and start training with its arguments.
        starts.append(Started(script="", arguments=(*_ADDED, *listed), hosts=1, gpus=8))
    return starts


def _unset(text: str) -> set[str]:
    """Return the variables that a script reads but does not set."""
    read = set(re.findall(r"\$\{?([A-Z][A-Z0-9_]*)", text))
    return (
        read - set(re.findall(r"\b([A-Z][A-Z0-9_]*)\+?=", text)) - {"PATH", "HOME", "BASH_SOURCE"}
    )


def _read(words: list[str]) -> Started | None:
    """Parse a launcher's arguments; None if they do not start a Python script."""
    flat: list[str] = []
    for word in words:
        # A whole command line may be one word, for a shell that a launcher starts.
        flat += shlex.split(word) if " " in word and ".py" in word else [word]
    at = next((i for i, word in enumerate(flat) if word.endswith(".py")), None)
    if at is None:
        return None
    before = flat[:at]
    return Started(
        script=flat[at],
        arguments=tuple(word for word in flat[at + 1 :] if word not in ("\\", "&")),
        hosts=_number(before, "nnodes", 1),
        gpus=_number(before, "nproc", 8),
    )


def _number(words: list[str], name: str, default: int) -> int:
    for index, word in enumerate(words):
        key, _, value = word.replace("_", "-").partition("=")
        if key.lstrip("-").startswith(name):
            value = value or (words[index + 1] if index + 1 < len(words) else "")
            if value.isdigit():
                return int(value)
    return default


_CASES = "tests/functional_tests/test_cases"
LINK_GBPS = 100.0
_MOST_HOSTS = 512
_SIZES = {
    *("--num-layers", "--hybrid-layer-pattern", "--hybrid-override-pattern"),
    *("--use-checkpoint-args", "--heterogeneous-layers-config-path"),
}
"""Arguments of which every model has at least one."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Arguments of a recipe, and the machines for which they are meant."""

    name: str
    words: tuple[str, ...]
    environment: Mapping[str, str]
    hosts: int
    gpus: int
    architecture: int


def functional(checkout: Path) -> Iterator[Source]:
    """Yield the functional tests that train with Megatron's own arguments."""
    machines = _machines(checkout)
    for path in sorted((checkout / _CASES).rglob("model_config.yaml")):
        name = str(path.parent.relative_to(checkout / _CASES))
        recipe = yaml.safe_load(re.sub(r"\$\{(\w+)\}", _given, path.read_text()))
        arguments = recipe.get("MODEL_ARGS")
        if not isinstance(arguments, dict) or recipe.get("MODE", "pretraining") != "pretraining":
            continue
        if not all(str(key).startswith("--") for key in arguments):
            continue  # a test of NeMo, whose arguments are paths into its configs
        hosts, gpus, platform, script = machines.get(path.parent.name, (1, 8, "", ""))
        if "inference" in script:
            continue
        variables = recipe.get("ENV_VARS") or {}
        yield Source(
            name=name,
            words=tuple(_words(arguments)),
            environment={str(key): str(value) for key, value in variables.items()},
            hosts=hosts,
            gpus=gpus,
            architecture=10 if "gb200" in platform + name else 9,
        )


def _given(variable: re.Match[str]) -> str:
    """Return a value for a variable that the starter of a test sets."""
    usual = {"REPEAT": "1", "TOKENIZER_TYPE": "NullTokenizer"}
    return usual.get(variable[1], f"/given/{variable[1]}")


def _words(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Build a command line in the same way as the checkout's own script."""
    for flag, value in arguments.items():
        yield flag
        if value is True or value is None or value == "":
            continue
        text = str(value).strip()
        if re.fullmatch(r"\([^)]+\)", text):
            yield text
        elif re.fullmatch(r"\[[^]]+\]|[\d ]+", text):
            yield from shlex.split(text.strip("[]"))
        elif re.search(r"[ |(]", text):
            yield text
        else:
            yield text


def _machines(checkout: Path) -> dict[str, tuple[int, int, str, str]]:
    """Return hosts, GPUs per host, platform and script of each test."""
    machines: dict[str, tuple[int, int, str, str]] = {}
    for path in sorted((checkout / "tests/test_utils/recipes").rglob("*.yaml")):
        recipe = yaml.safe_load(path.read_text())
        spec = recipe.get("spec", {})
        script = re.search(r"TRAINING_SCRIPT_PATH=(\S+?)\"", str(spec.get("script", "")))
        for product in recipe.get("products", []):
            for case in product.get("test_case", []):
                platform = str(spec.get("platforms", ""))
                machine = (int(spec.get("nodes", 1)), int(spec.get("gpus", 8)), platform)
                machines.setdefault(case, (*machine, script[1] if script else ""))
    return machines


def examples(checkout: Path) -> Iterator[Source]:
    """Yield the example scripts that train, or list arguments for a script that does."""
    for path in sorted((checkout / "examples").rglob("*.sh")):
        name = str(path.relative_to(checkout / "examples"))
        if re.search(r"inference|generat|convert|eval|server|preprocess|export|mmlu", name):
            continue
        for start in started(path, path.parent):
            if re.search(r"preprocess|generate|server|convert|main\.py|combine", start.script):
                continue
            if not _SIZES & {word.partition("=")[0] for word in start.arguments}:
                continue  # the list does not describe a complete model
            yield Source(
                name=name,
                words=start.arguments,
                environment={},
                hosts=start.hosts,
                gpus=start.gpus,
                architecture=9,
            )
            break


def examine(source: Source) -> Outcome:
    """Return how the flags apply to a recipe.

    If a recipe has too few hosts for a model, the number of hosts is increased.
    """
    from megatron.core.distributed.dpu_reduce import parameters

    hosts = source.hosts
    while True:
        try:
            return _examined(source, hosts)
        except (parameters.NotMegatrons, ValueError) as error:
            too_few = re.search(r"is not divisible by|cannot be split by", str(error))
            if not too_few or hosts >= _MOST_HOSTS:
                return Outcome(name=source.name, hosts=source.hosts, not_read=str(error)[:200])
        hosts *= 2


def _examined(source: Source, hosts: int) -> Outcome:
    from megatron.core.distributed.dpu_reduce import check, parameters

    args = parameters.parse(
        source.words,
        world=hosts * source.gpus,
        architecture=source.architecture,
        environment=source.environment,
    )
    machines = check.Machines(
        hosts=hosts,
        gpus=source.gpus,
        link_gbps=LINK_GBPS,
        spare=hosts,
    )
    verdict = check.judge(args, machines)
    return Outcome(
        name=source.name,
        hosts=hosts,
        refused=verdict.refused,
        optimizer_refused=verdict.optimizer_refused,
        reaches_servers=verdict.reaches_servers,
        most_hosts=verdict.training.kinds[0].most_hosts,
        left=verdict.left,
        features=used(setup_of_arguments(args)),
    )
