"""docs/security.md has a row for whatever listens."""

import ast
import re
from pathlib import Path

from helpers.paths import ROOT

PAGE = (ROOT / "docs/security.md").read_text()
# what makes a socket that somebody can reach, by the last part of the name that is called
LISTENS = {
    *("create_server", "start_server", "start_unix_server", "listen", "bind_to_random_port", "TCPSite"),
    *("UnixSite", "TCPStore", "init_process_group", "WSGIServer", "HTTPServer", "ThreadingHTTPServer"),
}
CLOSED_AT_ONCE = {"launch/doctor/machine.py"}  # looks whether loopback works


def listeners() -> set[str]:
    """The files of src/ that call one of LISTENS, or bind to an address."""
    found = set()
    for path in (ROOT / "src/laminar_hpc").rglob("*.py"):
        if not any(name in (text := path.read_text()) for name in [*LISTENS, ".bind("]):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                called = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
            elif isinstance(node, ast.Call):
                called = [ast.unparse(node.func).rpartition(".")[2]]
                if called == ["bind"] and re.search(r"(tcp|ipc)://", ast.unparse(node)):
                    called = ["listen"]
            else:
                continue
            if LISTENS & set(called):
                found.add(path.relative_to(ROOT / "src/laminar_hpc").as_posix())
    return found


def test_every_listener_has_its_row() -> None:
    """A file of src/ that makes a listener stands in the table with its protection."""
    table = PAGE.partition("## Listeners")[2].partition("\n## ")[0]
    found = listeners() - CLOSED_AT_ONCE
    assert len(found) >= 9 and {"line/hub.py", "environments/gateway/server.py"} <= found
    missing = sorted(name for name in found if f"`{name}`" not in table)
    assert missing == []


def test_rows_name_files_and_tests_that_there_are() -> None:
    """Each row of the page names a file of src/, and a test that pins it has that name."""
    sources = ROOT / "src/laminar_hpc"
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    named = [name for row in rows for name in re.findall(r"`((?:\w+/)+\w+\.py)`", row)]
    assert len(named) > 30
    assert [name for name in named if not ((sources / name).is_file() or (ROOT / name).is_file())] == []
    for row in rows:
        for file, tests in re.findall(r"`(tests/[\w/]+\.py)`((?:,? `test_\w+`)+)", row):
            text = Path(ROOT / file).read_text()
            assert [
                name for name in re.findall(r"`(test_\w+)`", tests) if f"def {name}(" not in text
            ] == [], row
