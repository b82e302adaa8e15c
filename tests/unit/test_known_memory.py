"""Memory that is registered once, and forgotten when torch gives it away."""

from __future__ import annotations

import pytest
import torch
from byteps.torch import memory, operations, tensors


class Engine:
    """Stands for the extension: counts what is known to it."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[int, int]] = {}
        self.added = 0

    def add_memory(self, address: int, size: int) -> int:
        self.added += 1
        self.known[self.added] = (address, size)
        return self.added

    def remove_memory(self, number: int) -> None:
        self.known.pop(number, None)


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    monkeypatch.setattr(memory, "c_lib", made)
    monkeypatch.setattr(memory, "_known", {})
    monkeypatch.setattr(torch.UntypedStorage, "resize_", torch.UntypedStorage.resize_)
    return made


def test_a_storage_is_known_once_and_forgotten_when_it_is_resized(extension: Engine) -> None:
    tensor = torch.zeros(1000)
    views = tensor[:300], tensor[300:]
    for _ in range(2):
        for view in views:
            memory.will_be_sent(view)
    assert list(extension.known.values()) == [(tensor.data_ptr(), 4000)]
    for round_ in range(2, 5):
        # As Megatron and trainers on it do; the old interface, and the new.
        (tensor.storage() if round_ % 2 else tensor.untyped_storage()).resize_(0)
        assert extension.known == {}
        (tensor.storage().resize_(1000) if round_ % 2 else tensor.untyped_storage().resize_(4000))
        memory.will_be_sent(views[1])
        assert extension.added == round_
        assert list(extension.known.values()) == [(tensor.data_ptr(), 4000)]
    # Another storage at any place is none of its business.
    torch.zeros(10).untyped_storage().resize_(0)
    assert len(extension.known) == 1
    del tensor, views, view
    assert extension.known == {} == memory._known


def test_memory_that_was_freed_is_not_summed() -> None:
    tensor = torch.zeros(1000)
    tensor.untyped_storage().resize_(0)
    for check in (
        lambda: tensors.check(tensor, "g"),
        lambda: operations.start_update(lambda: pytest.fail("it was started"), tensor),
    ):
        with pytest.raises(ValueError, match="ends at byte 4,000 of a storage of 0 bytes"):
            check()
    tensors.check(torch.zeros(0), "g")
    tensors.check(torch.zeros(5)[5:], "g")
