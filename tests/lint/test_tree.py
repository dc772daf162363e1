"""Where tests lie: a test of a module is found by the path of the module."""

from __future__ import annotations

import ast
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
FOLDER_FILES = 15


def test_unit_tests_lie_where_their_packages_do() -> None:
    folders = {path.parent.relative_to(TESTS / "unit") for path in (TESTS / "unit").rglob("*.py")}
    assert not [str(each) for each in folders if not (ROOT / "ecckpt" / each).is_dir()]


def test_folders_of_tests_are_small() -> None:
    folders = Counter(str(path.parent.relative_to(ROOT)) for path in TESTS.rglob("*.py"))
    assert not {name: count for name, count in folders.items() if count > FOLDER_FILES}


def test_no_test_module_imports_another() -> None:
    """What two of them need is in ``tests/support``."""
    found = []
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom | ast.Import):
                module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
                names = [module, *(each.name for each in node.names)]
                if any(name.split(".")[-1].startswith("test_") for name in names):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found


def test_no_circle_of_imports_in_the_package() -> None:
    """Imports for types alone and inside functions count too. The error names the circle."""
    modules = {_module_of(path): path for path in (ROOT / "ecckpt").rglob("*.py")}
    graph = {name: _imports_of(path, set(modules)) - {name} for name, path in modules.items()}
    assert sum(map(len, graph.values())) > len(graph)
    TopologicalSorter(graph).prepare()


def _module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _imports_of(path: Path, modules: set[str]) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{each.name}" for each in node.names)
            found |= {name if name in modules else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return found & modules
