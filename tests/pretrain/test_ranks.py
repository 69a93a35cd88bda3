"""Rank 0's answer, and rank 0's refusal, reach every rank."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fem_common.exits import Exit
from tests.pretrain.conftest import DEMO, ROOT

SCRIPT = """
import sys
import torch
from fem_common.errors import ConfigError, StorageError
from pretrain.ranks import from_rank_0
rank, store, case = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(store, 2), rank=rank, world_size=2)
def compute():
    assert rank == 0, "asked on another rank"
    if case == "refused":
        raise ConfigError("data/train.idx is another file")
    if case == "missing":
        open(store + ".missing")
    if case == "circular":
        open(store + ".circular")
    if case == "input/output":
        open("/proc/self/mem", "rb").read(1)
    return {"answer": rank}
try:
    print(from_rank_0(compute))
except ConfigError as error:
    print("refused:", error)
except StorageError as error:
    print("failed:", error)
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("answered", "{'answer': 0}\n"),
        ("refused", "refused: data/train.idx is another file\n"),
        ("missing", "refused: {store}.missing: No such file or directory\n"),
        ("circular", "failed: {store}.circular: Too many levels of symbolic links\n"),
        ("input/output", "failed: Input/output error\n"),
    ],
)
def test_all_ranks_hear_the_same(tmp_path: Path, case: str, said: str) -> None:
    store = tmp_path / "store"
    (tmp_path / "store.circular").symlink_to("store.circular")
    command = [sys.executable, "-c", SCRIPT]
    ranks = [subprocess.Popen([*command, str(rank), str(store), case], cwd=ROOT, stdout=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        heard = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert heard == [said.replace("{store}", str(store))] * 2
    assert [rank.returncode for rank in ranks] == [0, 0]


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
