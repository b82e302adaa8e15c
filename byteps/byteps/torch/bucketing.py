"""The parameters of an optimizer in buckets of one type and device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from byteps.torch.declarations import TensorDeclaration
from byteps.torch.figures import setting
from byteps.torch.flat import FlatGradients, Place
from byteps.torch.server_bucket import BucketSpec, ServerBucket
from byteps.torch.server_rule import Rule
from byteps.torch.wire import WireType


def is_kept(dim: int, nbytes: int) -> bool:
    """Whether gradients of so many dimensions and bytes keep their bits where others do not."""
    return dim < 2 or nbytes < int(setting("BYTEPS_KEEP_BF16_BYTES"))


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
        form: blocks in which gradients travel, but for those that keep their bits.

    Raises:
        BytePSError: the servers refuse.
        ValueError: as `cut_parameters`.
    """
    group_of = {
        parameter: number
        for number, group in enumerate(param_groups)
        for parameter in group["params"]
    }
    made = []
    for number, places in enumerate(
        cut_parameters(param_groups, most_bytes, lambda p: form is not None and _keeps(p))
    ):
        first, numel = places[0].parameter, places[-1].end
        gradients = FlatGradients(places, numel, first.device)
        declaration = TensorDeclaration(
            name=f"{name}/{number}",
            dtype=first.dtype,
            numel=numel,
            average=average,
            group=ranks,
            device=first.device,
            wire_dtype=None if form is None or _keeps(first) else form,
        )
        spec = BucketSpec(declarations=[declaration], rule=rule, speculative=speculative)
        made.append((_bucket(places, gradients, spec, group_of), gradients))
    return made


def _keeps(parameter: torch.Tensor) -> bool:
    return is_kept(parameter.dim(), parameter.numel() * parameter.element_size())


def _bucket(
    places: list[Place],
    gradients: FlatGradients,
    spec: BucketSpec,
    group_of: dict[torch.Tensor, int],
) -> ServerBucket:
    return ServerBucket(places, lambda: gradients.tensor, spec, group_of=group_of)
