"""Parts of byteps.torch in isolation.

Phases of a server optimizer's step, flat parameters, registered memory, all-reduces on streams, and
the kernels of blocks.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from byteps.torch import BytePSError, c_lib, in_flight, operations, step_machine, wire
from byteps.torch.c10d import work as streamed_work
from byteps.torch.c10d.work import StreamedWork
from byteps.torch.server_tensor import (
    Codec,
    PlacedParameter,
    Rule,
    Step,
    laid_flat,
    read_encoded,
    write_encoded,
)
from byteps.torch.step_machine import Speculation, StepMachine, clip_scale

GROUPS: list[dict[str, Any]] = [
    {"lr": 0.1, "weight_decay": 0.01, "momentum": 0.0, "dampening": 0.0, "nesterov": False}
]
RATES = [(0.1, 0.01)]
RULE = Rule(is_adamw=False, groups=[(0.0, 0.0, 0.0, False)])


class Bucket:
    """Records its calls in a shared list, and tries steps like ServerBucket."""

    def __init__(self, name: str, calls: list[tuple[str, ...]], fails: str = "") -> None:
        self.name, self.calls, self.fails = name, calls, fails
        self.tried: Step | None = None

    def _note(self, call: str, *about: str) -> str:
        self.calls.append((self.name, call, *about))
        return call

    def push_step(self, step: Step) -> str:
        assert step.rates == RATES
        return self._note("push_step", str(step.number))

    def push(self, attempt: Step | None) -> str:
        self.tried = attempt
        return self._note("push", "tried" if attempt else "norm")

    def finish(self, step: Step) -> str | None:
        if self.tried is not None and (step.skip or step == self.tried):
            self._note("finish", "drop" if step.skip else "keep")
            return None
        return self._note("finish", "skip" if step.skip else f"{step.scale:g}")

    def wait(self, started: str, *, failed: bool = False) -> None:
        self._note("wait", started)
        if started == self.fails:
            raise BytePSError("server 0 was lost")

    def take_parameters(self) -> None:
        self._note("take")

    def give_up(self) -> None:
        self._note("give_up")


def machine_of(
    clip: str, fails: str = "", *, overlaps: bool = False
) -> tuple[StepMachine, list[tuple[str, ...]]]:
    """Make a machine; with `overlaps` a forward pass needs the last bucket first."""
    calls: list[tuple[str, ...]] = []
    buckets: list[Any] = [Bucket("a", calls), Bucket("b", calls, fails)]
    order = buckets[::-1] if overlaps else ()
    machine = StepMachine(buckets, RULE, Speculation(clip), name="it", forward_order=order)
    return machine, calls


def both(*call: str) -> list[tuple[str, ...]]:
    return [("a", *call), ("b", *call)]


@pytest.mark.parametrize(
    ("clip", "scale", "skip", "said", "waits"),
    [
        pytest.param("speculate", 1.0, False, "keep", False, id="kept"),
        pytest.param("speculate", 0.5, False, "0.5", True, id="made-again"),
        pytest.param("speculate", 0.5, True, "drop", False, id="dropped"),
        pytest.param("wait", 0.5, False, "0.5", True, id="made"),
        pytest.param("wait", 1.0, True, "skip", True, id="skipped"),
    ],
)
def test_a_step_of_two_phases(clip: str, scale: float, skip: bool, said: str, waits: bool) -> None:
    """The model takes parameters only when all buckets have theirs. So a rank never mixes the
    parameters of two steps."""
    machine, calls = machine_of(clip)
    machine.push(GROUPS)
    assert calls == both("push", "tried" if clip == "speculate" else "norm") + both("wait", "push")
    calls.clear()
    machine.finish(scale=scale, skip=skip)
    waited = both("wait", "finish") if waits else []
    assert calls == both("finish", said) + waited + both("take")
    assert machine.steps == (not skip)


def test_a_bucket_that_is_clipped_by_itself() -> None:
    """If one bucket is clipped by its own norm, the other bucket keeps its speculative
    parameters."""
    machine, calls = machine_of("speculate")
    machine.push(GROUPS)
    calls.clear()
    machine.finish(scale=1.0, skip=False, own={machine._buckets[1]: 0.5})
    assert calls == [("a", "finish", "keep"), ("b", "finish", "0.5"), ("b", "wait", "finish"),
                     *both("take")]  # fmt: skip


@pytest.mark.parametrize("clip", ["speculate", "wait"])
def test_gradients_of_a_scaled_loss(clip: str) -> None:
    """Steps that were tried and steps that were clipped both use gradients that are scaled back."""
    machine, calls = machine_of(clip)
    machine.push(GROUPS, 0.25)
    calls.clear()
    machine.finish(scale=1.0, skip=False)
    said = "keep" if clip == "speculate" else "0.25"
    assert [call for call in calls if call[1] == "finish"] == both("finish", said)
    machine.push(GROUPS, 0.25)
    calls.clear()
    machine.finish(scale=0.5, skip=False)
    assert [call for call in calls if call[1] == "finish"] == both("finish", "0.125")


def test_a_step_of_one_phase() -> None:
    machine, calls = machine_of("wait")
    for number in (1, 2):
        calls.clear()
        machine.update(GROUPS)
        assert calls == both("push_step", str(number)) + both("wait", "push_step") + both("take")
    assert machine.steps == 2


def test_after_two_clipped_steps_nothing_is_tried_before_one_that_is_not() -> None:
    machine, calls = machine_of("speculate")
    tried = []
    for scale, own in ((0.5, 1.0), (1.0, 0.5), (0.5, 1.0), (1.0, 1.0), (1.0, 1.0)):
        calls.clear()
        machine.push(GROUPS)
        tried.append(calls[0][2])
        machine.finish(scale=scale, skip=False, own={machine._buckets[1]: own})
    assert tried == ["tried", "tried", "norm", "norm", "tried"]


@pytest.mark.parametrize("phase", ["push", "finish"])
def test_no_parameters_are_taken_of_a_step_that_failed(phase: str) -> None:
    """If a step fails, both buckets are awaited, and no step begins before a state is loaded."""
    machine, calls = machine_of("wait", fails=phase)
    with pytest.raises(BytePSError, match="server 0 was lost"), machine.failing():
        machine.push(GROUPS)
        machine.finish(scale=1.0, skip=False)
    assert both("wait", phase)[0] in calls and calls[-1] == ("b", "wait", phase)
    assert machine.steps == 0
    with pytest.raises(BytePSError, match=r"it: an earlier step failed \(server 0 was lost\)"):
        machine.demand_no_failure()
    calls.clear()
    machine.begin_load()
    machine.end_load(7)
    assert calls == both("give_up")
    machine.demand_no_failure()
    assert machine.next_step(GROUPS) == (8, 1.0, False, RATES)


# A step that returns while its parameters are in flight.


def overlapped(clip: str = "wait", fails: str = "") -> tuple[StepMachine, list[tuple[str, ...]]]:
    """Make a machine after a pushed and finished step, with its calls cleared."""
    machine, calls = machine_of(clip, fails, overlaps=True)
    machine.push(GROUPS)
    calls.clear()
    machine.finish(scale=0.5, skip=False)
    return machine, calls


def test_a_forward_pass_takes_parameters_as_it_needs_them() -> None:
    """The parameters of the first layers are requested first. A module waits only for its own
    parameters."""
    machine, calls = overlapped()
    first, last = machine._buckets[1], machine._buckets[0]
    assert calls == [("b", "finish", "0.5"), ("a", "finish", "0.5")]
    assert machine.steps == 1 and machine.awaits_parameters
    calls.clear()
    machine.wait_for(first)
    assert calls == [("b", "wait", "finish"), ("b", "take")]
    machine.wait_for(first)
    assert machine.awaits_parameters and len(calls) == 2
    machine.wait_for(last)
    assert calls[2:] == [("a", "wait", "finish"), ("a", "take")]
    assert not machine.awaits_parameters


def test_ranks_that_run_modules_in_another_order_take_parameters_in_the_same_one() -> None:
    machine, calls = overlapped()
    calls.clear()
    machine.wait_for(machine._buckets[0])
    assert [call[0] for call in calls if call[1] == "take"] == ["b", "a"]


@pytest.mark.parametrize("reader", ["push", "wait_for_parameters"])
def test_whoever_needs_all_parameters_waits_for_all(reader: str) -> None:
    machine, calls = overlapped()
    calls.clear()
    if reader == "push":
        machine.push(GROUPS)
    else:
        step_machine.wait_for_parameters()
    assert [call[:2] for call in calls[:4]] == [
        ("b", "wait"), ("b", "take"), ("a", "wait"), ("a", "take"),
    ]  # fmt: skip


def test_a_tried_step_has_its_parameters_when_it_ends() -> None:
    machine, calls = machine_of("speculate", overlaps=True)
    machine.push(GROUPS)
    machine.finish(scale=1.0, skip=False)
    assert calls[-2:] == both("take") and not machine.awaits_parameters


def test_parameters_that_do_not_come_fail_the_step() -> None:
    machine, calls = overlapped(fails="finish")
    with pytest.raises(BytePSError, match="server 0 was lost"):
        machine.wait_for(machine._buckets[1])
    with pytest.raises(BytePSError, match="an earlier step failed"):
        machine.demand_no_failure()
    calls.clear()
    machine.begin_load()
    assert calls == [("a", "wait", "finish"), *both("give_up")]
    assert not machine.awaits_parameters


def test_a_job_that_is_left_takes_parameters_in_flight_with_it() -> None:
    """If the model leaves a job with parameters in flight, no forward pass mixes parameters of two
    steps."""
    machine, calls = overlapped()
    calls.clear()
    in_flight.forget()
    assert calls == [] and machine.awaits_parameters
    step_machine.wait_for_parameters()
    with pytest.raises(BytePSError, match=r"the job was left while .* Load a checkpoint"):
        machine.wait_for(machine._buckets[1])
    machine.begin_load()
    assert not machine.awaits_parameters


def test_groups_change_in_rate_and_decay_alone() -> None:
    machine, _ = machine_of("wait")
    machine.demand_same_rule([GROUPS[0] | {"lr": 7.0, "weight_decay": 0.0}])
    with pytest.raises(ValueError, match="it: parameter groups changed in more than"):
        machine.demand_same_rule([GROUPS[0] | {"momentum": 0.9}])


def test_gradients_are_scaled_down_to_the_limit_alone() -> None:
    assert clip_scale(0.5, 1.0) == 1.0
    assert math.isclose(clip_scale(4.0, 1.0), 0.25, rel_tol=1e-6)
    assert clip_scale(math.nan, 1.0) == clip_scale(math.inf, 1.0) == 1.0


# Parameters laid end to end: views of a flat tensor, or copies of kept values.


class Quarters:
    """Keeps multiples of a quarter as integers."""

    def __init__(self, values: torch.Tensor) -> None:
        self.kept = (values * 4).round().to(torch.int8)

    def read(self) -> torch.Tensor:
        return self.kept.float() / 4

    def write(self, values: torch.Tensor) -> None:
        self.kept = (values * 4).round().to(torch.int8)


def test_plain_parameters_become_views_and_encoded_ones_stay() -> None:
    plain = torch.nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    encoded = torch.nn.Parameter(torch.tensor([9.0, 9.0, 9.0]))
    address = encoded.data_ptr()
    codecs: dict[torch.Tensor, Codec] = {encoded: Quarters(torch.tensor([0.25, -0.5, 1.0]))}
    places = [PlacedParameter(0, plain), PlacedParameter(6, encoded)]
    flat = laid_flat(places, 10, torch.device("cpu"), codecs)
    assert flat.tolist() == [1, 2, 3, 4, 0, 0, 0.25, -0.5, 1.0, 0]
    assert plain.data_ptr() == flat.data_ptr() and encoded.data_ptr() == address

    flat.copy_(torch.arange(10.0) + 0.3)
    write_encoded(places, flat, codecs)
    assert codecs[encoded].read().tolist() == [6.25, 7.25, 8.25], "as nearly as it can"
    assert torch.equal(plain.flatten(), flat[:4])
    assert torch.allclose(flat[6:9], torch.tensor([6.3, 7.3, 8.3])), "the copy keeps them all"

    codecs[encoded].write(torch.tensor([1.0, 2.0, 3.0]))
    read_encoded(places, flat, codecs)
    assert flat[6:9].tolist() == [1, 2, 3]


# Memory that is registered once, and forgotten when torch frees it.


class Engine:
    """Replaces the extension and counts registered memory."""

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
    monkeypatch.setattr(in_flight, "c_lib", made)
    monkeypatch.setattr(in_flight, "_known", {})
    monkeypatch.setattr(torch.UntypedStorage, "resize_", torch.UntypedStorage.resize_)
    return made


def test_a_storage_is_known_once_and_forgotten_when_it_is_resized(extension: Engine) -> None:
    tensor = torch.zeros(1000)
    views = tensor[:300], tensor[300:]
    for _ in range(2):
        for view in views:
            in_flight.will_be_sent(view)
    assert list(extension.known.values()) == [(tensor.data_ptr(), 4000)]
    for round_ in range(2, 5):
        # Megatron and its trainers use both interfaces, the old one and the new one.
        (tensor.storage() if round_ % 2 else tensor.untyped_storage()).resize_(0)
        assert extension.known == {}
        (tensor.storage().resize_(1000) if round_ % 2 else tensor.untyped_storage().resize_(4000))
        in_flight.will_be_sent(views[1])
        assert extension.added == round_
        assert list(extension.known.values()) == [(tensor.data_ptr(), 4000)]
    # Another storage at any place has no effect.
    torch.zeros(10).untyped_storage().resize_(0)
    assert len(extension.known) == 1
    del tensor, views, view
    assert extension.known == {} == in_flight._known


def test_memory_that_was_freed_is_not_summed() -> None:
    tensor = torch.zeros(1000)
    tensor.untyped_storage().resize_(0)
    for check in (
        lambda: wire.check(tensor, "g"),
        lambda: operations.start_update(lambda: pytest.fail("it was started"), tensor),
    ):
        with pytest.raises(ValueError, match="ends at byte 4,000 of a storage of 0 bytes"):
            check()
    wire.check(torch.zeros(0), "g")
    wire.check(torch.zeros(5)[5:], "g")


# Queueing of an all-reduce on streams, and the lifetime of its tensors.


type Given = list[Landing]
"""Work that was queued on a stream."""


class Landing:
    come = False

    def query(self) -> bool:
        return self.come

    def wait(self, stream: Given) -> None:
        stream.append(self)


class Stream:
    def __init__(self) -> None:
        self.given: Given = []


_streams: dict[str, Stream] = {}
"""Streams by purpose."""


def land(stream: Any) -> Any:
    stream.given.append(landing := Landing())
    return landing


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Given:
    """The current stream. There is no stream for arriving sums yet."""
    given: Given = []
    _streams.clear()
    monkeypatch.setattr(
        streamed_work, "stream_for", lambda purpose, device: _streams.setdefault(purpose, Stream())
    )
    monkeypatch.setattr(streamed_work, "current_stream", lambda device: given)
    monkeypatch.setattr(streamed_work, "_has_streamed", False)
    monkeypatch.setattr(streamed_work, "_kept_short", {})
    monkeypatch.setattr(streamed_work, "_kept_long", {})
    monkeypatch.setattr(streamed_work, "_landing", type(streamed_work._landing)())
    monkeypatch.setattr(c_lib, "check", lambda: None)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    return given


def test_what_nobody_waits_for_is_queued_all_the_same(current: Given) -> None:
    StreamedWork([torch.ones(1)], land)
    assert len(_streams["landing"].given) == 1
    assert current == []


def test_with_one_queue_of_the_device_the_first_who_waits_queues_it(
    current: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    work = StreamedWork([torch.ones(1)], land)
    assert not _streams
    work.wait()
    work.wait()
    assert current == _streams["landing"].given * 2
    assert len(current) == 2


def test_tensors_are_kept_until_they_have_landed(
    current: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = [StreamedWork([torch.ones(1)], land, [torch.ones(2)]) for _ in range(3)]
    moments: list[Any] = [moment for moment, _ in streamed_work._landing]
    assert [len(tensors) for _, tensors in streamed_work._landing] == [2, 2, 2]
    for moment in moments[:2]:
        moment.come = True
    assert [work.is_completed() for work in works] == [True, True, False]
    StreamedWork([torch.ones(1)], land)
    assert next(moment for moment, _ in streamed_work._landing) is moments[2]
    landing = [moment for moment, _ in streamed_work._landing]
    monkeypatch.setattr(c_lib, "check", lambda: setattr(landing.pop(0), "come", True))
    with pytest.raises(IndexError):  # the waiter looks again when all sums have arrived
        streamed_work.await_all()
    assert not streamed_work._landing
    assert all(work.is_completed() for work in works)


def test_the_next_call_hears_of_a_failure(current: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    work = StreamedWork([torch.ones(1)], land)

    def fail() -> None:
        raise c_lib.BytePSError("worker 1 was lost")

    monkeypatch.setattr(c_lib, "check", fail)
    for call in (work.wait, work.result, streamed_work.await_all):
        with pytest.raises(c_lib.BytePSError, match="worker 1 was lost"):
            call()
    assert "worker 1" in str(work.exception())


def test_without_streams_there_is_nothing_to_await(
    current: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(c_lib, "check", lambda: pytest.fail("the job was looked at"))
    streamed_work.await_all()


# The GPU kernels of blocks produce the bits of the engine's codec.


FORMS = {"int8": wire.int8(), "int4": wire.int4()}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LIMIT_S = 300.0


def inputs(count: int, dtype: torch.dtype, bad: float | None) -> torch.Tensor:
    """Make values of both signs and many magnitudes, with blocks of zeros and of nearly zeros."""
    torch.manual_seed(count)
    values = torch.randn(count) * torch.logspace(-4, 4, count)
    values[256:384] = 0
    values[384:512] *= 1e-35
    if bad is not None:
        values[count // 2] = bad
    return values.to(dtype)


def compare(device: str) -> None:
    """Compare the kernels on this device with the engine on the CPU."""
    from byteps.torch import block_kernels

    for name, form in FORMS.items():
        for dtype in DTYPES.values():
            for count in (1, 129, 700):
                for bad in (None, float("nan"), float("inf")):
                    label = f"{name} {dtype} {count} {bad}"
                    given = inputs(count, dtype, bad)
                    encoded = form.empty(count, given.device)
                    other = torch.zeros_like(encoded, device=device)
                    lost = (torch.randn(count) * 0.01).bfloat16()
                    moved = lost.clone().to(device)
                    for lost_or_none, theirs in ((None, None), (lost, moved)):
                        for seed in (None, count * 0x123456789ABCDEF % 2**64):
                            wire.encode(given, form, encoded, lost_or_none, seed)
                            block_kernels.encode(given.to(device), form, other, theirs, seed)
                            assert torch.equal(encoded, other.cpu()), f"{label} {seed}"
                    assert torch.equal(lost, moved.cpu()), label
                    for skip in (0, min(5, count - 1), min(100, count - 1)):
                        want = torch.empty(count - skip, dtype=dtype)
                        got = torch.empty_like(want, device=device)
                        wire.decode(encoded, form, want, skip=skip)
                        block_kernels.decode(other, form, got, skip)
                        assert torch.equal(want.nan_to_num(3), got.cpu().nan_to_num(3)), label
                    if name == "int8":
                        held = torch.cat([inputs(count, dtype, None)[1:], torch.tensor([-0.0])])
                        held = held.to(dtype)
                        want, got = torch.empty_like(held), held.clone().to(device)
                        wire.add_differences(encoded, held, want)
                        block_kernels.add_differences(other, got, got)
                        assert torch.equal(want.nan_to_num(3), got.cpu().nan_to_num(3)), label
                        same = want == 0
                        assert torch.equal(want[same].signbit(), got.cpu()[same].signbit()), label


@pytest.mark.parametrize("name", FORMS)
def test_the_mean_of_what_is_rounded_by_chance_is_the_value(name: str) -> None:
    form, count, times = FORMS[name], 300, 4000
    torch.manual_seed(1)
    values, total = torch.randn(count), torch.zeros(count, dtype=torch.float64)
    out, decoded = form.empty(count, values.device), torch.empty(count)
    for number in range(times):
        wire.encode(values, form, out, seed=c_lib.chance_seed("values", number, 0))
        wire.decode(out, form, decoded)
        total += decoded
    largest = torch.stack([part.abs().max() for part in values.split(wire.BLOCK)])
    scale = (largest / (127 if name == "int8" else 7)).repeat_interleave(wire.BLOCK)[:count]
    # Error of a value: at most half a step, within five sigmas of the mean.
    error = ((total / times - values) / scale).abs()
    assert error.max() < 5 * 0.5 / times**0.5
    wire.encode(values, form, out)
    wire.decode(out, form, decoded)
    assert ((decoded - values) / scale).abs().max() > 0.4, (
        "to the nearest, some are nearly half off"
    )


@pytest.mark.slow
def test_kernels_of_blocks_compute_the_bits_of_the_engine() -> None:
    program = "from tests.unit.test_step_machine import compare; compare('cpu')"
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], check=True, env=env, timeout=LIMIT_S
    )


@pytest.mark.requires("gpu")
def test_on_a_gpu() -> None:
    compare("cuda")
