"""Benchmark of data_prep: tokenization against other ways, and the sample index of GPTDataset.

    python -m tools.bench.data_prep --quick       # about 3 minutes on two cores
    python -m tools.bench.data_prep               # about 7 minutes
    python -m tools.bench.data_prep --corpus PATH # your own parquet: columns text and id

Each pipeline is a complete command in a separate process with one thread. Its rate is megabytes of
text per CPU second of the command and its children; the cost of the same command on the first
documents, which is its start-up, is subtracted. The pipelines of a round run one after the other,
ratios are computed per round, and all pipelines must write the same bytes. Exit code 1: a target is
missed, or the bytes differ; 2: a requirement is missing.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from data_prep.encode.tokenizer import TokenizerFolder, load_folder
from data_prep.prepared.indexed import dtype_name
from fem_common.cli import run
from fem_common.errors import Fault, UserError
from tools.bench import runner
from tools.bench.runner import Spread

PROGRAM = "tools.bench.data_prep"
ROOT = Path(__file__).resolve().parents[2]
SCRATCH = ROOT / "runs" / "bench" / "data_prep"
VOCAB_SIZE = 32_000
STARTUP_DOCUMENTS = 256  # includes the text that data_prep encodes to check its encoder
LAST_LINES = 15  # lines of a failed command's output that are shown
# One thread in every process: CPU seconds then measure work, not threads that wait for each other.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "ARROW_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
# Runs a command and writes its cost. On Linux a process inherits the peak memory of the process
# that started it, so a small process between the benchmark and the command keeps that peak low.
MEASURE = """
import json, os, subprocess, sys
process = subprocess.Popen(sys.argv[2:])
_, status, usage = os.wait4(process.pid, 0)
cost = {"cpu": usage.ru_utime + usage.ru_stime, "peak_bytes": usage.ru_maxrss * 1024}
json.dump(cost, open(sys.argv[1], "w"))
sys.exit(os.waitstatus_to_exitcode(status) != 0)
"""
DATATROVE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import ParquetReader
from datatrove.pipeline.tokens import MegatronDocumentTokenizer

if __name__ == "__main__":
    source, tokenizer, out = sys.argv[1:]
    reader = ParquetReader(source, glob_pattern="*.parquet", read_metadata=False)
    writer = MegatronDocumentTokenizer(out, tokenizer_name_or_path=tokenizer, eos_token="")
    LocalPipelineExecutor([reader, writer], tasks=1, workers=1, logging_dir=out + "/logs").run()
"""
# Megatron-LM's tools/preprocess_data.py in its fastest form: the tokenizers library without
# transformers, and a column of parquet instead of JSON lines.
PLAIN = """
import sys
from pathlib import Path
import numpy as np
import pyarrow.parquet as pq
from tokenizers import Tokenizer
from data_prep.prepared.indexed import IndexedWriter

source, file, prefix, dtype, eod, batched = sys.argv[1:]
tokenizer, writer = Tokenizer.from_file(file), IndexedWriter(Path(prefix), dtype)
for file in sorted(Path(source).glob("*.parquet")):
    for rows in pq.ParquetFile(file).iter_batches(1000, columns=["text"]):
        texts = rows.column(0).to_pylist()
        if batched == "yes":
            encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        else:
            encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        ids = [np.array(each.ids + [int(eod)], dtype=dtype) for each in encoded]
        writer.add(np.concatenate(ids), np.array([len(each) for each in ids]))
writer.finish()
"""
OURS, FALLBACK = "data_prep, gigatoken", "data_prep, Hugging Face tokenizers"
PER_DOCUMENT, BATCHED = "one tokenizer call per document", "encode_batch_fast"
PEER = "datatrove"


@dataclass(frozen=True)
class Cost:
    """Cost of a command.

    cpu: user and system seconds, with those of child processes.
    peak_bytes: peak resident bytes of the largest process.
    """

    cpu: float
    peak_bytes: int


@dataclass(frozen=True)
class Figure:
    """Measured figure with its target: at least ``least``, or at most ``most``."""

    what: str
    value: Spread
    unit: str
    least: float | None = None
    most: float | None = None

    @property
    def good(self) -> bool:
        """Return True if the median meets the target; NaN does not."""
        median = self.value.median
        return median >= self.least if self.least is not None else median <= (self.most or 0.0)

    def cells(self) -> list[str]:
        """Return the figure's row of the table."""
        target = f"≥ {self.least:g}" if self.least is not None else f"≤ {self.most:.3g}"
        value = self.value
        return [
            self.what,
            f"{value.median:.3g} {self.unit}",
            f"{value.least:.3g} to {value.most:.3g}",
            f"{target} {self.unit}",
            "pass" if self.good else "FAIL",
        ]


def measured(command: Sequence[str | Path], scratch: Path) -> Cost:
    """Run a command in the repository's root and return its cost.

    Raises Fault with the end of the output if the command fails.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    result = scratch / "cost.json"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", MEASURE, str(result), *map(str, command)],
        cwd=ROOT,
        env=environment | ONE_THREAD,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-LAST_LINES:])
        raise Fault(f"a command failed: {' '.join(map(str, command[:4]))} ...\n{last}")
    return Cost(**json.loads(result.read_text(encoding="utf-8")))


# --- tokenization -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """Parquet files below ``folder``, and the first documents below ``startup``.

    text_bytes, startup_bytes: UTF-8 bytes of the texts.
    """

    folder: Path
    startup: Path
    documents: int
    text_bytes: int
    startup_bytes: int


def installed_sources() -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the Python sources of the standard library and installed packages.

    They are ordered by a hash of their names, and each text occurs once.
    """
    files: dict[str, Path] = {}
    for kind in ("stdlib", "purelib"):
        root = Path(sysconfig.get_path(kind))
        files |= {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    seen: set[str] = set()
    for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
        try:
            text = files[name].read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if text.strip() and text not in seen:
            seen.add(text)
            yield name, text


def given_documents(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (id, text) of the rows of the parquet file or folder ``path``. Raises UserError."""
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise UserError(f"no .parquet below {path}")
    for file in files:
        try:
            for batch in pq.ParquetFile(file).iter_batches(columns=["text", "id"]):
                for row in batch.to_pylist():
                    if row["text"] and row["id"] is not None:
                        yield str(row["id"]), row["text"]
        except (OSError, ValueError, KeyError, pa.ArrowException) as error:
            raise UserError(
                f"{file}: not parquet with the columns text and id ({str(error).splitlines()[0]})"
            ) from None


def make_corpus(documents: Iterator[tuple[str, str]], megabytes: float, folder: Path) -> Corpus:
    """Write at most about ``megabytes`` of the documents to two parquet files and return them.

    Raises UserError if there are fewer than two documents.
    """
    rows, total = list[dict[str, str]](), 0
    for name, text in documents:
        rows.append({"id": name, "text": text})
        total += len(text.encode())
        if total >= megabytes * 1e6:
            break
    first = rows[: max(1, min(STARTUP_DOCUMENTS, len(rows) // 4))]
    if len(rows) < 2:
        raise UserError("the corpus has fewer than two documents")
    middle = (len(rows) + 1) // 2
    for name, part in (("all/0", rows[:middle]), ("all/1", rows[middle:]), ("startup/0", first)):
        file = folder / f"{name}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(part), file)
    startup_bytes = sum(len(row["text"].encode()) for row in first)
    return Corpus(folder / "all", folder / "startup", len(rows), total, startup_bytes)


def train_tokenizer(corpus: Corpus, style: str, vocab_size: int, folder: Path) -> TokenizerFolder:
    """Train a tokenizer on the corpus with data_prep.

    ``FOLDER/plain.json`` is the same tokenizer for the other pipelines: it has no special tokens,
    so that their literal strings are encoded as text, as in data_prep, and appends EOD to each text
    if special tokens are requested.
    """
    words = ["train-tokenizer", str(corpus.folder), "--out", str(folder), "--style", style]
    words += ["--vocab-size", str(vocab_size), "--sample-mb", "20"]
    measured([sys.executable, "-m", "data_prep", *words], folder.with_name("training"))
    known = load_folder(folder)
    spec: dict[str, Any] = json.loads((folder / "tokenizer.json").read_bytes())
    added = [
        token
        for token in spec.get("added_tokens", ())
        if not token["special"] and token["id"] != known.eod_id
    ]
    spec |= {"added_tokens": added, "truncation": None, "padding": None, "post_processor": None}
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.post_processor = TemplateProcessing(
        single="$A <EOD>", special_tokens=[("<EOD>", known.eod_id)]
    )
    (folder / "plain.json").write_text(tokenizer.to_str(), encoding="utf-8")
    return known


def pipelines(source: Path, tokenizer: TokenizerFolder, out: Path) -> dict[str, list[str]]:
    """Return name -> command that encodes the parquet files below ``source`` into ``out``."""
    plain, prefix = str(tokenizer.path / "plain.json"), str(out / "train")
    dtype, eod = dtype_name(tokenizer.vocab_size), str(tokenizer.eod_id)
    ours = ["-m", "data_prep", "run", str(source), "--tokenizer", str(tokenizer.path)]
    ours += ["--out", str(out), "--valid-percent", "0", "--test-percent", "0", "--workers", "1"]
    direct = ["-c", PLAIN, str(source), plain, prefix, dtype, eod]
    commands = {
        OURS: [*ours, "--encoder", "gigatoken"],
        FALLBACK: [*ours, "--encoder", "hf"],
        PER_DOCUMENT: [*direct, "no"],
        BATCHED: [*direct, "yes"],
        PEER: ["-c", DATATROVE, str(source), plain, str(out)],
    }
    return {name: [sys.executable, *words] for name, words in commands.items()}


@dataclass
class Side:
    """Results of one pipeline: one rate (MB per CPU second) and one start-up per round."""

    rates: list[float]
    startups: list[float]
    hashes: set[str]
    peak_bytes: int = 0


def compare(
    corpus: Corpus, tokenizer: TokenizerFolder, rounds: int, scratch: Path
) -> dict[str, Side]:
    """Run every pipeline ``rounds`` times on the corpus and return name -> results.

    Raises Fault if a pipeline fails or writes no .bin/.idx pair.
    """
    megabytes = (corpus.text_bytes - corpus.startup_bytes) / 1e6
    out = scratch / "out"
    sides = {name: Side([], [], set()) for name in pipelines(corpus.folder, tokenizer, out)}
    for number, (name, side) in itertools.product(range(rounds), sides.items()):
        costs = []
        for source in (corpus.startup, corpus.folder):
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir(parents=True)
            costs.append(measured(pipelines(source, tokenizer, out)[name], scratch))
        pair = [file for end in ("bin", "idx") for file in out.glob(f"*.{end}")]
        if len(pair) != 2:
            raise Fault(f"{name} wrote {len(pair)} files of a .bin/.idx pair")
        startup, total = costs
        seconds = total.cpu - startup.cpu
        side.rates.append(megabytes / seconds if seconds > 0 else float("nan"))
        side.startups.append(startup.cpu)
        side.hashes.add(hashlib.sha256(b"".join(file.read_bytes() for file in pair)).hexdigest())
        side.peak_bytes = max(side.peak_bytes, total.peak_bytes)
        report(f"round {number + 1} of {rounds}: {name}: {total.cpu:.1f} CPU s")
    return sides


def ratio(sides: dict[str, Side], over: str, under: str) -> Spread:
    """Return the ratio of the rates of two pipelines, over the rounds."""
    pairs = zip(sides[over].rates, sides[under].rates, strict=True)
    return Spread.of([above / below for above, below in pairs])


def encoding_figures(sides: dict[str, Side]) -> list[Figure]:
    """Return the figures of the tokenization that have a target."""
    targets = ((OURS, PER_DOCUMENT, 5.0), (OURS, PEER, 6.0), (FALLBACK, PER_DOCUMENT, 1.0))
    return [
        Figure(f"{over} ÷ {under}", ratio(sides, over, under), "x", least=least)
        for over, under, least in targets
    ]


def differing(sides: dict[str, Side]) -> list[str]:
    """Return the pipelines that wrote other bytes than one tokenizer call per document."""
    truth = sides[PER_DOCUMENT].hashes
    return [name for name, side in sides.items() if side.hashes != truth or len(truth) != 1]


def sides_table(sides: dict[str, Side]) -> str:
    """Return a table of the speed, start-up and memory of every pipeline."""
    columns = ["pipeline", "MB per CPU s", "÷ ours", "start-up, CPU s", "peak, MB"]
    rows = [
        [
            name,
            f"{statistics.median(side.rates):.2f}",
            f"{ratio(sides, name, OURS).median:.2f}",
            f"{statistics.median(side.startups):.2f}",
            f"{side.peak_bytes / 1e6:.0f}",
        ]
        for name, side in sides.items()
    ]
    return runner.table(columns, rows)


# --- index --------------------------------------------------------------------------------------

# FineWeb-Edu's sample of 100 billion tokens, whose index has the targets.
DOCUMENTS, TOKENS = 97_000_000, 101_700_000_000
INDEX_CPU_SECONDS, INDEX_BYTES = 30.0, 4e9
CHUNK = 4_000_000  # documents that are generated at once
SIGMA = 1.0  # parameter of the lognormal distribution of lengths
SMALLEST = 20_000  # documents of the pair whose index measures start-up
HEADER = struct.Struct("<9sQBQQ")
UINT16 = 8  # Megatron's number of the dtype


def lengths(documents: int) -> Iterator[npt.NDArray[np.int32]]:
    """Yield chunks of document lengths in tokens, lognormal with FineWeb-Edu's mean, fixed seed."""
    rng = np.random.default_rng(97)
    middle = np.log(TOKENS / DOCUMENTS) - SIGMA**2 / 2
    for start in range(0, documents, CHUNK):
        drawn = rng.lognormal(middle, SIGMA, min(CHUNK, documents - start))
        yield np.clip(drawn, 2, 2**20).astype(np.int32)


def write_pair(prefix: Path, documents: int) -> int:
    """Write an .idx of ``documents`` documents and a sparse .bin; return the number of tokens.

    Megatron's sample index depends on the lengths alone.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    tokens, done = 0, 0
    with prefix.with_suffix(".idx").open("wb") as stream:
        stream.write(HEADER.pack(b"MMIDIDX\x00\x00", 1, UINT16, documents, documents + 1))
        for chunk in lengths(documents):
            starts = tokens + np.cumsum(chunk, dtype=np.int64) - chunk
            numbers = np.arange(done, done + len(chunk), dtype=np.int64)
            for offset, array in (
                (4 * done, chunk),
                (4 * documents + 8 * done, 2 * starts),
                (12 * documents + 8 * done, numbers),
            ):
                stream.seek(HEADER.size + offset)
                stream.write(array.tobytes())
            tokens += int(chunk.sum(dtype=np.int64))
            done += len(chunk)
        stream.write(struct.pack("<q", documents))
    with prefix.with_suffix(".bin").open("wb") as stream:
        stream.truncate(2 * tokens)
    return tokens


def index_cost(documents: int, folder: Path) -> Cost:
    """Return the cost of ``pretrain --index`` for synthetic documents, without a cache."""
    tokens = write_pair(folder / "train", documents)
    overrides: dict[str, object] = {
        "run_dir": folder / "run",
        "data.train.0.prefix": folder / "train",
        "data.valid": "[]",
        "data.test": "[]",
        "data.seq_length": 4096,
        "data.index_cache": folder / "cache",
        "model.vocab_size": VOCAB_SIZE,
        "train.steps": "null",
        "train.tokens": tokens // 100 * 99,  # within one epoch
        "train.eval_interval": 0,
    }
    words = ["-m", "pretrain", "configs/run/demo_transformer.yaml", "--index"]
    words += [f"{key}={value}" for key, value in overrides.items()]
    try:
        return measured([sys.executable, *words], folder.with_name("log"))
    finally:
        shutil.rmtree(folder)


def index_figures(documents: int, rounds: int, scratch: Path) -> list[Figure]:
    """Measure how long GPTDataset takes to build its index; return the CPU time and the memory.

    The targets are those of FineWeb-Edu's number of documents. CPU time, and memory above that of
    the start-up, are scaled to ``documents``.
    """
    startups, costs = [], []
    for number in range(rounds):
        startups.append(index_cost(min(SMALLEST, documents), scratch / "pair"))
        costs.append(index_cost(documents, scratch / "pair"))
        report(f"round {number + 1} of {rounds}: index: {costs[-1].cpu:.1f} CPU s with start-up")
    share = documents / DOCUMENTS
    startup = statistics.median(cost.cpu for cost in startups)
    base = max(cost.peak_bytes for cost in startups)
    what = f"index of {documents / 1e6:g}M documents"
    cpu = Spread.of([cost.cpu - startup for cost in costs])
    peak = Spread.of([cost.peak_bytes / 1e9 for cost in costs])
    most = (base + share * (INDEX_BYTES - base)) / 1e9
    return [
        Figure(f"{what}: CPU", cpu, "s", most=INDEX_CPU_SECONDS * share),
        Figure(f"{what}: peak memory", peak, "GB", most=most),
    ]


# --- command ------------------------------------------------------------------------------------


def report(text: str) -> None:
    """Write a line of progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def main(
    arguments: list[str] | None = None,
    *,
    documents: int | None = None,
    vocab_size: int = VOCAB_SIZE,
) -> int:
    """Measure and print the tables; return the exit code (see the module's docstring).

    documents: documents of the index; None selects them from the command line.
    """
    parser = runner.command_line(PROGRAM, __doc__ or "")
    parser.add_argument(
        "--quick", action="store_true", help="two rounds, less text, an index of 10M documents"
    )
    parser.add_argument(
        "--corpus",
        type=Path,
        metavar="PATH",
        help="parquet file or folder (columns text and id); default: installed Python sources",
    )
    parser.add_argument("--megabytes", type=float, metavar="MB", help="most text to encode")
    parser.add_argument("--style", choices=("llama", "gpt"), default="llama", help="of tokenizer")
    options = parser.parse_args(arguments)
    rounds = 2 if options.quick else 3
    megabytes = options.megabytes or (20 if options.quick else 50)
    documents = documents or (10_000_000 if options.quick else DOCUMENTS)

    def measure() -> int:
        texts = installed_sources() if options.corpus is None else given_documents(options.corpus)
        SCRATCH.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=SCRATCH) as name:
            scratch = Path(name)
            corpus = make_corpus(texts, megabytes, scratch / "corpus")
            tokenizer = train_tokenizer(corpus, options.style, vocab_size, scratch / "tokenizer")
            sides = compare(corpus, tokenizer, rounds, scratch)
            figures = [*encoding_figures(sides), *index_figures(documents, rounds, scratch)]
        return conclude(corpus, sides, figures, options.json)

    return run(PROGRAM, measure)


def conclude(
    corpus: Corpus, sides: dict[str, Side], figures: Sequence[Figure], out: Path | None
) -> int:
    """Print and write the results. Return 1 if a target is missed or the bytes differ, else 0."""
    machine = runner.facts()
    columns = ["figure", "median", "over the rounds", "target", ""]
    print(runner.sentence(machine))
    print(f"{corpus.text_bytes / 1e6:.0f} MB of text in {corpus.documents:,} documents\n")
    print(runner.table(columns, [figure.cells() for figure in figures]), "\n")
    print(sides_table(sides))
    faults = [f"missed: {figure.what}" for figure in figures if not figure.good]
    faults += [f"other bytes than {PER_DOCUMENT}: {name}" for name in differing(sides)]
    content = {
        "suite": "data_prep",
        "machine": machine,
        "figures": {figure.what: [figure.value.median, figure.good] for figure in figures},
        "rates": {name: side.rates for name, side in sides.items()},
        "faults": faults,
    }
    runner.write_json(out, content)
    for line in faults:
        report(line)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
