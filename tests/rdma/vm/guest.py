"""Virtual machines for tests: starts them, waits for them with a time limit, and ends them. Also
compiles the Python bytecode that they use."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.children import captured

from .kernel import VmError, find_initrd, find_kernel

HERE = Path(__file__).parent
QEMU = "qemu-system-x86_64"
NETWORK = "10.77.0"
PLUG_S = 120.0


def address_of(number: int) -> str:
    """Get the address of a guest by its number, from 1."""
    return f"{NETWORK}.{number}"


def missing_tool() -> str | None:
    """Return the reason why this machine can run no guest, if there is one. Only the start of a
    guest shows whether the download of the kernel fails."""
    if platform.machine() != "x86_64":
        return f"guests run on x86-64 only, this is {platform.machine()}"
    if shutil.which(QEMU) is None:
        return f"{QEMU} is not there: run 'make setup' (Debian: qemu-system-x86)"
    return None


@dataclass(frozen=True, kw_only=True)
class Link:
    """An Ethernet cable to another guest, made of a socket on the host. The first end listens."""

    path: Path
    listens: bool

    def options(self, card: int) -> list[str]:
        """Get QEMU's options for the NIC of this number."""
        server = "on" if self.listens else "off"
        return [
            "-netdev",
            f"stream,id=card{card},server={server},addr.type=unix,addr.path={self.path}",
            "-device",
            f"virtio-net-pci,netdev=card{card},host_mtu=4200,"
            f"mac=52:54:00:77:{card:02x}:{1 if self.listens else 2:02x}",
        ]


class Guest:
    """A virtual machine that runs a command as root and then ends. A context manager.

    The guest sees the host's files read-only. Files that the command writes below ``folder`` appear
    on the host at once; all other writes are lost. ``command`` starts there, with a soft-RoCE
    device (see devices.sh), and prints to ``output``.
    """

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        *,
        number: int = 1,
        memory: str = "6G",
        links: Sequence[Link] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        self.folder = folder.resolve()
        if any(letter.isspace() or letter == "," for letter in str(self.folder)):
            raise VmError(f"the guest's folder {self.folder} has a blank or a comma in its name")
        self.output = self.folder / "output"
        self.console = self.folder / "console.log"
        self._status = self.folder / "status"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._status.unlink(missing_ok=True)
        self._write_start(command, number, env or {})
        with self.console.open("wb") as console:
            self._process = subprocess.Popen(
                self._qemu(number, memory, links),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _write_start(self, command: Sequence[str], number: int, env: dict[str, str]) -> None:
        exports = [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
        lines = [
            f"cd {shlex.quote(str(self.folder))}",
            "exec >output 2>&1 </dev/null",
            "set -e",
            f"source {shlex.quote(str(HERE / 'devices.sh'))}",
            f"bring_up {number}",
            *exports,
            f"exec {shlex.join(command)}",
        ]
        (self.folder / "start").write_text("\n".join(lines) + "\n")

    def _qemu(self, number: int, memory: str, links: Sequence[Link]) -> list[str]:
        lacking = missing_tool()
        if lacking is not None:
            raise VmError(lacking)
        kernel = find_kernel()
        initrd = find_initrd(kernel)
        shared = [
            *("-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap"),
            *("-device", "virtio-9p-pci,fsdev=host,mount_tag=host"),
            *("-fsdev", f"local,id=out,path={self.folder},security_model=none"),
            *("-device", "virtio-9p-pci,fsdev=out,mount_tag=out"),
        ]
        words = (
            # On a busy host the timer is late, and the kernel would take the timer for broken.
            "console=ttyS0 quiet loglevel=3 panic=-1 net.ifnames=0 mitigations=off no_timer_check "
            f"out={self.folder} host_name=guest{number} epoch={int(time.time())}"
        )
        return [
            # The guest ends when this process ends, even if this process is killed.
            *("setpriv", "--pdeathsig", "KILL"),
            *(QEMU, "-M", "q35", "-cpu", "max", "-smp", str(os.cpu_count() or 1), "-m", memory),
            *_accelerator(),
            *("-display", "none", "-serial", "stdio", "-no-reboot"),
            *("-kernel", str(kernel.image), "-initrd", str(initrd), "-append", words),
            *shared,
            *("-device", "virtio-rng-pci"),
            *("-nic", "none"),
            *(option for card, link in enumerate(links) for option in link.options(card)),
        ]

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def status(self) -> int | None:
        """Get the command's exit status, or None until it has ended."""
        try:
            text = self._status.read_text().strip()
        except FileNotFoundError:
            return None
        return int(text) if text else None

    def wait(self, timeout_s: float, show: Callable[[str], None] | None = None) -> int:
        """Wait for the command's exit status. Raises VmError when it is late or the guest broke
        down.

        Args:
            show: Called with the command's output as it arrives.
        """
        deadline = time.monotonic() + timeout_s
        shown = 0
        while True:
            status = self.status
            if show is not None and self.output.exists():
                text = self.output.read_text(errors="replace")
                if len(text) > shown:
                    show(text[shown:])
                shown = len(text)
            if status is not None:
                return status
            running = self.running
            if not running and self.status is None:
                raise VmError(f"the guest ended before its command did\n{self.last_words()}")
            if time.monotonic() > deadline:
                raise VmError(
                    f"the guest's command runs still, after {timeout_s:g} s\n{self.last_words()}"
                )
            time.sleep(0.05)

    def last_words(self, lines: int = 20) -> str:
        """Get the last lines that the command and the guest's kernel printed."""
        parts = []
        for path in (self.output, self.console):
            if path.exists():
                text = path.read_text(errors="replace").splitlines()
                parts += [f"---- the end of {path.name}", *text[-lines:]]
        return "\n".join(parts)

    def close(self) -> None:
        """End the guest if it runs."""
        if self.running:
            self._process.kill()
        self._process.wait()

    def plugged_in(self, cables: Sequence[Link]) -> Guest:
        """Return this guest once the cables' other ends exist, because QEMU tries to connect only
        once."""
        deadline = time.monotonic() + PLUG_S
        while not all(cable.path.exists() for cable in cables):
            if not self.running or time.monotonic() > deadline:
                raise VmError(f"the guest has no network\n{self.last_words()}")
            time.sleep(0.02)
        return self

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _accelerator() -> list[str]:
    """Choose KVM if it works. It can exist and still refuse to work, and then everything is
    emulated."""
    if os.access("/dev/kvm", os.R_OK | os.W_OK) and _has_virtualization():
        return ["-accel", "kvm", "-accel", "tcg,thread=multi"]
    return ["-accel", "tcg,thread=multi"]


def _has_virtualization() -> bool:
    flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    return "vmx" in flags or "svm" in flags


# ----- bytecode of Python, which guests would otherwise compile for minutes, with all of torch


FOLDER = Path(__file__).resolve().parents[3] / "build/vm-bytecode"
IMPORT_S = 400.0


def compiled(modules: Sequence[str], path: Sequence[Path] = ()) -> dict[str, str]:
    """Compile everything that these modules import, and get the variables that make Python use it.

    Python itself checks the bytecode against the sources. Raises VmError when the modules cannot be
    imported here.
    """
    env = {"PYTHONPYCACHEPREFIX": str(FOLDER)}
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    more = {"PYTHONPATH": os.pathsep.join(map(str, path))} if path else {}
    ended = captured(
        [sys.executable, "-c", f"import {', '.join(modules)}"],
        IMPORT_S,
        env={**inherited, **env, **more},
    )
    if ended.returncode != 0:
        raise VmError(f"{', '.join(modules)} cannot be imported here:\n{ended.stderr[-2000:]}")
    return env
