"""Backends of torch.distributed that a process group has, by name."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from byteps import c10d_plugin
from byteps.c10d_plugin import RequestedBackends

from scripts.children import captured
from tests.multiproc.cluster import START_S, clean_environment


@pytest.mark.parametrize(
    ("name", "backends"),
    [
        ("gloo", {"cpu": "gloo", "cuda": "gloo"}),
        ("nccl", {"cuda": "nccl"}),
        ("cpu:gloo", {"cpu": "gloo"}),
        ("cuda:nccl", {"cuda": "nccl"}),
        ("cpu:gloo,cuda:gloo", {"cpu": "gloo", "cuda": "gloo"}),
        ("cuda:nccl,cpu:gloo", {"cpu": "gloo", "cuda": "nccl"}),
    ],
)
def test_all_spellings_of_gloo_and_nccl_are_carried(name: str, backends: dict[str, str]) -> None:
    requested = RequestedBackends.of(name)
    assert requested.backends == backends
    assert requested.is_carried


def test_a_group_that_names_no_backend_is_carried() -> None:
    assert RequestedBackends.of(dist.Backend.UNDEFINED).is_carried


@pytest.mark.parametrize("name", ["fake", "ucc", "cpu:gloo,cuda:ucc"])
def test_other_backends_are_not_carried_and_a_line_says_so(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not RequestedBackends.of(name).is_carried
    monkeypatch.setattr(c10d_plugin, "_warned", set())
    made: list[str] = []

    def make(backend: str) -> tuple[None, None]:
        made.append(backend)
        return None, None

    carrying = c10d_plugin._carrying(make)
    with caplog.at_level(logging.WARNING):
        carrying(name)
        carrying(name)
    assert made == [name, name]
    assert [record.getMessage().count(name) for record in caplog.records] == [1]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("BYTEPS_C10", "BYTEPS_C10D"),
        ("BYTEPS_CD10", "BYTEPS_C10D"),
        ("BYTPES_C10D", "BYTEPS_C10D"),
        ("BYTEPS_FSDP_DTYPE", "BYTEPS_FSDP_DTYPES"),
    ],
)
def test_a_misspelt_variable_is_told(
    name: str, meant: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BYTEPS_C10D", raising=False)
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("BYTEPS_PINNED_BYTES", "1")
    c10d_plugin.autoload()
    assert caplog.messages == [f"there is no variable {name}: did you mean {meant}?"]


def test_variables_without_the_switch_are_told_once_a_group_is_made(tmp_path: Path) -> None:
    """Hooks of `byteps.torch` read the variables without the switch."""
    group = (
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
    )
    names = ("BYTEPS_C10D_WIRE_DTYPE", "BYTEPS_FSDP_DTYPES")
    env = {**clean_environment(tmp_path), **dict.fromkeys(names, "int8")}
    assert not c10d_plugin.lacking_switch({**env, "BYTEPS_C10D": "0"})
    for before, warnings in (("", 1), ("import byteps.torch\n", 0)):
        script = [sys.executable, "-c", f"{before}{group}dist.new_group()"]
        said = captured(script, START_S, env=env)
        assert said.returncode == 0, said.stderr
        assert said.stderr.count("Set BYTEPS_C10D=1 on all hosts") == warnings, said.stderr
        assert said.stderr.count(f"{' and '.join(names)} without BYTEPS_C10D=1") == warnings
