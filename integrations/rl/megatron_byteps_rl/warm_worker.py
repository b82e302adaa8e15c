"""Process of a rank in verl, changed so that it can join a new job after another rank was lost, and
so that a spare process can take the place of a lost one."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Iterator, Mapping
from typing import Any

import ray
import torch.distributed

from . import engines
from .engines import SPARE


class _Fresh(Mapping[str, Any]):
    """Keyword arguments of which each call gets a copy, because verl's workers change their
    settings."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = dict(given)

    def __getitem__(self, name: str) -> Any:
        return copy.deepcopy(self._given[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)


def create(class_dict: dict[str, Any]) -> Any:
    """Do the same as verl's ``create_colocated_worker_cls``, with a class whose ``begin`` joins a
    job, even for the second time in a process."""
    from verl.single_controller.ray import RayClassWithInitArgs, create_colocated_worker_cls

    for role in class_dict.values():
        role.kwargs = _Fresh(role.kwargs)
    plain: Any = create_colocated_worker_cls(class_dict).cls.__ray_actor_class__

    class WorkerDict(plain):
        """The roles of a rank. A spare has none before ``begin``."""

        def __init__(self) -> None:
            if SPARE in os.environ:
                _import_all()
            else:
                super().__init__()

        def begin(self, environment: dict[str, str]) -> None:
            """Leave the job, if this process is in one, and join the job that the variables
            describe. Later calls make the models anew. Blocks until all ranks call it."""
            self.worker_dict: dict[str, Any] = {}
            _leave()
            os.environ.pop(SPARE, None)
            os.environ.update(environment)
            if engines.are_wanted():
                engines.join()
            plain.__init__(self)

        def location(self) -> tuple[int, str, str]:
            """Return the process id, the id of the Ray node, and the visible GPUs."""
            node = ray.get_runtime_context().get_node_id()
            return os.getpid(), node, os.environ.get("CUDA_VISIBLE_DEVICES", "")

    return RayClassWithInitArgs(cls=ray.remote(WorkerDict))


def _import_all() -> None:
    """Import all that the roles import when they make models."""
    import byteps.torch  # noqa: F401
    import transfer_queue  # noqa: F401
    import verl.checkpoint_engine
    import verl.utils.checkpoint.megatron_checkpoint_manager
    import verl.workers.engine.megatron
    import verl.workers.rollout.vllm_rollout.vllm_rollout  # noqa: F401


def _leave() -> None:
    """Leave BytePS, Megatron's groups and torch.distributed. Sums in flight fail."""
    from megatron.core import parallel_state
    from megatron.core.distributed.dpu_reduce import hooks

    gc.collect()  # models of Megatron and their hooks are in cycles
    hooks.shutdown()
    parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
