"""``python -m tools.generate MODEL PROMPT ...``: arguments, and errors in one line (exit code 2); the work is in ``generation``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fem_common.errors import CommandError, ConfigError, end, files_told
from fem_common.exits import Exit

from .settings import Settings


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="tools.generate",
        description="Continues prompts, streaming the text to stdout; speed and the cache's size go to stderr. Without --greedy or --beams "
        "the next token is drawn.",
    )
    found.add_argument("model", type=Path, metavar="MODEL", help="a run directory, a checkpoint, or a Hugging Face folder")
    found.add_argument("prompts", nargs="*", metavar="PROMPT", help="several are one left-padded batch; -: the whole of stdin")
    found.add_argument("--file", type=Path, metavar="PROMPTS", help="more prompts, one a line")
    found.add_argument("--max-new-tokens", type=int, default=40, metavar="N", help="default: 40")
    found.add_argument("--temperature", type=float, metavar="T", help="divides the logits; default: 0.7")
    found.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens; 0: from all; default: 40")
    found.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest tokens that have together P; default: 1")
    found.add_argument("--greedy", action="store_true", help="take the likeliest token each time")
    found.add_argument("--beams", type=int, default=1, metavar="N", help="beam search over N continuations")
    found.add_argument("--seed", type=int, metavar="N", help="the same text each time; default: another one each time, told on stderr")
    found.add_argument("--no-cache", action="store_true", help="compute the whole text anew for every token")
    found.add_argument(
        "--compile", action="store_true", help="torch.compile the decoding step; takes a minute, and a C++ compiler on a CPU"
    )
    found.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    found.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the weights; default: as stored")
    found.add_argument("--tokenizer", type=Path, metavar="DIR", help="folder of the tokenizer; default: the model's own")
    found.add_argument("--json", action="store_true", help="write prompts, texts, tokens and costs as JSON, at the end")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Generates; returns the exit code."""
    given = parser().parse_args(arguments)
    try:
        settings = Settings.of(given)
        prompts = read_prompts(given.prompts, given.file)
        from .generation import run  # torch and transformers take seconds: not for --help or a wrong argument

        return run(given.model, prompts, settings)
    except (CommandError, OSError) as error:
        return end("tools.generate", error)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED


def read_prompts(arguments: list[str], file: Path | None) -> list[str]:
    """The prompts of the arguments, then those of the file. Raises ConfigError where there is none, or one is empty."""
    prompts = [sys.stdin.read().removesuffix("\n") if argument == "-" else argument for argument in arguments]
    if file is not None:
        with files_told():
            prompts += [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not prompts:
        raise ConfigError("no prompt: give one as an argument, - for stdin, or --file PROMPTS")
    for index, prompt in enumerate(prompts, 1):
        if not prompt:
            raise ConfigError(f"prompt {index} is empty: a continuation needs something to continue")
    return prompts


if __name__ == "__main__":
    sys.exit(main())
