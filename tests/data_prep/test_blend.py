"""blend: what pretrain's own loader makes of the file that is written, and every refusal in one line."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from data_prep.__main__ import main
from tests.data_prep.conftest import ROOT, make_documents, write_parquet
from tests.data_prep.units_made import edit_json, encode_units, merge, plan_folder

SHORT = ("--seq-length", "64")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    """``a`` with all splits, ``b`` without test, ``c`` with train alone: 300, 100 and 60 documents."""
    root = tmp_path_factory.mktemp("blend")
    shares = {"a": ("10", "5"), "b": ("20", "0"), "c": ("0", "0")}
    for seed, (name, (valid, test)) in enumerate(shares.items()):
        file = write_parquet(root / f"{name}.parquet", make_documents((300, 100, 60)[seed], 40, seed))
        out = encode_units(plan_folder(root / name, [file], tokenizer, "--valid-percent", valid, "--test-percent", test))
        assert merge(out) == 0
    return root


def tokens(folder: Path, split: str = "train") -> int:
    return int(json.loads((folder / "manifest.json").read_text())["splits"][split]["tokens"])


def test_weights_are_shares_of_the_training_tokens_by_default(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deeper" / "blend.yaml"
    assert main(["blend", str(out), *(str(folders / name) for name in "abc"), *SHORT]) == 0
    section = yaml.safe_load(out.read_text())
    total = sum(tokens(folders / name) for name in "abc")
    assert section["seq_length"] == 64 and list(section) == ["train", "valid", "test", "seq_length"]
    assert [source["prefix"] for source in section["train"]] == [str(folders / name / "train") for name in "abc"]
    assert [source["weight"] for source in section["train"]] == pytest.approx([tokens(folders / name) / total for name in "abc"])
    assert [Path(source["prefix"]).parent.name for source in section["valid"]] == ["a", "b"]
    assert [Path(source["prefix"]).parent.name for source in section["test"]] == ["a"]
    assert all(os.path.isabs(source["prefix"]) for split in ("train", "valid", "test") for source in section[split])
    assert all(sum(source["weight"] for source in section[split]) == pytest.approx(1) for split in ("train", "valid", "test"))
    said = capsys.readouterr().out
    assert (
        said.count("read 1 times") == 3 and re.search("valid is without .*/c: ", said) and re.search("test is without .*/b, .*/c: ", said)
    )


def test_given_weights_are_normalised_and_what_they_mean_is_said(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "blend.yaml"
    assert main(["blend", str(out), f"{folders / 'a'}=1", f"{folders / 'b'}=3", *SHORT]) == 0
    section = yaml.safe_load(out.read_text())
    assert [source["weight"] for source in section["train"]] == [0.25, 0.75] == [source["weight"] for source in section["valid"]]
    of_a, of_b = tokens(folders / "a"), tokens(folders / "b")
    said = capsys.readouterr().out
    assert f"read {0.25 * (of_a + of_b) / of_a:.3g} times" in said and f"read {0.75 * (of_a + of_b) / of_b:.3g} times" in said
    assert f"{of_b / 0.75 / 1e3:.3g}k tokens can be drawn before any repeats ({folders / 'b'} is the first)" in said
    assert f"{of_a / 0.25 / 1e3:.3g}k until every one" in said


def test_pretrain_reads_it(folders: Path, tmp_path: Path) -> None:
    from pretrain.config import load_run
    from pretrain.data.facts import check_data

    out = tmp_path / "blend.yaml"
    assert main(["blend", str(out), f"{folders / 'a'}=0.2", f"{folders / 'b'}=0.8", *SHORT]) == 0
    run = sorted((ROOT / "configs" / "run").glob("*.yaml"))[0]
    config = load_run(run, [f"data={out}", "model.vocab_size=null"])
    assert [source.prefix for source in config.data.train] == [str(folders / name / "train") for name in "ab"]
    assert [source.weight for source in config.data.train] == [0.2, 0.8] and config.data.seq_length == 64
    assert check_data(config).tokens["train"] == tokens(folders / "a") + tokens(folders / "b")


def test_relative_folders_and_a_name_with_an_equals_sign(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = Path(shutil.copytree(folders / "a", tmp_path / "lr=3"))
    monkeypatch.chdir(tmp_path)
    assert main(["blend", "blend.yaml", "lr=3", *SHORT]) == 0
    assert yaml.safe_load(Path("blend.yaml").read_text())["train"] == [{"prefix": str(odd / "train"), "weight": 1.0}]
    assert main(["blend", "blend.yaml", "lr=3=0.5", *SHORT]) == 0


def test_what_exists_and_differs_is_kept(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "blend.yaml"
    out.write_text("mine: 1\n")
    assert main(["blend", str(out), str(folders / "a"), *SHORT]) == 2
    assert "--overwrite" in capsys.readouterr().err and out.read_text() == "mine: 1\n"
    assert main(["blend", str(out), str(folders / "a"), *SHORT, "--overwrite"]) == 0
    assert main(["blend", str(out), str(folders / "a"), *SHORT]) == 0


def other_tokenizer(folders: Path, root: Path) -> list[object]:
    copy = Path(shutil.copytree(folders / "b", root / "other"))
    edit_json(copy / "manifest.json", lambda manifest: manifest["tokenizer"].update(sha256="9" * 64))
    return [folders / "a", copy]


def other_eod(folders: Path, root: Path) -> list[object]:
    copy = Path(shutil.copytree(folders / "b", root / "other"))
    edit_json(copy / "manifest.json", lambda manifest: manifest["tokenizer"].update(eod_id=7))
    return [folders / "a", copy]


def cut_short(folders: Path, root: Path) -> list[object]:
    copy = Path(shutil.copytree(folders / "b", root / "cut"))
    (copy / "valid.bin").write_bytes(b"")
    return [copy]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda f, r: [f / "none"], "no such folder: .*none"),
        (lambda f, r: [f], "no manifest.json in"),
        (lambda f, r: [f / "a.parquet"], "a.parquet is a file"),
        (lambda f, r: [f / "a", f / "b", f / "a"], "a is given twice"),
        (lambda f, r: [f / "a", f / "b" / ".." / "a"], "is given twice"),
        (lambda f, r: [f"{f / 'a'}=0"], "the weight must be above 0"),
        (lambda f, r: [f"{f / 'a'}=-1"], "the weight must be above 0"),
        (lambda f, r: [f"{f / 'a'}=nan"], "the weight must be above 0"),
        (lambda f, r: [f"{f / 'a'}=much"], "the weight 'much' is not a number"),
        (lambda f, r: [f / "a", f"{f / 'b'}=2"], "/a has no weight and others have one"),
        (other_eod, r"other ends its documents in id 7, .*/a in \d+; a blend needs one EOD"),
        (other_tokenizer, "other has another tokenizer .sha256 999999999999."),
        (cut_short, r"valid.bin is not the \d+ bytes"),
        (lambda f, r: [f / "a", "--seq-length", 10**6], "a/train has .* tokens, a sequence of 1000000 takes 1000001"),
        (lambda f, r: [f / "a", "--seq-length", 0], "--seq-length is 0"),
    ],
)
def test_what_cannot_be_blended_is_named(
    folders: Path, tmp_path: Path, given: Callable[[Path, Path], list[object]], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "blend.yaml"
    assert main(["blend", str(out), *map(str, given(folders, tmp_path))]) == 2
    error = capsys.readouterr().err
    assert re.search(said, error) and error.count("\n") == 1, error
    assert not out.exists()


def test_the_file_is_named_as_yaml(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder.yaml").mkdir()
    for out, said in (
        (tmp_path / "blend", "does not end in .yaml"),
        (folders / "a", "does not end in .yaml"),
        (tmp_path / "folder.yaml", "is a folder"),
    ):
        assert main(["blend", str(out), str(folders / "a"), *SHORT]) == 2
        assert said in capsys.readouterr().err
