"""What SGLang is told of a model beside its config.json, where it would read the file otherwise than
transformers and the trainer do. Used by command_line.py."""

import json

from laminar_hpc.config.rope import LinearScaling, YarnScaling, magnitude, positions, rope_entries, scaling_of


def overrides(model: dict) -> dict[str, str]:
    """SGLang's argument, empty where it reads the config.json as transformers does."""
    changed: dict[str, object] = {}
    longest = positions(model)
    if longest != model.get("max_position_embeddings"):
        changed["max_position_embeddings"] = longest
    scaling = scaling_of(model)
    if isinstance(scaling, LinearScaling | YarnScaling):
        changed["rope_parameters"] = _rope(model, scaling)
    return {"json-model-override-args": json.dumps(changed)} if changed else {}


def _rope(model: dict, scaling: LinearScaling | YarnScaling) -> dict[str, object]:
    """Entries of which SGLang (0.5.21, layers/rotary_embedding/factory.py:264 and 302) makes the same factors
    as transformers. It knows YaRN's attention_factor as a multiple of its own only, and takes a linear
    factor for one that is a float."""
    theta = rope_entries(model).get("rope_theta") or model.get("rope_theta") or 10000.0
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", "rope_theta": theta, "factor": scaling.factor}
    same = {
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_positions,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "truncate": scaling.truncate,
    }
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        **same,
        "attn_factor": scaling.attention_factor / magnitude(scaling.factor),
    }
