"""docs/troubleshooting.md quotes what the code says: an error that is reworded is reworded there too."""

import ast
import re

from helpers.paths import ROOT

OF_OTHERS = {"OutOfMemoryError", "/dev/shm", "/tmp"}  # not our words


def spoken() -> str:
    """Every string of the package, in one text; f-strings with their values left out."""
    found = []
    for path in (ROOT / "src" / "laminar_hpc").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_every_symptom_is_what_the_code_says():
    """A user who searches for the words on the console finds them."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    symptoms = [
        row.split("|")[1] for row in page.splitlines() if row.startswith("| ") and "symptom" not in row
    ]
    quoted = [words for symptom in symptoms for words in re.findall(r"`([^`]+)`", symptom)]
    assert len(symptoms) > 30 and len(quoted) > 30
    text = spoken()
    missing = [words for words in quoted if words not in text and words not in OF_OTHERS]
    assert not missing, f"docs/troubleshooting.md quotes what nobody says: {missing}"
