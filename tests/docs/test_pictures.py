"""The pictures of the documentation are what their scripts make, and stand alone."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
SVG = "{http://www.w3.org/2000/svg}"
MADE_BY = {
    "save": ("save.svg", "save-dark.svg"),
    "restore": ("restore.svg", "restore-dark.svg"),
    "survives": ("survives.svg", "survives-dark.svg"),
    "demo": ("demo.svg",),
}
PICTURES = [name for names in MADE_BY.values() for name in names]
LARGEST_BYTES = 60_000
LONGEST_WAIT_S = 1.5


def _root(name: str) -> ET.Element:
    return ET.fromstring((FOLDER / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("script", MADE_BY)
def test_a_picture_is_what_its_script_makes(script: str, tmp_path: Path) -> None:
    subprocess.run([sys.executable, FOLDER / f"{script}.py", tmp_path], check=True)
    assert {path.name for path in tmp_path.iterdir()} == set(MADE_BY[script])
    for name in MADE_BY[script]:
        again = (tmp_path / name).read_bytes()
        assert again == (FOLDER / name).read_bytes(), f"run python docs/pictures/{script}.py"


def test_every_picture_has_a_script() -> None:
    assert {path.name for path in FOLDER.glob("*.svg")} == set(PICTURES)


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_stands_alone(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert len(text.encode()) < LARGEST_BYTES
    assert "://" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    for banned in ("<script", "<image", "<foreignObject", "href", "@import", "@font-face", " on"):
        assert not re.search(rf"{banned}\w*=" if banned == " on" else banned, text)
    assert set(re.findall(r"url\((.*?)\)", text)) <= {"#tip"}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_told_to_who_cannot_see_it(name: str) -> None:
    root = _root(name)
    told = {each.get("id"): each.text for each in root if each.tag in (f"{SVG}title", f"{SVG}desc")}
    assert root.get("role") == "img"
    assert all(told[label] for label in (root.get("aria-labelledby") or "").split())


def test_the_recording_shows_the_whole_transcript() -> None:
    header, *events = map(json.loads, (FOLDER / "demo.cast").read_text().splitlines())
    assert header["version"] == 2
    assert header["command"] == "ecckpt demo"
    texts = ["".join(each.itertext()) for each in _root("demo.svg").iter(f"{SVG}text")]
    prompt = texts.index(f"$ {header['command']}")
    printed = "".join(data for _, _, data in events).replace("\r\n", "")
    assert "".join(texts[prompt + 1 :]) == printed
    assert "bit-identical to the undisturbed training" in printed


def test_the_recording_has_no_long_wait() -> None:
    shown = (FOLDER / "demo.svg").read_text()
    delays_s = [float(each) for each in re.findall(r"animation-delay:([\d.]+)s", shown)]
    assert delays_s == sorted(delays_s)
    gaps_s = [later - before for before, later in itertools.pairwise(delays_s)]
    # Both are rounded, and the command is started a moment after it was typed.
    assert max(gaps_s) < LONGEST_WAIT_S + 0.5
