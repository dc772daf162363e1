"""Files of code that the pages name exist: relative to the repository, or to ecckpt/."""

import re
from pathlib import Path

import pytest

ROOT = next(each for each in Path(__file__).parents if (each / "pyproject.toml").exists())
DOCS = ROOT / "docs"
PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in (ROOT / "README.md", *DOCS.glob("*.md"), *DOCS.glob("decisions/*.md"))
)
# The reader's own program, and the programs of FORMAT.md.
NOT_OURS = {"train.py", "recover.py", "values.py"}


def missing(page):
    """Return the paths of code files in a page that lead nowhere."""
    text = (ROOT / page).read_text()
    named = set(re.findall(r"(?<![\w./*<-])((?:[\w-]+/)*\w+\.py)\b", text)) - NOT_OURS
    return sorted(
        each
        for each in named
        if not (ROOT / each).exists() and not (ROOT / "ecckpt" / each).exists()
    )


@pytest.mark.parametrize("page", PAGES)
def test_every_path_in_a_page_exists(page):
    assert missing(page) == []
