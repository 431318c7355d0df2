"""What the rollout role may know of engines."""

import ast
from pathlib import Path

import laminar_hpc

ROLLOUT = Path(laminar_hpc.__file__).parent / "rollout"


def test_the_role_names_no_engine():
    """A replica's engine is injected: the role imports interface and factory, the errors of KV
    moves, and no implementation."""
    modules = {
        f"{node.module}.{alias.name}"
        for path in ROLLOUT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    engine = {name for name in modules if name.startswith("laminar_hpc.engine.")}
    assert {name.split(".")[2] for name in engine} == {"interface", "factory", "kv"}
    assert not [name for name in modules if name.startswith("laminar_hpc.simulator")]
