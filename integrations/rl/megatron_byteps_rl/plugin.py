"""Plugin that verl imports in each of its processes, by ``VERL_USE_EXTERNAL_MODULES``.

It only uses verl's registries: of platforms, rollouts, replicas and, in ranks, of engines.
"""

from __future__ import annotations

import os

from . import engines, rollout

if os.environ.get("VERL_PLATFORM") == "cpu":
    from . import cpu

    cpu.name_vllm()
rollout.register()
# The engines are prepared only in the ranks of verl's worker groups.
if os.environ.get("WG_BACKEND") == "ray" and engines.are_wanted():
    engines.prepare(joins=engines.SPARE not in os.environ)
