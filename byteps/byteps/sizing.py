"""Number and placement of the servers that a model needs, and their gain: ``megatron-byteps sizing
-h``.

:mod:`byteps.forecast` computes them. Cores and memory are estimates; docs/use/when-to-use.md says
where the figures come from and how to measure your own.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from byteps import cost_model
from byteps.forecast import (
    DDP,
    FEW_BITS,
    FSDP2,
    MEGATRON,
    WIRE_BYTES,
    Forecast,
    Kind,
    Machines,
    Needs,
    Program,
    Row,
    Training,
    answer,
    break_even,
    change_text,
    forecast,
    limit_text,
    needs_of,
)
from byteps.forecast.machines import CORES_PER_GPU, MEMORY_RATE, TRANSPORTS, cores_text
from byteps.forecast.needs import GIB
from byteps.forecast.rows import ENOUGH
from byteps.forecast.training import HALF, INSTANCES, OPTIMIZER, SHARDED, USE, WIRE, wire_of

PROGRAMS = {"megatron": MEGATRON, "ddp": DDP, "fsdp": FSDP2}
OPTIMIZERS = ("replicated", "host", "ranks", "servers")
LEAST_PARAMETERS = 1e6
"""Least number of parameters. A smaller number probably lacks an M or B."""
MOST_PARAMETERS = 1e12
"""Largest number of parameters per rank: at two bytes each, no GPU has as much memory."""

LEAST_SHOWN = 1.005
"""Least gain of a row in the text; rows with less are left out."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A possible number of spare machines, with its forecast."""

    machines: Machines
    forecast: Forecast

    def needs(self, row: Row) -> Needs:
        return needs_of(self.forecast.training, row, self.forecast.network, self.machines)

    @property
    def spare(self) -> int:
        return self.machines.spare

    @property
    def deployed(self) -> Row | None:
        """Recommended row that uses servers; None: plain Megatron is as fast."""
        rows = (self.forecast.best, *self.forecast.few_bits)
        return next((row for row in rows if row.through_servers), None)


def training_of(
    parameters: float,
    hosts: int,
    gpus: int,
    optimizer: str,
    gradients: str,
    accepts: str | None,
    program: Program = MEGATRON,
) -> Training:
    """Return the training of a model with bf16 (or fp16) parameters and only data parallelism.

    DDP all-reduces gradients. Wherever it keeps the optimizer's state, the network carries as many
    bytes as with a replicated optimizer. FSDP2 shards over all ranks.

    Raises:
        ValueError: the number of parameters is too small or too large.
    """
    if not LEAST_PARAMETERS <= parameters <= MOST_PARAMETERS:
        raise ValueError(
            f"{parameters:g} parameters: a rank has 1 million (1M) to 1 trillion (1T) of them; 7B "
            "is 7 billion. Divide by tensor and pipeline parallelism"
        )
    members = tuple(host for host in range(hosts) for _ in range(gpus))
    return Training(
        kinds=(Kind(name="dense", groups={members: 1}, elements=parameters),),
        gradient_bytes=WIRE_BYTES[gradients],
        accepts=accepts,
        bf16=gradients != "fp16",
        sharded=bool(program.gathers) or (optimizer != "replicated" and program is MEGATRON),
        can_shard=program is MEGATRON,
        instances=hosts if optimizer == "host" and program is MEGATRON else 1,
        updated=optimizer == "servers",
        used=optimizer == "servers",
        program=program,
    )


def choices(training: Training, machines: Machines, count: int | None) -> list[Choice]:
    """Return the numbers of spare machines to choose from, with their forecasts. `count`: the only
    number; None: several."""
    wanted = {count} if count is not None else {0}
    if count is None:
        hosts = machines.hosts
        slower = max(1.0, machines.nics * machines.link_gbps / machines.server_gbps)
        wanted |= {1, hosts // 4, hosts // 2, hosts, math.ceil(hosts * slower)}
    sizes = []
    for spare in sorted(wanted):
        with_spare = replace(machines, spare=spare)
        sizes.append(Choice(machines=with_spare, forecast=forecast(training, with_spare)))
    return sizes


def advised(sizes: Sequence[Choice]) -> Choice:
    """Return the choice with the fewest machines of those that are about as fast as the fastest."""
    best = min(choice.forecast.best.seconds for choice in sizes)
    return next(choice for choice in sizes if choice.forecast.best.seconds <= best * ENOUGH)


def assumed(training: Training) -> str:
    """Return Megatron's arguments of the job that the calculator assumes."""
    has = ["--bf16" if training.bf16 else "--fp16"]
    has += [HALF] if training.bf16 and training.gradient_bytes == 2 else []
    has += [SHARDED] if training.sharded else []
    has += [f"{INSTANCES} {training.instances}"] if training.instances > 1 else []
    return " ".join([*has, *([USE, OPTIMIZER] if training.updated else [])])


HEAD = (
    "         spare  servers on  servers                     ms per         Gbit/s  cores of a   "
    "cores of   GiB of a    GiB of\n"
    "line  machines        each  on a host  values optimizer{per:>8}   gain per NIC     machine   "
    "  a host    machine    a host  loss over bf16's"
)


def render(sizes: Sequence[Choice], parameters: float) -> str:
    """Format the choices and the recommendation as text."""
    machines, chosen = sizes[0].machines, advised(sizes)
    nics = "" if machines.nics == 1 else f"{machines.nics} NICs of "
    plain, name = chosen.forecast.plain, chosen.forecast.training.program.name
    lines = [
        f"{parameters / 1e6:,.0f} million parameters, {machines.hosts} "
        f"{'hosts' if machines.hosts > 1 else 'host'} with {machines.gpus} "
        f"GPU{'s' if machines.gpus > 1 else ''} and {nics}{machines.link_gbps:g} Gbit/s each, "
        + (f"spare machines with {machines.server_gbps:g} Gbit/s, " if sizes[-1].spare else "")
        + machines.transport.upper()
        + (", with copies of the servers' state" if machines.backup else ""),
    ]
    if chosen.forecast.training.crossing:
        lines += [
            f"Plain {name} at its best: {1000 * plain.seconds:,.1f} ms per "
            f"{chosen.forecast.training.program.unit}"
            + (f", with {' '.join(chosen.forecast.typed(plain.flags))}" if plain.flags else ""),
            *(
                f"For comparison, FP8 over NCCL, which {name} has not: {1000 * row.seconds:,.1f} "
                f"ms, {row.gain:.2f} x"
                for row in chosen.forecast.rows
                if row.compared
            ),
        ]
        if chosen.forecast.training.program is MEGATRON:
            job = assumed(sizes[0].forecast.training)
            lines.insert(1, f"Assumed (--optimizer, --gradients): {job}")
        lines += _table(sizes, chosen)
    notes = (break_even(chosen.forecast), limit_text(chosen.forecast, machines))
    lines += ["", *filter(None, notes), f"Answer: {answer(chosen.forecast)}"]
    if chosen.spare and not sizes[0].spare:
        lines.append(f"Without spare machines (--machines 0): {answer(sizes[0].forecast)}")
    if lacking := _lacking_cores(chosen):
        lines.append(lacking)
    if (deployed := chosen.deployed) is not None:
        lines += _deployment(chosen, deployed)
    return "\n".join(lines)


def _table(sizes: Sequence[Choice], chosen: Choice) -> list[str]:
    """Return a line for each number of spare machines and type, and below what each one needs."""
    rows, numbers_of = list[str](), dict[str, list[str]]()
    for choice in sizes:
        for row in choice.forecast.with_preset():
            if row.gain < LEAST_SHOWN:
                continue
            mark = f"  {row.loss}" if row.loss else ""
            mark += "  <- advised" if choice is chosen and row == choice.forecast.best else ""
            rows.append(f"{len(rows) + 1:4d}{_line(choice, row)}{mark}")
            change = change_text(choice.forecast, row) or "change nothing"
            numbers_of.setdefault(change, []).append(str(len(rows)))
    if not rows:
        return []
    per = chosen.forecast.training.program.unit.rpartition("-")[2]
    needs = [f"  {', '.join(numbers)}: {change}" for change, numbers in numbers_of.items()]
    return ["", HEAD.format(per=per), *rows, "", "What each line needs:", *needs]


def _line(choice: Choice, row: Row) -> str:
    needs, servers = choice.needs(row), choice.forecast.network.servers
    training = choice.forecast.training
    values = row.wire or ("fp32" if training.gradient_bytes == 4 else "bf16")
    values = values if training.bf16 or row.wire else "fp16"
    each = str(servers.per_machine) if servers.extra else "-"
    return (
        f"{servers.extra:10d}  {each:>10}  {servers.local:9d}  {values:6} "
        f"{row.optimizer:9}{1000 * row.seconds:8,.1f}  {row.gain:5.2f} "
        f"{needs.nic_gbps:7.1f}  {needs.server_cores or '-':>10}  {needs.worker_cores:9d}  "
        f"{needs.server_bytes / GIB:9.1f}  {needs.worker_bytes / GIB:8.1f}"
    )


def _deployment(chosen: Choice, row: Row) -> list[str]:
    """Return the commands with which a user starts the choice."""
    machines, servers = chosen.machines, chosen.forecast.network.servers
    program, words = chosen.forecast.training.program, chosen.forecast.typed(row.flags)
    nodes = f"--nnodes {machines.hosts} --nproc-per-node {machines.gpus}"
    if not servers.extra:
        lines = ["On each host:", f"  {program.line(f'torchrun {nodes}', words)}"]
        wire = wire_of(row.flags)
        for name, other, what in (("ddp", DDP, "DDP or HSDP"), ("fsdp", FSDP2, "FSDP2")):
            if program is MEGATRON and wire in FEW_BITS:
                typed = other.typed((USE, f"{WIRE} {wire}"), on_hosts=True)
                line = other.line(f"torchrun {nodes}", typed)
                lines += [f"Without Megatron, {what} (--for {name}):", f"  {line}"]
        return lines
    cluster = f"--workers {machines.world} --servers {servers.count}"
    server = f"  megatron-byteps server {cluster} --instances"
    return [
        "The scheduler:",
        f"  megatron-byteps scheduler {cluster} ...",
        "Each spare machine:",
        f"{server} {servers.per_machine} ...",
        "Each host:",
        *([f"{server} {servers.local} ..."] if servers.local else []),
        f"  export DMLC_PS_ROOT_URI=... DMLC_PS_ROOT_PORT=... DMLC_NUM_SERVER={servers.count}",
        f"  {program.line(f'torchrun {nodes}', words)}",
    ]


def _lacking_cores(chosen: Choice) -> str:
    """Describe what more cores would gain; empty if there are enough."""
    (enough,) = choices(chosen.forecast.training, chosen.machines.with_all_cores(), chosen.spare)
    faster = enough.deployed
    if faster is None:
        return ""
    row = next(row for row in chosen.forecast.rows if row.flags == faster.flags)
    if row.limit != "cores" or row.seconds <= faster.seconds * ENOUGH:
        return ""
    needs, lacking = enough.needs(faster), []
    if needs.worker_cores > chosen.machines.network_cores:
        lacking.append(f"{cores_text(needs.worker_cores)} on a worker's host")
    if needs.server_cores > chosen.machines.server_cores:
        lacking.append(f"{cores_text(needs.server_cores)} on a spare machine")
    words = " ".join(enough.forecast.typed(faster.flags))
    text = f"With {' and '.join(lacking)}, {words}: {faster.gain:.2f} x"
    if chosen.machines.transport == "tcp":
        text += "; or use RDMA (--transport rdma), where the NIC moves the bytes"
    return f"{text}."


def count(text: str) -> float:
    """Parse '7B', '340M' or a plain number."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+(?:[eE][0-9]+)?)([kKmMbBgGtT]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"'{text}' is no number such as 7B, 340M or 1e9")
    scale = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
    return float(match[1]) * scale[match[2].lower()]


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not above 0")
    return number


def add_machines(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe the machines; :func:`machines_of` reads them."""
    machines = parser.add_argument_group("the machines")
    machines.add_argument("--hosts", type=int, required=True, help="hosts with workers")
    machines.add_argument(
        "--gpus", "--gpus-per-host", type=int, default=8, help="GPUs per host (default: 8)"
    )
    machines.add_argument(
        "--link-gbps", type=float, required=True, metavar="G",
        help="rate of one NIC of a worker's host, Gbit/s each way",
    )  # fmt: skip
    machines.add_argument(
        "--nics", type=int, default=1, metavar="K",
        help="NICs per worker host; NCCL and BytePS use all of them (default: 1)",
    )  # fmt: skip
    machines.add_argument(
        "--worker-cores", type=float, metavar="C",
        help="of a worker's host, that the network may use (default: half of those that ranks "
        f"leave of {CORES_PER_GPU:g} per GPU)",
    )  # fmt: skip
    machines.add_argument(
        "--server-link-gbps", type=float, metavar="G",
        help="rate of a spare machine's NICs together (default: as --link-gbps)",
    )  # fmt: skip
    machines.add_argument(
        "--server-cores", type=float, default=math.inf, metavar="C",
        help="of a spare machine (default: as many as it needs)",
    )  # fmt: skip
    machines.add_argument(
        "--memory-gbs", type=float, default=MEMORY_RATE / 1e9, metavar="G",
        help="what the memory of a machine carries, GB/s (default: %(default)g)",
    )  # fmt: skip
    machines.add_argument(
        "--micro-batch-ms", type=_positive, metavar="T",
        help="for which a GPU computes a micro-batch: what hides behind one gains nothing, and up "
        "to how many a step may accumulate is printed",
    )  # fmt: skip
    network = parser.add_argument_group("the network")
    network.add_argument(
        "--transport", choices=TRANSPORTS, default="tcp",
        help=f"between workers and servers; TCP is counted with {cost_model.TCP_GBPS:g} Gbit/s per "
        "machine at most (default: tcp)",
    )  # fmt: skip
    network.add_argument(
        "--core-gbps", type=float, default=cost_model.TCP_CORE_RATE * 8 / 1e9, metavar="G",
        help="what one core sends or receives over TCP, Gbit/s (default: %(default)g)",
    )  # fmt: skip
    network.add_argument(
        "--core-add-gbs", type=float, default=cost_model.ADD_CORE_RATE / 1e9, metavar="G",
        help="what one core of a server adds, GB/s; make bench-reducer measures it (default: "
        "%(default)g)",
    )  # fmt: skip
    network.add_argument(
        "--backup", action="store_true",
        help="each server keeps a copy of another one's optimizer state (BYTEPS_BACKUP_STATE)",
    )  # fmt: skip


def machines_of(options: argparse.Namespace, spare: int) -> Machines:
    """Return the machines that the command line describes.

    Raises:
        ValueError: a number is impossible, or BytePS does not support such a link.
    """
    return Machines(
        hosts=options.hosts,
        gpus=options.gpus,
        link_gbps=options.link_gbps,
        nics=options.nics,
        spare=spare,
        server_link_gbps=options.server_link_gbps,
        transport=options.transport,
        worker_cores=options.worker_cores,
        server_cores=options.server_cores,
        core_rate=options.core_gbps * 1e9 / 8,
        add_rate=options.core_add_gbs * 1e9,
        memory_rate=options.memory_gbs * 1e9,
        micro_batch_s=None if options.micro_batch_ms is None else options.micro_batch_ms / 1e3,
        backup=options.backup,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-byteps sizing",
        description="Computes what servers on the workers' hosts, and on spare machines, gain over "
        "plain training at its best, and what they need.",
        epilog="Example: megatron-byteps sizing --parameters 7B --hosts 4 --gpus 8 --link-gbps 25",
    )
    parser.add_argument(
        "--for", choices=PROGRAMS, default="megatron", dest="program",
        help="what trains; ddp: a script with DistributedDataParallel or HSDP; fsdp: one with "
        "FSDP2's fully_shard over all ranks (default: megatron)",
    )  # fmt: skip
    model = parser.add_argument_group("the model")
    model.add_argument(
        "--parameters", type=count, required=True, metavar="N",
        help="parameters on one rank, such as 7B or 340M: those of the model, divided by tensor "
        "and pipeline parallelism",
    )  # fmt: skip
    model.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="ranks",
        help="where Megatron's is now: on every rank (replicated), sharded over all ranks "
        "(--use-distributed-optimizer), sharded inside each host (host: the same with "
        "--num-distributed-optimizer-instances = hosts), or on the servers (default: ranks)",
    )  # fmt: skip
    model.add_argument(
        "--gradients", choices=[name for name in WIRE_BYTES if name not in FEW_BITS],
        default="bf16", help="NCCL reduces in (default: bf16)",
    )  # fmt: skip
    model.add_argument(
        "--wire", choices=tuple(WIRE_BYTES),
        help="type in which you accept that gradients are sent (default: 16 bits; few bits are "
        "shown, too)",
    )  # fmt: skip
    add_machines(parser)
    parser.add_argument(
        "--machines", "--servers", type=int, metavar="K",
        help="spare machines for servers; 0: servers on the workers' hosts (default: compare)",
    )  # fmt: skip
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        machines = machines_of(options, options.machines or 0)
        if options.optimizer == "servers" and options.program != "megatron":
            raise ValueError("--optimizer servers is Megatron's (--for megatron)")
        if options.backup and options.optimizer != "servers":
            raise ValueError(
                "--backup copies the optimizer state on the servers: it needs --optimizer servers"
            )
        training = training_of(
            options.parameters, options.hosts, options.gpus, options.optimizer,
            options.gradients, options.wire, PROGRAMS[options.program],
        )  # fmt: skip
        sizes = choices(training, machines, options.machines)
    except ValueError as error:
        parser.error(str(error))
    print(render(sizes, options.parameters))
    return 0


if __name__ == "__main__":
    sys.exit(main())
