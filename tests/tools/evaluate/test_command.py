"""Tests of ``python -m tools.evaluate`` as a command: results, skipped and repeated work, mistakes
in one line, exit codes.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fem_common.errors import ConfigError, InUse
from tests.tools.evaluate.tiny import llama_folder, suite_file, task_folder
from tests.tools.refusals import Refused
from tests.wording import Wording
from tools.evaluate.__main__ import main, named
from tools.evaluate.harness import Adaptor, Answers, request_key

CHOICES = "task: tiny_choices, metric: acc_norm, label: Choices, fewshot: 0"
GROUP = "task: tiny_group, fewshot: 1"
WRITTEN = "task: tiny_written, metric: exact_match"
WORDS = "task: tiny_words"
PERPLEXITY = "task: tiny_words, name: tiny_words_ppl, metric: perplexity, higher_is_better: false"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(autouse=True)
def settings_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the environment variables that the command sets."""
    for name in ("TQDM_DISABLE", "TOKENIZERS_PARALLELISM", "HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")


@pytest.fixture
def run(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Run the command on the model and the suite s.yaml in its folder with tasks/; return (exit
    code, stdout, stderr).
    """
    monkeypatch.chdir(tmp_path)
    task_folder(tmp_path / "tasks")
    suite_file(tmp_path / "s.yaml", WORDS)

    def call(
        *arguments: str, model: str | None = None, suite: str = "s.yaml"
    ) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(
            [
                model or f"llama={llama}",
                "--suite",
                suite,
                "--out",
                "out",
                "--device",
                "cpu",
                *arguments,
            ]
        )
        report = capsys.readouterr()
        return code, report.out, report.err

    return call


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of rows in each call of the model for log-likelihoods."""
    seen: list[int] = []
    ask = Adaptor._model_call

    def counted(
        self: Adaptor, inps: torch.Tensor, attn_mask: Any = None, labels: Any = None
    ) -> torch.Tensor:
        seen.append(len(inps))
        return ask(self, inps, attn_mask, labels)

    monkeypatch.setattr(Adaptor, "_model_call", counted)
    return seen


def result(name: str, model: str = "llama") -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(f"out/{model}/{name}.json").read_text())
    return content


def test_an_evaluation_and_its_repetition(run: Run, calls: list[int]) -> None:
    suite_file(Path("s.yaml"), CHOICES, GROUP, WRITTEN, WORDS, PERPLEXITY)
    code, out, err = run("--batch-size", "2")
    assert code == 0, err
    assert "Choices" in out and "llama" in out and "[1/4] llama Choices: acc_norm" in err
    first = result("tiny_choices")
    expected = {
        "format": 1,
        "model": "llama",
        "task": "tiny_choices",
        "label": "Choices",
        "metric": "acc_norm",
        "n": 5,
        "fewshot": 0,
    }
    assert {key: first[key] for key in expected} == expected
    assert first["raw"]["acc_norm,none"] == first["value"]
    assert first["raw"]["acc_norm_stderr,none"] == first["stderr"]
    assert set(result("tiny_group")["subtasks"]) == {"tiny_choices", "tiny_fewer"}
    both = result("tiny_words"), result("tiny_words_ppl")
    assert both[0]["raw"] == both[1]["raw"] and both[0]["value"] <= 1 < both[1]["value"]
    assert sorted(path.name for path in Path("out").iterdir()) == [
        "llama",
        "results.json",
        "table.md",
        "table.png",
    ]
    assert not list(Path("out").rglob("*.jsonl"))

    del calls[:]
    code, again, err = run("--batch-size", "5")
    assert (code, again, calls) == (0, out, [])
    assert err.splitlines()[0] == "s: 4 of 4 tasks have results in out"
    code, out, err = run("--dry-run", "--limit", "2", "--retry")
    assert (code, out.split()[1::2]) == (
        0,
        ["tiny_choices", "tiny_group", "tiny_written", "tiny_words"],
    )


def test_results_of_other_settings_weights_or_tasks_are_not_mixed(
    run: Run, tmp_path: Path, wording: Wording
) -> None:
    model = llama_folder(tmp_path / "changing")

    def another(*arguments: str) -> None:
        before = Path("out/x/tiny_words.json").read_bytes()
        code, out, err = run(*arguments, model=f"x={model}")
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert Path("out/x/tiny_words.json").read_bytes() == before
        wording(
            re.sub("task_digest [0-9a-f]+, now it is [0-9a-f]+", "task_digest A, now it is B", err)
        )
        assert (
            run(*arguments, "--retry", model=f"x={model}")[0]
            == run(*arguments, model=f"x={model}")[0]
            == 0
        )

    assert run(model=f"x={model}")[0] == 0
    for arguments in (["--limit", "3"], ["--dtype", "bfloat16"], ["--seed", "1"]):
        another(*arguments)
    assert run("--retry", model=f"x={model}")[0] == 0
    llama_folder(model, seed=1)
    old = result("tiny_words", "x")
    another()
    assert result("tiny_words", "x")["raw"] != old["raw"]
    rows = Path("tasks/rows.json")
    rows.write_text(rows.read_text().replace(" in", " as"))
    another()
    suite_file(Path("s.yaml"), "task: tiny_words, metric: perplexity, higher_is_better: false")
    another()
    Path("out/x/tiny_words.json").write_text("{")
    another()


def test_a_task_that_fails_is_named_and_the_others_continue(run: Run) -> None:
    suite_file(Path("s.yaml"), "task: tiny_broken", WORDS)
    code, out, err = run()
    assert code == 1 and result("tiny_words")["n"] == 3 and "tiny_broken" in out
    assert (
        "failed: llama tiny_broken: RuntimeError: this task's code is broken"
        " (out/llama/.tiny_broken.failed.txt)" in err
    )
    assert "this task's code is broken" in Path("out/llama/.tiny_broken.failed.txt").read_text()
    data = Path("tasks/data.py")
    data.write_text(
        data.read_text().replace(
            'raise RuntimeError("this task\'s code is broken")', 'return rows("choices", "shown")'
        )
    )
    assert run("--retry")[0] == 0
    assert not Path("out/llama/.tiny_broken.failed.txt").exists()


def test_a_model_that_cannot_be_opened_does_not_stop_the_others(
    run: Run, llama: Path, tmp_path: Path
) -> None:
    broken = llama_folder(tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    code, _, err = run(str(llama), model=str(broken))
    assert code == 1 and "failed: broken: " in err and result("tiny_words")["n"] == 3
    code, _, err = run(model=str(broken))
    assert code == 2 and err.splitlines()[-1].startswith("tools.evaluate: error: ")


@pytest.mark.parametrize("seed", ["-1", str(2**32)])
def test_a_seed_that_numpy_refuses_is_refused_at_once(
    seed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["model", "--seed", seed])
    assert ended.value.code == 2
    assert (
        f"argument --seed: '{seed}': expected a whole number from 0 to" in capsys.readouterr().err
    )


def test_the_quick_suite(run: Run) -> None:
    code, out, err = run("--limit", "4", suite="quick")
    assert code == 0, err
    assert all(label in out for label in ("Brackets", "Keywords", "Next line", "Recall", "Idioms"))
    assert "--limit 4: scores of a part of the examples, not of the complete tasks" in err
    assert "skipped: llama heldout: llama: no held-out data is recorded for it" in err
    (row,) = json.loads(Path("out/results.json").read_text())["models"]
    found = {name: one["bits_per_byte"]["value"] for name, one in row["results"].items()}
    assert len(found) == 5 and all(value > 0 for value in found.values())
    # Each of the four examples is generated, and its gold answer is scored.
    assert result("quick_recall")["requests"] == 8


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("runs/a/fem runs/b/gla", "fem gla"),
        (
            "runs/a/fem runs/b/fem runs/gla/checkpoints/step_00000007",
            "a-fem b-fem gla-step_00000007",
        ),
        ("FEM-SM=runs/a", "FEM-SM"),
        (".", "HERE"),
        ("a/b=c", "b=c"),
    ],
)
def test_models_have_names(words: str, names: str) -> None:
    assert [name for name, _ in named(words.split())] == names.replace(
        "HERE", Path.cwd().name
    ).split()


def test_a_folder_of_runs_is_its_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in ("b", "a"):
        (tmp_path / run / "checkpoints/step_00000001").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    runs = [("a", tmp_path / "a"), ("b", tmp_path / "b")]
    assert named([str(tmp_path)]) == runs
    assert (
        f"{tmp_path} contains runs, which are evaluated: {runs[0][1]}, " in capsys.readouterr().err
    )
    # The demo links its folder to one of its runs, so the folder is this run.
    (tmp_path / "checkpoints").symlink_to("b/checkpoints")
    assert named([str(tmp_path)]) == [(tmp_path.name, tmp_path)]


@pytest.mark.parametrize("words", ["", "a a", "x=a x=b", "=a", ".x=a"])
def test_models_without_names_of_their_own(words: str) -> None:
    with pytest.raises(ConfigError):
        named(words.split())


def test_mistakes_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.chdir(tmp_path)
    suite_file(tmp_path / "s.yaml", WORDS)
    task_folder(tmp_path / "tasks")
    Path("m").mkdir()
    Path("m", "config.json").touch()
    for arguments in ("nowhere/at/all", "", "m --suite papers", "m --device cuda --suite s.yaml"):
        if "cuda" not in arguments or not torch.cuda.is_available():
            refused(main, "tools.evaluate", *arguments.split(), "--out", "out")
    assert not Path("out").exists()


def test_a_list_of_the_suite(capsys: pytest.CaptureFixture[str], wording: Wording) -> None:
    assert main(["--list", "--suite", "paper"]) == 0
    wording(capsys.readouterr().out)


# --- interruptions --------------------------------------------------------------------------------


def killed_amid(kept: Path, arguments: list[str]) -> int:
    """Run the command in a fork of this process that kills itself once a file has more than ten
    lines; return its status.
    """
    child = os.fork()
    if not child:
        # Do not finalize objects of other tests' libraries in this process, which lacks their
        # threads.
        gc.disable()
        ask = Adaptor._model_call

        def dies(*given: Any, **more: Any) -> Any:
            if kept.is_file() and kept.read_bytes().count(b"\n") > 10:
                os.kill(os.getpid(), signal.SIGKILL)
            return ask(*given, **more)

        try:
            Adaptor._model_call = dies  # type: ignore[method-assign]
            main(arguments)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_after_a_kill_the_rest_is_evaluated(tmp_path: Path, llama: Path, calls: list[int]) -> None:
    """Finished tasks are kept; of the interrupted one only the rest is computed, with the same
    numbers; Ctrl-C is reported.
    """
    requested = 60
    many = [
        {"text": f"{i} plus one is", "choices": [" two words", " a number"], "answer": i % 2}
        for i in range(requested)
    ]
    task_folder(tmp_path / "tasks", choices=many)
    suite = suite_file(tmp_path / "s.yaml", WORDS, "task: tiny_choices, fewshot: 2")
    arguments = [
        f"llama={llama}",
        "--suite",
        str(suite),
        "--batch-size",
        "1",
        "--device",
        "cpu",
        "--out",
    ]
    kept = tmp_path / "out/llama/.answers/tiny_choices.jsonl"
    assert killed_amid(kept, [*arguments, str(tmp_path / "out")]) == -signal.SIGKILL
    full = tmp_path / "out/llama/tiny_words.json"
    before, lines = full.stat().st_mtime_ns, kept.read_bytes().split(b"\n")
    known = {json.loads(line)[0] for line in lines[1:-1]}
    assert 10 <= len(known) < 2 * requested
    assert not (tmp_path / "out/llama/tiny_choices.json").exists()
    with kept.open("ab") as file:
        file.write(b'["half a li')  # a crash of the machine can leave half a line

    assert main([*arguments, str(tmp_path / "out")]) == 0
    assert sum(calls) == 2 * requested - len(known)
    assert full.stat().st_mtime_ns == before and not kept.exists()
    assert main([*arguments, str(tmp_path / "other")]) == 0
    results = [
        json.loads((tmp_path / folder / "llama/tiny_choices.json").read_text())
        for folder in ("out", "other")
    ]
    assert results[0] | {"seconds": 0} == results[1] | {"seconds": 0}


def test_an_interruption_is_reported(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Adaptor, "_model_call", interrupt)
    code, _, err = run()
    assert code == 130 and "the same command continues" in err


def test_answers_are_read_back_exactly_and_by_one_process(tmp_path: Path) -> None:
    path = tmp_path / "m/.answers/t.jsonl"
    identity = {"model_key": "a", "limit": None}
    with Answers(path, identity) as answers:
        answers.truncated.add(request_key("loglikelihood", ("x", "y")))
        answers.add_partial("loglikelihood", ("x", "y"), (-1 / 3, True))
        answers.add_partial("generate_until", ("x", {"until": ["\n"]}), "text\n\u2028é")
        answers.add_partial("loglikelihood_rolling", ("x",), -2.5e-300)
        answers.add_partial("generate_until", ("x", {"do_sample": True}), "drawn")
        known = dict(answers.known)
        with pytest.raises(InUse, match="another process is evaluating t of m"):
            Answers(path, identity).__enter__()
    with Answers(path, identity) as answers:
        assert answers.known == known and len(known) == 3 and len(answers.truncated) == 1
        assert (-1 / 3, True) in answers.known.values()
    for other in ({**identity, "model_key": "b"}, {**identity, "limit": 3}):
        with Answers(path, other) as answers:
            assert answers.known == {} and answers.truncated == set()


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_file_cut_anywhere_gives_whole_answers_or_none(tmp_path: Path, cut: int) -> None:
    path, identity = tmp_path / "m/.answers/t.jsonl", {"model_key": "a"}
    with Answers(path, identity) as answers:
        for number in range(3):
            answers.add_partial("loglikelihood", (str(number), "y"), (-float(number), False))
        known = dict(answers.known)
    path.write_bytes(path.read_bytes()[:-cut])
    with Answers(path, identity) as answers:
        assert answers.known.items() <= known.items() and len(answers.known) in (1, 2)
        answers.add_partial("loglikelihood", ("2", "y"), (-2.0, False))
    with Answers(path, identity) as answers:
        assert answers.known.items() <= known.items()
        assert request_key("loglikelihood", ("2", "y")) in answers.known
