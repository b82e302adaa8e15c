"""verl on the patched Megatron-LM: reinforcement learning with gradients summed by BytePS.

For BytePS, verl needs only a line of configuration, not this package:
``actor_rollout_ref.actor.megatron.override_ddp_config={use_dpu_reduce: true}``. This package runs
verl's trainer, its Megatron engine and its vLLM without a GPU or without Transformer Engine. It
also makes a run fail and restart in cases in which verl alone would wait for ever.

================  =============================================================
``plugin``        imported by verl's processes
``cpu``           the CPU as a platform of verl
``engines``       verl's Megatron engines with Megatron's local layers
``rollout``       verl's vLLM rollout, with weight updates that can fail
``rewards``       verl's reward worker, for a reward model with GPUs of its own
``vllm_worker``   the rollout's part in a vLLM worker on a CPU
``__main__``      verl's trainer, restarted from its last checkpoint after a failure
``attempt``       a run of the trainer that ends when an actor dies that no spare replaces
``survival``      verl's synchronous trainer, in which spares replace lost ranks
``warm_worker``   verl's process of a rank, which can join a second job
``store``         the copy of a run's checkpoints in an object store
``metrics_file``  the file of verl's file logger
================  =============================================================
"""
