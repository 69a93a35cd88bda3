"""What a study may set of its fits: its ``fit`` section. No numpy, no torch: reading a study must be fast."""

from __future__ import annotations

from dataclasses import dataclass

from fem_common.errors import ConfigError
from fem_megatron.settings import setting

PARAMETERS = ("total", "non_embedding")
APPROACHES = ("isoflop", "parametric")
FEWEST_RESAMPLES = 50


@dataclass(frozen=True)
class FitConfig:
    """Knobs of `tools.scaling.fits`; the defaults are the ones of the papers."""

    approaches: tuple[str, ...] = setting(APPROACHES, "Which laws: isoflop (Hoffmann et al.'s approach 2), parametric (approach 3).")
    parameters: str = setting(
        "total", "The N of the laws: all parameters (as Hoffmann et al.), or those outside the embedding.", PARAMETERS
    )
    interval: float = setting(0.9, "Level of every interval, between 0 and 1.")
    resamples: int = setting(500, "Bootstrap resamples.")
    huber_delta: float = setting(1e-3, "Where the Huber loss on log loss turns from square to linear.")
    seed: int = setting(1, "Of the bootstrap.")


def check_fit(config: FitConfig) -> None:
    """Raises ConfigError, one line that starts with the key, where a value makes no sense."""
    for name in config.approaches:
        if name not in APPROACHES:
            raise ConfigError(f"fit.approaches: {name}: not an approach; give {' or '.join(APPROACHES)}")
    if not config.approaches:
        raise ConfigError(f"fit.approaches is empty: give {' or '.join(APPROACHES)}")
    if not 0 < config.interval < 1:
        raise ConfigError(f"fit.interval = {config.interval:g}: it is a share between 0 and 1, as 0.9")
    if config.resamples < FEWEST_RESAMPLES:
        raise ConfigError(f"fit.resamples = {config.resamples}: too few for an interval; give {FEWEST_RESAMPLES} or more, as 500")
    if not 0 < config.huber_delta < 1:
        raise ConfigError(f"fit.huber_delta = {config.huber_delta:g}: it is a difference of log losses, as 1e-3")
    if config.seed < 0:
        raise ConfigError(f"fit.seed = {config.seed}: must be 0 or more")
