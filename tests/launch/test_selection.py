"""Do a file, the environment and the command line together choose what every rank of a launch records?"""

from __future__ import annotations

from pathlib import Path

import pytest

from ranktape.storage import open_run
from tests.launch.processes import PLAIN, errors, python, torchrun

LAUNCH = ("-m", "ranktape.launch")

CONFIG = """\
capture: run
min-iterations: 3
every: 2
policy: skip
select:
  - {layer_type: attention, every: 4, keep: statistics}
  - tensor_name=input rank=1
"""


@pytest.mark.distributed
def test_a_launch_by_a_file_with_the_last_word_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "capture.yaml").write_text(CONFIG)
    words = ("--capture-config", "capture.yaml", "--min-iterations", "4", "--phase", "pre", PLAIN, "--steps", "9")
    ended = torchrun(*LAUNCH, *words, cwd=tmp_path, env={"RANKTAPE_EVERY": "1", "RANKTAPE_MIN_ITERATIONS": "99"})
    assert ended.returncode == 0, ended.stderr
    run = open_run(tmp_path / "run")
    assert run.iterations == [0, 1, 2, 3]
    found = {(record.iteration, record.rank, record.layer_type, record.keep) for record in run.select()}
    assert found == {
        *((0, rank, "attention", "statistics") for rank in (0, 1)),
        *((iteration, 1, "linear", "values") for iteration in range(4)),
    }
    assert {record.tensor_name for record in run.select(layer_type="linear")} == {"input"}
    assert {record.phase for record in run.select()} == {"pre"}
    assert all(not row.silent_sites for row in run.status())


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--capture-config", "nowhere.yaml", "train.py"], "nowhere.yaml cannot be read"),
        (["--capture-config", "wrong.yaml", "train.py"], "wrong.yaml: there is no setting 'evry': did you mean every?"),
        (["--capture", "run", "--where", "layr_idx < 3", "train.py"], "no field 'layr_idx': did you mean layer_idx?"),
        (["--capture", "run", "--select", "keep=some", "train.py"], "--select, rule 1: keep 'some' is not allowed"),
        (["--capture", "run", "--layer-type", "atention", "train.py"], "did you mean attention?"),
        (["train.py"], "Missing option '--capture': give the URL of the run, set RANKTAPE_CAPTURE"),
    ],
)
def test_a_users_mistake_is_one_line(words: list[str], match: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')")
    (tmp_path / "wrong.yaml").write_text("evry: 1")
    ended = python(*LAUNCH, *words, cwd=tmp_path)
    assert ended.returncode == 2
    assert match in ended.stderr
    assert "Traceback" not in ended.stderr
    assert len(errors(ended)) == 1
    assert ended.stdout == ""
