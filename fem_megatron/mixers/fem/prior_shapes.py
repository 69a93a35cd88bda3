"""Interface of the shapes of the Free Energy Mixer's priors, and the shape of every prior.

The module does not import torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fem_megatron.mup import score_scale
from fem_megatron.shape import KEPT, WIDE, Kept, Training, Weight, Weights, keys_seen, qk_norms

if TYPE_CHECKING:
    from fem_megatron.config import ModelConfig
    from fem_megatron.mixers.fem.shape import FemConfig, FemShape


class PriorShape(ABC):
    """Sizes of a prior p_t(i), the weight that token t gives to token i.

    A shape lists the slices of the packed projection that a head reads, and the costs of the read.

    layer_class: "module:class" of the ``Prior`` that computes it.
    kept, product_scores: as in ``Shape``; kept applies to a CPU.
    compares: True if its q and k correspond to attention's queries and keys.
    """

    layer_class: ClassVar[str]
    kept: ClassVar[Kept] = KEPT
    product_scores: ClassVar[bool] = False
    qk_norm: bool = False
    compares: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def of(cls, model: ModelConfig, qk_head: int, value_head: int) -> PriorShape:
        """Return the shape for the given numbers of channels per head.

        qk_head: channels of q and of k. value_head: channels of v. A prior may ignore both.
        """

    @classmethod
    def narrow(cls, fem: FemConfig) -> int | None:
        """Return the number of projections that share the parameter budget, or None.

        None means that q and k may be wider than v. The projections of T (lambda) and G (the gate)
        are not counted.
        """
        return None

    @abstractmethod
    def slices(self) -> dict[str, int]:
        """Return name -> channels of a head in the packed projection, in order.

        v, lambda and g are not included.
        """

    @abstractmethod
    def flops(self, length: int, streams: int, *, whole_square: bool) -> float:
        """Return the FLOPs of the read's matrix products for one token and head.

        streams: number of value channels that are read (v, and U for the free energy).
        """

    @abstractmethod
    def state_bytes(self, length: int, element: int, *, value: int, free_energy: bool) -> int:
        """Return the bytes of one head's decoding state after ``length`` tokens.

        value: channels of v. free_energy: True to include the free-energy stream.
        """

    @abstractmethod
    def exchanged_bytes(self, training: Training, *, gate: bool) -> float:
        """Return the bytes per token and head that ranks exchange besides values and gates.

        gate: True if the mixer has a gate.
        """

    def read_bytes(self, training: Training, fem: FemShape) -> float:
        """Return the bytes per token and head that autograd keeps of the read on a GPU.

        The count starts at the slices of the packed projection.
        """
        raise NotImplementedError

    def weights(self, heads: int) -> Weights:
        """Return name -> weight of the parameters that are not in the packed projection."""
        return {}

    def reads(self) -> set[str]:
        """Return the model keys that only this prior reads."""
        return set()

    def rotary_size(self) -> int:
        """Return the channels of q and k that RoPE rotates."""
        return 0


@dataclass(frozen=True)
class SoftmaxShape(PriorShape):
    """Shape of the softmax prior: p_t(i) ~ exp(q_t k_i / sqrt(d_k)), with RoPE if ``rope``.

    A given ``scale`` replaces 1 / sqrt(d_k).
    """

    layer_class = "fem_megatron.mixers.fem.priors:SoftmaxPrior"
    product_scores = True
    compares = True

    qk_head: int
    rope: bool
    scale: float | None = None
    qk_norm: bool = False

    @classmethod
    def of(cls, model: ModelConfig, qk_head: int, value_head: int) -> SoftmaxShape:
        return cls(qk_head, model.rope, score_scale(model, qk_head), model.qk_norm)

    def reads(self) -> set[str]:
        return {"qk_norm"}

    def weights(self, heads: int) -> Weights:
        """Return the norms of q and k (qk_norm)."""
        return qk_norms(self.qk_head, self.qk_norm)

    def slices(self) -> dict[str, int]:
        return {"q": self.qk_head, "k": self.qk_head}

    def flops(self, length: int, streams: int, *, whole_square: bool) -> float:
        return 2.0 * keys_seen(length, whole_square) * (self.qk_head + streams)

    def state_bytes(self, length: int, element: int, *, value: int, free_energy: bool) -> int:
        return length * (self.qk_head + value) * element

    def exchanged_bytes(self, training: Training, *, gate: bool) -> float:
        return 2 * training.element * self.qk_head

    def rotary_size(self) -> int:
        return self.qk_head if self.rope else 0


CHUNK, CHUNK_PER_CHANNEL = 64, 16
"""Chunk lengths of `kernels.linear_attention`: for at most one decay per head, and per channel."""


@dataclass(frozen=True)
class ScanShape(PriorShape):
    """Shape of priors computed by a scan: p_t(i) ~ q_t . k_i with decay.

    features: channels of q and k. decays: log-decays per head; 0 means no decay.
    """

    features: int
    decays: int
    causal: bool

    def flops(self, length: int, streams: int, *, whole_square: bool) -> float:
        """Return the FLOPs of the scan, including the channel of ones for the normaliser.

        A causal scan computes pairs of tokens within chunks, and updates and reads a state at chunk
        ends.
        """
        if not self.causal and not self.decays:
            return 4.0 * self.features * (streams + 1)
        if self.causal:
            return self._scan(length, streams, 1, whole_square)
        return 2 * (
            self._scan(length, streams, 0, whole_square) + self._scan(length, 1, 0, whole_square)
        )

    def _scan(self, length: int, streams: int, ones: int, whole_square: bool) -> float:
        per_channel = self.decays > 1
        chunk = min(length, CHUNK_PER_CHANNEL if per_channel else CHUNK)
        filled_up = -(-length // chunk) * chunk / length
        inside = (
            2.0 * keys_seen(chunk, whole_square) * (streams + (0 if per_channel else self.features))
        )
        return filled_up * (inside + 4.0 * self.features * (streams + ones))

    def state_bytes(self, length: int, element: int, *, value: int, free_energy: bool) -> int:
        """Return the bytes of one head's decoding state, which do not depend on the length.

        The state consists of the sums over v, U (with a free energy) and ones, and the values'
        range.
        """
        streams = value * (2 if free_energy else 1)
        return (self.features * (streams + 1) + (2 * value if free_energy else 0)) * max(4, element)

    def read_bytes(self, training: Training, fem: FemShape) -> float:
        """Return the bytes per token and head that the read keeps on a GPU.

        These are q and k before relu, the decays, v and its streams, the output, and the gates.
        """
        e, value = training.element, fem.value_head
        features = e * sum(self.slices().get(name, 0) for name in "qk") + 3 * WIDE * self.decays
        if training.again:
            return features + e * value * (1 + fem.temperature + fem.gate)
        if fem.free_energy:
            return features + WIDE + value * e * (5 + fem.temperature + fem.gate)
        return features + WIDE + value * (2 * e + WIDE * fem.gate)

    def state_size(self, streams: int) -> int:
        """Return the count of numbers in the state for ``streams`` value channels.

        It includes the channel of ones for the normaliser, and the decay.
        """
        return self.features * (streams + 1 + bool(self.decays))

    def exchanged_bytes(self, training: Training, *, gate: bool) -> float:
        """Return the bytes per token and head of q, k and the log-decays (fp32 or wider)."""
        return 2 * training.product * self.features + training.wide * self.decays


@dataclass(frozen=True)
class LinearShape(ScanShape):
    """Shape of the linear prior: p_t(i) ~ phi(q_t) . phi(k_i), phi(x) = relu(x) + eps.

    q and k are rotated first if ``rope``. With ``decays`` it is gated linear attention.
    """

    layer_class = "fem_megatron.mixers.fem.priors:LinearPrior"
    compares = True

    rope: bool
    eps: float

    @classmethod
    def of(cls, model: ModelConfig, qk_head: int, value_head: int) -> LinearShape:
        return cls(
            qk_head,
            cls.decays_of(model.fem, qk_head),
            model.causal,
            model.rope,
            model.fem.feature_eps,
        )

    @classmethod
    def decays_of(cls, fem: FemConfig, qk_head: int) -> int:
        """Return 0, the number of log-decays per head."""
        return 0

    def slices(self) -> dict[str, int]:
        return {"q": self.features, "k": self.features} | (
            {"decay": self.decays} if self.decays else {}
        )

    def reads(self) -> set[str]:
        return {"fem.feature_eps"} | ({"fem.gla_decay"} if self.decays else set())

    def rotary_size(self) -> int:
        return self.features if self.rope else 0


@dataclass(frozen=True)
class GlaShape(LinearShape):
    """Shape of gated linear attention's prior, with log-decays -(relu(a) + eps).

    A head has one log-decay, or one for each channel of q and k, which adds D^2 parameters.
    """

    @classmethod
    def decays_of(cls, fem: FemConfig, qk_head: int) -> int:
        """Return the number of log-decays per head.

        It is 1, or the number of channels of q if fem.gla_decay is "channel".
        """
        return 1 if fem.gla_decay == "head" else qk_head


@dataclass(frozen=True)
class DecayShape(ScanShape):
    """Shape of the decay prior: p_t(i) ~ exp(-sum over (i, t] of softplus(a)).

    Each head has one decay, and no queries or keys.
    """

    layer_class = "fem_megatron.mixers.fem.priors:DecayPrior"

    @classmethod
    def of(cls, model: ModelConfig, qk_head: int, value_head: int) -> DecayShape:
        """Return the shape with one constant feature and one decay."""
        return cls(1, 1, model.causal)

    @classmethod
    def narrow(cls, fem: FemConfig) -> int | None:
        """Return 2: only v and o share the budget, because this prior has no q and k."""
        return 2

    def exchanged_bytes(self, training: Training, *, gate: bool) -> float:
        """Return the bytes per token and head of the decay, in fp32 or wider."""
        return training.wide

    def slices(self) -> dict[str, int]:
        return {"decay": 1}


@dataclass(frozen=True)
class AftShape(PriorShape):
    """Shape of AFT's prior: p_t(i) ~ exp(k_i), a distribution for each value channel.

    width: channels of a head's q and of its k.
    query: "after" gates the read, o = sigmoid(q) * read (the paper, AFT); "inside"
        multiplies both sums by a normalised softplus query before the log (the released
        code).
    own_logits: q and k are twice as wide as the values, and their second halves belong to F
        (the released code under budget (i)).
    """

    layer_class = "fem_megatron.mixers.fem.priors:AftPrior"
    kept = Kept(145.0, 121.0)

    width: int
    query: str
    own_logits: bool = False

    @classmethod
    def of(cls, model: ModelConfig, qk_head: int, value_head: int) -> AftShape:
        """Return the shape with q and k as wide as the values.

        They are twice as wide if the query is inside, the budget allows it, and F uses them.
        """
        query = model.fem.aft_query
        own = query == "inside" and model.fem.free_energy and qk_head == 2 * value_head
        return cls(2 * value_head if own else value_head, query, own)

    @classmethod
    def narrow(cls, fem: FemConfig) -> int | None:
        """Return 4 (q, k, v and o of equal width), or None if the query is inside."""
        return 4 if fem.aft_query == "after" else None

    def slices(self) -> dict[str, int]:
        """Return q and k, ``width`` channels each."""
        return {"q": self.width, "k": self.width}

    def reads(self) -> set[str]:
        return {"fem.aft_query"}

    def flops(self, length: int, streams: int, *, whole_square: bool) -> float:
        """Return 0: a scan has no matrix products."""
        return 0.0

    def state_bytes(self, length: int, element: int, *, value: int, free_energy: bool) -> int:
        """Return the bytes of one head's decoding state.

        A channel has a running maximum and sums, in fp32: 3 numbers, 4 more with a free energy F,
        and 3 more if F has separate logits.
        """
        return (3 + 4 * free_energy + 3 * self.own_logits) * value * max(4, element)

    def read_bytes(self, training: Training, fem: FemShape) -> float:
        """Return the bytes per token and head that the read keeps on a GPU.

        These are all slices of the projection, the output and each block's sums. With query
        "after", the query's sigmoid and its product with the gate are added; with query "inside",
        its softplus in fp32.
        """
        e, value = training.element, fem.value_head
        query = WIDE * 3 * self.width if self.query == "inside" else e * value * (1 + fem.gate)
        return e * fem.head_width + query + e * value + (0.0 if training.again else 0.75 * value)

    def exchanged_bytes(self, training: Training, *, gate: bool) -> float:
        """Return the bytes per token and head of k and of the query.

        A query inside the sums is fp32. A query after the read acts as the gate, so it counts only
        if the mixer has no gate.
        """
        return self.width * (
            training.element
            + (training.wide if self.query == "inside" else training.element * (not gate))
        )


@dataclass(frozen=True)
class MambaShape(PriorShape):
    """Shape of a selective state space's prior: a distribution for each value channel.

    p_t(i) ~ sum_n C_t[n] exp(-rate[n] (delta_{i+1} + ... + delta_t)) delta_i B_i[n]. A head has a
    step delta for each of its ``value`` channels, and B and C of ``states`` numbers.

    normalise: divide by the sum over i (off: the paper's ablation).
    squash: apply a sigmoid to the values first.
    scans: number of scans: 1, or 2 if the mixer is bidirectional.
    """

    layer_class = "fem_megatron.mixers.fem.priors:MambaPrior"

    value: int
    states: int
    normalise: bool
    squash: bool
    scans: int = 1

    @classmethod
    def of(cls, model: ModelConfig, qk_head: int, value_head: int) -> MambaShape:
        """Return the shape for the given channels of q and k (qk_head) and of v (value_head).

        Without fem.mamba_states, the states fill the budget of q and k: d_v + 2 N = 2 d_k. Values
        pass a sigmoid if the mixer has a free energy.
        """
        fem = model.fem
        states = fem.mamba_states or max(1, (2 * qk_head - value_head) // 2)
        return cls(
            value_head,
            states,
            fem.mamba_normalise,
            squash=fem.free_energy,
            scans=1 if model.causal else 2,
        )

    def slices(self) -> dict[str, int]:
        """Return the slices: the step of each value channel, B and C."""
        return {"delta": self.value, "b": self.states, "c": self.states}

    def reads(self) -> set[str]:
        return {"fem.mamba_states", "fem.mamba_normalise"}

    def flops(self, length: int, streams: int, *, whole_square: bool) -> float:
        """Return the FLOPs of the products of C with the states of every stream.

        Normalisation doubles them.
        """
        return 2.0 * self.scans * self.states * streams * (1 + self.normalise)

    def state_bytes(self, length: int, element: int, *, value: int, free_energy: bool) -> int:
        """Return the bytes of one head's decoding state.

        It has ``states`` fp32 sums for each channel and stream. A free energy adds a stream and one
        number per channel. Normalisation doubles the total.
        """
        return (
            value
            * (1 + self.normalise)
            * (self.states * (1 + free_energy) + free_energy)
            * max(4, element)
        )

    def exchanged_bytes(self, training: Training, *, gate: bool) -> float:
        return training.wide * (self.value + 2 * self.states)

    def read_bytes(self, training: Training, fem: FemShape) -> float:
        """Return the bytes per token and head that the read keeps on a GPU.

        These are delta, B and C in fp32 before and after softplus, and the output. If values pass a
        sigmoid, these values and the gates are added; otherwise all slices of the projection.
        """
        e, value = training.element, fem.value_head
        slices = e * value * (1 + fem.temperature + fem.gate) if self.squash else e * fem.head_width
        return WIDE * 2 * (self.value + 2 * self.states) + slices + e * value

    def weights(self, heads: int) -> Weights:
        """Return delta_bias, head-major [heads * value], and rate, [heads * value * states].

        Both are offsets to constants and start at 0.
        """
        channels = heads * self.value
        return {
            "delta_bias": Weight((channels,), split=0, init=0.0),
            "rate": Weight((channels * self.states,), split=0, init=0.0),
        }
