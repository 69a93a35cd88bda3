"""Test of the documents: a reader types the commands of one page in order, in a fresh clone, after
``make demo``. Each ends with exit code 0, and no tracked or new file shows up in ``git status``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_commands import COMMANDS, commands_of
from tests.test_house import ROOT, texts

# Regular expression -> why the commands that contain it do not run in this test.
NOT_RUN = {
    r"^make demo$|tools\.demo$": "the demo itself: its products are provided",
    r"^source ": "the environment of this test is used",
    r"^make test": "these are the tests themselves",
    r"tools\.demo --readme": "rewrites the README's figures",
    r"gpu_suite --minutes|gpu_suite --re": "needs a GPU, or the outcomes of one",
    r"TOKENIZER|fineweb_edu|^hf download": "needs FineWeb-Edu and a tokenizer from the internet",
    r"(index|8 -m pretrain) configs/run/fem_sm_340m_15bt\.yaml$": "needs FineWeb-Edu",
    r"--cluster my_cluster": "needs Slurm",
    r"launch logs ": "needs a submitted run",
    r"evaluate runs/fem_sm_1\.3b_100bt": "needs a trained model of 1.3B parameters",
    r"evaluate --download": "needs the internet",
    r"^transformers ": "needs packages that a user installs for it; a server, and a conversation",
    r"evaluate\.report ": "needs the results of two machines",
    r"scaling (run|collect) configs/studies": "trains for up to two hours",
    r"coord-check .*--random|kernel_gate --warm": "takes ten minutes",
    r"tools\.bench\.data_prep": "its targets need an idle machine; the third needs the user's text",
}
SHORT = "train.steps=20"
NEEDS_DEMO = re.compile(r"runs/demo|configs/run/(demo|scaling_cpu)|configs/studies/\w*cpu")


def reason(command: str) -> str | None:
    """Return why a command does not run here, None if it runs."""
    return next((why for words, why in NOT_RUN.items() if re.search(words, command)), None)


def without_comment(command: str) -> str:
    return re.sub(r"\s+#.*", "", command)


PAGES = [
    name
    for name, text in texts(".md").items()
    if any(reason(without_comment(command)) is None for command in commands_of(text))
]


def clone(into: Path) -> Path:
    """Clone the committed state of the repository, without a copy of its history."""
    subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(into)], check=True)
    return into


def typed(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command line in a clone, with this test's interpreter in place of ``.venv``.

    The variable ``PET_STANDALONE`` makes torchrun choose a free port.
    """
    programs = Path(sys.executable).parent
    line = command.replace(".venv/bin/", f"{programs}/")
    if line.startswith("make "):
        line += f" PYTHON={sys.executable}"
    environment = {
        **{key: value for key, value in os.environ.items() if key[:4] != "MAKE"},
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(folder),
        "HF_HUB_OFFLINE": "1",
        "PET_STANDALONE": "1",
    }
    return subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the products of ``make demo`` with fewer steps, which ends with a loss that is too
    high.
    """
    root = clone(tmp_path_factory.mktemp("demo") / "clone")
    done = typed(f"python -m tools.demo {SHORT}", root)
    assert "nats below the unigram entropy" in done.stdout.splitlines()[-1], done.stdout[-3000:]
    return root / "runs" / "demo"


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run_in_order(
    page: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    root = clone(tmp_path / "clone")
    commands = commands_of((root / page).read_text(encoding="utf-8"))
    if NEEDS_DEMO.search("\n".join(commands)):
        demo = request.getfixturevalue("demo")
        shutil.copytree(demo, root / "runs" / "demo", symlinks=True)
    notes = root / "data" / "notes"  # the text of a reader of data_prep/README.md
    notes.mkdir(parents=True)
    for number, text in enumerate(texts(".md").values()):
        (notes / f"{number}.txt").write_text(text, encoding="utf-8")
    for command in commands:
        if reason(without_comment(command)) is None:
            done = typed(command, root)
            assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}"
            left = subprocess.check_output(["git", "status", "--porcelain"], cwd=root, text=True)
            assert not left, f"{command}\n{left}"


def test_every_command_that_does_not_run_is_documented() -> None:
    unused = [
        words
        for words in NOT_RUN
        if not any(re.search(words, without_comment(command)) for command in COMMANDS)
    ]
    assert not unused
