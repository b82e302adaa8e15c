"""Hugging Face models in Megatron's training loop: load, train all of it or adapters, write back.

Built on Megatron-Bridge, which knows how the weights of each family of models are named and cut.
``pretrain_dpu_gpt.py`` calls this package when it is given ``--hf-model``:

==============  ===================================================================
``options``     the flags
``model``       a folder with a Hugging Face model: arguments, weights, LoRA adapters
``bridge``      Megatron-Bridge, imported without Transformer Engine where there is none
``preload``     Megatron-Bridge again, imported by an import: for fork servers
``package``     the model that ``make train HF=1`` trains, taken out of a Python package
==============  ===================================================================
"""
