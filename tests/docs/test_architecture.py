"""The map of the code, docs/architecture.md and its reference pages: what they name exists, and what cites
them finds its section."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MAP = DOCS / "architecture.md"
REFERENCE_PAGES = (
    "controller",
    "delivery",
    "glossary",
    "loops",
    "payload_files",
    "processes",
    "promises",
    "staleness",
    "store",
    "walks",
)
PAGES = (MAP, *(DOCS / f"{name}.md" for name in REFERENCE_PAGES))
TOP_LEVEL = ("tests/", "docs/", "conf/", "csrc/", "launch/", "slurm/", "bench/")
# `file.py` `Name` or `file.py` `Name.method`, perhaps over the end of a line
REFERENCE = re.compile(r"`([\w/.]+\.py)`\s+`([A-Za-z_][\w.]*)`")
FILE = re.compile(r"`((?:[\w.]+/)*[\w.]+\.(?:py|cpp|cu|h|yaml|md|sh|sbatch))`")
MAP_LINES_MAX = 200
COLUMNS_MAX = 110
GLOSSARY_WORDS_MAX = 40


def located(name: str) -> Path:
    """A path of the package first: it has a room `launch/`, as the repository has a folder of scripts."""
    inside = ROOT / "src" / "laminar_hpc" / name
    return ROOT / name if name.startswith(TOP_LEVEL) and not inside.is_file() else inside


@cache
def definitions(path: Path) -> frozenset[str]:
    """Functions and classes of a file, and methods as Class.method."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if hasattr(part, "name")}
    return frozenset(names)


def anchors(page: str) -> set[str]:
    """What a link into the page may name: its anchors, and its headings as GitHub writes them."""
    return set(re.findall(r'<a id="([\w-]+)">', page)) | {
        re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-")
        for title in re.findall(r"^##+ (.+)$", page, re.M)
    }


def test_the_map_is_one_page():
    """A newcomer reads it in one sitting."""
    lines = MAP.read_text().splitlines()
    assert len(lines) <= MAP_LINES_MAX
    assert not [line for line in lines if len(line) > COLUMNS_MAX]


def test_the_map_has_every_room():
    """The table of rooms is the folders of the package."""
    folders = {p.name for p in (ROOT / "src" / "laminar_hpc").iterdir() if (p / "__init__.py").is_file()}
    assert folders == set(re.findall(r"^\| \d \| `(\w+)/` \|", MAP.read_text(), re.M))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_file_and_function_that_is_named_exists(page):
    """A newcomer can open whatever a page names."""
    text = page.read_text()
    assert not sorted({name for name in FILE.findall(text) if not located(name).is_file()})
    references = REFERENCE.findall(text)
    assert not [(file, name) for file, name in references if name not in definitions(located(file))]


def test_the_pages_name_much_code():
    """Loops, walks and promises say where they are."""
    assert sum(len(REFERENCE.findall(page.read_text())) for page in PAGES) > 200


@pytest.mark.parametrize("page", ["weights.md", "pipelines.md"])
def test_pages_name_their_source_files(page):
    """A page about a part of the code says where that part is."""
    sources = (DOCS / page).read_text().split("\n## ")[0]
    named = [name for name in FILE.findall(sources) if name.endswith(".py")]
    assert len(named) >= 5
    assert not [name for name in named if not located(name).is_file()]


def test_the_security_page_names_files_and_tests_that_are_there():
    """A protection without its test would only be said; several tests of one file may follow its name."""
    page = (DOCS / "security.md").read_text()
    assert not [name for name in FILE.findall(page) if name.endswith(".py") and not located(name).is_file()]
    named = re.findall(r"`([\w/.]+\.py)`((?:,?\s+`\w+`)+)", page)
    references = [(file, name) for file, names in named for name in re.findall(r"\w+", names)]
    assert len(references) > 20
    assert not [(file, name) for file, name in references if name not in definitions(located(file))]


@pytest.mark.parametrize("walk", ["a trajectory", "a weight", "a KV block", "an override"])
def test_every_step_of_a_walk_names_code(walk):
    """Each numbered step says in which file and function it happens."""
    walks = (DOCS / "walks.md").read_text()
    found = re.search(rf"^## Walk: {walk}$(.*?)(?=^## |\Z)", walks, re.M | re.S)
    assert found
    steps = re.split(r"^\d+\. ", found.group(1), flags=re.M)[1:]
    assert len(steps) >= 6
    for step in steps:
        assert REFERENCE.search(step), f"a step without a file and a function: {step[:80]}"


def test_every_promise_names_its_tests():
    """A promise without a test is a wish."""
    page = (DOCS / "promises.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| <a id=")]
    assert len(rows) >= 8
    for row in rows:
        assert any(file.startswith("tests/") for file, _ in REFERENCE.findall(row)), row


def test_the_glossary_is_short_and_says_each_word_once():
    """At most forty words, counted as words, so that it is read."""
    rows = re.findall(r"^\| ([^|]+) \|", (DOCS / "glossary.md").read_text(), re.M)
    words = [word.strip() for row in rows for word in row.split(",") if row.strip() not in ("word", "---")]
    assert len(words) == len(set(words)) <= GLOSSARY_WORDS_MAX


def test_citations_lead_to_a_section():
    """Code and tests cite these pages by the title of a section or the anchor of a promise; both exist."""
    known = {page.name: anchors(page.read_text()) for page in PAGES}
    cited = [
        (path, page, anchor)
        for folder in ("src", "tests", "bench", "csrc")
        for path in (ROOT / folder).rglob("*.py")
        if path != Path(__file__)
        for page, anchor in re.findall(r"docs/(\w+\.md)#([\w-]+)", path.read_text())
        if page in known
    ]
    assert len(cited) > 50
    assert not [(str(path), page, anchor) for path, page, anchor in cited if anchor not in known[page]]
