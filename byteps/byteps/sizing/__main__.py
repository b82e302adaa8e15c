"""The command line of :mod:`byteps.sizing`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import sys
from collections.abc import Sequence
from typing import Any

from byteps import cost_model
from byteps.sizing import (
    BYTES,
    GIB,
    OPTIMIZERS,
    TRANSPORTS,
    WIRE_BYTES,
    Advice,
    Job,
    advise,
    cores_text,
)  # fmt: skip


def count(text: str) -> float:
    """'7B', '340M' or a plain number."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+(?:[eE][0-9]+)?)([kKmMbBgGtT]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"'{text}' is no number such as 7B, 340M or 1e9")
    scale = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
    return float(match[1]) * scale[match[2].lower()]


def render(job: Job, advice: Advice) -> str:
    """The advice as text."""
    ranks = job.hosts * job.gpus
    nics = "" if job.nics == 1 else f"{job.nics} NICs of "
    lines = [
        f"{job.parameters / 1e6:,.0f} million parameters, {job.hosts} hosts with {job.gpus} "
        f"GPU{'s' if job.gpus > 1 else ''} and {nics}{job.link_gbps:g} Gbit/s each, servers with "
        f"{job.server_link_gbps:g} Gbit/s, {job.transport.upper()}"
        + (", with copies of their state" if job.backup else ""),
        f"NCCL at its best: {1000 * advice.nccl_seconds:,.1f} ms per step for the gradients"
        + (" and the parameters" if job.optimizer in ("ranks", "servers") else ""),
        "",
    ]
    if advice.rows:
        lines += [
            "          servers on  servers on a     ms per         Gbit/s   cores per    cores per"
            "  memory per",
            "machines        each  worker's host      step   gain per NIC      server  worker host"
            "  server, GiB",
        ]
    for one in advice.rows:
        mark = "  <- advised" if one == advice.chosen else ""
        lines.append(
            f"{one.machines:8d}  {one.processes:10d}  {one.local:13d}  {1000 * one.seconds:8,.1f}  "
            f"{one.gain:5.2f}  {one.nic_gbps:6.1f}  {one.cores:10d}  {one.worker_cores:11d}  "
            f"{one.memory_bytes / GIB:11.1f}{mark}"
        )
    lines.append("")
    if advice.chosen is None:
        lines.append(f"Advice: NCCL alone; {advice.why}.")
        return "\n".join(lines)
    best = advice.chosen
    total = best.machines * best.processes + best.local * job.hosts
    lines += [
        f"Advice: {best.machines} server machine{'s' if best.machines > 1 else ''}, each with "
        f"{cores_text(best.cores)} and {best.memory_bytes / GIB:.1f} GiB; "
        f"{cores_text(best.worker_cores)} on each worker's host; {advice.why}.",
        f"  scripts/scheduler.sh --workers {ranks} --servers {total} ...",
        f"  scripts/server.sh --workers {ranks} --servers {total} --instances {best.processes} ...",
    ]
    if best.local:
        lines.append(f"  scripts/worker.sh --servers {total} --local-servers {best.local} ...")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m byteps.sizing",
        description="Computes how many servers a model needs, and how much faster than NCCL they "
        "reduce its gradients.",
    )
    model = parser.add_argument_group("the model")
    model.add_argument(
        "--parameters", type=count, required=True, metavar="N",
        help="parameters on one rank, such as 7B or 340M: those of the model, divided by tensor "
        "and pipeline parallelism",
    )  # fmt: skip
    model.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="host",
        help="where its state is: on every rank (replicated), sharded inside each host "
        "(--num-distributed-optimizer-instances = hosts), sharded over all ranks, or on the "
        "servers, compared with the one before (default: host)",
    )  # fmt: skip
    model.add_argument(
        "--gradients", choices=tuple(BYTES), default="bf16", help="NCCL reduces in (default: bf16)"
    )
    model.add_argument(
        "--wire", choices=tuple(WIRE_BYTES),
        help="type in which gradients are sent to servers (default: as --gradients)",
    )  # fmt: skip
    model.add_argument(
        "--backup", action="store_true",
        help="each server keeps a copy of another one's optimizer state (BYTEPS_BACKUP_STATE)",
    )  # fmt: skip
    machines = parser.add_argument_group("the machines")
    machines.add_argument("--hosts", type=int, required=True, help="number of hosts with workers")
    machines.add_argument("--gpus", type=int, default=8, help="GPUs per host (default: 8)")
    machines.add_argument(
        "--link-gbps", type=float, required=True, metavar="G",
        help="rate of one NIC of a worker's host, Gbit/s each way",
    )  # fmt: skip
    machines.add_argument(
        "--nics", type=int, default=1, metavar="K",
        help="NICs per worker host; NCCL uses all of them, and BytePS over TCP (default: 1)",
    )  # fmt: skip
    cores: Any = {"type": float, "default": math.inf, "metavar": "C"}
    machines.add_argument(
        "--worker-cores", **cores,
        help="of a worker's host, that the network may use (default: as many as it needs)",
    )  # fmt: skip
    machines.add_argument("--machines", type=int, help="for servers (default: compare several)")
    machines.add_argument(
        "--server-link-gbps", type=float, metavar="G",
        help="rate of a server machine's NICs together (default: as --link-gbps)",
    )  # fmt: skip
    machines.add_argument("--server-cores", **cores, help="of a server's machine (default: any)")
    network = parser.add_argument_group("the network")
    network.add_argument(
        "--transport", choices=TRANSPORTS, default="tcp",
        help=f"between workers and servers; TCP is for links of up to {cost_model.TCP_GBPS:g} "
        "Gbit/s (default: tcp)",
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
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    chosen = parser.parse_args(arguments)
    try:
        job = Job(
            parameters=chosen.parameters,
            hosts=chosen.hosts,
            gpus=chosen.gpus,
            link_gbps=chosen.link_gbps,
            nics=chosen.nics,
            server_link_gbps=(
                chosen.link_gbps if chosen.server_link_gbps is None else chosen.server_link_gbps
            ),
            transport=chosen.transport,
            worker_cores=chosen.worker_cores,
            server_cores=chosen.server_cores,
            optimizer=chosen.optimizer,
            gradients=chosen.gradients,
            wire=chosen.wire or chosen.gradients,
            core_bytes_per_s=chosen.core_gbps * 1e9 / 8,
            core_add_bytes_per_s=chosen.core_add_gbs * 1e9,
            backup=chosen.backup,
        )
        advice = advise(job, chosen.machines)
    except ValueError as error:
        parser.error(str(error))
    if chosen.json:
        print(json.dumps({"job": _finite(job), **dataclasses.asdict(advice)}, indent=1))
    else:
        print(render(job, advice))
    return 0


def _finite(job: Job) -> dict[str, object]:
    """The fields of a job; null for cores without a limit, since JSON has no infinity."""
    fields = dataclasses.asdict(job)
    return {name: None if value == math.inf else value for name, value in fields.items()}


if __name__ == "__main__":
    sys.exit(main())
