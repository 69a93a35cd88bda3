"""Rank 0's answer, and rank 0's refusal, reach every rank."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fem_common.errors import ConfigError, StorageError
from fem_common.exits import Exit
from fem_megatron.megatron import platform
from pretrain.ranks import from_rank_0
from tests.pretrain.conftest import DEMO, ROOT
from tests.ranks import answer

CASES = {
    "answered": "{'answer': 0}",
    "refused": "refused: data/train.idx is another file",
    "missing": "refused: {folder}/missing: No such file or directory",
    "circular": "failed: {folder}/circular: Too many levels of symbolic links",
    "input/output": "failed: Input/output error",
}


def ask_rank_0(folder: Path) -> None:
    """Prints what every case ends in, a line each; on each of two ranks."""
    platform.initialize_distributed()
    rank = torch.distributed.get_rank()

    def compute(case: str) -> dict[str, int]:
        assert rank == 0, "asked on another rank"
        if case == "refused":
            raise ConfigError("data/train.idx is another file")
        if case in ("missing", "circular"):
            (folder / case).open()
        if case == "input/output":
            Path("/proc/self/mem").read_bytes()
        return {"answer": rank}

    for case in CASES:
        try:
            print(from_rank_0(lambda: compute(case)))  # noqa: B023
        except ConfigError as error:
            print("refused:", error)
        except StorageError as error:
            print("failed:", error)
    torch.distributed.destroy_process_group()


def test_all_ranks_hear_the_same(tmp_path: Path) -> None:
    (tmp_path / "circular").symlink_to("circular")
    answer(2, ask_rank_0, tmp_path, output=tmp_path / "out")
    wanted = [line.replace("{folder}", str(tmp_path)) for line in CASES.values()]
    assert [(tmp_path / f"out.{rank}").read_text().splitlines() for rank in range(2)] == [wanted] * 2


@pytest.mark.parametrize(
    ("config", "said", "code"),
    [
        (DEMO, "unknown key model.num_layer", Exit.WRONG_INPUT),
        ("failing.yaml", "Input/output error", Exit.FAULT),  # it opens, and reading fails
    ],
)
def test_torchruns_last_lines_are_the_error(tmp_path: Path, config: str, said: str, code: Exit) -> None:
    (tmp_path / "failing.yaml").symlink_to("/proc/self/mem")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "pretrain"]
    file = ROOT / config if config == DEMO else tmp_path / config
    done = subprocess.run([*command, str(file), "model.num_layer=3"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1  # torchrun's own, whatever the ranks' are
    (cause,) = done.stderr.split("Root Cause")[1:]
    last = rf"exitcode  : {code} .*\n.*\n  traceback : pretrain: error: .*{said}.*\n=+\s*\Z"
    assert re.search(last, cause), cause
