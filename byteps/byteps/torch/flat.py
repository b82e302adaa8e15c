"""Parameters laid end to end in one flat tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from byteps.torch.server_rule import Segment, add_segment


class Place(NamedTuple):
    """Where a parameter lies in a flat tensor."""

    begin: int
    """Its first element there."""
    parameter: torch.Tensor

    @property
    def end(self) -> int:
        """Its last element there, plus one."""
        return self.begin + self.parameter.numel()

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The parameter's elements of a flat tensor, in the parameter's shape: a view."""
        return flat[self.begin : self.end].view(self.parameter.shape)


class Codec(Protocol):
    """How a parameter is kept whose memory does not hold its values as they are: fp8, for one."""

    def read(self) -> torch.Tensor:
        """Its values, of its shape and its nominal type."""

    def write(self, values: torch.Tensor) -> None:
        """It keeps these values, of its shape, as nearly as it can."""


Codecs = Mapping[torch.Tensor, Codec]
"""By parameter. One that is in it stays where it is: flat tensors have a copy of its values."""


def laid_flat(
    places: Sequence[Place], numel: int, device: torch.device, codecs: Codecs
) -> torch.Tensor:
    """A flat tensor of `numel` elements that the parameters become views of, with their values.

    Elements between parameters, which have one type, are 0. Parameters with a codec are copied.
    """
    flat = torch.zeros(numel, dtype=places[0].parameter.dtype, device=device)
    with torch.no_grad():
        read_encoded(places, flat, codecs)
        for place in places:
            if place.parameter not in codecs:
                part = place.of(flat)
                part.copy_(place.parameter.detach())
                place.parameter.data = part
    return flat


def read_encoded(places: Sequence[Place], flat: torch.Tensor, codecs: Codecs) -> None:
    """The flat tensor has the values of the parameters with a codec."""
    for place in places:
        if place.parameter in codecs:
            place.of(flat).copy_(codecs[place.parameter].read())


def write_encoded(places: Sequence[Place], flat: torch.Tensor, codecs: Codecs) -> None:
    """The parameters with a codec have the values of the flat tensor."""
    for place in places:
        if place.parameter in codecs:
            codecs[place.parameter].write(place.of(flat))


def segments_of(
    places: Sequence[Place],
    numel: int,
    group_of: Mapping[torch.Tensor, int],
    counts: Callable[[torch.Tensor], bool],
) -> list[Segment]:
    """Which parameter group each element belongs to, and whether its gradient counts in the norm.

    Args:
        places: in the order of the flat tensor.
        numel: elements of the flat tensor. Those between parameters are 0 and stay so.
        group_of: index of the parameter group of each parameter.
        counts: whether the gradient of a parameter counts.
    """
    segments: list[Segment] = []
    for place in places:
        end, group = segments[-1][:2] if segments else (0, group_of[place.parameter])
        if end < place.begin:
            add_segment(segments, place.begin, group, False)
        add_segment(segments, place.end, group_of[place.parameter], counts(place.parameter))
    if segments[-1][0] < numel:
        add_segment(segments, numel, segments[-1][1], False)
    return segments


class FlatGradients:
    """The gradients of parameters, in one flat tensor that is laid out as the parameters are."""

    def __init__(self, places: Sequence[Place], numel: int, device: torch.device) -> None:
        self._places = places
        dtype = places[0].parameter.dtype
        self.tensor = torch.zeros(numel, dtype=dtype, device=device)

    def collect(self) -> None:
        """Each parameter's gradient is in the flat tensor, wherever it was computed; 0 where there
        is none."""
        for place in self._places:
            part = place.of(self.tensor)
            if place.parameter.grad is None:
                part.zero_()
            elif place.parameter.grad.data_ptr() != part.data_ptr():
                part.copy_(place.parameter.grad)
            place.parameter.grad = part

    def zero(self) -> None:
        """Each parameter's gradient is 0, in the flat tensor."""
        self.tensor.zero_()
        for place in self._places:
            place.parameter.grad = place.of(self.tensor)
