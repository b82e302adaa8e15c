"""Parameters laid end to end: as views of a flat tensor, or as copies of what they keep."""

from __future__ import annotations

import torch
from byteps.torch.flat import Codec, Place, laid_flat, read_encoded, write_encoded


class Quarters:
    """Keeps multiples of a quarter, as integers."""

    def __init__(self, values: torch.Tensor) -> None:
        self.kept = (values * 4).round().to(torch.int8)

    def read(self) -> torch.Tensor:
        return self.kept.float() / 4

    def write(self, values: torch.Tensor) -> None:
        self.kept = (values * 4).round().to(torch.int8)


def test_plain_parameters_become_views_and_encoded_ones_stay() -> None:
    plain = torch.nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    encoded = torch.nn.Parameter(torch.tensor([9.0, 9.0, 9.0]))
    place = encoded.data_ptr()
    codecs: dict[torch.Tensor, Codec] = {encoded: Quarters(torch.tensor([0.25, -0.5, 1.0]))}
    places = [Place(0, plain), Place(6, encoded)]
    flat = laid_flat(places, 10, torch.device("cpu"), codecs)
    assert flat.tolist() == [1, 2, 3, 4, 0, 0, 0.25, -0.5, 1.0, 0]
    assert plain.data_ptr() == flat.data_ptr() and encoded.data_ptr() == place

    flat.copy_(torch.arange(10.0) + 0.3)
    write_encoded(places, flat, codecs)
    assert codecs[encoded].read().tolist() == [6.25, 7.25, 8.25], "as nearly as it can"
    assert torch.equal(plain.flatten(), flat[:4])
    assert torch.allclose(flat[6:9], torch.tensor([6.3, 7.3, 8.3])), "the copy keeps them all"

    codecs[encoded].write(torch.tensor([1.0, 2.0, 3.0]))
    read_encoded(places, flat, codecs)
    assert flat[6:9].tolist() == [1, 2, 3]
