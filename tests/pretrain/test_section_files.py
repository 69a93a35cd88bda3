"""A section as a file of its own, named by its path: a blend that ``data_prep`` wrote, in a run's file or on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from fem_common.errors import ConfigError
from pretrain.config import Source, load_run


def complaint(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run(path, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """An empty configs tree; returns its run folder."""
    for section in ("run", "model", "data"):
        (tmp_path / section).mkdir()
    return tmp_path / "run"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_section_may_be_a_file_named_by_its_path(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the working directory on the command line, from the file's folder in a file; absolute paths as they are."""
    blends = tmp_path / "blends"
    (blends / "deep").mkdir(parents=True)
    write(blends / "two.yaml", "train: [{prefix: a, weight: 3}, {prefix: b}]\nseq_length: 64\n")
    write(blends / "deep" / "short.yaml", "base: ../two.yaml\nseq_length: 32\n")
    write(runs.parent / "data" / "one.yaml", "base: ../blends/two.yaml\n")
    path = write(runs / "mine.yaml", "data: ../blends/deep/short.yaml\n")
    blend = (Source("a", 3.0), Source("b"))
    assert (load_run(path).data.train, load_run(path).data.seq_length) == (blend, 32)
    monkeypatch.chdir(blends)
    for given in ("two.yaml", "./two.yaml", "deep/../two.yaml", str(blends / "two.yaml"), "{base: two.yaml}", "one"):
        data = load_run(path, [f"data={given}", "data.valid.0.prefix=v"]).data
        assert (data.train, data.valid, data.seq_length) == (blend, (Source("v"),), 64), given
    # Every section alike; a whole section replaces the file's.
    write(blends / "wide.yaml", "hidden_size: 512\n")
    write(path, "model: {hidden_size: 64, num_layers: 3}\n")
    assert load_run(path, ["model=wide.yaml", "model.num_layers=5"]).model.hidden_size == 512
    monkeypatch.chdir(tmp_path)
    assert load_run(path, ["model={base: blends/wide.yaml, num_layers: 7}"]).model.num_layers == 7


def test_a_mistake_in_a_section_named_by_its_path(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = runs.parent / "data"
    path = write(runs / "mine.yaml", "data: ../data/blend.yml.yaml\n")
    blend = write(data / "blend.yaml", "tran: [{prefix: a}]\n")
    missing = f"{path}:1: data names the file '../data/blend.yml.yaml', but there is no file {data / 'blend.yml.yaml'}"
    assert complaint(path) == f"{missing}; did you mean {blend}?"
    monkeypatch.chdir(data)
    write(path, "{}\n")
    assert complaint(path, "data=./blend.yaml") == "blend.yaml:1: unknown key data.tran; did you mean data.train?"
    said = complaint(path, "data=./blend")
    assert said == "command line: data names the file './blend', but there is no file blend; did you mean blend.yaml?"
    write(data / "here.yaml", "{}\n").rename(runs / "here.yaml")
    monkeypatch.chdir(runs)
    assert complaint(path, "data=here").endswith(f"; did you mean here.yaml, the file in {runs}?")
    write(runs / "round.yaml", "base: ../run/again.yaml\n")
    write(runs / "again.yaml", "base: ./round.yaml\n")
    chain = " -> ".join(f"{runs}/{name}.yaml" for name in ("round", "again", "round"))
    assert complaint(path, "data=round.yaml") == f"../run/again.yaml:1: data.base = './round.yaml' goes round in a circle: {chain}"
