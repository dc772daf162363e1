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
# Pages that still name files by the places where they lay before the package was split into rooms.
UNFINISHED = {
    "docs/ARCHITECTURE.md",
    "docs/HACKING.md",
    "docs/RELIABILITY.md",
    "docs/decisions/0002-fixed-groups.md",
    "docs/decisions/0004-own-kernel.md",
    "docs/decisions/0007-no-metadata-server.md",
    "docs/decisions/0014-generation-above-fragment.md",
    "docs/decisions/0022-replicated-once.md",
    "docs/decisions/0030-roll-backs-abandon.md",
    "docs/decisions/0031-stored-by-asking.md",
    "docs/decisions/0040-core-and-driver.md",
    "docs/decisions/0041-one-set-of-rules.md",
    "docs/decisions/0042-a-volume-under-the-disk-tier.md",
    "docs/decisions/0070-huge-pages.md",
    "docs/decisions/0080-repair-by-asking.md",
    "docs/decisions/0100-gpu-copies-beside-the-stream.md",
    "docs/decisions/README.md",
}


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
    if page in UNFINISHED:
        assert missing(page), f"{page} is finished: take it off the list"
    else:
        assert missing(page) == []
