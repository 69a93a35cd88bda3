"""Decide which configuration keys may change when a run resumes.

A table has one rule for every key. The module does not import torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fem_common.config import plain
from fem_common.errors import ConfigError
from fem_common.nested import leaves
from fem_common.settings import moved
from fem_megatron.config import ModelConfig
from pretrain.config import RunConfig

FREE = "free"  # changes no number of the training: recorded, not printed
TOLD = "told"  # may change: printed and recorded

_ANEW = (
    "{keys}; restore it, or start a new run (another run_dir) from the weights alone with "
    "checkpoint.load={checkpoint}"
)
_ORDER = "was written with another order of samples: " + _ANEW
_WEIGHTS = re.compile(r"model\.(?!rope_scaling\.|mtp_loss_weight$)")
_OPTIMIZER = (
    "{keys}; restore it, or convert: python -m tools.checkpoint convert {checkpoint} --engine "
    "{engine}{plain} --out ANOTHER_RUN_DIR"
)

# Key or section -> a constant above, or, if a change is refused, how the checkpoint uses the key
# and the way out. The rule of a key is that of the longest matching entry; positions in a list are
# omitted (data.train.weight).
RULES: dict[str, str] = {
    "name": FREE,
    "run_dir": FREE,
    "model": (
        "is of another model: {keys}; restore it, or choose another run_dir or checkpoint.load"
    ),
    "model.attention_backend": TOLD,
    "model.mtp_loss_weight": TOLD,
    "model.rope_scaling": (
        "was trained with another RoPE: {keys}; restore it, or continue in another folder with "
        "--fork"
    ),
    "data.train.prefix": TOLD,  # the location of the data; its contents are compared separately
    "data.train.weight": _ORDER,
    "data.valid": TOLD,
    "data.test": FREE,
    "data.seq_length": "counts its position in the data in sequences of another length: " + _ANEW,
    "data.packing": _ORDER,
    "data.documents": TOLD,
    "data.reset_positions": TOLD,
    "data.eod_loss": TOLD,
    "data.tokenizer": TOLD,
    "data.index_cache": FREE,
    "data.store_cache": FREE,
    "data.store_cache_gb": FREE,
    "parallel": TOLD,
    "parallel.world_size": FREE,
    "parallel.use_distributed_optimizer": "stores the optimizer's state under other names: "
    + _OPTIMIZER,
    "parallel.collective_timeout_minutes": FREE,
    "engine": TOLD,
    "train": TOLD,
    "train.precision": "stores its weights in another precision: " + _ANEW,
    "train.seed": _ORDER,
    "optimizer": TOLD,
    "optimizer.name": "contains the moments of another optimizer: " + _ANEW,
    "checkpoint": FREE,
    "stages": TOLD,  # the data read by the stages so far is compared separately
    "log": FREE,
    "evaluate": FREE,
}


@dataclass(frozen=True)
class Change:
    """Configuration key whose value has changed since the checkpoint was written."""

    key: str
    old: Any
    new: Any

    @property
    def rule(self) -> str:
        """The table's rule for the key (see the function `rule`).

        A key of a removed section has no entry in the table. It may change, and the change is
        printed.
        """
        try:
            return rule(self.key)
        except KeyError:
            return TOLD

    def __str__(self) -> str:
        return f"{self.key} {shown(self.old)} → {shown(self.new)}"


def rule(key: str) -> str:
    """Return the rule of a dotted key: FREE, the constant for printed changes, or an error text.

    The first two permit a change. An error text refuses it. If the table has no entry for the key,
    the entry of the nearest enclosing section counts. Raises KeyError if neither exists.
    """
    words = [word for word in key.split(".") if not word.isdecimal() and word != "N"]
    for length in range(len(words), 0, -1):
        found = RULES.get(".".join(words[:length]))
        if found is not None:
            return found
    raise KeyError(key)


def changes(written: Mapping[str, Any], config: RunConfig) -> list[Change]:
    """Return the differences between ``written`` and ``config``, in the order of the keys.

    written: the configuration in a checkpoint's manifest. A key that an older manifest lacks counts
    as set to the present default.
    """
    known = (
        {**written, "model": moved(written["model"], ModelConfig.moved)}
        if "model" in written
        else written
    )
    old, new = (
        dict(leaves(values)) for values in (_completed(known, _plain(RunConfig())), _plain(config))
    )
    keys = [*new, *(key for key in old if key not in new)]
    return [Change(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


def check(checkpoint: Path, found: list[Change], config: RunConfig) -> None:
    """Raise ConfigError if the table refuses any of the changes in ``found``.

    The message names every refused key and the ways to continue.
    """
    ways: dict[str, list[str]] = {}
    for change in found:
        if change.rule not in (FREE, TOLD):
            ways.setdefault(change.rule, []).append(
                f"{change.key} is {shown(change.old)} in the checkpoint, {shown(change.new)} now"
            )
    if not ways:
        return
    plain = "" if config.parallel.use_distributed_optimizer else " --plain-optimizer"
    rest = {"checkpoint": checkpoint, "engine": config.engine.name, "plain": plain}
    raise ConfigError(
        f"checkpoint {checkpoint} "
        + "; it ".join(way.format(keys=", ".join(keys), **rest) for way, keys in ways.items())
    )


def check_model(checkpoint: Path, written: Mapping[str, Any], config: RunConfig) -> None:
    """Raise ConfigError if a key of the model section has changed that the weights depend on.

    This is the condition for loading weights from another run.
    """
    check(
        checkpoint,
        [change for change in changes(written, config) if _WEIGHTS.match(change.key)],
        config,
    )


def shown(value: Any) -> str:
    """Return a value as text in the form of a YAML value."""
    return value if isinstance(value, str) else json.dumps(value)


def _plain(config: RunConfig) -> dict[str, Any]:
    values: dict[str, Any] = plain(config)
    return values


def _completed(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``given`` with the missing keys, also of nested sections, taken from ``defaults``."""
    inner = {
        key: _completed(value, defaults[key])
        for key, value in given.items()
        if isinstance(value, dict) and key in defaults
    }
    return {**defaults, **given, **inner}
