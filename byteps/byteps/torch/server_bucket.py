"""Parameters that servers keep in fp32 and update, in flat tensors of one type and device."""

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
    Place,
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
    """How the servers know a bucket, and what they are asked to do."""

    declarations: Sequence[TensorDeclaration]
    """Of what this rank sends, in the wire dtype: one for each of `pieces`, or one of the whole.
    Each names its group's ranks; the first of them loads what servers begin with."""
    rule: Rule
    pieces: Sequence[Piece] = ()
    """As `whole_pieces` cuts the bucket for the ranks of `host`."""
    host: HostRanks | None = None
    """The ranks of this host that sum first; None: nobody does."""
    in_order: bool = False
    """Gradients are added in the order of ranks."""
    speculative: bool = False
    """Servers may be asked to try a step."""
    counts_zeros: bool = False
    """Servers count the gradients that are 0."""
    savers: Sequence[int] = ()
    """The ranks of which each saves a share of what they all send; none: all that send it."""
    gaps: Sequence[Range] = ()
    """Elements whose gradients another bucket has sent: they count as 0 here, also for the scale of
    their block."""


class ServerBucket:
    """Parameters of one type and device. Their gradients go up, they come down updated.

    Both travel in the wire dtype, that of the declarations; where these name blocks of few bits,
    gradients go up in blocks, and what is added to the parameters comes down. Where the parameters
    have the wire dtype too, those of an update come down into their place. Else, as with parameters
    of bf16 and gradients of fp32, they come down into the gradients' memory, whose content is used
    up then, and are rounded here, to nearest even as servers round. Those of a step that is tried
    come into the gradients' memory in any case: what is answered has been sent, so that nobody
    needs it.

    Where the ranks of a host sum first, they do so in the type of the gradients, each sends a
    shard, and they gather what comes down. All of them make the same calls in the same order, but
    for `squares`, `zeros`, `read` and `load`.
    """

    def __init__(
        self,
        places: Sequence[Place],
        gradients: Callable[[], torch.Tensor],
        spec: BucketSpec,
        *,
        group_of: Mapping[torch.Tensor, int],
        counts: Callable[[torch.Tensor], bool] = lambda parameter: True,
        check: GradientCheck | None = None,
        codecs: Mapping[torch.Tensor, Codec] | None = None,
    ) -> None:
        """Lay the parameters side by side, as the gradients are, and tell the servers.

        Args:
            places: in the order of the flat tensors.
            gradients: returns those of all parameters, flat, on their device. They may be moved
                between steps, but not be of another size.
            spec: what the servers are told.
            group_of: index of the parameter group of each parameter.
            counts: whether this rank's copy of a parameter counts in the norm of the gradients.
            check: fails in the step where a gradient that was pushed early has changed since.
            codecs: of the parameters that are not kept as plain values.

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
        """The ranks that send the same elements."""
        self._savers = list(spec.savers) or self._members
        self.is_first = self._members[0] == session.rank() and not members_of_job.is_late()
        """Whether this rank loads what it sends into the servers; those of a job that runs have
        it."""
        self._skipped = Step(1, 1.0, True, [(0.0, 0.0)] * len(spec.rule.groups))
        self._check = check
        self._pushed: Started | None = None
        self._tried: Step | None = None
        self._lies_in_gradients = False
        """Whether what came down has to be copied to the parameters."""

    def close(self) -> None:
        """Give the servers' state back; see :meth:`ServerTensor.close`."""
        self._shards.close()

    # ------------------------------------------------------------------- figures of a push

    @property
    def squares(self) -> list[float]:
        """Of `push`: the sum of the gradients' squares, in parts, of what this rank sends."""
        return self._shards.squares

    @property
    def zeros(self) -> int:
        """Of `push`: how many summed gradients of what this rank sends are 0, if servers count
        them."""
        return self._shards.zeros

    @property
    def local(self) -> int:
        """This rank's place among those of its host that send a shard each; else 0."""
        return self._shards.local

    def of_host(self, values: Sequence[float]) -> list[list[float]]:
        """What each of the ranks gives that sum a bucket first, in one order on all of them."""
        return self._shards.of_host(values)

    # ------------------------------------------------------------------- gradients go up

    def push_step(self, step: Step) -> Started:
        """Start; the servers update as soon as they have the sum."""
        return self._transfer.push(
            self._without_gaps(self._gradients()),
            lambda tensor, sent, landing: tensor.push_step(sent, landing, step),
            target=self._target(),
        )

    def push_early(self, attempt: Step | None) -> None:
        """The gradients will not change any more: send them. `push` then goes on."""
        self.forget_push()
        gradients = self._gradients()
        if self._check is not None:
            self._check.note(gradients)
            # Servers send parameters into the memory that was pushed.
            gradients = gradients.clone()
        self._pushed = self._push(attempt, gradients)

    def push(self, attempt: Step | None) -> Started:
        """Start, unless it was; the servers answer with the sum's squares.

        Args:
            attempt: a step that the servers try; its parameters come with the squares, into the
                memory of the gradients.

        Raises:
            RuntimeError: gradients are checked, and one has changed since it was pushed.
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
        """If gradients were sent for a step that was not made, since they are computed anew: wait
        until nothing reads or writes their memory any more."""
        started, self._pushed = self._pushed, None
        if self._check is not None:
            self._check.forget()
        if started is None:
            return
        self._transfer.end(started)
        if self._shards.has_blocks:
            feedback.drop()  # it is of gradients that are computed anew
        if self._tried is not None:
            self._shards.drop()
            return
        self._transfer.discard(lambda tensor, landing: tensor.step(landing, self._skipped))

    # ------------------------------------------------------------------- parameters come down

    def finish(self, step: Step) -> Started | None:
        """After `push`: make the step, or skip it. What was started is returned, None if nothing
        had to be."""
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
        """Where parameters of an update come down to; None: where gradients lie."""
        self._lies_in_gradients = self._shards.dtype != self.parameters.dtype
        return None if self._lies_in_gradients else self.parameters

    def wait(self, started: Started, *, failed: bool = False) -> None:
        """Until what was started has ended. If another bucket has `failed` before, the ranks of the
        host are not waited for.

        Raises:
            BytePSError: it failed.
            RuntimeError: a rank of the host was lost.
        """
        if failed:
            self._transfer.end(started)
        else:
            self._transfer.wait(started)

    def take_parameters(self) -> None:
        """The model has what has come down."""
        if self._lies_in_gradients:
            self._transfer.take(self.parameters)
        write_encoded(self.places, self.parameters, self._codecs)

    def reread_parameters(self) -> None:
        """The model's parameters were changed by others, as by a checkpoint that is loaded."""
        read_encoded(self.places, self.parameters, self._codecs)

    def settle(self) -> None:
        """Servers hear now what becomes of the step that was tried last: the state that they have
        is of all steps.

        Raises:
            BytePSError: a server was lost.
        """
        self._shards.settle()

    def give_up(self) -> None:
        """A checkpoint is loaded: drop a step that was tried and neither kept nor dropped. What was
        sent early may be of a step that failed, on this rank or another one."""
        started, self._pushed = self._pushed, None
        if started is not None:
            with suppress(session.BytePSError):
                self._transfer.end(started)
        self._shards.give_up()

    # ------------------------------------------------------------------- what servers keep

    def load_parameters(self) -> None:
        """Give the servers the model's parameters, with no history. Called on the first rank; where
        hosts sum first, on all ranks of the first host."""
        self._shards.load(0, self.parameters.float().cpu())

    def load(self, slot: int, values: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Give the servers a slot: for each parameter a tensor of its shape and any float type; 0
        where there is none."""
        flat = torch.zeros(self.numel)
        for place in self.places:
            if place.parameter in values:
                place.of(flat).copy_(values[place.parameter])
        self._shards.load(slot, flat)

    @property
    def held_slot(self) -> int:
        """What servers keep that the model is to have: the parameters, or, where they send what is
        added to the model's, what they know that it has."""
        return self._shards.held_slot

    def load_held(self) -> None:
        """Where servers send what is added to the model's parameters: tell them what the model has,
        after `load`. Called as `load_parameters`."""
        if self.held_slot > 0:
            self._shards.load(self.held_slot, self.parameters.float().cpu())

    def pull_parameters(self) -> None:
        """The model has what servers know of it."""
        self.parameters.copy_(self.gather(self.held_slot, 0, self.numel))
        write_encoded(self.places, self.parameters, self._codecs)

    @property
    def owned(self) -> list[Range]:
        """The elements that this rank saves: its equal share of each shard that it sends, as it
        would own in Megatron's distributed optimizer."""
        found = []
        for first, last in self._shards.own:
            size = -(-(last - first) // len(self._savers))
            begin = first + self._savers.index(session.rank()) * size
            found.append((min(begin, last), min(begin + size, last)))
        return found

    def read(self, slot: int, begin: int, end: int) -> torch.Tensor:
        """What the servers keep of these elements, which this rank sends, in fp32, on the CPU."""
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
        """What the servers keep of any elements. Where hosts sum first, all ranks of the host call
        this. None if it is not `wanted` on this rank."""
        if not wanted and self._shards.host is None:
            return None
        values = self._shards.gather(slot, begin, end)
        return values if wanted else None


def least_in_few_bits() -> int:
    """Gradients of fewer bytes keep their bits where others do not, unless it is said otherwise."""
    return setting("BYTEPS_KEEP_BF16_BYTES", int)


def cut_parameters(
    param_groups: Sequence[dict[str, Any]],
    most_bytes: int,
    keeps: Callable[[torch.Tensor], bool] = lambda parameter: False,
) -> list[list[Place]]:
    """The parameters that need a gradient, in the order of the groups, bucket by bucket.

    Args:
        param_groups: of a torch optimizer.
        most_bytes: of a bucket's parameters, at most, but for one larger parameter.
        keeps: whether a parameter goes with others of its kind for which this is true.

    Raises:
        ValueError: there are none, or one has a type that servers do not update.
    """
    open_buckets: dict[tuple[torch.dtype, torch.device, bool], list[Place]] = {}
    full: list[list[Place]] = []
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
            places.append(Place(begin, parameter))
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
    """Buckets that the servers know, as `name`/0, `name`/1, ..., and their gradients.

    Args:
        param_groups: of a torch optimizer; see `cut_parameters`, also of `most_bytes`.
        rule: how they are updated.
        name: of the optimizer.
        ranks: the group that shares the parameters.
        average: divide the summed gradients by the size of the group.
        most_bytes: of a bucket.
        speculative: servers may be asked to try a step.
        form: blocks in which gradients travel, but for those that keep their bits: of fewer than
            two dimensions, or of less than `keep_bytes` (None: `least_in_few_bits`).

    Raises:
        BytePSError: the servers refuse.
        ValueError: as `cut_parameters`.
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
    places: list[Place],
    gradients: FlatGradients,
    spec: BucketSpec,
    group_of: dict[torch.Tensor, int],
) -> ServerBucket:
    return ServerBucket(places, lambda: gradients.tensor, spec, group_of=group_of)
