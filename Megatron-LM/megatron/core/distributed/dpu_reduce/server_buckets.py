# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Megatron's buckets, whose parameters the servers keep in fp32 and update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, overload

import torch

from . import bytepslib

if TYPE_CHECKING:
    from byteps.torch import TensorDeclaration
    from byteps.torch.server_nodes import SharedTensor, Started
    from byteps.torch.server_state import Rule, Segment, Step

    from ..param_and_grad_buffer import _ParamAndGradBucket
    from .plan import BucketOp

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the size of an element."""


class ServerBucket:
    """A bucket's gradients go up, its parameters come down.

    They travel in the type of the parameters, if gradients have it too or the user asked for it.
    Else, with parameters of bf16 and gradients of fp32, both travel in fp32: the parameters come
    down into the gradients' memory, whose content is used up then, and are rounded here, to nearest
    even as servers round.

    Node first, the ranks of a host sum in the type of the gradients, each sends a part, and they
    gather what comes down: see :mod:`byteps.torch.server_nodes`.
    """

    def __init__(
        self,
        bucket: _ParamAndGradBucket,
        *,
        average: bool,
        rule: Rule,
        group_of: Mapping[torch.nn.Parameter, int],
        counts: Callable[[torch.nn.Parameter], bool],
        in_order: bool,
        speculative: bool,
        counts_zeros: bool,
        checked: Mapping[torch.nn.Parameter, str] | None = None,
    ) -> None:
        """Lay the parameters side by side, as the gradients are, and tell the servers.

        Args:
            bucket: with its ``dpu_reduce_op``. Its gradient data may be moved later on, but not be
                of another size.
            average: divide the summed gradients by the number of ranks.
            rule: how parameters are updated.
            group_of: index of the parameter group.
            counts: whether this rank's copy of a parameter counts in the norm of the gradients.
            in_order: gradients are added in the order of ranks.
            speculative: servers may be asked to try a step.
            counts_zeros: servers count the gradients that are 0.
            checked: names of the parameters, to fail in the step where a gradient that was pushed
                early has changed since; None: nothing is checked.

        Raises:
            byteps.torch.BytePSError: a server refuses, or has too little memory.
        """
        self._bucket = bucket
        grads = bucket.grad_data
        begins = {parameter: begin for parameter, (begin, _) in bucket.param_to_index.items()}
        self.places = sorted(
            ((begins[parameter], parameter) for parameter in bucket.params_list),
            key=lambda place: place[0],
        )
        """First element in the bucket, and the parameter."""
        dtype = self.places[0][1].dtype
        self._parameters = torch.zeros(grads.numel(), dtype=dtype, device=grads.device)
        segments: list[Segment] = []
        add = bytepslib.server_state.add_segment
        with torch.no_grad():
            for begin, parameter in self.places:
                if segments and segments[-1][0] < begin:
                    # What lies between parameters is 0 and stays so.
                    add(segments, begin, segments[-1][1], False)
                part = self._part(self._parameters, begin, parameter)
                part.copy_(parameter.detach())
                parameter.data = part
                add(segments, begin + parameter.numel(), group_of[parameter], counts(parameter))
        if segments[-1][0] < grads.numel():
            add(segments, grads.numel(), segments[-1][1], False)
        self._tensor, self._members = _shared_tensor(
            bucket,
            rule,
            segments,
            average=average,
            in_order=in_order,
            speculative=speculative,
            counts_zeros=counts_zeros,
        )
        """`_members`: the ranks that send the same elements."""
        self.is_first = self._members[0] == torch.distributed.get_rank()
        """Whether this rank loads what it sends into the servers."""
        self._num_groups = len(rule.groups)
        self._checked = checked
        self._checksums: torch.Tensor | None = None
        """Of the gradients that were pushed early."""
        self._pushed: Started | None = None
        self._tried: Step | None = None
        self._lies_in_gradients = False
        """Whether what came down has to be copied to the parameters."""

    @staticmethod
    def _part(flat: torch.Tensor, begin: int, parameter: torch.Tensor) -> torch.Tensor:
        return flat[begin : begin + parameter.numel()].view(parameter.shape)

    @property
    def squares(self) -> list[float]:
        """Of `start`: the sum of the gradients' squares, in parts, of what this rank sends."""
        return self._tensor.squares

    @property
    def zeros(self) -> int:
        """Of `start`: how many summed gradients of what this rank sends are 0, if servers count
        them."""
        return self._tensor.zeros

    @property
    def local(self) -> int:
        """This rank's place among those of its host that send a part each; else 0."""
        return self._tensor.local

    def of_host(self, values: Sequence[float]) -> list[list[float]]:
        """What each of the ranks gives that sum a bucket first, in one order on all of them."""
        return self._tensor.of_host(values)

    def _target(self) -> torch.Tensor | None:
        """Where parameters come down to, in the optimizer's step; None: where gradients lie."""
        op: BucketOp = self._bucket.dpu_reduce_op
        self._lies_in_gradients = op.wire_dtype != self._parameters.dtype
        return None if self._lies_in_gradients else self._parameters

    def push_step(self, step: Step) -> Started:
        """Start; the servers update as soon as they have the sum."""
        return self._tensor.push_step(self._bucket.grad_data, self._target(), step)

    def push_early(self, attempt: Step | None) -> None:
        """The bucket's gradients will not change any more: send them. `start` then goes on."""
        self.forget_push()
        gradients = self._bucket.grad_data
        if self._checked is not None:
            # Servers send parameters into the memory that was pushed.
            self._checksums, gradients = self._sums_of_bits(), gradients.clone()
        self._pushed = self._push(attempt, gradients)

    def start(self, attempt: Step | None) -> Started:
        """Start, unless it was; the servers answer with the sum's squares.

        Args:
            attempt: a step that the servers try; its parameters come with the squares, into the
                memory of the gradients. What is answered has been sent, so that nobody needs it.

        Raises:
            RuntimeError: gradients are checked, and one has changed since it was pushed.
        """
        started, self._pushed = self._pushed, None
        if started is None:
            return self._push(attempt, self._bucket.grad_data)
        if changed := self._changed():
            with suppress(bytepslib.byteps.BytePSError):
                self._tensor.end(started)
            raise RuntimeError(
                f"--dpu-optimizer: the gradients of {', '.join(changed)} have changed since they "
                "were sent to the servers, so that the step would miss what was added: something "
                "sums or scales them after the backward pass that dpu_reduce/summed_later.py does "
                "not know of (BYTEPS_CHECK_GRADIENTS=1). Without --overlap-grad-reduce nothing is "
                "sent before the step"
            )
        return started

    def _push(self, attempt: Step | None, gradients: torch.Tensor) -> Started:
        self._tried = attempt
        if attempt is None:
            return self._tensor.push_norm(gradients)
        return self._tensor.push_try(gradients, attempt)

    def _sums_of_bits(self) -> torch.Tensor:
        """Of each parameter's gradient."""
        grads = self._bucket.grad_data
        bits = grads.view(_INTEGERS[grads.element_size()])
        return torch.stack(
            [
                bits[begin : begin + parameter.numel()].sum(dtype=torch.int64)
                for begin, parameter in self.places
            ]
        )

    def _changed(self) -> list[str]:
        """Names of the parameters whose gradients have changed since they were pushed."""
        before, self._checksums = self._checksums, None
        if before is None:
            return []
        assert self._checked is not None
        same = (before == self._sums_of_bits()).tolist()
        return [
            self._checked[parameter]
            for (_, parameter), is_same in zip(self.places, same, strict=True)
            if not is_same
        ]

    def forget_push(self) -> None:
        """If gradients were sent for a step that was not made, since Megatron computes them anew:
        wait until nothing reads or writes their memory any more."""
        started, self._pushed = self._pushed, None
        self._checksums = None
        if started is None:
            return
        self._tensor.end(started)
        if self._tried is not None:
            self._tensor.drop()
            return
        self._tensor.forget((1, 1.0, True, [(0.0, 0.0)] * self._num_groups))

    def finish(self, step: Step) -> Started | None:
        """After `start`: make the step. What was started is returned, None if nothing had to be."""
        if self._tried is None:
            return self._tensor.step(self._target(), step)
        skip = step[2]
        self._lies_in_gradients = not skip
        if not skip and self._tried != step:
            return self._tensor.step(None, step)
        if skip:
            self._tensor.drop()
        else:
            self._tensor.keep()
        return None

    def give_up(self) -> None:
        """A checkpoint is loaded: drop a step that was tried and neither kept nor dropped. What was
        sent early may be of a step that failed, on this rank or another one."""
        started, self._pushed = self._pushed, None
        if started is not None:
            with suppress(bytepslib.byteps.BytePSError):
                self._tensor.end(started)
        self._tensor.give_up()

    def wait(self, started: Started, *, failed: bool = False) -> None:
        """Until what was started has ended; raises BytePSError when it failed. If another bucket
        has `failed` before, the ranks of the host are not waited for."""
        if failed:
            self._tensor.end(started)
        else:
            self._tensor.wait(started)

    def take_parameters(self) -> None:
        """The model has what has come down."""
        if self._lies_in_gradients:
            self._tensor.take(self._parameters)

    def load_parameters(self) -> None:
        """Give the servers the model's parameters, with no history. Called on the first rank; node
        first, on all ranks of the first host."""
        self._tensor.load(0, self._parameters.float().cpu())

    def load(self, slot: int, values: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        """Give the servers a slot, of any float type; 0 where there is no value."""
        flat = torch.zeros(self._tensor.numel)
        for begin, parameter in self.places:
            if parameter in values:
                self._part(flat, begin, parameter).copy_(values[parameter])
        self._tensor.load(slot, flat)

    @property
    def owned(self) -> list[tuple[int, int]]:
        """Begin and end of the elements that this rank saves. If each rank sends all, these are
        those that it would own in Megatron's distributed optimizer; node first, its share of each
        part that it sends."""
        found = []
        for first, last in self._tensor.mine:
            size = -(-(last - first) // len(self._members))
            begin = first + self._members.index(torch.distributed.get_rank()) * size
            found.append((min(begin, last), min(begin + size, last)))
        return found

    def read(self, slot: int, begin: int, end: int) -> torch.Tensor:
        """What the servers keep of these elements, which this rank sends, in fp32, on the CPU."""
        return self._tensor.read(slot, begin, end)

    @overload
    def gather(
        self, slot: int, begin: int, end: int, *, wanted: Literal[True] = True
    ) -> torch.Tensor: ...
    @overload
    def gather(self, slot: int, begin: int, end: int, *, wanted: bool) -> torch.Tensor | None: ...
    def gather(
        self, slot: int, begin: int, end: int, *, wanted: bool = True
    ) -> torch.Tensor | None:
        """What the servers keep of any elements. Node first, all ranks of the host call this. None
        if it is not `wanted` on this rank."""
        if not wanted and not self._tensor.is_shared:
            return None
        values = self._tensor.gather(slot, begin, end)
        return values if wanted else None


def _shared_tensor(
    bucket: _ParamAndGradBucket,
    rule: Rule,
    segments: list[Segment],
    *,
    average: bool,
    in_order: bool,
    **servers: bool,
) -> tuple[SharedTensor, Sequence[int]]:
    """What the servers keep of a bucket, and the ranks that send the same of it as this one.

    `servers`: what else these are asked to do.
    """
    op: BucketOp = bucket.dpu_reduce_op
    rank, grads, sums = torch.distributed.get_rank(), bucket.grad_data, op.node_whole
    host, declarations = None, [_declaration(op, grads, average)]
    if sums is not None:
        host = bytepslib.server_nodes.OnHost(
            group=sums.node,
            local=sums.layout.local_index(rank),
            average=average,
            in_order=in_order,
        )
        declarations = [
            replace(one, dtype=op.wire_dtype, wire_dtype=None)
            for one in sums.declarations(rank, grads.dtype, grads.device)
        ]
    tensor = bytepslib.server_nodes.SharedTensor(
        declarations,
        rule,
        segments,
        pieces=() if sums is None else sums.pieces,
        host=host,
        in_order=in_order,
        **servers,
    )
    members = declarations[0].group
    assert isinstance(members, Sequence)
    return tensor, list(members)


def _declaration(op: BucketOp, grads: torch.Tensor, average: bool) -> TensorDeclaration:
    return bytepslib.byteps.TensorDeclaration(
        name=op.name,
        dtype=op.wire_dtype,
        numel=grads.numel(),
        average=average,
        group=list(op.group),
        placement=op.placement,
        device=grads.device,
    )
