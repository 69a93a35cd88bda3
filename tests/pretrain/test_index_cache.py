"""Tests of the index cache: complete or absent with concurrent builders and kills; never of other
data; built in advance by ``--index``.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from pretrain.__main__ import main
from pretrain.data.facts import Contents, SourceContents
from pretrain.data.index_cache import COMPLETE, NOT_THERE, IndexCache
from tests.pretrain.conftest import DEMO, SMALL, Command
from tests.pretrain.data_folder import write_folder, write_pair
from tests.pretrain.test_checkpoint_faults import largest_file
from tests.ranks import PATIENCE, answer, finished, forked, wait_until

# --- the folder -----------------------------------------------------------------------------------

SOURCES = (
    SourceContents("train", "data/train", "a" * 64, "b" * 64),
    SourceContents("valid", "data/valid", "c" * 64, "d" * 64),
)
FILES = {"one.npy": b"1" * 1000, "two.npy": b"2" * 70_000, "description.txt": b"three"}


def cache_in(root: Path, key: str = "k") -> IndexCache:
    return IndexCache(root, Contents(SOURCES), (key, [1, 2]))


def build(cache: IndexCache) -> None:
    with cache.building() as folder:
        for name, content in FILES.items():
            (folder / name).write_bytes(content)
        cache.publish(folder)


def folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir())


def test_a_cache_states_what_it_was_made_from_and_what_it_holds(tmp_path: Path) -> None:
    cache = cache_in(tmp_path / "new" / "cache")
    assert cache.fault() == NOT_THERE
    build(cache)
    assert cache.fault() is None
    assert folders(cache.root) == [cache.folder]
    record = json.loads((cache.folder / COMPLETE).read_text())
    assert record == {
        "format": 1,
        "sources": [
            {"split": "train", "prefix": "data/train", "idx_sha256": "a" * 64, "bin": "b" * 64},
            {"split": "valid", "prefix": "data/valid", "idx_sha256": "c" * 64, "bin": "d" * 64},
        ],
        "files": {
            name: {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
            for name, raw in sorted(FILES.items())
        },
    }
    assert {
        path.name: path.read_bytes() for path in cache.folder.iterdir() if path.name != COMPLETE
    } == FILES


DAMAGES: dict[str, Callable[[Path], object]] = {
    "two.npy has 69999 bytes instead of 70000": (
        lambda folder: (folder / "two.npy").write_bytes(b"2" * 69_999)
    ),
    "one.npy is missing": lambda folder: (folder / "one.npy").unlink(),
    "complete.json is missing": lambda folder: (folder / COMPLETE).unlink(),
    "complete.json cannot be read (JSONDecodeError)": (
        lambda folder: (folder / COMPLETE).write_text("{")
    ),
    "complete.json cannot be read (TypeError)": lambda folder: (folder / COMPLETE).write_text("[]"),
    "complete.json cannot be read (KeyError)": (
        lambda folder: (folder / COMPLETE).write_text('{"format": 1}')
    ),
    "complete.json has format 9": (
        lambda folder: (folder / COMPLETE).write_text('{"format": 9, "files": {}}')
    ),
    "complete.json cannot be read (NotADirectoryError)": lambda folder: (
        folder.rename(folder.with_name("x")) and folder.write_text("")
    ),
}


def test_what_is_not_whole_is_built_again_and_what_is_whole_never_replaced(tmp_path: Path) -> None:
    """The slower of two jobs discards its own cache, because the other job may be reading the
    existing one.
    """
    for output, damage in DAMAGES.items():
        cache = cache_in(tmp_path / str(len(output)))
        build(cache)
        damage(cache.folder)
        assert cache.fault() == output
        build(cache)
        assert cache.fault() is None
        before = (cache.folder / "one.npy").stat()
        build(cache)
        after = (cache.folder / "one.npy").stat()
        assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
        assert not [path for path in folders(cache.root) if path.name.startswith(".")]


def test_a_file_that_goes_while_it_is_inspected_is_no_fault_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may replace a damaged folder at any time."""
    cache, stat = cache_in(tmp_path), Path.stat
    build(cache)

    def seen_last(path: Path, **named: Any) -> os.stat_result:
        found = stat(path, **named)
        if path.name == "one.npy":
            path.unlink()
        return found

    monkeypatch.setattr(Path, "stat", seen_last)
    assert cache.fault() is None
    assert cache.fault() == "one.npy is missing"


def builder(root: Path, damages: bool) -> None:
    """Build the cache repeatedly; the first builder damages the existing one if ``damages``."""
    cache, dice = cache_in(root), random.Random(0)
    for _ in range(30):
        build(cache)
        assert cache.fault() is None or damages, cache.fault()
        if damages and os.environ["RANK"] == "0":
            (cache.folder / dice.choice(["one.npy", "complete.json"])).unlink(missing_ok=True)


def holder(root: Path) -> None:
    """Start to build the cache and wait."""
    with cache_in(root).building() as folder:
        (folder / "one.npy").write_bytes(b"half")
        print(folder.name, flush=True)
        time.sleep(600)


def dies_at(root: Path, renames: int) -> None:
    """Build the cache and get killed before the rename with this number."""
    rename, left = os.rename, [renames]

    def dying(*arguments: Any) -> None:
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        rename(*arguments)

    vars(os)["rename"] = dying
    build(cache_in(root))


# True: one of the builders damages the existing folder again and again.
@pytest.mark.parametrize("damages", [False, True], ids=["alone", "beside"])
def test_builders_at_once_do_not_harm_each_other(tmp_path: Path, damages: bool) -> None:
    root = tmp_path / "cache"
    answer(3, builder, root, damages, output=tmp_path / "said")
    cache = cache_in(root)
    build(cache)
    assert cache.fault() is None
    assert folders(root) == [cache.folder]


def test_a_killed_builder_leaves_no_final_name_and_its_rest_is_removed_when_it_is_old(
    tmp_path: Path,
) -> None:
    root, output = tmp_path / "cache", [tmp_path / f"said.{rank}" for rank in range(2)]
    with forked(2, holder, root, output=tmp_path / "said") as builders:
        wait_until(
            lambda: all(each.exists() and each.read_text().endswith("\n") for each in output),
            builders,
        )
        rest, busy = (root / each.read_text().strip() for each in output)
        builders[0].kill()
        builders[0].join()
        cache = cache_in(root)
        assert cache.fault() == NOT_THERE
        build(cache)
        # The rest is new, so its builder may be about to lock it.
        assert folders(root) == sorted([rest, busy, cache.folder])
        for folder in (rest, busy):
            os.utime(folder, (time.time() - 4000,) * 2)
        build(cache)
        assert folders(root) == sorted([busy, cache.folder])


@pytest.mark.parametrize("what", ["folder", "file"])
@pytest.mark.parametrize("renames", [0, 1])
def test_a_kill_between_the_renames_of_a_damaged_cache_leaves_nothing_for_ever(
    tmp_path: Path, renames: int, what: str
) -> None:
    root = tmp_path / "cache"
    cache = cache_in(root)
    build(cache)
    if what == "folder":
        (cache.folder / "one.npy").unlink()
    else:
        shutil.rmtree(cache.folder)
        cache.folder.write_text("")
    with forked(1, dies_at, root, renames, output=tmp_path / "said") as (killed,):
        killed.join(PATIENCE)
        assert killed.exitcode == -signal.SIGKILL, (tmp_path / "said.0").read_text()
    for rest in root.glob(".building-*"):
        os.utime(rest, (time.time() - 4000,) * 2)
    build(cache)
    assert cache.fault() is None
    assert {path.name for path in root.iterdir()} == {
        ".lock",
        cache.folder.name,
    }


def test_the_lock_of_publication_works_as_nfs_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS an exclusive lock requires a file opened for writing."""
    modes = []

    def flock_of_nfs(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX:
            modes.append(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE)
            if modes[-1] == os.O_RDONLY:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(fcntl, "flock", flock_of_nfs)
    build(cache_in(tmp_path))
    assert len(modes) == 2 and os.O_RDONLY not in modes


# --- --index and the runs that use it -------------------------------------------------------------


class Run(Command):
    """`conftest.Command` on a separate small data folder."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.cache = folder / "cache"
        data = [f"data.{split}.0.prefix={self.data / split}" for split in ("train", "valid")]
        super().__init__(
            [
                f"run_dir={folder / 'run'}",
                *SMALL,
                "data.test=[]",
                f"data.index_cache={self.cache}",
                *data,
            ],
            capsys,
        )
        self.write_data(seed=0)

    def write_data(self, seed: int, documents: int = 60, length: int = 120) -> None:
        draw = random.Random(seed)
        # The number of tokens and documents does not depend on the seed; only the contents differ.
        lengths = [draw.randint(2, length) for _ in range(documents // 2)]
        lengths += [length + 2 - size for size in lengths]
        write_folder(
            self.data,
            documents=[[*(draw.randrange(499) for _ in range(size - 1)), 499] for size in lengths],
        )

    def built(self) -> dict[str, tuple[int, int]]:
        """Return cache folder -> (inode, time of change) of its complete.json."""
        found = {path.parent.name: path.stat() for path in self.cache.glob(f"*/{COMPLETE}")}
        return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in found.items()}


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(tmp_path, capsys)


def test_an_index_built_ahead_is_what_the_run_uses_and_other_data_gets_another(run: Run) -> None:
    run("--index")
    (name,) = run.built()
    folder, last = run.cache / name, run.out.splitlines()[-1]
    assert last.startswith(f"index cache {folder}: ")
    assert "unchanged" not in last
    for figure in (
        " samples of training and ",
        " of validation, 32 tokens each; ",
        " CPU s",
        " GiB of memory at most",
    ):
        assert figure in last
    assert not (run.folder / "run").exists()  # the run itself has not begun
    before = run.built()
    run()
    assert "index cache" not in run.out and "resumed" not in run.out
    # A shorter continuation keeps the order that the first attempt drew; ``--index`` builds that
    # one.
    run("train.steps=10", "--index")
    assert run.out.startswith(f"index cache {folder}: unchanged, ")
    assert len(run.out.splitlines()) == 1
    assert run.built() == before
    # Other data under the same names and of the same sizes: the run that was trained on the old
    # data is refused, and a new run finds no old index.
    run.write_data(seed=1)
    run(code=2)
    assert "was trained on other data" in run.err
    run(f"run_dir={run.folder / 'anew'}")
    assert len(run.built()) == 2 and before.items() <= run.built().items()


def test_a_damaged_cache_is_built_again_with_a_line_and_ranks_share_it(run: Run) -> None:
    run("--index")
    (name,) = run.built()
    index = next((run.cache / name).glob("*GPTDataset-train-sample_index.npy"))
    full = index.read_bytes()
    index.write_bytes(full[:100])
    run("--index")
    assert (
        f"index cache {run.cache / name}: {index.name} has 100 bytes instead of {len(full)};"
        " building it again" in run.out
    )
    assert index.read_bytes() == full
    before = run.built()
    assert "index cache" not in finished(
        2, [DEMO, *run.settings, "train.eval_interval=0"], run.folder / "out"
    )
    assert run.built() == before


def late_reader(arguments: list[str]) -> int:
    """Run with rank 1 delayed at every index file that rank 0 has built."""
    load = numpy.load

    def late(*given: Any, **named: Any) -> Any:
        time.sleep(0.05)
        return load(*given, **named)

    if os.environ["RANK"] == "1":
        vars(numpy)["load"] = late
    return main(arguments)


def test_a_rank_that_reads_late_finds_the_files_where_they_were_built(run: Run) -> None:
    arguments = [DEMO, *run.settings, "train.steps=1", "optimizer.warmup_steps=0"]
    assert answer(2, late_reader, arguments, output=run.folder / "out") == 0
    assert len(run.built()) == 1


def test_the_folder_follows_what_decides_the_order(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pair(run.folder / "more", [[*range(400), 499]] * 9)
    second = [f"data.train.1.prefix={run.folder / 'more'}"]
    weighted = [*second, "data.train.1.weight=2"]
    changes = [
        [],
        ["train.seed=43"],
        ["data.seq_length=16"],
        ["train.steps=13"],
        second,
        weighted,
        [*weighted, "data.valid=[]"],
    ]
    for number, change in enumerate(changes, 1):
        run(*change, "--index")
        assert len(run.built()) == number, change
    # The index does not depend on the number of ranks, the division of the batch, the model, or the
    # folder that relative paths start from.
    before = run.built()
    run("train.micro_batch_size=1", "model.num_layers=2", "parallel.world_size=2", "--index")
    monkeypatch.chdir(run.folder)
    run("data.train.0.prefix=data/train", "data.valid.0.prefix=./data/valid", "--index")
    assert run.built() == before


def test_mistakes_of_index_are_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.folder / "file").write_text("")
    output = run.refused("--index", f"data.index_cache={run.folder / 'file'}")
    assert "the index cache cannot be written: " in output
    assert output.endswith("; data.index_cache=FOLDER sets another location\n")
    run.write_data(seed=2, documents=6_000, length=4)
    with largest_file(18_000):
        output = run.refused("--index", code=1)  # a full disk may have space again later
    assert output.startswith("pretrain: error: the index cache cannot be written: ")
    assert folders(run.cache) == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([DEMO, *run.settings, "--index"]) == 2
