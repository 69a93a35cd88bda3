"""FEM, table 1: the six tasks of MAD (Poli et al. 2024, arXiv 2403.17844), which test the
capabilities of a mixer.

The generators are our own, from the paper's description and the settings of its published
benchmark.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import torch
from torch import Generator, Tensor, nn

from tools.papers.experiment import Claim, Experiment, Size, published
from tools.papers.network import Network, classifier, fem, model_of, sinusoids
from tools.papers.training import IGNORED, Examples, Problem, classification

MOTIF = 3
NOISE = 0.2
VOCABULARY = {
    "compression": 16,
    "fuzzy recall": 16,
    "in-context recall": 16,
    "memorization": 256,
    "noisy recall": 32,
    "selective copying": 16,
}
CASES = tuple(VOCABULARY)
FEW = "compression of 800 examples"
"""A harder case with 800 training examples; the benchmark's means include variants of this kind."""
LENGTHS = {"compression": 32, "memorization": 32, "selective copying": 256}
HALVED = ("fuzzy recall", "in-context recall", "noisy recall", "selective copying")
"""Tasks whose sequences are halved once more in the quick form, because they dominate its cost."""
ENOUGH = 0.999
"""Validation accuracy at which a trial stops; also the highest value in the paper's table."""


def length_of(case: str, size: Size) -> int:
    """Return the number of tokens per sequence of a case.

    At full size it is the benchmark's length, or 128 if the benchmark defines none. Smaller sizes
    shorten it in proportion, and tasks in HALVED by a further factor of 2.
    """
    full = LENGTHS.get(task_of(case), 128) * size.length // 128
    return full // 2 if size.length < 128 and task_of(case) in HALVED else full


def task_of(case: str) -> str:
    """Return the task of a case, without its difficulty."""
    return case.partition(" of ")[0]


def examples(
    case: str, count: int, length: int, generator: Generator, *, training: bool
) -> Examples:
    """Return ``count`` sequences of a task, [count, length] each; a target is IGNORED where no
    answer is required.
    """
    if case == "compression":
        return compression(count, length, generator)
    if case == "memorization":
        return memorization(count, length, generator)
    if case == "selective copying":
        return selective_copying(count, length, generator)
    if case == "fuzzy recall":
        return fuzzy_recall(count, length, generator, training=training)
    return recall(
        count, length, generator, training=training, noise=NOISE if case == "noisy recall" else 0.0
    )


def recall(
    count: int, length: int, generator: Generator, *, training: bool, noise: float
) -> Examples:
    """Return sequences of key-value pairs, with 8 kinds of keys and of values, and their targets.

    The last key occurred before. Targets are the values of keys that occurred before; in training
    every next token is a target. ``noise`` is the share of the pairs that are replaced by two
    tokens of a further 16.
    """
    pairs, kinds = length // 2, 8
    values = torch.randint(kinds, 2 * kinds, (count, kinds), generator=generator)
    keys = torch.randint(kinds, (count, pairs), generator=generator)
    noisy = torch.rand(count, pairs, generator=generator) < noise
    noisy[:, -1] = False
    noisy[torch.arange(count), torch.randint(pairs - 1, (count,), generator=generator)] = False
    probe = torch.multinomial((~noisy[:, :-1]).double(), 1, generator=generator)
    keys[:, -1:] = keys.gather(1, probe)
    same = (keys[:, :, None] == keys[:, None, :]) & ~noisy[:, None, :] & ~noisy[:, :, None]
    seen = same.tril(-1).any(-1)
    both = torch.stack((keys, values.gather(1, keys)), -1)
    other = torch.randint(2 * kinds, 4 * kinds, both.shape, generator=generator)
    tokens = torch.where(noisy[..., None], other, both).flatten(1)
    requested = torch.stack((torch.zeros_like(seen), seen), -1).flatten(1)
    targets = tokens if training else tokens.masked_fill(~requested, IGNORED)
    return tokens[:, :-1], targets[:, 1:]


def fuzzy_recall(count: int, length: int, generator: Generator, *, training: bool) -> Examples:
    """Return sequences as `recall` does, but keys and values consist of one to three tokens.

    The tokens of a key are different ones of 7 tokens, those of a value of 8. In test data keys
    always have three tokens.
    """
    keys = [motif for size in range(1, MOTIF + 1) for motif in permutations(range(7), size)]
    values = [motif for size in range(1, MOTIF + 1) for motif in permutations(range(7, 15), size)]
    key_table, value_table = _table(keys), _table(values)
    pairs = length // 2
    drawn = _motifs(keys, (count, pairs), generator, 1 if training else MOTIF)
    meant = _motifs(values, (count, len(keys)), generator, 1).gather(1, drawn)
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
    same = (drawn[:, :, None] == drawn[:, None, :]).tril(-1).any(-1)
    seen = torch.cat((same, torch.ones(count, 1, dtype=torch.bool)), 1)
    last = both.gather(1, probe[..., None].expand(-1, -1, 2 * MOTIF))
    tokens = torch.cat((both.masked_fill(~here[..., None], -1), last), 1)
    is_value = (torch.arange(2 * MOTIF) >= MOTIF).expand_as(tokens)
    requested = (is_value & seen[..., None]).flatten(1)
    tokens = tokens.flatten(1)
    # Move the tokens to the right end in their order. The rest is padding, the last entry of the
    # vocabulary.
    order = (tokens >= 0).sort(dim=1, stable=True)[1][:, -(length + 1) :]
    tokens, requested = tokens.gather(1, order), requested.gather(1, order)
    full = tokens.masked_fill(tokens < 0, VOCABULARY["fuzzy recall"] - 1)
    if training:
        return full[:, :-1], full[:, 1:]
    return full[:, :-1], full.masked_fill(~requested | (tokens < 0), IGNORED)[:, 1:]


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


def memorization(count: int, length: int, generator: Generator) -> Examples:
    """Return keys, each followed by a query for its value; 127 pairs, equal in all data: the test
    measures what was memorized.
    """
    pairs = VOCABULARY["memorization"] // 2 - 1
    values = pairs + torch.randperm(pairs, generator=torch.Generator().manual_seed(12345))
    keys = torch.randint(pairs, (count, length // 2), generator=generator)
    asks = torch.full_like(keys, VOCABULARY["memorization"] - 1)
    ignored = torch.full_like(keys, IGNORED)
    inputs = torch.stack((keys, asks), -1).flatten(1)
    targets = torch.stack((ignored, values[keys]), -1).flatten(1)
    return inputs, targets


def compression(count: int, length: int, generator: Generator) -> Examples:
    """Return random tokens and one last token, from whose state all tokens, including itself, must
    be decoded.
    """
    tokens = torch.randint(VOCABULARY["compression"] - 1, (count, length), generator=generator)
    tokens[:, -1] = VOCABULARY["compression"] - 1
    return tokens, tokens


def selective_copying(count: int, length: int, generator: Generator) -> Examples:
    """Return length / 16 tokens among blanks, then the copy sign, then as many blanks, at which the
    tokens are the targets in order.
    """
    copied = length // 16
    body, blank = length - copied - 1, VOCABULARY["selective copying"] - 2
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
    kind, length = task_of(case), length_of(case, size)
    entries = VOCABULARY[kind]
    counts = [800 if case == FEW else size.train, size.test, size.test]
    if kind == "memorization":
        counts = [256] * len(counts)
    made = []
    for part, count in enumerate(counts):
        generator = torch.Generator().manual_seed(1000 * seed + part)
        made.append(examples(kind, count, length, generator, training=part == 0))
    torch.manual_seed(seed)
    if kind == "compression":
        head: nn.Module = Decompression(size.width, length, entries)
    else:
        head = classifier(size.width, entries)
    task = classification(
        Network(model_of(size, ROWS[row]), nn.Embedding(entries, size.width), head), *made
    )
    return replace(task, enough=ENOUGH)


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
    "AFT": fem("aft", ""),
    "FEM-AFT": fem("aft", "CLTG"),
    "Differential": {"mixer": "differential"},
    "DeltaNet": {"mixer": "deltanet"},
    "Gated DeltaNet": {"mixer": "gated_deltanet"},
    "Mamba-2": {"mixer": "mamba2"},
    "linear attention": fem("linear", ""),
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
    steps=20_000,
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
)


def guessing(case: str, size: Size) -> float:
    """Return the expected accuracy of answers chosen at random from the possible tokens."""
    length = length_of(case, size)
    task = task_of(case)
    kinds = {"compression": 15, "memorization": 127, "selective copying": 14}.get(task, 8)
    return (1 + (length - 1) / kinds) / length if task == "compression" else 1 / kinds


EXPERIMENT = Experiment(
    name="mad",
    metric="accuracy",
    rows=ROWS,
    sizes={"quick": QUICK, "full": FULL},
    problem=problem,
    scale=100.0,
    published=PUBLISHED
    | {(FEW, row): number for (case, row), number in PUBLISHED.items() if case == "compression"},
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
