"""Tests of run YAMLs, overrides and contradictions: every mistake ends in one line that names key,
value and a remedy.
"""

from __future__ import annotations

import dataclasses
import getpass
import pwd
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fem_common.config import plain, walk
from fem_common.errors import ConfigError
from fem_common.exits import Exit
from fem_common.settings import spec
from fem_megatron.catalogue import MIXERS
from fem_megatron.config import ModelConfig
from fem_megatron.rope import RopeScaling
from pretrain import reference_page
from pretrain.__main__ import main
from pretrain.config import RunConfig, Source, load_run
from pretrain.run_directory import run_directory
from pretrain.schedule import Schedule
from pretrain.validate import planned_world_size, prepare, validate
from tests.pretrain.conftest import DEMO, DEMO_SIZES, ROOT
from tests.pretrain.data_folder import write_folder
from tests.wording import Wording

CONFIGS = ROOT / "configs" / "run"
RUNS = sorted(CONFIGS.glob("*.yaml"))
PARALLEL = {
    "TP": "parallel.tensor_model_parallel_size",
    "PP": "parallel.pipeline_model_parallel_size",
    "CP": "parallel.context_parallel_size",
    "VPP": "parallel.virtual_pipeline_model_parallel_size",
}


def complaint(path: Path | str, *overrides: str, launched: int | None = 1) -> str:
    """Return the error that a user sees who starts the run on ``launched`` processes; fail if it is
    valid.
    """
    with pytest.raises(ConfigError) as caught:
        config = load_run(path, overrides)
        validate(config, planned_world_size(config) if launched is None else launched)
    message = str(caught.value)
    assert "\n" not in message
    return message


def settings_of(row: str) -> tuple[int, list[str]]:
    """Return the number of started processes and the settings."""
    launched, *words = row.split()
    pairs = [word.partition("=") for word in words]
    return int(launched), [f"{PARALLEL.get(key, key)}={value}" for key, _, value in pairs]


def write_tree(folder: Path, files: dict[str, str]) -> Path:
    """Write a configs tree and return its run/mine.yaml."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode("latin-1"))
    return folder / "run" / "mine.yaml"


# --- composition ----------------------------------------------------------------------------------


def test_parts_bases_and_overrides_go_over_each_other_in_order(tmp_path: Path) -> None:
    files = {
        "model/wide.yaml": "base: plain\nhidden_size: 512\nfem: {gate: false}\n",
        "model/plain.yaml": "hidden_size: 64\nnum_layers: 3\nfem: {conditioner: false}\n",
        "run/mine.yaml": (
            "model: {base: wide, num_layers: 5}\ntrain: {steps: 7}\ndata: {train: [{prefix: a},"
            " {prefix: b, weight: 3}]}\n"
        ),
    }
    path = write_tree(tmp_path, files)
    model = load_run(path, ["model.fem.budget=ii"]).model
    assert (model.hidden_size, model.num_layers) == (512, 5)
    assert (model.fem.gate, model.fem.conditioner, model.fem.budget, model.fem.free_energy) == (
        False,
        False,
        "ii",
        True,
    )
    swapped = load_run(path, ["model.rope=false", "model=plain", "model.rope_base=7"])
    assert (
        swapped.model.hidden_size,
        swapped.model.num_layers,
        swapped.model.rope,
        swapped.model.rope_base,
    ) == (64, 3, False, 7)
    assert swapped.name == "mine" and swapped.train.steps == 7
    data = load_run(
        path, ["data.train.0.weight=2", "data.valid.0.prefix=v", "data.train.2.prefix=c"]
    ).data
    assert data.train == (Source("a", 2.0), Source("b", 3.0), Source("c"))
    assert data.valid == (Source("v"),)


def test_a_section_may_be_a_file_named_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative to the working directory on the command line, to the file's folder in a file;
    absolute paths are unchanged.
    """
    files = {
        "blends/two.yaml": "train: [{prefix: a, weight: 3}, {prefix: b}]\nseq_length: 64\n",
        "blends/deep/short.yaml": "base: ../two.yaml\nseq_length: 32\n",
        "blends/wide.yaml": "hidden_size: 512\n",
        "data/one.yaml": "base: ../blends/two.yaml\n",
        "run/mine.yaml": (
            "data: ../blends/deep/short.yaml\nmodel: {hidden_size: 64, num_layers: 3}\n"
        ),
    }
    path, blend = write_tree(tmp_path, files), (Source("a", 3.0), Source("b"))
    assert (load_run(path).data.train, load_run(path).data.seq_length) == (blend, 32)
    monkeypatch.chdir(tmp_path / "blends")
    for given in (
        "two.yaml",
        "./two.yaml",
        "deep/../two.yaml",
        str(tmp_path / "blends/two.yaml"),
        "{base: two.yaml}",
        "one",
    ):
        data = load_run(path, [f"data={given}", "data.valid.0.prefix=v"]).data
        assert (data.train, data.valid, data.seq_length) == (blend, (Source("v"),), 64), given
    # Replaces the entire section of the file.
    assert load_run(path, ["model=wide.yaml", "model.num_layers=5"]).model.hidden_size == 512
    monkeypatch.chdir(tmp_path)
    assert load_run(path, ["model={base: blends/wide.yaml, num_layers: 7}"]).model.num_layers == 7


PATHS = {
    "run_dir", "data.train.N.prefix", "data.valid.N.prefix", "data.test.N.prefix", "data.tokenizer",
    "data.index_cache", "data.store_cache",
    "engine.deepspeed.file", "checkpoint.mirror", "checkpoint.load", "checkpoint.fork",
    "stages.N.data.N.prefix", "evaluate.suite",
}  # fmt: skip


def test_a_leading_tilde_is_expanded_in_every_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cover YAML, quoted or not, overrides, and the path of a section's file; URLs and other texts
    are unchanged.
    """
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert {key for key, item, _ in walk(RunConfig) if spec(item).path} == PATHS
    keys = sorted(PATHS - {"stages.N.data.N.prefix"})
    words = [
        f"{key.replace('.N', '.0')}={value}"
        for key, value in zip(keys, ("~/x", '"~/x"') * len(keys), strict=False)
    ]
    path = write_tree(
        tmp_path,
        {
            "home/model.yaml": "hidden_size: 512\n",
            "run/mine.yaml": "data: {tokenizer: ~/x}\nmodel: ~/model.yaml\n",
        },
    )
    stage = "stages=[{name: a, steps: 1, data: [{prefix: ~/x}]}]"
    for config in (
        load_run(path, [*words, stage]),
        load_run("~/../run/mine.yaml", [*words, "model=~/model.yaml", stage]),
    ):
        text = str(plain(config))
        assert config.run_dir == f"{home}/x"
        assert config.model.hidden_size == 512
        assert text.count(f"'{home}/x'") == len(PATHS)
        assert "~" not in text
    config = load_run(
        path,
        [
            "checkpoint.mirror=s3://~/x",
            "name='~x'",
            "run_dir=./~/x",
            f"data.index_cache=~{getpass.getuser()}/x",
        ],
    )
    assert (config.checkpoint.mirror, config.name, config.run_dir) == ("s3://~/x", "~x", "./~/x")
    assert config.data.index_cache == f"{pwd.getpwnam(getpass.getuser()).pw_dir}/x"
    with pytest.raises(
        ConfigError, match="command line: run_dir: ~nobody_here/x: there is no user 'nobody_here'"
    ):
        load_run(path, ["run_dir=~nobody_here/x"])
    Path("~").mkdir()  # older versions created this folder
    with pytest.raises(
        ConfigError, match="can mean the home directory or ~ in the working directory"
    ):
        load_run(path, ["run_dir=~/x"])


NUMBERS: dict[str, object] = {  # numbers as people write them; YAML 1.1 reads 1e-4 as text
    "optimizer.lr=1e-4": 1e-4,
    "optimizer.lr=1": 1.0,
    "train.tokens=500e9": 500 * 10**9,
    "train.tokens=15_000_000_000": 15 * 10**9,
    "train.tokens=1.5e+3": 1500,
    "checkpoint.resume=none": "none",
    "model.ffn_hidden_size=null": None,
}


def test_numbers_and_words_as_people_write_them() -> None:
    for override, value in NUMBERS.items():
        section, name = override.partition("=")[0].split(".")
        found = getattr(getattr(load_run(DEMO, [override]), section), name)
        assert found == value and type(found) is type(value), override


# --- mistakes in files and keys -------------------------------------------------------------------


def test_mistakes_on_the_command_line(wording: Wording) -> None:
    for override in MISTAKES["command line"]:
        output = complaint(DEMO, override)
        assert output.startswith("command line: ")
        wording(f"{override}: {output}")


MISTAKES: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("mistakes.yaml").read_text(encoding="utf-8")
)


def test_a_mistake_in_a_file_is_reported_with_its_line_or_its_nearest_neighbour(
    tmp_path: Path, wording: Wording, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, files in enumerate(MISTAKES["trees"]):
        override = [files.pop("with")] if "with" in files else []
        path = write_tree(tmp_path / f"{number}", {"data/empty.yaml": "", **files})
        monkeypatch.chdir(path.parents[1] / "data")
        wording(complaint(path, *override))


def test_every_mistake_is_reported_at_once_and_nothing_that_only_follows_from_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wording: Wording
) -> None:
    """Unknown keys, types, parts, contradictions, paths: one line each, and every check of a valid
    section runs.
    """
    text = (
        "model: {hidden_sise: 64, num_layers: 0}\ndata: {train: [{prefix: nowhere}]}\nevaluate:"
        " {interval: 3}\n"
    )
    path = write_tree(tmp_path, {"run/mine.yaml": text, "a_file": ""})
    overrides = [
        "train.steps=six",
        "optimizer.min_lr=1",
        "optimizer.lr=0",
        "parallel.cp_size=2",
        "checkpoint.interval=2",
    ]
    assert main([str(path), *overrides, f"run_dir={tmp_path}/a_file/run"]) == 2
    out, err = capsys.readouterr()
    # No vocabulary is read while the model is invalid.
    assert out == "" and len(err.splitlines()) == 6 and "nowhere" not in err
    wording(err)


# --- contradictions -------------------------------------------------------------------------------

DEEPSPEED = "engine.name=deepspeed"


def test_a_contradiction_names_key_value_and_the_nearest_value_that_would_do(
    wording: Wording,
) -> None:
    for row in MISTAKES["contradictions"]:
        launched, overrides = settings_of(row)
        wording(f"{row}: {complaint(DEMO, *DEMO_SIZES, *overrides, launched=launched)}")
    for row in MISTAKES["fitting"]:
        launched, overrides = settings_of(row)
        validate(load_run(DEMO, [*DEMO_SIZES, *overrides]), launched)


def test_a_warm_up_that_is_a_share_fits_a_run_of_any_length() -> None:
    """The demo's warm-up is 15 of 220 steps, and the first of 5. A number of steps or tokens
    overrides a fraction, and must fit.
    """

    def warmup(*words: str) -> int:
        config = load_run(DEMO, words)
        validate(replace(config, model=replace(config.model, vocab_size=100)), 1)
        schedule = Schedule.of(config)
        return schedule.warmup_samples // schedule.batch_samples

    assert [warmup(f"train.steps={steps}") for steps in (220, 2200, 20, 5, 2, 1)] == [
        15,
        154,
        1,
        1,
        1,
        0,
    ]
    assert warmup() == 15 and warmup("train.steps=5", "optimizer.warmup_fraction=0.99") == 4
    assert warmup("optimizer.warmup_steps=0") == 0
    assert warmup(f"optimizer.warmup_tokens={7 * 4 * 256}") == 7
    with pytest.raises(
        ConfigError, match="optimizer.warmup_steps = 15 does not fit: .* the largest that fits: 4"
    ):
        warmup("train.steps=5", "optimizer.warmup_steps=15")


def test_a_plan_takes_the_world_size_that_the_configuration_asks_for() -> None:
    assert (
        prepare(load_run(CONFIGS / "fem_sm_1.3b_100bt.yaml"), None, plan_only=True).world_size == 8
    )
    config = load_run(
        CONFIGS / "transformer_340m_15bt.yaml",
        settings_of("1 parallel.world_size=null TP=2 PP=3")[1],
    )
    assert planned_world_size(config) == 6


@pytest.mark.parametrize("mixer", [name for name in MIXERS if "TP" in MIXERS[name].layouts])
def test_every_mixer_can_be_split_at_the_papers_sizes(mixer: str) -> None:
    for run, tensor in (
        ("transformer_1.3b_100bt", 2),
        ("transformer_1.3b_100bt", 8),
        ("transformer_340m_15bt", 4),
    ):
        settings = [f"model.mixer={mixer}", f"parallel.tensor_model_parallel_size={tensor}"]
        settings += ["model.second_order.exact_max_length=4096"] if mixer == "mha2nd" else []
        validate(load_run(CONFIGS / f"{run}.yaml", settings), 8)


# --- the schema and the command -------------------------------------------------------------------


def test_every_field_is_documented_and_the_page_is_up_to_date() -> None:
    assert [
        key for key, item, _ in walk(RunConfig) if not spec(item).doc.endswith((".", ")"))
    ] == []
    assert reference_page.PAGE.read_text(encoding="utf-8") == reference_page.page(), (
        "run: python -m pretrain.reference_page"
    )


def lightly(*words: str, first: str = "") -> subprocess.CompletedProcess[str]:
    """Run ``python -m pretrain`` in another process, which must not import heavy packages.

    first: code to run before.
    """
    code = (
        f"{first}import sys; from pretrain.__main__ import main; code = main(sys.argv[1:]); "
        "assert not {'torch', 'numpy', 'megatron', 'deepspeed'} & set(sys.modules); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("place", "stop"), [("a regular file", []), ("a folder of another's", ["--check"])]
)
def test_an_unwritable_run_directory_is_reported_without_torch(
    place: str, stop: list[str], tmp_path: Path
) -> None:
    """Root may write anywhere, so the test simulates another user's folder by os.access in this
    process.
    """
    folder = tmp_path / "there"
    folder.mkdir() if "folder" in place else folder.touch()
    deny = f"import os; os.access = lambda path, mode: str(path) != {str(folder)!r}; "
    done = lightly(DEMO, f"run_dir={folder / 'deeper' / 'run'}", *stop, first=deny)
    assert done.returncode == 2
    assert f"run_dir = {folder / 'deeper' / 'run'}: {folder} is not" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_names_examples_exit_codes_and_a_sections_keys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def printed(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*words])
        assert ended.value.code == (2 if "modle" in words else 0)
        return "".join(capsys.readouterr())

    text = printed("--help")
    assert "configs/run/demo.yaml --plan" in text and "[section.key=value ...]" in text
    codes = (Exit.DONE, Exit.FAULT, Exit.WRONG_INPUT, Exit.DIVERGED, Exit.IN_USE)
    assert all(re.search(rf"^ *{code.value}  ", text, re.M) for code in codes)
    keys = [(key, kind) for key, _, kind in walk(RunConfig) if not dataclasses.is_dataclass(kind)]
    for section in ("model", "model.fem", "optimizer"):
        report = re.findall(r"^([\w.]+) = ", printed("--help", section), re.M)
        assert report == [key for key, _ in keys if key.startswith(section + ".")]
    assert "no such section; did you mean model?" in printed("--help", "modle")


def test_the_run_directory_may_name_the_mixer() -> None:
    config = load_run(DEMO, ["run_dir=x/{mixer}", "model.pattern=[fem_gla, cem]"])
    assert run_directory(config) == Path("x/fem_gla-cem")
    assert run_directory(load_run(DEMO, [])) != run_directory(load_run(DEMO, ["model.mixer=cem"]))


# --- --resolve and --check ------------------------------------------------------------------------

ODD = "name='1e5: $(touch x) \"{}'"  # text that YAML and shells may interpret
ELSEWHERE = ["checkpoint.load=../other/run", "checkpoint.fork=null"]
OVERRIDES = [
    [],
    ["run_dir=x/{mixer}/ü y", ODD],
    ["run_dir=null", ODD, *ELSEWHERE],
    ["run_dir=./a//b/"],
]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_the_printed_file_is_the_same_run(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # this folder contains no data
    for number, overrides in enumerate(OVERRIDES):
        assert main([str(path), *overrides, "--resolve"]) == 0
        out, err = capsys.readouterr()
        assert err == "" and yaml.safe_load(out)["run_dir"]
        wanted = load_run(path, overrides)
        (tmp_path / f"{number}.yaml").write_text(out)
        found = load_run(tmp_path / f"{number}.yaml")
        assert found == replace(wanted, run_dir=str(run_directory(wanted)))
        assert plain(found)["data"] == plain(wanted)["data"], "paths stay as they were written"
        assert main([str(tmp_path / f"{number}.yaml"), "--resolve"]) == 0
        assert capsys.readouterr().out == out, "resolving is done once"


def test_mistakes_are_one_line_and_data_that_is_there_is_inspected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def output_of(*words: str, code: int = 0) -> str:
        assert main([*words]) == code
        out, err = capsys.readouterr()
        assert err.count("\n") == (code != 0)
        return err or out

    monkeypatch.chdir(tmp_path)
    assert "no CONFIG.yaml: name a run" in output_of(code=2)
    assert "name CONFIG.yaml first, then the settings" in output_of("train.steps=5", DEMO, code=2)
    folder = output_of(str(CONFIGS), code=2)
    assert all(f" {path.name}" in folder for path in RUNS)
    absent = output_of(DEMO, "--check", code=2)
    assert f"relative paths start at the current folder, {tmp_path}; " in absent
    assert "cannot be combined" in output_of(DEMO, "--resolve", "--check", code=2)
    assert "is not a multiple of train.micro_batch_size" in output_of(
        DEMO, "--resolve", "parallel.world_size=7", code=2
    )
    data = [
        f"data.train.0.prefix={write_folder(tmp_path / 'data') / 'train'}",
        "data.valid=[]",
        "data.test=[]",
        "data.seq_length=64",
    ]
    assert "data_prep run" in output_of(DEMO, "--check", code=2), "the demo's data are not here"
    assert output_of(DEMO, *data, "--check").count("\n") == 1
    small = [*data, "model.vocab_size=512", "--plan", "--check"]
    assert "fits H100" in output_of(DEMO, *small, "log.device=H100").splitlines()[-1]
    assert "log.device is null" in output_of(DEMO, *small).splitlines()[-1]
    large = output_of(
        DEMO, *small, "log.device=H100", "model.num_layers=100", "model.hidden_size=12288", code=2
    )
    assert large.startswith("pretrain: error: log.device = H100 has 79 GiB of memory")
    resolved = yaml.safe_load(output_of(DEMO, *data, "--resolve"))
    assert resolved["model"]["vocab_size"] is None, "what the data tells stays for the run to read"
    (tmp_path / "data" / "train.bin").write_bytes(b"0123456789")
    assert "damaged or replaced" in output_of(DEMO, *data, "--resolve", code=2)
    assert "damaged or replaced" in output_of(DEMO, *data, "--check", code=2)


@pytest.mark.parametrize(
    "words",
    [
        [DEMO, "--resolve"],
        [str(CONFIGS / "fem_sm_1.3b_100bt.yaml"), "--plan"],
        [DEMO, DEEPSPEED, "--plan"],
    ],
)
def test_what_prints_and_what_refuses_imports_nothing_heavy_and_needs_no_data(
    words: list[str],
) -> None:
    more = (
        ["parallel.pipeline_model_parallel_size=2", "model.vocab_size=4096"]
        if DEEPSPEED in words
        else []
    )
    done = lightly(*words, *more)
    assert (done.returncode, done.stderr.count("\n")) == ((2, 1) if more else (0, 0)), done.stderr
    assert "1.3b" not in words[0] or "1,374,595,840" in done.stdout


def test_older_names_of_keys_are_read(tmp_path: Path) -> None:
    """Older names work in files, on the command line and in a model's saved fields; together with
    the new name they are unknown keys.
    """
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {mixer: transformer, attention: {rope_scaling: llama3, rope_factor: 4, head_dim:"
        " 8}}\n"
    )
    model = load_run(path, ["model.attention.rope_original_length=99"]).model
    assert (model.rope_scaling, model.attention.head_dim) == (RopeScaling("llama3", 4.0, 99), 8)
    assert (
        load_run(
            path, ["model.rope_scaling.factor=2", "model.attention={rope_scaling: linear}"]
        ).model.rope_scaling.kind
        == "linear"
    )
    assert load_run(path, ["model.rope_scaling.factor=2"]).model.rope_scaling == RopeScaling(
        "llama3", 2.0
    )
    fields = dataclasses.asdict(model)
    new, fields["attention"]["rope_scaling"] = fields.pop("rope_scaling"), "llama3"
    fields["attention"] |= {
        f"rope_{key}": new[key]
        for key in ("factor", "low_freq_factor", "high_freq_factor", "original_length")
    }
    assert ModelConfig.from_dict(fields) == model
    path.write_text("model: {attention: {rope_factor: 4}, rope_scaling: {factor: 2}}\n")
    with pytest.raises(
        ConfigError,
        match=r"unknown key model.attention.rope_factor; did you mean model.rope_scaling.factor\?",
    ):
        load_run(path)


@pytest.mark.parametrize(
    ("overrides", "cuda", "reduce_and_gather"),
    [
        ([], False, (False, False)),
        ([], True, (True, True)),
        (["parallel.use_distributed_optimizer=false"], True, (True, False)),
        (["parallel.overlap_grad_reduce=false"], True, (False, False)),
        (["parallel.overlap_param_gather=true"], False, (True, True)),
        (["engine.name=deepspeed", "engine.zero_stage=2"], True, (False, False)),
        (["engine.name=deepspeed", "engine.zero_stage=3"], True, (True, False)),
    ],
)
def test_communication_overlaps_where_null_leaves_it_to_engine_and_machine(
    overrides: list[str], cuda: bool, reduce_and_gather: tuple[bool, bool]
) -> None:
    config = load_run(DEMO, overrides)
    layout = config.parallel.settled(config.engine, cuda=cuda)
    assert (layout.overlap_grad_reduce, layout.overlap_param_gather) == reduce_and_gather
