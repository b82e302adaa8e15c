"""The table of settings: values that byteps-server accepts, refuses, warns about and prints."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from byteps.torch import c_lib
from byteps.torch.figures import setting

Ask = Callable[..., subprocess.CompletedProcess[str]]

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs/use/settings.md"
TABLE = (ROOT / "byteps/byteps/base/config_table.cc").read_text()
ROW = re.compile(r'^      \{"(\w+)", k\w+, (?:[^{}]|\n)*?(kInternal|kLauncher)?\},$', re.M)
INTERNAL = [name for name, audience in ROW.findall(TABLE) if audience == "kInternal"]
"""Variables that the code reads, and that no page names."""
LAUNCHERS = [name for name, audience in ROW.findall(TABLE) if audience == "kLauncher"]
GONE = re.findall(r'^      \{"(\w+)",\s+"(.+)"\},$', TABLE, re.M)

INTEGERS = {  # name: (least value, greatest value); None if only the least value is limited
    "DMLC_PS_ROOT_PORT": (0, 65535),
    "DMLC_NUM_WORKER": (1, None),
    "DMLC_NUM_SERVER": (1, None),
    "DMLC_WORKER_ID": (0, None),
    "RANK": (0, None),
    "WORLD_SIZE": (1, None),
    "LOCAL_RANK": (0, None),
    "LOCAL_WORLD_SIZE": (1, None),
    "BYTEPS_LOCAL_RANK": (0, None),
    "BYTEPS_LOCAL_SIZE": (1, None),
    "BYTEPS_EMBEDDED_SERVERS": (1, None),
    "BYTEPS_PARTITION_BYTES": (1, None),
    "BYTEPS_PUSH_THREAD": (1, 64),
    "BYTEPS_SERVER_ENGINE_THREAD": (1, 256),
    "BYTEPS_SERVER_WINDOW_BYTES": (0, None),
    "BYTEPS_PINNED_BYTES": (1, None),
}
SECONDS = ("BYTEPS_PEER_TIMEOUT_S", "BYTEPS_START_TIMEOUT_S", "BYTEPS_OP_TIMEOUT_S")
SWITCHES = ("BYTEPS_AUTH", "BYTEPS_DETERMINISTIC")
CHOICES = ("DMLC_ROLE", "BYTEPS_KEY_HASH_FN", "BYTEPS_LOG_LEVEL")
TEXTS = (
    *("DMLC_PS_ROOT_URI", "DMLC_NODE_HOST", "DMLC_INTERFACE"),
    *("BYTEPS_SECRET", "BYTEPS_SECRET_FILE"),
)

HUGE = "99999999999999999999999"
JUNK_NUMBERS = ("junk", "", " ", "7x", "7 ", " 7", "-7", "--7", HUGE, "7,0", "7;", "0x7g")


ENTRY = re.compile(
    r"^### `(?P<name>[A-Z0-9_]+)`\n\n"
    r"(?P<kind>integer|number|0 or 1|text|one of)(?: (?P<allowed>(?:from|of at least|`)[^(;\n]*?))?"
    r"(?: \((?P<unit>[^)\n]+)\))?(?:; default `(?P<default>[^`\n]+)`)?\n\n(?P<meaning>.+)\n",
    re.M,
)


def rows(ask: Ask) -> dict[str, dict[str, str]]:
    """Parse the generated manual: name -> kind, unit, default, allowed and meaning."""
    said = ask("--config-markdown")
    assert said.returncode == 0
    table = {entry["name"]: entry.groupdict("") for entry in ENTRY.finditer(said.stdout)}
    assert len(table) == said.stdout.count("\n### "), "an entry has another form"
    return table


def test_table_has_every_known_variable(ask: Ask) -> None:
    wanted = {*INTEGERS, *SECONDS, *SWITCHES, *CHOICES, *TEXTS}
    assert wanted <= {*rows(ask), *LAUNCHERS}


def test_every_row_is_filled_in(ask: Ask) -> None:
    for name, row in rows(ask).items():
        assert len(row["meaning"]) > 10, name
        assert row["allowed"] or row["kind"] in ("0 or 1", "text"), name


def bad_values() -> list[tuple[str, str]]:
    bad = []
    for name, (least, greatest) in INTEGERS.items():
        bad += [(name, value) for value in (*JUNK_NUMBERS, "1.5", "1e3", "0x10", "nan")]
        bad += [(name, str(least - 1))]
        if greatest is not None:
            bad += [(name, str(greatest + 1))]
    for name in SECONDS:
        bad += [(name, value) for value in (*JUNK_NUMBERS, "0", "-0.5", "nan", "inf", "1e99", "1s")]
    for name in SWITCHES:
        bad += [(name, value) for value in ("", "2", "-1", "yes", "on", "1 ", "01", "true")]
    for name in CHOICES:
        bad += [(name, value) for value in ("", "junk", "0", " ", "server,worker", "djb2 ")]
    return sorted(set(bad))


@pytest.mark.parametrize(("name", "value"), bad_values())
def test_bad_value_is_refused(ask: Ask, name: str, value: str) -> None:
    """The exit status is 2, and a line has the variable, its value and the allowed values."""
    cluster = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "9"}
    role = [] if name == "DMLC_ROLE" else ["--role", "server"]
    said = ask(*role, **{**cluster, "BYTEPS_START_TIMEOUT_S": "1", name: value})
    assert said.returncode == 2, said
    lines = [line for line in said.stderr.splitlines() if name in line]
    assert len(lines) == 1, said.stderr
    assert f"'{value}'" in lines[0]
    assert re.search(r"must be|allowed|from .* to|one of", lines[0].split(f"'{value}'", 1)[1])


def test_all_numbers_of_the_table_have_enforced_bounds(ask: Ask) -> None:
    """The document's bounds of all numbers are enforced, also of numbers in none of the lists
    above."""
    for name, row in rows(ask).items():
        if row["kind"] not in ("integer", "number"):
            continue
        least, *greatest = re.findall(r"-?[\d.]+", row["allowed"])
        for bound, beyond in ((least, -1), *((bound, 1) for bound in greatest)):
            inside = ask("--print-config", **{name: bound})
            # A value within its own bounds may contradict another value (a rank and its size).
            assert f"{name}={bound!r}" not in inside.stderr, (name, bound)
            exact = int if row["kind"] == "integer" else float
            outside = ask("--print-config", **{name: str(exact(bound) + beyond)})
            assert outside.returncode == 2, (name, bound)
            assert name in outside.stderr
        assert ask("--print-config", **{name: HUGE}).returncode == 2, name


def test_every_choice_is_accepted(ask: Ask) -> None:
    for name, row in rows(ask).items():
        if row["kind"] == "one of":
            for value in re.findall(r"`([^`]+)`", row["allowed"]):
                said = ask("--print-config", **{name: value})
                assert said.returncode == 0, (name, value, said.stderr)


def test_print_config_shows_every_variable(ask: Ask) -> None:
    said = ask("--print-config", BYTEPS_PARTITION_BYTES="123456")
    assert said.returncode == 0
    printed = dict(line.split("=", 1) for line in said.stdout.splitlines() if "=" in line)
    table = rows(ask)
    assert set(printed) == {*table, *LAUNCHERS}
    assert printed["BYTEPS_PARTITION_BYTES"] == "123456"
    for name, row in table.items():
        if name != "BYTEPS_PARTITION_BYTES":
            assert printed[name].split("#")[0].strip() == row["default"], name
            assert "default" in printed[name], name


def test_internal_ones_are_read_and_in_no_page(ask: Ask) -> None:
    assert len(INTERNAL) > 10
    for name in INTERNAL:
        refused = ask("--print-config", **{name: "junk"})
        is_text = name in ("BYTEPS_QUORUM", "BYTEPS_TRIAL")
        assert refused.returncode == (0 if is_text else 2), name
    assert "BYTEPS_RDMA_MTU=1024\n" in ask("--print-config", BYTEPS_RDMA_MTU="1024").stdout
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    for page in pages:
        named = set(re.findall(r"\b[A-Z][A-Z0-9_]+\b", page.read_text()))
        assert not named & set(INTERNAL), page


@pytest.mark.parametrize(("name", "instead"), GONE)
def test_a_variable_that_is_gone_is_an_error(ask: Ask, name: str, instead: str) -> None:
    """The error names the replacement."""
    said = ask("--print-config", **{name: "1"})
    assert said.returncode == 2
    assert f"{name} is gone: {instead}" in said.stderr.replace('"', '\\"')
    named = re.findall(r"\b(?:BYTEPS|DMLC)_\w+", instead)
    assert set(named) <= set(rows(ask)), "it says another name that is gone"


def test_committed_document_is_the_generated_one(ask: Ask) -> None:
    assert DOCUMENT.read_text() == ask("--config-markdown").stdout


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("BYTEPS_PARTITION_BYTE", "BYTEPS_PARTITION_BYTES"),
        ("BYTEPS_PUSH_THREADS", "BYTEPS_PUSH_THREAD"),
        ("BYTEPS_PEER_TIMEOUT", "BYTEPS_PEER_TIMEOUT_S"),
        ("DMLC_PS_ROOT_URL", "DMLC_PS_ROOT_URI"),
        ("DMLC_NUM_WORKERS", "DMLC_NUM_WORKER"),
        ("BYTEPS_NUM_WORKER", "DMLC_NUM_WORKER"),
        ("BYTEPS_SERCET", "BYTEPS_SECRET"),
        # Names that are too different from ours, although they have parts in common.
        ("BYTEPS_FOO", None),
        ("BYTEPS_SCHEDULING_CREDIT", None),
        ("BYTEPS_DEBUG_SAMPLE_TENSOR", None),
        ("DMLC_TRACKER_URI", None),
    ],
)
def test_unknown_variable_is_warned_about(ask: Ask, name: str, meant: str | None) -> None:
    """The warning with the likely name comes before the error that ends the run."""
    said = ask("--role", "server", **{name: "1"})
    assert said.returncode == 2
    assert "DMLC_PS_ROOT_URI is not set" in said.stderr
    lines = [line for line in said.stderr.splitlines() if re.search(rf"\b{name}\b", line)]
    assert len(lines) == 1, said.stderr
    assert lines[0].endswith(f" is ignored; did you mean {meant}?" if meant else " is ignored")


def test_no_warning_without_reason(ask: Ask) -> None:
    said = ask("--print-config", BYTEPS_LOG_LEVEL="INFO", UNRELATED="1", XBYTEPS_FOO="1")
    assert said.returncode == 0
    assert not said.stderr


def test_help_and_version(ask: Ask) -> None:
    for flag in ("-h", "--help"):
        said = ask(flag)
        assert said.returncode == 0
        for option in ("--role", "--port-file", "--die-with-parent", "--print-config", "--version"):
            assert option in said.stdout
    said = ask("--version")
    assert said.returncode == 0
    assert re.search(r"\d+\.\d+\.\d+", said.stdout)


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["--nonsense"], "--nonsense"),
        (["stray"], "stray"),
        (["--role"], "--role"),
        (["--role", "worker"], "worker"),
        (["--role", "chef"], "chef"),
        (["--role", "server", "--port-file"], "--port-file"),
        (["--role", "server"], "DMLC_PS_ROOT_URI"),
        (["--role", "scheduler"], "DMLC_PS_ROOT_URI"),
        ([], "(?i)role"),
    ],
)
def test_bad_use(ask: Ask, arguments: list[str], pattern: str) -> None:
    said = ask(*arguments)
    assert said.returncode == 2, said
    assert re.search(pattern, said.stderr)


def test_server_needs_the_port_of_the_scheduler(ask: Ask) -> None:
    said = ask("--role", "server", DMLC_PS_ROOT_URI="127.0.0.1", BYTEPS_START_TIMEOUT_S="1")
    assert said.returncode == 2, said
    assert "DMLC_PS_ROOT_PORT" in said.stderr


def test_committed_table_of_metrics_is_the_generated_one(ask: Ask) -> None:
    table = ask("--metrics-markdown").stdout
    assert table.count("\n") > 20
    assert table in DOCUMENT.with_name("observability.md").read_text()


@pytest.mark.parametrize("value", ["1", "2", "yes"])
def test_asynchronous_training_is_refused(ask: Ask, value: str) -> None:
    said = ask("--print-config", BYTEPS_ENABLE_ASYNC=value)
    assert said.returncode == 2
    assert f"BYTEPS_ENABLE_ASYNC='{value}'" in said.stderr
    assert "asynchronous training is not supported" in said.stderr


@pytest.mark.parametrize("value", ["", "0"])
def test_asynchronous_training_may_be_switched_off(ask: Ask, value: str) -> None:
    said = ask("--print-config", BYTEPS_ENABLE_ASYNC=value)
    assert said.returncode == 0
    assert not said.stderr


# Python reads the same table.


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("BYTEPS_", "DMLC_", "PS_")):
            monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_variables")
def test_python_gets_values_of_their_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BYTEPS_LINK_GBPS", "12.5")
    monkeypatch.setenv("BYTEPS_DETERMINISTIC", "1")
    assert setting("BYTEPS_LINK_GBPS", float) == 12.5
    assert setting("BYTEPS_DETERMINISTIC", bool) is True
    assert setting("BYTEPS_PUSH_THREAD", int) == 4
    assert setting("BYTEPS_KEY_HASH_FN", str) == "raw"
    with pytest.raises(TypeError, match="BYTEPS_LINK_GBPS is of type float, not int"):
        setting("BYTEPS_LINK_GBPS", int)


@pytest.mark.usefixtures("no_variables")
def test_python_is_refused_what_the_table_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BYTEPS_PUSH_THREAD", "4x")
    with pytest.raises(c_lib.BytePSError, match="BYTEPS_PUSH_THREAD='4x' is not allowed"):
        setting("BYTEPS_KEY_HASH_FN", str)


@pytest.mark.usefixtures("no_variables")
def test_a_given_value_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BYTEPS_PUSH_THREAD", "2")
    given = {"BYTEPS_PUSH_THREAD": "3"}
    assert c_lib.setting("BYTEPS_PUSH_THREAD") == 2
    assert c_lib.setting("BYTEPS_PUSH_THREAD", given) == 3
    assert not c_lib.is_set("BYTEPS_KEEP") and c_lib.is_set("BYTEPS_KEEP", {"BYTEPS_KEEP": "1"})
    with pytest.raises(c_lib.BytePSError, match="BYTEPS_PUSH_THREAD='0' is not allowed"):
        c_lib.setting("BYTEPS_KEY_HASH_FN", {"BYTEPS_PUSH_THREAD": "0"})


def test_keep_is_a_setting_that_is_given(ask: Ask) -> None:
    """The flag works before any query, and without a variable of that name."""
    assert "BYTEPS_KEEP=1\n" in ask("--keep", "--print-config").stdout
    assert "BYTEPS_KEEP=0  # default\n" in ask("--print-config").stdout


def test_an_rdma_device_is_checked_before_anything_is_opened(ask: Ask) -> None:
    said = ask(
        *("--role", "scheduler"),
        DMLC_PS_ROOT_URI="127.0.0.1",
        DMLC_PS_ROOT_PORT="0",
        DMLC_NUM_WORKER="1",
        DMLC_NUM_SERVER="1",
        BYTEPS_AUTH="0",
        BYTEPS_RDMA_DEVICE="mlx5_0:x",
    )
    assert said.returncode == 2, said
    assert "BYTEPS_RDMA_DEVICE='mlx5_0:x' is not NAME[:PORT[:GID]]" in said.stderr
