"""The tools that judge style, types and layers, and the size of what they judge."""

from __future__ import annotations

import ast
import subprocess
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sysconfig.get_path("scripts"))
NATIVE = sorted(
    str(path)
    for folder in ("native", "tests/native")
    for path in (ROOT / folder).iterdir()
    if path.suffix in (".cpp", ".h")
)
TOOLS = (
    ("clang-format", "--dry-run", "-Werror", *NATIVE),
    ("ruff", "check", "--no-cache"),
    ("ruff", "format", "--check", "--no-cache"),
    ("mypy",),
    ("lint-imports", "--no-cache"),
)
FILE_LINES = 400
FOLDER_FILES = 15
FUNCTION_LINES = 60


def _package() -> list[Path]:
    return sorted((ROOT / "ecckpt").rglob("*.py"))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.timeout(300)  # mypy reads all of torch where it has no cache yet
def test_no_tool_complains() -> None:
    """All tools run at once: mypy takes longer than the others together."""
    with ThreadPoolExecutor(len(TOOLS)) as pool:
        complaints = [each for each in pool.map(_complaint, TOOLS) if each]
    assert not complaints, "\n".join(complaints)


def _complaint(command: tuple[str, ...]) -> str:
    """What a tool says where it finds something, or nothing."""
    done = subprocess.run(
        [str(SCRIPTS / command[0]), *command[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    return f"{' '.join(command[:3])}\n{done.stdout}{done.stderr}" if done.returncode else ""


def test_files_are_short() -> None:
    native = [path for path in (ROOT / "native").iterdir() if path.suffix in (".cpp", ".h")]
    long = {
        _name(path): lines
        for path in [*_package(), *native]
        if (lines := len(path.read_text().splitlines())) > FILE_LINES
    }
    assert not long


def test_folders_are_small() -> None:
    folders = defaultdict(list)
    for path in _package():
        if path.name != "__init__.py":
            folders[_name(path.parent)].append(path.name)
    assert not {name: files for name, files in folders.items() if len(files) > FOLDER_FILES}


def _functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            has_docstring = ast.get_docstring(node) is not None
            body = node.body[1:] if has_docstring and len(node.body) > 1 else node.body
            first = body[0].lineno if has_docstring else node.lineno
            yield f"{_name(path)}:{node.lineno} {node.name}", body[-1].end_lineno - first


def test_functions_are_short() -> None:
    sources = [*_package(), *(ROOT / "bench").rglob("*.py")]
    long = {
        name: lines
        for path in sources
        for name, lines in _functions(path)
        if lines >= FUNCTION_LINES
    }
    assert not long


def test_a_class_name_is_used_once() -> None:
    places = defaultdict(list)
    for path in _package():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{_name(path)}:{node.lineno}")
    repeated = {name: found for name, found in places.items() if len(found) > 1}
    assert not repeated


def test_nothing_is_pickled_or_evaluated() -> None:
    banned = ("import pickle", "pickle.load", "torch.load(", "eval(", "exec(", "marshal")
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in (ROOT / "ecckpt").rglob("*.py")
        for word in banned
        if word in path.read_text().replace("model.eval()", "")
    ]
    assert not found


def test_the_agent_imports_no_torch() -> None:
    code = "import sys, ecckpt.agent.runtime.daemon; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
