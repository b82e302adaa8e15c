"""How servers are killed while replicas train, and what is shown of it."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from bench.kit.processes import Processes
from bench.replicas import failures, server_deaths
from bench.replicas.server_deaths import REPLACED, WAITS, ServerDeaths, Servers

OPTIONS = Namespace(servers=2, spare=3, spare_servers=1, kills=3, kill_every=10.0)


class FakeProcesses(Processes):
    """Logs that the test writes."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.texts = texts
        self.killed: list[str] = []

    def text_of(self, title: str) -> str:
        return self.texts[title]

    def kill(self, title: str) -> None:
        self.killed.append(title)


def place(rank: int) -> str:
    return f"{WAITS}: ... this is server {rank}, for 2 workers"


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """Two servers, of which the first one has rank 1; the replica has made its first steps."""
    processes = FakeProcesses({"scheduler": "", "server-0": place(1), "server-1": place(0)})

    def start(index: int, *args: Any) -> int:
        processes.texts[f"server-{index}"] = "listening"
        return 0

    monkeypatch.setattr(server_deaths, "start_server", start)
    servers = Servers(processes, 2, {})
    return Namespace(
        servers=servers, texts=processes.texts, killed=processes.killed, lives=[Namespace(ends=[])]
    )


def test_servers_are_killed_in_turn_while_one_waits(job: Namespace) -> None:
    deaths = ServerDeaths(OPTIONS)
    deaths(job, 0.0)
    assert "server-2" not in job.texts, "the first steps are without deaths"
    job.lives[0].ends = [0.0] * 3
    deaths(job, 1.0)
    assert job.texts["server-2"] == "listening" and not job.killed
    job.texts["server-2"] = WAITS
    deaths(job, 2.0)
    assert job.killed == ["server-1"], "the one with rank 0"
    assert job.texts["server-3"] == "listening"
    job.texts["server-3"] = WAITS
    deaths(job, 20.0)
    assert job.killed == ["server-1"], "nobody has its place yet"
    job.texts["server-2"] = place(0)
    job.texts["scheduler"] = REPLACED
    deaths(job, 20.5)
    assert job.killed == ["server-1", "server-0"]
    assert [death["killed"] for death in deaths.all] == ["server 0", "server 1"]
    assert deaths.all[0]["back_s"] == 18.5


def test_intervals_are_kept(job: Namespace) -> None:
    deaths = ServerDeaths(OPTIONS)
    job.lives[0].ends = [0.0] * 3
    deaths(job, 0.0)
    job.texts["server-2"] = WAITS
    deaths(job, 0.5)
    job.texts |= {"server-2": place(0), "server-3": WAITS, "scheduler": REPLACED}
    deaths(job, 10.0)
    assert len(job.killed) == 1
    deaths(job, 10.5)
    assert len(job.killed) == 2


def test_a_long_pause_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    death = {"killed": "server 1", "after_step": 20, "pause_s": 0.4, "back_s": 0.6}
    result = {
        "meta": {},
        "schema": 2,
        "kill": "servers",
        "step_s": 1.0,
        "steps": 40,
        "seconds": 41.0,
        "trained": 1.0,
        "goodput": 0.98,
        "checksums": ["x"],
        "deaths": [{**death, "others_waited_s": None}],
    }
    file = tmp_path / "result.json"
    file.write_text(json.dumps(result))
    assert failures.main(["--from-json", str(file), "--most-pause", "0.5"]) == 0
    head, row, *_ = [line for line in capsys.readouterr().out.splitlines() if line]
    assert head.endswith("replaced after, s")
    assert row.split() == ["server", "1", "20", "0.40", "0.60"]
    assert failures.main(["--from-json", str(file), "--most-pause", "0.3"]) == 1
    assert "a step took 0.40 s longer, which is more than 0.3 s" in capsys.readouterr().out
