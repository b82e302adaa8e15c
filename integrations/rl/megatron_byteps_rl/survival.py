"""Synchronous trainer of verl that goes on when a rank's process is lost: a spare takes its place.

The other processes stay: ranks, vLLM, reward workers, the transfer queue. All ranks leave the old
job, join a new one, make their models anew and load the last checkpoint.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import Any

import ray
import transfer_queue
from ray.experimental import internal_kv
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from . import warm_worker
from .attempt import REPLACED
from .engines import SPARE
from .metrics_file import keep_metrics

_POOL = "global_pool"
"""verl's name for the GPUs of actor, critic, reference and rollout."""
_ANSWER_S = 60.0
"""Longest wait, in seconds, for an answer of a rank. The rank's call of the failed step must end
first."""
_JOIN_S = 180.0
"""Longest wait for all ranks to join the new job."""
_QUEUE_S = 120.0
"""Longest wait for responses that are being generated."""


class NotReplacedError(RuntimeError):
    """The run cannot go on with the processes that are left."""


class Trainer(PPOTrainerSync):
    """Synchronous trainer of verl with spares."""

    spares = 1
    """Number of spare processes."""

    def _setup(self) -> None:
        trainer_base.create_colocated_worker_cls = warm_worker.create
        super()._setup()
        groups = [self.actor_rollout_wg, *([self.critic_wg] if self.use_critic else [])]
        self._groups: list[Any] = groups
        self._places = ray.get([worker.location.remote() for worker in self._workers])
        self._started = 0
        self._waiting: list[Any] = []
        self._show()
        self._refill()

    @property
    def _workers(self) -> list[Any]:
        workers: list[Any] = self._groups[0].workers
        return workers

    def _show(self) -> None:
        print(f"ranks are processes {[pid for pid, *_ in self._places]}", flush=True)

    def fit(self, agent_loop_manager: Any) -> None:
        """Train to the end. Losses that spares can replace do not end training."""
        while True:
            try:
                return super().fit(agent_loop_manager)
            except ray.exceptions.RayError as error:
                try:
                    self._recover()
                except (NotReplacedError, ray.exceptions.RayError) as reason:
                    print(f"error: no spare took over: {reason}", flush=True)
                    raise error from reason

    # ----------------------------------------------------------------- spares

    def _refill(self) -> None:
        """Start spares until there are as many as wanted. They import in the background."""
        pool = self.resource_pool_manager.resource_pool_dict[_POOL]
        made, per_node = self._groups[0].ray_cls_with_init, pool.store[0]
        prefix = self._groups[0].name_prefix
        while len(self._waiting) < self.spares:
            rank = self._started % len(self._workers)
            variables = {"WG_BACKEND": "ray", "WG_PREFIX": prefix, SPARE: "1"}
            variables["RAY_LOCAL_WORLD_SIZE"] = str(per_node)
            name = f"{prefix}spare_{self._started}"
            made.update_options({"runtime_env": {"env_vars": variables}, "name": name})
            spare = made(
                placement_group=pool.get_placement_groups()[rank // per_node],
                placement_group_bundle_idx=rank % per_node,
                use_gpu=pool.use_gpu,
                num_gpus=1 / pool.max_colocate_count,
                device_name=self.config.trainer.device,
            )
            self._waiting.append(spare)
            self._started += 1

    def _lost(self) -> list[int]:
        """Return the ranks whose processes are lost.

        Raises:
            NotReplacedError: another rank does not answer, or no rank is lost.
        """
        calls = [worker.location.remote() for worker in self._workers]
        ray.wait(calls, num_returns=len(calls), timeout=_ANSWER_S)
        lost = []
        for rank, call in enumerate(calls):
            try:
                ray.get(call, timeout=0)
            except ray.exceptions.RayActorError:
                lost.append(rank)
            except ray.exceptions.GetTimeoutError:
                raise NotReplacedError(f"rank {rank} gave no answer for {_ANSWER_S:g} s") from None
        if not lost:
            raise NotReplacedError("no rank was lost")
        return lost

    def _replace(self, rank: int) -> dict[str, str]:
        """Put a spare of the same machine in the place of a lost rank. Return the spare's
        variables."""
        _, node, gpus = self._places[rank]
        for spare in self._waiting:
            with contextlib.suppress(ray.exceptions.RayError):
                pid, at, _ = ray.get(spare.location.remote(), timeout=_ANSWER_S)
                if at != node:
                    continue
                self._waiting.remove(spare)
                gone = self._workers[rank]._actor_id.hex()
                for group in self._groups:
                    group.workers[rank] = spare
                self._places[rank] = pid, node, gpus
                internal_kv._internal_kv_put(REPLACED + gone, b"1")
                return {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
        raise NotReplacedError(f"rank {rank} was lost, and its machine has no spare")

    # ----------------------------------------------------------------- recovery

    def _recover(self) -> None:
        """Replace lost ranks, and load the last checkpoint. Training can then go on."""
        began = time.monotonic()
        lost = self._lost()
        before = list(self._places)
        variables = {rank: self._replace(rank) for rank in lost}
        address, port = ray.get(self._workers[0].get_available_master_addr_port.remote())
        common = {"MASTER_ADDR": address, "MASTER_PORT": port}
        common["WORLD_SIZE"] = str(len(self._workers))
        joining = [
            worker.begin.remote({**common, "RANK": str(rank), **variables.get(rank, {})})
            for rank, worker in enumerate(self._workers)
        ]
        self._empty_queue()
        ray.get(joining, timeout=_JOIN_S)
        self._make_models()
        self._init_dataloader()
        self.replay_buffer = self._build_replay_buffer()
        self.local_trigger_step = 0
        self._load_checkpoint()
        self.on_init_end()
        keep_metrics(self.config.trainer.project_name, self.config.trainer.experiment_name)
        for rank in lost:
            print(
                f"rank {rank} (process {before[rank][0]}) was lost; a spare (process "
                f"{self._places[rank][0]}) took its place; all models are loaded after "
                f"{time.monotonic() - began:.1f} s, again from step {self.global_steps}",
                flush=True,
            )
        self._show()
        self._refill()

    def _make_models(self) -> None:
        """Make the models of all roles, as verl's ``_setup`` does."""
        if self.use_critic:
            config = trainer_base.omega_conf_to_dataclass(self.config.critic)
            self.critic_wg.reset()
            self.critic_wg.set_loss_fn(partial(trainer_base.value_loss, config=config))
        self.actor_rollout_wg.init_model()

    def _empty_queue(self) -> None:
        """Wait for responses that are being generated, then drop all prompts and responses."""
        deadline = time.monotonic() + _QUEUE_S
        while True:
            entries = (transfer_queue.kv_list("train") or {}).get("train", {})
            states = [tag["status"] for tag in entries.values() if tag.get("is_prompt")]
            if not {"pending", "running"} & set(states):
                break
            if time.monotonic() > deadline:
                raise NotReplacedError(f"vLLM did not end its requests in {_QUEUE_S:g} s")
            time.sleep(0.2)
        if entries:
            transfer_queue.kv_clear(keys=list(entries), partition_id="train")


def install(spares: int) -> None:
    """Make verl use this trainer in this process, with this number of spares."""
    Trainer.spares = spares
    trainer_base.TRAINER_REGISTRY["sync"] = Trainer
