"""The live weights under Hugging Face names, put together from the shards of all trainer ranks."""
