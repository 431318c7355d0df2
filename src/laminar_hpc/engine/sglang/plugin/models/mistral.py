"""SGLang's own Mistral, with the sliding window of its config.json, which transformers has in every layer and
SGLang (models/mistral.py:31) leaves out."""

from typing import Any

from sglang.srt.models.mistral import MistralForCausalLM as Stock


class MistralForCausalLM(Stock):
    """Takes the name of SGLang's class, by which a config.json asks for it."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self._window = None if config.sliding_window is None else config.sliding_window - 1
        for layer in self.model.layers:
            layer.self_attn.attn.sliding_window_size = -1 if self._window is None else self._window

    def get_attention_sliding_window_size(self) -> int | None:
        """What SGLang asks a model for: the tokens before a token that it attends to."""
        return self._window


EntryClass = MistralForCausalLM
