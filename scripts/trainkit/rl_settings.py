"""Settings of a run of verl's trainer, and its command line: algorithm, layout, rollout,
gradients."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import rl_task

ALGORITHMS = {"grpo": "grpo", "ppo": "gae"}
"""Algorithms, with verl's advantage estimators."""
DEVICES = ("cpu", "cuda")
MODES = ("sync", "colocate_async")
"""Modes of verl, which differ in whether generation waits for the weights of the last update."""
EXTENSION = "megatron_byteps_rl.vllm_worker.Extension"
BYTEPS: Mapping[str, object] = {"use_dpu_reduce": True, "dpu_reduce_backend": "flat"}
"""Entries of ``override_ddp_config``. All ranks share this machine, so nothing would go to servers
without ``flat``."""
_COMMON = {
    "VERL_USE_EXTERNAL_MODULES": "megatron_byteps_rl.plugin",
    "VERL_USE_EXTERNAL_PLUGINS": "none",
    # Without this, every rank would compile Megatron's small fused functions in the first step.
    "TORCHDYNAMO_DISABLE": "1",
    "TQDM_DISABLE": "1",  # Megatron's engine would show a bar for each batch
    "RAY_worker_niceness": "0",  # Ray's default is 15
    "RAY_worker_register_timeout_seconds": "600",  # Ray's default, 60, is too short here
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",  # actor and critic log the same lines about their buckets
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}
ENVIRONMENTS: Mapping[str, Mapping[str, str]] = {
    "cpu": {
        **_COMMON,
        "VERL_PLATFORM": "cpu",
        "MEGATRON_CPU": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENGINE_READY_TIMEOUT_S": "3600",  # vLLM's default, 600, is too short on busy cores
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # with 1, each engine would have one more process
    },
    "cuda": {
        **_COMMON,
        "VERL_PLATFORM": "nvidia",
        "VERL_ENGINE_VENDOR": "local",  # see engines.register
        "MEGATRON_CPU": "0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron needs this with tensor parallelism
    },
}
"""Variables of every process of a run, by device. They are set before verl and Megatron are
imported."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Sums that a model has to learn, and settings for its training."""

    score: Callable[..., float]
    """The reward function; verl imports its file."""
    pairs: Sequence[tuple[int, int]]
    ask: Callable[[int, int], str]
    prompt_tokens: int
    response_tokens: int
    rate: float
    """Learning rate of the actor. The critic's is three times as high."""
    adapter_rate: float
    """Learning rate of the actor if adapters are trained."""
    at_once: int
    """Largest number of responses in a rank's batch."""
    bucket_mib: int
    """Size of the buffer in which weights travel to vLLM. The model's largest weight must fit."""


SUMS = Task(
    score=rl_task.compute_score,
    pairs=rl_task.PAIRS,
    ask=rl_task.prompt,
    prompt_tokens=rl_task.PROMPT_TOKENS,
    response_tokens=rl_task.RESPONSE_TOKENS,
    rate=1e-3,
    adapter_rate=1e-3,
    at_once=1 << 10,
    bucket_mib=16,
)
"""Task for the tiny model that `rl_task` makes."""
CHAT = Task(
    score=rl_task.score_last_number,
    pairs=rl_task.CHAT_PAIRS,
    ask=rl_task.ask_in_words,
    prompt_tokens=rl_task.CHAT_PROMPT_TOKENS,
    response_tokens=rl_task.CHAT_RESPONSE_TOKENS,
    rate=2e-5,
    adapter_rate=1e-3,
    at_once=8,  # each response has scores per token, for each word of a large vocabulary
    bucket_mib=512,
)
"""Task for a chat model."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a run of the example."""

    task: Task = SUMS

    algorithm: str = "grpo"
    device: str = "cpu"
    through_byteps: bool = True
    mode: str = "sync"
    ranks: int = 2
    tensor: int = 1
    sequence_parallel: bool = False
    pipeline: int = 1
    virtual: int = 1
    """Number of model parts on each pipeline rank."""
    context: int = 1
    expert: int = 1
    rollout_tensor: int = 1
    """Number of ranks that share a vLLM instance."""
    lora: int = 0
    """Rank of the trained adapters; 0: the whole model is trained."""
    merge: bool = False
    """Whether vLLM gets the adapters merged into its weights."""
    server_optimizer: bool = False
    """Whether the BytePS servers keep the optimizer."""
    steps: int = 20
    prompts: int = 16
    """Number of prompts per step."""
    responses: int = 8
    """Number of responses to each prompt."""
    updates: int = 2
    """Number of mini-batches per step."""
    save_every: int = 0
    """Steps between two checkpoints; 0: no checkpoints."""
    seed: int = 1
    model: Path
    """Folder of a Hugging Face model."""
    reward_model: Path | None = None
    """Folder of a model with one output, which scores responses. It runs on a vLLM of its own.
    None: a function scores responses."""
    questions: Path
    """Parquet file of prompts."""
    folder: Path
    """Folder for checkpoints and samples."""

    def __post_init__(self) -> None:
        for name, value, values in (
            ("algorithm", self.algorithm, tuple(ALGORITHMS)),
            ("device", self.device, DEVICES),
            ("mode", self.mode, MODES),
        ):
            if value not in values:
                raise ValueError(f"{name} {value!r} is not known; it can be {', '.join(values)}")
        if self.ranks % self.rollout_tensor:
            raise ValueError(
                f"{self.ranks} ranks cannot be cut into rollouts of {self.rollout_tensor}"
            )
        if self.ranks % (self.tensor * self.pipeline * self.context):
            raise ValueError(
                f"{self.ranks} ranks cannot be cut into tensor {self.tensor}, pipeline "
                f"{self.pipeline}, context {self.context}"
            )
        if self.prompts % self.updates or self.prompts * self.responses % (
            self.updates * self.ranks
        ):
            raise ValueError(
                f"{self.responses} responses to each of {self.prompts} prompts cannot be shared by "
                f"{self.updates} updates of {self.ranks} ranks"
            )

    def overrides(self) -> list[str]:
        """Return the arguments of ``python -m verl.trainer.main_ppo``."""
        values = self._algorithm() | self._rollout() | self._rewards() | self._trainer()
        for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"):
            megatron = f"{role}.megatron"
            values |= {
                f"{megatron}.tensor_model_parallel_size": self.tensor,
                f"{megatron}.sequence_parallel": self.sequence_parallel,
                f"{megatron}.pipeline_model_parallel_size": self.pipeline,
                f"{megatron}.context_parallel_size": self.context,
                f"{megatron}.expert_model_parallel_size": self.expert,
                f"{megatron}.use_remove_padding": False,
            }
            if self.virtual > 1:
                values[f"{megatron}.virtual_pipeline_model_parallel_size"] = self.virtual
        if self.lora:
            lora = "actor_rollout_ref.model.lora"
            values |= {f"{lora}.rank": self.lora, f"{lora}.merge": self.merge}
        if self.through_byteps:
            for role in ("actor_rollout_ref.actor", "critic"):
                ddp = f"+{role}.megatron.override_ddp_config"
                values |= {f"{ddp}.{name}": value for name, value in BYTEPS.items()}
                if self.server_optimizer:
                    values[f"{ddp}.dpu_optimizer"] = True
                    # Only this format can save the servers' state.
                    values[f"{role}.megatron.dist_ckpt_optim_fully_reshardable"] = True
        return [f"{name}={_text(value)}" for name, value in values.items()]

    def _at_once(self, updates: int) -> int:
        """Return the batch size, in responses, of a data-parallel rank in each of the `updates` of
        a step."""
        copies = self.ranks // (self.tensor * self.pipeline * self.context)
        # With virtual stages, the number of micro-batches must be a multiple of the number of
        # stages.
        turns = self.pipeline if self.virtual > 1 else 1
        of_rank = self.prompts * self.responses // copies // turns // updates
        return max(n for n in range(1, of_rank + 1) if of_rank % n == 0 and n <= self.task.at_once)

    def _algorithm(self) -> dict[str, object]:
        task, of_step, of_update = self.task, self._at_once(1), self._at_once(self.updates)
        rate = task.adapter_rate if self.lora else task.rate
        grpo = self.algorithm == "grpo"
        return {
            "model_engine": "megatron",
            "algorithm.adv_estimator": ALGORITHMS[self.algorithm],
            # KL to the reference is part of the loss in GRPO, and of the reward in PPO.
            "actor_rollout_ref.actor.use_kl_loss": grpo,
            "actor_rollout_ref.actor.kl_loss_coef": 0.005,
            "algorithm.use_kl_in_reward": not grpo,
            "algorithm.kl_ctrl.kl_coef": 0.005,
            "data.train_files": self.questions,
            "data.val_files": self.questions,
            "data.train_batch_size": self.prompts,
            "data.max_prompt_length": task.prompt_tokens,
            "data.max_response_length": task.response_tokens,
            "data.dataloader_num_workers": 0,
            "data.seed": self.seed,
            "actor_rollout_ref.model.path": self.model,
            "actor_rollout_ref.model.use_remove_padding": False,
            "actor_rollout_ref.actor.optim.lr": rate,
            "actor_rollout_ref.actor.ppo_mini_batch_size": self.prompts // self.updates,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": of_update,
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": of_step,
            "critic.optim.lr": 3 * task.rate,
            "critic.ppo_micro_batch_size_per_gpu": of_update,
            "critic.model.path": self.model,
            "critic.model.use_remove_padding": False,
        }

    def _rewards(self) -> dict[str, object]:
        values: dict[str, object] = {"reward.num_workers": 1}
        if self.reward_model is None:
            function = "reward.custom_reward_function"
            values |= {f"{function}.path": rl_task.__file__}
            return values | {f"{function}.name": self.task.score.__name__}
        model, rollout = "reward.reward_model", "reward.reward_model.rollout"
        values |= {
            f"{model}.enable": True,
            f"{model}.model_path": self.reward_model,
            # The reward model has a GPU of its own, so that answers are scored while others are
            # generated.
            f"{model}.enable_resource_pool": True,
            f"{model}.nnodes": 1,
            f"{model}.n_gpus_per_node": 1,
            f"{rollout}.name": "vllm",
            f"{rollout}.tensor_model_parallel_size": 1,
            f"{rollout}.max_model_len": self.task.prompt_tokens + self.task.response_tokens + 1,
            f"{rollout}.prompt_length": self.task.prompt_tokens,
            f"{rollout}.response_length": self.task.response_tokens,
        }
        return values | self._vllm_on_cpu(rollout, 1)

    def _rollout(self) -> dict[str, object]:
        rollout = "actor_rollout_ref.rollout"
        values: dict[str, object] = {
            f"{rollout}.name": "vllm",
            f"{rollout}.n": self.responses,
            f"{rollout}.seed": self.seed,
            f"{rollout}.calculate_log_probs": True,
            f"{rollout}.log_prob_micro_batch_size_per_gpu": self._at_once(1),
            f"{rollout}.tensor_model_parallel_size": self.rollout_tensor,
            f"{rollout}.max_model_len": self.task.prompt_tokens + self.task.response_tokens + 1,
            f"{rollout}.enforce_eager": True,
            f"{rollout}.agent.num_workers": 1,
            f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes": self.task.bucket_mib,
        }
        return values | self._vllm_on_cpu(rollout, self.rollout_tensor)

    def _vllm_on_cpu(self, rollout: str, tensor: int) -> dict[str, object]:
        """Return the settings that a vLLM of ``tensor`` ranks needs on a CPU; none on a GPU."""
        if self.device != "cpu":
            return {}
        values: dict[str, object] = {
            # vLLM cannot release memory on a CPU.
            f"{rollout}.free_cache_engine": False,
            f"+{rollout}.enable_sleep_mode": False,
            f"+{rollout}.engine_kwargs.vllm.worker_extension_cls": EXTENSION,
        }
        if tensor == 1:
            # vLLM runs in the engine's own process, so no shared memory can be left behind.
            values[f"+{rollout}.engine_kwargs.vllm.distributed_executor_backend"] = "uni"
        return values

    def _trainer(self) -> dict[str, object]:
        ray = "ray_kwargs.ray_init"
        gpus = self.ranks + (self.reward_model is not None)
        return {
            "trainer.use_v1": True,
            "trainer.v1.trainer_mode": self.mode,
            "trainer.nnodes": 1,
            "trainer.n_gpus_per_node": self.ranks,
            "trainer.device": self.device,
            "trainer.logger": "[console,file]",
            "trainer.total_training_steps": self.steps,
            "trainer.total_epochs": self.steps,
            "trainer.save_freq": self.save_every or -1,
            "trainer.test_freq": -1,
            "trainer.val_before_train": False,
            "trainer.balance_batch": False,
            "trainer.default_local_dir": self.folder / "checkpoints",
            "trainer.resume_mode": "auto" if self.save_every else "disable",
            "trainer.rollout_data_dir": self.folder / "samples",
            "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
            f"+{ray}.address": "local",  # not a cluster that happens to run on this machine
            # Number of CPUs that verl's processes request. In fact they share cores.
            f"{ray}.num_cpus": gpus * 3 + 8,
            f"+{ray}.num_gpus": gpus,
            f"+{ray}.include_dashboard": False,
            f"+{ray}._node_ip_address": "127.0.0.1",
            f"+{ray}.object_store_memory": 200 << 20,
        }

    def environment(self) -> dict[str, str]:
        """Return the variables of the run, in addition to this process's."""
        values = {
            **ENVIRONMENTS[self.device],
            "VERL_FILE_LOGGER_PATH": str(self.folder / "steps.jsonl"),
            "HF_HUB_OFFLINE": "1",  # all files are local
            "PYTHONWARNINGS": "ignore",
        }
        return {name: value for name, value in values.items() if name not in os.environ}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
