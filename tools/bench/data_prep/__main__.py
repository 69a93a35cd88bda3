"""Benchmarks of data_prep: tokenization against other ways, workers, GPTDataset's index, reading.

    python -m tools.bench.data_prep --quick            # under 4 minutes on two cores
    python -m tools.bench.data_prep --write-table      # 15 minutes; writes the tables of the docs

Speed is megabytes of text per CPU second of all processes of a command, without start-up. Exit code
1: a target is missed, or a pipeline wrote different bytes; 2: a requirement is missing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from fem_common.errors import CommandError, end
from tools.bench import runner
from tools.bench.data_prep import breakdown, corpus, encoding, index, peers, report
from tools.bench.data_prep.processes import ROOT, Neighbours, Spread, load, run

FOLDER = ROOT / "runs" / "bench" / "data_prep"
PAGE = ROOT / "docs" / "benchmarks" / "data_prep.md"
VOCAB_SIZE = 32_000
TRAINED_ON_MB = 20
PARTS = ("encoding", "workers", "index", "reading")
WORKER_ROUNDS = 3  # minimum: wall time has outliers that CPU time does not have


@dataclass(frozen=True)
class Effort:
    """Size of the measurement.

    megabytes: corpus -> megabytes of its text.
    pairs: (corpus, tokenizer style) pairs to measure.
    rounds: number of rounds.
    copies: number of copies of the first corpus that are encoded to compare two workers with one.
    documents: number of documents of the index.
    again: runs of data_prep in each round.
    vocab_size: vocabulary size of the tokenizers.
    """

    megabytes: dict[str, float]
    pairs: tuple[tuple[str, str], ...]
    rounds: int
    copies: int
    documents: int
    again: int = 3
    vocab_size: int = VOCAB_SIZE


QUICK = Effort({"prose": 40}, (("prose", "llama"),), 2, 3, 10_000_000, again=2)
FULL = Effort(
    {"prose": 50, "code": 50},
    (("prose", "llama"), ("code", "llama"), ("prose", "gpt")),
    3,
    3,
    index.DOCUMENTS,
    again=2,
)


class Bench:
    """State of one benchmark run.

    Corpora, tokenizers and results are made when they are first needed.

    cache: folder that is reused by later runs.
    scratch: temporary folder.
    """

    def __init__(
        self, effort: Effort, cache: Path, scratch: Path, given: Path | None, peers_at: Path | None
    ) -> None:
        self.effort = effort
        self.cache = cache
        self.scratch = scratch
        self.given = given
        self.peers_at = peers_at
        self.results = report.Results()
        self.began, self.load, self.neighbours = time.monotonic(), load(), Neighbours()

    def tell(self, text: str) -> None:
        """Print a line of progress."""
        print(f"[{time.monotonic() - self.began:4.0f} s] {text}", file=sys.stderr, flush=True)

    def text(self, name: str) -> corpus.Corpus:
        """Return the corpus ``name``.

        With --corpus, the only corpus is that of the user, named "given".
        """
        found = next((one for one in self.results.corpora if one.name == name), None)
        if found is None:
            megabytes = (
                sum(self.effort.megabytes.values()) if self.given else self.effort.megabytes[name]
            )
            found = corpus.make(name, megabytes, self.cache / "corpora", self.given)
            self.results.corpora.append(found)
            self.tell(
                f"{name}: {found.documents:,} documents, {found.text_bytes / 1e6:.1f} MB of text"
            )
        return found

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Measured pairs (corpus, tokenizer style)."""
        return tuple(
            dict.fromkeys(
                ("given" if self.given else name, style) for name, style in self.effort.pairs
            )
        )

    def kit(self, style: str) -> peers.Kit:
        """Return a tokenizer of the style ``style``.

        data_prep trains it on all measured corpora, unless an earlier run has done so.
        """
        names = dict.fromkeys(name for name, _ in self.pairs)
        folders = [self.text(name).folder for name in names]
        folder = (
            self.cache
            / "tokenizers"
            / (
                f"{style}-{self.effort.vocab_size}-"
                f"{'-'.join(Path(name).parent.name for name in folders)}"
            )
        )
        if not (folder / "tokenizer.json").exists():
            words = [
                sys.executable,
                "-m",
                "data_prep",
                "train-tokenizer",
                *folders,
                "--out",
                str(folder),
                "--style",
                style,
            ]
            run(
                [
                    *words,
                    "--vocab-size",
                    str(self.effort.vocab_size),
                    "--sample-mb",
                    str(TRAINED_ON_MB),
                ],
                self.scratch / "training",
            )
            self.tell(f"a tokenizer of {self.effort.vocab_size} entries, {style}-style")
        return peers.make_kit(style, folder)

    def encoding(self) -> None:
        """Measure every pipeline, and the steps of a data_prep worker, on every pair of `pairs`."""
        python = peers.environment(self.peers_at, self.cache)
        self.tell(
            "peers: "
            f"{', '.join(f'{name} {number}' for name, number in peers.versions(python).items())}"
        )
        for name, style in self.pairs:
            text = self.text(name)
            kit = self.kit(style)
            rounds = (self.effort.rounds, self.effort.again)
            self.results.comparisons.append(
                encoding.compare(text, kit, python, rounds, self.scratch, self.tell)
            )
            self.results.breakdowns.append(breakdown.measure(text, kit, self.scratch))

    def workers(self) -> None:
        """Measure the speed of data_prep with two workers relative to one."""
        name, style = self.pairs[0]
        found = encoding.scale(
            self.text(name),
            self.effort.copies,
            self.kit(style),
            max(WORKER_ROUNDS, self.effort.rounds),
            self.scratch,
        )
        self.results.scaling = found
        self.tell(
            f"two workers: {', '.join(f'{speedup:.2f}' for speedup in found.speedups)} times one"
        )

    def index(self) -> None:
        """Measure how long GPTDataset takes to build its index of synthetic documents."""
        self.results.indexing = index.measure(
            self.effort.documents, self.effort.rounds, self.scratch / "index"
        )
        self.tell(
            f"index: {', '.join(f'{each.whole.cpu:.1f} CPU s' for each in self.results.indexing)}, "
            "with start-up"
        )

    def reading(self) -> None:
        """Measure reading random samples from the output of data_prep."""
        name, style = self.pairs[0]
        kit, out = self.kit(style), self.scratch / "reading.json"
        prefix = self.scratch / "out" / "train"
        if not prefix.with_suffix(".idx").exists():  # part "workers" has already written one
            encoding.once(peers.OURS, self.text(name).folder, kit, Path(), self.scratch)
        values = (prefix, kit.folder.eod_id, kit.folder.vocab_size, out)
        run(
            [sys.executable, "-m", "tools.bench.data_prep.reading", *map(str, values)], self.scratch
        )
        found = json.loads(out.read_text(encoding="utf-8"))
        self.results.reads, self.results.items = found["reads"], found["items"]
        self.tell(f"reading: {Spread.of(found['reads']).median:,.0f} samples a CPU second")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = runner.command_line("tools.bench.data_prep", __doc__ or "")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="less text, two rounds, 10M documents to index: under 4 minutes on two cores",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="PART",
        choices=PARTS,
        default=list(PARTS),
        help=f"measure only these parts; choices: {', '.join(PARTS)}",
    )
    parser.add_argument(
        "--corpus",
        type=Path,
        metavar="PATH",
        help="measure on this parquet file or folder (columns text and id)",
    )
    parser.add_argument(
        "--peers",
        type=Path,
        metavar="PATH",
        help="a Python environment with datatrove; default: one that the benchmark creates once",
    )
    parser.add_argument(
        "--write-table",
        action="store_true",
        help=f"also write the tables to {PAGE.relative_to(ROOT)}",
    )
    return parser.parse_args(arguments)


def main(
    arguments: list[str] | None = None, effort: Effort | None = None, folder: Path = FOLDER
) -> int:
    """Run the benchmark and print the report.

    effort: size of the measurement; None selects it from the command line.
    folder: folder for the cache and the temporary files.

    Return 0; 1 if a target is missed or a pipeline wrote different bytes; 2 if a requirement is
    missing.
    """
    options = parse(arguments)
    try:
        if options.corpus is not None:
            options.corpus.stat()
    except OSError as error:
        return end("tools.bench.data_prep", error)
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="scratch-", dir=folder))
    bench = Bench(
        effort or (QUICK if options.quick else FULL), folder, scratch, options.corpus, options.peers
    )
    steps: dict[str, Callable[[], None]] = {part: getattr(bench, part) for part in PARTS}
    try:
        for part in PARTS:
            if part in options.only:
                steps[part]()
    except (CommandError, OSError) as error:
        return end("tools.bench.data_prep", error)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return conclude(bench, options)


def conclude(bench: Bench, options: argparse.Namespace) -> int:
    """Print and write the results and return the exit code."""
    results, seconds = bench.results, time.monotonic() - bench.began
    machine = runner.facts()
    machine["packages"] |= {
        name: version(name) for name in ("gigatoken", "tokenizers", "pyarrow", "numpy")
    }
    text = report.render(results)
    others = bench.neighbours.cores()
    meanwhile = "" if others is None else f"; other programs used {others:.2f} cores meanwhile"
    how = (
        f"{seconds:.0f} s{' with --quick' * options.quick}; "
        f"load average {bench.load:.1f} at first{meanwhile}"
    )
    head = f"{runner.sentence(machine)}; {how}."
    print(f"{head}\n\n{text}")
    figures = results.figures()
    missed = [
        f"missed: {figure.what}" for figure in figures if figure.verdict is report.Verdict.FAIL
    ]
    faults = results.faults
    content = asdict(results) | {
        "suite": "data_prep",
        "quick": options.quick,
        "machine": machine,
        "seconds": seconds,
    }
    content |= {"load": bench.load, "others": others}
    content["figures"] = [asdict(figure) | {"verdict": figure.verdict} for figure in figures]
    runner.write_json(options.json, content | {"faults": faults})
    if options.write_table:
        report.write_table(PAGE, f"{head}\n\n{text}")
    for line in [*missed, *faults]:
        print(line, file=sys.stderr)
    return 1 if missed or faults else 0


if __name__ == "__main__":
    sys.exit(main())
