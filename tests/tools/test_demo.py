"""Tests of the demo's parts: numbers, texts, picture, and its commands; the complete demo is marked
slow.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
import torch
from matplotlib import image

from fem_common.errors import ConfigError
from fem_common.plot import smooth
from pretrain.config import load_run
from pretrain.data.facts import check_contents, check_data
from pretrain.report.history import History
from tests.tools.refusals import Refused
from tests.tools.refusals import refused as refused
from tools.demo import pages, report, stock_transformers
from tools.demo.__main__ import ENVIRONMENT, main
from tools.demo.report import checkpoint_step, largest_difference
from tools.demo.shell import DemoError, Shell, printed, terminate_children
from tools.demo.steps import VOCABULARY, Demo, configuration_hash
from tools.evaluate.suite import load_suite

ROOT = Path(__file__).parents[2]
RUN = ROOT / "configs" / "run" / "demo.yaml"


def history(offset: float = 0.0, steps: int = 60) -> History:
    entries = tuple(
        {
            "step": step,
            "loss": 8.0 * step**-0.1 + offset,
            "consumed_tokens": step * 4096,
            "tokens_per_second": 1000.0 + step,
        }
        for step in range(1, steps + 1)
    )
    return History(entries, ((20, 6.0 + offset), (steps, 5.0 + offset)))


def findings(fem_loss: float = 4.9, plain_loss: float = 5.0) -> dict[str, Any]:
    """Return a report in the demo's format with invented measurements."""
    split, models = {"tokens": 1000, "text_bytes": 3500}, {}
    for name, loss, parameters in (
        ("fem", fem_loss, 3_490_000),
        ("transformer", plain_loss, 3_440_000),
    ):
        found = {
            "heldout_nats_per_token": loss,
            "heldout_tokens": 999,
            "parameters": parameters,
            "sample": "def read(self):",
        }
        models[name] = report.model_findings(found, history(), split)
    entropy = {"heldout_entropy": 6.5, "bits_per_byte": report.bits_per_byte(6.5, split)}
    parity = {
        "resume_steps": 3,
        "resume_relative_loss_difference": 1.25e-8,
        "logit_difference": {"fem": 2.5e-6, "transformer": 3.5e-6},
        "cache_difference": {"fem": 4.5e-6, "transformer": 5.5e-6},
    }
    run = {"steps": 60, "stopped_at": 25, "batch_tokens": 4096, "configuration": "0123456789ab"}
    machine = {"cores": 2, "python": "3.11.0", "torch": "2.13.0"}
    return {"models": models, "unigram": entropy, "parity": parity, "run": run, "machine": machine}


# --- numbers --------------------------------------------------------------------------------------


def test_the_unigram_entropy_is_the_frequencies_own(tmp_path: Path) -> None:
    np.asarray([3, 4, 5, 6] * 50, dtype=np.uint16).tofile(tmp_path / "valid.bin")
    # The entropy of four equally frequent tokens.
    found = report.unigram_entropy(tmp_path / "valid.bin", vocabulary=10)
    assert found == pytest.approx(math.log(4), abs=1e-12)
    # A token of one byte at ln 2 nats is one bit per byte; a token of two bytes has half of that.
    assert report.bits_per_byte(math.log(2), {"tokens": 10, "text_bytes": 10}) == pytest.approx(1.0)
    assert report.bits_per_byte(math.log(2), {"tokens": 10, "text_bytes": 20}) == pytest.approx(0.5)


class NextId(torch.nn.Module):
    """Model that predicts token i + 1 after i with certainty, with the interface of an exported
    model.
    """

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(
            logits=50.0 * torch.nn.functional.one_hot((input_ids + 1) % 40, 40).float()
        )


@pytest.mark.parametrize("count", [65, 70])  # complete windows of 32, and a shorter last one
def test_the_heldout_loss_asks_for_every_token_but_the_first_once(count: int) -> None:
    right = np.arange(count, dtype=np.uint16) % 40
    loss, predicted = stock_transformers.heldout_loss(NextId(), right, length=32, batch=2)
    # 39 exp(-50), far below the resolution of float32.
    assert predicted == count - 1 and loss == pytest.approx(0.0, abs=1e-6)
    wrong = right.copy()
    wrong[-1] = 0 if right[-1] else 1
    # In one of count - 1 targets, the logit of the target is now 50 below that of the predicted
    # token.
    assert stock_transformers.heldout_loss(NextId(), wrong, length=32, batch=2)[0] == pytest.approx(
        50 / (count - 1), rel=1e-5
    )
    reference = NextId()(torch.arange(8).view(2, 4), use_cache=False).logits.numpy()
    assert stock_transformers.logit_difference(NextId(), right, reference) == 0.0
    reference[1, 2, 3] += 0.25
    assert stock_transformers.logit_difference(NextId(), right, reference) == 0.25


def test_a_runs_history(tmp_path: Path) -> None:
    """The last line of a repeated step counts, incomplete lines are ignored; the newest checkpoint
    is the one named by latest.
    """
    lines: list[dict[str, Any]] = [
        {"step": 1, "loss": 8.0, "tokens_per_second": 10.0},
        {"step": 2, "loss": 7.0, "tokens_per_second": 10.0},
        {"message": "text"},
        {"step": 2, "valid_loss": 7.5},
        {"step": 2, "loss": 6.0, "tokens_per_second": 30.0},
    ]
    text = ""
    for line in lines:
        text += '{"step": 1, "lo\n' + json.dumps(line) + "\n"
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 3, "lo')
    found = History.read(tmp_path)
    assert found.losses() == {1: 8.0, 2: 6.0} and found.validations == ((2, 7.5),)
    assert (found.last_step, found.part(after=1).tokens_per_second()) == (2, 30.0)
    assert History.read(tmp_path / "nowhere").last_step == 0
    with pytest.raises(DemoError, match="no checkpoint"):
        checkpoint_step(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step_00000064\n")
    assert checkpoint_step(tmp_path) == 64
    # Only steps that both have.
    steps, difference = largest_difference({5: 2.0, 6: 4.0, 7: 9.0}, {4: 1.0, 5: 2.0, 6: 4.2})
    assert (steps, round(difference, 12)) == (2, round(0.2 / 4.2, 12))
    with pytest.raises(DemoError, match="no step in common"):
        largest_difference({1: 2.0}, {2: 2.0})


# --- words and picture ----------------------------------------------------------------------------


def test_the_words() -> None:
    assert report.shortfall(findings(fem_loss=5.39)) is None
    assert "must be at most 5.400" in (report.shortfall(findings(fem_loss=5.41)) or "")


def test_the_picture_shows_both_models(tmp_path: Path) -> None:
    pages.draw(history(), history(offset=0.1), findings(), tmp_path / "report.png")
    pixels = np.round(image.imread(tmp_path / "report.png")[..., :3] * 255).astype(int)
    for colour in (pages.FEM, pages.TRANSFORMER):
        exact = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        # At least as many pixels as a line of 100 pixels.
        assert (np.abs(pixels - exact).max(axis=-1) <= 1).sum() > 500
    line = 7.0 - 0.01 * np.arange(50)
    noise = np.random.default_rng(0).normal(size=50)
    assert smooth(line, 3.0) == pytest.approx(line, abs=1e-9)  # least squares in float64
    assert smooth(line + noise, 3.0).std() < (line + noise).std() / 1.5


@pytest.mark.parametrize("steps", [20, 220])
def test_the_legend_of_the_picture_covers_no_curve(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is outside the axes and inside the figure, also if the run stopped at its first step."""
    figures: list[Any] = []
    monkeypatch.setattr(pages, "save", lambda figure, file: figures.append(figure))
    found = findings()
    found["run"] |= {"steps": steps, "stopped_at": 1}
    pages.draw(history(steps=steps), history(0.1, steps), found, Path())
    (figure,) = figures
    figure.canvas.draw()
    (legend,), (axes,) = figure.legends, figure.axes
    box = legend.get_window_extent()
    assert any("SIGTERM" in text.get_text() for text in legend.get_texts())
    assert axes.get_legend() is None and not box.overlaps(axes.get_tightbbox())
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0


def test_the_documents_have_the_demos_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only text between the markers of the project's pages changes; a second update changes nothing
    further.
    """
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    pages.check(ROOT, ())
    with pytest.raises(ConfigError, match=r"README.md does not contain <!-- demo:begin -->"):
        pages.check(tmp_path, ())
    out = tmp_path / "demo"
    places = {name: tmp_path / page for name, page in pages.PAGES.items()}
    (tmp_path / "docs").mkdir()
    (out / "evaluation").mkdir(parents=True)
    for name, page in places.items():
        page.write_text(f"above\n<!-- {name}:begin -->\nstale\n<!-- {name}:end -->\nbelow\n")
    (out / "report.png").write_bytes(b"curves")
    (out / "evaluation" / "table.png").write_bytes(b"dots")
    (out / "evaluation" / "table.md").write_text(
        "# Evaluation\n\n| Model | Recall |\n|---|---|\n| fem | 0.25 |\n\n| other | table |\n"
    )
    pages.check(tmp_path, ())
    pages.write(tmp_path, out, findings())
    texts = {name: page.read_text() for name, page in places.items()}
    for text in texts.values():
        assert text.startswith("above\n")
        assert text.endswith("\nbelow\n")
        assert "stale" not in text
        assert pages.COMMAND in text
        assert (
            max(len(line) for line in text.splitlines() if not line.startswith(("|", "!["))) <= 100
        )
    assert "| FEM-softmax | 4.900 | " in texts["demo"]
    assert " | 3.44M | 1,030 |" in texts["demo"]
    assert "1.2e-08" in texts["demo"]
    assert "| Model | Recall |\n|---|---|\n| fem | 0.25 |\n\n" in texts["evaluation"]
    assert "other" not in texts["evaluation"]
    assert [(tmp_path / "docs" / name).read_bytes() for name in ("demo.png", "evaluation.png")] == [
        b"curves",
        b"dots",
    ]
    assert "configuration `0123456789ab`" in " ".join(texts["demo"].split())
    stated = f"configuration `0123456789ab`, suite `{pages.suite_hash()}`"
    evaluated = " ".join(texts["evaluation"].split())
    assert stated in evaluated and "(60 steps of 4,096 tokens, 999 tokens held out)" in evaluated
    pages.write(tmp_path, out, findings())
    assert texts == {name: page.read_text() for name, page in places.items()}


STALE = f"the figures are of another demo: `{pages.COMMAND}` measures them again, idle machine only"


def differences(root: Path, *settings: str) -> list[str]:
    """Return what the pages of the checkout ``root`` state differently from today's demo.

    settings: section.key=value, as if its configuration contained them.
    """
    config = load_run(RUN, settings)
    tokens = config.train.global_batch_size * config.data.seq_length
    size = f"{config.train.steps} steps of {tokens:,} tokens, "
    today = f"configuration `{configuration_hash(ROOT, settings)}`"
    stated, heldout = [], set()
    for name, page in pages.PAGES.items():
        text = (root / page).read_text()
        block = text.partition(f"<!-- {name}:begin -->")[2].partition(f"<!-- {name}:end -->")[0]
        block = " ".join(block.split())
        suite = f"suite `{pages.suite_hash()}`" if name == "evaluation" else ""
        stated += [f"{page}: {part}" for part in (size, today, suite) if part not in block]
        heldout |= {*re.findall(r"([\d,]+) tokens held out", block)} or {"none"}
    return stated if len(heldout) == 1 else [*stated, f"held-out tokens: {heldout}"]


def test_the_published_figures_are_todays_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """README.md and docs/evaluation.md state the size and the hashes of what ``make demo`` runs.

    A change of either recipe, of a shared file or of the suite is found.
    """
    assert not differences(ROOT), STALE
    assert len(differences(ROOT, "train.steps=221")) == 4
    assert len(differences(ROOT, "optimizer.lr=1.0e-3")) == 2
    assert differences(ROOT, "log.interval=7", "run_dir=elsewhere") == []
    columns = load_suite("quick")
    fewer = replace(columns, tasks=columns.tasks[:-1])
    monkeypatch.setattr(pages, "load_suite", lambda _: fewer)
    assert [line.partition(" `")[0] for line in differences(ROOT)] == [
        "docs/evaluation.md: suite"
    ], STALE


def test_the_published_demo_is_make_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--readme`` adds only the evaluation, by the first command of its page, to the same demo."""
    ran: list[Any] = []
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr("tools.demo.steps.run", lambda demo: ran.append(replace(demo, shell=None)))
    monkeypatch.setattr("tools.demo.__main__._publish", lambda found, demo: None)
    monkeypatch.setattr("tools.demo.pages.write", lambda *given: None)
    monkeypatch.setattr(Shell, "run", lambda shell, command, *given: ran.append([*command]))
    recipe = (ROOT / "Makefile").read_text().partition("\ndemo: ")[2].splitlines()[1]
    words = recipe.split()
    assert words[:3] == ["$(PYTHON)", "-m", "tools.demo"]
    assert main(words[3:]) == main(["--readme"]) == 0
    usual, published, evaluation = ran
    assert usual == published
    page = (ROOT / "docs" / "evaluation.md").read_text()
    documented = page.partition("```sh\npython ")[2].partition("\n")[0].partition("  #")[0]
    assert shlex.join(evaluation[1:]) == f"{documented} --out runs/demo/evaluation"


# --- commands -------------------------------------------------------------------------------------


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path, {"DEMO_WORD": "spoken"})


def test_a_command_is_printed_as_typed_and_its_output_shown(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.run(["sh", "-c", "echo $DEMO_WORD; echo aside >&2"], "speaking", 120)
    assert capsys.readouterr().out.splitlines() == [
        "  $ sh -c 'echo $DEMO_WORD; echo aside >&2'",
        "    spoken",
        "    aside",
    ]
    assert (
        printed(["torchrun", "-m", "pretrain", "train.steps=20", "a b"])
        == "torchrun -m pretrain train.steps=20 'a b'"
    )


@pytest.mark.parametrize(
    ("command", "limit", "expected"),
    [
        (["sh", "-c", "exit 3"], 120.0, "^encoding: the command above failed: exit code 3$"),
        (["./nowhere"], 120.0, "nowhere cannot be started: No such file"),
        (["sh", "-c", "kill -TERM $$"], 120.0, "exit code -15"),
        (["sleep", "1000"], 1.0, "took more than 1 s"),
    ],
)
def test_a_failed_command_is_one_line_that_names_it(
    shell: Shell, command: list[str], limit: float, expected: str
) -> None:
    pids = list[int]()
    with pytest.raises(DemoError, match=expected):
        shell.run(command, "encoding", limit, watch=pids.append)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_sigterm_reaches_a_commands_children_and_not_itself(shell: Shell) -> None:
    script = (
        "import subprocess, sys; sys.exit(0 if subprocess.Popen(['sleep', '1000']).wait() == -15"
        " else 1)"
    )
    signalled: list[int] = []

    def watch(pid: int) -> None:
        if psutil.Process(pid).children() and not signalled:
            signalled.append(pid)
            terminate_children(pid)

    shell.run([sys.executable, "-c", script], "waiting", 120, watch)
    assert signalled


PROBE = """
import os, sys, time
print(sys.argv[1:], __name__, os.getcwd(), os.getsid(0) == os.getpid(), sys.stdin.read())
print(os.environ["DEMO_WORD"], file=sys.stderr, flush=True)
with open("how", "a") as file:
    print("decimal" in sys.modules, file=file)
time.sleep(float(sys.argv[1]))
sys.exit(int(sys.argv[2]))
"""
CALLER = """
import sys
from pathlib import Path
from tools.demo.shell import DemoError, Shell
if __name__ == "__main__":
    for forked in ((), ("probe",)):
        shell = Shell(Path.cwd(), {"DEMO_WORD": "spoken"}, forked)
        if forked:
            shell.serve("decimal")
        try:
            shell.run([shell.python, "-m", "probe", *sys.argv[2:]], "probing", float(sys.argv[1]))
        except DemoError as error:
            print(error)
"""


@pytest.mark.parametrize(
    ("limit", "words", "end"),
    [
        ("120", ("0", "0"), "    spoken"),
        ("120", ("0", "3"), "probing: the command above failed: exit code 3"),
        ("5", ("1000", "0"), "probing: the command above took more than 5 s and was ended"),
    ],
)
def test_a_forked_command_is_as_one_in_a_new_interpreter(
    tmp_path: Path, limit: str, words: tuple[str, str], end: str
) -> None:
    """Output, folder, session, closed input, exit code and limit; only its imports are there."""
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "caller.py").write_text(CALLER)
    command = [sys.executable, "caller.py", limit, *words]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr
    printed = done.stdout.splitlines()
    new, forked = printed[: len(printed) // 2], printed[len(printed) // 2 :]
    assert new == forked and new[-1] == end
    assert new[1] == f"    {[*words]} __main__ {tmp_path} True"
    assert (tmp_path / "how").read_text() == "False\nTrue\n"


def test_errors_of_a_user_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    refused: Refused,
) -> None:
    """Figures of another demo or of a busy machine are not written to the documents, and no other
    folder is filled.
    """
    monkeypatch.setattr("os.getloadavg", lambda: (64.0, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for more in (["model.hidden_sise=64"], ["--readme", "train.steps=20"], ["--readme"]):
        refused(main, "tools.demo", "--out", tmp_path / "new", *more)
    (tmp_path / "letters.txt").write_text("not the demo's")
    assert main(["--out", str(tmp_path)]) == 1
    assert "step 1 (data) failed" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["letters.txt"]


@pytest.mark.slow
def test_the_data_step_makes_checks_and_counts_what_the_runs_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = Demo(Shell(ROOT, ENVIRONMENT), tmp_path / "demo", load_run(RUN))
    demo.prepare_data()
    assert f"{demo.out}/data: complete; train" in capsys.readouterr().out
    facts = check_data(load_run(RUN, demo.overrides("fem")))
    assert len(check_contents(facts).sources) == 2 and facts.vocab_size == VOCABULARY
    manifest = json.loads((demo.out / "data" / "manifest.json").read_text())
    assert {split: entry["tokens"] for split, entry in manifest["splits"].items()} == facts.tokens
    assert all(tokens > 20_000 for tokens in facts.tokens.values())
    assert (demo.out / "lengths.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_demo_twice_into_one_folder(tmp_path: Path) -> None:
    """The second, shorter demo starts from the beginning, and reports that it learned too
    little.
    """
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "tools.demo", "--out", str(out)]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr
    found = json.loads((out / "report.json").read_text())
    assert report.shortfall(found) is None
    assert 0 < found["run"]["stopped_at"] < found["run"]["steps"]
    assert (out / "report.png").stat().st_size > 10_000
    assert all(row[1] in first.stdout for row in report.rows(found))
    assert (out / "checkpoints").resolve() == out / "fem" / "checkpoints"
    assert first.stdout.count("Next:") == 1
    for hint in first.stdout.partition("Next:\n")[2].splitlines():
        done = subprocess.run(hint, shell=True, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, (hint, done.stderr)
    second = subprocess.run([*command, "train.steps=20"], cwd=ROOT, capture_output=True, text=True)
    assert second.returncode == 1 and "unchanged" in second.stdout
    assert "nats below the unigram entropy" in second.stderr.splitlines()[-1]
    assert json.loads((out / "report.json").read_text())["run"]["steps"] == 20
