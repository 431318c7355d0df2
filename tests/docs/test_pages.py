"""What pages tell a reader to type or to follow is there: links, commands, options, keys, and the names of
other systems."""

import re
import shlex
from collections.abc import Iterator

from helpers.paths import ROOT
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.load import keys_of
from laminar_hpc.config.peers import ROWS, TRL
from laminar_hpc.launch import cli

PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "src/**/*.md")
    for path in ROOT.glob(pattern)
)
FENCED = re.compile(r"^ *```.*?^ *```", re.M | re.S)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
WITH_KEYS = {"train", "submit", "launch"}  # the commands that take a run's keys
OWN = {"mine"}  # experiments that a reader has written


def anchors(page: str) -> set[str]:
    """As GitHub makes them of headings, and those that are written out."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page), re.M)
    return {
        *(re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings),
        *re.findall(r'id="([^"]+)"', page),
    }


def commands(page: str) -> Iterator[list[str]]:
    """The words of each `laminar ...` in fenced code, without prompts and what is said of it."""
    for block in FENCED.findall(page):
        for line in re.sub(r"\s*\\\n\s*", " ", block).splitlines():
            if found := re.match(r"\s*(?:\$ |cd \w+ && |salloc [^l]*)?(laminar .*)", line):
                words = shlex.split(re.split(r"  | #| &&", found[1])[0])
                yield [word for word in words if word != "..."]


def test_links_lead_somewhere():
    """Promise: no page names a file or a heading that is not there."""
    texts = {path: path.read_text() for path in PAGES}
    headings = {path: anchors(text) for path, text in texts.items()}
    broken, seen = [], 0
    for path, text in texts.items():
        for link in LINK.findall(FENCED.sub("", text)):
            name, _, heading = link.partition("#")
            if "://" in link:
                continue
            target = (path.parent / name).resolve() if name else path
            seen += 1
            if not target.exists() or (heading and heading not in headings.get(target, {heading})):
                broken.append(f"{path.relative_to(ROOT)}: {link}")
    assert not broken and seen > 150


def test_commands_are_taken():
    """Promise: every command line of a page has a command, options and keys that there are."""
    keys, wrong, seen = keys_of(), [], 0
    for path in PAGES:
        for _, name, *rest in (words for words in commands(path.read_text()) if len(words) > 1):
            seen += 1
            try:
                cli.COMMANDS[name].parse(name, rest)
            except (LaminarError, KeyError) as error:
                wrong.append(f"{path.name}: laminar {name} {' '.join(rest)}: {error}")
            for word in rest if name in WITH_KEYS else ():
                key, equals, value = word.partition("=")
                if equals and not key.startswith("-") and keys.kind_of(key.lstrip("+~")) is None:
                    known = key in keys.groups and (value in {*keys.groups[key], *OWN} or {*"(,"} & {*value})
                    wrong += [] if known else [f"{path.name}: {word}"]
    assert not wrong and seen > 45


def test_names_of_other_systems_are_those_of_the_code():
    """Promise: the tables of docs/week_one.md say what a refusal says."""
    page = (ROOT / "docs" / "week_one.md").read_text().splitlines()
    table = page[page.index("| verl | slime | here | as |") + 2 :]

    def cell(names: tuple[str, ...]) -> str:
        return ", ".join(f"`{name}`" for name in names)

    assert table == [f"| {cell(row.verl)} | {cell(row.slime)} | `{row.key}` | {row.how} |" for row in ROWS]
    start = page.index("| TRL | here | as |") + 2
    assert page[start : start + len(TRL)] == [f"| `{n}` | `{key}` | {how} |" for n, (key, how) in TRL.items()]
    assert page[start + len(TRL)] == ""
