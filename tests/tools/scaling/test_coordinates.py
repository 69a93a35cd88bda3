"""Tests of the coordinate check: it measures the model's computation; muP passes and the standard
parametrization does not.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import pandas as pd
import pytest
import torch

from fem_megatron.catalogue import MIXERS
from pretrain.schedule import Schedule
from tests.wording import Wording
from tools.scaling.__main__ import main
from tools.scaling.verbs.coord_check import (
    LIMIT,
    Case,
    Record,
    Verdict,
    coordinates,
    judge,
    shown_sites,
    table,
    worst,
)

RUN = """
model: {num_layers: 2, hidden_size: 64, num_attention_heads: 2, init_std: 0.06, vocab_size: 256}
data: {seq_length: 64}
train: {steps: 1000, global_batch_size: 64, seed: 1}
optimizer: {lr: 3.0e-3, min_lr: 3.0e-4, warmup_steps: 100}
"""
STUDY = """
base: run.yaml
variants:
  narrow: [model.mixer=transformer]
  tied: [model.mixer=transformer, model.tie_embeddings=true]
shape: {head_size: 16, ffn_multiple: 16}
sizes: [{width: 32, layers: 1}, {width: 48, layers: 1}]
tokens: [1.0e5]
"""
MUP = ["model.parametrization=mup", "model.mup.base_hidden_size=64"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with an explicit vocabulary, so that it needs no data."""
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    return file


def power_law(scale: float, change: float, site: str = "layer_00/mixer") -> list[Record]:
    """Return records of two steps over three widths, growing with these exponents at the last."""
    records = []
    for width, seed, step in itertools.product((64, 128, 256), (1, 2), (0, 1)):
        sizes = 3.0 * width ** (scale * step), 0.1 * width**change * step
        records.append(Record("m", "mup", width, seed, step, site, *sizes))
    return records


def test_a_power_law_is_recognised_by_its_exponent_and_judged_by_its_ratio() -> None:
    scale, change = judge(power_law(0.25, -1.0))
    assert (scale.exponent, change.exponent, scale.ratio, change.ratio) == pytest.approx(
        (0.25, -1.0, 4**0.25, 4.0)
    )
    assert (scale.words, change.words) == ("flat", "shrinks as width^-1.00")
    assert worst([scale, change]) is change
    text = table([scale, change]).splitlines()
    assert text[0].split() == ["site", "64", "128", "256", "max/min", "exponent", "verdict"]
    assert text[2].split()[:2] == ["layer_00/mixer", "change"]
    scale, change = judge(power_law(-0.5, 0.0, site="logits"))
    assert scale.ratio == pytest.approx(2.0) and worst([scale, change]) is change
    # muP's logits shrink at the start, according to theory.
    assert not scale.judged and scale.words.startswith("(")
    for values, words in (
        ((1.0, 0.0), "does not move"),
        ((1.0, math.nan), "not finite"),
        ((math.inf, 1.0), "not finite"),
    ):
        fault = Verdict("residual", "change", (64, 128), values, judged=True)
        assert (fault.flat, fault.words, math.isnan(fault.exponent)) == (False, words, True)
    assert not Verdict("residual", "scale", (64, 128), (1.0, LIMIT + 1e-9), judged=True).flat


def test_the_sites_are_the_models_own_numbers(run: Path) -> None:
    """Residual stream = embedding + the output of every mixer and MLP, for a pre-norm model; the
    loss follows from the recorded logits.
    """
    from pretrain.engines.megatron import MegatronEngine
    from tools.scaling import activations

    config = Case("transformer", run, tuple(MUP)).config(128, 2)
    batch = activations.one_batch(activations.zipf_tokens(4 * 65, 256), 4, 64)
    with activations.one_process(config):
        engine = MegatronEngine(config, Schedule.of(config))
        sites = activations.Sites(engine.models[0], 256)
        loss = engine.evaluate(iter([batch]), 1)
        seen = dict(sites.now)
        assert all(change == 0 for _, change in sites.read().values())
        sites.remove()
        engine.close()
    layers = "layer_00/mixer layer_00/mlp layer_01/mixer layer_01/mlp"
    assert list(seen) == ["embedding", *layers.split(), "residual", "logits"]
    total = sum(value for site, value in seen.items() if site not in ("residual", "logits"))
    # fp32, sums in a different order.
    torch.testing.assert_close(total, seen["residual"], rtol=1e-5, atol=1e-5)
    assert seen["logits"].shape[-1] == 256
    rows = seen["logits"].transpose(0, 1) if seen["logits"].shape[0] == 64 else seen["logits"]
    wanted = torch.nn.functional.cross_entropy(rows.flatten(0, 1), batch["labels"].flatten())
    assert loss == pytest.approx(float(wanted), rel=1e-5)


def check(run: Path, out: Path, words: str = "") -> int:
    return main(f"coord-check {run} --random --steps 4 --out {out} {words}".split())


@pytest.mark.parametrize(
    "mixers",
    [("transformer", "fem_softmax"), pytest.param(("transformer", "cem"), marks=pytest.mark.slow)],
    ids=["attention", "cem"],
)
def test_mup_is_flat_and_the_standard_parametrization_is_not(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], mixers: tuple[str, ...]
) -> None:
    """Verdict of the commands; by theory standard updates grow at least with the width, 4 times in
    this test, muP's with power 0.
    """
    words = f"--mixer {','.join(mixers)} --compare --widths 64,128,256 --seeds 1 {MUP[1]}"
    assert check(run, tmp_path / "out", words) == 0
    report = capsys.readouterr().out
    for mixer in mixers:
        assert f"{mixer}, mup: flat within 2x" in report
        assert f"{mixer}, standard: NOT flat within 2x" in report
        assert (tmp_path / "out" / f"coordinates_{mixer}.png").read_bytes().startswith(b"\x89PNG")
    assert "drawn by Zipf's law from 256" in report
    title, _, *lines = (tmp_path / "out" / "coordinates.md").read_text().splitlines()
    assert title == "| variant | standard | mup |" and len(lines) == len(mixers)
    for mixer, line in zip(mixers, lines, strict=True):
        _, name, standard, mup, _ = line.split("|")
        assert name == f" `{mixer}` " and float(mup) < 2 < float(standard)
    frame = pd.read_csv(tmp_path / "out" / "coordinates.csv")
    records = [Record(*row) for row in frame.itertuples(index=False, name=None)]
    # Mixers x parametrizations x widths x (steps and the start) x sites.
    assert len(records) == len(mixers) * 2 * 3 * 5 * 7
    assert (frame[frame["step"] == 0]["change"] == 0).all()
    # Stricter than the verdict: a learning rate that is wrong by the root of the width changes the
    # exponent of some layer's change by 0.23 (FEM) to 0.40 in this test; the exponents of correct
    # ones scatter by 0.13 with one seed.
    for mixer in mixers:
        own = [one for one in records if (one.variant, one.parametrization) == (mixer, "mup")]
        layers = [verdict for verdict in judge(own) if verdict.site.startswith("layer")]
        assert all(abs(verdict.exponent) < 0.2 for verdict in layers)
    # At the base width, both parametrizations are the same model and optimizer.
    base = frame[frame["width"] == 64].groupby("parametrization")["scale"].apply(list)
    assert base["mup"] == base["standard"]


def test_a_case_that_is_not_flat_is_an_exit_code(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--widths 64,256 --seeds 1 model.mixer=transformer"
    assert check(run, tmp_path / "out", words) == 1
    assert "largest deviation: " in capsys.readouterr().out.splitlines()[-3]
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == [f"coordinates.{ending}" for ending in ("csv", "md", "png")]


# NRGPT's heads are as wide as the stream, and the check lets their number grow with the width: the
# sum of their steps grows (by 2.06 over a factor of 8).
FLAT = [name for name in MIXERS if not name.startswith("fla.") and name != "nrgpt"]


@pytest.mark.slow
@pytest.mark.parametrize("mixer", FLAT)
def test_every_mixer_is_flat_under_mup(run: Path, tmp_path: Path, mixer: str) -> None:
    """After 8 steps: at 4 much of the logits' change is still the stream's times the initial output
    weights, which shrinks with the width.

    Mamba-2's ratio is 2.2 after 4 steps, 1.7 after 8 and 1.2 after 16.
    """
    words = f"--mixer {mixer} --widths 64,128,256,512 --seeds 3 --steps 8 {' '.join(MUP)}"
    assert check(run, tmp_path / "out", words) == 0


MISTAKES = f"""
--widths 64
--widths 64,x
--widths 64,112
--steps 0
--seeds 0
--mixer fla.GatedLinearAttention
--mixer fem_sofmax
model.tie_embeddings=true {" ".join(MUP)}
"""


def test_a_mistake_is_one_line_and_nothing_is_written(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], wording: Wording
) -> None:
    for words in MISTAKES.strip().splitlines():
        assert main(f"coord-check {run} --out {tmp_path / 'out'} {words}".split()) == 2
        report = capsys.readouterr().err
        assert report.startswith("tools.scaling: error: ") and report.count("\n") == 1
        wording(report)
        assert not (tmp_path / "out").exists()


def test_another_width_keeps_heads_and_ratios(run: Path) -> None:
    words = (
        "model.ffn_hidden_size=256 model.mixer=transformer model.num_query_groups=1"
        " parallel.tensor_model_parallel_size=4"
    )
    config = Case("transformer", run, tuple(words.split())).config(256, 5)
    model, train, optimizer = config.model, config.train, config.optimizer
    assert (model.num_attention_heads, model.num_query_groups) == (8, 4)
    assert (model.ffn_hidden_size, model.num_layers) == (1024, 2)
    assert (train.steps, train.micro_batch_size, train.precision) == (5, 4, "fp32")
    assert (optimizer.warmup_steps, optimizer.schedule) == (0, "constant")
    assert config.parallel.tensor_model_parallel_size == 1


def test_a_studys_variants_and_widths_by_its_own_rule(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tmp_path / "study.yaml"
    study.write_text(STUDY)
    check(study, tmp_path / "out")
    assert "narrow, standard: 1 layers" in capsys.readouterr().out
    records = pd.read_csv(tmp_path / "out" / "coordinates.csv")
    rows = records.value_counts(["variant", "width", "seed"])
    assert set(rows.index) == set(itertools.product(("narrow", "tied"), (32, 48), (1, 2)))
    assert set(rows) == {5 * 5}  # steps x sites of one layer


def test_a_deep_models_picture_shows_three_of_its_blocks() -> None:
    records = [
        record for n in range(12) for record in power_law(0.1, 0.1, site=f"layer_{n:02}/mixer")
    ]
    assert shown_sites(records) == ["layer_00/mixer", "layer_06/mixer", "layer_11/mixer"]
    both = [*records, *(dataclasses.replace(one, parametrization="standard") for one in records)]
    for some, panels in ((records, 2), (both, 4)):
        figure = coordinates(some)
        figure.canvas.draw()
        # Independent of the depth, so that each panel is readable.
        assert len(figure.axes) == panels
        assert all(axes.get_window_extent().width > 3 * figure.dpi for axes in figure.axes)
