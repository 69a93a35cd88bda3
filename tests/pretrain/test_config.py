"""A run's YAML, overrides and contradictions: every mistake ends in one line that names key, value and what would do.

Long, because every kind of mistake in a configuration is told here in the words that a user reads.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fem_common.config import dump_yaml, plain, walk
from fem_common.errors import ConfigError
from fem_common.exits import Exit
from fem_common.settings import spec
from fem_megatron.catalogue import MIXERS
from pretrain import reference_page
from pretrain.__main__ import main
from pretrain.config import RunConfig, Source, load_run
from pretrain.run_directory import run_directory
from pretrain.validate import planned_world_size, prepare, validate
from tests.pretrain.conftest import DEMO
from tests.pretrain.data_folder import write_folder
from tests.pretrain.small import SMALL
from tests.wording import Wording

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs" / "run"
RUNS = sorted(CONFIGS.glob("*.yaml"))


def complaint(path: Path, *overrides: str, launched: int | None = 1) -> str:
    """What a user who starts the run on ``launched`` processes is told; fails where nothing is wrong."""
    with pytest.raises(ConfigError) as caught:
        config = load_run(path, overrides)
        validate(config, planned_world_size(config) if launched is None else launched)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """An empty configs tree; returns its run folder."""
    for section in ("run", "model", "data"):
        (tmp_path / section).mkdir()
    return tmp_path / "run"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# --- composition ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_shipped_run_is_valid_and_survives_being_saved(path: Path, tmp_path: Path) -> None:
    config = load_run(path)
    assert config.name == path.stem
    given = replace(config, model=replace(config.model, vocab_size=config.model.vocab_size or 6000))
    validate(given, planned_world_size(given))
    assert load_run(write(tmp_path / "config.yaml", dump_yaml(config))) == config


def test_parts_bases_and_overrides_go_over_each_other_in_order(runs: Path) -> None:
    write(runs.parent / "model" / "wide.yaml", "base: plain\nhidden_size: 512\nfem: {gate: false}\n")
    write(runs.parent / "model" / "plain.yaml", "hidden_size: 64\nnum_layers: 3\nfem: {conditioner: false}\n")
    path = write(runs / "mine.yaml", "model: {base: wide, num_layers: 5}\ntrain: {steps: 7}\n")
    model = load_run(path, ["model.fem.budget=ii"]).model
    assert (model.hidden_size, model.num_layers) == (512, 5)
    assert (model.fem.gate, model.fem.conditioner, model.fem.budget, model.fem.free_energy) == (False, False, "ii", True)
    swapped = load_run(path, ["model.rope=false", "model=plain", "model.rope_base=7"])
    assert (swapped.model.hidden_size, swapped.model.num_layers, swapped.model.rope, swapped.model.rope_base) == (64, 3, False, 7)
    assert swapped.name == "mine" and swapped.train.steps == 7


def test_list_items_are_overridden_and_appended_by_number(runs: Path) -> None:
    path = write(runs / "mine.yaml", "data: {train: [{prefix: a}, {prefix: b, weight: 3}]}\n")
    config = load_run(path, ["data.train.0.weight=2", "data.valid.0.prefix=v", "data.train.2.prefix=c"])
    assert config.data.train == (Source("a", 2.0), Source("b", 3.0), Source("c"))
    assert config.data.valid == (Source("v"),)


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("1e-4", "optimizer.lr", 1e-4),  # text to YAML 1.1
        ("1", "optimizer.lr", 1.0),
        ("500e9", "train.tokens", 500 * 10**9),
        ("15_000_000_000", "train.tokens", 15 * 10**9),
        ("1.5e+3", "train.tokens", 1500),
        ("none", "checkpoint.resume", "none"),
        ("null", "model.ffn_hidden_size", None),
    ],
)
def test_numbers_and_words_as_people_write_them(runs: Path, text: str, key: str, value: object) -> None:
    config: object = load_run(write(runs / "mine.yaml", "{}\n"), [f"{key}={text}"])
    for name in key.split("."):
        config = getattr(config, name)
    assert config == value and type(config) is type(value)


# --- mistakes in files and keys ------------------------------------------------------------------------------------------------


def test_an_unknown_key_names_file_key_and_the_nearest_one(runs: Path) -> None:
    path = write(runs / "mine.yaml", "model: {hidden_sise: 64}\n")
    assert complaint(path) == f"{path}:1: unknown key model.hidden_sise; did you mean model.hidden_size?"
    part = write(runs.parent / "model" / "bad.yaml", "fem: {gates: true}\n")
    assert complaint(write(path, "model: bad\n")) == f"{part}:1: unknown key model.fem.gates; did you mean model.fem.gate?"


MISTAKES = """
model.hidden_sise=64
hidden_size=64
train.lr=1e-3
modle.hidden_size=64
data.train.0.prefx=a
train.zzzz=1
model.hidden_size.more=1
data.train.7.prefix=a
model.hidden_size
--steps=3
train.steps=[1
train.steps=six
train.steps=2.5
train.steps=true
train.seed=null
train.seed='12'
optimizer.lr=.nan
model.rope=1
model.fem=3
run_dir=true
data.train=runs/x
train.precision=fp16
model.mixer=fem_soft
model=fem_sm_340
model=7
""".strip().splitlines()


def test_mistakes_on_the_command_line(wording: Wording) -> None:
    for override in MISTAKES:
        said = complaint(CONFIGS / "demo.yaml", override)
        assert said.startswith("command line: ")
        wording(f"{override}: {said}")


def test_a_missing_file_or_part_names_its_nearest_neighbour(runs: Path) -> None:
    assert complaint(CONFIGS / "dmeo.yaml") == f"{CONFIGS}/dmeo.yaml: no such file; did you mean {CONFIGS}/demo.yaml?"
    assert complaint(CONFIGS / "demo.yaml", "model=fem_sm_340").endswith("did you mean fem_sm_340m?")
    assert complaint(runs) == f"{runs}: Is a directory"


BROKEN = (
    "model:\n  hidden_size: 64\n   rope: true\n",
    "train:\n  steps: 3\n  steps: 4\n",
    "data:\n  train: &t [{prefix: a}]\n  valid: *t\n",
    "- model\n",
    "",
    "train: 3\n",
    "train:\n",
    "train: {base: 3}\n",
    "name: !!python/object:os.system x\n",
)


def test_a_broken_file_is_named_with_the_line(runs: Path, wording: Wording) -> None:
    for text in BROKEN:
        path = write(runs / "mine.yaml", text)
        said = complaint(path)
        assert said.startswith(f"{path}:")
        wording(said)


def test_a_circle_of_bases_and_a_binary_file_are_named(runs: Path) -> None:
    write(runs.parent / "model" / "a.yaml", "base: b\n")
    write(runs.parent / "model" / "b.yaml", "base: a\n")
    assert "goes round in a circle" in complaint(write(runs / "mine.yaml", "model: a\n"))
    (runs / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert complaint(runs / "binary.yaml").endswith("not a text file in UTF-8")


@pytest.mark.parametrize(
    ("key", "absent"),
    [
        ("model.num_experts", "mixtures of experts"),
        ("model.num_moe_experts", "mixtures of experts"),
        ("model.moe_router_topk", "mixtures of experts"),
        ("model.moe.num_experts", "mixtures of experts"),
        ("parallel.expert_model_parallel_size", "expert parallelism"),
        ("parallel.context_parallel_size", "context parallelism"),
        ("train.cp_comm_type", "context parallelism"),
    ],
)
def test_what_is_not_here_is_said_to_be_absent(key: str, absent: str) -> None:
    said = complaint(CONFIGS / "demo.yaml", f"{key}=2")
    assert absent in said and "did you mean" not in said


def test_every_mistake_is_told_at_once_and_nothing_that_only_follows_from_one(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown keys, types, parts, contradictions, paths: a line each, and every check of a section that is right."""
    file = write(runs.parent / "a_file", "")
    path = write(
        runs / "mine.yaml", "model: {hidden_sise: 64, num_layers: 0}\ndata: {train: [{prefix: nowhere}]}\nevaluate: {interval: 3}\n"
    )
    overrides = ["train.steps=six", "optimizer.min_lr=1", "optimizer.lr=0", "parallel.context_parallel_size=2", "checkpoint.interval=2"]
    assert main([str(path), *overrides, f"run_dir={file}/run"]) == 2
    out, err = capsys.readouterr()
    lines = err.splitlines()
    wanted = ["model.hidden_sise", "model.num_layers = 0", "nowhere", "evaluate.interval = 3", "train.steps = 'six'", "optimizer.lr = 0"]
    wanted += ["parallel.context_parallel_size"]
    assert out == "" and all(line.startswith("pretrain: error: ") for line in lines)
    found = {word: sum(word in line for line in lines) for word in wanted}
    assert found == {**dict.fromkeys(wanted, 1), "nowhere": 0} and len(lines) == 6, err  # no vocabulary is read while the model is wrong
    assert main([str(path.parents[1] / "run/mine.yaml"), "model=null"]) == 2


# --- contradictions ------------------------------------------------------------------------------------------------------------

PARALLEL = {
    "TP": "parallel.tensor_model_parallel_size",
    "PP": "parallel.pipeline_model_parallel_size",
    "VPP": "parallel.virtual_pipeline_model_parallel_size",
}
# Processes that were started, and what is set.
CONTRADICTIONS = """
4 TP=4
4 TP=4 model.ffn_hidden_size=513
1 TP=4 model.ffn_hidden_size=513
6 TP=6
3 TP=3 model.ffn_hidden_size=513 model.fem.conditioner_size=8
3 TP=3 model.ffn_hidden_size=513 model.vocab_size=500
2 TP=2 parallel.sequence_parallel=true data.seq_length=255
1 parallel.sequence_parallel=true
1 model.num_attention_heads=5
1 model.fem.value_size=100
1 model.num_attention_heads=64
4 PP=4
1 VPP=2
2 PP=2 VPP=1
2 PP=2 VPP=2
2 PP=2 VPP=3 train.global_batch_size=12
1 TP=2 PP=2
6 TP=2 PP=2
1 parallel.world_size=8
1 parallel.overlap_param_gather=true
1 parallel.overlap_param_gather=true parallel.use_distributed_optimizer=false
3
1 train.tokens=1000
1 train.steps=null
1 optimizer.warmup_tokens=9
1 train.steps=20
1 optimizer.warmup_steps=null optimizer.warmup_tokens=1e9
1 optimizer.decay_steps=9
1 optimizer.schedule=wsd optimizer.decay_steps=150
1 optimizer.min_lr=1
1 optimizer.clip_grad=-1
1 optimizer.beta2=1
1 model.num_layers=0
1 model.hyperset.beta2=1.0
1 optimizer.lr=0
1 data.train.0.weight=0
1 data.train.1.weight=2
1 name=a/b
1 log.device=H10
""".strip().splitlines()


def settings_of(row: str) -> tuple[int, list[str]]:
    launched, *words = row.split()
    pairs = [word.partition("=") for word in words]
    return int(launched), [f"{PARALLEL.get(key, key)}={value}" for key, _, value in pairs]


def test_a_contradiction_names_key_value_and_the_nearest_value_that_would_do(wording: Wording) -> None:
    for row in CONTRADICTIONS:
        launched, overrides = settings_of(row)
        wording(f"{row}: {complaint(CONFIGS / 'demo.yaml', *SMALL, *overrides, launched=launched)}")


@pytest.mark.parametrize(
    "row",
    [
        "4 TP=2 PP=2 parallel.sequence_parallel=true",
        "2 PP=2 VPP=3",
        "2 parallel.overlap_grad_reduce=true parallel.overlap_param_gather=true",
        "1 optimizer.schedule=wsd optimizer.decay_steps=140",
        "1 train.steps=null train.tokens=1e6 optimizer.warmup_steps=0",
        "1 model.fem.budget=ii model.rope=false log.device=H100",
    ],
)
def test_layouts_and_lengths_that_fit_are_let_pass(row: str) -> None:
    launched, overrides = settings_of(row)
    validate(
        load_run(CONFIGS / "demo.yaml", [*SMALL, *overrides]),
        launched,
    )


def test_a_plan_takes_the_world_size_that_the_configuration_asks_for() -> None:
    assert prepare(load_run(CONFIGS / "fem_sm_1.3b_100bt.yaml"), None, plan_only=True).world_size == 8
    config = load_run(CONFIGS / "transformer_340m_15bt.yaml", settings_of("1 parallel.world_size=null TP=2 PP=3")[1])
    assert planned_world_size(config) == 6


# --- the schema and the command ------------------------------------------------------------------------------------------------


def test_every_field_is_documented_and_the_page_is_up_to_date() -> None:
    assert [key for key, item, _ in walk(RunConfig) if not spec(item).doc.endswith((".", ")"))] == []
    assert reference_page.PAGE.read_text(encoding="utf-8") == reference_page.page(), "run: python -m pretrain.reference_page"


def test_the_saved_form_holds_every_key() -> None:
    def keys(tree: dict[str, Any], prefix: str = "") -> set[str]:
        return {
            name
            for key, value in tree.items()
            for name in ({prefix + key} | (keys(value, f"{prefix}{key}.") if isinstance(value, dict) else set()))
        }

    assert keys(plain(RunConfig())) == {key for key, _, _ in walk(RunConfig) if ".N." not in key}


def test_a_plan_needs_no_data() -> None:
    command = [sys.executable, "-m", "pretrain", "configs/run/fem_sm_1.3b_100bt.yaml", "--plan"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and "1,384,820,224" in done.stdout


@pytest.mark.parametrize(("run", "sizes"), [("fem_sm_1.3b_100bt", (2, 4, 8)), ("fem_sm_340m_15bt", (2, 4))])
@pytest.mark.parametrize("mixer", [name for name in MIXERS if "TP" in MIXERS[name].layouts])
def test_every_mixer_can_be_split_at_the_papers_sizes(run: str, sizes: tuple[int, ...], mixer: str) -> None:
    for tensor in sizes:
        settings = [f"model.mixer={mixer}", f"parallel.tensor_model_parallel_size={tensor}"]
        settings += ["model.second_order.exact_max_length=4096"] if mixer == "mha2nd" else []
        validate(load_run(CONFIGS / f"{run}.yaml", settings), 8)


@pytest.mark.parametrize("place", ["a regular file", "a folder of another's"])
@pytest.mark.parametrize("stop", [[], ["--check"], ["--index"]])
def test_an_unwritable_run_directory_is_told_without_torch(place: str, stop: list[str], tmp_path: Path) -> None:
    """Root may write anywhere: the folder of another's is one that os.access, in this process, says no to."""
    folder = tmp_path / "there"
    folder.mkdir() if "folder" in place else folder.touch()
    deny = f"import os, sys; os.access = lambda path, mode: str(path) != {str(folder)!r}; from pretrain.__main__ import main; "
    code = deny + "code = main(sys.argv[1:]); assert not {'torch', 'numpy'} & set(sys.modules); sys.exit(code)"
    words = [str(CONFIGS / "demo.yaml"), f"run_dir={folder / 'deeper' / 'run'}", *stop]
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and f"run_dir = {folder / 'deeper' / 'run'}: {folder} is not" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_names_examples_exit_codes_and_a_sections_keys(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*words])
        assert ended.value.code == 0
        return capsys.readouterr().out

    text = printed("--help")
    assert "configs/run/demo.yaml --plan" in text and "[section.key=value ...]" in text
    assert all(
        re.search(rf"^ *{code.value}  ", text, re.M) for code in (Exit.DONE, Exit.FAULT, Exit.WRONG_INPUT, Exit.DIVERGED, Exit.IN_USE)
    )
    keys = [(key, kind) for key, _, kind in walk(RunConfig) if not dataclasses.is_dataclass(kind)]
    for section in ("model", "model.fem", "optimizer"):
        told = re.findall(r"^([\w.]+) = ", printed("--help", section), re.M)
        assert told == [key for key, _ in keys if key.startswith(section + ".")]
    with pytest.raises(SystemExit) as ended:
        main(["--help", "modle"])
    assert ended.value.code == 2 and "no such section; model, " in capsys.readouterr().err


def test_overrides_are_optional_and_a_configuration_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert (
        capsys.readouterr().err
        == "pretrain: error: no CONFIG.yaml: name a run, such as configs/run/demo.yaml; pretrain --help has examples\n"
    )
    assert main([str(CONFIGS / "demo.yaml"), "--resolve", "--check"]) == 2
    assert "stands alone" in capsys.readouterr().err


def test_the_run_directory_may_name_the_mixer() -> None:
    config = load_run(CONFIGS / "demo.yaml", ["run_dir=x/{mixer}", "model.pattern=[fem_gla, cem]"])
    assert run_directory(config) == Path("x/fem_gla-cem")
    assert run_directory(load_run(CONFIGS / "demo.yaml", [])) != run_directory(load_run(CONFIGS / "demo.yaml", ["model.mixer=cem"]))


# --- a section as a file of its own ----------------------------------------------------------------------------------------------


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


# --- --resolve -------------------------------------------------------------------------------------------------------------------

ODD = "name='1e5: $(touch x) \"{}'"  # text that YAML and shells may take for something else
OVERRIDES = [[], ["run_dir=x/{mixer}/ü y", ODD], ["run_dir=null", ODD, "checkpoint.load=../other/run"], ["run_dir=./a//b/"]]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_the_printed_file_is_the_same_run(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # no data here
    for number, overrides in enumerate(OVERRIDES):
        assert main([str(path), *overrides, "--resolve"]) == 0
        out, err = capsys.readouterr()
        assert err == "" and yaml.safe_load(out)["run_dir"]
        wanted = load_run(path, overrides)
        (tmp_path / f"{number}.yaml").write_text(out)
        found = load_run(tmp_path / f"{number}.yaml")
        assert run_directory(found) == run_directory(wanted)
        assert found == replace(wanted, run_dir=str(run_directory(wanted)))
        assert plain(found)["data"] == plain(wanted)["data"], "paths stay as they were written"
        assert main([str(tmp_path / f"{number}.yaml"), "--resolve"]) == 0
        assert capsys.readouterr().out == out, "resolving is done once"


def test_mistakes_are_one_line_and_data_that_is_there_is_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*overrides: str) -> str:
        assert main([DEMO, *overrides, "--resolve"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        return err

    monkeypatch.chdir(tmp_path)
    assert "is not a multiple of train.micro_batch_size" in said("parallel.world_size=7")
    assert "unknown key train.stepz" in said("train.stepz=1")
    assert "parallel.collective_timeout_minutes = 0: must be more than 0" in said("parallel.collective_timeout_minutes=0")
    assert "log.straggler_interval = -1: must be 0 or more" in said("log.straggler_interval=-1")
    assert "log.straggler_ratio = 0.9: must be 1 or more" in said("log.straggler_ratio=0.9")
    data = [f"data.train.0.prefix={write_folder(tmp_path / 'data') / 'train'}", "data.valid=[]", "data.test=[]", "data.seq_length=64"]
    assert main([DEMO, "--check"]) == 2, "the demo's data are not here"
    assert "data_prep run" in capsys.readouterr().err
    assert main([DEMO, *data, "--check"]) == 0 and capsys.readouterr().out.count("\n") == 1
    small = [*data, "model.vocab_size=512", "--plan", "--check"]
    assert main([DEMO, *small, "log.device=H100"]) == 0 and "fits H100" in capsys.readouterr().out.splitlines()[-1]
    assert main([DEMO, *small]) == 0 and "log.device is null" in capsys.readouterr().out.splitlines()[-1]
    assert main([DEMO, *small, "log.device=H100", "model.num_layers=3000", "model.hidden_size=3072"]) == 2
    out, err = capsys.readouterr()
    assert "parameters" in out and err.startswith("pretrain: error: log.device = H100 has 79 GiB of memory") and err.count("\n") == 1
    assert main([DEMO, *data, "--resolve"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["vocab_size"] is None, "what the data tells stays for the run to read"
    os.truncate(tmp_path / "data" / "train.bin", 10)
    assert "damaged or replaced" in said(*data)
    assert main([DEMO, *data, "--check"]) == 2


def test_nothing_heavy_is_imported() -> None:
    check = "import sys; from pretrain.__main__ import main; main(sys.argv[1:]); assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check, DEMO, "--resolve"], cwd=ROOT, check=True, capture_output=True)
