"""A command that was killed goes on where it was: tasks that are done stay, of the one that was asked only the rest is asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fem_common.errors import InUse
from tests.tools.evaluate.tiny import llama_folder, suite_file, task_folder
from tools.evaluate.__main__ import main
from tools.evaluate.harness import Adaptor, Answers, request_key

ROOT = Path(__file__).resolve().parents[3]
ROWS = 60


def test_after_a_kill_the_rest_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama_folder(tmp_path / "llama")
    many = [{"text": f"{i} plus one is", "choices": [" two words", " a number"], "answer": i % 2} for i in range(ROWS)]
    task_folder(tmp_path / "tasks", choices=many)
    suite = suite_file(tmp_path / "s.yaml", "task: tiny_words", "task: tiny_choices, fewshot: 2")
    arguments = [str(model), "--suite", str(suite), "--batch-size", "1", "--device", "cpu"]
    command = [sys.executable, "-m", "tools.evaluate", *arguments, "--out", str(tmp_path / "out")]
    kept = tmp_path / "out/llama/.answers/tiny_choices.jsonl"
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while process.poll() is None and not (kept.is_file() and kept.read_bytes().count(b"\n") > 10):
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL, "it was faster than the test: give it more rows"
    done = tmp_path / "out/llama/tiny_words.json"
    before, lines = done.stat().st_mtime_ns, kept.read_bytes().split(b"\n")
    known = {json.loads(line)[0] for line in lines[1:-1]}
    assert 10 <= len(known) < 2 * ROWS and not (tmp_path / "out/llama/tiny_choices.json").exists()
    with kept.open("ab") as file:
        file.write(b'["half a li')  # what a crash of the machine can leave

    rows = counted(monkeypatch)
    for name in ("TQDM_DISABLE", "TOKENIZERS_PARALLELISM", "HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    assert sum(rows) == 2 * ROWS - len(known)
    assert done.stat().st_mtime_ns == before and not kept.exists()
    del rows[:]
    assert main([*arguments, "--out", str(tmp_path / "other")]) == 0
    results = [json.loads((tmp_path / folder / "llama/tiny_choices.json").read_text()) for folder in ("out", "other")]
    for content in results:
        del content["seconds"]
    assert results[0] == results[1]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call of the model, from now on; the first task's are in it where it is asked."""
    seen: list[int] = []
    ask = Adaptor._model_call

    def call(self: Adaptor, inps: torch.Tensor, attn_mask: Any = None, labels: Any = None) -> torch.Tensor:
        seen.append(len(inps))
        return ask(self, inps, attn_mask, labels)

    monkeypatch.setattr(Adaptor, "_model_call", call)
    return seen


# --- the file of answers ---------------------------------------------------------------------------------------------------------


def test_answers_are_read_back_exactly(tmp_path: Path) -> None:
    path, identity = tmp_path / "m/.answers/t.jsonl", {"model_key": "a", "limit": None}
    with Answers(path, identity) as answers:
        answers.truncated.add(request_key("loglikelihood", ("x", "y")))
        answers.add_partial("loglikelihood", ("x", "y"), (-1 / 3, True))
        answers.add_partial("generate_until", ("x", {"until": ["\n"]}), "text\n\u2028é")
        answers.add_partial("loglikelihood_rolling", ("x",), -2.5e-300)
        answers.add_partial("generate_until", ("x", {"do_sample": True}), "drawn")
        known = dict(answers.known)
    with Answers(path, identity) as answers:
        assert answers.known == known and len(known) == 3
        assert (-1 / 3, True) in answers.known.values()
        assert len(answers.truncated) == 1
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
        assert answers.known.items() <= known.items() and request_key("loglikelihood", ("2", "y")) in answers.known


def test_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "m/.answers/t.jsonl"
    with Answers(path, {}), pytest.raises(InUse, match="another process is evaluating t of m"):
        Answers(path, {}).__enter__()
    with Answers(path, {}):
        pass
