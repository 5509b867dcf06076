"""Does the device path hold on the simulated accelerator? Its tests need a process of their own."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.launch.processes import CHECKOUT


@pytest.mark.slow
@pytest.mark.timeout(900)  # builds the accelerator first, where it was not
def test_the_tests_on_the_simulated_accelerator(request: pytest.FixtureRequest) -> None:
    required = ["--require-simulator"] if request.config.getoption("--require-simulator") else []
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/device", *required]
    result = subprocess.run(command, cwd=CHECKOUT, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    if " passed" not in result.stdout.splitlines()[-1]:
        reason = re.search(r"^SKIPPED .*?: (.*)$", result.stdout, re.MULTILINE)
        pytest.skip(result.stdout if reason is None else reason[1])


@pytest.mark.gpu
def test_the_tests_on_a_gpu() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/device", "--run-gpu"]
    result = subprocess.run(command, cwd=CHECKOUT, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
