"""SGLang on plain torch CPU operators: what our out-of-tree platform answers when SGLang asks about the
device.

Loaded by SGLang through `platform.activate`. The dispatch key "native" selects each layer's pure-torch
forward, and `torch_native` is the attention backend, so no compiled kernel package is needed.
"""

import psutil
import torch
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


class CpuPlatform(SRTPlatform):
    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    # ---- the device ----------------------------------------------------------------------------------------

    def get_device(self, device_id: int = 0) -> torch.device:
        return torch.device("cpu")

    def set_device(self, device: torch.device) -> None:
        pass

    def get_device_name(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_uuid(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_capability(self, device_id: int = 0) -> None:
        return None

    def get_torch_distributed_backend_str(self) -> str:
        return "gloo"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    # ---- memory, in bytes ----------------------------------------------------------------------------------

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return int(psutil.virtual_memory().total)

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        memory = psutil.virtual_memory()
        return float(memory.total - memory.available)

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    # ---- the parts of the engine ---------------------------------------------------------------------------

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_mla_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        return MLATokenToKVPool

    def get_paged_allocator_cls(self) -> type:
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

        class PageOfOneToken(TokenToKVPoolAllocator):
            """SGLang asks for a paged allocator; torch_native reads single tokens: pages have one token."""

            def __init__(self, size: int, page_size: int = 1, **rest: object) -> None:
                assert page_size == 1, f"the CPU platform has pages of one token, not {page_size}"
                super().__init__(size, **rest)

        return PageOfOneToken
