"""Pipelines that the benchmark compares, and the Python environment in which datatrove runs.

Every pipeline is a command that turns a folder of parquet files into one .bin/.idx pair with the
same tokenizer: datatrove's MegatronDocumentTokenizer, the per-document baseline, and data_prep with
gigatoken and with Hugging Face tokenizers.

The environment is installed once from the package index with pinned versions.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from data_prep.encode.tokenizer import TokenizerFolder, load_folder
from fem_common.errors import UserError
from tools.bench.data_prep.processes import ROOT, BenchError

DATATROVE_VERSION = "0.10.1"
CONSTRAINTS = ROOT / "constraints.txt"
SAME = (
    "tokenizers",
    "pyarrow",
    "numpy",
)  # both environments have the same versions

# A program for the peers' environment, which contains datatrove but not this project.
DATATROVE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import ParquetReader
from datatrove.pipeline.tokens import MegatronDocumentTokenizer

if __name__ == "__main__":
    source, tokenizer, out, logs = sys.argv[1:]
    reader = ParquetReader(source, glob_pattern="*.parquet", read_metadata=False)
    writer = MegatronDocumentTokenizer(out, tokenizer_name_or_path=tokenizer, eos_token="")
    LocalPipelineExecutor([reader, writer], tasks=1, workers=1, logging_dir=logs).run()
"""


@dataclass(frozen=True)
class Kit:
    """Tokenizer in the formats of all pipelines.

    folder: tokenizer folder for data_prep.
    plain: tokenizer.json for the other pipelines, which appends EOD to each text.

    ``plain`` has no special tokens: all pipelines encode their literal strings as text, like
    data_prep.
    """

    style: str
    folder: TokenizerFolder
    plain: Path


@dataclass(frozen=True)
class Job:
    """Work of one command: encode the parquet files below ``source`` into the folder ``out``.

    peers: Python of datatrove's environment.
    """

    source: Path
    kit: Kit
    out: Path
    peers: Path  # the Python of the peers' environment


@dataclass(frozen=True)
class Pipeline:
    """Pipeline of the comparison.

    command: function that returns the command line for a job.
    prefix: function that returns the path of the resulting .bin/.idx pair, without ending.
    """

    name: str
    command: Callable[[Job], list[str]]
    prefix: Callable[[Job], Path]


def _ours(job: Job, encoder: str, workers: int) -> list[str]:
    words = [
        sys.executable,
        "-m",
        "data_prep",
        "run",
        str(job.source),
        "--tokenizer",
        str(job.kit.folder.path),
        "--out",
        str(job.out),
    ]
    return [
        *words,
        "--valid-percent",
        "0",
        "--test-percent",
        "0",
        "--workers",
        str(workers),
        "--encoder",
        encoder,
    ]


def ours(name: str, encoder: str, workers: int = 1) -> Pipeline:
    """Return the pipeline of the complete ``data_prep run``: plan, encode, hash, fsync, merge.

    encoder: tokenization library, "gigatoken" for example.
    """
    return Pipeline(name, lambda job: _ours(job, encoder, workers), lambda job: job.out / "train")


def _per_document(job: Job) -> list[str]:
    script = [sys.executable, "-m", "tools.bench.data_prep.per_document"]
    return [
        *script,
        str(job.source),
        str(job.kit.plain),
        str(job.kit.folder.eod_id),
        str(job.out / "train"),
    ]


def _datatrove(job: Job) -> list[str]:
    return [
        str(job.peers),
        "-c",
        DATATROVE,
        str(job.source),
        str(job.kit.plain),
        str(job.out),
        str(job.out / "logs"),
    ]


OURS = ours("data_prep, gigatoken", "gigatoken")
FALLBACK = ours("data_prep, Hugging Face tokenizers", "hf")
BASELINE = Pipeline(
    "Megatron's algorithm, one tokenizer call per document",
    _per_document,
    lambda job: job.out / "train",
)
PEER = Pipeline(f"datatrove {DATATROVE_VERSION}", _datatrove, lambda job: job.out / "00000_tokens")
PIPELINES = (OURS, FALLBACK, BASELINE, PEER)


def make_kit(style: str, folder: Path) -> Kit:
    """Convert the tokenizer in ``folder`` for all pipelines.

    Raises data_prep's UserError if the folder contains none.
    """
    known = load_folder(folder)
    spec: dict[str, Any] = json.loads((folder / "tokenizer.json").read_bytes())
    kept = [
        token
        for token in spec.get("added_tokens", ())
        if not token["special"] and token["id"] != known.eod_id
    ]
    spec |= {"added_tokens": kept, "truncation": None, "padding": None, "post_processor": None}
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.post_processor = TemplateProcessing(
        single="$A <EOD>", special_tokens=[("<EOD>", known.eod_id)]
    )
    plain = folder.with_name(f"{folder.name}-plain.json")
    plain.write_text(tokenizer.to_str(), encoding="utf-8")
    return Kit(style, known, plain)


# --- the peers' environment ---------------------------------------------------------------------


def pins() -> list[str]:
    """Return the requirements to install; constraints.txt pins their dependencies."""
    return [f"datatrove=={DATATROVE_VERSION}", *(f"{name}=={version(name)}" for name in SAME)]


def environment(given: Path | None, cache: Path) -> Path:
    """Return the Python interpreter of the environment with datatrove.

    given: existing environment; None uses one that is installed once below ``cache``.

    Raises UserError, BenchError.
    """
    if given is not None:
        return _python_of(given)
    folder, wanted = cache / "peers", "\n".join([sys.version, *pins()])
    seal = folder / "installed.txt"
    if not seal.exists() or seal.read_text(encoding="utf-8") != wanted:
        _command([sys.executable, "-m", "venv", "--clear", str(folder)])
        install = [
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "-c",
            str(CONSTRAINTS),
            *pins(),
        ]
        _command([str(folder / "bin" / "python"), *install])
        seal.write_text(wanted, encoding="utf-8")
    return _python_of(folder)


def versions(python: Path) -> dict[str, str]:
    """Return name -> version of the compared packages in the environment of ``python``.

    Raises UserError if the versions are not the required ones.
    """
    code = (
        "import json, sys; from importlib.metadata import version; "
        "print(json.dumps({n: version(n) for n in sys.argv[1:]}))"
    )
    found: dict[str, str] = json.loads(_command([str(python), "-c", code, "datatrove", *SAME]))
    if found["datatrove"] != DATATROVE_VERSION or found["tokenizers"] != version("tokenizers"):
        expected = f"datatrove {DATATROVE_VERSION} and tokenizers {version('tokenizers')}"
        raise UserError(
            f"{python} has datatrove {found['datatrove']} and tokenizers {found['tokenizers']}; "
            f"needed: {expected}"
        )
    return found


def _python_of(folder: Path) -> Path:
    python = folder / "bin" / "python"
    if not python.exists():
        raise UserError(
            f"{folder} is not a Python environment (no bin/python); without --peers one is created"
        )
    return python


def _command(words: Sequence[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise BenchError(
            f"exit code {done.returncode} of {' '.join(words[:4])} ...: {' / '.join(last)}"
        )
    return done.stdout
