"""Hugging Face models in Megatron's layouts: what is trained, and what must come out."""
