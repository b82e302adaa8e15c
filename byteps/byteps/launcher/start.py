"""Start: ranks of a job find their places and, in embedded mode, scheduler and servers."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict

from byteps import logs
from byteps.launcher.addresses import address_for, loopback, own_address
from byteps.launcher.board import Board, Message
from byteps.launcher.child import find_executable
from byteps.launcher.embedded_nodes import EmbeddedNodes
from byteps.launcher.host_servers import HostServers, cost_text, means_of_host
from byteps.launcher.meeting import Store
from byteps.launcher.places import (
    LocalPlace,
    Ranks,
    byteps_error,
    find_locals,
    setting,
)


class Start:
    """The agreement of a job's ranks.

    Each rank tells rank 0 its host, how many servers this would start, and what it has for them, or
    why it cannot start any. Rank 0 finds every rank's place, starts the scheduler, and answers with
    its address and with the servers of each host, which the first rank there starts.
    """

    def __init__(
        self, rank: int, size: int, store: Store | None, nodes: EmbeddedNodes | None = None
    ) -> None:
        """
        Args:
            nodes: takes what is started; None: the job joins a cluster.
        """
        self._timeout_s = setting("BYTEPS_START_TIMEOUT_S", float)
        self._deadline = time.monotonic() + self._timeout_s
        self._rank, self._size, self._nodes, self._store = rank, size, nodes, store

    def find(self, place: LocalPlace) -> Ranks:
        """Place of this process. Its host's servers are started with its first rank."""
        mine = {"place": asdict(place), "starts": self._nodes is not None, "problem": ""}
        if self._nodes is not None:
            mine |= self._offer()
        if self._store is None or self._size == 1:
            [answer] = self._answers([mine])
        else:
            answer = Board(
                store=self._store,
                rank=self._rank,
                size=self._size,
                timeout_s=self._timeout_s,
                deadline=self._deadline,
            ).ask(mine, self._answers)
        local_rank, local_size = answer["local"]
        if self._nodes is not None:
            if local_rank == 0:
                self._start_servers(self._nodes, answer, local_size)
            self._nodes.set_address(answer["address"])
        return Ranks(
            rank=self._rank,
            world_size=self._size,
            local_rank=local_rank,
            local_world_size=local_size,
        )

    def _offer(self) -> Message:
        address = ""
        with contextlib.suppress(RuntimeError):  # told where it is needed
            address = own_address(os.environ, self._store)
        try:
            find_executable()
            count = setting("BYTEPS_EMBEDDED_SERVERS", int)
            return {"servers": count, "means": means_of_host(address), "address": address}
        except RuntimeError as error:
            return {"problem": str(error)}

    def _answers(self, told: list[Message]) -> list[Message]:
        """On rank 0: of each rank's place, and the scheduler that it starts."""
        for rank, one in enumerate(told):
            if one["problem"]:
                raise byteps_error(f"embedded mode, rank {rank}: {one['problem']}")
        joining = [rank for rank, one in enumerate(told) if not one["starts"]]
        if 0 < len(joining) < len(told):
            raise byteps_error(
                f"DMLC_PS_ROOT_URI is set on ranks {joining} of {len(told)} and not on the others: "
                "set it on all to join a cluster, or on none"
            )
        locals_ = find_locals([LocalPlace.of(one["place"]) for one in told])
        answers: list[Message] = [{"local": local} for local in locals_]
        if self._nodes is None:
            return answers
        hosts = _servers_of_hosts(told, locals_)
        single = self._size == locals_[0][1]
        host = loopback()
        if not single:
            own = own_address(os.environ, self._store)
            host = address_for((one["address"] for one in told), own)
        address = self._start_scheduler(self._nodes, host, list(hosts.values()))
        for rank, answer in enumerate(answers):
            answer["address"] = address
            if rank in hosts:
                answer["servers"] = asdict(hosts[rank])
        return answers

    def _start_scheduler(
        self, nodes: EmbeddedNodes, host: str, hosts: list[HostServers]
    ) -> dict[str, str]:
        """Start the scheduler and wait until it listens; return the variables that name it."""
        servers = sum(one.count for one in hosts)
        environment = {
            "DMLC_PS_ROOT_URI": host,
            "DMLC_PS_ROOT_PORT": "0",
            "DMLC_NUM_SERVER": str(servers),
            "DMLC_NUM_WORKER": str(self._size),
            **_new_secret(os.environ, self._size),
        }
        port_file = nodes.folder / "scheduler.port"
        scheduler = nodes.start(
            "scheduler", "scheduler", environment, "--port-file", str(port_file)
        )
        while not port_file.exists():
            # Ended by the end of the child; deadline: 10 ms, then the file is looked for.
            ended = scheduler.wait(min(self._deadline, time.monotonic() + 0.01))
            if ended or time.monotonic() >= self._deadline:
                what = f"ended with status {scheduler.status} before it listened"
                late = "did not listen in time (BYTEPS_START_TIMEOUT_S)"
                raise byteps_error(
                    f"the embedded scheduler {what if ended else late}: "
                    + " / ".join(scheduler.last_lines())
                )
        port = port_file.read_text().split()[1]
        port_file.unlink()
        # Not by a logger: at its default level it says nothing, and who lost an address must see
        # this.
        sys.stderr.write(
            logs.render(
                logging.INFO,
                "embedded mode (DMLC_PS_ROOT_URI is not set): this rank has started the scheduler "
                f"at {join_host_port(host, int(port))}, and the first rank of each host starts its "
                f"servers, {servers} in all on {len(hosts)} host(s); {cost_text(hosts)}; their "
                f"logs are in {nodes.folder}",
            )
            + "\n"
        )
        return {**environment, "DMLC_PS_ROOT_PORT": port}

    def _start_servers(self, nodes: EmbeddedNodes, answer: Message, ranks: int) -> None:
        servers = HostServers(**answer["servers"])
        for number in range(servers.count):
            # After the workers of this host, so that all have metrics at ports of their own.
            local = {"BYTEPS_LOCAL_RANK": str(ranks + number), "BYTEPS_LOCAL_SIZE": str(ranks)}
            environment = {**answer["address"], **servers.environment, **local}
            nodes.start(f"server {number}", "server", environment, cores=servers.cores)


def _servers_of_hosts(
    told: list[Message], locals_: list[tuple[int, int]]
) -> dict[int, HostServers]:
    """The servers that the first rank of each host starts, by that rank."""
    hosts = [one["place"]["host"] for one in told]
    return {
        rank: HostServers.fit(
            [one["means"] for one, host in zip(told, hosts, strict=True) if host == hosts[rank]],
            told[rank]["servers"],
        )
        for rank, local in enumerate(locals_)
        if local[0] == 0
    }


def _new_secret(env: Mapping[str, str], size: int) -> dict[str, str]:
    """A secret for the job; none where the environment says which, or that there is none."""
    if env.get("BYTEPS_SECRET") or env.get("BYTEPS_SECRET_FILE") or env.get("BYTEPS_AUTH") == "0":
        return {}
    if size > 1 and setting("BYTEPS_TLS", bool):
        raise byteps_error(
            "BYTEPS_TLS=1 and no secret: embedded mode would hand the job's secret, which keys the "
            "encryption, to the other ranks by torch.distributed's store, which neither "
            "authenticates nor encrypts. Make one (byteps-server --new-secret PATH) and set "
            "BYTEPS_SECRET_FILE on every host"
        )
    return {"BYTEPS_SECRET": secrets.token_hex(32)}


def join_host_port(host: str, port: int) -> str:
    """The two as one word."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
