"""Recipes of Megatron-LM and Megatron-Bridge, as arguments or configs, for scripts/recipes.py."""
