"""Shape of the Free Energy Mixer over any prior: configuration keys, weights and costs.

The module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fem_common.settings import setting
from fem_megatron.context_parallel.shape import Crossing, SplitKinds, SplitWidths
from fem_megatron.mixers.fem.prior_shapes import PriorShape, ScanShape, SoftmaxShape
from fem_megatron.rope import Rope
from fem_megatron.shape import WIDE, Packing, Shape, Training, Weight, Weights, qk_norms_keep

if TYPE_CHECKING:
    from fem_megatron.config import ModelConfig


@dataclass(frozen=True)
class FemConfig:
    """Switches and sizes of the Free Energy Mixer; read only if ``model.mixer`` is a FEM."""

    conditioner: bool = setting(
        True,
        "C: the time-decay conditioner, which scales q, k, v and the gates' logits by 1 + "
        "phi(history).",
    )
    free_energy: bool = setting(
        True, ("L: the free-energy branch F in addition to the expectation mu.")
    )
    temperature: bool = setting(
        True,
        "T: learned inverse temperature beta and the inner gate lambda; off: beta = 1 and the "
        "read is only F.",
    )
    gate: bool = setting(True, "G: the outer gate g, RMS-normalised over a head's channels.")
    budget: str = setting(
        "i",
        "Distribution of 4*hidden_size^2 parameters: (i) full-width queries and keys, narrower "
        "values; (ii) all of one width. fem_lrnn_decay, and fem_aft with aft_query=after, have "
        "one width under both.",
        ("i", "ii"),
    )
    value_size: int | None = setting(
        None, "Width d of the values over all heads; null: from the budget.", least=1
    )
    conditioner_size: int | None = setting(
        None,
        "Width H_c of the conditioner's state; null: d / 16 (at least 4), rounded up to a "
        "multiple of the heads.",
        least=1,
    )
    gla_decay: str = setting(
        "head",
        "fem_gla: one decay per head, or per channel of q and k (hidden_size^2 more parameters).",
        ("head", "channel"),
    )
    feature_eps: float = setting(
        1e-6, "fem_linear, fem_gla: eps of the features relu(x) + eps.", above=0
    )
    aft_query: str = setting(
        "after",
        "fem_aft: what the query gates. after: the read; inside: both sums, before the logarithm "
        "(the released code).",
        ("after", "inside"),
    )
    mamba_states: int | None = setting(
        None,
        "fem_mamba: N, states of a channel; null: as many as fit into the budget of q and k.",
        least=1,
    )
    mamba_normalise: bool = setting(
        True,
        "fem_mamba: divide the weights by their sum, so that they are a distribution; off: the "
        "ablation.",
    )


@dataclass(frozen=True)
class FemShape(Shape):
    """Shape of a Free Energy Mixer (FEM), with widths that follow from a parameter budget.

    n_T, n_G in {0, 1} count the projections that the switches T (temperature) and G (gate) add.
    Budget (i) spends 2 D^2 parameters on q, k and 2 D^2 on v, o, lambda, g of width d = 2D / (2 +
    n_T + n_G). Budget (ii) spends 4 D^2 on all of them at one width d = 4D / (4 + n_T + n_G).
    Priors whose q and k are as wide as the values (AFT) or absent (LRNN-decay: d = 4D / (2 + n_T +
    n_G)) use one width under both budgets. With all switches on, the widths are the paper's D/2 and
    2D/3. With all switches off, the mixer is the plain prior with as many parameters as standard
    attention.
    """

    layer_class = "fem_megatron.mixers.fem.layer:FemMixer"
    fused_maps = frozenset({"tdc.out_proj.weight"})  # phi, in `kernels.fem_projection`

    prior: PriorShape
    hidden: int
    heads: int
    value_head: int
    conditioner: int
    free_energy: bool
    temperature: bool
    gate: bool
    norm_eps: float
    rope: Rope | None
    backend: str
    causal: bool

    @classmethod
    def of(cls, model: ModelConfig, prior: type[PriorShape]) -> FemShape:
        """Return the shape for ``model`` over a prior of this class.

        Raises ValueError if the number of heads does not divide one of the widths.
        """
        fem, heads, hidden = model.fem, model.num_attention_heads, model.hidden_size
        temperature = fem.temperature and fem.free_energy
        extra = int(temperature) + int(fem.gate)
        # Priors with q and k at most as wide as the values leave the budget to the values.
        narrow = prior.narrow(fem)
        full_width = fem.budget == "i" and narrow is None
        share, parts = (
            (2 * hidden, 2 + extra) if full_width else (4 * hidden, (narrow or 4) + extra)
        )
        if fem.value_size:
            value = fem.value_size
        elif share % parts or share // parts % heads:
            value = max(1, round(share / parts / heads)) * heads
        else:
            value = share // parts
        qk = hidden if full_width else value
        for what, width in (("query/key", qk), ("value", value)):
            if width % heads:
                raise ValueError(
                    f"model.num_attention_heads={heads} does not divide the mixer's {what} width "
                    f"{width}"
                )
        return cls(
            prior=prior.of(model, qk // heads, value // heads),
            hidden=hidden,
            heads=heads,
            value_head=value // heads,
            conditioner=(fem.conditioner_size or -(-max(4, value // 16) // heads) * heads)
            if fem.conditioner
            else 0,
            free_energy=fem.free_energy,
            temperature=temperature,
            gate=fem.gate,
            norm_eps=model.norm_eps,
            rope=Rope.of(model) if prior.product_scores else Rope.rotation(model),
            backend=model.attention_backend,
            causal=model.causal,
        )

    @property
    def value_size(self) -> int:
        """d: value channels over all heads."""
        return self.heads * self.value_head

    @property
    def slices(self) -> dict[str, int]:
        """Channels of one head in the packed projection, in order.

        First the prior's slices, then v, then the lambda-logit and g-logit if present.
        """
        gates = {
            name: self.value_head
            for name, present in (("lam", self.temperature), ("gate", self.gate))
            if present
        }
        return {**self.prior.slices(), "v": self.value_head, **gates}

    @property
    def head_width(self) -> int:
        """Rows of a head in the packed projection."""
        return sum(self.slices.values())

    def weights(self) -> Weights:
        """Return name -> weight.

        The names are norm, in_proj (head-major), the prior's weights (``prior.*``), beta (with
        fem.temperature), the conditioners' weights (``tdc.*``) and out_proj.
        """
        packed = self.heads * self.head_width
        weights = {
            "norm.weight": Weight((self.hidden,), init=1.0, per_token=True),
            "in_proj.weight": Weight(
                (packed, self.hidden), split=0, maps=tuple(self.slices.values())
            ),
        }
        weights |= {
            f"prior.{name}": weight for name, weight in self.prior.weights(self.heads).items()
        }
        if self.temperature:
            weights["beta"] = Weight((self.value_size,), split=0, init=0.0)
        for name, size in self.conditioners().items():
            weights |= {
                f"{name}.norm.weight": Weight((self.hidden,), init=1.0),
                # logits of decays
                f"{name}.in_proj.weight": Weight((3 * size, self.hidden), split=0, precise=True),
                f"{name}.state_norm.weight": Weight((size,), init=1.0),
                f"{name}.out_proj.weight": Weight(
                    (packed, size), split=0, init=0.0, bare=True, maps=tuple(self.slices.values())
                ),
            }
        return weights | {"out_proj.weight": Weight((self.hidden, self.value_size), split=1)}

    def conditioners(self) -> dict[str, int]:
        """Return name -> width of each conditioner's state; empty without fem.conditioner.

        A bidirectional mixer has a second conditioner of half the width, which scans backwards.
        """
        if not self.conditioner:
            return {}
        return {"tdc": self.conditioner} | (
            {} if self.causal else {"tdc_backward": max(1, self.conditioner // 2)}
        )

    def flops(self, length: int, *, whole_square: bool = False) -> dict[str, float]:
        """Return the FLOPs of one token's forward pass by part.

        The parts are projections, reads and the conditioners' projections. The reads are of [v |
        U], or only v without fem.free_energy.
        """
        streams = self.value_head * (2 if self.free_energy else 1)
        conditioner = sum(value for name, value in self.map_flops.items() if name.startswith("tdc"))
        flops = {
            "mixer projections": self.linear_flops() - conditioner,
            "attention": self.heads * self.prior.flops(length, streams, whole_square=whole_square),
        }
        return flops | ({"conditioner": conditioner} if conditioner else {})

    def state_bytes(self, length: int, element: int) -> int:
        """Return the bytes of every head's prior state and of the conditioner's state (fp32)."""
        prior = self.prior.state_bytes(
            length, element, value=self.value_head, free_energy=self.free_energy
        )
        return self.heads * prior + self.conditioner * max(4, element)

    def product_scores(self) -> bool:
        return self.prior.product_scores

    def packing(self) -> dict[str, Packing]:
        """Return the packing of values; also of queries and keys if the prior compares them."""
        roles = "qkv" if self.prior.compares else "v"
        return {"in_proj.weight": Packing(self.heads, self.slices, {part: part for part in roles})}

    def activation_bytes(self, training: Training) -> dict[str, float]:
        """Return the bytes per token that autograd keeps, by term.

        They are exact for the softmax prior. For other priors they are exact on a GPU and estimated
        on a CPU.
        """
        if not isinstance(self.prior, SoftmaxShape):
            return (
                self._kept_of_a_prior(training)
                if training.cuda
                else training.estimate(self.hidden, self.prior.kept, sliced=True)
            )
        e = training.element
        t = training.tensor_parallel
        cuda = training.cuda
        qk_head = self.prior.qk_head
        value = self.value_size / t
        packed = self.heads * self.head_width / t
        query = self.heads * qk_head / t
        narrow = e < WIDE
        read = value * (2 if self.free_energy else 1)
        if not cuda:
            query, unpadded, read = max(query, read), read, max(query, read)
        own_slices = bool(self.conditioner or self.prior.rope or self.temperature or self.gate)
        reads_packed_values = not self.free_energy and not own_slices and (cuda or read == unpadded)
        terms = {
            "projection": self._projection_keeps(training),
            "rope": WIDE * qk_head / training.micro_batch if self.prior.rope else 0.0,
            "attention": e * (2 * query + read + (0 if reads_packed_values else read))
            + WIDE * self.heads / t,
            "packed": e * packed if cuda or reads_packed_values else e * value * self.gate,
            "gates": value
            * (
                e * (self.temperature + self.gate)
                if cuda
                else self.temperature * (e + WIDE * narrow) + self.gate * 2 * WIDE
            ),
            "out_proj": training.operand * value
            if self.free_energy or self.gate or training.operand < WIDE
            else 0.0,
        }
        # A GPU's kernel keeps its arguments, so its results are counted in this term.
        if self.prior.qk_norm:
            terms["qk_norm"] = qk_norms_keep(
                training, qk_head, 2 * self.heads
            ) / t + e * 2 * self.heads * qk_head / t * (cuda or (own_slices and not narrow))
            terms["rope"] = e * qk_head / training.micro_batch if self.prior.rope else 0.0
        if self.conditioner:
            terms["conditioner"] = self._conditioner_keeps(training)
            terms["scaling"] = 0.0 if cuda else e * 2 * packed
        if training.again:
            slices = 1 + self.temperature + self.gate
            whole = cuda or not own_slices  # otherwise the gate's logit and its softplus
            terms["packed"] = e * (packed if whole else 2 * value * self.gate)
            terms |= {"gates": 0.0, "out_proj": training.operand * value}
            terms["attention"] = (
                e * 2 * self.heads * qk_head / t + (e * slices + 2 * narrow * self.gate) * value
            )
            return terms
        # GPU kernels keep the packed product, each slice that is read, and the attention's output.
        if self.free_energy and cuda:
            terms["prep"] = e * value
        elif self.free_energy:
            terms["prep"] = WIDE * 2 * value
            terms["epilogue"] = WIDE * (4 + self.gate) * value
        elif self.gate and narrow:
            terms["epilogue"] = WIDE * value
        return terms

    def _kept_of_a_prior(self, training: Training) -> dict[str, float]:
        e, t = training.element, training.tensor_parallel
        return {
            "projection": self._projection_keeps(training),
            "rope": WIDE * self.rotary_size() / training.micro_batch,
            "packed": e * self.heads * self.head_width / t,
            "attention": self.heads * self.prior.read_bytes(training, self) / t,
            "out_proj": e * self.value_size / t,
            "conditioner": self._conditioner_keeps(training) if self.conditioner else 0.0,
        }

    def _projection_keeps(self, training: Training) -> float:
        """Return the bytes kept of the projection's input.

        With fp8, a conditioner additionally keeps the full input.
        """
        return self.hidden * (
            training.entered + (training.element if self.conditioner and training.fp8 else 0)
        )

    def _conditioner_keeps(self, training: Training) -> float:
        own = WIDE * (5 / training.tensor_parallel + 4) * self.conditioner
        # The backward pass recomputes its norm and product (see `Parallel`).
        again = training.sequence_split > 1 and not training.fp8
        return training.element * ((0 if again else self.hidden) + self.conditioner) + own

    def summary(self) -> str:
        keys = self.prior.slices().get("k")
        return (f"d_k {keys}, " if keys else "") + f"d_v {self.value_head}"

    def split_widths(self) -> dict[str, int]:
        return {"model.num_attention_heads": self.heads} | self._conditioner_width()

    @property
    def passes(self) -> bool:
        """True if the read can pass states between ranks.

        This requires a causal scan whose configuration does not force the exact form of the read.
        """
        return isinstance(self.prior, ScanShape) and self.causal and self.backend != "reference"

    def uncapturable(self) -> str | None:
        """Return the reason why CUDA graphs cannot capture the read, or None.

        A number on the device may determine the read's form, fast or exact
        (`kernels.free_energy.ranges`).
        """
        if not self.free_energy:
            return None
        if isinstance(self.prior, ScanShape):
            return (
                "the host selects the form of its read in each call, from the range of its "
                "values, unless model.fem.free_energy=false"
            )
        if isinstance(self.prior, SoftmaxShape) and self.backend == "fused":
            return "its read waits for its values' range, unless model.attention_backend=auto"
        return None

    def cut_widths(self) -> SplitWidths:
        heads, scanned = {"model.num_attention_heads": self.heads}, self._conditioner_width()
        if isinstance(self.prior, SoftmaxShape):
            return SplitWidths(keyed=heads, scanned=scanned, rings=self.backend != "reference")
        if self.passes:
            return SplitWidths(scanned=heads | scanned)
        return SplitWidths(always=heads, scanned=scanned)

    def exchanged_bytes(self, training: Training, kinds: SplitKinds) -> Crossing:
        """Return the bytes that ranks sharing a sequence send, for the read and the conditioners.

        Depending on ``kinds``, the read gathers or passes keys and values, passes a scan's state
        and the values' range, or exchanges all its inputs and outputs.
        """
        e = training.element
        tensor = training.tensor_parallel
        channels = sum(self.conditioners().values())
        states = channels * 2 * training.wide if kinds.states else 0.0
        exchanged = 0.0 if kinds.states else channels * (2 * e + training.wide)
        keys = span = ring = 0.0
        if kinds.ring:
            ring = (
                self.heads
                * 2
                * max(self.prior.slices()["k"], self.value_head * (1 + self.free_energy))
            )
            span = self.heads * e * 2 * self.value_head * self.free_energy
        elif kinds.gathers:
            keys = self.heads * e * (self.prior.slices()["k"] + self.value_head)
        elif kinds.states and self.passes and isinstance(self.prior, ScanShape):
            states += (
                self.heads
                * training.wide
                * self.prior.state_size(self.value_head * (1 + self.free_energy))
            )
            span = self.heads * e * 2 * self.value_head * self.free_energy
        else:
            values = e * self.value_head * (2 + self.temperature + self.gate)
            exchanged += self.heads * (
                self.prior.exchanged_bytes(training, gate=self.gate) + values
            )
        return Crossing(
            exchanged / tensor,
            keys=keys / tensor,
            states=states / tensor,
            span=span / tensor,
            ring=ring / tensor,
        )

    def _conditioner_width(self) -> dict[str, int]:
        return (
            {"the conditioner's width, model.fem.conditioner_size": self.conditioner}
            if self.conditioners()
            else {}
        )

    def reads(self) -> set[str]:
        own = {
            f"fem.{name}"
            for name in (
                "conditioner",
                "free_energy",
                "temperature",
                "gate",
                "budget",
                "value_size",
            )
        }
        return (
            own
            | self.prior.reads()
            | {"attention_backend"}
            | ({"fem.conditioner_size"} if self.conditioner else set())
        )

    def rotary_size(self) -> int:
        return self.prior.rotary_size()
