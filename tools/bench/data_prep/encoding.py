"""Comparison of the pipelines that encode text to .bin/.idx: CPU seconds, and the written bytes.

The start-up of a pipeline is the cost of the same command on the corpus's first documents. Its rate
is the rest of the text divided by the rest of the CPU seconds. Within a round the pipelines run one
after the other, so that other load of the machine affects all of them. Ratios are computed per
round.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tools.bench.data_prep.corpus import Corpus
from tools.bench.data_prep.peers import BASELINE, OURS, PIPELINES, Job, Kit, Pipeline, ours
from tools.bench.data_prep.processes import BenchError, Neighbours, Spread, Usage, load, run

ENDINGS = (".bin", ".idx")
IDLE = 0.1  # cores that other programs may use while two workers are timed

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Side:
    """Results of one pipeline on one corpus.

    rates: megabytes of text per CPU second in each round, without start-up.
    cpu, startup: CPU seconds in each round, of the complete corpus and of its first documents.
    peak_bytes: peak memory of the largest process.
    sha256: distinct hashes of the written pairs.
    """

    name: str
    rates: tuple[float, ...]
    cpu: tuple[float, ...]
    startup: tuple[float, ...]
    peak_bytes: int
    sha256: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Results of all pipelines on one corpus with one tokenizer.

    bytes_per_token: bytes of text per token, without EOD.
    """

    corpus: str
    tokenizer: str
    sides: tuple[Side, ...]
    bytes_per_token: float

    def side(self, pipeline: Pipeline) -> Side:
        """Return the results of ``pipeline``."""
        return next(side for side in self.sides if side.name == pipeline.name)

    def ratio(self, over: Pipeline, under: Pipeline) -> Spread:
        """Return the ratio of the rates of ``over`` and ``under``, over the rounds."""
        return Spread.of(
            [a / b for a, b in zip(self.side(over).rates, self.side(under).rates, strict=True)]
        )

    @property
    def differing(self) -> list[str]:
        """Return the names of pipelines whose bytes differ from the baseline's, or between rounds.

        The baseline is the pipeline with one tokenizer call per document.
        """
        truth = set(self.side(BASELINE).sha256)
        return [side.name for side in self.sides if set(side.sha256) != truth or len(truth) != 1]


def compare(
    corpus: Corpus, kit: Kit, python: Path, effort: tuple[int, int], scratch: Path, tell: Tell
) -> Comparison:
    """Run every pipeline on the corpus and return the results.

    effort: (number of rounds, runs of data_prep in each round).
    python: Python of datatrove's environment.

    The median of data_prep's runs in a round counts, since runs of a few seconds are noisy. Raises
    BenchError if a pipeline fails.
    """
    rounds, again = effort
    seconds: dict[str, list[tuple[float, float]]] = {pipeline.name: [] for pipeline in PIPELINES}
    peaks = dict.fromkeys(seconds, 0)
    hashes: dict[str, list[str]] = {name: [] for name in seconds}
    tokens = 0
    for number in range(rounds):
        for pipeline in PIPELINES:
            began, whole = [], []
            for _ in range(again if pipeline == OURS else 1):
                began.append(once(pipeline, corpus.tiny, kit, python, scratch)[0].cpu)
                usage, digest, tokens = once(pipeline, corpus.folder, kit, python, scratch)
                whole.append(usage.cpu)
                peaks[pipeline.name] = max(peaks[pipeline.name], usage.peak_bytes)
                hashes[pipeline.name].append(digest)
            seconds[pipeline.name].append((Spread.of(whole).median, Spread.of(began).median))
            tell(
                f"{corpus.name}, {kit.style}, round {number + 1} of {rounds}: "
                f"{pipeline.name}: {Spread.of(whole).median:.1f} CPU s"
            )
    text = (corpus.text_bytes - corpus.tiny_bytes) / 1e6
    sides = []
    for pipeline in PIPELINES:
        cpu, startup = (tuple(column) for column in zip(*seconds[pipeline.name], strict=True))
        rates = tuple(_rate(text, total - Spread.of(startup).median) for total in cpu)
        sides.append(
            Side(
                pipeline.name,
                rates,
                cpu,
                startup,
                peaks[pipeline.name],
                tuple(hashes[pipeline.name]),
            )
        )
    return Comparison(
        corpus.name, kit.style, tuple(sides), corpus.text_bytes / (tokens - corpus.documents)
    )


def _rate(megabytes: float, seconds: float) -> float:
    """Return megabytes per second; NaN if a corpus is so small that start-up took all the time."""
    return megabytes / seconds if seconds > 0 else math.nan


def once(
    pipeline: Pipeline, source: str, kit: Kit, python: Path, scratch: Path
) -> tuple[Usage, str, int]:
    """Run a pipeline into an empty folder.

    Return (cost, hash of the written .bin/.idx pair, number of tokens).
    """
    out = scratch / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    job = Job(Path(source), kit, out, python)
    usage = run(pipeline.command(job), scratch)
    digest = hashlib.sha256()
    for ending in ENDINGS:
        file = pipeline.prefix(job).with_suffix(ending)
        if not file.is_file():
            raise BenchError(f"{pipeline.name} wrote no {file.name}")
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    width = 2 if kit.folder.vocab_size < 65500 else 4
    return (
        usage,
        digest.hexdigest(),
        pipeline.prefix(job).with_suffix(".bin").stat().st_size // width,
    )


# --- two workers --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scaling:
    """Speed of two workers relative to one.

    speedups: ratio of wall times without start-up, in each round.
    others: cores that other programs used meanwhile; None if the system does not report it.
    load: load average at the start.
    """

    speedups: tuple[float, ...]
    seconds: tuple[tuple[float, float], ...]
    others: float | None
    load: float
    cores: int

    @property
    def idle(self) -> bool:
        """Return True if the benchmark had two cores and other programs used almost no CPU."""
        return self.cores >= 2 and self.others is not None and self.others <= IDLE


def scale(corpus: Corpus, times: int, kit: Kit, rounds: int, scratch: Path) -> Scaling:
    """Time one worker, then two, on ``times`` copies of the corpus. Raises BenchError."""
    sources = {"whole": scratch / "repeated" / "whole", "tiny": scratch / "repeated" / "tiny"}
    for name, folder in (("whole", corpus.folder), ("tiny", corpus.tiny)):
        shutil.rmtree(sources[name], ignore_errors=True)
        sources[name].mkdir(parents=True)
        for number in range(times if name == "whole" else 1):
            for file in sorted(Path(folder).glob("*.parquet")):
                os.link(file, sources[name] / f"{number}-{file.name}")
    at_start, neighbours = load(), Neighbours()
    speedups, seconds = [], []
    for _ in range(rounds):
        took = []
        for workers in (1, 2):
            pipeline = ours(f"{workers} workers", "gigatoken", workers)
            usages = [
                once(pipeline, str(sources[name]), kit, Path(), scratch)[0]
                for name in ("tiny", "whole")
            ]
            took.append(usages[1].wall - usages[0].wall)
        speedups.append(took[0] / took[1])
        seconds.append((took[0], took[1]))
    return Scaling(
        tuple(speedups), tuple(seconds), neighbours.cores(), at_start, os.cpu_count() or 1
    )
