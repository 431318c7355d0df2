"""Which trained steps stay in the archive (`archive`): all, the last N that are in it, or those whose number
is a multiple of N. Pure; steps are counted from 1, as on the console."""

import re

RULE = re.compile(r"all|(?P<kind>last|every):(?P<number>[1-9]\d{0,8})")


def kept(rule: str, step: int, newest: int) -> bool:
    """Whether `step` stays when `newest` is the last step that has been archived."""
    found = RULE.fullmatch(rule)
    assert found is not None, rule
    if not found["kind"]:
        return True
    number = int(found["number"])
    return step > newest - number if found["kind"] == "last" else step % number == 0
