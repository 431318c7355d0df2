"""Pages show pictures that are there, and no picture lies about that no page shows."""

import re

from helpers.paths import ROOT

PICTURE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")


def test_pages_show_the_pictures_that_are_there():
    """Promise: no page has a broken picture, and docs/images/ holds those that pages show."""
    shown = {
        (page.parent / name).resolve(): f"{page.relative_to(ROOT)}: {name}"
        for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))
        for name in PICTURE.findall(page.read_text())
        if "://" not in name
    }
    assert len(shown) >= 3
    assert not [where for path, where in shown.items() if not path.is_file()]
    assert set((ROOT / "docs" / "images").iterdir()) <= set(shown)
