"""Patches a Megatron that a user has: a checkout, a plain folder, or the installed megatron-core.

``series`` reads upstream.lock and the series of patches, ``hunks`` applies them in memory,
``writing`` changes files as a whole or not at all, ``target`` decides what is done. All of it needs
nothing but Python's standard library. The project's own scripts, which assemble the patched
upstreams, use the same modules.
"""

from byteps.patching.series import PatchError, home

__all__ = ["PatchError", "home"]
