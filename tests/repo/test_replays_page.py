"""The page of replays names tests that exist, and every report on it has one or says why not."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/replays.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("|") and not line.startswith(("|---", "| report "))
]


def test_every_test_on_the_page_exists():
    named = set(re.findall(r"`(tests/[a-z_/0-9]+\.py)::(\w+)`", PAGE))
    assert len(named) > 30
    missing = []
    for file, name in sorted(named):
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8")) if (ROOT / file).is_file() else ast.Module([], [])
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        if name not in functions:
            missing.append(f"{file}::{name}")
    assert missing == []


def test_every_report_has_a_test_or_says_why_not():
    assert len(ROWS) >= 39
    for report, scenario, here, shown in ROWS:
        assert re.search(r"#\d+", report)
        assert scenario
        assert "::" in shown or here.startswith(("not covered yet: ", "does not apply: ")), report
