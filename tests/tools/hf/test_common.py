"""transformers' own checks of a model (`ModelTesterMixin`, `TrainingTesterMixin`) with our classes,
and with its Llama as the control.

They are part of its source distribution, which `make setup` downloads; in other environments this
module is skipped. The checks of generation and of torch.export are not in it; our own are in
test_generate.py, test_cache.py and test_model.py.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple
from unittest import TestCase

import pytest

from tests.tools.hf.small import config_of
from tests.tools.hf.transformers_tests import FOLDER, SOURCES, case, checks, outcomes

CONTROL = "transformer"  # transformers' own class: its failures are faults of the harness
OURS = ("fem_softmax", "fem_gla", "cem", "hyperset", "hybrid")  # hyperset: with recurrence
ALL = (CONTROL, *OURS)
TURNED = tuple(name for name in OURS if name != "cem")


class Excepted(NamedTuple):
    """Checks, by a pattern of their names, that cannot pass with these models: the actual outcome
    as a pattern, and the reason.
    """

    checks: str
    models: tuple[str, ...]
    outcome: str
    reason: str


# Strict: an excepted check that passes, or fails or is skipped in another way, is an error.
TABLE = [
    Excepted(
        "attention_outputs|eager_matches_sdpa_.*|sdpa_can_dispatch_non_.*",
        OURS,
        "skipped: .*attentions",
        "the mixers have no attention maps",
    ),
    Excepted(
        "tp_plan_.*|tied_head_has_a_tp_.*",
        OURS,
        "skipped: .*TP plan",
        "an exported model runs in one process: no tensor-parallel plan",
    ),
    Excepted(
        "capture_outputs_.*",
        OURS,
        "skipped: No usage of",
        "forward collects hidden states itself, as transformers 4 needs",
    ),
    Excepted("can_capture_specific_.*", OURS, "skipped: Cannot capture", "the same"),
    Excepted(
        "model_rope_scaling_frequencies",
        TURNED,
        "skipped: .*no standardized RoPE module",
        "each block turns its own queries and keys",
    ),
    Excepted(
        "model_rope_scaling_.*_dynamic",
        TURNED,
        "failed: (?s:.*)rope_type is 'dynamic'; supported are",
        "refused: not a scale of the training code",
    ),
    Excepted(
        "model_rope_scaling_.*", ("cem",), "skipped: .*not support RoPE", "CEM has no positions"
    ),
    Excepted(
        "flash_.*|flex_.*|sdpa_can_(dispatch_on_flash|compile_.*)|torch_compile_.*|kernels_.*|.*(deepspeed|offload).*"
        "|model_parallelism|can_load_with_(device|global)_.*",
        ALL,
        "skipped: test (requires|is slow)",
        "an accelerator or a library for one is needed; offload has tests of its own",
    ),
    Excepted("encoder_decoder_.*", ALL, "skipped: No sequence-to-sequence", "no encoder"),
    Excepted("resize_position_.*", ALL, "skipped: .*position embeddings", "no learned positions"),
    Excepted(
        "vision_axial_rope|model_rope_with_partial_.*",
        ALL,
        "skipped: .*(RoPE|partial rope)",
        "RoPE turns whole heads, in one dimension",
    ),
    Excepted("sliding_window_mask", ALL, "skipped: .*not support", "none of these has a window"),
    Excepted(
        "moe_.*|output_router_.*|.*_batched_and_grouped_.*",
        ALL,
        "skipped: .*(experts|router|grouped_mm)",
        "no experts",
    ),
    Excepted(
        "(attn_.*|sdpa_can_dispatch|.*dynamically)_composite_.*|internal_model_.*",
        ALL,
        "skipped: .*(omposite|SDPA|attentions|subconfigs)",
        "no model within a model",
    ),
    Excepted(
        "keep_in_fp32_.*",
        ALL,
        "skipped: .*_keep_in_fp32_modules",
        "no weight is kept in float32 by its name",
    ),
    Excepted(
        "reverse_loading_.*|can_load_from_already_.*",
        ALL,
        "skipped: No conversion",
        "weights have the same names in a file and in memory",
    ),
]
# Checks that return at once if the class lacks a method, or that belong to a mixin missing in the
# distribution: they would always pass.
EMPTY = "get_(text|image|audio|video)_features_.*|generation_tester_mixin_.*"
CHECKS = [check for check in dict.fromkeys(checks()) if not re.fullmatch(EMPTY, check)]
OTHER = [
    check
    for check in CHECKS
    if any(row.models == ALL and re.fullmatch(row.checks, check) for row in TABLE)
]
# Checks that take seconds and test the same property for every mixer.
SLOW = {(name, "training_overfit") for name in ALL} | {
    (name, "bc_torch_dtype") for name in ALL if name != "fem_softmax"
}
# With RoPE, fem_softmax runs them; without RoPE, cem does.
SLOW |= {(name, check) for name in ("fem_gla", "hyperset", "hybrid") for check in CHECKS}
# These checks are skipped for the project's own classes.
SLOW |= {(CONTROL, check) for check in CHECKS if check.startswith("eager_matches_sdpa_")}

pytestmark = [
    pytest.mark.skipif(
        not CHECKS,
        reason=(
            f"no {SOURCES}: `make setup`, or unpack tests of transformers' source distribution"
            f" below {FOLDER}"
        ),
    ),
    pytest.mark.filterwarnings("ignore"),  # the checks also use deprecated features of transformers
]


@cache
def case_of(name: str) -> type[TestCase]:
    return case(config_of(name))


def judge(name: str, check: str) -> None:
    """Check that a check passes with each of its parameters, or has the outcome of the table."""
    for found, output in outcomes(case_of(name), check).items():
        row = next(
            (row for row in TABLE if name in row.models and re.fullmatch(row.checks, found)), None
        )
        if row is None:
            assert output == "passed", f"{found}: {output}"
        else:
            assert output != "passed", (
                f"{found} passes: remove it from the table, whose reason is {row.reason!r}"
            )
            assert re.match(row.outcome, output), f"{found}: expected {row.outcome!r}, got {output}"


EACH = [(name, check) for name in ALL for check in CHECKS if check not in OTHER]


@pytest.mark.parametrize(
    ("name", "check"),
    [pytest.param(*one, marks=pytest.mark.slow if one in SLOW else []) for one in EACH],
)
def test_transformers_own_check(name: str, check: str) -> None:
    judge(name, check)


@pytest.mark.parametrize("name", ALL)
def test_checks_of_other_kinds_of_model(name: str) -> None:
    """None of them has become applicable."""
    for check in OTHER:
        judge(name, check)


def test_the_table_names_checks_that_exist() -> None:
    names = [name.removeprefix("test_") for name in dir(case_of(CONTROL))]
    assert [
        row.checks for row in TABLE if not any(re.fullmatch(row.checks, name) for name in names)
    ] == []
