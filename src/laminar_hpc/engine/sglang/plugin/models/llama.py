"""SGLang's own Llama."""

from sglang.srt.models.llama import EntryClass

__all__ = ["EntryClass"]
