"""The subcommand ``doctor``: finds faults of this host, and shows how a job would run on hosts like
it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import platform
import secrets
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from byteps.cli import NAME, make_parser, version
from byteps.patching.series import PatchError

_LEAST_TORCH = (2, 9)
_NETS = Path("/sys/class/net")
_WIRES = ("fp32", "bf16", "int8", "int4")
_CHECK_S = 60
_NO_SCHEDULER = 3
"""Exit status of a check whose only fault is that no scheduler answers."""
_WRONG = "WRONG"


class Doctor:
    """Examines this host, and prints a line for each finding."""

    def __init__(self, hosts: int, ranks: int | None) -> None:
        """
        Args:
            hosts: number of hosts of the assumed job.
            ranks: number of ranks per host; None: one per GPU of this host, or one without GPUs.
        """
        self._hosts, self._ranks = hosts, ranks
        self._printed: set[str] = set()
        self.is_well = True

    def ok(self, text: str) -> None:
        self._print(f"ok    {text}")

    def note(self, text: str) -> None:
        self._print(f"note  {text}")

    def wrong(self, text: str) -> None:
        """Print a fault, and how to repair it."""
        self._print(f"{_WRONG} {text}")
        self.is_well = False

    def _print(self, line: str) -> None:
        """Print a line that was not printed before: several checks may find the same fault."""
        if line not in self._printed:
            print(line, flush=True)
        self._printed.add(line)

    def look(self) -> None:
        """Examine everything; go on after a fault."""
        has_engine = self._looks_well(self._software)
        self._looks_well(self._megatron)
        executable = self._executable()
        if executable:
            self._looks_well(lambda: self._roles(executable))
        self._secret()
        if has_engine:
            self._switch()
            self._looks_well(self._plan)

    def _looks_well(self, look: Callable[[], None]) -> bool:
        try:
            look()
        except (ImportError, RuntimeError, ValueError, OSError, PatchError) as error:
            self.wrong(str(error))
            return False
        return True

    def _software(self) -> None:
        self.ok(f"byteps {version()}, Python {platform.python_version()}, {platform.machine()}")
        if not importlib.util.find_spec("torch"):
            raise ImportError(f"{sys.executable} has no torch: pip install torch")
        torch: Any = importlib.import_module("torch")
        numbers = torch.__version__.split("+")[0].split(".")
        if tuple(map(int, numbers[:2])) < _LEAST_TORCH:
            least = ".".join(map(str, _LEAST_TORCH))
            raise ImportError(f"torch {torch.__version__} is too old: pip install 'torch>={least}'")
        importlib.import_module("byteps.torch.c_lib")
        self.ok(f"torch {torch.__version__}, and byteps's library loads")
        gpus = torch.cuda.device_count()
        if gpus:
            self.ok(f"{gpus} GPUs, the first one a {torch.cuda.get_device_name(0)}")
        elif Path("/dev/nvidiactl").exists():
            raise RuntimeError(
                "this host has an NVIDIA GPU, and torch sees none: look at nvidia-smi, "
                "CUDA_VISIBLE_DEVICES, and whether this torch was built with CUDA "
                f"(torch.version.cuda is {torch.version.cuda})"
            )
        else:
            self.note("no GPU: tensors in memory are reduced")
        self._ranks = self._ranks or gpus or 1

    def _megatron(self) -> None:
        from byteps.patching.target import Target, installed

        try:
            root = installed()
        except PatchError:
            self.note(
                f"no megatron-core in this Python, and PyTorch needs none; '{NAME} patch PATH' "
                "patches a checkout"
            )
            return
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            is_patched = Target.of(root).status()
        text = printed.getvalue().strip().replace("\n", "\n      ")
        if is_patched:
            self.ok(text)
        else:
            self.note(f"{text}\n      '{NAME} patch' patches it; --use-dpu-reduce needs that")

    def _executable(self) -> str | None:
        """Return the path of byteps-server; None if it is missing. Also checks its version."""
        from byteps.launcher.child import find_executable

        try:
            executable = find_executable()
            said = _run([executable, "--version"]).stdout.split()
        except (RuntimeError, ImportError, OSError) as error:
            self.wrong(str(error))
            return None
        if said[1:] != [version()]:
            self.wrong(
                f"{executable} is {' '.join(said)}, and this byteps is {version()}: nodes of "
                "different versions refuse each other; install the same on all hosts"
            )
        features = _run([executable, "--features"]).stdout.strip().replace("\n", ", ")
        self.ok(f"{executable} ({features})")
        return executable

    def _roles(self, executable: str) -> None:
        """Let byteps-server check whether each role could start on this host."""
        roles, variables = ["scheduler", "server"], dict(os.environ)
        if "DMLC_PS_ROOT_URI" in variables:
            self.note(f"a cluster is named: DMLC_PS_ROOT_URI={variables['DMLC_PS_ROOT_URI']}")
            sized = "DMLC_NUM_WORKER" in variables or variables.get("BYTEPS_KEEP") == "1"
            # While a scheduler runs, its port is in use, and the check of the role "scheduler"
            # would fail.
            roles = ["server", "worker"] if sized else ["worker"]
        else:
            self.note("no cluster is named (DMLC_PS_ROOT_URI): jobs here are in embedded mode")
            address = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "0"}
            variables |= address | {"DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1"}
            if not variables.get("BYTEPS_SECRET_FILE"):
                variables["BYTEPS_SECRET"] = secrets.token_hex(32)
        for role in roles:
            if role == "server" and variables["DMLC_PS_ROOT_PORT"] == "0":
                # No scheduler listens at port 1.
                variables["DMLC_PS_ROOT_PORT"] = "1"
            done = _run([executable, "--role", role, "--check"], variables)
            for line in (done.stdout + done.stderr).splitlines():
                if "(127.0.0.1:1)" not in line:
                    self._print(line)
            is_alone = "DMLC_PS_ROOT_URI" not in os.environ
            if done.returncode and not (is_alone and done.returncode == _NO_SCHEDULER):
                self.is_well = False

    def _switch(self) -> None:
        from byteps.c10d_plugin import lacking_switch

        if lacking := lacking_switch(os.environ):
            self.note(
                f"{lacking}. (A script that imports byteps.torch, and --use-dpu-reduce, need no "
                "switch)"
            )

    def _secret(self) -> None:
        name = os.environ.get("BYTEPS_SECRET_FILE")
        if not name:
            return
        try:
            mode = Path(name).stat().st_mode
        except OSError as error:
            self.wrong(
                f"BYTEPS_SECRET_FILE: {error}; 'byteps-server --new-secret FILE' makes one, which "
                "goes to every host"
            )
            return
        if mode & (stat.S_IRGRP | stat.S_IROTH):
            self.wrong(f"others can read the job's secret: chmod 600 {name}")

    def _plan(self) -> None:
        """Print what a job on hosts like this one would do."""
        from byteps import routing
        from byteps.cost_model import Servers
        from byteps.forecast import WIRE_BYTES
        from byteps.launcher.addresses import own_address
        from byteps.launcher.host_servers import cost_text, fit_hosts, means_of_host
        from byteps.torch import c_lib

        address = own_address(os.environ)
        names = {_address_of(c_lib, path.name): path.name for path in sorted(_NETS.iterdir())}
        self.ok(f"other hosts reach this one at {address} ({names.get(address, 'no interface')})")
        means = means_of_host(address)
        rate = f"{means['gbps']:g} Gbit/s" if means["gbps"] else "a rate that the kernel does not"
        rate += "" if means["gbps"] else " tell: set BYTEPS_LINK_GBPS"
        nics = ", ".join(_nics()) or "none that is hardware"
        if not _NETS.is_dir():
            nics = f"unknown, since {_NETS} does not exist here"
        self.note(f"NICs: {nics}; in use together: {rate}")
        ranks = self._ranks or 1
        (servers,) = fit_hosts([[means] * ranks])
        self.note(
            f"a job with {ranks} rank{'s' * (ranks > 1)} on each of {self._hosts} hosts like this "
            f"one (--hosts, --ranks) would start {servers.count} server"
            f"{'s' * (servers.count > 1)} on each; {cost_text([servers])}"
        )
        if self._hosts == 1:
            self.note("on one host all gradients stay with NCCL, or gloo")
            return
        hosts = tuple(host for host in range(self._hosts) for _ in range(ranks))
        network = routing.Network(
            servers=Servers(hosts=self._hosts, extra=0, local=servers.count),
            host_rate=None,
            server_rate=None,
        )
        for wire in _WIRES:
            gradients = min(4.0, max(WIRE_BYTES[wire], 2.0))
            what = routing.Sum(
                hosts=hosts,
                gradient_bytes=round(1e6 * gradients),
                wire_bytes=round(1e6 * WIRE_BYTES[wire]),
            )
            decision = routing.decide(what, network)
            path = f"servers, {decision.route}"
            if decision.route == routing.COLLECTIVE:
                path = "NCCL or gloo"
            self.note(f"path of gradients in {wire}: {path} ({decision.why})")


def _run(
    command: Sequence[str], env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=_CHECK_S, check=False
    )


def _address_of(c_lib: Any, name: str) -> str:
    try:
        address: str = c_lib.interface_address(name)
    except RuntimeError:  # the interface has no address
        address = ""
    return address


def _nics() -> list[str]:
    """Return the hardware network interfaces, with their rates and RDMA devices."""
    nics = []
    for path in sorted(_NETS.glob("*")):
        if not (path / "device").exists():
            continue
        try:
            mbps = int((path / "speed").read_text())
        except (OSError, ValueError):
            mbps = 0
        state = (path / "operstate").read_text().strip()
        rdma = [device.name for device in (path / "device/infiniband").glob("*")]
        parts = [f"{mbps / 1000:g} Gbit/s" if mbps > 0 else "", *rdma]
        parts += [] if state in ("up", "unknown") else [state]
        nics.append(" ".join([path.name, *(part for part in parts if part)]))
    return nics


def main(arguments: Sequence[str]) -> int:
    """Print the findings.

    Returns:
        The exit status: 0 no fault, 1 a fault, 2 bad use.
    """
    parser = make_parser(
        "doctor",
        "Says what is wrong on this host and how to repair it, and what a job would do "
        "here: how many servers, with how many cores and how much memory, over which NICs, and "
        "which path gradients would take. Lines begin with ok, note or WRONG. Starts no job.",
        "Example:\n  {prog} --hosts 4 --ranks 8\n\n"
        "Exit status: 0 nothing is wrong; 1 something is; 2 bad use.\n",
    )
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="of the job (default: 2)")
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="on each host (default: one for each GPU)"
    )
    options = parser.parse_args(arguments)
    if options.hosts < 1 or (options.ranks is not None and options.ranks < 1):
        parser.error("--hosts and --ranks are at least 1")
    doctor = Doctor(options.hosts, options.ranks)
    doctor.look()
    return 0 if doctor.is_well else 1
