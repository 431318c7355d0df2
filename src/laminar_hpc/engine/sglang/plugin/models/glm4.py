"""SGLang's own GLM-4."""

from sglang.srt.models.glm4 import EntryClass

__all__ = ["EntryClass"]
