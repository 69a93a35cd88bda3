"""A run's YAML, overrides and contradictions: every mistake ends in one line that names key, value and what would do.

Long, because every kind of mistake in a configuration is told here in the words that a user reads.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
from tests.pretrain.small import SMALL

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
    given = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=config.model.vocab_size or 6000))
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


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.hidden_sise=64", "command line: unknown key model.hidden_sise; did you mean model.hidden_size?"),
        ("hidden_size=64", "command line: unknown key hidden_size; did you mean model.hidden_size?"),
        ("train.lr=1e-3", "command line: unknown key train.lr; did you mean optimizer.lr?"),
        ("modle.hidden_size=64", "command line: unknown key modle; did you mean model?"),
        ("data.train.0.prefx=a", "command line: unknown key data.train.0.prefx; did you mean data.train.0.prefix?"),
        ("train.zzzz=1", "command line: unknown key train.zzzz; valid keys: steps, tokens, micro_batch_size,"),
        ("model.hidden_size.more=1", "command line: unknown key model.hidden_size.more: model.hidden_size is a single value"),
        ("data.train.7.prefix=a", "command line: data.train.7: the list has 1 items, counted from 0"),
        ("model.hidden_size", "command line: 'model.hidden_size' is not of the form section.key=value"),
        ("--steps=3", "command line: '--steps=3' is not of the form section.key=value"),
        ("train.steps=[1", "command line: train.steps: not valid YAML:"),
        ("train.steps=six", "command line: train.steps = 'six': expected a whole number or null"),
        ("train.steps=2.5", "command line: train.steps = 2.5: expected a whole number or null"),
        ("train.steps=true", "command line: train.steps = true: expected a whole number or null"),
        ("train.seed=null", "command line: train.seed = null: expected a whole number"),
        ("train.seed='12'", "command line: train.seed = '12': expected a whole number"),
        ("optimizer.lr=.nan", "command line: optimizer.lr = .nan: expected a number"),
        ("model.rope=1", "command line: model.rope = 1: expected true or false"),
        ("model.fem=3", "command line: model.fem = 3: expected a mapping"),
        ("run_dir=true", "command line: run_dir = true: expected text or null, in quotes"),
        ("data.train=runs/x", "command line: data.train = 'runs/x': expected a list of {prefix, weight}"),
        ("train.precision=fp16", "command line: train.precision = 'fp16' is not a choice; did you mean bf16?"),
        ("model.mixer=fem_soft", "command line: model.mixer = 'fem_soft' is not a choice; did you mean fem_softmax?"),
        ("model=fem_sm_340", "command line: model names the part 'fem_sm_340', but there is no file"),
        ("model=7", "command line: model = 7: expected a mapping or the name of a part in model/"),
    ],
)
def test_a_mistake_on_the_command_line(override: str, said: str) -> None:
    assert complaint(CONFIGS / "demo.yaml", override).startswith(said)


def test_a_missing_file_or_part_names_its_nearest_neighbour(runs: Path) -> None:
    assert complaint(CONFIGS / "dmeo.yaml") == f"{CONFIGS}/dmeo.yaml: no such file; did you mean {CONFIGS}/demo.yaml?"
    assert complaint(CONFIGS / "demo.yaml", "model=fem_sm_340").endswith("did you mean fem_sm_340m?")
    assert complaint(runs) == f"{runs}: Is a directory"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model:\n  hidden_size: 64\n   rope: true\n", ":3: not valid YAML: mapping values are not allowed here"),
        ("train:\n  steps: 3\n  steps: 4\n", ":3: key 'steps' is given twice"),
        ("data:\n  train: &t [{prefix: a}]\n  valid: *t\n", ":3: alias *t:"),
        ("- model\n", ": expected a mapping of keys to values, got a list"),
        ("", ": expected a mapping of keys to values, got nothing"),
        ("train: 3\n", ":1: train = 3: expected a mapping or the name of a part in train/"),
        ("train:\n", ":1: train = null: expected a mapping or the name of a part in train/"),
        ("train: {base: 3}\n", ":1: train.base = 3: expected the name of a part in train/"),
        ("name: !!python/object:os.system x\n", ":1: tag tag:yaml.org,2002:python/object:os.system: a plain value is expected"),
    ],
)
def test_a_broken_file_is_named_with_the_line(runs: Path, text: str, said: str) -> None:
    path = write(runs / "mine.yaml", text)
    assert complaint(path).startswith(f"{path}{said}")


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

TP, PP, VPP = (
    "parallel.tensor_model_parallel_size",
    "parallel.pipeline_model_parallel_size",
    "parallel.virtual_pipeline_model_parallel_size",
)


@pytest.mark.parametrize(
    ("launched", "overrides", "said"),
    [
        (4, [f"{TP}=4"], f"{TP} = 4 does not divide model.num_attention_heads = 6; the nearest that divides all: 2"),
        (
            4,
            [f"{TP}=4", "model.ffn_hidden_size=513"],
            f"{TP} = 4 does not divide model.num_attention_heads = 6; the nearest that divides all: 1",
        ),
        (
            1,
            [f"{TP}=4", "model.ffn_hidden_size=513"],
            f"{TP} = 4 does not divide model.num_attention_heads = 6; the nearest that divides all: 3",
        ),
        (6, [f"{TP}=6"], f"{TP} = 6 does not divide the MLP's width, model.ffn_hidden_size = 512; the nearest that divides all: 2"),
        (
            3,
            [f"{TP}=3", "model.ffn_hidden_size=513", "model.fem.conditioner_size=8"],
            f"{TP} = 3 does not divide the conditioner's width, model.fem.conditioner_size = 8",
        ),
        (3, [f"{TP}=3", "model.ffn_hidden_size=513", "model.vocab_size=500"], f"{TP} = 3 does not divide the padded vocabulary"),
        (
            2,
            [f"{TP}=2", "parallel.sequence_parallel=true", "data.seq_length=255"],
            f"{TP} = 2 does not divide data.seq_length (split by parallel.sequence_parallel) = 255; the nearest that divides all: 1",
        ),
        (1, ["parallel.sequence_parallel=true"], f"parallel.sequence_parallel = true needs {TP} of 2 or more"),
        (
            1,
            ["model.num_attention_heads=5"],
            "model.num_attention_heads=5 does not divide the mixer's query/key width 192; the nearest number of heads that does: 4",
        ),
        (1, ["model.fem.value_size=100"], "model.num_attention_heads=6 does not divide the mixer's value width 100; the nearest number of"),
        (
            1,
            ["model.num_attention_heads=64"],
            "model.num_attention_heads = 64 gives heads of 3 channels, and model.rope needs an even number: model.num_attention_heads=48",
        ),
        (4, [f"{PP}=4"], f"{PP} = 4 does not divide model.num_layers = 6; the nearest that does: 2"),
        (1, [f"{VPP}=2"], f"{VPP} = 2 needs {PP} of 2 or more; leave it null for one chunk a rank"),
        (2, [f"{PP}=2", f"{VPP}=1"], f"{VPP} = 1 must be 2 or more chunks; leave it null"),
        (2, [f"{PP}=2", f"{VPP}=2"], f"{VPP} = 2 x {PP} = 2 does not divide model.num_layers = 6; the nearest that does: 3"),
        (
            2,
            [f"{PP}=2", f"{VPP}=3", "train.global_batch_size=12"],
            f"train.global_batch_size = 12 makes 3 micro-batches a step, and the interleaved schedule needs a multiple of {PP} = 2; "
            "the nearest global batch: 16",
        ),
        (
            1,
            [f"{TP}=2", f"{PP}=2"],
            f"{TP} = 2 x {PP} = 2 needs a multiple of 4 processes, but 1 process was started; "
            "the nearest: torchrun --nproc-per-node 4 -m pretrain ...",
        ),
        (
            6,
            [f"{TP}=2", f"{PP}=2"],
            "needs a multiple of 4 processes, but 6 processes were started; the nearest: torchrun --nproc-per-node 8",
        ),
        (
            1,
            ["parallel.world_size=8"],
            "parallel.world_size = 8, but 1 process was started; start it with: torchrun --nproc-per-node 8 -m pretrain ..., "
            "or set parallel.world_size=1",
        ),
        (1, ["parallel.overlap_param_gather=true"], "parallel.overlap_param_gather = true needs parallel.overlap_grad_reduce=true"),
        (
            1,
            ["parallel.overlap_param_gather=true", "parallel.use_distributed_optimizer=false"],
            "parallel.overlap_param_gather = true needs parallel.use_distributed_optimizer=true",
        ),
        (
            3,
            [],
            "train.global_batch_size = 16 is not a multiple of train.micro_batch_size = 4 x 3 data-parallel ranks; the nearest that is: 12",
        ),
        (1, ["train.tokens=1000"], "train.steps and train.tokens say how long the run is, and both are given"),
        (1, ["train.steps=null"], "train.steps and train.tokens say how long the run is, and neither is given"),
        (1, ["optimizer.warmup_tokens=9"], "optimizer.warmup_steps and optimizer.warmup_tokens are both given"),
        (
            1,
            ["train.steps=20"],
            "optimizer.warmup_steps = 20 does not fit: 20 steps of warmup in a run of 20 steps; the largest that fits: 19",
        ),
        (
            1,
            ["optimizer.warmup_steps=null", "optimizer.warmup_tokens=1e9"],
            "optimizer.warmup_tokens = 1000000000 does not fit: 244141 steps of warmup in a run of 160 steps; "
            "the largest that fits: 651264",
        ),
        (1, ["optimizer.decay_steps=9"], "optimizer.decay_steps is given, but optimizer.schedule = cosine decays over the whole run"),
        (
            1,
            ["optimizer.schedule=wsd", "optimizer.decay_steps=150"],
            "optimizer.decay_steps = 150 does not fit: 150 steps of decay in a run of 160 steps; the largest that fits: 140",
        ),
        (1, ["optimizer.min_lr=1"], "optimizer.min_lr = 1.0 is above optimizer.lr = 0.003; at most 0.003"),
        (1, ["optimizer.clip_grad=-1"], "optimizer.clip_grad = -1: must be 0 or more"),
        (1, ["optimizer.beta2=1"], "optimizer.beta2 = 1: must be 0 or more and less than 1"),
        (1, ["model.num_layers=0"], "model.num_layers = 0: must be 1 or more"),
        (1, ["model.num_query_groups=-1"], "model.num_query_groups = -1: must be 1 or more"),
        (1, ["model.delta.heads=0"], "model.delta.heads = 0: must be 1 or more"),
        (1, ["model.hyperset.beta2=1.0"], "model.hyperset.beta2 = 1.0: must be 0 or more and less than 1"),
        (1, ["optimizer.lr=0"], "optimizer.lr = 0: must be more than 0"),
        (1, ["data.train.0.weight=0"], "data.train.0.weight = 0: must be more than 0"),
        (1, ["data.train.1.weight=2"], "key data.train.1.prefix is missing"),
        (1, ["name=a/b"], "name = 'a/b': must not be a path"),
        (1, ["log.device=H10"], "log.device = 'H10' has no known peak; the nearest: H100 "),
    ],
)
def test_a_contradiction_names_key_value_and_the_nearest_value_that_would_do(launched: int, overrides: list[str], said: str) -> None:
    assert said in complaint(CONFIGS / "demo.yaml", *SMALL, *overrides, launched=launched)


@pytest.mark.parametrize(
    ("launched", "overrides"),
    [
        (4, [f"{TP}=2", f"{PP}=2", "parallel.sequence_parallel=true"]),
        (2, [f"{PP}=2", f"{VPP}=3"]),
        (2, ["parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"]),
        (1, ["optimizer.schedule=wsd", "optimizer.decay_steps=140"]),
        (1, ["train.steps=null", "train.tokens=1e6", "optimizer.warmup_steps=0"]),
        (1, ["model.fem.budget=ii", "model.rope=false", "log.device=NVIDIA H100 80GB HBM3"]),
    ],
)
def test_layouts_and_lengths_that_fit_are_let_pass(launched: int, overrides: list[str]) -> None:
    validate(load_run(CONFIGS / "demo.yaml", [*SMALL, *overrides]), launched)


def test_a_plan_takes_the_world_size_that_the_configuration_asks_for() -> None:
    assert prepare(load_run(CONFIGS / "fem_sm_1.3b_100bt.yaml"), None, plan_only=True).world_size == 8
    config = load_run(CONFIGS / "transformer_340m_15bt.yaml", ["parallel.world_size=null", f"{TP}=2", f"{PP}=3"])
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


@pytest.mark.skipif(not (ROOT / "pretrain" / "__main__.py").exists(), reason="the command is not there")
@pytest.mark.parametrize(
    ("arguments", "code", "out", "err"),
    [
        (
            ["demo.yaml", "model.hidden_sise=64"],
            2,
            "",
            "pretrain: error: command line: unknown key model.hidden_sise; did you mean model.hidden_size?\n",
        ),
        (["fem_sm_1.3b_100bt.yaml", "--plan"], 0, "1,384,820,224", ""),
    ],
)
def test_the_command_ends_with_one_line_and_exit_code_2(arguments: list[str], code: int, out: str, err: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, "-m", "pretrain", f"configs/run/{arguments[0]}", *arguments[1:]]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (code, err)
    assert out in done.stdout


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
