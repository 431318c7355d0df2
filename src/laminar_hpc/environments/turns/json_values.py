"""JSON that a model or an agent has written, bounded to what templates, tokenizers and tools take."""

import json

DEEPEST = 64  # levels; at some hundreds of them whoever looks inside raises RecursionError
TOO_DEEP = f"nested deeper than {DEEPEST} levels"


def json_value(text: str) -> object:
    """Raises ValueError, which says what the text is where that is no JSON or cannot be taken."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise ValueError("JSON with half of a surrogate pair") from None
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except ValueError:
        raise ValueError("no JSON") from None
    if too_deep(value):
        raise ValueError(TOO_DEEP)
    return value


def too_deep(value: object) -> bool:
    level, depth = [value], 0
    while level and depth <= DEEPEST:
        inside = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list))
        level, depth = [each for values in inside for each in values], depth + 1
    return bool(level)
