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
from byteps.launcher.addresses import loopback, own_address
from byteps.launcher.board import Board, Message
from byteps.launcher.child import find_executable
from byteps.launcher.embedded_nodes import EmbeddedNodes
from byteps.launcher.host_servers import HostServers, cost_text, fit_hosts, means_of_host
from byteps.launcher.meeting import Store
from byteps.launcher.places import LocalPlace, byteps_error, find_locals, place_settings, setting


class Start:
    """The agreement of a job's ranks.

    each rank            its host, its address, its means, or why it cannot start anything
      -> rank 0          every rank's place, each host's servers; starts the scheduler
      -> each rank       its place, the scheduler's address and the secret
      -> a host's first  starts its servers
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

    def find(self, place: LocalPlace) -> dict[str, str]:
        """The settings of this process's place, and of the cluster that was started."""
        mine = {"place": asdict(place), "starts": self._nodes is not None, "problem": ""}
        mine |= self._offer()
        if self._store is None or self._size == 1:
            [answer] = self.answers([mine])
        else:
            answer = Board(
                store=self._store,
                rank=self._rank,
                size=self._size,
                timeout_s=self._timeout_s,
                deadline=self._deadline,
            ).ask(mine, self.answers)
        local_rank, local_size = answer["local"]
        found = place_settings(self._rank, self._size, local_rank, local_size)
        if self._nodes is None:
            return found
        self._nodes.address = answer["address"]
        if "servers" in answer:
            self._nodes.start_servers(HostServers(**answer["servers"]), local_size)
        return found | self._nodes.address

    def _offer(self) -> Message:
        if self._nodes is None:
            return {}
        address = ""
        with contextlib.suppress(RuntimeError):  # told where it is needed
            address = own_address(os.environ, self._store)
        try:
            find_executable()
            return {"means": means_of_host(address), "address": address}
        except RuntimeError as error:
            return {"problem": str(error)}

    def answers(self, told: list[Message]) -> list[Message]:
        """On rank 0: what each rank is answered, once the scheduler runs."""
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
        hosts: dict[str, list[int]] = {}
        for rank, one in enumerate(told):
            hosts.setdefault(one["place"]["host"], []).append(rank)
        servers = fit_hosts([[told[rank]["means"] for rank in ranks] for ranks in hosts.values()])
        for ranks, one_host in zip(hosts.values(), servers, strict=True):
            answers[ranks[0]]["servers"] = asdict(one_host)
        host = loopback()
        if len(hosts) > 1:
            elsewhere = [told[ranks[0]]["address"] for ranks in hosts.values()][1:]
            host = own_address(os.environ, self._store, elsewhere)
        address = self._start_scheduler(self._nodes, host, servers)
        return [answer | {"address": address} for answer in answers]

    def _start_scheduler(
        self, nodes: EmbeddedNodes, host: str, hosts: list[HostServers]
    ) -> dict[str, str]:
        """Start the scheduler and say so; return the settings that name it."""
        servers = sum(one.count for one in hosts)
        address = {
            "DMLC_PS_ROOT_URI": host,
            "DMLC_NUM_SERVER": str(servers),
            "DMLC_NUM_WORKER": str(self._size),
            **_new_secret(os.environ, self._size),
        }
        port = nodes.start_scheduler(address, self._deadline)
        # A logger says nothing at its default level, and everybody must see this.
        line = (
            "embedded mode (DMLC_PS_ROOT_URI is not set): this rank has started the scheduler at "
            f"{join_host_port(host, int(port))}, and the first rank of each host starts its "
            f"servers, {servers} in all on {len(hosts)} host(s); {cost_text(hosts)}; their logs "
            f"are in {nodes.folder}"
        )
        sys.stderr.write(logs.render(logging.INFO, line) + "\n")
        return {**address, "DMLC_PS_ROOT_PORT": port}


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
