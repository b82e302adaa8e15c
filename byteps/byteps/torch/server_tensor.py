"""A flat tensor of parameters that servers keep, as one rank declares it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from byteps.torch import c_lib, wire
from byteps.torch.declarations import TensorDeclaration, spec_of
from byteps.torch.operations import start_update, wait_update
from byteps.torch.server_rule import Rule, Segment, Step, cut_segments
from byteps.torch.tensors import DTYPES, current_stream

_KEEP, _DROP = 1, 2
"""Verdicts of the protocol: what becomes of the step that was tried."""


class ServerTensor:
    """A flat tensor of parameters whose fp32 values and moments servers keep.

    Gradients go up and parameters come down in the type that was declared. Gradients in blocks of
    few bits are answered with blocks of `wire.int8()`: what is to be added to the parameters. What
    is started is ended by `wait`; until then its tensors stay as they are.
    """

    def __init__(
        self,
        declaration: TensorDeclaration,
        rule: Rule,
        segments: Sequence[Segment],
        *,
        in_order: bool = False,
        speculative: bool = False,
        counts_zeros: bool = False,
    ) -> None:
        """Tell the servers.

        Args:
            declaration: what the members agree on; of a GPU, its current stream is used.
            rule: how parameters are updated.
            segments: which elements belong to which group; they cover the tensor.
            in_order: servers add the gradients in the order of ranks, not of arrival.
            speculative: there will be `push_try`; servers keep memory for the gradients.
            counts_zeros: servers count the gradients that are 0.

        Raises:
            BytePSError: a server refuses, or has too little memory.
        """
        self.numel = declaration.numel
        form = wire.of(declaration.dtype, declaration.wire_dtype)
        self.held_slot = len(rule.slot_names) if form.is_block else 0
        """Of what servers know that workers hold, which may differ from the parameters (slot 0)."""
        # Servers keep whole blocks, and round nothing that they add: feedback is the worker's.
        self._padded = form.values * -(-self.numel // form.values)
        declaration = replace(declaration, wire_dtype=replace(form, feedback=False))
        self._device = torch.device(declaration.device)
        self._tensor = c_lib.UpdatedTensor(
            *(spec_of(declaration), rule.is_adamw, rule.groups),
            *(cut_segments(segments, (0, self.numel), self._padded), DTYPES[declaration.dtype]),
            *(in_order, speculative, counts_zeros),
        )
        self._sums = torch.empty(self._tensor.num_partitions(), 2, dtype=torch.float64)
        self._is_open = False
        self._verdict = 0

    @property
    def squares(self) -> list[float]:
        """After `push_norm` or `push_try`: each partition's squares of what counts, added up; no
        finite number if any gradient is none."""
        return self._sums[:, 0].tolist()

    @property
    def zeros(self) -> int:
        """After `push_norm` or `push_try`: how many gradients that count are 0, if servers count
        them."""
        return int(self._sums[:, 1].sum().item())

    def push_step(self, gradients: torch.Tensor, parameters: torch.Tensor, step: Step) -> int:
        """Start; the servers update as soon as they have the sum. Both may be one tensor."""
        where = gradients.data_ptr(), parameters.data_ptr()
        return start_update(
            lambda: self._tensor.push_step(*where, step, self._last_word(), self._stream()),
            *(gradients, parameters),
        )

    def push_norm(self, gradients: torch.Tensor) -> int:
        """Start; the servers answer with the sum's squares."""
        where = gradients.data_ptr(), self._sums.data_ptr()
        return start_update(
            lambda: self._tensor.push_norm(*where, self._last_word(), self._stream()),
            gradients,
            numbers=self._sums,
        )

    def push_try(self, gradients: torch.Tensor, parameters: torch.Tensor, step: Step) -> int:
        """Start; the servers answer with the parameters as the step would make them, and with the
        sum's squares. Both tensors may be one. Then comes `keep`, `drop`, or `step`."""
        where = gradients.data_ptr(), parameters.data_ptr(), self._sums.data_ptr()

        def start() -> int:
            verdict, self._is_open = self._last_word(), True
            return self._tensor.push_try(*where, step, verdict, self._stream())

        return start_update(start, gradients, parameters, numbers=self._sums)

    def keep(self) -> None:
        """The step that was tried stands. Nothing is sent: what is started next says so."""
        self._verdict = _KEEP if self._is_open else 0

    def drop(self) -> None:
        """The step that was tried, if there is one, was none. Nothing is sent."""
        self._verdict = _DROP if self._is_open else 0

    def give_up(self) -> None:
        """Drop the step that was tried, if nothing was said of it: it failed on some rank."""
        if self._is_open and not self._verdict:
            self._verdict = _DROP

    def _last_word(self) -> int:
        self.give_up()
        verdict, self._is_open, self._verdict = self._verdict, False, 0
        return verdict

    def step(self, parameters: torch.Tensor, step: Step) -> int:
        """Start; after push_norm or push_try, the servers update."""

        def start() -> int:
            self._is_open, self._verdict = False, 0
            return self._tensor.step(parameters.data_ptr(), step, self._stream())

        return start_update(start, parameters)

    def load(self, slot: int, values: torch.Tensor) -> None:
        """Put fp32 values, on the CPU, into a slot. Slot 0 comes first, zeroes the others, and is
        what workers hold until `held_slot` is loaded."""
        values = torch.nn.functional.pad(values, (0, self._padded - self.numel)).contiguous()
        wait_update(start_update(lambda: self._tensor.load(slot, values.data_ptr()), values))

    def read(self, slot: int, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """The fp32 values of a slot, on the CPU: of elements `begin` to `end`, or to the last."""
        end = self.numel if end is None else end
        values = torch.empty(end - begin)
        if begin != end:
            self._read(slot, begin, end, values)
        return values

    def settle(self) -> None:
        """Say what becomes of the step that was tried, if it was, before the next push does."""
        if self._verdict:
            self._read(0, 0, 0, torch.empty(1))

    def _read(self, slot: int, begin: int, end: int, values: torch.Tensor) -> None:
        # Other ranks have not said it yet, and this one says it again with its next push.
        where = begin, end, values.data_ptr()
        wait_update(start_update(lambda: self._tensor.read(slot, *where, self._verdict), values))

    def wait(self, handle: int) -> None:
        """Until what was started has ended; raises BytePSError if it failed."""
        wait_update(handle)

    def _stream(self) -> int:
        return current_stream(self._device)
