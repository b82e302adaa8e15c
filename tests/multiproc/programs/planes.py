"""Sums for tests of transports (sizes, many in flight, long runs), and counters of endpoints."""

from __future__ import annotations

import gc
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import byteps.torch as bps
import torch

from tests.multiproc.programs import values
from tests.multiproc.programs.job import Job

Endpoint = dict[str, Any]
COUNTED = (
    *("messages_sent", "bytes_sent", "messages_received", "bytes_received"),
    *("values_in_place", "values_offered", "values_in_pool", "values_in_frames"),
)


def endpoints() -> list[Endpoint]:
    return bps.get_metrics().get("rdma_endpoints", [])


def since(before: list[Endpoint]) -> list[Endpoint]:
    """Return the increase of each endpoint's counters since `before`."""
    old = {(e["peer"], e["plane"], e["index"]): e for e in before}
    zero = dict.fromkeys(COUNTED, 0)
    return [
        {**e, **{name: e[name] - old.get(_key(e), zero)[name] for name in COUNTED}}
        for e in endpoints()
    ]


def _key(endpoint: Endpoint) -> tuple[str, str, int]:
    return endpoint["peer"], endpoint["plane"], endpoint["index"]


def total(endpoints: list[Endpoint], plane: str, name: str, peers: str = "") -> int:
    """Sum a counter over a plane's endpoints to peers whose name contains `peers`."""
    return sum(e[name] for e in endpoints if e["plane"] == plane and peers in e["peer"])


def sizes(job: Job) -> None:
    """Sum tensors of args["counts"] bytes, three rounds each."""
    bps.init()
    ranks = list(range(job.size))
    for count in job.args["counts"]:
        with job.check(f"{count} bytes"):
            name = f"sizes.{count}"
            for round_ in range(3):
                given = values.exact_input(count, job.rank, name, round_, "uint8")
                bps.push_pull_inplace(given, average=False, name=name)
                want = values.exact_sum(count, ranks, name, round_, "uint8")
                values.demand_exact(given, want)
    bps.shutdown()


def many(job: Job) -> None:
    """Sum hundreds of tensors of all sizes at the same time, and wait for them in the opposite
    order."""
    bps.init()
    ranks = list(range(job.size))
    counts = [1 + 97 * n % 5003 + (40_000 if n % 25 == 0 else 0) for n in range(job.args["count"])]
    for round_ in range(3):
        waiting = []
        for number, count in enumerate(counts):
            name = f"many.{number}"
            given = values.exact_input(count, job.rank, name, round_, "float32")
            handle = bps.push_pull_async_inplace(given, average=False, name=name, priority=-number)
            waiting.append((handle, name, count))
        with job.check(f"round {round_}"):
            for handle, name, count in reversed(waiting):
                want = values.exact_sum(count, ranks, name, round_, "float32")
                values.demand_exact(bps.synchronize(handle), want)
    bps.shutdown()


def apart(job: Job) -> None:
    """Check that values use only data endpoints, that control messages use only control endpoints,
    and that counters are right.

    args: data_plane (whether there is one), endpoints (per pair), servers.
    """
    bps.init()
    count, rounds = 300_000, 4
    nbytes = 4 * count
    servers, planes = job.args["servers"], job.args["data_plane"]
    data = "data" if planes else "control"
    start = endpoints()
    with job.check("endpoints of each pair"):
        per_server = {"control": 1, "data": job.args["endpoints"] if planes else 0}
        for plane, wanted in per_server.items():
            here = [e for e in start if e["plane"] == plane and "server" in e["peer"]]
            assert len(here) == wanted * servers, start
            assert sorted(e["index"] for e in here) == sorted(servers * list(range(wanted))), start
        at_scheduler = [e["plane"] for e in start if "scheduler" in e["peer"]]
        assert set(at_scheduler) <= {"control"}, start
    tensor = torch.ones(count)
    bps.push_pull_inplace(tensor, average=False, name="apart")
    first = since(start)
    with job.check("the declaration went by control"):
        sent = [e["messages_sent"] for e in first if e["plane"] == "control"]
        declared = [n for e, n in zip(first, sent, strict=False) if "server" in e["peer"]]
        assert all(n >= 1 for n in declared), first
    before = endpoints()
    for _ in range(rounds):
        tensor.fill_(1.0)
        bps.push_pull_inplace(tensor, average=False, name="apart")
        assert (tensor == job.size).all()
    moved = since(before)
    print(json.dumps(moved))
    for direction in ("sent", "received"):
        with job.check(f"values {direction} by {data}"):
            bytes_ = total(moved, data, f"bytes_{direction}")
            messages = total(moved, data, f"messages_{direction}")
            assert bytes_ >= rounds * nbytes, moved
            # Headers and rendezvous are small compared with the values.
            assert bytes_ <= rounds * nbytes + 2048 * messages, moved
            partitions = bps.partition_count(nbytes)
            assert messages >= rounds * partitions, moved
    with job.check("no value was copied: the device wrote each into the tensor"):
        assert total(moved, data, "values_in_place") == rounds * partitions, moved
        assert total(moved, data, "values_offered") == rounds * partitions, moved
        assert total(moved, data, "values_in_pool") == 0, moved
        assert total(moved, data, "values_in_frames") == 0, moved
    if planes:
        with job.check("control is quiet meanwhile"):
            for direction in ("sent", "received"):
                assert total(moved, "control", f"bytes_{direction}") < 16_384, moved
        with job.check("every data endpoint took part"):
            idle = [e for e in moved if e["plane"] == "data" and not e["bytes_sent"]]
            assert not idle, moved
    bps.shutdown()


def beats(job: Job) -> None:
    """Check an idle period: heartbeats use control endpoints, and data endpoints stay silent."""
    bps.init()
    bps.push_pull(torch.ones(1000), average=False, name="once")
    before = endpoints()
    job.mark("idle")
    job.wait_go("on")
    moved = since(before)
    with job.check("data endpoints are still"):
        for name in COUNTED:
            assert total(moved, "data", name) == 0, moved
    bps.shutdown()


def small(job: Job) -> None:
    """Many concurrent sums that travel inside their messages, without the pool."""
    bps.init()
    ranks = list(range(job.size))
    names = [f"small.{number}" for number in range(200)]
    with job.check("small sums"):
        given = [values.exact_input(900, job.rank, name, 0, "float32") for name in names]
        handles = [
            bps.push_pull_async_inplace(tensor, average=False, name=name)
            for tensor, name in zip(given, names, strict=True)
        ]
        for handle in handles:
            bps.synchronize(handle)
        for tensor, name in zip(given, names, strict=True):
            values.demand_exact(tensor, values.exact_sum(900, ranks, name, 0, "float32"))
    job.mark("summed")
    job.wait_go("on")
    bps.shutdown()


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def _resources(kind: str) -> list[dict[str, Any]]:
    command = ["rdma", "-j", "resource", "show", kind]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(shown.stdout)


def registered(pid: int) -> dict[str, int]:
    """Return the number of RDMA objects that the kernel holds for a process, by kind.

    The kernel names the thread that created each, which may have ended. The device's context
    belongs to the main thread, and is never closed; other objects are found through it.
    """
    threads = {int(name) for name in os.listdir(f"/proc/{pid}/task")}
    contexts = {entry["ctxn"] for entry in _resources("ctx") if entry.get("pid") in threads}
    assert contexts, "the kernel knows of no use of RDMA by this process"
    pds = {entry["pdn"] for entry in _resources("pd") if entry.get("ctxn") in contexts}
    return {
        "pd": len(pds),
        "cq": sum(entry.get("ctxn") in contexts for entry in _resources("cq")),
        "mr": sum(entry.get("pdn") in pds for entry in _resources("mr")),
        "qp": sum(entry.get("pdn") in pds for entry in _resources("qp")),
    }


def rounds(job: Job) -> None:
    """Make many rounds, each with new memory. No registration is left, and no round sees the values
    of another one."""
    bps.init()
    ranks = list(range(job.size))
    rounds = job.args["rounds"]

    def held() -> dict[str, int]:
        gc.collect()
        own = {"files": _open_files()}
        return {**own, **(registered(os.getpid()) if job.args["rdma"] else {})}

    def turn(round_: int) -> None:
        # Sizes are permuted, so that the allocator reuses another tensor's address.
        for number, count in enumerate((16_384, 70_001, 5)):
            name = f"rounds.{number}"
            given = values.exact_input(count, job.rank, name, round_, "float32")
            result = bps.push_pull(given, average=False, name=name)
            values.demand_exact(result, values.exact_sum(count, ranks, name, round_, "float32"))

    with job.check("sums"):
        for round_ in range(rounds // 10):
            turn(round_)
        before, resident = held(), _resident_bytes()
        assert not job.args["rdma"] or before["mr"], before
        for round_ in range(rounds // 10, rounds):
            turn(round_)
        after, grown = held(), _resident_bytes() - resident
    print(f"before {before}, after {after}, grown by {grown} bytes")
    with job.check("registrations and files are as before"):
        # The pool may still grow to the number of buffers in use; a leak has hundreds.
        more = {kind: after[kind] - before[kind] for kind in before}
        assert all(n <= (16 if kind == "mr" else 0) for kind, n in more.items()), more
    with job.check("memory is as before"):
        assert grown < 8 << 20, grown
    bps.shutdown()
    if job.args["rdma"]:
        with job.check("shutdown leaves nothing"):
            left = registered(os.getpid())
            assert not any(left.values()), left


def once(job: Job) -> None:
    """Check that memory which is sent in every round is registered once, and that other memory at
    the same address is registered anew."""

    def made() -> int:
        return bps.get_metrics()["byteps_worker_memory_registrations_total"]

    bps.init()
    count, ranks = 300_000, list(range(job.size))
    buffer = torch.zeros(3 * count)

    def turn(tensor: torch.Tensor, name: str, round_: int) -> None:
        tensor.copy_(values.exact_input(count, job.rank, name, round_, "float32"))
        bps.push_pull_inplace(tensor, average=False, name=name)
        values.demand_exact(tensor, values.exact_sum(count, ranks, name, round_, "float32"))

    buckets = [buffer[begin : begin + count] for begin in range(0, 3 * count, count)]
    for number, bucket in enumerate(buckets):
        turn(bucket, f"once.{number}", 0)
    before, held = made(), registered(os.getpid())["mr"]
    with job.check("rounds in the same memory"):
        for round_ in range(1, 6):
            for number, bucket in enumerate(buckets):
                turn(bucket, f"once.{number}", round_)
        # The pool may grow by a few buffers, which it keeps; no message used them.
        registrations = registered(os.getpid())["mr"]
        assert made() - before == registrations - held, (made() - before, registrations - held)
    with job.check("memory that is freed is let go of"):
        del bucket, buckets, buffer
        gc.collect()
        left = registered(os.getpid())["mr"]
        assert left == registrations - 1, (registrations, left)
    with job.check("memory that is resized is let go of, and right when it comes back"):
        resized = torch.zeros(count)
        for round_ in range(3):
            turn(resized, "once.resized", round_)
            with_it = registered(os.getpid())["mr"]
            resized.untyped_storage().resize_(0)
            assert registered(os.getpid())["mr"] == with_it - 1
            resized.untyped_storage().resize_(4 * count)
        del resized
    with job.check("other memory at the same place"):
        # A tensor of this size has a memory mapping of its own, and a later tensor often gets the
        # same address.
        places: list[int] = []
        for round_ in range(6, 46):
            fresh = torch.empty(count + 4_000_000)
            places.append(fresh.data_ptr())
            turn(fresh[:count], "once.0", round_)
            del fresh
        assert len(set(places)) < len(places), "no address came twice: this shows nothing"
    bps.shutdown()
    with job.check("shutdown leaves nothing"):
        rest = registered(os.getpid())
        assert not any(rest.values()), rest


def poor(job: Job) -> None:
    """A process that may lock little memory, like a non-root user with a low `ulimit -l`."""
    import resource

    values_bytes = job.args["limit_bytes"]
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (values_bytes, values_bytes))
    _drop_right_to_lock()
    bps.init()
    bps.push_pull(torch.ones(4 << 20), average=False, name="poor")
    bps.shutdown()


def _drop_right_to_lock() -> None:
    """Drop CAP_IPC_LOCK, which lifts the limit, from this process."""
    import ctypes

    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # Version 3 of the call, for this thread.
    data = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    cap_ipc_lock = 1 << 14
    for call in ("capget", "capset"):
        if call == "capset":
            data[0] &= ~cap_ipc_lock
            data[1] &= ~cap_ipc_lock
        if getattr(libc, call)(header, data) != 0:
            raise OSError(ctypes.get_errno(), call)
