"""SGLang's own Qwen2, without the attention by chunks of long sequences (Qwen2.5-1M's
dual_chunk_attention_config), which neither transformers nor the trainer has: within the first chunk, beyond
which no run goes (config/rope.py, `positions`), it is plain attention."""

from typing import Any

from sglang.srt.models.qwen2 import Qwen2ForCausalLM as Stock


class Qwen2ForCausalLM(Stock):
    """Takes the name of SGLang's class, by which a config.json asks for it."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        config.dual_chunk_attention_config = None
        super().__init__(config, *args, **options)


EntryClass = Qwen2ForCausalLM
