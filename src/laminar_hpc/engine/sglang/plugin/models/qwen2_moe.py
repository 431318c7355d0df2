"""SGLang's own Qwen2-MoE."""

from sglang.srt.models.qwen2_moe import EntryClass

__all__ = ["EntryClass"]
