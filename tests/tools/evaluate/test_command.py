"""``python -m tools.evaluate`` as a user has it: results, what is asked again and what is not, mistakes in one line, exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fem_common.errors import ConfigError
from tests.tools.evaluate.tiny import llama_folder, suite_file, task_folder
from tools.evaluate.__main__ import main, named
from tools.evaluate.harness import Adaptor

CHOICES = "task: tiny_choices, metric: acc_norm, label: Choices, fewshot: 0"
GROUP = "task: tiny_group, fewshot: 1"
WRITTEN = "task: tiny_written, metric: exact_match"
WORDS = "task: tiny_words"
PERPLEXITY = "task: tiny_words, name: tiny_words_ppl, metric: perplexity, higher_is_better: false"
BROKEN = "task: tiny_broken"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def run(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command on the model and the suite s.yaml beside tasks/, in its folder; (exit code, stdout, stderr)."""
    for name in ("TQDM_DISABLE", "TOKENIZERS_PARALLELISM", "HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")  # so that what the command sets is set back
    monkeypatch.chdir(tmp_path)
    task_folder(tmp_path / "tasks")
    suite_file(tmp_path / "s.yaml", CHOICES, GROUP, WRITTEN, WORDS, PERPLEXITY)

    def call(*arguments: str, model: str | None = None, suite: str = "s.yaml") -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([model or f"llama={llama}", "--suite", suite, "--out", "out", "--device", "cpu", *arguments])
        told = capsys.readouterr()
        return code, told.out, told.err

    return call


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The requests of each call of the model for log-likelihoods."""
    seen: list[int] = []
    ask = Adaptor._model_call

    def counted(self: Adaptor, inps: torch.Tensor, attn_mask: Any = None, labels: Any = None) -> torch.Tensor:
        seen.append(len(inps))
        return ask(self, inps, attn_mask, labels)

    monkeypatch.setattr(Adaptor, "_model_call", counted)
    return seen


def result(name: str, model: str = "llama") -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(f"out/{model}/{name}.json").read_text())
    return content


def test_an_evaluation_and_its_repetition(run: Run, calls: list[int]) -> None:
    code, out, err = run("--batch-size", "2")
    assert code == 0, err
    assert "Choices" in out and "llama" in out
    assert "[1/4] llama Choices: acc_norm" in err
    first = result("tiny_choices")
    expected = {"format": 1, "model": "llama", "task": "tiny_choices", "label": "Choices", "metric": "acc_norm", "n": 5, "fewshot": 0}
    assert {key: first[key] for key in expected} == expected
    assert first["raw"]["acc_norm,none"] == first["value"] and first["raw"]["acc_norm_stderr,none"] == first["stderr"]
    assert set(result("tiny_group")["subtasks"]) == {"tiny_choices", "tiny_fewer"}
    both = result("tiny_words"), result("tiny_words_ppl")
    assert both[0]["raw"] == both[1]["raw"] and both[0]["value"] <= 1 < both[1]["value"]
    assert sorted(path.name for path in Path("out").iterdir()) == ["llama", "results.json", "table.md", "table.png"]
    assert not list(Path("out").rglob("*.jsonl"))

    del calls[:]
    code, again, err = run("--batch-size", "5")
    assert (code, again, calls) == (0, out, [])
    assert err.splitlines()[0] == "s: 4 of 4 tasks have their results in out"
    code, out, err = run("--dry-run", "--limit", "2", "--retry")
    assert (code, out.split()[1::2]) == (0, ["tiny_choices", "tiny_group", "tiny_written", "tiny_words"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["--limit", "3"], "made with limit not given, now it is 3"), (["--dtype", "bfloat16"], "dtype"), (["--seed", "1"], "seed")],
)
def test_other_settings_are_not_mixed(run: Run, arguments: list[str], told: str) -> None:
    suite_file(Path("s.yaml"), WORDS)
    assert run()[0] == 0
    before = Path("out/llama/tiny_words.json").read_bytes()
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert told in err and "out/llama/tiny_words.json" in err and "--retry" in err and err.count("\n") == 1
    assert Path("out/llama/tiny_words.json").read_bytes() == before
    assert run(*arguments, "--retry")[0] == 0
    assert run(*arguments)[0] == 0


def test_other_weights_and_other_tasks_are_not_mixed(run: Run, tmp_path: Path) -> None:
    suite_file(Path("s.yaml"), WORDS)
    model = llama_folder(tmp_path / "changing")
    assert run(model=f"x={model}")[0] == 0
    llama_folder(model, seed=1)
    code, _, err = run(model=f"x={model}")
    assert code == 2 and "out/x/tiny_words.json is of other weights than x has now" in err
    old = result("tiny_words", "x")
    assert run("--retry", model=f"x={model}")[0] == 0
    assert result("tiny_words", "x")["raw"] != old["raw"]
    rows = Path("tasks/rows.json")
    rows.write_text(rows.read_text().replace(" in", " as"))
    code, _, err = run(model=f"x={model}")
    assert code == 2 and "task_digest" in err
    suite_file(Path("s.yaml"), "task: tiny_words, metric: perplexity, higher_is_better: false")
    assert run("--retry", model=f"x={model}")[0] == 0
    Path("out/x/tiny_words.json").write_text("{")
    code, _, err = run(model=f"x={model}")
    assert code == 2 and "is not JSON" in err


def test_a_task_that_fails_is_named_and_the_others_go_on(run: Run) -> None:
    suite_file(Path("s.yaml"), BROKEN, WORDS)
    code, out, err = run()
    assert code == 1
    assert result("tiny_words")["n"] == 3
    assert "failed: llama tiny_broken: RuntimeError: this task's code is broken (out/llama/.tiny_broken.failed.txt)" in err
    assert "this task's code is broken" in Path("out/llama/.tiny_broken.failed.txt").read_text()
    assert "tiny_broken" in out
    data = Path("tasks/data.py")
    data.write_text(data.read_text().replace('raise RuntimeError("this task\'s code is broken")', 'return rows("choices", "shown")'))
    assert run("--retry")[0] == 0
    assert not Path("out/llama/.tiny_broken.failed.txt").exists()


def test_a_model_that_cannot_be_opened_does_not_stop_the_others(run: Run, llama: Path, tmp_path: Path) -> None:
    suite_file(Path("s.yaml"), WORDS)
    broken = llama_folder(tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    code, _, err = run(str(llama), model=str(broken))
    assert code == 1 and "failed: broken: " in err
    assert result("tiny_words")["n"] == 3
    code, _, err = run(model=str(broken))
    assert code == 2 and err.splitlines()[-1].startswith("tools.evaluate: error: ")


def test_the_quick_suite(run: Run) -> None:
    code, out, err = run("--limit", "4", suite="quick")
    assert code == 0, err
    for label in ("Brackets", "Keywords", "Next line", "Recall", "Idioms"):
        assert label in out
    assert "--limit 4: these are not the tasks' scores" in err
    assert "skipped: llama heldout: llama: nothing tells its held-out data" in err


def test_models_have_names(tmp_path: Path) -> None:
    here = Path.cwd()
    assert named(["runs/a/fem", "runs/b/gla"]) == [("fem", Path("runs/a/fem")), ("gla", Path("runs/b/gla"))]
    assert [name for name, _ in named(["runs/a/fem", "runs/b/fem", "runs/gla/checkpoints/step_00000007"])] == [
        "a-fem",
        "b-fem",
        "gla-step_00000007",
    ]
    assert named(["FEM-SM=runs/a"]) == [("FEM-SM", Path("runs/a"))]
    assert [name for name, _ in named(["."])] == [here.name]
    assert named(["a/b=c"]) == [("b=c", Path("a/b=c"))]
    for words in ([], ["a", "a"], ["x=a", "x=b"], ["=a"], [".x=a"]):
        with pytest.raises(ConfigError):
            named(words)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere/at/all"], "there is no folder nowhere/at/all"),
        ([], "no MODEL"),
        (["m", "--suite", "papers"], "did you mean paper?"),
        (["m", "--device", "cuda", "--suite", "s.yaml"], "no such device"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], told: str, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    Path("m").mkdir()
    code = main([*arguments, "--out", "out"])
    err = capsys.readouterr().err
    assert code == 2 and err.count("\n") == 1 and err.startswith("tools.evaluate: error: ") and told in err
    assert not Path("out").exists()


def test_a_list_of_the_suite(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--suite", "paper"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "paper: Evaluation suite of the Free Energy Mixer" and len(lines) == 18
    assert lines[2].split() == ["MMLU-P", "leaderboard_mmlu_pro", "5", "acc", "0.1", "leaderboard"]


def test_an_interruption_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    suite_file(Path("s.yaml"), WORDS)
    with monkeypatch.context() as patched:
        patched.setattr(Adaptor, "_model_call", interrupt)
        code, _, err = run()
    assert code == 130 and "the same command goes on" in err
    assert run()[0] == 0
