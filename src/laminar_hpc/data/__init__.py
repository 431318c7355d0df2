"""Prompts from rows, chat templates, tokenizers, and models by name."""
