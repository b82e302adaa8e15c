"""An ssh server of a test's own: its keys, port and settings lie in the test's folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

from scripts.children import last_lines
from tests.multiproc.cluster import END_S, START_S, Spawned

HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
"""Addresses of this machine that stand for hosts."""
PACKAGES = ("openssh-server", "libwrap0")


def find_sshd(folder: Path) -> tuple[str, dict[str, str]]:
    """The program and what its environment needs.

    Where it is not installed, Debian's package is unpacked in `folder`: installing it would start a
    service for all of the machine.
    """
    for place in ("/usr/sbin/sshd", "/usr/local/sbin/sshd"):
        if Path(place).exists():
            return place, {}
    folder.mkdir()
    environment = {**os.environ, "LC_ALL": "C"}
    subprocess.run(
        ["apt-get", "download", "-qq", *PACKAGES], cwd=folder, env=environment, check=True,
        timeout=END_S * 4, capture_output=True,
    )  # fmt: skip
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, folder / "tree"], check=True, timeout=END_S)
    libraries = [str(path.parent) for path in (folder / "tree").rglob("libwrap.so.0")]
    return str(folder / "tree/usr/sbin/sshd"), {"LD_LIBRARY_PATH": ":".join(libraries)}


class Sshd:
    """Serves this user at HOSTS, with one key that is allowed. A context manager."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("host", "user"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name],
                check=True, timeout=START_S,
            )  # fmt: skip
        shutil.copy(folder / "user.pub", folder / "authorized_keys")
        (folder / "sshd_config").write_text(
            "".join(f"ListenAddress {host}:{port}\n" for host in HOSTS)
            + f"HostKey {folder}/host\nPidFile none\nAuthorizedKeysFile {folder}/authorized_keys\n"
            # The folders of a test may be anybody's.
            "StrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\n"
            "MaxStartups 100\nMaxSessions 100\n"
        )
        key = (folder / "host.pub").read_text()
        known = "".join(f"[{host}]:{port} {key}" for host in HOSTS)
        (folder / "known_hosts").write_text(known)
        (folder / "ssh_config").write_text(
            f"Host *\n  Port {port}\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {folder}/known_hosts\n  StrictHostKeyChecking yes\n"
            "  BatchMode yes\n  ConnectTimeout 30\n"
        )
        self.command = f"ssh -F {folder}/ssh_config"
        program, more = find_sshd(folder / "package")
        # It gives up its rights as the user sshd, in the folder /run/sshd; where its package is not
        # installed there is neither. So it gets a view of its own of both.
        users = Path("/etc/passwd").read_text()
        if not re.search(r"^sshd:", users, re.M):
            users += "sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin\n"
        (folder / "passwd").write_text(users)
        script = (
            f"mount --bind {folder}/passwd /etc/passwd && mkdir -p /run/sshd && "
            f"exec {program} -D -e -f {folder}/sshd_config"
        )
        self.process = Spawned(
            "sshd", ["unshare", "--mount", "sh", "-c", script], {**os.environ, **more}, folder
        )

    def __enter__(self) -> Sshd:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.running:
            tried = subprocess.run(
                [*self.command.split(), HOSTS[-1], "true"], check=False, timeout=START_S * 2,
                capture_output=True, text=True,
            )  # fmt: skip
            if tried.returncode == 0:
                return self
            time.sleep(0.1)
        self.__exit__()
        raise AssertionError(f"sshd does not serve: {tried.stderr}{last_lines(self.process.log)}")

    def __exit__(self, *_: object) -> None:
        if self.process.running:
            self.process._process.terminate()
        self.process.wait(END_S)
