"""verl on the patched Megatron-LM: reinforcement learning with gradients summed by BytePS.

verl itself needs one line of its configuration for BytePS, and nothing of this package:
``actor_rollout_ref.actor.megatron.override_ddp_config={use_dpu_reduce: true}``. What is here lets
verl's PPO trainer, worker groups and Megatron engine run where there is no GPU, or no Transformer
Engine, with rollouts by ``transformers`` and by Megatron's own inference engine.

====================  =============================================================
``devices``           what a CPU or GPUs need to be told beforehand
``cpu``               the CPU as a platform of verl's
``engines``           verl's Megatron engines with Megatron's local layers
``memory``            the peak memory of each phase on GPUs
``rollout``           a rollout of verl's: generation by ``transformers``, with log-probabilities
``megatron_rollout``  another: Megatron's inference engine, in a layout of its own
``resharding``        weights from the layout of training to the rollout's
``workers``           verl's workers, with generation
``trainer``           verl's PPO trainer, without inference servers
``reward``            the reward as a Megatron model: its configuration and its values
``reward_group``      its worker group in verl's trainer
``reward_training``   trains such a model
``settings``          which algorithm, layout and route, as overrides of verl's configuration
``task``              sums of two digits, and a reward that can be checked
====================  =============================================================
"""
