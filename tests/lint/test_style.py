"""Style as a test: lint, types, layers, lengths."""

from __future__ import annotations

import ast
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sysconfig.get_path("scripts"))
FILE_LINES = 600
FUNCTION_LINES = 60


def _sources() -> list[Path]:
    return sorted(path for folder in ("ecckpt", "bench") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "--no-cache"],
        ["ruff", "format", "--check", "--no-cache"],
        ["mypy", "--no-incremental"],
        ["lint-imports", "--no-cache"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_tool(command: list[str]) -> None:
    tool = SCRIPTS / command[0]
    done = subprocess.run(
        [str(tool), *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_files_are_short() -> None:
    native = [*(ROOT / "native").glob("*.cpp"), *(ROOT / "native").glob("*.h")]
    long = {
        str(path.relative_to(ROOT)): lines
        for path in [*_sources(), *native]
        if (lines := len(path.read_text().splitlines())) > FILE_LINES
    }
    assert not long


def _functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            has_docstring = ast.get_docstring(node) is not None
            body = node.body[1:] if has_docstring and len(node.body) > 1 else node.body
            first = body[0].lineno if has_docstring else node.lineno
            yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", body[-1].end_lineno - first


def test_functions_are_short() -> None:
    long = {
        name: lines
        for path in _sources()
        for name, lines in _functions(path)
        if lines >= FUNCTION_LINES
    }
    assert not long


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
