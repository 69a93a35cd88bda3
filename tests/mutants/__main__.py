"""Measure the share of the mutants that the tests detect.

Usage: ``python -m tests.mutants [--sample N --seed S] [--only ID …] [--reach FILE] [-- TESTS …]``.

Each mutant is put into a copy of the working tree. The tests that reach its line run, the quickest
first, until one fails. One run of all tests with a probe at every mutant's line finds these tests
(``--reach FILE`` saves the result), or the command line names them: ``-- tests/launch``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.mutant import ROOT, Mutant, probed, read_mutants

QUICK = ["-m", "not slow and not slurm"]
# A mutant may hang, which the original code does not.
LIMIT = 1200.0


def copy_tree(folder: Path) -> Path:
    """Copy the files that git tracks or would add into ``folder``, and return it."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def run_tests(tree: Path, arguments: list[str], limit: float | None = None) -> int:
    """Run pytest in a copy of the tree and return its exit code.

    Raise subprocess.TimeoutExpired after ``limit`` seconds.
    """
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        timeout=limit,
    ).returncode


def learn(mutants: list[Mutant], tests: list[str]) -> dict[str, list[str]]:
    """Return the tests that reach each mutant's line, the quickest first, by mutant id.

    A mutant without a probe gets the test folder of its package, or all tests.
    """
    with tempfile.TemporaryDirectory() as folder:
        tree, log = copy_tree(Path(folder, "tree")), Path(folder, "reached")
        log.touch()
        without = {mutant.id for mutant in mutants if not mutant.file.endswith(".py")}
        for file in sorted({mutant.file for mutant in mutants if mutant.file.endswith(".py")}):
            lines = {mutant.id: mutant.place(ROOT) for mutant in mutants if mutant.file == file}
            text, not_here = probed((ROOT / file).read_text(encoding="utf-8"), lines, log)
            (tree / file).write_text(text, encoding="utf-8")
            without |= not_here
        print(f"mutants: one run of the tests with probes at {len(mutants)} lines", flush=True)
        run_tests(
            tree,
            [
                *QUICK,
                "-n",
                "2",
                "--dist",
                "loadfile",
                "--junitxml",
                f"{folder}/times.xml",
                "-o",
                "junit_family=xunit1",
                *tests,
            ],
        )
        cases = ElementTree.parse(f"{folder}/times.xml").iter("testcase")
        seconds = {
            f"{case.get('file')}::{case.get('name')}": float(case.get("time", 0)) for case in cases
        }
        # All tests of a module judge a line that one of its fixtures reaches.
        for file in {test.partition("::")[0] for test in seconds}:
            seconds[file] = sum(
                time for test, time in seconds.items() if test.startswith(f"{file}::")
            )
        reached: dict[str, set[str]] = {}
        for line in log.read_text().splitlines():
            name, _, test = line.partition("\t")
            test, _, when = test.rpartition(" (")
            reached.setdefault(name, set()).add(
                test.partition("::")[0] if when == "setup)" else test
            )
    answer = {}
    for mutant in mutants:
        # Keep only tests of this run: some tests run further tests in copies.
        found = reached.get(mutant.id, set()) & seconds.keys()
        folders = [
            f"tests/{top_folder}"
            for top_folder in (os.path.dirname(mutant.file), mutant.file.split("/")[0])
            if (ROOT / "tests" / top_folder).is_dir()
        ]
        known = sorted(found, key=lambda test: seconds.get(test, 0.0))
        answer[mutant.id] = known if known or mutant.id not in without else folders[:1] or ["tests"]
    return answer


def judge(mutant: Mutant, tests: list[str]) -> str:
    """Return ``killed``, ``slow`` (only its slow test kills it), ``survived``, or ``unreached``."""
    verdict = _judged(mutant, QUICK, tests) if tests else "unreached"
    if verdict != "killed" and mutant.slow:
        return "slow" if _judged(mutant, ["-m", "slow"], [mutant.slow]) == "killed" else "survived"
    return verdict


def _judged(mutant: Mutant, which: list[str], tests: list[str]) -> str:
    """Return ``killed`` or ``survived``. Raise RuntimeError if pytest itself failed."""
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(Path(folder, "tree"))
        (tree / mutant.file).write_text(mutant.text(ROOT), encoding="utf-8")
        named = Path(folder, "tests")
        named.write_text("\n".join(tests) + "\n")
        try:
            code = run_tests(tree, [*which, "-x", f"@{named}"], LIMIT)
        except subprocess.TimeoutExpired:
            return "killed"
    if code not in (0, 1, 2):
        raise RuntimeError(f"{mutant.id}: pytest ended with {code}")
    return "killed" if code else "survived"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--sample", type=int, help="so many of them, drawn with --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", metavar="ID", help="these alone")
    parser.add_argument(
        "--reach",
        type=Path,
        metavar="FILE",
        help="which tests reach which mutant: read from here, or learned and kept",
    )
    parser.add_argument("--workers", type=int, default=2, help="mutants judged at a time")
    parser.add_argument(
        "tests", nargs="*", help="the tests that judge, instead of those that reach the line"
    )
    options = parser.parse_args()
    mutants = read_mutants()
    unknown = set(options.only or ()) - {mutant.id for mutant in mutants}
    if unknown:
        parser.error(f"no mutant has the id {', '.join(sorted(unknown))}")
    if options.only:
        mutants = [mutant for mutant in mutants if mutant.id in options.only]
    if options.sample:
        mutants = random.Random(options.seed).sample(mutants, min(options.sample, len(mutants)))
    if options.tests:
        reach = {mutant.id: options.tests for mutant in mutants}
    elif options.reach and options.reach.exists():
        reach = json.loads(options.reach.read_text())
    else:
        reach = learn(mutants, [])
        if options.reach:
            options.reach.write_text(json.dumps(reach, indent=1))
    killed = 0
    slow = 0
    began = time.monotonic()
    with ThreadPoolExecutor(options.workers) as pool:
        verdicts = pool.map(lambda mutant: judge(mutant, reach.get(mutant.id, [])), mutants)
        for done, (mutant, verdict) in enumerate(zip(mutants, verdicts, strict=True), 1):
            killed += verdict in ("killed", "slow")
            slow += verdict == "slow"
            left = (time.monotonic() - began) / done * (len(mutants) - done)
            print(
                f"{verdict:9} {mutant.id} ({mutant.file}: {mutant.why}); {done} of {len(mutants)},"
                f" {left / 60:.0f} min left",
                flush=True,
            )
    print(f"{killed} of {len(mutants)} mutants killed, {slow} of them by slow tests alone")
    return 0 if killed == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
