"""Shape of Causal Energy Minimization (CEM): configuration keys, weights and costs.

Attention and MLP are gradient steps on an energy, with tied projections. The module does not import
torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fem_common.settings import setting
from fem_megatron.context_parallel.shape import Crossing, SplitKinds, SplitWidths
from fem_megatron.mup import score_scale
from fem_megatron.shape import (
    FIXED,
    OUTPUT,
    Kept,
    Normal,
    Packing,
    Scaling,
    Shape,
    Training,
    Weight,
    Weights,
    head_width,
    keys_seen,
)

if TYPE_CHECKING:
    from fem_megatron.config import ModelConfig

LOW_RANK_STD = 0.02
ROOT = Scaling(0.0, -0.5)  # learning rate 1 / sqrt(m)


@dataclass(frozen=True)
class CemConfig:
    """Switches and sizes of Causal Energy Minimization.

    They are read only if ``model.mixer`` or ``model.mlp`` is cem.
    """

    diagonal: str = setting(
        "shared",
        "The diagonal D_k in attention's scores, h_j D_k u_i: none, one for all heads, or one "
        "per head.",
        ("none", "shared", "head"),
    )
    preconditioner: str = setting(
        "low_rank",
        "The preconditioner P of every step. identity; diagonal: diag(softplus(d)); low_rank: "
        "diag(softplus(d)) + U V^T + V U^T.",
        ("identity", "diagonal", "low_rank"),
    )
    rank_attention: int = setting(
        4, "Columns of U and V of each head's preconditioner (low_rank).", least=1
    )
    rank_mlp: int = setting(
        16, "Columns of U and V of the MLP's preconditioner (low_rank).", least=1
    )
    steps_attention: int = setting(
        2,
        "T: steps down attention's energy; keys and values are constant during the steps.",
        least=1,
    )
    steps_mlp: int = setting(
        2, ("T: steps down the MLP's energy; gamma is constant during the steps."), least=1
    )
    eta_attention: float = setting(1.0, "Step size of attention.")
    eta_mlp: float = setting(1.0, "Step size of the MLP.")
    scale: str = setting(
        "model",
        "Factor on attention's scores. model: 1 / sqrt(hidden_size), as in the paper; head: 1 / "
        "sqrt(a head's width).",
        ("model", "head"),
    )
    alibi: str = setting(
        "heads",
        "ALiBi's slopes of the heads k = 1 to H. heads: 2^(-8 k / H), as ALiBi defines them; "
        "powers: 2^-k, the example of the paper's appendix B. They are equal for 8 heads.",
        ("heads", "powers"),
    )
    residual: str = setting(
        "normalised",
        "Initial x of the steps. normalised: RMSNorm(h), as in Algorithm 1; raw: h, as in a "
        "pre-norm Transformer's residual.",
        ("normalised", "raw"),
    )


def preconditioner_weights(
    switches: CemConfig, groups: int, hidden: int, rank: int, split: int | None
) -> Weights:
    """Return the weights p, u and v of ``groups`` preconditioners (`Preconditioner`).

    d = sqrt(D) p starts at 1, U is normal, V zero, so that P starts at softplus(1) I.

    Under muP, V sums over the width. The one P of an MLP (split None) acts on a step whose channels
    have size 1: d is FIXED, so p's rate falls as 1 / sqrt(m), and U, from the rank's channels into
    the width, is FIXED. Each head's P acts on that head's part of the step, whose channels have
    size 1 / sqrt(D). The parts are summed over heads, whose number grows with D: a further factor 1
    / sqrt(m) for both.
    """
    if switches.preconditioner == "identity":
        return {}
    scaling_p, scaling_u = (ROOT, FIXED) if split is None else (Scaling(0.0, -1.0), ROOT)
    weights = {
        "precondition.p": Weight((groups * hidden,), split=split, init=hidden**-0.5, mup=scaling_p)
    }
    if switches.preconditioner == "low_rank":
        weights["precondition.u"] = Weight(
            (groups, hidden, rank), split=split, init=Normal(LOW_RANK_STD), mup=scaling_u, maps=None
        )
        weights["precondition.v"] = Weight(
            (groups, hidden, rank), split=split, init=0.0, mup=OUTPUT, maps=None
        )
    return weights


def preconditioner_flops(
    switches: CemConfig, groups: int, rows: int, hidden: int, rank: int, steps: int, length: int
) -> dict[str, float]:
    """Return the FLOPs per token of the preconditioners' low-rank part.

    For sequences of more than ``rows`` tokens, the preconditioners are folded into ``groups``
    matrices [rows, D] once per forward pass. Otherwise they are applied in every step.
    """
    if switches.preconditioner != "low_rank":
        return {}
    times = rows / length if length > rows else float(steps)
    return {"preconditioner": 8.0 * groups * hidden * rank * times}


def _reads(switches: CemConfig, part: str) -> set[str]:
    """Return the configuration keys of attention or of the MLP."""
    names = ["preconditioner", "residual", f"steps_{part}", f"eta_{part}"]
    return {
        f"cem.{name}"
        for name in [*names, *([f"rank_{part}"] if switches.preconditioner == "low_rank" else [])]
    }


@dataclass(frozen=True)
class CemAttentionShape(Shape):
    """Shape of CEM attention: D -> heads of D / heads channels -> D.

    One matrix produces keys and values, another one queries and the output.
    """

    layer_class = "fem_megatron.mixers.cem.layer:CemAttention"
    once = frozenset({"preconditioner"})
    kept = Kept(46.0, 32.0, 18.3, 18.2, gpu_fp32=26.5)

    hidden: int
    heads: int
    norm_eps: float
    causal: bool
    switches: CemConfig
    mup_scale: float | None = None  # muP's factor on the scores, if any

    @classmethod
    def of(cls, model: ModelConfig) -> CemAttentionShape:
        """Return the shape for the configuration ``model``.

        Raise ValueError if the heads do not fit.
        """
        scale = score_scale(model, head_width(model))
        if (
            model.parametrization == "mup"
            and model.mup.base_head_size is not None
            and model.cem.scale != "head"
        ):
            raise ValueError(
                "model.mup.base_head_size: model.cem.scale=model does not depend on a head's "
                "width; set model.cem.scale=head, or model.mup.base_head_size to null"
            )
        # the paper's 1 / sqrt(D) would vanish with the width
        if model.parametrization == "mup" and model.cem.scale == "model":
            scale = model.mup.base_hidden_size**-0.5
        return cls(
            model.hidden_size,
            model.num_attention_heads,
            model.norm_eps,
            model.causal,
            model.cem,
            scale,
        )

    @property
    def head(self) -> int:
        """Channels of a head."""
        return self.hidden // self.heads

    @property
    def scale(self) -> float:
        """s = 1 / tau, the factor on the scores."""
        if self.mup_scale is not None:
            return self.mup_scale
        return float((self.hidden if self.switches.scale == "model" else self.head) ** -0.5)

    @property
    def falling(self) -> float:
        """Exponent of 2 between the ALiBi slopes of two successive heads; the first head's too."""
        return -8.0 / self.heads if self.switches.alibi == "heads" else -1.0

    def weights(self) -> Weights:
        """Return name -> weight: norm, query, key, the two biases, diagonal and preconditioner.

        query is W_Q, whose transpose is the output projection. key is W_K, which also gives the
        values. Both are head-major.
        """
        hidden = self.hidden
        weights = {
            "norm.weight": Weight((hidden,), init=1.0, per_token=True),
            "query.weight": Weight((hidden, hidden), split=0, bare=True, maps=(self.head,)),
            "key.weight": Weight((hidden, hidden), split=0, maps=(self.head,)),
            "self_bias": Weight((1,), init=0.0),
            "cross_bias": Weight((1,), init=0.0),
        }
        # The paper gives no initial value for d. With zero the initial scores are those of
        # attention.
        if self.switches.diagonal == "shared":
            weights["diagonal"] = Weight((hidden,), init=0.0, mup=OUTPUT)
        elif self.switches.diagonal == "head":
            weights["diagonal"] = Weight((self.heads * hidden,), split=0, init=0.0, mup=OUTPUT)
        return weights | preconditioner_weights(
            self.switches, self.heads, hidden, self.switches.rank_attention, 0
        )

    def flops(self, length: int, *, whole_square: bool = False) -> dict[str, float]:
        """Return the FLOPs by part: keys once; query, output, scores and read in every step.

        A shared diagonal's scores are computed once for all heads.
        """
        switches, keys = self.switches, keys_seen(length, whole_square or not self.causal)
        diagonals = {"none": 0, "shared": 1, "head": self.heads}[switches.diagonal]
        return {
            "mixer projections": 2.0 * self.hidden**2 * (1 + 2 * switches.steps_attention),
            "attention": 2.0 * self.hidden * keys * (2 + diagonals) * switches.steps_attention,
        } | preconditioner_flops(
            switches,
            self.heads,
            self.head,
            self.hidden,
            switches.rank_attention,
            switches.steps_attention,
            length,
        )

    def state_bytes(self, length: int, element: int) -> int:
        """Return the bytes of one sequence's decoding state.

        The state is k, half of standard attention's KV-cache, and with a diagonal also h. It does
        not depend on the number of steps.
        """
        return length * self.hidden * (1 if self.switches.diagonal == "none" else 2) * element

    def product_scores(self) -> bool:
        return True

    def packing(self) -> dict[str, Packing]:
        """Return the packing of q and k. Values and output use the same two matrices."""
        return {
            name: Packing(self.heads, {part: self.head}, {part: part})
            for name, part in (("query.weight", "q"), ("key.weight", "k"))
        }

    def summary(self) -> str:
        return f"{self.heads} heads of {self.head}, {self.switches.steps_attention} steps"

    def reads(self) -> set[str]:
        return {"cem.diagonal", "cem.scale", "cem.alibi"} | _reads(self.switches, "attention")

    def counts_padding(self) -> bool:
        return True

    def split_widths(self) -> dict[str, int]:
        return {"model.num_attention_heads": self.heads}

    def cut_widths(self) -> SplitWidths:
        return SplitWidths(keyed=self.split_widths())

    def activation_bytes(self, training: Training) -> dict[str, float]:
        """Return the estimated bytes per token that autograd keeps.

        If the sequence is split, copies of q and k in each step are added, and with a diagonal
        copies of all tokens' u and h.
        """
        kept = super().activation_bytes(training)
        ranks = training.ranks
        diagonal = self.switches.diagonal != "none"
        copies = self.heads * self.head / training.tensor_parallel + ranks * self.hidden * diagonal
        return kept | {
            "cut": 2 * self.switches.steps_attention * training.element * copies * (ranks > 1)
        }

    def exchanged_bytes(self, training: Training, kinds: SplitKinds) -> Crossing:
        """Return the bytes that ranks sharing a sequence exchange in all steps.

        If ``kinds.gathers`` is set, each step gathers keys, and with a diagonal h. Otherwise each
        step exchanges q, k and the output, and gathers the diagonal's u and h, which are not split
        into heads.
        """
        steps = self.switches.steps_attention
        e = training.element
        diagonal = self.switches.diagonal != "none"
        heads = e * self.heads * self.head / training.tensor_parallel
        if kinds.gathers:
            return Crossing(keys=steps * (heads + e * self.hidden * diagonal))
        return Crossing(steps * 3 * heads, steps * e * 2 * self.hidden * diagonal)


@dataclass(frozen=True)
class CemMlpShape(Shape):
    """Shape of the CEM MLP: D -> inner -> D, with one matrix for both directions, and a gate."""

    layer_class = "fem_megatron.mixers.cem.layer:CemMlp"
    once = frozenset({"preconditioner"})
    kept = Kept(25.0, 18.0, 8.4, gpu_fp32=14.5)

    hidden: int
    inner: int
    norm_eps: float
    switches: CemConfig

    @classmethod
    def of(cls, model: ModelConfig) -> CemMlpShape:
        """Return the shape for the configuration ``model``."""
        return cls(model.hidden_size, model.ffn_size, model.norm_eps, model.cem)

    def weights(self) -> Weights:
        """Return name -> weight: norm, gamma, up and preconditioner.

        gamma is W, the gate. up is V, whose transpose projects down. The preconditioner P is
        replicated on every rank.
        """
        return {
            "norm.weight": Weight((self.hidden,), init=1.0, per_token=True),
            "gamma.weight": Weight((self.inner, self.hidden), split=0),
            "up.weight": Weight((self.inner, self.hidden), split=0, bare=True),
        } | preconditioner_weights(self.switches, 1, self.hidden, self.switches.rank_mlp, None)

    def flops(self, length: int, *, whole_square: bool = False) -> dict[str, float]:
        """Return the FLOPs by part: gamma once, up and down in every step, the preconditioner."""
        switches = self.switches
        return {
            "MLP": 2.0 * self.hidden * self.inner * (1 + 2 * switches.steps_mlp)
        } | preconditioner_flops(
            switches, 1, self.inner, self.hidden, switches.rank_mlp, switches.steps_mlp, length
        )

    def state_bytes(self, length: int, element: int) -> int:
        """Return 0: the MLP reads only the current token."""
        return 0

    def activation_bytes(self, training: Training) -> dict[str, float]:
        """Return the estimated bytes per token that autograd keeps.

        They include the inner channels of gamma and of each step.
        """
        inner = training.element * (3 * self.switches.steps_mlp + 1) * self.inner
        return training.estimate(self.hidden, self.kept, inner)

    def packing(self) -> dict[str, Packing]:
        """Return the packing of up and gamma for copying SwiGLU's weights.

        up is the argument of SiLU and corresponds to SwiGLU's gate. gamma multiplies the result and
        corresponds to SwiGLU's up projection.
        """
        pairs = (("up.weight", "gate"), ("gamma.weight", "up"))
        return {name: Packing(1, {role: self.inner}, {role: role}) for name, role in pairs}

    def summary(self) -> str:
        return f"MLP {self.inner}, {self.switches.steps_mlp} steps"

    def reads(self) -> set[str]:
        return _reads(self.switches, "mlp")

    def split_widths(self) -> dict[str, int]:
        return {"the MLP's width, model.ffn_hidden_size": self.inner}
