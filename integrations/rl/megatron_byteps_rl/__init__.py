"""verl on the patched Megatron-LM: reinforcement learning with gradients summed by BytePS.

verl itself needs one line of its configuration for BytePS, and nothing of this package:
``actor_rollout_ref.actor.megatron.override_ddp_config={use_dpu_reduce: true}``. What is here runs
verl's trainer, its Megatron engine and its vLLM where there is no GPU, or no Transformer Engine,
and lets a run fail, and go on, where verl alone would wait.

================  =============================================================
``plugin``        what verl's processes import
``cpu``           the CPU as a platform of verl's
``engines``       verl's Megatron engines with Megatron's local layers
``rollout``       verl's vLLM rollout, whose update of weights can fail
``vllm_worker``   its part in a vLLM worker on a CPU
``__main__``      verl's trainer, again from its last checkpoint when it fails
``attempt``       one run of it, which ends when an actor died
================  =============================================================
"""
