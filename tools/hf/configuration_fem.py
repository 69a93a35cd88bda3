"""Configuration class of an exported model.

The file is copied into the export together with the files that it imports, which do not need
torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, ClassVar

from transformers import PretrainedConfig

from fem_megatron.config import ModelConfig
from fem_megatron.rope import KINDS, Rope, RopeScaling

DEFAULT_VOCABULARY = 32000
# Names that differ in transformers; all others are the same.
ROPE_NAMES = {"original_length": "original_max_position_embeddings"}
# True since transformers 5.
ROPE_PARAMETERS = isinstance(getattr(PretrainedConfig, "rope_scaling", None), property)


def named_rope(model: ModelConfig) -> dict[str, Any]:
    """Return the rotary settings of ``model`` with the names of transformers 5."""
    given = model.rope_scaling
    if given.kind in (None, "abf"):
        return {
            "rope_type": "default",
            "rope_theta": float(Rope(model.rope_base, given).first_base()),
        }
    named = {ROPE_NAMES.get(name, name): getattr(given, name) for name in KINDS[given.kind]}
    kept = {key: value for key, value in named.items() if value is not None}
    return {"rope_type": given.kind, "rope_theta": float(model.rope_base), **kept}


def older_names(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of `named_rope` under the names of transformers before 5.0.

    Older versions ignore ``rope_parameters`` and would use base 10000.
    """
    rest = {key: value for key, value in parameters.items() if key != "rope_theta"}
    return {
        "rope_theta": parameters["rope_theta"],
        "rope_scaling": None if rest["rope_type"] == "default" else rest,
    }


def read_rope(parameters: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Return the ModelConfig fields rope_base and rope_scaling for the settings ``parameters``.

    parameters: transformers' ``rope_parameters``. length: context length of the training in tokens.

    Raises ValueError for settings that the model does not support.
    """
    given = {key: value for key, value in parameters.items() if value is not None}
    kind = given.get("rope_type", given.get("type", "default"))
    base = given["rope_theta"]
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ValueError(
            "rope_parameters differ between layers; this model needs the same for all layers"
        )
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"partial_rotary_factor is {given['partial_rotary_factor']}; this model applies RoPE to"
            " all channels of a head"
        )
    if base != int(base):
        raise ValueError(f"rope_theta is {base}; model.rope_base must be a whole number")
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ValueError(f"rope_type is {kind!r}; supported are default, linear, llama3 and yarn")
    if kind == "default":
        return {"rope_base": int(base), "rope_scaling": RopeScaling()}
    if kind == "yarn":
        if not given.get("truncate", True):
            raise ValueError(
                "truncate is false; this model supports only truncate: true (a yarn ramp between"
                " whole channel pairs)"
            )
        given = {"original_max_position_embeddings": length} | given
        if "attention_factor" not in given and given.get("mscale") and given.get("mscale_all_dim"):
            logarithm = max(0.0, math.log(given["factor"]))
            given["attention_factor"] = (0.1 * given["mscale"] * logarithm + 1) / (
                0.1 * given["mscale_all_dim"] * logarithm + 1
            )
    required = ("factor",) if kind == "linear" else ("factor", *ROPE_NAMES.values())
    missing = [name for name in required if name not in given]
    if missing:
        raise ValueError(f"{missing[0]} is missing; rope_type {kind} requires it")
    read = {
        name: given[ROPE_NAMES.get(name, name)]
        for name in KINDS[kind]
        if ROPE_NAMES.get(name, name) in given
    }
    numbers: dict[str, Any] = {
        name: int(value) if name == "original_length" else float(value)
        for name, value in read.items()
    }
    return {"rope_base": int(base), "rope_scaling": RopeScaling(kind, **numbers)}


def stretched(
    model: ModelConfig,
    length: int,
    rope_parameters: Any = None,
    rope_theta: float | None = None,
    rope_scaling: Any = None,
) -> ModelConfig:
    """Return ``model`` with RoPE settings that a user changed under transformers' names.

    The older names (``rope_theta``, ``rope_scaling``) have precedence over ``rope_parameters``.
    ``model`` is returned unchanged if all settings equal its own. length: as in ``read_rope``.
    """
    named, rest = named_rope(model), dict(rope_scaling or {})
    older = {"rope_type": rest.pop("type", "default"), "rope_theta": rope_theta, **rest}
    for given in (None if rope_theta is None and rope_scaling is None else older, rope_parameters):
        full = (
            named
            if given is None
            else {**given, "rope_theta": given.get("rope_theta") or named["rope_theta"]}
        )
        if full != named:
            return replace(model, **read_rope(full, length))
    return model


class FemLMConfig(PretrainedConfig):
    """Configuration of an exported decoder-only language model, under transformers' names.

    Args:
        architecture: fields of the training code's ModelConfig as a dictionary; missing
            ones have its defaults.
        vocab_size: entries of the tokenizer, rows of the embedding.
        hidden_size: width D of the residual stream.
        num_hidden_layers: blocks (mixer + MLP).
        num_attention_heads: heads of the mixer.
        initializer_range: standard deviation of the normal initialisation.
        tie_word_embeddings: True: output layer and input embedding are one tensor.
        recurrence: number of times that every block is applied; may exceed the number in
            training, which ``architecture`` contains.
        max_position_embeddings: context length of the training; does not limit the model.
        use_cache: return the decoding state for the next call, unless in training mode.
        rope_parameters: base and scaling of RoPE under the names of transformers 5.
        rope_theta, rope_scaling: the same under the names of earlier versions.

    The arguments from vocab_size to recurrence, and those of RoPE, are also in ``architecture``
    with the training code's names; explicit arguments have precedence.

    Raises:
        ValueError: sizes do not match.
        TypeError: ``architecture`` has an unknown key.
    """

    model_type = "fem_lm"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    training_names: ClassVar[dict[str, str]] = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_attention_heads",
        "initializer_range": "init_std",
        "tie_word_embeddings": "tie_embeddings",
    }

    def __init__(
        self,
        architecture: dict[str, Any] | None = None,
        vocab_size: int | None = None,
        hidden_size: int | None = None,
        num_hidden_layers: int | None = None,
        num_attention_heads: int | None = None,
        initializer_range: float | None = None,
        tie_word_embeddings: bool | None = None,
        recurrence: int | None = None,
        max_position_embeddings: int = 4096,
        use_cache: bool = True,
        rope_parameters: dict[str, Any] | None = None,
        rope_theta: float | None = None,
        rope_scaling: dict[str, Any] | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        given = {
            "vocab_size": vocab_size,
            "num_layers": num_hidden_layers,
            "hidden_size": hidden_size,
            "num_attention_heads": num_attention_heads,
            "init_std": initializer_range,
            "tie_embeddings": tie_word_embeddings,
        }
        fields = {
            **(architecture or {}),
            **{key: value for key, value in given.items() if value is not None},
        }
        if fields.get("vocab_size") is None:
            fields["vocab_size"] = DEFAULT_VOCABULARY
        model = stretched(
            ModelConfig.from_dict(fields),
            max_position_embeddings,
            rope_parameters,
            rope_theta,
            rope_scaling,
        )
        if any(block.mixer.rotary_size() for block in model.blocks()):
            self._name_rope(model)
        self.architecture = json.loads(json.dumps(asdict(model)))
        for theirs, ours in self.training_names.items():
            setattr(self, theirs, self.architecture[ours])
        self.recurrence = model.recurrence if recurrence is None else recurrence
        self.max_position_embeddings = max_position_embeddings
        self.use_cache = use_cache
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        # Assigned above and passed on: the versions of transformers differ in which of these ids
        # the base class stores.
        tokens = {
            "bos_token_id": bos_token_id,
            "eos_token_id": eos_token_id,
            "pad_token_id": pad_token_id,
        }
        kwargs.update(tokens, tie_word_embeddings=model.tie_embeddings)
        super().__init__(**kwargs)

    def _name_rope(self, model: ModelConfig) -> None:
        parameters = named_rope(model)
        named = {"rope_parameters": parameters} if ROPE_PARAMETERS else older_names(parameters)
        for key, value in named.items():
            setattr(self, key, value)

    def model_fields(self) -> dict[str, Any]:
        """Return the fields of ModelConfig: ``architecture`` with changes made under transformers'
        names.

        Examples of changes are a resized vocabulary and a scaled RoPE.
        """
        fields = {
            **self.architecture,
            **{ours: getattr(self, theirs) for theirs, ours in self.training_names.items()},
        }
        names = ("rope_parameters",) if ROPE_PARAMETERS else ("rope_theta", "rope_scaling")
        values = {name: getattr(self, name, None) for name in names}
        model = stretched(ModelConfig.from_dict(fields), self.max_position_embeddings, **values)
        return fields | {"rope_base": model.rope_base, "rope_scaling": asdict(model.rope_scaling)}

    def model(self) -> ModelConfig:
        """Return the ModelConfig of the model with all changes, including ``recurrence``."""
        return replace(ModelConfig.from_dict(self.model_fields()), recurrence=self.recurrence)
