# Copyright (c) 2025 the Megatron-BytePS authors. SPDX-License-Identifier: Apache-2.0

"""Which ranks share a data-parallel group, and on which hosts they are, from sizes alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How a model is split, in Megatron's words."""

    world: int
    """Ranks."""
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    """Of experts; None: as of the rest."""
    experts: int = 0
    """Of a layer; 0: it has none."""
    pipeline_last: bool = True
    """Ranks of a stage are neighbours: without ``--use-tp-pp-dp-mapping``."""
    weight_shards: int = 1
    """Ranks that hold a part each of a tensor-parallel weight."""
    expert_weight_shards: int = 1

    def __post_init__(self) -> None:
        """Raises ValueError where the ranks cannot be split so."""
        for what, size in (
            ("tensor x pipeline x context parallelism", self._dense),
            ("expert, expert tensor and pipeline parallelism", self._sparse),
        ):
            if self.world % size:
                raise ValueError(f"{self.world} ranks cannot be split by {size}, the {what}")

    @property
    def _dense(self) -> int:
        return self.tensor * self.pipeline * self.context * self.weight_shards

    @property
    def _sparse(self) -> int:
        tensor = self.tensor if self.expert_tensor is None else self.expert_tensor
        return tensor * self.pipeline * self.expert * self.expert_weight_shards

    def groups(self, kind: str) -> list[list[int]]:
        """Ranks of each data-parallel group, context parallelism included, of dense or expert
        gradients."""
        from ...parallel_state import RankGenerator, _inject_gtp_remat_axis

        order = "tp-cp-ep-dp-pp" if self.pipeline_last else "tp-cp-ep-pp-dp"
        if kind == "dense":
            made = RankGenerator(
                tp=self.tensor,
                ep=1,
                dp=self.world // self._dense,
                pp=self.pipeline,
                cp=self.context,
                order=_inject_gtp_remat_axis(order, after="tp"),
                gtp_remat=self.weight_shards,
            )
            return [list(ranks) for ranks in made.get_ranks("dp-cp")]
        made = RankGenerator(
            tp=self.tensor if self.expert_tensor is None else self.expert_tensor,
            ep=self.expert,
            dp=self.world // self._sparse,
            pp=self.pipeline,
            cp=1,
            order=_inject_gtp_remat_axis(order, after="ep"),
            gtp_remat=self.expert_weight_shards,
        )
        return [list(ranks) for ranks in made.get_ranks("dp")]

    @property
    def has_expert_groups(self) -> bool:
        """Whether experts are reduced over groups of their own."""
        tensor = self.tensor if self.expert_tensor is None else self.expert_tensor
        return self.experts > 0 and (self.expert > 1 or tensor != self.tensor)

    def by_host(self, kind: str, gpus_per_host: int) -> Mapping[tuple[int, ...], float]:
        """The host of each member of each group, and how many groups have the same."""
        return Counter(
            tuple(rank // gpus_per_host for rank in ranks) for ranks in self.groups(kind)
        )
