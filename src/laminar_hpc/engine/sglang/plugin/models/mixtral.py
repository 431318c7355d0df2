"""SGLang's own Mixtral."""

from sglang.srt.models.mixtral import EntryClass

__all__ = ["EntryClass"]
