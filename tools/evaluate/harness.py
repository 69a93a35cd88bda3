"""Adapter through which lm-evaluation-harness evaluates an open model: log-likelihoods and
generations of any mixer, in batches.

The harness's class for transformers' models does most of the work. This module passes the model
that ``tools.hf.open_model`` opened, encodes texts like the training data, and computes
log-probabilities in fp32.

It also stores each answer immediately after computing it, so that an interrupted task can resume.
Each model and task has one file. Its first line identifies the model and the task; each further
line is one answer. An incomplete last line of a killed process is dropped. The file is deleted when
the result of the task is written.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import datasets
import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from torch.nn.utils.rnn import pad_sequence

from fem_common.errors import ConfigError
from fem_common.files import locked, sha256_json
from fem_common.progress import Progress

from .catalogue import Tasks, harness_version, quiet
from .heldout import Sums
from .perplexity import check_length, training_length
from .results import BITS
from .suite import SuiteTask


class NotANumber(ValueError):
    """Error: the model returned NaN as a log-likelihood, so its weights are broken."""


class Answers(ExitStack):
    """Context manager with the model's answers to the requests of a task, stored in the file
    ``path``.

    identity: values that identify the model, the task and the settings; a file with another
    identity is overwritten. progress: counts the requests without a stored answer. known: key of a
    request -> answer. truncated: keys of requests whose prompt was too long and lost its beginning.

    Raises InUse on entering if another process writes the file.
    """

    def __init__(
        self, path: Path, identity: dict[str, Any], progress: Progress | None = None
    ) -> None:
        super().__init__()
        self.path, self.identity = path, identity
        self.progress = progress or Progress(0, "requests", quiet=True)
        self.known: dict[str, Any] = {}
        self.truncated: set[str] = set()
        self._file: BinaryIO

    def __enter__(self) -> Answers:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        busy = (
            f"another process is evaluating {self.path.stem} of {self.path.parent.parent.name}:"
            " wait for it"
        )
        self.enter_context(locked(self.path, busy))
        self._file = self.enter_context(open(self.path, "a+b"))
        self._read()
        return self

    def _read(self) -> None:
        """Read the answers that an earlier process with the same identity stored."""
        self._file.seek(0)
        lines = self._file.read().split(b"\n")[:-1]
        if not lines or lines[0] != self._header():
            self._file.truncate(0)
            self._write(self._header())
            return
        for line in lines[1:]:
            key, answer, truncated = json.loads(line)
            self.known[key] = tuple(answer) if isinstance(answer, list) else answer
            if truncated:
                self.truncated.add(key)
        self._file.truncate(sum(len(line) + 1 for line in lines))

    def _header(self) -> bytes:
        return json.dumps(self.identity, sort_keys=True).encode()

    def _write(self, line: bytes) -> None:
        self._file.write(line + b"\n")
        self._file.flush()

    def add_partial(self, kind: str, arguments: Any, answer: Any) -> None:
        """Store the answer to one request. The harness calls this method; the name is the
        harness's.

        kind: method of the harness that computed the answer. arguments: those of the request.

        Raises:
            NotANumber: the answer is NaN.
        """
        value = answer[0] if isinstance(answer, tuple) else answer
        if value != value:
            raise NotANumber("a log-likelihood is NaN: the model's weights are broken")
        key = request_key(kind, arguments)
        if not sampled(arguments):
            self.known[key] = answer
            self._write(json.dumps([key, answer, key in self.truncated]).encode())
        self.progress.advance()

    def remove(self) -> None:
        """Delete the file: its answers are in the result."""
        os.unlink(self.path)


def request_key(kind: str, arguments: Any) -> str:
    """Return a hash that identifies a request within a task."""
    return sha256_json([kind, *arguments])


def sampled(arguments: Any) -> bool:
    """Return True if the answer to a request is sampled; it is then not stored and reused."""
    return (
        len(arguments) > 1
        and isinstance(arguments[1], dict)
        and bool(arguments[1].get("do_sample"))
    )


BOOTSTRAPS = 1000  # resamples for a standard error that has no formula
SEED = 1234  # default of the harness, except for the order of choices, where it is 0


class Adaptor(HFLM):
    """Model of the harness that evaluates an OpenModel.

    If this project trained the model, texts are encoded as its training data was
    (``tools.hf.encoding``), and a text without context follows the end-of-document token. Otherwise
    the model's tokenizer decides both. Prompts are truncated at their beginning to ``max_length``
    tokens; a generation has at most half of ``max_length`` tokens. Truncated prompts are counted.

    Raises ConfigError if the model has no tokenizer, is not causal, or accepts fewer than
    ``max_length`` tokens.
    """

    def __init__(self, opened: Any, batch_size: int | str, max_length: int | None = None) -> None:
        if opened.tokenizer is None:
            missing = "it has no tokenizer: name its folder with --tokenizer DIR"
            raise ConfigError(f"{opened.name}: {opened.no_tokenizer or missing}")
        if opened.config is not None:
            check_length(opened, "--max-length", max_length)
        ours = opened.trained_here
        self._encode = opened.encode if ours else None
        with quiet():
            super().__init__(
                pretrained=opened.model,
                backend="causal",
                tokenizer=opened.tokenizer,
                batch_size=batch_size,
                max_length=max_length or training_length(opened),
                softmax_dtype="float32",
                add_bos_token=False if ours else None,
                prefix_token_id=opened.tokenizer.eos_token_id if ours else None,
            )
        self.answers: Answers

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **options: Any,
    ) -> list[int]:
        """Return the token ids of a text; with ``left_truncate_len``, only that many last ids."""
        if self._encode is None:
            foreign: list[int] = super().tok_encode(
                string, add_special_tokens, left_truncate_len, **options
            )
            return foreign
        return self._encode(string)[-(left_truncate_len or 0) :]

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token ids and the attention mask of several texts, both [b, t], padded."""
        if self._encode is None:
            foreign: tuple[torch.Tensor, torch.Tensor] = super().tok_batch_encode(
                strings, padding_side, left_truncate_len, truncation
            )
            return foreign
        ids = [
            self.tok_encode(string, left_truncate_len=left_truncate_len) or [self.prefix_token_id]
            for string in strings
        ]
        rows = [torch.tensor(row) for row in ids]
        masks = [torch.ones_like(row) for row in rows]
        padded = pad_sequence(rows, True, self.tokenizer.pad_token_id, padding_side)
        return padded, pad_sequence(masks, True, 0, padding_side)

    def keep_in(self, answers: Answers) -> None:
        """Use ``answers`` as the store of all following answers."""
        self.answers = answers
        self.set_cache_hook(answers)

    def get_model_info(self) -> dict[str, Any]:
        """Return an empty dictionary; the harness's own method would use the network."""
        return {}

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """Score the continuation of each request (context, continuation).

        Returns:
            For each request the log-probability of the continuation in nats, and True if greedy
            decoding produces it.
        """
        return self._answered("loglikelihood", requests, super().loglikelihood)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """Return the log-probability of each text in nats.

        A text longer than the context is scored in several windows.
        """
        return self._answered("loglikelihood_rolling", requests, super().loglikelihood_rolling)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Return the generated text for each request (context, settings), up to the first stop
        word.
        """
        most = self.max_length // 2
        fitted = []
        for request in requests:
            context, settings = request.args
            new = min(normalize_gen_kwargs(settings, self.max_gen_toks)["max_gen_toks"], most)
            arguments = (context, {**settings, "max_gen_toks": new})
            fitted.append(
                Instance(
                    request.request_type, request.doc, arguments, request.idx, request.metadata
                )
            )
            if len(self.tok_encode(context)) > self.max_length - new:
                self.answers.truncated.add(request_key("generate_until", arguments))
        return self._answered("generate_until", fitted, super().generate_until)

    def _answered(
        self, kind: str, requests: list[Instance], ask: Callable[..., list[Any]]
    ) -> list[Any]:
        """Return the answers to all requests: stored ones and new ones.

        ask: function that computes the answers to a list of requests.
        """
        found = [self.answers.known.get(request_key(kind, request.args)) for request in requests]
        waiting = [
            request for request, answer in zip(requests, found, strict=True) if answer is None
        ]
        self.answers.progress.total = (self.answers.progress.total or 0) + len(waiting)
        fresh = iter(ask(waiting, disable_tqdm=True) if waiting else [])
        return [next(fresh) if answer is None else answer for answer in found]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the token ids of the context and of the continuation.

        Both texts are encoded together and then split, as in the harness. If no token is left for
        the continuation, because the last token of the context contains it, it is encoded
        separately.
        """
        both: tuple[list[int], list[int]] = super()._encode_pair(context, continuation)
        if both[1]:
            return both
        return both[0], self.tok_encode(continuation, add_special_tokens=False)

    def fits(self, request: Instance) -> bool:
        """Return True if the continuation of a request (context, continuation) fits the model.

        The harness raises an error for a continuation of more than ``max_length`` tokens.
        """
        return len(self._encode_pair(*request.args)[1]) <= self.max_length

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = True, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        for texts, context, continuation in requests:
            if texts is not None and len(context) + len(continuation) > self.max_length + 1:
                self.answers.truncated.add(request_key("loglikelihood", texts))
        return super()._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=override_bs)

    def _model_call(
        self, inps: torch.Tensor, attn_mask: Any = None, labels: Any = None
    ) -> torch.Tensor:
        """Return the logits [b, t, vocabulary] for token ids ``inps`` [b, t].

        Rows are padded on the right, which does not affect earlier tokens of a causal model.
        """
        with torch.inference_mode():
            logits: torch.Tensor = self.model(input_ids=inps, use_cache=False).logits
        return logits


@dataclass(frozen=True)
class Answered:
    """Scores of one task. Dictionaries have the names of the task and, for a group, of its members.

    scores: name -> its metrics. counts: name -> number of examples. chance: name -> score of
    guessing, only for multiple choice. truncated: number of requests whose prompt was too long.
    requests: their total number.
    """

    scores: dict[str, dict[str, Any]]
    counts: dict[str, int]
    chance: dict[str, float]
    fewshot: int
    version: str
    truncated: int
    requests: int


def ask(
    adaptor: Adaptor, tasks: Tasks, column: SuiteTask, limit: int | None, seed: int | None
) -> Answered:
    """Evaluate the model on one task; a group is evaluated with all its members.

    column: the task. limit: number of examples per member; None: all. seed: for the order of
    choices, the selection of few-shot examples and sampled answers; None: the harness's default.

    Raises any error of the harness, the task's code or the model.
    """
    random.seed(seed or 0)
    others = SEED if seed is None else seed
    np.random.seed(others)
    torch.manual_seed(others)
    with quiet():
        # The processed data of a task depends on the seeds, which are not in the cache's key.
        datasets.disable_caching()
        loaded = tasks.manager.load([column.task])
        for task in loaded["tasks"].values():
            if column.fewshot is not None or task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=column.fewshot or 0)
            task.set_fewshot_seed(seed=others)
        found = evaluate(
            adaptor, loaded, limit=limit, bootstrap_iters=BOOTSTRAPS, log_samples=False
        )
        assert found is not None
        leaves = [leaf.name for leaf in tasks.leaves[column.task]]
        scores = {name: numbers(found["results"][name]) for name in [column.task, *leaves]}
        counts = {leaf: found["n-samples"][leaf]["effective"] for leaf in leaves}
        asked = 0
        for leaf in leaves:
            golds = gold_requests(loaded["tasks"][leaf])
            new = [gold for gold in golds if not gold.resps]
            if not all(adaptor.fits(gold) for gold in new):
                continue
            for gold, answer in zip(new, adaptor.loglikelihood(new), strict=True):
                gold.resps.append(answer)
            asked += len(new)
            # A task that has the metric itself, such as one of rolling log-likelihoods, keeps it.
            scores[leaf] = {**bits_per_byte(golds), **scores[leaf]}
        group = loaded["groups"].get(column.task)
        if (
            group
            and group.has_aggregation
            and all(f"{BITS},none" in scores[leaf] for leaf in leaves)
        ):
            like = replace(group.aggregate_metric_list[0], metric=BITS, filter_list=["none"])
            group.aggregate_metric_list = [like]
            parts = {leaf: {**scores[leaf], "sample_len": counts[leaf]} for leaf in leaves}
            scores[column.task] |= numbers(group.aggregate(parts))
    versions = sorted({str(found["versions"][leaf]) for leaf in leaves})
    chance = {leaf: guessing(loaded["tasks"][leaf]) for leaf in leaves}
    return Answered(
        scores=scores,
        counts=counts,
        chance={leaf: share for leaf, share in chance.items() if share is not None},
        fewshot=max(found["n-shot"][leaf] for leaf in leaves),
        version=f"lm-eval {harness_version()}, task version {', '.join(versions)}",
        truncated=len(adaptor.answers.truncated),
        requests=asked + sum(len(task.instances) for task in loaded["tasks"].values()),
    )


def gold_requests(task: Any) -> list[Instance]:
    """Return one request (context, gold answer) for each evaluated example with a gold answer.

    Multiple choice and log-likelihoods: answered requests of the task. Generation: new requests
    without a response, with the task's delimiter before the answer, as in its few-shot examples. Of
    several gold answers the first is used, because it is the same text for every model.
    """
    found = []
    for request in task.instances:
        if task.OUTPUT_TYPE == "loglikelihood":
            found.append(request)
            continue
        choices = task.doc_to_choice(request.doc) if task.config.doc_to_choice else []
        gold = (task.doc_to_text if task.multiple_input else task.doc_to_target)(request.doc)
        gold = gold[0] if isinstance(gold, list) and gold else gold
        if task.OUTPUT_TYPE == "multiple_choice":
            if request.idx == (choices.index(gold) if gold in choices else gold):
                found.append(request)
        elif request.request_type == "generate_until":
            if choices and isinstance(gold, int):
                gold = choices[gold]
            elif isinstance(task.config.doc_to_target, int):
                continue  # a placeholder in a task without gold answers, such as IFEval
            if isinstance(gold, int | float | str) and gold != "":
                pair = (request.args[0], f"{task.config.target_delimiter}{gold}")
                found.append(Instance("loglikelihood", request.doc, pair, 0, request.metadata))
    return found


def bits_per_byte(golds: Sequence[Instance]) -> dict[str, float]:
    """Return the bits per byte of answered requests (context, gold answer) and its standard error.

    It is the ratio of all bits to all UTF-8 bytes of the scored texts; by the harness's rule, white
    space at the end of a context is part of the scored text. The names are those of the harness's
    metrics. The result is empty without bytes.
    """
    nats = np.array([-gold.resps[0][0] for gold in golds])
    texts = [args[0][len(args[0].rstrip()) :] + args[1] for args in (gold.args for gold in golds)]
    sizes = np.array([len(text.encode()) for text in texts])
    if not sizes.sum():
        return {}
    sums = Sums(
        nats=float(nats.sum()),
        tokens=int(sizes.sum()),
        documents=len(golds),
        nats_squared=float(nats @ nats),
        nats_times_tokens=float(nats @ sizes),
        tokens_squared=float(sizes @ sizes),
    )
    found = {f"{BITS},none": sums.mean / math.log(2)}
    if sums.stderr is not None:
        found[f"{BITS}_stderr,none"] = sums.stderr / math.log(2)
    return found


def numbers(scores: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of the harness's results that are metrics with a number as value."""
    return {
        key: float(value)
        for key, value in scores.items()
        if "," in key and isinstance(value, int | float | np.number)
    }


def guessing(task: Any) -> float | None:
    """Return the score of guessing in a task; None unless it is multiple choice.

    It is the mean of 1 / number of choices over the evaluated examples.
    """
    if task.OUTPUT_TYPE != "multiple_choice":
        return None
    examples = {instance.doc_id: instance.doc for instance in task.instances}
    return float(np.mean([1 / len(task.doc_to_choice(example)) for example in examples.values()]))
