"""``python -I -S launch.py RESULT.json COMMAND...``: run a command and report its cost.

On Linux a process inherits the peak memory of the process that started it. This small process
between the benchmark and the measured command keeps that peak low. It imports only the standard
library.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time


def main(result: str, command: list[str]) -> int:
    """Run the command, write its cost to the file ``result`` and return its exit code.

    The file contains wall and CPU seconds, peak resident bytes of the largest process, and the exit
    code.
    """
    began = time.monotonic()
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.monotonic() - began
    code = os.waitstatus_to_exitcode(status)
    found = {
        "wall": wall,
        "cpu": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024,
        "code": code,
    }
    with open(result, "w", encoding="utf-8") as stream:
        json.dump(found, stream)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
