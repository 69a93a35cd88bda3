"""The one list of what is a secret in an environment, and what of an environment may be written down. Standard library alone."""

from __future__ import annotations

import re
from collections.abc import Mapping

SHORTEST = (
    8  # a value with fewer characters is not looked for in output: it would be found everywhere
)
SECRET_ENDINGS = ("KEY", "KEYS", "TOKEN", "TOKENS", "JWT", "PASSPHRASE")
SECRET_PARTS = ("SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
_HARMLESS_WORDS = {"PKEY"}  # InfiniBand's partition key, a number: NCCL_IB_PKEY
_PASSWORD_IN_URL = re.compile(r"\b[A-Za-z][\w+.-]*://[^\s/@:]*:([^\s/@]+)@")

# What explains how a run behaved, and no more: names, and beginnings of names.
_HARMLESS_NAMES = frozenset(
    "CONDA_DEFAULT_ENV CONDA_PREFIX GROUP_RANK HF_HOME HOME HOSTNAME LANG LD_LIBRARY_PATH LOADEDMODULES LOCAL_RANK LOCAL_WORLD_SIZE"
    " LOGNAME MASTER_ADDR MASTER_PORT MODULEPATH PATH PWD RANK ROLE_RANK SHELL TMPDIR TOKENIZERS_PARALLELISM TZ USER VIRTUAL_ENV"
    " WORLD_SIZE XDG_CACHE_HOME".split()
)
_HARMLESS_BEGINNINGS = tuple(
    "CUBLAS_ CUDA_ CUDNN_ EFA_ FI_ GLOO_ GOMP_ KMP_ LC_ MKL_ NCCL_ NVIDIA_ NVTE_ OFI_ OMP_ OPENBLAS_ PYTHON PYTORCH_ RDMAV_ SLURM_"
    " TORCH TRITON_ UCX_".split()
)


def is_secret(name: str) -> bool:
    """Whether a variable's name says that its value is a secret: ``WANDB_API_KEY``, ``HF_TOKEN``, ``DB_PASSWORD``, ``MY_CREDENTIALS``."""
    words = [word for word in re.split(r"[^A-Z0-9]+", name.upper()) if word not in _HARMLESS_WORDS]
    return any(
        word.endswith(SECRET_ENDINGS) or any(part in word for part in SECRET_PARTS)
        for word in words
    )


def hides_a_password(value: str) -> bool:
    """Whether a value is an address with a password in it: ``postgres://user:password@host``."""
    return _PASSWORD_IN_URL.search(value) is not None


def values(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The secrets' values of an environment as they could stand in a line of output, longest first.

    A value of several lines counts line by line and as one line, too; passwords inside addresses count; what is shorter than ``SHORTEST``
    does not.
    """
    found: set[str] = set()
    for name, value in environ.items():
        if is_secret(name):
            lines = [value, *value.splitlines()]
            found.update(line.strip() for line in lines)
            found.update(" ".join(line.split()) for line in lines)
        found.update(_PASSWORD_IN_URL.findall(value))
    return tuple(
        sorted(
            (value for value in found if len(value) >= SHORTEST),
            key=lambda value: (-len(value), value),
        )
    )


def hide(text: str, secrets: tuple[str, ...]) -> str:
    """``text`` with every one of ``secrets`` (from `values`) replaced by ``***``."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


def harmless_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that may be written to a file, sorted: those on the allow-list whose value holds no secret of another."""
    secret = values(environ)
    return {
        name: value
        for name, value in sorted(environ.items())
        if (name in _HARMLESS_NAMES or name.startswith(_HARMLESS_BEGINNINGS))
        and not is_secret(name)
        and not any(word in value for word in secret)
    }
