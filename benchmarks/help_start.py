"""How long does `ranktape --help` take, beside a Python that does nothing? The bar is 0.3 s."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

NUM_RUNS = 15
BAR_SECONDS = 0.3

COMMANDS = {
    "python, doing nothing": ["-c", "pass"],
    "ranktape --help": ["-m", "ranktape.launch.cli", "--help"],
}


def seconds(arguments: list[str]) -> float:
    """How long one run takes, in seconds of wall time."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    """Run the two in turn, and print the median of each."""
    rounds = [{name: seconds(arguments) for name, arguments in COMMANDS.items()} for _ in range(NUM_RUNS)]
    for name in COMMANDS:
        print(f"{name}: {statistics.median(times[name] for times in rounds):.3f} s")
    print(f"bar: {BAR_SECONDS} s")


if __name__ == "__main__":
    main()
