"""What SGLang's replies say, in the words of engine/interface.py."""

import math
from importlib.metadata import version
from typing import Any

from laminar_hpc.engine.interface import UNKNOWN_WEIGHTS, Generation, RequestFailed
from laminar_hpc.messages.data import VersionSpan

SGLANG_VERSION = tuple(int(part) for part in version("sglang").split(".")[:3] if part.isdigit())
# meta_info.weight_versions; older ones report the version at the end only
REPORTS_SPANS = SGLANG_VERSION >= (0, 5, 20)


def logprob(value: float | None) -> float:
    """JSON has no NaN and no infinities: SGLang writes null for each. They are NaN here, and the caller
    decides."""
    return math.nan if value is None else value


def weight_id(weight_version: object) -> int:
    """UNKNOWN_WEIGHTS for the name of a version that is no weight id."""
    return int(str(weight_version)) if str(weight_version).isdigit() else UNKNOWN_WEIGHTS


def parse_generation(reply: dict[str, Any]) -> Generation:
    """The reply of /generate. Raises RequestFailed when its tokens and log-probs do not belong together."""
    meta = reply["meta_info"]
    pairs = meta.get("output_token_logprobs") or []
    tokens = [entry[1] for entry in pairs]
    if tokens != list(reply["output_ids"]):
        raise RequestFailed(
            f"the engine returned {len(reply['output_ids'])} "
            f"tokens with {len(pairs)} log-probs of other tokens"
        )
    spans = meta.get("weight_versions") if REPORTS_SPANS else None
    if not spans:
        spans = [{"version": meta["weight_version"], "start": 0, "end": len(tokens)}]
    return Generation(
        tokens,
        [logprob(entry[0]) for entry in pairs],
        meta["finish_reason"]["type"],
        [VersionSpan(weight_id(span["version"]), span["start"], span["end"]) for span in spans],
        int(meta.get("cached_tokens") or 0),
    )
