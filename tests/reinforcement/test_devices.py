"""Jobs on GPUs: what can be seen without one. Refusals, chosen layouts and engines, places."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_byteps_rl import devices, memory, trainer
from megatron_byteps_rl.settings import Settings
from tests.layouts import rl_layouts
from tests.layouts.reinforcement.rows import LAYOUTS

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600.0
NO_GPU = f"--device cuda: torch {torch.__version__} sees no GPU here"


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """On a machine without GPUs, whatever this one has."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            **environment,
        },
    )


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets torch, and who asks the environment, count so many GPUs."""

    def count(number: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(number))))

    return count


@pytest.mark.parametrize("script", ["scripts/rl.py", "tests/layouts/rl_layouts.py"])
def test_without_a_gpu_nothing_starts(script: str) -> None:
    ran = python(str(ROOT / script), "--device", "cuda")
    assert ran.returncode != 0 and NO_GPU in ran.stderr


def test_a_rank_without_a_gpu_of_its_own_is_refused(gpus: Callable[[int], None]) -> None:
    gpus(1)
    devices.check("cuda", 1)
    with pytest.raises(ValueError, match="2 ranks need 2 GPUs, and torch sees 1"):
        devices.check("cuda", 2)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    devices.check("cpu", 2)
    monkeypatch.setattr(devices, "NEEDED", (*devices.NEEDED, "no_such_package", "also.missing"))
    with pytest.raises(ValueError, match=r"^no_such_package, also\.missing: not installed"):
        devices.check("cpu", 2)


def test_one_gpu_is_enough_for_every_layout(gpus: Callable[[int], None]) -> None:
    gpus(1)
    layouts, _ = rl_layouts.chosen(["--device", "cuda"])
    assert layouts == list(LAYOUTS)


def test_an_unknown_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="device 'tpu' is not known; it can be cpu, cuda"):
        Settings(device="tpu", model=tmp_path, folder=tmp_path)


def test_verl_accepts_the_settings_of_a_job_on_gpus(tmp_path: Path) -> None:
    settings = Settings(
        device="cuda", ranks=2, tensor=2, profile=(1, 1), model=tmp_path, folder=tmp_path
    )
    config = trainer.compose(settings.overrides())
    assert (config.trainer.device, config.trainer.n_gpus_per_node) == ("cuda", 2)
    actor = config.actor_rollout_ref.actor
    assert not actor.megatron.use_remove_padding  # packed sequences need Transformer Engine
    assert list(actor.profiler.tool_config.torch.contents) == ["cpu", "cuda"]


def test_verl_takes_the_local_engines_on_gpus() -> None:
    program = """
from megatron_byteps_hf.bridge import auto_bridge
auto_bridge()
from megatron_byteps_rl import engines
assert engines.are_wanted()
engines.register()
from verl.utils.device import get_device_name
from verl.workers.engine import EngineRegistry
kinds = [EngineRegistry.get_engine_cls(k, "megatron") for k in ("language_model", "value_model")]
print(get_device_name(), *(kind.__name__ for kind in kinds), engines.transformer())
"""
    ran = python("-c", program, **devices.ENVIRONMENTS["cuda"])
    assert ran.returncode == 0, ran.stderr
    assert "cuda LocalMegatronEngineWithLMHead LocalMegatronEngineWithValueHead" in ran.stdout
    assert "'use_cpu_initialization': False" in ran.stdout
    # Someone's own job, which has Transformer Engine, keeps verl's engines.
    own = {**devices.ENVIRONMENTS["cuda"], "VERL_ENGINE_VENDOR": "nvidia"}
    other = python("-c", program.replace("assert ", "assert not "), **own)
    assert "cuda MegatronEngineWithLMHead MegatronEngineWithValueHead" in other.stdout, other.stderr


@pytest.mark.thorough
def test_each_rank_gets_a_gpu_from_ray(tmp_path: Path, model: Path) -> None:
    """Ray is told of GPUs that are not there; the ranks look for them, and say so."""
    program = f"""
from pathlib import Path
from megatron_byteps_rl import __main__ as job
from megatron_byteps_rl.settings import Settings
where = dict(model=Path({str(model)!r}), folder=Path({str(tmp_path)!r}))
job.run(Settings(device="cuda", ranks=2, steps=1, **where), [])
"""
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    if torch.cuda.device_count():
        pytest.skip("this machine has GPUs")
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
        env=environment,
    )
    text = ran.stdout + ran.stderr
    assert ran.returncode != 0
    assert any(f"rank {r} sees no GPU (CUDA_VISIBLE_DEVICES={r})" in text for r in (0, 1)), text


def test_peaks_are_those_of_each_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([3, 9, 5])
    monkeypatch.setattr(memory, "_peaks", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(taken))

    class Worker:
        def train(self, value: int) -> int:
            return value + 1

        async def send(self, value: int) -> int:
            return value + 2

    worker = Worker()
    memory.watch(worker, {"train": "update", "send": "weights"})
    assert (worker.train(1), asyncio.run(worker.send(1)), worker.train(2)) == (2, 3, 3)
    assert memory.peaks() == {"update": 5, "weights": 9}
    assert memory.most([memory.peaks(), {"update": 7}]) == {"update": 7, "weights": 9}


def test_nothing_is_watched_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    worker = type("Worker", (), {"train": lambda self: 1})()
    memory.watch(worker, {"train": "update"})
    assert "train" not in vars(worker)
