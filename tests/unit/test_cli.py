"""The command megatron-byteps: its help, and its start without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
from byteps import cli


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["-h"]) == 0
    printed = capsys.readouterr().out
    for name, (_, what) in cli.COMMANDS.items():
        assert f"{name} " in printed and what in printed
    assert cli.main([]) == 2


@pytest.mark.parametrize(
    ("word", "meant"), [("ptach", "patch"), ("docter", "doctor"), ("xyz", ""), ("--patch", "patch")]
)
def test_unknown_command_hears_the_nearest(
    capsys: pytest.CaptureFixture[str], word: str, meant: str
) -> None:
    assert cli.main([word]) == 2
    printed = capsys.readouterr().err
    assert f"no command '{word}'" in printed
    assert ("did you mean" in printed) == bool(meant)
    assert f"'megatron-byteps {meant}'" in printed or not meant


@pytest.mark.parametrize("name", sorted({*cli.COMMANDS} - {"check"}))  # it is Megatron's
def test_help_of_each_has_an_example_and_needs_no_torch(name: str) -> None:
    program = (
        "import atexit, sys\n"
        "from byteps import cli\n"
        "atexit.register(lambda: print('torch' in sys.modules))\n"
        f"sys.exit(cli.main(['{name}', '-h']))\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert f"megatron-byteps {name}" in done.stdout
    assert "xample" in done.stdout
    if name not in ("scheduler", "server", "worker"):  # they become another program
        assert done.stdout.splitlines()[-1] == "False"
