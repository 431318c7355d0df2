"""SGLang's own Gemma-3 without images."""

from sglang.srt.models.gemma3_causal import EntryClass

__all__ = ["EntryClass"]
