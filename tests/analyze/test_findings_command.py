"""`ranktape analyze findings` says what `find` finds, as text, JSON and CSV, and a check fails on it."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from ranktape.analyze.cli import cli
from ranktape.analyze.findings.find import find
from ranktape.analyze.findings.finding import KINDS
from ranktape.analyze.questions.findings import NUM_FIRST, findings
from ranktape.errors import UsageError
from ranktape.storage import Run
from tests.analyze.faulty_runs import Array, Place, Sizes, all_faults, everywhere, faulty_run
from tests.terminal import answered


def spoiled(place: Place, values: Array) -> Array:
    """One NaN in one iteration of one rank."""
    if place != (20, 1, 1, "output"):
        return values
    changed = values.copy()
    changed.flat[5] = np.nan
    return changed


def loud(place: Place, values: Array) -> Array:
    """Sample 3 is far from the others, on each rank a finding of its own."""
    if place[2:] != (2, "input"):
        return values
    changed = values.copy()
    changed[3] *= 600
    return changed


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Six findings and more, of several severities."""
    fault = all_faults(spoiled, loud, everywhere(0, factor=2.0**9))
    return faulty_run(tmp_path_factory.mktemp("run"), fault, sizes=Sizes(num_layers=6, num_ranks=4))


def ask(run: Run, *words: str) -> Result:
    """The command; what it did not expect to happen is raised."""
    return CliRunner().invoke(cli, ["findings", run.url, *words], catch_exceptions=False)


def test_the_rows_are_what_is_found(run: Run) -> None:
    found = find(run.select())
    assert len(found) > NUM_FIRST
    table = findings(run.select())
    assert table.column("title") == [one.title for one in found]
    assert table.column("severity") == [one.severity.value for one in found]
    assert table.column("consequences") == [list(one.consequences) for one in found]
    assert [f"{row['where']} {row['reason']}" for row in table.records()] == [one.title for one in found]
    assert table.title.startswith(f"{len(found)} findings: ")


def test_text_has_the_place_the_evidence_and_a_command_that_runs_and_ends_with_the_verdict(run: Run) -> None:
    first, *_ = found = find(run.select())
    lines = ask(run).stdout.splitlines()
    assert lines[0] == f"{first.severity.value:10}{first.title}"
    assert lines[1].strip() == first.evidence
    assert lines[-1] == findings(run.select()).title
    commands = [line.split(maxsplit=1)[1] for line in lines if line.startswith("next")]
    assert len(commands) == len(found)
    program, group, *words = shlex.split(commands[0])
    assert (program, group) == ("ranktape", "analyze")
    assert CliRunner().invoke(cli, words).exit_code == 0


def test_what_follows_is_counted_and_named_when_asked_for(run: Run) -> None:
    longest = max(find(run.select()), key=lambda one: len(one.consequences))
    assert f"and {len(longest.consequences) - 3} more: --wide lists them" in ask(run).stdout
    wide = ask(run, "--wide").stdout
    assert all(text in wide for text in longest.consequences)


def test_json_and_csv_hold_all_of_it(run: Run) -> None:
    table = findings(run.select())
    document = json.loads(ask(run, "--json").stdout)
    assert document == json.loads(json.dumps(table.to_json()))
    read = list(csv.DictReader(io.StringIO(ask(run, "--csv").stdout)))
    assert [row["title"] for row in read] == table.column("title")


def test_a_terminal_shows_the_first_ones_in_lines_that_fit(run: Run) -> None:
    lines = answered("findings", run.url, columns=60)
    assert sum(bool(re.match("high|medium|low", line)) for line in lines) == NUM_FIRST
    assert max(len(line) for line in lines if "ranktape analyze" not in line) <= 60
    num = len(findings(run.select()).rows)
    assert f"{num - NUM_FIRST} more rows: --limit 0 shows all" in lines
    assert lines[-1] == findings(run.select()).title


def test_less_bad_ones_and_other_kinds_are_left_out_and_counted(run: Run) -> None:
    found = find(run.select())
    bad = findings(run.select(), severity="high")
    assert set(bad.column("severity")) == {"high"}
    rest = sum(one.severity.value != "high" for one in found)
    assert bad.notes == (f"{rest} other findings are less severe or of other kinds",)
    assert set(findings(run.select(), kind="sample-outlier").column("kind")) == {"sample_outlier"}


def test_what_is_not_known_is_answered_with_the_nearest(run: Run) -> None:
    cases: list[tuple[dict[str, str], str]] = [
        ({"severity": "hgih"}, "severity 'hgih' is not allowed: did you mean high"),
        ({"severity": "x"}, "use high, medium, low"),
        ({"kind": "over_flow"}, "kind 'over_flow' is not allowed: did you mean overflow"),
    ]
    for options, match in cases:
        with pytest.raises(UsageError, match=match):
            findings(run.select(), **options)  # type: ignore[arg-type]  # one option each


def test_a_healthy_run_has_none(tmp_path: Path) -> None:
    healthy = faulty_run(tmp_path / "healthy")
    assert findings(healthy.select()).rows == ()
    done = ask(healthy)
    assert done.exit_code == 0
    assert re.fullmatch(r"No findings in \d+ records\.\n", done.stdout)
    assert not findings(healthy.select()).check("severity is None").rows


def test_help_names_every_kind() -> None:
    text = " ".join(CliRunner().invoke(cli, ["findings", "--help"]).stdout.split())
    assert all(kind in text for kind in KINDS)


def test_a_check_fails_on_them(run: Run) -> None:
    num_high = sum(one.severity.value == "high" for one in find(run.select()))
    words = ["findings", str(run.url).removeprefix("file://"), "--check", "severity != 'high'"]
    done = CliRunner().invoke(cli, [*words, "--json"])
    document = json.loads(done.stdout)
    assert done.exit_code == 3
    assert [row["severity"] for row in document["rows"]] == ["high"] * num_high
    assert CliRunner().invoke(cli, [*words[:-1], "kind != 'triggered'"]).exit_code == 0
