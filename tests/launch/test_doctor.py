"""Does `ranktape doctor` see what a machine has, and say of what it lacks how to get it?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from ranktape.launch.cli import cli
from ranktape.storage.places.urls import open_backend
from tests.launch.processes import python
from tests.s3 import S3Server


def doctor(*words: str) -> Result:
    """The command in this process; what it did not expect to happen is raised."""
    return CliRunner().invoke(cli, ["doctor", *words], catch_exceptions=False)


def findings(*words: str, code: int = 0) -> dict[tuple[str, str], dict[str, Any]]:
    """What it says of each thing, by area and name."""
    result = doctor(*words, "--json")
    assert result.exit_code == code, result.stderr
    document = json.loads(result.stdout)
    assert bool(document["lacking"]) == bool(code)
    return {(one["area"], one["name"]): one for one in document["findings"]}


def test_a_machine_that_has_everything(tmp_path: Path) -> None:
    found = findings(str(tmp_path / "new" / "run"))
    assert found["packages", "numpy"]["found"] == np.__version__
    assert found["packages", "torch"]["found"] == torch.__version__
    assert sys.executable in found["system", "Python"]["found"]
    assert found["torch.distributed", "gloo"]["state"] == "good"
    assert found["kernels", "of the writer"]["found"].split()[0] in {"loaded", "compiled"}
    assert "for the ring of one rank by default" in found["memory", "ring"]["found"]
    store = found["store", str(tmp_path / "new" / "run")]
    assert store["found"].startswith("1 kB written in ")
    assert {one["state"] for one in found.values()} <= {"good", "optional"}
    assert all(bool(one["way_out"]) == (one["state"] != "good") for one in found.values())
    assert list(tmp_path.iterdir()) == []


def test_text_says_the_same_and_the_verdict_last() -> None:
    lines = doctor().stdout.splitlines()
    assert lines[0] == "this machine"
    assert lines[-1] == "nothing is lacking"


def test_a_place_that_cannot_be_written_is_lacking(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    result = doctor(str(tmp_path / "file" / "run"))
    assert result.exit_code == 3
    assert result.stdout.endswith("1 thing lacking\n")
    assert f"Error: {tmp_path / 'file' / 'run'}: see the way out above" in result.stderr
    found = findings(str(tmp_path / "file" / "run"), code=3)["store", str(tmp_path / "file" / "run")]
    assert found["found"].startswith("cannot be written: ")
    assert (tmp_path / "file").read_text() == "a file"


@pytest.mark.parametrize(
    ("url", "said"),
    [("memory://run", "inside of one process only"), ("nosuch://bucket/run", "nosuch"), ("s3:/bucket/run", "s3://")],
)
def test_an_url_that_is_none_is_lacking(url: str, said: str) -> None:
    (store,) = [one for (area, _), one in findings(url, code=3).items() if area == "store"]
    assert store["found"].startswith("cannot be opened: ")
    assert said in store["found"]


@pytest.mark.s3
def test_an_object_store_is_written_to_and_left_as_it_was(s3_server: S3Server) -> None:
    url = s3_server.new_url()
    options = json.dumps(s3_server.storage_options)
    found = findings(url, "--storage-options", options)["store", url]
    assert found["state"] == "good"
    assert open_backend(url, storage_options=s3_server.storage_options).list_keys("") == []
    wrong = json.dumps(s3_server.storage_options | {"secret": "wrong-secret-1234"})
    result = doctor(url, "--storage-options", wrong)
    assert result.exit_code in {0, 3}
    assert "wrong-secret-1234" not in result.output


def test_packages_that_are_missing_or_old_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "ranktape-9.0.dist-info"
    folder.mkdir()
    needs = ("nowhere-such>=1", "numpy>=99", 'nothing-such>=2; extra == "parquet"', 'ruff>=99; extra == "test"')
    lines = ["Metadata-Version: 2.4", "Name: ranktape", "Version: 9.0", *(f"Requires-Dist: {one}" for one in needs)]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {name: one for (area, name), one in findings(code=3).items() if area == "packages"}
    assert set(found) == {"nowhere-such", "numpy", "nothing-such"}
    assert (found["nowhere-such"]["state"], found["nowhere-such"]["way_out"]) == ("lacking", "pip install 'ranktape'")
    assert found["numpy"]["found"] == f"{np.__version__}, and >=99 is needed"
    assert found["numpy"]["way_out"] == "pip install --upgrade 'numpy>=99'"
    assert found["nothing-such"]["state"] == "optional"
    assert found["nothing-such"]["way_out"].startswith("pip install 'ranktape[parquet]'")


@pytest.mark.parametrize(
    ("compiler", "said"), [("nowhere-g++", "no nowhere-g++ on the PATH"), ("false", "false fails: exit code 1")]
)
def test_a_compiler_is_tried(compiler: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler)
    found = findings()["compiler", "C++ of torch.compile"]
    assert (found["found"], found["state"]) == (said, "optional")
    assert "apt-get install g++" in found["way_out"]


def test_a_ring_that_cannot_be_made_is_lacking(tmp_path: Path) -> None:
    script = (
        "import resource\n"
        "from ranktape.launch.machine import _memory\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "(one,) = _memory()\n"
        "print(one.state, one.found)"
    )
    ended = python("-c", script, cwd=tmp_path, is_forked=False)
    assert ended.stdout.startswith("lacking cannot make a ring of "), ended.stderr
