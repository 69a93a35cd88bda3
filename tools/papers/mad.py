"""FEM, table 1: the six tasks of MAD (Poli et al. 2024, arXiv 2403.17844), which test the
capabilities of a mixer.

The generators are our own, from the paper's description and the settings of its published
benchmark.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from statistics import fmean
from typing import Any

import torch
from torch import Generator, Tensor, nn

from tools.papers.experiment import Claim, Experiment, Size, published
from tools.papers.network import Network, classifier, fem, model_of, sinusoids
from tools.papers.parts import Hyena
from tools.papers.training import IGNORED, Examples, Problem, classification

MOTIF, NOISE_KINDS = 3, 16


@dataclass(frozen=True)
class Task:
    """Settings of a case: one of the six tasks, or a harder variant of it.

    vocabulary, length: of the sequences, in tokens. examples: for training, None: the size's.
    noise: share of noisy pairs, whose tokens are NOISE_KINDS of the vocabulary. copied: tokens to
    copy.
    """

    name: str
    vocabulary: int
    length: int = 128
    examples: int | None = None
    noise: float = 0.0
    copied: int = 0


FEWER, LONGER = (6400, 3200, 1600, 800), (256, 512, 1024)
BASIC = {
    "compression": Task("compression", 16, 32),
    "fuzzy recall": Task("fuzzy recall", 16),
    "in-context recall": Task("in-context recall", 16),
    "memorization": Task("memorization", 256, 32, 256),
    "noisy recall": Task("noisy recall", 32, noise=0.2),
    "selective copying": Task("selective copying", 16, 256, copied=16),
}
HARDER: dict[str, dict[str, tuple[Any, ...]]] = {
    "compression": {"vocabulary": (32, 64, 128), "length": (64, 128, 256), "examples": FEWER},
    "fuzzy recall": {"vocabulary": (32, 64, 128), "length": LONGER, "examples": FEWER},
    "in-context recall": {"vocabulary": (32, 64, 128), "length": LONGER, "examples": FEWER},
    "memorization": {"vocabulary": (512, 1024, 2048, 4096, 8192)},
    "noisy recall": {
        "vocabulary": (48, 80, 144),
        "length": LONGER,
        "examples": FEWER,
        "noise": (0.4, 0.6, 0.8),
    },
    "selective copying": {
        "vocabulary": (32, 64, 128),
        "length": (512, 1024),
        "examples": FEWER,
        "copied": (32, 64, 96),
    },
}
"""Task -> setting -> the benchmark's harder values, of which a variant changes one."""


def _variant(task: Task, setting: str, value: Any) -> tuple[str, Task]:
    """Return the name of a harder case, and its settings."""
    change = f"{value} {setting}" if setting in ("examples", "copied") else f"{setting} {value}"
    return f"{task.name} of {change}", replace(task, **{setting: value})


VARIANTS = {
    name: dict(
        _variant(task, setting, value)
        for setting, values in HARDER[name].items()
        for value in values
    )
    for name, task in BASIC.items()
}
TASKS = BASIC | {name: task for cases in VARIANTS.values() for name, task in cases.items()}
CASES = tuple(TASKS)
MEANS = {f"{name}, mean": (name, *VARIANTS[name]) for name in BASIC}
"""Mean over a task and its variants, which is the benchmark's score, -> their cases."""
FEW = "compression of 800 examples"
HALVED = ("fuzzy recall", "in-context recall", "noisy recall", "selective copying")
"""Tasks whose sequences are halved once more in the quick form, because they dominate its cost."""
ENOUGH = 0.999
"""Validation accuracy at which a trial stops; also the highest value in the paper's table."""


def length_of(case: str, size: Size) -> int:
    """Return the number of tokens per sequence of a case.

    At full size it is the benchmark's length. Smaller sizes shorten it in proportion, and tasks in
    HALVED by a further factor of 2.
    """
    task = TASKS[case]
    full = task.length * size.length // 128
    return full // 2 if size.length < 128 and task.name in HALVED else full


def examples(
    case: str, count: int, length: int, generator: Generator, *, training: bool
) -> Examples:
    """Return ``count`` sequences of a case, [count, length] each; a target is IGNORED where no
    answer is required.
    """
    task = TASKS[case]
    kinds = task.vocabulary
    if task.name == "compression":
        return compression(count, length, generator, kinds)
    if task.name == "memorization":
        return memorization(count, length, generator, kinds)
    if task.name == "selective copying":
        copied = task.copied * length // task.length
        return selective_copying(count, length, generator, kinds, copied)
    if task.name == "fuzzy recall":
        return fuzzy_recall(count, length, generator, kinds, training=training)
    kinds -= NOISE_KINDS if task.noise else 0
    return recall(count, length, generator, kinds, training=training, noise=task.noise)


def earlier(keys: Tensor, counted: Tensor | None = None) -> Tensor:
    """Return the index of the first equal key of each key in its row, which may be its own.

    keys: int64 [count, n]. counted: bool [count, n], False: the key is equal to none but itself.
    """
    parts = []
    step = max(1, 2**26 // keys.shape[1] ** 2)  # rows at a time, for less memory
    for start in range(0, len(keys), step):
        part = keys[start : start + step]
        same = part[:, :, None] == part[:, None, :]
        if counted is not None:
            here = counted[start : start + step]
            same &= here[:, None, :] & here[:, :, None]
            same |= torch.eye(part.shape[1], dtype=torch.bool)
        parts.append(same.to(torch.uint8).argmax(-1))
    return torch.cat(parts)


def recall(
    count: int, length: int, generator: Generator, vocabulary: int, *, training: bool, noise: float
) -> Examples:
    """Return sequences of key-value pairs, half of the vocabulary are keys, and their targets.

    The last key occurred before. Targets are the values of keys that occurred before; in training
    every next token is a target. ``noise`` is the share of the pairs that are replaced by two
    tokens of a further NOISE_KINDS.
    """
    pairs, kinds = length // 2, vocabulary // 2
    values = torch.randint(kinds, 2 * kinds, (count, kinds), generator=generator)
    keys = torch.randint(kinds, (count, pairs), generator=generator)
    noisy = torch.rand(count, pairs, generator=generator) < noise
    noisy[:, -1] = False
    noisy[torch.arange(count), torch.randint(pairs - 1, (count,), generator=generator)] = False
    probe = torch.multinomial((~noisy[:, :-1]).double(), 1, generator=generator)
    keys[:, -1:] = keys.gather(1, probe)
    seen = earlier(keys, ~noisy) < torch.arange(pairs)
    both = torch.stack((keys, values.gather(1, keys)), -1)
    other = torch.randint(2 * kinds, 2 * kinds + NOISE_KINDS, both.shape, generator=generator)
    tokens = torch.where(noisy[..., None], other, both).flatten(1)
    requested = torch.stack((torch.zeros_like(seen), seen), -1).flatten(1)
    targets = tokens if training else tokens.masked_fill(~requested, IGNORED)
    return tokens[:, :-1], targets[:, 1:]


def fuzzy_recall(
    count: int, length: int, generator: Generator, vocabulary: int, *, training: bool
) -> Examples:
    """Return sequences as `recall` does, but keys and values consist of one to three tokens.

    The tokens of a key are different ones of vocabulary / 2 - 1 tokens, those of a value of
    vocabulary / 2. In test data keys always have three tokens.
    """
    half = vocabulary // 2 - 1
    keys, values = _motifs_of(range(half)), _motifs_of(range(half, vocabulary - 1))
    key_table, value_table = _table(keys), _table(values)
    pairs = length // 2
    drawn = _motifs(keys, (count, pairs), generator, 1 if training else MOTIF)
    first = earlier(drawn)
    meant = _motifs(values, (count, pairs), generator, 1).gather(1, first)
    # [count, pairs, 6]; -1 fills shorter motifs.
    both = torch.cat((key_table[drawn], value_table[meant]), -1)
    sizes = (both >= 0).sum(-1)
    probe = torch.randint(pairs, (count, 1), generator=generator)
    # ``kept``: the pairs that fit into the length together with the probe. The probe must be one of
    # them, else it is drawn again.
    total = sizes.cumsum(1)
    for _ in range(64):
        kept = (total + sizes.gather(1, probe) <= length + 1).sum(1, keepdim=True)
        outside = probe >= kept
        probe = torch.where(
            outside,
            (
                torch.rand(count, 1, generator=generator, dtype=torch.float64) * kept.clamp_min(1)
            ).long(),
            probe,
        )
        if not outside.any():
            break
    kept = (total + sizes.gather(1, probe) <= length + 1).sum(1, keepdim=True)
    here = torch.arange(pairs) < kept
    seen = torch.cat((first < torch.arange(pairs), torch.ones(count, 1, dtype=torch.bool)), 1)
    last = both.gather(1, probe[..., None].expand(-1, -1, 2 * MOTIF))
    tokens = torch.cat((both.masked_fill(~here[..., None], -1), last), 1)
    is_value = (torch.arange(2 * MOTIF) >= MOTIF).expand_as(tokens)
    requested = (is_value & seen[..., None]).flatten(1)
    tokens = tokens.flatten(1)
    # Move the tokens to the right end in their order. The rest is padding, the last entry of the
    # vocabulary.
    order = (tokens >= 0).sort(dim=1, stable=True)[1][:, -(length + 1) :]
    tokens, requested = tokens.gather(1, order), requested.gather(1, order)
    full = tokens.masked_fill(tokens < 0, vocabulary - 1)
    if training:
        return full[:, :-1], full[:, 1:]
    return full[:, :-1], full.masked_fill(~requested | (tokens < 0), IGNORED)[:, 1:]


def _motifs_of(tokens: range) -> list[tuple[int, ...]]:
    return [motif for size in range(1, MOTIF + 1) for motif in permutations(tokens, size)]


def _table(motifs: list[tuple[int, ...]]) -> Tensor:
    return torch.tensor([(*motif, *[-1] * (MOTIF - len(motif))) for motif in motifs])


def _motifs(
    motifs: list[tuple[int, ...]], shape: tuple[int, int], generator: Generator, least: int
) -> Tensor:
    """Return the numbers of motifs: the length is drawn uniformly first, then a motif of that
    length.
    """
    counts = torch.tensor(
        [sum(len(motif) == size for motif in motifs) for size in range(1, MOTIF + 1)]
    )
    size = torch.randint(least, MOTIF + 1, shape, generator=generator) - 1
    inside = (torch.rand(shape, generator=generator, dtype=torch.float64) * counts[size]).long()
    return (counts.cumsum(0) - counts)[size] + inside


def memorization(count: int, length: int, generator: Generator, vocabulary: int) -> Examples:
    """Return keys, each followed by a query for its value; vocabulary / 2 - 1 pairs, equal in all
    data: the test measures what was memorized.
    """
    pairs = vocabulary // 2 - 1
    values = pairs + torch.randperm(pairs, generator=torch.Generator().manual_seed(12345))
    keys = torch.randint(pairs, (count, length // 2), generator=generator)
    asks = torch.full_like(keys, vocabulary - 1)
    ignored = torch.full_like(keys, IGNORED)
    inputs = torch.stack((keys, asks), -1).flatten(1)
    targets = torch.stack((ignored, values[keys]), -1).flatten(1)
    return inputs, targets


def compression(count: int, length: int, generator: Generator, vocabulary: int) -> Examples:
    """Return random tokens and one last token, from whose state all tokens, including itself, must
    be decoded.
    """
    tokens = torch.randint(vocabulary - 1, (count, length), generator=generator)
    tokens[:, -1] = vocabulary - 1
    return tokens, tokens


def selective_copying(
    count: int, length: int, generator: Generator, vocabulary: int, copied: int
) -> Examples:
    """Return ``copied`` tokens among blanks, then the copy sign, then as many blanks, at which the
    tokens are the targets in order.
    """
    body, blank = length - copied - 1, vocabulary - 2
    places = torch.rand(count, body, generator=generator).topk(copied)[1].sort()[0]
    chosen = torch.randint(blank, (count, copied), generator=generator)
    inputs = torch.full((count, length), blank).scatter(1, places, chosen)
    inputs[:, body] = blank + 1
    targets = torch.full((count, length), IGNORED)
    targets[:, body + 1 :] = chosen
    return inputs, targets


class Decompression(nn.Module):
    """Decoder of every token from the last state: adds the sinusoids of its position, then two
    layers of GELU and the output layer.
    """

    positions: Tensor

    def __init__(self, width: int, length: int, classes: int) -> None:
        super().__init__()
        self.register_buffer("positions", sinusoids(length, width), persistent=False)
        layers: list[nn.Module] = []
        for _ in range(2):
            layers += [nn.RMSNorm(width), nn.Linear(width, width), nn.GELU()]
        self.decoder = nn.Sequential(*layers, classifier(width, classes))

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, s, D] to [b, s, classes]."""
        out: Tensor = self.decoder(x[:, -1:] + self.positions)
        return out


def problem(case: str, row: str, size: Size, seed: int) -> Problem:
    """Return the problem: two blocks between an embedding and an output layer, or for compression
    the decoder.
    """
    given, length = TASKS[case], length_of(case, size)
    entries = given.vocabulary
    counts = [given.examples or size.train, size.test, size.test]
    if given.name == "memorization":
        counts = counts[:1] * 3
    made = []
    for part, count in enumerate(counts):
        generator = torch.Generator().manual_seed(1000 * seed + part)
        made.append(examples(case, count, length, generator, training=part == 0))
    torch.manual_seed(seed)
    if given.name == "compression":
        head: nn.Module = Decompression(size.width, length, entries)
    else:
        head = classifier(size.width, entries)
    parts = {"mixer": partial(Hyena, length=length)} if row == "Hyena" else None
    network = Network(model_of(size, ROWS[row]), nn.Embedding(entries, size.width), head, parts)
    return replace(classification(network, *made), enough=ENOUGH)


ROWS: dict[str, dict[str, Any]] = {
    "softmax": fem("softmax", ""),
    "softmax +C": fem("softmax", "C"),
    "softmax +CL": fem("softmax", "CL"),
    "softmax +CLT": fem("softmax", "CLT"),
    "FEM-SM": fem("softmax", "CLTG"),
    "softmax +L": fem("softmax", "L"),
    "softmax +LT": fem("softmax", "LT"),
    "softmax +LTG": fem("softmax", "LTG"),
    "softmax +G": fem("softmax", "G"),
    "GLA": fem("gla", ""),
    "GLA +C": fem("gla", "C"),
    "GLA +CL": fem("gla", "CL"),
    "GLA +CLT": fem("gla", "CLT"),
    "FEM-GLA": fem("gla", "CLTG"),
    "Mamba": fem("mamba", ""),
    "FEM-Mamba": fem("mamba", "CLTG"),
    "FEM-Mamba, unnormalised": {
        "mixer": "fem_mamba",
        "fem": {"mamba_normalise": False},
    },
    "AFT": fem("aft", ""),
    "FEM-AFT": fem("aft", "CLTG"),
    "Differential": {"mixer": "differential"},
    "DeltaNet": {"mixer": "deltanet"},
    "Gated DeltaNet": {"mixer": "gated_deltanet"},
    "Mamba-2": {"mixer": "mamba2"},
    "linear attention": fem("linear", ""),
    "Hyena": {"mixer": "transformer"},  # whose mixer is replaced
}
PUBLISHED = published("mad")
QUICK = Size(
    ("compression", FEW, "in-context recall", "memorization", "noisy recall"),
    ("softmax", "softmax +L", "FEM-SM", "GLA", "FEM-GLA"),
    steps=1500,
    batch=32,
    rates=(1e-2, 2e-2),
    train=12800,
    test=512,
    width=64,
    heads=8,
    layers=2,
    length=64,
    init_std=0.1,
)
FULL = Size(
    CASES,
    tuple(ROWS),
    steps=0,
    epochs=200,
    batch=128,
    rates=(1e-4, 5e-4, 1e-3),
    train=12800,
    test=1280,
    width=128,
    heads=16,
    layers=2,
    length=128,
    init_std=0.05,
    weight_decay=0.1,
    warmup=0.0,
    floor=1e-6,
)


def guessing(case: str, size: Size) -> float:
    """Return the expected accuracy of answers chosen at random from the possible tokens."""
    if case in MEANS:
        return fmean(guessing(part, size) for part in MEANS[case])
    length, task = length_of(case, size), TASKS[case]
    if task.name == "compression":
        return (1 + (length - 1) / (task.vocabulary - 1)) / length
    if task.name == "selective copying":
        return 1 / (task.vocabulary - 2)
    if task.name == "memorization":
        return 1 / (task.vocabulary // 2 - 1)
    return 2 / (task.vocabulary - (NOISE_KINDS if task.noise else 0))


EXPERIMENT = Experiment(
    name="mad",
    metric="accuracy",
    rows=ROWS,
    sizes={"quick": QUICK, "full": FULL},
    problem=problem,
    scale=100.0,
    published=PUBLISHED
    | {(FEW, row): number for (case, row), number in PUBLISHED.items() if case == "compression"}
    | {(f"{case}, mean", row): number for (case, row), number in PUBLISHED.items()},
    means=MEANS,
    claims=(
        Claim("softmax +L", "softmax"),
        Claim("softmax +C", "softmax"),
        Claim("softmax +CL", "softmax +C"),
        Claim("FEM-SM", "softmax"),
        Claim("FEM-GLA", "GLA"),
    ),
    chance=guessing,
    enough=ENOUGH,
)
