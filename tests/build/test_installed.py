"""Installation by pip from a release's folder, on a system without the repository.

The tests run in a separate root with the system's programs, a Python, torch and Megatron's
requirements (all read-only), the folder that scripts/wheel.sh fills, and NVIDIA's release of
Megatron-LM. The root has neither this checkout nor a network.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from scripts.children import captured
from tests.pages import block_under

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 900.0
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
FILES = ("passwd", "group", "ld.so.cache", "nsswitch.conf", "services", "protocols")
ENTER = """
ip link set lo up
ip link add eth0 type veth peer name eth1
ip address add 10.9.0.1/24 dev eth0
ip link set eth0 up
ip link set eth1 up
hostname host-a
for folder in {folders}; do
  mkdir -p "{root}$folder"
  mount --rbind "$folder" "{root}$folder"
done
mount --rbind "{packages}" "{root}/opt/packages"
mount -o remount,bind,ro "{root}/opt/packages"
mount -t proc proc "{root}/proc"
mount -t tmpfs tmpfs "{root}/dev/shm"
exec chroot "{root}" /usr/bin/env -i HOME=/home/user PATH=/opt/venv/bin:/usr/bin:/bin \\
  bash -c 'cd; set -e; {commands}'
"""
PLAIN_SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    torch.manual_seed(10 * step + dist.get_rank())
    loss = model(torch.randn(8, 256)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
sums = [None] * dist.get_world_size()
dist.all_gather_object(sums, sum(p.double().sum().item() for p in model.parameters()))
print("equal on all ranks:", len(set(sums)) == 1, flush=True)
dist.destroy_process_group()
"""
MODEL = (
    "--num-layers=2 --hidden-size=64 --num-attention-heads=4 --position-embedding-type=rope "
    "--seq-length=64 --max-position-embeddings=64 --micro-batch-size=4 --train-iters=20 --lr=1e-3 "
    "--lr-decay-style=constant --eval-iters=0 --eval-interval=1000 --log-interval=5 "
    "--transformer-impl=local --attention-backend=unfused --no-persist-layer-norm "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion --mock-data"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Release folder with the wheel for this machine."""
    made = tmp_path_factory.mktemp("release")
    arch = os.uname().machine
    wheel = captured([ROOT / "scripts/wheel.sh", "--arch", arch, "--out", made], 3000)
    assert wheel.returncode == 0, wheel.stderr
    return made


class Machine:
    """A root without the checkout. Commands run in sequence, in namespaces of their own."""

    def __init__(self, root: Path, release: Path) -> None:
        self.root = root
        for name in ("etc", "proc", "dev", "tmp", "opt/packages", "home/user"):
            (root / name).mkdir(parents=True)
        for name in FILES:
            if Path("/etc", name).exists():
                shutil.copy(Path("/etc", name), root / "etc")
        (root / "etc/hosts").write_text("127.0.0.1 localhost\n10.9.0.1 host-a\n")
        shutil.copytree(release, root / "home/user/release")
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        # The page leaves this command out, because users have their own Python and torch.
        self.run(
            f"{sys.base_prefix}/bin/{version} -m venv /opt/venv; "
            f"echo /opt/packages >/opt/venv/lib/{version}/site-packages/packages.pth"
        )
        torchrun = root / "opt/venv/bin/torchrun"
        torchrun.write_text(
            "#!/opt/venv/bin/python\nfrom torch.distributed.run import main\n\nmain()\n"
        )
        torchrun.chmod(0o755)

    def run(self, *commands: str) -> str:
        """Run commands, each of which must succeed, and get their output."""
        folders = [*(folder for folder in SYSTEM if Path(folder).exists()), "/dev", sys.base_prefix]
        script = ENTER.format(
            root=self.root, folders=" ".join(folders), commands="; ".join(commands),
            packages=sysconfig.get_path("purelib"),
        )  # fmt: skip
        apart = ["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "--kill-child"]
        done = captured([*apart, "bash", "-ec", script], LIMIT_S)
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
        return f"{done.stdout}\n{done.stderr}"


@pytest.fixture
def machine(folder: Path, tmp_path: Path) -> Machine:
    return Machine(tmp_path / "root", folder)


@pytest.mark.requires("root")
@pytest.mark.thorough
@pytest.mark.timeout(4500)
def test_a_plain_script_in_two_commands_and_two_variables(machine: Machine) -> None:
    (machine.root / "home/user/train.py").write_text(PLAIN_SCRIPT)
    said = machine.run(
        "pip install --quiet --no-index --find-links release megatron-byteps",
        "BYTEPS_C10D=1 BYTEPS_C10D_BACKEND=flat torchrun --nproc-per-node 2 train.py",
    )
    assert "equal on all ranks: True" in said
    assert re.search(r"all-reduces of float32 over 2 ranks .*: BytePS flat", said), said[-4000:]
    assert not (machine.root / str(ROOT).lstrip("/")).exists()


@pytest.fixture
def megatron(machine: Machine) -> Machine:
    """The machine, with NVIDIA's Megatron-LM in the home folder."""
    home, built = machine.root / "home/user", ROOT / "build/Megatron-LM"
    (home / "Megatron-LM").mkdir()
    packed = subprocess.check_output(["git", "-C", built, "archive", "upstream"])
    subprocess.run(["tar", "-x", "-C", home / "Megatron-LM"], input=packed, check=True)
    # A user has installed Megatron, with these helpers.
    for helper in (built / "megatron/core/datasets").glob("helpers_cpp*.so"):
        shutil.copy(helper, home / "Megatron-LM/megatron/core/datasets")
    return machine


@pytest.mark.requires("root")
@pytest.mark.thorough
@pytest.mark.timeout(4500)
def test_megatron_in_three_commands_and_back(megatron: Machine) -> None:
    install, patch, *_ = block_under("README.md", "Megatron-BytePS")
    unpatch, uninstall = block_under("README.md", "Back to plain Megatron")
    # The options for a CPU, --cpu and MEGATRON_CPU, are not needed with GPUs.
    said = megatron.run(
        f"{install.replace('FOLDER', 'release')} --quiet --no-index",
        f"{patch} --cpu",
        "MEGATRON_CPU=1 torchrun --nproc-per-node 2 Megatron-LM/pretrain_dpu_gpt.py "
        f"--use-dpu-reduce --dpu-reduce-backend flat {MODEL}",
    )
    losses = [float(loss) for loss in re.findall(r"lm loss: ([0-9.E+-]+)", said)]
    assert len(losses) == 5 and losses[-1] < losses[0], said
    assert re.search(r"BytePS flat .*yes: asked for", said), said
    said = megatron.run(unpatch, f"{uninstall} --yes")
    assert re.search(r"undone; \d+ files are as they were\n", said), said


@pytest.mark.requires("root")
@pytest.mark.thorough
@pytest.mark.timeout(4500)
def test_four_hosts_and_four_server_machines_in_six_commands(megatron: Machine) -> None:
    """The commands of the page, all in one root, with a rank on each host and a model of a CPU."""
    shown = block_under("docs/use/run.md", "Start by hand")
    for old, new in (
        ("FOLDER", "release --no-index --quiet"), ("patch ", "patch --cpu "),
        ("10.0.0.10", "10.9.0.1"), ("10.0.0.1", "10.9.0.1"),
        ("--workers 32", "--workers 4"), ("--nproc-per-node 8", "--nproc-per-node 1"),
        ("pretrain_gpt.py ...", f"pretrain_dpu_gpt.py --dpu-reduce-backend flat {MODEL}"),
    ):  # fmt: skip
        assert any(old in line for line in shown), old
        shown = [line.replace(old, new) for line in shown]
    install, patch, secret, scheduler, server, worker = shown
    assert " --node-rank 0 " in worker
    workers = [worker.replace("--node-rank 0", f"--node-rank {host}") for host in range(4)]
    cluster = [scheduler, *[server] * 4, *(f"MEGATRON_CPU=1 {command}" for command in workers)]
    started = " ".join(f'{process} & all="$all $!";' for process in cluster)
    said = megatron.run(install, patch, secret, f"{started} for one in $all; do wait $one; done")
    losses = [float(loss) for loss in re.findall(r"lm loss: ([0-9.E+-]+)", said)]
    assert len(losses) == 5 and losses[-1] < losses[0], said
    assert re.search(r"BytePS flat .*yes: asked for", said), said
