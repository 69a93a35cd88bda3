"""``python -m tools.generate MODEL PROMPT ...``: continue prompts.

This module parses the arguments and reports errors in one line (exit code 2).

``generation`` generates the text.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from fem_common import cli
from fem_common.errors import ConfigError
from fem_common.files import read_lines
from tools.hf.paths import check_model

DRAWN = {"temperature": 0.7, "top_k": 40, "top_p": 1.0}


def check(given: argparse.Namespace) -> None:
    """Check the arguments and set those whose defaults depend on other arguments.

    These are ``draws`` (True if the next token is sampled), the sampling settings and the seed.

    Raises:
        ConfigError: a number is out of its range, or two arguments contradict each other.
    """
    ranges = (
        ("max_new_tokens", lambda number: number >= 1, "at least 1"),
        ("beams", lambda number: number >= 1, "at least 1"),
        ("temperature", lambda number: number > 0, "more than 0, or --greedy"),
        ("top_k", lambda number: number >= 0, "at least 1, or 0 for all tokens"),
        ("top_p", lambda number: 0 < number <= 1, "more than 0, up to 1"),
        ("seed", lambda number: 0 <= number < 2**63, "a number from 0 on"),
    )
    for name, fits, expected in ranges:
        value = getattr(given, name)
        if value is not None and not fits(value):
            raise ConfigError(f"{_option(name)} {value}: must be {expected}")
    fixed = None
    if given.greedy:
        fixed = "--greedy"
    elif given.beams > 1:
        fixed = "--beams"
    elif given.speculative:
        fixed = "--speculative"
    requested = [_option(name) for name in DRAWN if getattr(given, name) is not None]
    if fixed and requested:
        raise ConfigError(
            f"{requested[0]} is for sampling tokens, and {fixed} samples none: "
            "leave one of them out"
        )
    if given.greedy and given.beams > 1:
        raise ConfigError("--greedy and --beams exclude each other: leave one of them out")
    others = [name for name in ("no_cache", "compile") if getattr(given, name)]
    if given.speculative and (others or given.beams > 1):
        other = _option((others or ["beams"])[0])
        raise ConfigError(f"--speculative and {other} exclude each other: leave one of them out")
    if given.compile and given.no_cache:
        raise ConfigError("--compile needs the cache: leave --no-cache out")
    given.draws = not fixed
    if given.draws:
        for name, default in DRAWN.items():
            if getattr(given, name) is None:
                setattr(given, name, default)
    if given.seed is None:
        given.seed = int.from_bytes(os.urandom(4), "little")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def parser() -> cli.Parser:
    """Return the parser of the command line."""
    found = cli.Parser(
        prog="python -m tools.generate",
        description="Continue prompts and stream the text to stdout; speed and cache size are "
        "printed on stderr. Without --greedy, --beams or --speculative the next "
        "token is sampled.",
    )
    found.add_argument(
        "model",
        type=Path,
        metavar="MODEL",
        help="a run directory, a checkpoint, or a Hugging Face folder",
    )
    found.add_argument(
        "prompts",
        nargs="*",
        metavar="PROMPT",
        help="prompts to continue; several form one left-padded batch; -: read stdin as one prompt",
    )
    found.add_argument(
        "--file", type=Path, metavar="PROMPTS", help="more prompts, one per line (LF or CRLF)"
    )
    found.add_argument("--max-new-tokens", type=int, default=40, metavar="N", help="default: 40")
    found.add_argument(
        "--temperature", type=float, metavar="T", help="divides the logits; default: 0.7"
    )
    found.add_argument(
        "--top-k",
        type=int,
        metavar="K",
        help="sample from the K likeliest tokens; 0: from all; default: 40",
    )
    found.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="sample from the likeliest tokens whose probabilities sum to P; default: 1",
    )
    found.add_argument("--greedy", action="store_true", help="take the likeliest token each time")
    found.add_argument(
        "--beams", type=int, default=1, metavar="N", help="beam search over N continuations"
    )
    found.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="seed of the sampling; default: random, printed on stderr",
    )
    found.add_argument(
        "--no-cache", action="store_true", help="recompute the whole text for every token"
    )
    found.add_argument(
        "--speculative",
        action="store_true",
        help="greedy decoding of one prompt with drafts by the model's modules of multi-token "
        "prediction (model.mtp_depth): the same tokens in fewer forward passes",
    )
    found.add_argument(
        "--compile",
        action="store_true",
        help="torch.compile the decoding step; takes a minute, and needs a C++ compiler on a CPU",
    )
    found.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    found.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="dtype of the weights; default: as stored"
    )
    found.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="folder of the tokenizer; default: the model's own",
    )
    found.add_argument(
        "--json",
        action="store_true",
        help="write prompts, texts, tokens and costs as JSON, at the end",
    )
    return found


def main(arguments: list[str] | None = None) -> int:
    """Generate the texts and return the exit code."""
    given = parser().parse_args(arguments)

    def generated() -> int:
        check(given)
        options = vars(given)
        prompts = read_prompts(options.pop("prompts"), options.pop("file"))
        if given.speculative and len(prompts) > 1:
            raise ConfigError(
                f"--speculative continues one prompt, not {len(prompts)}: start it for each"
            )
        check_model(given.model, given.tokenizer)
        del options["greedy"]  # recorded in ``draws``
        # Importing torch and transformers takes seconds that --help or an error need not wait for.
        from .generation import Settings, run

        return run(prompts, Settings(**options))

    return cli.run("tools.generate", generated, kept="no text was begun")


def read_prompts(arguments: list[str], file: Path | None) -> list[str]:
    """Return the prompts of the command line, then the lines of ``file``; "-" reads stdin.

    Raises ConfigError if no prompt is given, or if a prompt is empty.
    """
    prompts = [
        sys.stdin.read().removesuffix("\n") if argument == "-" else argument
        for argument in arguments
    ]
    if file is not None:
        prompts += [line for line in read_lines(file) if line.strip()]
    if not prompts:
        raise ConfigError("no prompt: give one as an argument, - for stdin, or --file PROMPTS")
    for index, prompt in enumerate(prompts, 1):
        if not prompt:
            raise ConfigError(
                f"prompt {index} is empty: a continuation needs something to continue"
            )
    return prompts


if __name__ == "__main__":
    sys.exit(main())
