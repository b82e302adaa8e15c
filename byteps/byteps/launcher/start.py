"""Start of a job: ranks find their local ranks and, in embedded mode, start scheduler and
servers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from byteps import logs
from byteps.launcher.addresses import loopback, own_address
from byteps.launcher.child import find_executable
from byteps.launcher.embedded_nodes import EmbeddedNodes
from byteps.launcher.host_servers import HostServers, cost_text, fit_hosts, means_of_host
from byteps.launcher.meeting import AbsentError, Store, gather, tell, wait_for
from byteps.launcher.places import LocalPlace, byteps_error, find_locals, place_settings, setting

GRACE_S = 2.0
"""Time in seconds that other ranks wait longer than rank 0, so that they get its error."""

Message = dict[str, Any]
"""Message between ranks. It has only plain types, because it travels as JSON."""


class Start:
    """Exchange between the ranks of a job, through torch.distributed's store.

    each rank            its host, its address, its means, or why it cannot start anything
      -> rank 0          every rank's place, each host's servers; starts the scheduler
      -> each rank       its place, the scheduler's address and the secret
      -> a host's first  starts its servers

    If rank 0 fails, it answers all ranks with its error, so that every rank fails at once, with the
    cause. Each rank reads only its own answer, so that a large job reads few bytes.
    """

    def __init__(
        self, rank: int, size: int, store: Store | None, nodes: EmbeddedNodes | None = None
    ) -> None:
        """
        Args:
            nodes: object that starts and owns the processes; None: the job joins a cluster, and
                starts none.
        """
        self._timeout_s = setting("BYTEPS_START_TIMEOUT_S", float)
        self._deadline = time.monotonic() + self._timeout_s
        self._rank, self._size, self._nodes, self._store = rank, size, nodes, store

    def find(self, own_place: LocalPlace) -> dict[str, str]:
        """Return settings with this process's local rank and size, and with the address of the
        started cluster."""
        own_message = {"place": asdict(own_place), "starts": self._nodes is not None, "problem": ""}
        own_message |= self._offer()
        answer = self._ask(own_message)
        local_rank, local_size = answer["local"]
        settings = place_settings(self._rank, self._size, local_rank, local_size)
        if self._nodes is None:
            return settings
        self._nodes.address = answer["address"]
        if "servers" in answer:
            self._nodes.start_servers(HostServers(**answer["servers"]), local_size)
        return settings | self._nodes.address

    def _ask(self, own_message: Message) -> Message:
        """Send rank 0 this rank's message, and return its answer.

        Raises:
            BytePSError: a rank did not come in time, or rank 0 failed; the text has the reason.
        """
        from byteps.torch import BytePSError

        if self._store is None or self._size == 1:
            return self.answers([own_message])[0]
        try:
            ask = self._answer_all if self._rank == 0 else self._read
            return ask(self._store, own_message)
        except BytePSError:
            raise
        except RuntimeError as error:  # torch's DistStoreError is a RuntimeError
            raise byteps_error(f"BytePS: torch.distributed's store failed: {error}") from error

    def _answer_all(self, store: Store, own_message: Message) -> Message:
        prefix = ""
        try:
            prefix, others = gather(store, "start", self._size, self._deadline)
            answers = self.answers([own_message, *map(json.loads, others)])
        except Exception as error:
            failure = error
            if isinstance(error, AbsentError):
                prefix = error.prefix
                failure = byteps_error(
                    f"BytePS: ranks {error.members} of {self._size} did not start BytePS within "
                    f"{self._timeout_s:g} s (BYTEPS_START_TIMEOUT_S). Set BYTEPS_C10D, or what "
                    "else starts it, on all hosts, and DMLC_PS_ROOT_URI on all of them or on none"
                )
            if prefix:
                self._write(store, prefix, [{"error": str(failure)}] * self._size)
            raise failure from None
        self._write(store, prefix, answers)
        return answers[0]

    def _write(self, store: Store, prefix: str, answers: list[Message]) -> None:
        for rank in range(1, self._size):
            store.set(f"{prefix}/answer/{rank}", json.dumps(answers[rank]))

    def _read(self, store: Store, own_message: Message) -> Message:
        until = self._deadline + GRACE_S
        with contextlib.suppress(AbsentError):
            prefix = tell(store, "start", self._rank, json.dumps(own_message), until)
            key = f"{prefix}/answer/{self._rank}"
            if wait_for(store, [key], until):
                answer: Message = json.loads(store.get(key))
                if "error" in answer:
                    raise byteps_error(f"BytePS, rank 0: {answer['error']}")
                return answer
        raise byteps_error(
            f"BytePS: rank 0 did not answer within {self._timeout_s:g} s "
            "(BYTEPS_START_TIMEOUT_S): does its host have BYTEPS_C10D=1 or the flag too, or did it "
            "call bps.init()? Is DMLC_PS_ROOT_URI set on all ranks or on none?"
        )

    def _offer(self) -> Message:
        if self._nodes is None:
            return {}
        address = ""
        with contextlib.suppress(RuntimeError):  # raised again where the address is needed
            address = own_address(os.environ, self._store)
        try:
            find_executable()
            return {"means": means_of_host(address), "address": address, "secret": secret_mark()}
        except RuntimeError as error:
            return {"problem": str(error)}

    def answers(self, messages: list[Message]) -> list[Message]:
        """On rank 0, start the scheduler if needed, and return the answer for each rank.
        `messages`: the ranks' messages, in the order of ranks."""
        for rank, message in enumerate(messages):
            if message["problem"]:
                raise byteps_error(f"embedded mode, rank {rank}: {message['problem']}")
        joining = [rank for rank, message in enumerate(messages) if not message["starts"]]
        if 0 < len(joining) < len(messages):
            raise byteps_error(
                f"DMLC_PS_ROOT_URI is set on ranks {joining} of {len(messages)} and not on the "
                "others: set it on all to join a cluster, or on none"
            )
        locals_ = find_locals([LocalPlace.of(message["place"]) for message in messages])
        answers: list[Message] = [{"local": local} for local in locals_]
        if self._nodes is None:
            return answers
        demand_one_secret(messages)
        hosts: dict[str, list[int]] = {}
        for rank, message in enumerate(messages):
            hosts.setdefault(message["place"]["host"], []).append(rank)
        servers = fit_hosts(
            [[messages[rank]["means"] for rank in ranks] for ranks in hosts.values()]
        )
        for ranks, one_host in zip(hosts.values(), servers, strict=True):
            answers[ranks[0]]["servers"] = asdict(one_host)
        host = loopback()
        if len(hosts) > 1:
            elsewhere = [messages[ranks[0]]["address"] for ranks in hosts.values()][1:]
            host = own_address(os.environ, self._store, elsewhere)
        address = self._start_scheduler(self._nodes, host, servers)
        return [answer | {"address": address} for answer in answers]

    def _start_scheduler(
        self, nodes: EmbeddedNodes, host: str, hosts: list[HostServers]
    ) -> dict[str, str]:
        """Start the scheduler and print a line about it. Return the settings with which nodes join
        it."""
        servers = sum(host.count for host in hosts)
        address = {
            "DMLC_PS_ROOT_URI": host,
            "DMLC_NUM_SERVER": str(servers),
            "DMLC_NUM_WORKER": str(self._size),
            **_new_secret(self._size),
        }
        port = nodes.start_scheduler(address, self._deadline)
        # A logger would drop this line at its default level, but every user must see it.
        line = (
            "embedded mode (DMLC_PS_ROOT_URI is not set): this rank has started the scheduler at "
            f"{join_host_port(host, port)}, and the first rank of each host starts its "
            f"servers, {servers} in all on {len(hosts)} host(s); {cost_text(hosts)}; their logs "
            f"are in {nodes.folder}"
        )
        sys.stderr.write(logs.render(logging.INFO, line) + "\n")
        return {**address, "DMLC_PS_ROOT_PORT": str(port)}


def demand_one_secret(messages: list[Message]) -> None:
    """Raise BytePSError unless all ranks have sent the same `secret_mark`."""
    if others := [
        rank for rank, message in enumerate(messages) if message["secret"] != messages[0]["secret"]
    ]:
        raise byteps_error(
            f"ranks {others} of {len(messages)} have another secret than rank 0: set the same "
            "BYTEPS_SECRET_FILE (or BYTEPS_SECRET) on all hosts, or on none; and BYTEPS_AUTH=0 on "
            "all or on none"
        )


def secret_mark() -> str:
    """Return a text that is equal on ranks with the same secret, and empty without a secret."""
    if not setting("BYTEPS_AUTH", bool):
        return "BYTEPS_AUTH=0"
    secret = setting("BYTEPS_SECRET", str)
    if file := setting("BYTEPS_SECRET_FILE", str):
        try:
            secret += Path(file).read_text(errors="replace")
        except OSError as error:
            raise byteps_error(f"BYTEPS_SECRET_FILE={file} cannot be read: {error}") from None
    return hashlib.sha256(secret.rstrip().encode()).hexdigest()[:8] if secret else ""


def _new_secret(size: int) -> dict[str, str]:
    """Return a setting with a new secret for the job. Return {} if the environment names a secret
    or disables authentication."""
    if secret_mark():
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
    """Return host and port as one word; an IPv6 address gets brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
