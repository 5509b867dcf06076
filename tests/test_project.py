"""Do the files for those who join agree with pyproject.toml, and does the commit hook hold its rules?"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

CHECKOUT = Path(__file__).parents[1]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONTRIBUTING = (CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def _commit_msg(folder: Path, message: str) -> subprocess.CompletedProcess[str]:
    (folder / "message").write_text(message, encoding="utf-8")
    words = [str(CHECKOUT / ".ci/commit_msg"), str(folder / "message")]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "message",
    [
        "storage: write checksums by one function\n\nTwo copies differed.\n",
        "capture, docs: name the ranks\n# a comment of git's\n",
        f"build: {'x' * 65}\n",
        "fixup! storage: write checksums by one function\n",
        'Revert "storage: write checksums by one function"\n',
        "# a comment before it\nci: run the minimum versions\n",
    ],
)
def test_the_hook_accepts_subjects_by_the_rules(tmp_path: Path, message: str) -> None:
    done = _commit_msg(tmp_path, message)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("Write checksums by one function\n", "begins with one of analyze, build, capture"),
        ("storage: Write checksums\n", "a lower-case verb"),
        ("disk: write checksums\n", "begins with one of"),
        (f"build: {'x' * 66}\n", "has 73 characters; at most 72 are allowed"),
        ("build: write checksums.\n", "full stop"),
        ("build: write checksums\nby one function\n", "second line is not blank"),
        ("# nothing but comments\n", "begins with one of"),
    ],
)
def test_the_hook_refuses_other_subjects_and_says_why(tmp_path: Path, message: str, told: str) -> None:
    done = _commit_msg(tmp_path, message)
    assert done.returncode == 1
    assert told in done.stderr
    assert "write: component: imperative subject" in done.stderr


def test_contributing_names_the_components_that_the_hook_accepts(tmp_path: Path) -> None:
    [named] = re.findall(r"The components are (.*?)\.\n", CONTRIBUTING)
    told = _commit_msg(tmp_path, "x").stderr
    [accepted] = re.findall(r"begins with one of (.*?) and a colon", told)
    assert sorted(re.findall(r"`(\w+)`", named)) == accepted.split(", ")


def test_ci_tries_each_python_that_is_promised() -> None:
    workflow = yaml.safe_load((CHECKOUT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    matrix = workflow["jobs"]["versions"]["strategy"]["matrix"]
    prefix = "Programming Language :: Python :: "
    promised = [one.removeprefix(prefix) for one in PROJECT["classifiers"] if one.startswith(prefix)]
    assert matrix["python"] == promised
    assert [(one["python"], one["versions"]) for one in matrix["include"]] == [(promised[0], "minimum")]


def test_the_minimum_versions_are_those_of_the_package() -> None:
    words = [sys.executable, str(CHECKOUT / ".ci/minimum_versions")]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    assert printed == [one.replace(">=", "==") for one in PROJECT["dependencies"]]
    assert "torch==2.6" in printed
