"""How long `import mint`, its clients and `mint --help` take, in CPU time, as ratios to an empty Python program.

`python -m benchmarks.start_times`. The programs run in turns in one process after another; of each, the least CPU time
counts, because whatever else runs on the machine only adds to it.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys

ROUNDS = 7
PROGRAMS = {
    "python -c pass": "pass",
    "import mint": "import mint",
    "the clients": "import mint; mint.ServiceClient",
    "mint --help": "import sys; sys.argv = ['mint', '--help']; from mint.cli.main import app; app()",
}


def cpu_seconds(program: str) -> float:
    """User and system time of a process that runs the program."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    for program in PROGRAMS.values():
        cpu_seconds(program)  # compiles bytecode, and reads the files from the disk
    taken = [{name: cpu_seconds(program) for name, program in PROGRAMS.items()} for _ in range(ROUNDS)]
    least = {name: min(each[name] for each in taken) for name in PROGRAMS}
    empty = least["python -c pass"]
    for name, seconds in least.items():
        print(f"{name:16} {seconds:6.3f} s of CPU   {seconds / empty:5.1f} times an empty program", file=sys.stderr)
    print(json.dumps({name: {"cpu_s": seconds, "ratio": seconds / empty} for name, seconds in least.items()}))


if __name__ == "__main__":
    main()
