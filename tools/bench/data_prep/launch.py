"""Run one command and say what it and its children cost: run as ``python -I -S launch.py RESULT.json COMMAND...``.

It stands between the benchmark and what is measured because Linux lets a process begin with the peak memory of the one it was started by,
and this one is small. It knows nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time


def main(result: str, command: list[str]) -> int:
    """Write wall and CPU seconds, peak resident bytes of the largest process and the exit code to ``result``; return that code."""
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
