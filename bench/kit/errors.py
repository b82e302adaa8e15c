"""What goes wrong in a benchmark; a module of its own, since processes of ranks import it too."""

from __future__ import annotations


class LaunchError(Exception):
    """A launch did not end well; the text has the ends of its logs."""
