"""docs/architecture.md is the map of the code: what it names exists, and what cites it finds its section."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from helpers.paths import ROOT

PAGE = ROOT / "docs" / "architecture.md"
TOP_LEVEL = ("tests/", "docs/", "conf/", "csrc/", "launch/", "slurm/", "bench/")
# `file.py` `Name` or `file.py` `Name.method`, perhaps over the end of a line
REFERENCE = re.compile(r"`([\w/.]+\.py)`\s+`([A-Za-z_][\w.]*)`")
FILE = re.compile(r"`((?:[\w.]+/)*[\w.]+\.(?:py|cpp|cu|h|yaml|md|sh|sbatch))`")
GLOSSARY_MAX = 40


def text() -> str:
    return PAGE.read_text()


def located(name: str) -> Path:
    return ROOT / name if name.startswith(TOP_LEVEL) else ROOT / "src" / "laminar_hpc" / name


@cache
def definitions(path: Path) -> frozenset[str]:
    """Functions and classes of a file, methods as Class.method; and what it imports by name, as a door
    may."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if hasattr(part, "name")}
    return frozenset(names)


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", text(), re.M | re.S)
    assert found, f"docs/architecture.md has no section '{title}'"
    return found.group(1)


def test_every_file_that_is_named_exists():
    """A newcomer can open whatever the map names."""
    missing = sorted({name for name in FILE.findall(text()) if not located(name).is_file()})
    assert not missing, f"docs/architecture.md names files that are not there: {missing}"


@pytest.mark.parametrize("page", ["weights.md", "pipelines.md"])
def test_pages_name_their_source_files(page):
    """A page about a part of the code says where that part is."""
    sources = (ROOT / "docs" / page).read_text().split("\n## ")[0]
    named = FILE.findall(sources)
    assert len([name for name in named if name.endswith(".py")]) >= 5
    assert not [name for name in named if name.endswith(".py") and not located(name).is_file()]


def test_every_function_that_is_named_exists():
    """The walks, loops and promises name code as it is."""
    references = REFERENCE.findall(text())
    assert len(references) > 80
    wrong = [(file, name) for file, name in references if name not in definitions(located(file))]
    assert not wrong, f"docs/architecture.md names what is not there: {wrong}"


def test_the_security_page_names_files_and_tests_that_are_there():
    """A protection without its test would only be said; several tests of one file may follow its name."""
    page = (ROOT / "docs" / "security.md").read_text()
    assert not [name for name in FILE.findall(page) if name.endswith(".py") and not located(name).is_file()]
    named = re.findall(r"`([\w/.]+\.py)`((?:,?\s+`\w+`)+)", page)
    references = [(file, name) for file, names in named for name in re.findall(r"\w+", names)]
    assert len(references) > 20
    assert not [(file, name) for file, name in references if name not in definitions(located(file))]


@pytest.mark.parametrize("walk", ["a trajectory", "a weight", "a KV block", "an override"])
def test_every_step_of_a_walk_names_code(walk):
    """Each numbered step says in which file and function it happens."""
    steps = re.split(r"^\d+\. ", section(f"Walk: {walk}"), flags=re.M)[1:]
    assert len(steps) >= 6
    for step in steps:
        assert REFERENCE.search(step), f"a step without a file and a function: {step[:80]}"


def test_every_promise_names_its_tests():
    """A promise without a test is a wish."""
    rows = [line for line in section("Promises").splitlines() if line.startswith("| <a id=")]
    assert len(rows) >= 8
    for row in rows:
        assert any(file.startswith("tests/") for file, _ in REFERENCE.findall(row)), row


def test_the_glossary_is_short_and_says_each_word_once():
    """At most forty words, so that it is read."""
    words = [
        w.strip()
        for w in re.findall(r"^\| ([^|]+) \|", section("Glossary"), re.M)
        if w.strip() not in ("word", "---")
    ]
    assert len(words) == len(set(words)) <= GLOSSARY_MAX


def test_every_folder_is_on_the_map():
    """The folder table has every folder of the package."""
    table = section("Folders")
    folders = {p.name for p in (ROOT / "src" / "laminar_hpc").iterdir() if (p / "__init__.py").is_file()}
    assert not {name for name in folders if f"`{name}/`" not in table}


def test_citations_lead_to_a_section():
    """Code and tests cite this page by the title of a section or the anchor of a promise; both exist."""
    page = text()
    anchors = set(re.findall(r'<a id="([\w-]+)">', page)) | {
        re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-")
        for title in re.findall(r"^##+ (.+)$", page, re.M)
    }
    cited = [
        (path, anchor)
        for folder in ("src", "tests", "bench", "csrc")
        for path in (ROOT / folder).rglob("*.py")
        if path != Path(__file__)
        for anchor in re.findall(r"docs/architecture\.md#([\w-]+)", path.read_text())
    ]
    assert cited
    assert not [(str(path), anchor) for path, anchor in cited if anchor not in anchors]
