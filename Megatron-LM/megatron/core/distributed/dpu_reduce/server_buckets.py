# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Megatron's buckets, whose parameters the servers keep in fp32 and update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .bytepslib import byteps, server_state

if TYPE_CHECKING:
    from byteps.torch.server_state import Rule, Step

    from ..param_and_grad_buffer import _ParamAndGradBucket
    from .plan import BucketOp

_PACKED_AT_ONCE = 1 << 22
"""Elements: memory of this size is taken while gradients are made shorter where they lie."""


class ServerBucket:
    """A bucket's gradients go up, its parameters come down.

    They travel in the type of the parameters, if gradients have it too or the user asked for it.
    Else, with parameters of bf16 and gradients of fp32, both travel in fp32: the parameters come
    down into the gradients' memory, whose content is used up then, and are rounded here, to nearest
    even as servers round.
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
    ) -> None:
        """Lay the parameters side by side, as the gradients are, and tell the servers.

        Args:
            bucket: with its ``dpu_reduce_op``. Its gradient data may be moved later on, but not be
                of another size.
            average: divide the summed gradients by the number of ranks.
            rule: how parameters are updated.
            group_of: index of the parameter group.
            counts: whether this rank's copy of a parameter counts in the norm of the gradients.
            in_order: servers add gradients in the order of ranks.
            speculative: servers may be asked to try a step.

        Raises:
            byteps.torch.BytePSError: a server refuses, or has too little memory.
        """
        op: BucketOp = bucket.dpu_reduce_op
        self._bucket = bucket
        self.is_first = op.group[0] == torch.distributed.get_rank()
        """Whether this rank loads what the servers keep."""
        grads = bucket.grad_data
        begins = {parameter: begin for parameter, (begin, _) in bucket.param_to_index.items()}
        self.places = sorted(
            ((begins[parameter], parameter) for parameter in bucket.params_list),
            key=lambda place: place[0],
        )
        """First element in the bucket, and the parameter."""
        dtype = self.places[0][1].dtype
        self._parameters = torch.zeros(grads.numel(), dtype=dtype, device=grads.device)
        segments: list[tuple[int, int, bool]] = []
        add = server_state().add_segment
        with torch.no_grad():
            for begin, parameter in self.places:
                if segments and segments[-1][0] < begin:
                    # What lies between parameters is 0 and stays so.
                    add(segments, begin, *segments[-1][1:])
                part = self._part(self._parameters, begin, parameter)
                part.copy_(parameter.detach())
                parameter.data = part
                add(segments, begin + parameter.numel(), group_of[parameter], counts(parameter))
        add(segments, grads.numel(), *segments[-1][1:])
        declaration = byteps().TensorDeclaration(
            name=op.name,
            dtype=op.wire_dtype,
            numel=grads.numel(),
            average=average,
            group=list(op.group),
            placement=op.placement,
            device=grads.device,
        )
        self._tensor = server_state().ServerTensor(
            declaration, rule, segments, in_order=in_order, speculative=speculative
        )
        self._num_groups = len(rule.groups)
        self._sent: torch.Tensor | None = None
        self._pushed: int | None = None
        self._tried: Step | None = None
        self._landed: torch.Tensor | None = None

    @staticmethod
    def _part(flat: torch.Tensor, begin: int, parameter: torch.Tensor) -> torch.Tensor:
        return flat[begin : begin + parameter.numel()].view(parameter.shape)

    @property
    def squares(self) -> list[float]:
        """Of `start`: the sum of the gradients' squares, in parts."""
        return self._tensor.norms.tolist()

    @property
    def _received(self) -> torch.Tensor:
        """Where parameters come down to, in the optimizer's step."""
        op: BucketOp = self._bucket.dpu_reduce_op
        return self._parameters if op.wire_dtype == self._parameters.dtype else self._gradients

    @property
    def _gradients(self) -> torch.Tensor:
        assert self._sent is not None
        return self._sent

    def prepare(self) -> None:
        """Gradients have the type in which they travel."""
        op: BucketOp = self._bucket.dpu_reduce_op
        grads = self._bucket.grad_data
        self._sent = grads if op.wire_dtype == grads.dtype else _shortened(grads, op.wire_dtype)

    def push_step(self, step: Step) -> int:
        """Start; the servers update as soon as they have the sum."""
        self.prepare()
        self._landed = self._received
        return self._tensor.push_step(self._gradients, self._landed, step)

    def push_early(self, attempt: Step | None) -> None:
        """The bucket's gradients will not change any more: send them. `start` then goes on."""
        self.forget_push()
        self._pushed = self._push(attempt)

    def start(self, attempt: Step | None) -> int:
        """Start, unless it was; the servers answer with the sum's squares.

        Args:
            attempt: a step that the servers try; its parameters come with the squares, into the
                memory of the gradients. What is answered has been sent, so that nobody needs it.
        """
        handle, self._pushed = self._pushed, None
        return self._push(attempt) if handle is None else handle

    def _push(self, attempt: Step | None) -> int:
        self.prepare()
        self._tried = attempt
        if attempt is None:
            return self._tensor.push_norm(self._gradients)
        return self._tensor.push_try(self._gradients, self._gradients, attempt)

    def forget_push(self) -> None:
        """If gradients were sent for a step that was not made, since Megatron computes them anew:
        wait until nothing reads or writes their memory any more."""
        handle, self._pushed = self._pushed, None
        if handle is None:
            return
        self.wait(handle)
        if self._tried is not None:
            self._tensor.drop()
            return
        unused = torch.empty_like(self._gradients)
        skip = (1, 1.0, True, [(0.0, 0.0)] * self._num_groups)
        self._tensor.wait(self._tensor.step(unused, skip), unused)

    def finish(self, step: Step) -> int | None:
        """After `start`: make the step. What was started is returned, None if nothing had to be."""
        if self._tried is None:
            self._landed = self._received
            return self._tensor.step(self._landed, step)
        skip = step[2]
        self._landed = self._parameters if skip else self._gradients
        if not skip and self._tried != step:
            return self._tensor.step(self._landed, step)
        if skip:
            self._tensor.drop()
        else:
            self._tensor.keep()
        return None

    def give_up(self) -> None:
        """A checkpoint is loaded: drop a step that was tried and neither kept nor dropped."""
        self._tensor.give_up()

    def wait(self, handle: int) -> None:
        """Until what was started has ended; raises BytePSError when it failed."""
        self._tensor.wait(handle, self._parameters, self._gradients)

    def take_parameters(self) -> None:
        """The model has what has come down."""
        assert self._landed is not None
        if self._landed is not self._parameters:
            self._parameters.copy_(self._landed)

    def load_parameters(self) -> None:
        """Give the servers the model's parameters, with no history. Called on the first rank."""
        self._tensor.load(0, self._parameters.float().cpu())

    def load(self, slot: int, values: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        """Give the servers a slot, of any float type; 0 where there is no value."""
        flat = torch.zeros(self._tensor.numel)
        for begin, parameter in self.places:
            if parameter in values:
                self._part(flat, begin, parameter).copy_(values[parameter])
        self._tensor.load(slot, flat)

    def read(self, slot: int) -> dict[Any, torch.Tensor]:
        """What the servers keep of each parameter, in fp32, on the CPU."""
        flat = self._tensor.read(slot)
        return {parameter: self._part(flat, begin, parameter) for begin, parameter in self.places}


def _shortened(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values in a type of half the size, in the first half of their memory."""
    short = values.view(dtype)[: values.numel()]
    # Each part is read before its memory, or that of later parts, is written.
    for part, target in zip(
        values.split(_PACKED_AT_ONCE), short.split(_PACKED_AT_ONCE), strict=True
    ):
        target.copy_(part.to(dtype))
    return short
