"""The steps of an optimizer whose parameters servers keep, over all of its buckets.

A step takes one phase, or two where something is asked of the gradients before:

    update                    servers update as soon as they have the sum
    push, then finish         servers answer with the sum's squares, and, if the step is tried, with
                              the parameters that it would make. `finish` then says what it is:
                              not tried:  the servers update, or skip it
                              tried:      it is kept; or made again, since it is clipped; or dropped

A bucket may be pushed before `push`, while the backward pass runs (`push_early`). `finish` may
return while parameters are in flight, so that the next forward pass begins when its first ones are
there. Whatever ends a phase by an exception leaves the step half made: every later call raises
until a state is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from byteps.torch.arrivals import Arrivals
from byteps.torch.server_bucket import ServerBucket
from byteps.torch.server_tensor import Rule, Step
from byteps.torch.server_transfer import Started
from byteps.torch.session import BytePSError

CLIPS = ("speculate", "wait")
"""How steps are made that may be clipped; see Speculation."""

_LOST = 2
"""So many clipped steps in a row, and the next one waits."""
_TOLD_EACH = 200
"""Steps that were tried, between two messages about them."""


class Speculation:
    """Which steps servers try before their norm is known, and how that went.

    A step that is tried brings parameters that hold if nothing is clipped. If something is, they
    come down once more, after the gradients, as they would have without trying. After two clipped
    steps in a row nothing is tried before a step that is not clipped: trying has a cost for
    servers. All ranks know the same norms, and so decide the same.
    """

    def __init__(self, clip: str, *, useful: bool = True) -> None:
        """`clip`: one of CLIPS. `useful`: False where a step waits for nothing.

        Raises:
            ValueError: there is no such way to clip.
        """
        if clip not in CLIPS:
            raise ValueError(f"clip must be {' or '.join(map(repr, CLIPS))}, not {clip!r}")
        self.is_on = clip == "speculate" and useful
        """Whether steps may be tried at all."""
        self.tried = 0
        """Steps that were tried."""
        self.redone = 0
        """Of these, steps that were made again, since they were clipped."""
        self._clipped_in_a_row = 0
        self._told = (0, 0)

    @property
    def tries(self) -> bool:
        """Whether the next step is tried."""
        return self.is_on and self._clipped_in_a_row < _LOST

    def note(self, *, tried: bool, clipped: bool, skipped: bool = False) -> None:
        """A step was made. One that was skipped tells nothing of the next one."""
        self.tried += tried
        self.redone += tried and clipped and not skipped
        if not skipped:
            self._clipped_in_a_row = self._clipped_in_a_row + 1 if clipped else 0

    @property
    def clipped_in_a_row(self) -> int:
        """Of the last steps."""
        return self._clipped_in_a_row

    def go_on(self, clipped_in_a_row: int) -> None:
        """This rank comes to others, of whose last steps so many were clipped."""
        self._clipped_in_a_row = clipped_in_a_row

    def forget(self) -> None:
        """A state was loaded: ranks may have made different numbers of steps before."""
        self._clipped_in_a_row = 0

    def advice(self) -> str | None:
        """What to say of the last steps, once in a while, if trying them was of little use."""
        tried, redone = (now - then for now, then in zip(self._counts(), self._told, strict=True))
        if tried < _TOLD_EACH:
            return None
        self._told = self._counts()
        if redone * 4 < tried:
            return None
        return (
            f"{redone} of the last {tried} steps that servers tried were clipped, and made again; "
            "a larger limit of the norm would make more of them stand"
        )

    def _counts(self) -> tuple[int, int]:
        return self.tried, self.redone


_EPS = 1e-6
"""Added to a norm before it divides, by torch and by Megatron."""


def clip_scale(norm: float, max_norm: float) -> float:
    """The factor of gradients of this norm, clipped to `max_norm`; 1 where they are not finite."""
    return min(1.0, max_norm / (norm + _EPS)) if math.isfinite(norm) else 1.0


class StepMachine:
    """Makes steps. All members of a group make the same calls in the same order."""

    def __init__(
        self,
        buckets: Sequence[ServerBucket],
        rule: Rule,
        speculation: Speculation,
        *,
        name: str,
        forward_order: Sequence[ServerBucket] = (),
    ) -> None:
        """
        Args:
            buckets: all of this rank.
            rule: what servers were told of the parameter groups.
            speculation: decides which steps are tried.
            name: begins the errors.
            forward_order: all buckets, in the order in which a forward pass needs them. `finish`
                then returns while their parameters are in flight, unless the step was tried.
                Empty: it waits for all.
        """
        self.steps = 0
        """That were made."""
        self._buckets, self._rule, self._name = buckets, rule, name
        self._speculation = speculation
        self._forward_order = forward_order
        self._arrivals = Arrivals()
        if forward_order:
            _overlapping.add(self)
        self._failure = ""
        self._pushed: Step | None = None
        """What was pushed, if nothing is clipped."""
        self._tried = False

    # ------------------------------------------------------------------- before a step

    def demand_no_failure(self) -> None:
        """Raises BytePSError after a step that failed."""
        if self._failure:
            raise BytePSError(
                f"{self._name}: an earlier step failed ({self._failure}): load a checkpoint"
            )

    def demand_same_rule(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Raises ValueError if parameter groups changed in what servers were told once."""
        now = self._rule.groups_of(param_groups)
        if now != self._rule.groups:
            raise ValueError(
                f"{self._name}: parameter groups changed in more than learning rate and weight "
                f"decay: servers were told {self._rule.groups}, and now it is {now}"
            )

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Around parts of a step: whatever ends one of them, an interrupt too, leaves the step half
        made."""
        try:
            yield
        except BaseException as error:
            self._failure = str(error) or type(error).__name__
            raise

    # ------------------------------------------------------------------- parameters in flight

    @property
    def is_of_this_job(self) -> bool:
        """Whether the job was not left since the last step, with parameters in flight."""
        return not self._arrivals.are_lost

    @property
    def awaits_parameters(self) -> bool:
        """Whether parameters of the last step are still in flight."""
        return bool(self._arrivals)

    def wait_for(self, bucket: ServerBucket) -> None:
        """Block until the model has the parameters of a bucket that the last step made.

        Raises: as `finish`.
        """
        with self.failing():
            self._arrivals.wait_for(bucket)

    def wait_for_parameters(self) -> None:
        """Block until the model has all parameters that the last step made.

        Raises: as `finish`.
        """
        with self.failing():
            self._arrivals.wait_for_all()

    # ------------------------------------------------------------------- a step

    def next_step(self, param_groups: Sequence[dict[str, Any]], scale: float = 1.0) -> Step:
        """The next step with the rates of these groups, if nothing is clipped.

        `scale`: factor of the gradients, which undoes that of a scaled loss.
        """
        rates = [(float(group["lr"]), float(group["weight_decay"])) for group in param_groups]
        return Step(self.steps + 1, scale, False, rates)

    def update(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Make a step of which nothing is asked before; its parameters are there afterwards.

        Raises:
            BytePSError: a member or a server was lost, or members ask for different steps.
            RuntimeError: a rank of this host was lost.
        """
        step = self.next_step(param_groups)
        self._all(lambda bucket: bucket.push_step(step))
        self._take()
        self.steps += 1

    def push_early(
        self, bucket: ServerBucket, param_groups: Sequence[dict[str, Any]], scale: float = 1.0
    ) -> None:
        """The gradients of a bucket will not change any more: send them, before `push` does."""
        self._arrivals.wait_for(bucket)
        bucket.push_early(self.next_step(param_groups, scale) if self._speculation.tries else None)

    def push(self, param_groups: Sequence[dict[str, Any]], scale: float = 1.0) -> None:
        """Begin a step: afterwards buckets know their squares, of gradients that `scale` has not
        multiplied yet, and their zeros.

        Raises: as `update`.
        """
        self._arrivals.wait_for_all()  # those of modules that ran in no forward pass
        step = self.next_step(param_groups, scale)
        self._pushed, self._tried = step, self._speculation.tries
        self._all(lambda bucket: bucket.push(step if self._tried else None))

    def finish(
        self, *, scale: float, skip: bool, own: Mapping[ServerBucket, float] | None = None
    ) -> None:
        """Make the step that was pushed. Its parameters are there afterwards, or in flight: see
        `forward_order`.

        Args:
            scale: further factor of the gradients, 1 where they are not clipped.
            skip: change nothing.
            own: the factor in place of `scale` for buckets that are clipped by a norm of their own;
                the same buckets on all ranks that have them.

        Raises: as `update`.
        """
        assert self._pushed is not None
        pushed, scales = self._pushed, own or {}

        def start(bucket: ServerBucket) -> Started | None:
            factor = pushed.scale * scales.get(bucket, scale)
            return bucket.finish(pushed._replace(scale=factor, skip=skip))

        if self._forward_order and not self._tried:
            self._let_arrive(start)
        else:
            self._all(start)
            # When all buckets are there: a rank has the parameters of one step.
            self._take()
        self._pushed = None
        self.steps += not skip
        clipped = any(one != 1.0 for one in (scale, *scales.values()))
        self._speculation.note(tried=self._tried, clipped=clipped, skipped=skip)

    def _all(self, start: Callable[[ServerBucket], Started | None]) -> None:
        start_and_wait(
            self._buckets,
            start,
            lambda bucket, started, failed: bucket.wait(started, failed=failed),
        )

    def _let_arrive(self, start: Callable[[ServerBucket], Started | None]) -> None:
        try:
            for bucket in self._forward_order:
                started = start(bucket)
                assert started is not None  # the step was not tried
                self._arrivals.expect(bucket, started)
        except BaseException:
            self._arrivals.end()
            raise

    def _take(self) -> None:
        for bucket in self._buckets:
            bucket.take_parameters()

    # ------------------------------------------------------------------- states

    def begin_anew(self) -> None:
        """The servers were given parameters with no history."""
        self.steps = 0

    def begin_load(self) -> None:
        """A state is about to be loaded: nothing is left of a step that was begun."""
        self._arrivals.end()
        self._speculation.forget()
        for bucket in self._buckets:
            bucket.give_up()

    def end_load(self, steps: int) -> None:
        """The servers have a state after so many steps."""
        self.steps, self._failure = steps, ""


_overlapping: WeakSet[StepMachine] = WeakSet()
"""Machines of this process whose `finish` returns while parameters are in flight."""


def wait_for_parameters() -> None:
    """Block until models have all parameters of the steps that were made in this process. Whoever
    reads parameters outside a forward pass calls this before.

    Raises:
        BytePSError: some did not come; the text says why.
        RuntimeError: a rank of this host was lost.
    """
    for machine in list(_overlapping):
        if machine.is_of_this_job:
            machine.wait_for_parameters()


def start_and_wait[B, H](
    buckets: Sequence[B], start: Callable[[B], H | None], wait: Callable[[B, H, bool], None]
) -> None:
    """Start something for each bucket, if `start` does; wait for all of it, also when one fails:
    nothing is read or written any more when this returns or raises.

    Args:
        start: its error ends the round of starts.
        wait: is told whether anything has failed before.

    Raises:
        RuntimeError: the first one, which may be a BytePSError.
    """
    started: list[tuple[B, H]] = []
    errors: list[RuntimeError] = []
    try:
        for bucket in buckets:
            handle = start(bucket)
            if handle is not None:
                started.append((bucket, handle))
    except RuntimeError as error:
        errors.append(error)
    for bucket, handle in started:
        try:
            wait(bucket, handle, bool(errors))
        except RuntimeError as error:
            errors.append(error)
    if errors:
        raise errors[0]
