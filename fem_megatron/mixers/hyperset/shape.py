"""Shape of Hyper-SET: configuration keys, weights and costs. The module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fem_common.settings import setting
from fem_megatron.context_parallel.shape import Crossing, SplitKinds, SplitWidths
from fem_megatron.rope import Rope
from fem_megatron.shape import (
    FIXED,
    OUTPUT,
    Kept,
    Normal,
    Shape,
    Training,
    Weight,
    Weights,
    head_width,
    keys_seen,
)

if TYPE_CHECKING:
    from fem_megatron.config import ModelConfig

LORA_STD = 0.02
LINEAR_CHUNK = 64  # tokens per chunk of linear attention; earlier tokens are summed


@dataclass(frozen=True)
class HyperSetConfig:
    """Switches and sizes of Hyper-SET; read only if ``model.mixer`` is hyperset.

    Its depth is ``model.recurrence``.
    """

    attention: str = setting(
        "softmax",
        "The attention energy's operator. softmax: each token descends its conditional energy "
        "(the causal form); bisoftmax: softmax over rows and columns, for encoders; sigmoid; "
        "linear: linear time.",
        ("softmax", "bisoftmax", "sigmoid", "linear"),
    )
    feed_forward: str = setting(
        "relu", "The feed-forward energy's operator.", ("relu", "softmax", "gated")
    )
    multiplier: int = setting(4, "Width M of the feed-forward divided by hidden_size.", least=1)
    step_size: str = setting(
        "learned",
        "learned: alpha_t, gamma_t of every token and channel from a small network; fixed: "
        "alpha, gamma.",
        ("learned", "fixed"),
    )
    alpha: float = setting(0.1, "Step size of attention if step_size is fixed.")
    gamma: float = setting(0.1, "Step size of the feed-forward if step_size is fixed.")
    step_condition: str = setting(
        "origin",
        "Input of the step sizes' network in addition to the iteration: the block's input x(0), "
        "or x(t).",
        ("origin", "current"),
    )
    step_norm: bool = setting(
        True,
        "RMSNorm before the step sizes' last layer; off: the paper's table 5, which depends on "
        "x's scale.",
    )
    time_size: int = setting(
        512,
        "Width of the sinusoidal embedding of the iteration.",
        least=2,
        check=lambda size: (
            "must be even: one sine and one cosine per frequency" if size % 2 else None
        ),
    )
    time_mlp: bool = setting(
        True,
        "Two linear layers on the iteration's embedding; off: an embedding of width hidden_size "
        "is used unchanged.",
    )
    update: str = setting(
        "gradient",
        "Use of the gradient in a step: directly, or with running means over the iterations.",
        ("gradient", "momentum", "rmsprop", "adam"),
    )
    beta1: float = setting(0.9, "Decay of the running gradient (momentum, adam).", least=0, below=1)
    beta2: float = setting(
        0.96, "Decay of the running squared gradient (rmsprop, adam).", least=0, below=1
    )
    lora_rank: int = setting(
        0,
        "Rank of the adapters of each iteration, W + 4 A_t B_t, on both matrices; 0: none.",
        least=0,
    )


@dataclass(frozen=True)
class HyperSetShape(Shape):
    """Shape of one Hyper-SET iteration: an attention step, then a feed-forward step.

    iterations: number of low-rank adapters per matrix (if lora_rank > 0).
    """

    layer_class = "fem_megatron.mixers.hyperset.layer:HyperSet"
    once = frozenset({"step sizes"})
    kept = Kept(101.0, 70.7, 40.2, 38.2, gpu_fp32=80.4)

    hidden: int
    heads: int
    inner: int
    iterations: int
    norm_eps: float
    rope: Rope | None
    causal: bool
    switches: HyperSetConfig

    @classmethod
    def of(cls, model: ModelConfig) -> HyperSetShape:
        """Return the shape for the configuration ``model``.

        Raises ValueError if heads do not divide hidden_size, or if the switches contradict the
        model (bisoftmax if causal, muP without relu, an odd hidden_size without time_mlp).
        """
        switches, hidden = model.hyperset, model.hidden_size
        heads = hidden // head_width(model)
        if model.causal and switches.attention == "bisoftmax":
            raise ValueError(
                "model.hyperset.attention: with bisoftmax a token sees later tokens; a causal "
                "model needs softmax, sigmoid or linear"
            )
        if model.parametrization == "mup" and switches.feed_forward != "relu":
            raise ValueError(
                f"model.hyperset.feed_forward={switches.feed_forward}: its step depends on the "
                "width for any initialisation; muP needs relu"
            )
        if not switches.time_mlp and hidden % 2:
            raise ValueError(
                f"model.hidden_size={hidden} must be even under model.hyperset.time_mlp=false: "
                "one sine and one cosine per frequency"
            )
        return cls(
            hidden=hidden,
            heads=heads,
            inner=switches.multiplier * hidden,
            iterations=model.recurrence,
            norm_eps=model.norm_eps,
            rope=Rope.rotation(model) if switches.attention == "linear" else Rope.of(model),
            causal=model.causal,
            switches=switches,
        )

    @property
    def head(self) -> int:
        """p: channels of a head."""
        return self.hidden // self.heads

    @property
    def time_size(self) -> int:
        """Width of the iteration's embedding."""
        return self.switches.time_size if self.switches.time_mlp else self.hidden

    def weights(self) -> Weights:
        """Return the weights as a dictionary from name to weight.

        They are subspaces (W^T), directions (D^T) and their norms, with lora_rank > 0 the adapters
        of all iterations, and ``step.*`` if step sizes are learned.
        """
        hidden, rank = self.hidden, self.switches.lora_rank
        weights = {}
        for name, rows, norm in (
            ("subspaces", hidden, Weight((self.head,), init=1.0)),
            ("directions", self.inner, None),
        ):
            weights[f"{name}.weight"] = Weight(
                (rows, hidden), split=0, bare=True, maps=(self.head,) if norm else ()
            )
            weights[f"{name}_norm.weight"] = norm or Weight((rows,), split=0, init=1.0)
            if rank:
                weights[f"{name}_lora.a"] = Weight(
                    (self.iterations, rows, rank),
                    split=1,
                    init=Normal(LORA_STD),
                    mup=FIXED,
                    maps=None,
                )
                weights[f"{name}_lora.b"] = Weight(
                    (self.iterations, rank, hidden), init=Normal(LORA_STD), mup=OUTPUT, maps=None
                )
        if self.switches.step_size == "fixed":
            return weights
        shapes: dict[str, tuple[tuple[int, ...], str | float]] = {}
        if self.switches.time_mlp:
            shapes |= {
                "time_in.weight": ((hidden, self.time_size), "normal"),
                "time_in.bias": ((hidden,), 0.0),
            }
            shapes |= {
                "time_out.weight": ((hidden, hidden), "normal"),
                "time_out.bias": ((hidden,), 0.0),
            }
        if self.switches.step_norm:
            shapes["norm.weight"] = ((hidden,), 1.0)
        shapes |= {"out.weight": ((2 * hidden, hidden), 0.0), "out.bias": ((2 * hidden,), 0.0)}
        fixed = {"time_in.weight": FIXED}  # the time's embedding does not grow with the width
        step = {
            name: Weight(shape, init=init, per_token=True, mup=fixed.get(name))
            for name, (shape, init) in shapes.items()
        }
        return weights | {f"step.{name}": weight for name, weight in step.items()}

    def flops(self, length: int, *, whole_square: bool = False) -> dict[str, float]:
        """Return the FLOPs of one iteration.

        "step sizes": alpha_t and gamma_t of a token, and its share of the embedding of t, which is
        computed once for a sequence of ``length``.
        """
        hidden, rank = self.hidden, self.switches.lora_rank
        flops = {
            "mixer projections": 4.0 * hidden * hidden,
            "attention": self._attention_flops(length, whole_square),
            "MLP": 4.0 * self.inner * hidden,
        }
        if rank:
            flops["adapters"] = 4.0 * rank * (3 * hidden + self.inner)
        if self.switches.step_size == "learned":
            embedding = 2.0 * hidden * (self.time_size + hidden) * self.switches.time_mlp
            flops["step sizes"] = 4.0 * hidden * hidden + embedding / length
        return flops

    def _attention_flops(self, length: int, whole_square: bool) -> float:
        whole_square = whole_square or not self.causal
        if self.switches.attention == "linear":
            inside = (
                4.0 * keys_seen(min(length, LINEAR_CHUNK), whole_square) if self.causal else 0.0
            )
            return self.hidden * (inside + 4.0 * self.head)
        products = 3 if self.switches.attention == "bisoftmax" else 2
        return 2.0 * products * self.hidden * keys_seen(length, whole_square)

    def state_bytes(self, length: int, element: int) -> int:
        """Return the bytes of the decoding state of one iteration.

        The state is every token's z, which is both key and value. For linear attention it is a p x
        p sum for each head.
        """
        if self.switches.attention == "linear":
            return self.hidden * self.head * max(4, element)
        return length * self.hidden * element

    def summary(self) -> str:
        """Return a short description of the number of heads and of the widths."""
        return f"{self.heads} heads of {self.head}, feed-forward {self.inner}"

    def reads(self) -> set[str]:
        switches = self.switches
        names = {"attention", "feed_forward", "multiplier", "step_size", "update", "lora_rank"}
        names |= (
            {"step_norm", "time_mlp"} if switches.step_size == "learned" else {"alpha", "gamma"}
        )
        names |= (
            {"step_condition"} if switches.step_size == "learned" and self.iterations > 1 else set()
        )
        names |= {"time_size"} if switches.step_size == "learned" and switches.time_mlp else set()
        names |= {"beta1"} if switches.update in ("momentum", "adam") else set()
        names |= {"beta2"} if switches.update in ("rmsprop", "adam") else set()
        return {f"hyperset.{name}" for name in names}

    def split_widths(self) -> dict[str, int]:
        """Return the widths that tensor-parallel ranks split: heads and feed-forward width."""
        return {
            "model.num_attention_heads": self.heads,
            "the feed-forward's width, model.hyperset.multiplier * hidden_size": self.inner,
        }

    def cut_widths(self) -> SplitWidths:
        heads, kind = {"model.num_attention_heads": self.heads}, self.switches.attention
        if kind == "bisoftmax" or (kind == "linear" and not self.causal):
            return SplitWidths(always=heads)
        return SplitWidths(scanned=heads) if kind == "linear" else SplitWidths(keyed=heads)

    def exchanged_bytes(self, training: Training, kinds: SplitKinds) -> Crossing:
        """Return the bytes that ranks sharing a sequence exchange in one iteration.

        Ranks pass linear attention's sums, gather z as keys, or exchange z and the output. The keys
        are different in each iteration.
        """
        e = training.element * self.hidden / training.tensor_parallel
        if kinds.states and self.switches.attention == "linear" and self.causal:
            return Crossing(
                states=training.wide * self.hidden * self.head / training.tensor_parallel
            )
        return Crossing(keys=e) if kinds.gathers else Crossing(2 * e)

    def rotary_size(self) -> int:
        """Return the width of a head with ``model.rope``, else 0."""
        return self.head if self.rope else 0
