"""Megatron's functional tests' arguments, trained small on a CPU through both backends."""
