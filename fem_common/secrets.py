"""Detection of secrets in environment variables, and removal of secrets from text.

The module also selects the variables that may be written to files. It uses only the standard
library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# Smallest length of a secret that is hidden. Shorter ones would match everywhere.
SHORTEST = 8
SECRET_ENDINGS = ("KEY", "KEYS", "TOKEN", "TOKENS", "JWT", "PASSPHRASE")
SECRET_PARTS = ("SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
_HARMLESS_WORDS = {"PKEY"}  # InfiniBand's partition key, a number: NCCL_IB_PKEY
_PASSWORD_IN_URL = re.compile(r"\b[A-Za-z][\w+.-]*://[^\s/@:]*:([^\s/@]+)@")

# Allow-list of variables that explain the behaviour of a run: names, and beginnings of names.
_HARMLESS_NAMES = frozenset(
    "CONDA_DEFAULT_ENV CONDA_PREFIX GROUP_RANK HF_HOME HOME HOSTNAME LANG LD_LIBRARY_PATH "
    "LOADEDMODULES LOCAL_RANK LOCAL_WORLD_SIZE LOGNAME MASTER_ADDR MASTER_PORT MODULEPATH PATH "
    "PWD RANK ROLE_RANK SHELL TMPDIR TOKENIZERS_PARALLELISM TZ USER VIRTUAL_ENV WORLD_SIZE "
    "XDG_CACHE_HOME".split()
)
_HARMLESS_BEGINNINGS = tuple(
    "CUBLAS_ CUDA_ CUDNN_ EFA_ FI_ GLOO_ GOMP_ KMP_ LC_ MKL_ NCCL_ NVIDIA_ NVTE_ OFI_ OMP_ "
    "OPENBLAS_ PYTHON PYTORCH_ RDMAV_ SLURM_ TORCH TRITON_ UCX_".split()
)


def is_secret(name: str) -> bool:
    """Return True if a variable's name marks its value as a secret.

    Examples: ``WANDB_API_KEY``, ``HF_TOKEN``, ``DB_PASSWORD``.
    """
    words = [word for word in re.split(r"[^A-Z0-9]+", name.upper()) if word not in _HARMLESS_WORDS]
    return any(
        word.endswith(SECRET_ENDINGS) or any(part in word for part in SECRET_PARTS)
        for word in words
    )


def hides_a_password(value: str) -> bool:
    """Return True if a value contains a URL with a password: ``postgres://user:password@host``."""
    return _PASSWORD_IN_URL.search(value) is not None


def values(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the strings to hide in output, longest first.

    These are the values of environment variables with a secret name (`is_secret`), and the
    passwords in URLs of any variable. A value of several lines also yields each of its lines and
    its text on one line. Strings shorter than ``SHORTEST`` are left out.
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
    """Return ``text`` with every one of ``secrets`` (from `values`) replaced by ``***``."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


def harmless_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that may be written to a file, in alphabetical order.

    These are the allow-listed variables whose value contains no secret of another variable.
    """
    secret = values(environ)
    found = {}
    for name, value in sorted(environ.items()):
        allowed = name in _HARMLESS_NAMES or name.startswith(_HARMLESS_BEGINNINGS)
        if allowed and not is_secret(name) and not any(word in value for word in secret):
            found[name] = value
    return found
