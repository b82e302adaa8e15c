"""Backends, which are the compared ways to sum a tensor over all workers.

Plain sockets sum nothing. They show how fast a TCP transport can move the traffic of a push-pull.
``sockets.cc`` moves the bytes; this module compiles and calls it.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from bench.kit import fp8
from bench.kit.plan import SAME, WIRE_BITS, is_byteps

_ROOT = Path(__file__).resolve().parents[2]
_SOURCE = Path(__file__).with_name("sockets.cc")
_LIMIT_S = 120.0


class SocketsError(Exception):
    """Error if the program could not be built, or if a connection broke. The text has the
    reason."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """Results of ``build``."""

    server: Path
    library: Path


def build(folder: Path = _ROOT / "build" / "bench") -> Program:
    """Compile the server and the workers' library, unless both are newer than the source.

    Raises:
        SocketsError: there is no compiler (g++, or the value of CXX), or it fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    program = Program(server=folder / "sockets", library=folder / "libsockets.so")
    common = [os.environ.get("CXX", "c++"), "-std=c++17", "-O2", "-Wall", "-Wextra", "-pthread"]
    for path, flags in ((program.server, []), (program.library, ["-shared", "-fPIC"])):
        if path.exists() and path.stat().st_mtime >= _SOURCE.stat().st_mtime:
            continue
        # The file gets its name only when it is complete, because another benchmark may run the old
        # file.
        part = path.with_name(f"{path.name}.{os.getpid()}")
        _compile([*common, *flags, str(_SOURCE), "-o", str(part)])
        part.replace(path)
    return program


def _compile(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    except OSError as error:
        raise SocketsError(f"{command[0]}: {error}: install g++, or set CXX") from error
    if done.returncode != 0:
        raise SocketsError(f"`{' '.join(command)}` failed:\n{done.stderr.strip()}")


class Sockets:
    """Connections of a worker. As a ``Backend`` they sum nothing, and verify only the number of
    bytes."""

    sums = False

    def __init__(self, *, library: str, servers: Sequence[str], flows: int) -> None:
        """Connect ``flows`` times to every server.

        Args:
            library: path of the compiled library.
            servers: ``"address port"`` of each server.

        Raises:
            SocketsError: a server cannot be reached.
        """
        self._calls = ctypes.CDLL(library, use_errno=True)
        self._calls.sockets_connect.restype = ctypes.c_void_p
        self._calls.sockets_push_pull.restype = ctypes.c_int64
        places = "\n".join(servers).encode()
        self._job = self._calls.sockets_connect(places, ctypes.c_size_t(flows))
        if not self._job:
            raise SocketsError(f"connecting to {servers}: {os.strerror(ctypes.get_errno())}")
        self._pushed = self._pulled = torch.empty(0, dtype=torch.uint8)

    def form(self, wire: str) -> str:
        return wire

    def reduce(self, tensors: Sequence[torch.Tensor], label: str, wire: str) -> None:
        """Send as many bytes as the tensors have in this wire type, and receive as many, from and
        to host memory.

        Raises:
            SocketsError: a connection broke.
        """
        bits = WIRE_BITS.get(wire)
        size = sum(
            tensor.nbytes if bits is None else round(tensor.numel() * bits / 8)
            for tensor in tensors
        )
        if self._pushed.nbytes < size:
            # The buffer is filled, so that the kernel allocates every page.
            self._pushed = torch.ones(size, dtype=torch.uint8)
            self._pulled = torch.ones(size, dtype=torch.uint8)
        moved = self._calls.sockets_push_pull(
            ctypes.c_void_p(self._job),
            ctypes.c_void_p(self._pushed.data_ptr()),
            ctypes.c_void_p(self._pulled.data_ptr()),
            ctypes.c_size_t(size),
        )
        if moved != size:
            raise SocketsError(f"{label}: {os.strerror(ctypes.get_errno())}")

    def close(self) -> None:
        """Close the connections. The servers end when all workers have closed theirs."""
        self._calls.sockets_close(ctypes.c_void_p(self._job))


class Fp8:
    """Sums in blocks of fp8 by collectives of torch.distributed: an alternative with equally few
    bytes.

    Each rank rounds its values to blocks of 128 fp8 (e4m3) values with a common scale. An
    all-to-all gives each rank all blocks of its part; the rank adds them in fp32 and rounds the
    sum. An all-gather distributes the sums. A host's link carries 2 (n - 1) / n of the blocks'
    bytes in each direction.
    """

    sums = True

    def __init__(self, name: str) -> None:
        self._group = dist.new_group(backend=name)
        compile_: Callable[[Any], Any] = torch.compile if name == "nccl" else lambda f: f
        self._encode, self._decode, self._add = map(compile_, (fp8.encode, fp8.decode, fp8.add))

    def form(self, wire: str) -> str:
        return "fp8"

    def reduce(self, tensors: Sequence[torch.Tensor], label: str, wire: str) -> None:
        ranks, sent = dist.get_world_size(), []
        for tensor in tensors:
            unit = ranks * fp8.BLOCK
            padded = tensor
            if tensor.numel() % unit:
                padded = torch.nn.functional.pad(tensor, (0, unit - tensor.numel() % unit))
            blocks = self._encode(padded)
            received = torch.empty_like(blocks)
            work = dist.all_to_all_single(received, blocks, group=self._group, async_op=True)
            sent.append((tensor, blocks, received, work))
        gathered = []
        for tensor, blocks, received, work in sent:
            work.wait()
            part = self._add(received, ranks)
            work = dist.all_gather_into_tensor(blocks, part, group=self._group, async_op=True)
            gathered.append((tensor, blocks, part, work))
        for tensor, blocks, _, work in gathered:
            work.wait()
            tensor.copy_(self._decode(blocks)[: tensor.numel()])

    def close(self) -> None:
        dist.destroy_process_group(self._group)


_NODES, _FP8 = "-nodes", "-fp8"


class Backend(Protocol):
    """Interface of a backend, which sums tensors over all ranks, in place."""

    sums: bool
    """False if bytes are only moved, so that there are no results to verify."""

    def reduce(self, tensors: Sequence[torch.Tensor], label: str, wire: str) -> None:
        """Start all sums, then wait for all of them.

        Args:
            tensors: contiguous, the same shapes on all ranks.
            label: name of the tensors, the same on all ranks and in all rounds, different for other
                tensors.
            wire: type in which BytePS sends the tensors.
        """

    def form(self, wire: str) -> str:
        """Return the type to which values are rounded in transit, for `Pattern`."""

    def close(self) -> None:
        """Leave the job. All ranks call this."""


class AllReduce:
    """all_reduce of torch.distributed, by gloo or NCCL."""

    sums = True

    def __init__(self, name: str) -> None:
        self._group = dist.new_group(backend=name)

    def reduce(self, tensors: Sequence[torch.Tensor], label: str, wire: str) -> None:
        works = [dist.all_reduce(t, group=self._group, async_op=True) for t in tensors]
        for work in works:
            work.wait()

    def form(self, wire: str) -> str:
        return SAME

    def close(self) -> None:
        dist.destroy_process_group(self._group)


class TwoLevels:
    """torch.distributed in two levels, for hosts of several ranks: a reduce-scatter inside the
    host, an all-reduce of each part between hosts, an all-gather inside the host. The tensor is cut
    into the same pieces as by BytePS, so that both levels overlap."""

    sums = True

    def __init__(self, name: str, device: torch.device) -> None:
        from byteps.torch import nodes

        self._nodes, self._layout = nodes, _layout()
        rank = dist.get_rank()
        if not self._layout.per_host:
            raise ValueError("two levels need the same number of ranks on each host")
        self._node = nodes.groups.get(self._layout.on_host_of(rank), device)
        across = {self._layout.across(r) for r in range(dist.get_world_size())}
        made = {ranks: dist.new_group(ranks, backend=name) for ranks in sorted(across)}
        self._across = made[self._layout.across(rank)]
        self._local = self._layout.local_index(rank)

    def reduce(self, tensors: Sequence[torch.Tensor], label: str, wire: str) -> None:
        from byteps.torch.node_groups import whole_pieces

        under_way = []
        for tensor in tensors:
            per_host = self._node.size
            count = self._nodes.piece_count(tensor.nbytes // per_host)
            for piece in whole_pieces(tensor.numel(), per_host, count):
                (ranges,) = piece.scatters
                begin, length = ranges[0][0], piece.length
                whole = tensor[begin : ranges[-1][1]]
                if len(whole) < per_host * length:
                    whole = torch.nn.functional.pad(whole, (0, per_host * length - len(whole)))
                part = whole[self._local * length : (self._local + 1) * length]
                self._node.reduce_scatter(part, whole)
                work = dist.all_reduce(part, group=self._across, async_op=True)
                under_way.append((tensor[begin : ranges[-1][1]], whole, part, work))
        for target, whole, part, work in under_way:
            work.wait()
            self._node.all_gather(whole, part)
            if whole.data_ptr() != target.data_ptr():
                target.copy_(whole[: len(target)])

    def form(self, wire: str) -> str:
        return SAME

    def close(self) -> None:
        self._nodes.groups.forget()


def _layout() -> Any:
    """Return the layout of all ranks over hosts."""
    from byteps.torch import nodes

    names: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(names, nodes.host_name())
    return nodes.HostLayout.of(range(len(names)), [str(name) for name in names])


class _Planned(NamedTuple):
    """Arguments for pushing a tensor."""

    name: str
    priority: int
    placement: int
    form: Any


class PushPull:
    """BytePS as a backend. Tensors are placed on servers round robin, like Megatron's buckets. If
    ranks share a host, they sum inside it first."""

    sums = True

    def __init__(self, device: torch.device) -> None:
        import byteps.torch as bps
        from byteps.torch import nodes

        self._bps, self._nodes = bps, nodes
        self._plans: dict[str, list[_Planned]] = {}
        bps.init()
        self._layout = layout = _layout()
        self._node = None
        if len(layout.hosts) > 1 and (layout.per_host or 1) > 1:
            self._node = nodes.groups.get(layout.on_host_of(dist.get_rank()), device)

    def reduce(self, tensors: Sequence[torch.Tensor], label: str, wire: str) -> None:
        if self._node is not None:
            self._reduce_node_first(tensors, label, wire)
            return
        planned = self._plans.get(label)
        if planned is None:
            planned = self._plans[label] = self._plan(tensors, label, wire)
        handles = [
            self._bps.push_pull_async_inplace(
                tensor,
                average=False,
                name=plan.name,
                priority=plan.priority,
                placement=plan.placement,
                wire_dtype=plan.form,
            )
            for tensor, plan in zip(tensors, planned, strict=True)
        ]
        for handle in handles:
            self._bps.synchronize(handle)

    def _plan(self, tensors: Sequence[torch.Tensor], label: str, wire: str) -> list[_Planned]:
        """Plan the tensors of a label, once, as trainers plan their buckets."""
        from byteps.torch import wire as wires

        form = wires.of(tensors[0].dtype, None if wire == SAME else wire)
        planned, partitions = [], 0
        for index, tensor in enumerate(tensors):
            planned.append(_Planned(f"{label}.{index}", -index, partitions, form))
            nbytes = form.nbytes(tensor.numel())
            partitions += self._bps.partition_count(nbytes, wire_dtype=form)
        return planned

    def form(self, wire: str) -> str:
        return wire

    def _reduce_node_first(self, tensors: Sequence[torch.Tensor], label: str, wire: str) -> None:
        from byteps.torch.node_groups import whole_pieces

        pending, partitions, rank = [], 0, dist.get_rank()
        assert self._node is not None
        for index, tensor in enumerate(tensors):
            count = self._nodes.piece_count(tensor.nbytes // self._node.size)
            node_sum = self._nodes.NodeSum(
                name=f"{label}.{index}",
                layout=self._layout,
                node=self._node,
                pieces=tuple(whole_pieces(tensor.numel(), self._node.size, count)),
                priority=-index,
                placement=partitions,
            )
            pending.append(node_sum.start(tensor))
            partitions += sum(
                push.partitions for push in node_sum.pushes(rank, tensor.element_size())
            )
        for begun in pending:
            begun.wait()

    def close(self) -> None:
        self._nodes.groups.forget()
        self._bps.shutdown()


def make(name: str, device: str = "cpu", sockets: Mapping[str, Any] | None = None) -> Backend:
    """Create the backend of this name for tensors on this device. It is connected to the other
    ranks.

    ``sockets``: arguments of the class ``Sockets``, for the backend of that name.
    """
    if name == "sockets":
        return Sockets(**(sockets or {}))
    if is_byteps(name):
        return PushPull(torch.device(device))
    if name.endswith(_NODES):
        return TwoLevels(name.removesuffix(_NODES), torch.device(device))
    if name.endswith(_FP8):
        return Fp8(name.removesuffix(_FP8))
    return AllReduce(name)
