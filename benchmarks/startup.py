"""What starting costs over bare Python: `import xinfer` and `xinfer --help`.

    python benchmarks/startup.py

Each is the least of several runs, interleaved, so that what else the machine does falls on all of them alike.
"""

from __future__ import annotations

import subprocess
import sys
import time

RUNS = 9
CASES = {
    "bare Python": ["-c", "pass"],
    "import xinfer": ["-c", "import xinfer"],
    "import xinfer.cli.app": ["-c", "import xinfer.cli.app"],
    "xinfer --help": ["-m", "xinfer", "--help"],
}


def main() -> None:
    """Measure and print."""
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(RUNS):
        for name, arguments in CASES.items():
            started = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            times[name].append(time.perf_counter() - started)
    bare = min(times["bare Python"])
    for name, values in times.items():
        print(f"{name:<22} {min(values):.3f} s  (+{min(values) - bare:.3f} s)")


if __name__ == "__main__":
    main()
