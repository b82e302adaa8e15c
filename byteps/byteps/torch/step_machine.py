"""Steps of an optimizer whose parameters servers keep, over all buckets of the optimizer.

A step has one phase, or two if it needs the norm or the zeros of the gradients first:

    update                    servers update as soon as they have the sum
    push, then finish         servers answer with the sums of squares and, for a speculative step,
                              with the parameters after it. `finish` then decides:
                              not speculative: the servers update, or skip it
                              speculative: it is kept, repeated with clipping, or dropped

A bucket may be pushed before `push`, while the backward pass runs (`push_early`). `finish` may
return while parameters are in flight, so that the next forward pass begins when its first
parameters are there. An exception in a phase leaves the step incomplete: every later call raises
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
"""Values of `clip`; see Speculation."""

_LOST = 2
"""Number of clipped steps in a row after which the next step is not speculative."""
_TOLD_EACH = 200
"""Number of speculative steps between two log messages about them."""


class Speculation:
    """Decides which steps are speculative (made before the norm is known), and counts the outcomes.

    A speculative step pulls parameters that are right if gradients are not clipped. If they are
    clipped, the parameters are pulled again, after the push, as without speculation. Speculation
    costs servers time. So after two clipped steps in a row, steps are not speculative until a step
    is not clipped. All ranks know the same norms, so they make the same decisions.
    """

    def __init__(self, clip: str, *, useful: bool = True) -> None:
        """`clip`: a value of CLIPS. `useful`: False if no step waits for a norm.

        Raises:
            ValueError: `clip` is not in CLIPS.
        """
        if clip not in CLIPS:
            raise ValueError(f"clip must be {' or '.join(map(repr, CLIPS))}, not {clip!r}")
        self.is_on = clip == "speculate" and useful
        """Whether steps may be speculative at all."""
        self.tried = 0
        """Number of speculative steps."""
        self.redone = 0
        """Number of speculative steps that were clipped and therefore repeated."""
        self._clipped_in_a_row = 0
        self._reported = (0, 0)

    @property
    def tries(self) -> bool:
        """Return whether the next step is speculative."""
        return self.is_on and self._clipped_in_a_row < _LOST

    def note(self, *, tried: bool, clipped: bool, skipped: bool = False) -> None:
        """Record a step. A skipped step does not influence the next one."""
        self.tried += tried
        self.redone += tried and clipped and not skipped
        if not skipped:
            self._clipped_in_a_row = self._clipped_in_a_row + 1 if clipped else 0

    @property
    def clipped_in_a_row(self) -> int:
        """Return the current number of clipped steps in a row."""
        return self._clipped_in_a_row

    def go_on(self, clipped_in_a_row: int) -> None:
        """Take over the number of clipped steps in a row from the ranks of a running job, which
        this rank joins."""
        self._clipped_in_a_row = clipped_in_a_row

    def forget(self) -> None:
        """Reset after a state was loaded. Ranks may have made different numbers of steps before."""
        self._clipped_in_a_row = 0

    def advice(self) -> str | None:
        """Return a log message, once in a while, if speculation was of little use."""
        tried, redone = (
            now - then for now, then in zip(self._counts(), self._reported, strict=True)
        )
        if tried < _TOLD_EACH:
            return None
        self._reported = self._counts()
        if redone * 4 < tried:
            return None
        return (
            f"{redone} of the last {tried} steps that servers tried were clipped, and made again; "
            "a larger limit of the norm would make more of them stand"
        )

    def _counts(self) -> tuple[int, int]:
        return self.tried, self.redone


_EPS = 1e-6
"""Constant that torch and Megatron add to a norm before they divide by it."""


def clip_scale(norm: float, max_norm: float) -> float:
    """Return the factor that clips gradients of this norm to `max_norm`; 1 if the norm is not
    finite."""
    return min(1.0, max_norm / (norm + _EPS)) if math.isfinite(norm) else 1.0


class StepMachine:
    """Makes steps of an optimizer. All members of a group make the same calls in the same order."""

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
            buckets: all buckets of this rank.
            rule: the rule with which buckets were declared.
            speculation: decides which steps are speculative.
            name: prefix of error messages.
            forward_order: all buckets, in the order in which a forward pass needs them. `finish`
                then returns while their parameters are in flight, unless the step was speculative.
                Empty: `finish` waits for all parameters.
        """
        self.steps = 0
        """Number of steps made."""
        self._buckets, self._rule, self._name = buckets, rule, name
        self._speculation = speculation
        self._forward_order = forward_order
        self._arrivals = Arrivals()
        if forward_order:
            _overlapping.add(self)
        self._failure = ""
        self._pushed: Step | None = None
        """The pushed step, before clipping."""
        self._tried = False

    # ------------------------------------------------------------------- before a step

    def demand_no_failure(self) -> None:
        """Raise BytePSError after a failed step."""
        if self._failure:
            raise BytePSError(
                f"{self._name}: an earlier step failed ({self._failure}): load a checkpoint"
            )

    def demand_same_rule(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Raise ValueError if a fixed option of a parameter group has changed."""
        now = self._rule.groups_of(param_groups)
        if now != self._rule.groups:
            raise ValueError(
                f"{self._name}: parameter groups changed in more than learning rate and weight "
                f"decay: servers were told {self._rule.groups}, and now it is {now}"
            )

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Return a context for parts of a step. Any exception in it, even an interrupt, makes the
        step a failed one."""
        try:
            yield
        except BaseException as error:
            self._failure = str(error) or type(error).__name__
            raise

    # ------------------------------------------------------------------- parameters in flight

    @property
    def is_of_this_job(self) -> bool:
        """Return whether the model still belongs to this job. False if the job ended while
        parameters were in flight, so that they were lost."""
        return not self._arrivals.are_lost

    @property
    def awaits_parameters(self) -> bool:
        """Return whether parameters of the last step are still in flight."""
        return bool(self._arrivals)

    def wait_for(self, bucket: ServerBucket) -> None:
        """Block until the model has the parameters of a bucket after the last step.

        Raises: as `finish`.
        """
        with self.failing():
            self._arrivals.wait_for(bucket)

    def wait_for_parameters(self) -> None:
        """Block until the model has all parameters after the last step.

        Raises: as `finish`.
        """
        with self.failing():
            self._arrivals.wait_for_all()

    # ------------------------------------------------------------------- a step

    def next_step(self, param_groups: Sequence[dict[str, Any]], scale: float = 1.0) -> Step:
        """Return the next step, with the rates of these groups and without clipping.

        `scale`: factor for the gradients that undoes loss scaling.
        """
        rates = [(float(group["lr"]), float(group["weight_decay"])) for group in param_groups]
        return Step(self.steps + 1, scale, False, rates)

    def update(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Make a step that needs no norm; wait for its parameters.

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
        """Push a bucket's gradients before `push`. They will not change any more."""
        self._arrivals.wait_for(bucket)
        bucket.push_early(self.next_step(param_groups, scale) if self._speculation.tries else None)

    def push(self, param_groups: Sequence[dict[str, Any]], scale: float = 1.0) -> None:
        """Begin a step: push all gradients, and wait for their sums of squares (before `scale` is
        applied) and for the number of zeros.

        Raises: as `update`.
        """
        # Some modules may not have run in the forward pass, and so have not waited for their
        # parameters.
        self._arrivals.wait_for_all()
        step = self.next_step(param_groups, scale)
        self._pushed, self._tried = step, self._speculation.tries
        self._all(lambda bucket: bucket.push(step if self._tried else None))

    def finish(
        self, *, scale: float, skip: bool, own: Mapping[ServerBucket, float] | None = None
    ) -> None:
        """Make the step that was pushed. Afterwards its parameters are there. With a
        `forward_order` they may still be in flight.

        Args:
            scale: clipping factor for the gradients, 1 if they are not clipped.
            skip: whether to skip the step and change nothing.
            own: factors that replace `scale` for buckets that are clipped by norms of their own.
                All ranks that have such a bucket pass it.

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
            # Parameters are taken when all buckets have theirs, so that no rank mixes parameters of
            # two steps.
            self._take()
        self._pushed = None
        self.steps += not skip
        clipped = any(factor != 1.0 for factor in (scale, *scales.values()))
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
                # The step was not speculative, so finish has started a transfer.
                assert started is not None
                self._arrivals.expect(bucket, started)
        except BaseException:
            self._arrivals.end()
            raise

    def _take(self) -> None:
        for bucket in self._buckets:
            bucket.take_parameters()

    # ------------------------------------------------------------------- states

    def begin_anew(self) -> None:
        """Reset the step count, after parameters without moments were loaded into the servers."""
        self.steps = 0

    def begin_load(self) -> None:
        """Drop a step that was begun, because a state is about to be loaded."""
        self._arrivals.end()
        self._speculation.forget()
        for bucket in self._buckets:
            bucket.give_up()

    def end_load(self, steps: int) -> None:
        """Set the step count to that of the loaded state."""
        self.steps, self._failure = steps, ""


_overlapping: WeakSet[StepMachine] = WeakSet()
"""Machines of this process whose `finish` returns while parameters are in flight."""


def wait_for_parameters() -> None:
    """Block until models have all parameters of the steps made in this process. Call this before
    parameters are read outside a forward pass.

    Raises:
        BytePSError: parameters did not arrive; the text says why.
        RuntimeError: a rank of this host was lost.
    """
    for machine in list(_overlapping):
        if machine.is_of_this_job:
            machine.wait_for_parameters()


def start_and_wait[B, H](
    buckets: Sequence[B], start: Callable[[B], H | None], wait: Callable[[B, H, bool], None]
) -> None:
    """Call `start` for each bucket, then `wait` for each handle, even after a failure. So when this
    returns or raises, nothing reads or writes the buckets' memory.

    Args:
        start: returns a handle or None. After an error no more buckets are started.
        wait: function whose last argument says whether a bucket has failed.

    Raises:
        RuntimeError: the first error, which may be a BytePSError.
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
