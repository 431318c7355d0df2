"""Laminar: asynchronous RL post-training of language models on Megatron-core, SGLang and NCCL."""

__version__ = "0.1.0"
