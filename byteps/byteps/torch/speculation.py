"""Which steps servers try before their gradients' norm is known."""

from __future__ import annotations

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
