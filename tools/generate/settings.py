"""How a text is to be generated: the command line's words, checked, and as transformers names them. Torch-free."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fem_common.errors import ConfigError

TEMPERATURE, TOP_K, TOP_P = 0.7, 40, 1.0


@dataclass(frozen=True)
class Settings:
    """temperature, top_k, top_p: None where nothing is drawn. seed: of what is drawn. dtype: None: as stored."""

    max_new_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    beams: int
    seed: int
    use_cache: bool
    compile: bool
    device: str
    dtype: str | None
    tokenizer: Path | None
    json: bool

    @classmethod
    def of(cls, given: argparse.Namespace) -> Settings:
        """From the command line. Raises ConfigError where a number is out of its range, or two arguments contradict each other."""
        drawing = {"--temperature": given.temperature, "--top-k": given.top_k, "--top-p": given.top_p}
        for name, value, wrong, range_ in (
            ("--max-new-tokens", given.max_new_tokens, given.max_new_tokens < 1, "at least 1"),
            ("--beams", given.beams, given.beams < 1, "at least 1"),
            ("--temperature", given.temperature, given.temperature is not None and not given.temperature > 0, "more than 0, or --greedy"),
            ("--top-k", given.top_k, given.top_k is not None and given.top_k < 0, "at least 1, or 0 for all tokens"),
            ("--top-p", given.top_p, given.top_p is not None and not 0 < given.top_p <= 1, "more than 0, up to 1"),
            ("--seed", given.seed, given.seed is not None and not 0 <= given.seed < 2**63, "a number from 0 on"),
        ):
            if wrong:
                raise ConfigError(f"{name} {value}: must be {range_}")
        fixed = "--greedy" if given.greedy else "--beams" if given.beams > 1 else None
        asked = [name for name, value in drawing.items() if value is not None]
        if fixed and asked:
            raise ConfigError(f"{asked[0]} is for drawing tokens, and {fixed} draws none: leave one of them out")
        if given.greedy and given.beams > 1:
            raise ConfigError("--greedy is one continuation, --beams several: leave one of them out")
        if given.compile and given.no_cache:
            raise ConfigError("--compile is for the step with a cache: leave --no-cache out")
        return cls(
            max_new_tokens=given.max_new_tokens,
            temperature=None if fixed else TEMPERATURE if given.temperature is None else given.temperature,
            top_k=None if fixed else TOP_K if given.top_k is None else given.top_k,
            top_p=None if fixed else TOP_P if given.top_p is None else given.top_p,
            beams=given.beams,
            seed=int.from_bytes(os.urandom(4), "little") if given.seed is None else given.seed,
            use_cache=not given.no_cache,
            compile=given.compile,
            device=given.device,
            dtype=given.dtype,
            tokenizer=given.tokenizer,
            json=given.json,
        )

    @property
    def draws(self) -> bool:
        """Whether the next token is drawn."""
        return self.temperature is not None

    def for_generate(self) -> dict[str, Any]:
        """As ``generate`` takes them; a folder's own generation settings count for nothing but its special tokens."""
        how = {"do_sample": self.draws, "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        more = {"cache_implementation": "static"} if self.compile else {}
        return {**how, **more, "num_beams": self.beams, "max_new_tokens": self.max_new_tokens, "use_cache": self.use_cache}
