"""The harness's numbers of our models equal loops over the models' logits from the definitions.

The models are in float64; the adaptor computes log-probabilities in fp32, so sums over about ten
tokens agree to about 1e-5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance

from fem_megatron import catalogue
from tests.tools.evaluate.tiny import (
    CHOICES,
    CONTEXT,
    END,
    SHOWN,
    WORDS,
    byte_tokenizer,
    opened,
    suite_file,
    task_folder,
)
from tests.tools.refusals import Refused
from tools.evaluate import results
from tools.evaluate.catalogue import find_tasks
from tools.evaluate.harness import Adaptor, Answered, Answers, NotANumber, ask, bits_per_byte
from tools.evaluate.suite import SuiteTask, load_suite
from tools.hf.open_model import OpenModel

MIXERS = [name for name in catalogue.MIXERS if not name.startswith("fla.")]
TEXTS = [
    ("The sky is", " blue"),
    ("a", "b"),
    ("", "Hello"),
    ("for i in range(", "n):"),
    ("x = 1\ny = 2\n", "z = 3"),
    ("one two three ", "four"),
]
LETTERS = "".join(chr(65 + i % 26) for i in range(2 * CONTEXT))


def encode(text: str) -> list[int]:
    ids: list[int] = byte_tokenizer().encode(text)
    return ids


def log_probabilities(model: OpenModel, ids: list[int]) -> torch.Tensor:
    """Return the log-probabilities of the token after these, from a call with only them."""
    with torch.no_grad():
        return torch.log_softmax(
            model.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].double(), -1
        )


def by_hand(model: OpenModel, context: str, continuation: str) -> tuple[float, bool]:
    """Return (log-probability of the continuation's bytes one after the other, whether each was the
    most probable).

    By the harness's rule, white space at the end of a context belongs to the continuation.
    """
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    context = stripped
    ids = encode(context) or [encode(END)[0]]
    total, greedy = 0.0, True
    for token in encode(continuation):
        found = log_probabilities(model, ids[-CONTEXT:])
        total += float(found[token])
        greedy = greedy and int(found.argmax()) == token
        ids = [*ids, token]
    return total, greedy


def written_by_hand(model: OpenModel, context: str, most: int) -> str:
    """Decode greedily, one token at a time and without a cache, to the end of the line."""
    ids = encode(context)
    start, text = len(ids), ""
    for _ in range(most):
        token = int(log_probabilities(model, ids).argmax())
        if token == encode(END)[0]:
            break
        ids = [*ids, token]
        text = str(byte_tokenizer().decode(ids[start:]))
        if "\n" in text:
            break
    return text.split("\n")[0]


@pytest.fixture
def adaptor(tmp_path: Path) -> Callable[..., Adaptor]:
    def make(model: OpenModel, batch_size: int | str = 4, **options: Any) -> Adaptor:
        made = Adaptor(model, batch_size, **options)
        answers = Answers(
            tmp_path / ".answers" / f"{len(list(tmp_path.rglob('*.jsonl')))}.jsonl", {}
        )
        made.keep_in(answers.__enter__())
        return made

    return make


def requests(kind: str, *arguments: Any) -> list[Instance]:
    return [Instance(kind, {}, entry, index) for index, entry in enumerate(arguments)]


def likelihoods(adaptor: Adaptor, *texts: tuple[str, str]) -> list[tuple[float, bool]]:
    return adaptor.loglikelihood(requests("loglikelihood", *texts))


@pytest.mark.parametrize("mixer", MIXERS)
def test_log_likelihoods_are_those_of_the_definition_at_any_batch_size(
    mixer: str, adaptor: Callable[..., Adaptor]
) -> None:
    model = opened(mixer)
    expected = [by_hand(model, *texts) for texts in TEXTS]
    assert len({round(value, 3) for value, _ in expected}) == len(TEXTS)
    for batch_size in (1, 4, "auto") if mixer == "fem_softmax" else (1, 4):
        found = likelihoods(adaptor(model, batch_size), *TEXTS)
        assert [value for value, _ in found] == pytest.approx(
            [value for value, _ in expected], rel=1e-5
        )
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_greedy_continuations_are_known_as_such(adaptor: Callable[..., Adaptor]) -> None:
    model = opened()
    written = (
        (letter, written_by_hand(model, letter, 1)) for letter in "abcdefghijklmnopqrstuvwxyz"
    )
    context, text = next(
        (context, text)
        for context, text in written
        if text.isascii() and text.strip() == text != ""
    )
    found = likelihoods(adaptor(model), (context, text), (context, "~~"), (context, f"{text}~"))
    assert [greedy for _, greedy in found] == [True, False, False]


def test_a_prompt_too_long_loses_its_beginning_and_is_counted(
    adaptor: Callable[..., Adaptor],
) -> None:
    """The harness asserts that prompt and continuation fit; a task that requests 1,280 tokens must
    still run on a short model.
    """
    model = opened("transformer")
    ours = adaptor(model)
    found = likelihoods(ours, (LETTERS, "yes"), ("short", "yes"))
    ids = [*encode(LETTERS), *encode("yes")][-(CONTEXT + 1) :]
    expected = 0.0
    for at in range(len(ids) - 3, len(ids)):
        expected += float(log_probabilities(model, ids[:at])[ids[at]])
    assert found[0][0] == pytest.approx(expected, rel=1e-5) and len(ours.answers.truncated) == 1
    longer = adaptor(model, max_length=3 * CONTEXT)
    assert likelihoods(longer, (LETTERS, "yes")) and not longer.answers.truncated
    settings = {"until": [], "do_sample": False, "max_gen_toks": 10 * CONTEXT}
    long, short = ours.generate_until(
        requests("generate_until", ("y" * CONTEXT, settings), ("x", settings))
    )
    assert long and short and len(ours.answers.truncated) == 2


def test_a_text_is_scored_in_windows(adaptor: Callable[..., Adaptor]) -> None:
    model, text = opened("fem_gla"), LETTERS[: CONTEXT + 20]
    (found,) = adaptor(model).loglikelihood_rolling(requests("loglikelihood_rolling", (text,)))
    # The harness's rule: the first window begins with the end-of-document token; each further
    # window is CONTEXT tokens long and ends with the tokens that it scores.
    ids = encode(text)
    window = [encode(END)[0], *ids[: CONTEXT - 1]]
    total = sum(float(log_probabilities(model, window[: i + 1])[ids[i]]) for i in range(CONTEXT))
    last = ids[-(CONTEXT + 1) :]
    total += sum(
        float(log_probabilities(model, last[:i])[last[i]])
        for i in range(CONTEXT + 1 - 20, CONTEXT + 1)
    )
    assert found == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("mixer", ["transformer", "fem_softmax", "fem_gla"])
def test_generation_is_greedy_decoding_at_any_batch_size(
    mixer: str, adaptor: Callable[..., Adaptor]
) -> None:
    model = opened(mixer)
    contexts = ["The sky is", "a", "for i in range("]
    expected = [written_by_hand(model, context, 8) for context in contexts]
    settings = {"until": ["\n"], "do_sample": False, "max_gen_toks": 8}
    for batch_size in (1, 3):
        answered = requests("generate_until", *((context, settings) for context in contexts))
        assert adaptor(model, batch_size).generate_until(answered) == expected


def test_a_continuation_that_the_context_would_swallow(adaptor: Callable[..., Adaptor]) -> None:
    """ "o" and "s" are one token in "os", so the harness would find no token to score."""
    ours = adaptor(opened())
    ours.tok_encode = lambda text, **_: [1] if text in ("o", "os") else [2]  # type: ignore[method-assign]
    assert ours._encode_pair("o", "s") == ([1], [2])
    assert ours._encode_pair("x", "s") == ([2], [2])


def test_models_that_cannot_be_evaluated(adaptor: Callable[..., Adaptor], raised: Refused) -> None:
    raised(Adaptor, OpenModel("x", Path(), None, None, None, {}), 1)
    raised(Adaptor, opened("fem_softmax", causal=False), 1)
    raised(Adaptor, opened("mha2nd"), 1, max_length=513)
    broken = opened()
    torch.nn.init.constant_(broken.model.lm_head.weight, math.nan)
    with pytest.raises(NotANumber):
        likelihoods(adaptor(broken), *TEXTS)


# --- complete tasks -------------------------------------------------------------------------------


def answered(
    tmp_path: Path, model: OpenModel, task: str, limit: int | None = None, **rows: Any
) -> tuple[SuiteTask, Answered]:
    task_folder(tmp_path / "tasks", **rows)
    suite = load_suite(str(suite_file(tmp_path / "s.yaml", task)))
    with Answers(tmp_path / "answers" / "x.jsonl", {}) as answers:
        adaptor = Adaptor(model, 3)
        adaptor.keep_in(answers)
        return suite.tasks[0], ask(adaptor, find_tasks(suite), suite.tasks[0], limit, None)


def right(
    model: OpenModel, rows: list[dict[str, Any]], before: str = "", normalised: bool = False
) -> list[float]:
    """Return 1 for each row whose right choice has the highest log-probability (per letter, if
    normalised), else 0.
    """
    scores = []
    for row in rows:
        found = [
            by_hand(model, before + row["text"], choice)[0] / (len(choice) if normalised else 1)
            for choice in row["choices"]
        ]
        scores.append(float(max(range(len(found)), key=found.__getitem__) == row["answer"]))
    return scores


def test_multiple_choice_and_its_standard_error(tmp_path: Path) -> None:
    model = opened("fem_gla")
    column, found = answered(tmp_path, model, "task: tiny_choices, metric: acc_norm, fewshot: 0")
    plain, normalised = right(model, CHOICES), right(model, CHOICES, normalised=True)
    assert plain != normalised, "else acc could not be told from acc_norm"
    for metric, scores in (("acc", plain), ("acc_norm", normalised)):
        mean = sum(scores) / 5
        assert found.scores["tiny_choices"][f"{metric},none"] == pytest.approx(mean)
        spread = math.sqrt(sum((score - mean) ** 2 for score in scores) / 4 / 5)
        assert found.scores["tiny_choices"][f"{metric}_stderr,none"] == pytest.approx(spread)
    result = results.harness_result(column, found)
    assert result["value"] == pytest.approx(sum(normalised) / 5)
    assert result["chance"] == pytest.approx((1 / 3 + 1 / 2 + 1 / 3 + 1 / 3 + 1 / 2) / 5)
    assert (result["n"], result["fewshot"], result["requests"], result["subtasks"]) == (
        5,
        0,
        13,
        {},
    )
    assert result["version"].endswith("task version 2.0")


BITS, ERROR = "bits_per_byte,none", "bits_per_byte_stderr,none"


def bits(model: OpenModel, *pairs: tuple[str, str]) -> float:
    """Return all bits of the continuations by all their bytes, from the definition."""
    nats = sum(by_hand(model, *pair)[0] for pair in pairs)
    return -nats / math.log(2) / sum(len(text.encode()) for _, text in pairs)


def gold(text: str, choices: list[str], answer: int) -> tuple[str, str]:
    return text, choices[answer]


def test_bits_per_byte_by_hand() -> None:
    """6 bits for the 3 bytes of " é", and 2 for the 4 of " 日", whose space ends the context: 8/7,
    while the mean of both ratios is 5/4. The deviations 6 - 3 * 8/7 and 2 - 4 * 8/7 are +-18/7, so
    the error is sqrt(2 / 1 * 2 * (18/7)^2) / 7 = 36/49.
    """
    pairs = requests("loglikelihood", ("Q:", " é"), ("Q: ", "日"))
    for request, number in zip(pairs, (6, 2), strict=True):
        request.resps.append((-number * math.log(2), False))
    assert bits_per_byte(pairs) == pytest.approx({BITS: 8 / 7, ERROR: 36 / 49})
    assert bits_per_byte(pairs[:1]) == pytest.approx({BITS: 2.0})
    assert bits_per_byte([]) == {}


# A list's first gold answer counts; tiny_contexts scores one text after each context, as winogrande
# does. rel: log-probabilities are fp32.
@pytest.mark.parametrize(
    ("task", "rows", "pairs"),
    [
        ("choices", {}, [gold(**row) for row in CHOICES]),
        (
            "choices",
            {"choices": [{**row, "answer": [1, 0]} for row in CHOICES]},
            [(row["text"], row["choices"][1]) for row in CHOICES],
        ),
        ("contexts", {}, [(row["choices"][row["answer"]], row["text"]) for row in CHOICES]),
        ("words", {}, [(row["text"], row["target"]) for row in WORDS]),
        (
            "written",
            {"written": [{"text": "Say", "answer": "né"}, {"text": "q", "answer": "日"}]},
            [("Say", " né"), ("q", " 日")],
        ),
        ("written", {"written": [{"text": "q", "answer": ["two", "2"]}]}, [("q", " two")]),
        ("written", {"written": [{"text": "q", "answer": LETTERS}]}, []),  # longer than the context
        ("unanswered", {}, []),
    ],
)
def test_bits_per_byte_of_each_kind_of_task(
    tmp_path: Path, task: str, rows: dict[str, Any], pairs: list[tuple[str, str]]
) -> None:
    model = opened("fem_gla")
    metric = "exact_match" if task in ("written", "unanswered") else "acc"
    _, found = answered(tmp_path, model, f"task: tiny_{task}, metric: {metric}, fewshot: 0", **rows)
    scores = found.scores[f"tiny_{task}"]
    assert f"{metric},none" in scores and (BITS in scores) == bool(pairs)
    if pairs:
        assert scores[BITS] == pytest.approx(bits(model, *pairs), rel=1e-5)
        assert (ERROR in scores) == (len(pairs) > 1)


def test_examples_in_the_prompt(tmp_path: Path) -> None:
    model = opened("transformer")
    _, found = answered(tmp_path, model, "task: tiny_choices, fewshot: 2", limit=3)
    before = "".join(f"{row['text']}{row['choices'][0]}\n\n" for row in SHOWN)
    assert len(before) + len("abcabcab") + 5 < CONTEXT
    assert found.scores["tiny_choices"]["acc,none"] == pytest.approx(
        sum(right(model, CHOICES[:3], before)) / 3
    )
    assert (found.fewshot, found.counts) == (2, {"tiny_choices": 3})


def test_a_group_weighs_by_size_and_reports_its_parts(tmp_path: Path) -> None:
    model = opened("transformer")
    column, found = answered(
        tmp_path, model, "task: tiny_group, fewshot: 0, subtask_chance: {tiny_fewer: 0.25}"
    )
    result, scores = results.harness_result(column, found), right(model, CHOICES)
    assert result["value"] == pytest.approx((sum(scores) + sum(scores[:2])) / 7)
    assert result["subtasks"]["tiny_fewer"]["value"] == pytest.approx(sum(scores[:2]) / 2)
    all_bits, fewer = (bits(model, *(gold(**row) for row in CHOICES[:n])) for n in (5, 2))
    assert result["raw"][BITS] == pytest.approx((5 * all_bits + 2 * fewer) / 7, rel=1e-5)
    assert result["raw"][ERROR] > 0
    assert (
        result["subtasks"]["tiny_fewer"]["chance"],
        result["subtasks"]["tiny_choices"]["n"],
        result["n"],
    ) == (0.25, 5, 7)
    assert result["chance"] == pytest.approx((0.4 * 5 + 0.25 * 2) / 7)


def test_log_likelihood_tasks(tmp_path: Path) -> None:
    model = opened("fem_gla")
    column, found = answered(
        tmp_path, model, "task: tiny_words, metric: perplexity, higher_is_better: false"
    )
    values = [by_hand(model, row["text"], row["target"]) for row in WORDS]
    assert found.scores["tiny_words"]["perplexity,none"] == pytest.approx(
        math.exp(-sum(value for value, _ in values) / 3), rel=1e-5
    )
    assert found.scores["tiny_words"]["acc,none"] == sum(greedy for _, greedy in values) / 3
    assert results.harness_result(column, found)["chance"] is None


def test_written_answers(tmp_path: Path) -> None:
    """The model writes one of the expected texts, and not the other two."""
    model = opened("fem_softmax")
    rows = [
        {"text": text, "answer": answer}
        for text, answer in (("Say it: abab", "ab"), ("one, two,", " three"))
    ]
    expected = [written_by_hand(model, row["text"], 6) == row["answer"] for row in rows]
    rows.insert(1, {"text": "q", "answer": written_by_hand(model, "q", 6)})
    _, found = answered(tmp_path, model, "task: tiny_written, metric: exact_match", written=rows)
    assert found.scores["tiny_written"]["exact_match,none"] == pytest.approx(
        (1 + sum(expected)) / 3
    )
