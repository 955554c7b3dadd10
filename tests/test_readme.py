"""What the README shows works as shown, and its tree names the files that are there."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_ten_line_policy_runs_as_written():
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, "README.md", "exec"), {})
    assert all(name in printed.getvalue() for name in ("value_norm", "frc", "keydiff", "full", "0.75"))


def test_tree_names_every_module_and_only_those():
    tree = README.split("cachecraft_lab/\n")[1].split("```")[0]
    named = set(re.findall(r"\b(\w+)\.py\b", tree))
    there = {path.stem for path in (ROOT / "cachecraft_lab").rglob("*.py")} - {"__init__"}
    assert named == there


def test_linked_files_exist():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    missing = [link for link in links if not link.startswith("http") and not (ROOT / link).exists()]
    assert not missing
