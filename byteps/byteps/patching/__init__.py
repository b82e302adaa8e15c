"""Patches a user's Megatron: a checkout, a plain folder, or the installed megatron-core.

``series`` reads upstream.lock and the series of patches. ``hunks`` applies patches in memory.
``writing`` changes all files or none. ``target`` decides which files change. These modules need
only Python's standard library, because the project's own scripts assemble the patched upstreams
with them.
"""

from byteps.patching.series import PatchError, home

__all__ = ["PatchError", "home"]
