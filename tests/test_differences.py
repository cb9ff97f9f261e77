"""The README's table of differences and what the conformance suite expects are one list."""

from __future__ import annotations

import re
from pathlib import Path

from differences import DIFFERENCES

README = Path(__file__).resolve().parent.parent / "README.md"


def test_every_difference_is_a_row_of_the_readme_and_is_shown_by_a_test():
    section = README.read_text().partition("## Python and Rust")[2].partition("\n## ")[0]
    rows = [re.split(r" \| ", line.strip("| "))[0] for line in section.splitlines() if line.startswith("| ")]
    shown = [listed.topic for listed in DIFFERENCES]
    assert rows[0] == "what"
    assert set(shown) <= set(rows[1:])
    assert len(set(shown)) == len(shown)
    assert all(listed.shown_by for listed in DIFFERENCES)
