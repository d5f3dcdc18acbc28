"""What lies in the repository: sizes of files and functions, nothing of the machine it was written on, no large files."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
MAX_FILE_BYTES = 5_500_000
TEXT = {".py", ".md", ".yaml", ".yml", ".toml", ".json", ".lock", ".txt", ".sh", ""}


def files() -> list[Path]:
    """What git tracks; outside a checkout, what lies in the packages."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0 and listed.stdout:
        return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]
    return [
        path
        for folder in ("orthrus_serve", "loadgen", "tests", "docs", "configs")
        for path in (ROOT / folder).rglob("*.*")
    ]


FILES = files()
SOURCES = [path for path in FILES if path.suffix == ".py"]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("source", SOURCES, ids=named)
def test_files_and_functions_fit_a_reader(source):
    text = source.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_FILE_LINES
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {node.name: (node.end_lineno or node.lineno) - node.lineno + 1 for node in functions}
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


@pytest.mark.parametrize("source", [path for path in SOURCES if path.name != "__init__.py"], ids=named)
def test_every_module_says_what_it_is_for(source):
    assert ast.get_docstring(ast.parse(source.read_text(encoding="utf-8")))


def test_nothing_names_the_machine_or_the_people_that_it_was_written_on():
    # Spelt in parts, so that this file does not name them. `.ci/run` alone may look for data beside the checkout.
    forbidden = ["/wo" + "rk/", "../sha" + "red", "/home" + "/", "py" + "pi.org", "files.pythonhosted" + ".org"]
    found = {
        named(path): word
        for path in FILES
        if path.suffix in TEXT and named(path) not in (".ci/run", "LICENSE")
        for word in forbidden
        if word in path.read_text(encoding="utf-8", errors="replace")
    }
    assert found == {}


def test_no_large_file_is_committed():
    assert [named(path) for path in FILES if path.stat().st_size > MAX_FILE_BYTES] == []
