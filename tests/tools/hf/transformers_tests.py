"""transformers' own model tests, from its source distribution (`make setup`), with our classes; one
check at a time.

The distribution has tests/test_modeling_common.py and tests/test_training_mixin.py, but lacks the
generation and export mixins that they import: this module defines empty classes for them. The
package parameterized, of which they use one function, is replaced by that function.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import TestCase, TestResult

import pytest
import torch
import transformers.integrations.deepspeed
from torch import Tensor
from transformers import LlamaForCausalLM, LlamaModel, set_seed
from transformers.models.auto import modeling_auto

from fem_megatron.config import ModelConfig
from fem_megatron.mup import starts_from
from fem_megatron.shape import Normal, Weight
from tests.tools.hf.small import VOCAB
from tools.hf import modeling_fem
from tools.hf.configuration_fem import FemLMConfig
from tools.hf.modeling_fem import FemLMForCausalLM, FemLMModel
from tools.hf.stock import stock_config, why_not_stock

FOLDER = Path(
    os.environ.get(
        "FEM_TRANSFORMERS_TESTS", Path(__file__).parents[3] / ".venv" / "transformers-tests"
    )
)
SOURCES = FOLDER / f"transformers-{transformers.__version__}" / "tests"
MIXINS = {"test_modeling_common": "ModelTesterMixin", "test_training_mixin": "TrainingTesterMixin"}
PACKAGE = "transformers_own_tests"
SPECIAL: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
BATCH, LENGTH = 3, 7


def checks() -> list[str]:
    """Return the names of the checks, without ``test_`` and parameters; read, not imported, because
    an import takes seconds. Empty if absent.
    """
    if not SOURCES.is_dir():
        return []
    text = "".join((SOURCES / f"{module}.py").read_text(encoding="utf-8") for module in MIXINS)
    return re.findall(r"^    def test_(\w+)\(", text, re.MULTILINE)


class Unmarked:
    """Replacement for ``pytest.mark``: transformers' marks are not registered, and its checks are
    not pytest items.
    """

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a mark that does not change the function, with or without arguments."""

        def mark(*given: Any, **_: Any) -> Any:
            if given and callable(given[0]):
                return given[0]
            return lambda function: function

        return mark


class Parameterized:
    """Replacement for the class with that name in the package."""

    @staticmethod
    def expand(cases: list[Any]) -> Callable[[Any], None]:
        """Write a method for each case into the class body, with parameterized's names; the method
        itself becomes None.
        """
        body = sys._getframe(1).f_locals

        def write(function: Any) -> None:
            for place, case in enumerate(cases):
                given = case if isinstance(case, tuple) else (case,)

                def method(self: Any, given: tuple[Any, ...] = given) -> Any:
                    return function(self, *given)

                body[f"{function.__name__}_{place}_{given[0]}"] = method

        return write


def _module(name: str, **content: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(content)
    return made


def load() -> dict[str, Any]:
    """Return the modules of MIXINS, for tests on a CPU."""
    if PACKAGE not in sys.modules:
        sys.modules[PACKAGE] = _module(PACKAGE, __path__=[str(SOURCES)])
        for module, mixin in {
            "exporters.test_export": "ExportTesterMixin",
            "generation.test_utils": "GenerationTesterMixin",
        }.items():
            package = f"{PACKAGE}.{module.partition('.')[0]}"
            sys.modules[package] = _module(package, __path__=[])
            sys.modules[f"{PACKAGE}.{module}"] = _module(
                f"{PACKAGE}.{module}", **{mixin: type(mixin, (), {})}
            )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            sys.modules, "parameterized", _module("parameterized", parameterized=Parameterized)
        )
        patch.setattr(pytest, "mark", Unmarked())
        # Otherwise the checks that need a GPU would import an installed DeepSpeed.
        patch.setattr(transformers.integrations.deepspeed, "is_deepspeed_available", lambda: False)
        patch.setenv("TRANSFORMERS_TEST_DEVICE", "cpu")
        patch.setenv("RUN_TRAINING_TESTS", "1")
        return {module: importlib.import_module(f"{PACKAGE}.{module}") for module in MIXINS}


class Tester:
    """The interface that the mixins require of a ``model_tester``: classes, sizes, a configuration
    and a batch.
    """

    batch_size, seq_length, is_training = BATCH, LENGTH, True

    def __init__(self, model: ModelConfig) -> None:
        self.model, self.stock = model, why_not_stock(model) is None
        self.hidden_size, self.vocab_size = model.hidden_size, VOCAB
        self.num_hidden_layers = model.num_layers
        self.num_attention_heads = model.num_attention_heads
        self.base_model_class: Any = LlamaModel if self.stock else FemLMModel
        self.causal_lm_class: Any = LlamaForCausalLM if self.stock else FemLMForCausalLM

    def get_config(self) -> Any:
        """Return the model's configuration with a short context: RoPE's checks read one and a half
        times as many tokens.
        """
        if self.stock:
            return stock_config(self.model, max_position_embeddings=64, **SPECIAL)
        return FemLMConfig(self.model.__dict__, max_position_embeddings=64, **SPECIAL)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Tensor]]:
        """Return the configuration, and a batch with padding on the right, as transformers' own
        testers do.
        """
        ids = torch.randint(0, self.vocab_size, (BATCH, LENGTH))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids).tril()}


def case(model: ModelConfig) -> type[TestCase]:
    """Return transformers' checks of the model's classes."""
    modules, tester = load(), Tester(model)
    bases = [getattr(modules[module], mixin) for module, mixin in MIXINS.items()]
    content = {
        "model_tester": tester,
        "all_model_classes": (tester.base_model_class, tester.causal_lm_class),
        "has_attentions": tester.stock,
        "test_can_init_all_missing_weights_before_2023": True,
    }
    return type(
        "Case", (*bases, modules["test_modeling_common"].GenerationTesterMixin, TestCase), content
    )


def _off_zero(model: ModelConfig, weight: Weight) -> float | Normal:
    """Return the initialisation, replacing zeros, with which some parts have no effect: Hyper-SET's
    steps, a FEM's temperatures.
    """
    return starts_from(model, weight) or Normal(0.2)


@contextmanager
def _known() -> Iterator[None]:
    """Register our classes in transformers' tables, by which its checks know classes with a loss;
    initialise models far from the identity.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(modeling_auto.MODEL_MAPPING_NAMES, "fem_lm", "FemLMModel")
        patch.setitem(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "fem_lm", "FemLMForCausalLM")
        patch.setitem(transformers.MODEL_MAPPING._extra_content, FemLMConfig, FemLMModel)
        patch.setattr(modeling_fem, "starts_from", _off_zero)
        yield


def outcomes(checked: type[TestCase], check: str) -> dict[str, str]:
    """Return the check with each of its parameters -> "passed", or "failed: " or "skipped: " and
    its message.
    """
    names = [
        name
        for name in dir(checked)
        if re.fullmatch(rf"test_{check}(_\d+_\w+)?", name) and callable(getattr(checked, name))
    ]
    assert names, f"transformers {transformers.__version__} has no check {check}"
    found = {}
    for name in names:
        result = TestResult()
        with torch.random.fork_rng(devices=[]), _known():
            set_seed(0)
            sys.modules[f"{PACKAGE}.test_modeling_common"].global_rng.seed(0)
            checked(name).run(result)
        output = [f"failed: {text}" for _, text in (*result.failures, *result.errors)] + [
            f"skipped: {text}" for _, text in result.skipped
        ]
        found[name.removeprefix("test_")] = output[0] if output else "passed"
    return found
