"""Buckets: flat tensors of parameters, of one type and device, that servers keep in fp32 and
update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from byteps.torch import members as members_of_job
from byteps.torch import session
from byteps.torch.engine import TensorDeclaration
from byteps.torch.figures import setting
from byteps.torch.node_groups import Piece, Range
from byteps.torch.nodes import HostRanks
from byteps.torch.server_tensor import (
    Codec,
    FlatGradients,
    GradientCheck,
    PlacedParameter,
    Rule,
    Step,
    laid_flat,
    read_encoded,
    segments_of,
    write_encoded,
)
from byteps.torch.server_transfer import ServerShards, ShardTransfer, Started
from byteps.torch.wire import WireType, feedback


@dataclass(frozen=True, kw_only=True)
class BucketSpec:
    """Properties of a bucket that servers are given."""

    declarations: Sequence[TensorDeclaration]
    """Declarations of the tensors that this rank sends, in the wire dtype: one per element of
    `pieces`, or one for the whole bucket. Each has its group's ranks; the first of these loads the
    initial values."""
    rule: Rule
    pieces: Sequence[Piece] = ()
    """Pieces into which `whole_pieces` cuts the bucket for the ranks of `host`."""
    host: HostRanks | None = None
    """Ranks of this host that sum first; None: every rank sends its whole bucket."""
    in_order: bool = False
    """Whether gradients are added in the order of ranks."""
    speculative: bool = False
    """Whether servers may be asked for speculative steps."""
    counts_zeros: bool = False
    """Whether servers count gradients that are 0."""
    savers: Sequence[int] = ()
    """Ranks that share out the saving of elements that they all send. Empty: all ranks that send
    the same elements."""
    gaps: Sequence[Range] = ()
    """Ranges of elements whose gradients another bucket sends. In this bucket these gradients count
    as 0, even for the scale of their block."""


class ServerBucket:
    """Parameters of one type and device: pushes their gradients, pulls updated parameters.

    Gradients and parameters travel in the declarations' wire dtype. If this is a type of blocks of
    few bits, gradients are pushed in blocks, and differences are pulled, which are added to the
    parameters. If the parameters have the wire dtype, updates are pulled straight into the
    parameters. Otherwise (parameters in bf16, gradients in fp32) updates are pulled into the
    gradients' memory, whose values are no longer needed. They are rounded here, to nearest even, as
    servers round. Parameters of a speculative step always go to the gradients' memory.

    The ranks of a host may sum first, in the type of the gradients. Then each rank sends a shard,
    and the ranks gather the pulled parameters. All ranks of the host make the same calls in the
    same order, except `squares`, `zeros`, `read` and `load`.
    """

    def __init__(
        self,
        places: Sequence[PlacedParameter],
        gradients: Callable[[], torch.Tensor],
        spec: BucketSpec,
        *,
        group_of: Mapping[torch.Tensor, int],
        counts: Callable[[torch.Tensor], bool] = lambda parameter: True,
        check: GradientCheck | None = None,
        codecs: Mapping[torch.Tensor, Codec] | None = None,
    ) -> None:
        """Lay the parameters end to end, like the gradients, and declare them to the servers.

        Args:
            places: places of the parameters, in the order of the flat tensor.
            gradients: function that returns the flat gradients of all parameters, on their device.
                The tensor may move between steps, but must keep its size.
            spec: properties that servers are given.
            group_of: index of the parameter group of each parameter.
            counts: function that says whether this rank's copy of a parameter counts in the norm of
                the gradients.
            check: object that reports, in the step, gradients that changed after they were pushed
                early.
            codecs: codecs of parameters that are not stored as plain values.

        Raises:
            BytePSError: a server refuses, or has too little memory.
        """
        flat = gradients()
        self.places = places
        self.numel = flat.numel()
        self._codecs = codecs or {}
        self.parameters = laid_flat(places, self.numel, flat.device, self._codecs)
        self._gradients = gradients
        self._gaps = spec.gaps
        self._shards = ServerShards(
            spec.declarations,
            spec.rule,
            segments_of(places, self.numel, group_of, counts),
            pieces=spec.pieces,
            host=spec.host,
            in_order=spec.in_order,
            speculative=spec.speculative,
            counts_zeros=spec.counts_zeros,
        )
        self._transfer = ShardTransfer(self._shards, self.parameters)
        members = spec.declarations[0].group
        assert isinstance(members, Sequence)
        self._members = list(members)
        """Ranks that send the same elements."""
        self._savers = list(spec.savers) or self._members
        self.is_first = self._members[0] == session.rank() and not members_of_job.is_late()
        """Whether this rank loads the elements that it sends into the servers. A late replica does
        not, because the servers of a running job already have them."""
        self._skipped = Step(1, 1.0, True, [(0.0, 0.0)] * len(spec.rule.groups))
        self._check = check
        self._pushed: Started | None = None
        self._tried: Step | None = None
        self._lies_in_gradients = False
        """Whether pulled parameters are in the gradients' memory, and still have to be copied."""

    def close(self) -> None:
        """Release the servers' state; see :meth:`ServerTensor.close`."""
        self._shards.close()

    # ------------------------------------------------------------------- figures of a push

    @property
    def squares(self) -> list[float]:
        """Sums of squares of the summed gradients that this rank sends, in parts. Valid after
        `push`."""
        return self._shards.squares

    @property
    def zeros(self) -> int:
        """Number of zeros among the summed gradients that this rank sends, if servers count them.
        Valid after `push`."""
        return self._shards.zeros

    @property
    def local(self) -> int:
        """Index of this rank among the ranks of its host that each send a shard. 0 if the whole
        bucket is sent."""
        return self._shards.local

    def of_host(self, values: Sequence[float]) -> list[list[float]]:
        """Return the values of each rank of the host, in the same order on all ranks."""
        return self._shards.of_host(values)

    # ------------------------------------------------------------------- gradients go up

    def push_step(self, step: Step) -> Started:
        """Start a push. Servers update as soon as they have the sum."""
        return self._transfer.push(
            self._without_gaps(self._gradients()),
            lambda tensor, sent, landing: tensor.push_step(sent, landing, step),
            target=self._target(),
        )

    def push_early(self, attempt: Step | None) -> None:
        """Push gradients that will not change any more. `push` then uses this push."""
        self.forget_push()
        gradients = self._gradients()
        if self._check is not None:
            self._check.note(gradients)
            # A copy is pushed, because servers send parameters into the memory that was pushed.
            gradients = gradients.clone()
        self._pushed = self._push(attempt, gradients)

    def push(self, attempt: Step | None) -> Started:
        """Start a push, unless `push_early` has started it. Servers answer with the sum of squares.

        Args:
            attempt: speculative step. The parameters after this step arrive together with the
                squares, in the gradients' memory. None: the step is not speculative.

        Raises:
            RuntimeError: gradients are checked, and one changed after it was pushed.
        """
        started, self._pushed = self._pushed, None
        if started is None:
            return self._push(attempt, self._gradients())
        if self._check is not None and (error := self._check.error(self._gradients())):
            with suppress(session.BytePSError):
                self._transfer.end(started)
            raise error
        return started

    def _push(self, attempt: Step | None, gradients: torch.Tensor) -> Started:
        self._tried = attempt
        self._without_gaps(gradients)
        if attempt is None:
            return self._transfer.push(
                gradients, lambda tensor, sent, _: tensor.push_norm(sent), lands=False
            )
        return self._transfer.push(
            gradients, lambda tensor, sent, landing: tensor.push_try(sent, landing, attempt)
        )

    def _without_gaps(self, gradients: torch.Tensor) -> torch.Tensor:
        if self._gaps:
            torch._foreach_zero_([gradients[begin:end] for begin, end in self._gaps])
        return gradients

    def forget_push(self) -> None:
        """Drop gradients that were pushed early, because they are computed anew. Wait until nothing
        reads or writes their memory any more."""
        started, self._pushed = self._pushed, None
        if self._check is not None:
            self._check.forget()
        if started is None:
            return
        self._transfer.end(started)
        if self._shards.has_blocks:
            feedback.drop()  # These losses belong to gradients that are computed anew.
        if self._tried is not None:
            self._shards.drop()
            return
        self._transfer.discard(lambda tensor, landing: tensor.step(landing, self._skipped))

    # ------------------------------------------------------------------- parameters come down

    def finish(self, step: Step) -> Started | None:
        """Make the step that was pushed, or skip it. Return the transfer that was started, if
        any."""
        if self._tried is None:
            return self._update(step, self._target())
        if step.skip:
            self._lies_in_gradients = False
            self._shards.drop()
            return None
        self._lies_in_gradients = True
        if self._tried != step:
            return self._update(step, None)
        self._shards.keep()
        return None

    def _update(self, step: Step, target: torch.Tensor | None) -> Started:
        return self._transfer.update(lambda tensor, landing: tensor.step(landing, step), target)

    def _target(self) -> torch.Tensor | None:
        """Return the tensor that receives updated parameters; None: the gradients' memory."""
        self._lies_in_gradients = self._shards.dtype != self.parameters.dtype
        return None if self._lies_in_gradients else self.parameters

    def wait(self, started: Started, *, failed: bool = False) -> None:
        """Wait until a transfer has ended. `failed`: whether another bucket has failed; then do not
        wait for the ranks of the host.

        Raises:
            BytePSError: the transfer failed.
            RuntimeError: a rank of the host was lost.
        """
        if failed:
            self._transfer.end(started)
        else:
            self._transfer.wait(started)

    def take_parameters(self) -> None:
        """Copy pulled parameters to the model."""
        if self._lies_in_gradients:
            self._transfer.take(self.parameters)
        write_encoded(self.places, self.parameters, self._codecs)

    def reread_parameters(self) -> None:
        """Read the model's parameters again, after something else, such as a checkpoint, has
        changed them."""
        read_encoded(self.places, self.parameters, self._codecs)

    def settle(self) -> None:
        """Tell servers now whether the last speculative step is kept. Their state then includes all
        steps.

        Raises:
            BytePSError: a server was lost.
        """
        self._shards.settle()

    def give_up(self) -> None:
        """Drop an undecided speculative step, and gradients that were pushed early. They may belong
        to a step that failed on this rank or another. Called before a checkpoint is loaded."""
        started, self._pushed = self._pushed, None
        if started is not None:
            with suppress(session.BytePSError):
                self._transfer.end(started)
        self._shards.give_up()

    # ------------------------------------------------------------------- state on the servers

    def load_parameters(self) -> None:
        """Load the model's parameters into the servers, as if no step had been made. The first rank
        calls this. If hosts sum first, all ranks of the first host do."""
        self._shards.load(0, self.parameters.float().cpu())

    def load(self, slot: int, values: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Load a slot into the servers. `values`: for each parameter a tensor of its shape and any
        float type. A missing parameter gets 0."""
        flat = torch.zeros(self.numel)
        for placed in self.places:
            if placed.parameter in values:
                placed.of(flat).copy_(values[placed.parameter])
        self._shards.load(slot, flat)

    @property
    def held_slot(self) -> int:
        """Slot with the parameters' values on the workers. If servers send differences, they keep
        these values in a slot of their own. Otherwise it is the slot of the fp32 parameters."""
        return self._shards.held_slot

    def load_held(self) -> None:
        """Load the model's current values if servers send differences, so that the next differences
        are relative to them. The ranks that call `load_parameters` call this, after `load`."""
        if self.held_slot > 0:
            self._shards.load(self.held_slot, self.parameters.float().cpu())

    def pull_parameters(self) -> None:
        """Set the model's parameters to the servers' values."""
        self.parameters.copy_(self.gather(self.held_slot, 0, self.numel))
        write_encoded(self.places, self.parameters, self._codecs)

    @property
    def owned(self) -> list[Range]:
        """Ranges of elements that this rank saves: an equal share of each shard that it sends. In
        Megatron's distributed optimizer the rank would own these elements."""
        ranges = []
        for first, last in self._shards.own:
            size = -(-(last - first) // len(self._savers))
            begin = first + self._savers.index(session.rank()) * size
            ranges.append((min(begin, last), min(begin + size, last)))
        return ranges

    def read(self, slot: int, begin: int, end: int) -> torch.Tensor:
        """Return the servers' values of these elements, in fp32, on the CPU. This rank must send
        the elements."""
        return self._shards.read(slot, begin, end)

    @overload
    def gather(
        self, slot: int, begin: int, end: int, *, wanted: Literal[True] = True
    ) -> torch.Tensor: ...
    @overload
    def gather(self, slot: int, begin: int, end: int, *, wanted: bool) -> torch.Tensor | None: ...
    def gather(
        self, slot: int, begin: int, end: int, *, wanted: bool = True
    ) -> torch.Tensor | None:
        """Return the servers' values of any elements. Return None if they are not `wanted` on this
        rank. If hosts sum first, all ranks of the host call this."""
        if not wanted and self._shards.host is None:
            return None
        values = self._shards.gather(slot, begin, end)
        return values if wanted else None


def least_in_few_bits() -> int:
    """Return the default size in bytes below which gradients are not sent in few bits."""
    return setting("BYTEPS_KEEP_BF16_BYTES", int)


def cut_parameters(
    param_groups: Sequence[dict[str, Any]],
    most_bytes: int,
    keeps: Callable[[torch.Tensor], bool] = lambda parameter: False,
) -> list[list[PlacedParameter]]:
    """Return the parameters that need a gradient, in the order of the groups, cut into buckets.

    Args:
        param_groups: parameter groups of a torch optimizer.
        most_bytes: largest size of a bucket's parameters, in bytes. A larger parameter gets a
            bucket of its own.
        keeps: function that splits parameters into two kinds. A bucket has parameters of one kind
            only.

    Raises:
        ValueError: no parameter needs a gradient, or servers cannot update a parameter's type.
    """
    open_buckets: dict[tuple[torch.dtype, torch.device, bool], list[PlacedParameter]] = {}
    full: list[list[PlacedParameter]] = []
    order: dict[torch.Tensor, int] = {}
    for number, group in enumerate(param_groups):
        for parameter in group["params"]:
            index = order.setdefault(parameter, len(order))
            if not parameter.requires_grad or parameter.numel() == 0:
                continue
            if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ValueError(
                    "servers update parameters of float32, bfloat16 and float16; number "
                    f"{index} (of group {number}) is {parameter.dtype}"
                )
            kind = parameter.dtype, parameter.device, keeps(parameter)
            places = open_buckets.setdefault(kind, [])
            begin = places[-1].end if places else 0
            size = (begin + parameter.numel()) * parameter.element_size()
            if places and size > most_bytes:
                full.append(places)
                places, begin = [], 0
                open_buckets[kind] = places
            places.append(PlacedParameter(begin, parameter))
    full.extend(open_buckets.values())
    if not full:
        raise ValueError("no parameter needs a gradient: there is nothing to optimize")
    return sorted(full, key=lambda places: order[places[0].parameter])


def make_buckets(
    param_groups: Sequence[dict[str, Any]],
    rule: Rule,
    *,
    name: str,
    ranks: list[int],
    average: bool,
    most_bytes: int,
    speculative: bool,
    form: WireType | None = None,
    keep_bytes: int | None = None,
) -> list[tuple[ServerBucket, FlatGradients]]:
    """Create and declare buckets named `name`/0, `name`/1, ..., and their gradients.

    Args:
        param_groups: parameter groups of a torch optimizer; see `cut_parameters`.
        rule: the update rule.
        name: name of the optimizer.
        ranks: the group that shares the parameters.
        average: whether to divide the summed gradients by the size of the group.
        most_bytes: largest size of a bucket; see `cut_parameters`.
        speculative: whether servers may be asked for speculative steps.
        form: type of blocks in which gradients travel. Parameters of fewer than two dimensions, or
            of less than `keep_bytes` (None: `least_in_few_bits`), travel in their own type.

    Raises:
        BytePSError: the servers refuse.
        ValueError: see `cut_parameters`.
    """
    group_of = {
        parameter: number
        for number, group in enumerate(param_groups)
        for parameter in group["params"]
    }
    least = least_in_few_bits() if keep_bytes is None else keep_bytes

    def keeps(parameter: torch.Tensor) -> bool:
        nbytes = parameter.numel() * parameter.element_size()
        return form is not None and (parameter.dim() < 2 or nbytes < least)

    made = []
    for number, places in enumerate(cut_parameters(param_groups, most_bytes, keeps)):
        first, numel = places[0].parameter, places[-1].end
        gradients = FlatGradients(places, numel, first.device)
        declaration = TensorDeclaration(
            name=f"{name}/{number}",
            dtype=first.dtype,
            numel=numel,
            average=average,
            group=ranks,
            device=first.device,
            wire_dtype=None if keeps(first) else form,
        )
        spec = BucketSpec(declarations=[declaration], rule=rule, speculative=speculative)
        made.append((_bucket(places, gradients, spec, group_of), gradients))
    return made


def _bucket(
    places: list[PlacedParameter],
    gradients: FlatGradients,
    spec: BucketSpec,
    group_of: dict[torch.Tensor, int],
) -> ServerBucket:
    return ServerBucket(places, lambda: gradients.tensor, spec, group_of=group_of)
