"""Errors, messages and a git whose behaviour does not depend on the user's configuration."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

IDENTITY_NAME = "Megatron-BytePS"
IDENTITY_EMAIL = "patches@megatron-byteps.invalid"
# Upstream and overlay commits carry a fixed date so that equal content gives equal commit hashes.
FIXED_DATE = "2000-01-01T00:00:00+0000"


class PatchError(Exception):
    """What a user can cause or repair; the message is printed without a traceback."""


def say(message: str) -> None:
    print(message, flush=True)


def warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


def git_env() -> dict[str, str]:
    """An environment in which git ignores the user's and the system's settings."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    env |= {
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_COUNT": "1",
        # A tree made as root and read as a user (or the reverse, in containers) is still ours.
        "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": "*",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_AUTHOR_NAME": IDENTITY_NAME,
        "GIT_AUTHOR_EMAIL": IDENTITY_EMAIL,
        "GIT_AUTHOR_DATE": FIXED_DATE,
        "GIT_COMMITTER_NAME": IDENTITY_NAME,
        "GIT_COMMITTER_EMAIL": IDENTITY_EMAIL,
        "GIT_COMMITTER_DATE": FIXED_DATE,
        "LC_ALL": "C",
        "TZ": "UTC",
    }
    return env


def try_git(
    cwd: Path, *args: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Runs git in `cwd` and returns the result, whatever its exit status."""
    try:
        return subprocess.run(
            ["git", *args],
            cwd=cwd,
            env=git_env() | (env or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
    except FileNotFoundError as error:
        if not Path(cwd).is_dir():
            raise
        raise PatchError("git is not installed (or not on PATH)") from error


def git(cwd: Path, *args: str, env: dict[str, str] | None = None) -> str:
    """Runs git in `cwd` and returns what it printed; a failure is a PatchError."""
    result = try_git(cwd, *args, env=env)
    if result.returncode != 0:
        reason = reason_of(result)
        raise PatchError(f"git {' '.join(args)} failed in {cwd}: {reason}")
    return result.stdout.decode(errors="surrogateescape")


def reason_of(result: subprocess.CompletedProcess[bytes]) -> str:
    """The lines in which git says what is wrong, without its advice on what to type next."""
    lines = (result.stderr + b"\n" + result.stdout).decode(errors="replace").splitlines()
    marks = ("error: ", "fatal: ")
    errors = [line.strip().partition(": ")[2] for line in lines if line.startswith(marks)]
    return "; ".join(errors) or " ".join(line.strip() for line in lines if line.strip())


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
