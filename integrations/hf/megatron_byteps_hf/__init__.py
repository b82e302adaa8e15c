"""Loads Hugging Face models, trains all their weights or adapters in Megatron's loop, and writes
them.

It is built on Megatron-Bridge, which maps and shards the weights of each family of models.
``pretrain_dpu_gpt.py`` calls this package with ``--hf-model``:

==============  ===================================================================
``options``     the flags
``model``       a folder with a Hugging Face model: arguments, weights, files
``adapters``    LoRA, DoRA and canonical LoRA on it
``bridge``      imports Megatron-Bridge, also without Transformer Engine
``preload``     imports Megatron-Bridge when it is imported: for fork servers
``package``     the model of ``make train HF=1``, extracted from a Python package
==============  ===================================================================
"""
