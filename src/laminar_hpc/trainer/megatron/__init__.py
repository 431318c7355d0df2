"""The one adapter of Megatron-core: what is known of it, and of how it must be held."""
