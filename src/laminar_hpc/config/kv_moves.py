"""Whether requests move between engines with their KV caches."""

from laminar_hpc.config.schema import RunConfig

MOVED_PAGE = 64  # tokens of a page at most
_MOVED_DTYPES = ("auto", "bf16", "bfloat16")  # of KV caches that engine/kv/pool.py moves


def keeps_cache(name: str, value: str) -> bool:
    """This entry of rollout.engine_arguments, its name with dashes, keeps KV caches in their engine."""
    return (
        (name == "kv-cache-dtype" and value not in _MOVED_DTYPES)
        or (name == "page-size" and value.isdigit() and int(value) > MOVED_PAGE)
        or (name in ("disable-radix-cache", "enable-page-major-kv-layout") and value != "false")
    )


def kv_moves(config: RunConfig) -> bool:
    """Whether a request that moves takes its KV cache along."""
    if config.pipeline.repack != "auto":
        return config.pipeline.repack == "kv"
    given = config.rollout.engine_arguments.items()
    kept = any(keeps_cache(key.replace("_", "-"), value) for key, value in given)
    return config.pipeline.empties and config.rollout.most > 1 and not kept
