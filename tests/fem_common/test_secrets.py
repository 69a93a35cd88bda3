"""Tests of the definition of a secret, of reported environment variables, and of masked output."""

from __future__ import annotations

import random

from fem_common import secrets

SECRET = (
    "WANDB_API_KEY HF_TOKEN HUGGING_FACE_HUB_TOKEN AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID"
    " AWS_SESSION_TOKEN OPENAI_APIKEY wandb_api_key PGPASSWORD DB_PASSWD MYSQL_PASSWORD"
    " GOOGLE_APPLICATION_CREDENTIALS MY_CREDENTIAL SLURM_JWT SSH_PASSPHRASE apiToken X-API-KEY"
    " GITHUB_TOKENS PRIVATE_KEYS TOKEN KEY SECRET CLIENT_SECRET_JSON"
).split()
HARMLESS = (
    "PATH HOME NCCL_DEBUG TOKENIZERS_PARALLELISM NCCL_IB_PKEY KEYBOARD_LAYOUT PWD PASSENGER"
    " SLURM_JOB_ID OMP_NUM_THREADS XDG_SESSION_ID SSH_AUTH_SOCK"
).split()


def test_secret_and_harmless_names() -> None:
    assert [name for name in SECRET if not secrets.is_secret(name)] == []
    assert [name for name in HARMLESS if secrets.is_secret(name)] == []


def test_values_are_found_longest_first_line_by_line_and_inside_addresses() -> None:
    environment = {
        "A_KEY": "abcdefgh",
        "B_TOKEN": "abcdefghij\n",
        "PEM_KEY": "-----BEGIN-----\nline of key\n-----END-----\n",
        "SHORT_TOKEN": "seven77",
        "https_proxy": "socks5://user:proxy-password@proxy:8080",
        "NOT": "a harmless value",
        "SAME_KEY": "abcdefgh",
    }
    found = secrets.values(environment)
    assert set(found[:2]) == {
        "-----BEGIN-----\nline of key\n-----END-----",
        "-----BEGIN----- line of key -----END-----",
    }
    assert set(found[2:]) == {
        "-----BEGIN-----",
        "-----END-----",
        "line of key",
        "proxy-password",
        "abcdefghij",
        "abcdefgh",
    }
    assert [len(value) for value in found] == sorted(map(len, found), reverse=True)
    assert (
        secrets.hide("x abcdefghij y abcdefgh z socks5://user:proxy-password@proxy", found)
        == "x *** y *** z socks5://user:***@proxy"
    )
    assert secrets.hide("seven77 a harmless value", found) == "seven77 a harmless value"


def test_only_what_is_known_to_be_harmless_is_reported() -> None:
    environment = {
        "NCCL_DEBUG": "WARN",
        "PATH": "/usr/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_JWT": "eyJhbGciOi",
        "NCCL_TOKEN": "short",
        "WANDB_API_KEY": "0123456789",
        "MY_OWN": "what it is nobody knows",
        "SLURM_JOB_COMMENT": "key 0123456789",
    }
    assert secrets.harmless_environment(environment) == {
        "NCCL_DEBUG": "WARN",
        "PATH": "/usr/bin",
        "SLURM_JOB_ID": "7",
    }


def test_no_value_of_a_secret_is_ever_printed() -> None:
    """Random environments, in which secrets also occur in values of harmless names."""
    for seed in range(20):
        chance = random.Random(seed)
        hidden = {name: f"canary-{chance.getrandbits(64):x}" for name in chance.sample(SECRET, 5)}
        environment = {
            name: f"value-{chance.random()}" for name in (*HARMLESS, "NCCL_X", "SLURM_X", "PYTHONX")
        }
        for name in chance.sample(sorted(environment), 4):
            environment[name] += " " + chance.choice(list(hidden.values()))
        report = str(secrets.harmless_environment({**hidden, **environment}))
        line = secrets.hide(str({**hidden, **environment}), secrets.values(hidden))
        assert report != "{}" and not [
            value for value in hidden.values() if value in report or value in line
        ]
