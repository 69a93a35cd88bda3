"""Tests of held-out perplexity against a loop in float64, against training's own validation,
through an interruption, and with invalid input.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data_prep.prepared.indexed import IndexedWriter
from fem_common.errors import ConfigError
from tests.pretrain.conftest import DEMO, SMALL
from tests.pretrain.data_folder import write_folder
from tests.tools.evaluate.tiny import END, byte_tokenizer, llama_folder
from tests.tools.evaluate.tiny import opened as tiny_opened
from tests.tools.refusals import Refused
from tools.evaluate import perplexity as perplexity_measure
from tools.evaluate import results
from tools.evaluate.heldout import Kept, Settings, Sums, open_text, windows
from tools.evaluate.perplexity import data_digest, heldout_result, main, measure
from tools.evaluate.suite import SuiteTask
from tools.hf.open_model import OpenModel, open_model

VOCAB, EOD = 50, 7
LENGTHS = (9, 1, 15, 2, 8, 4)


def opened(mixer: str = "fem_softmax", vocab_size: int = VOCAB, **changes: Any) -> OpenModel:
    """Return a model with ``vocab_size`` ids without a known run and tokenizer."""
    return replace(
        tiny_opened(mixer, vocab_size=vocab_size, **changes), tokenizer=None, manifest={}
    )


@pytest.fixture(scope="module")
def fem() -> OpenModel:
    return opened()


def write_text(
    prefix: Path, lengths: Sequence[int] = LENGTHS, eod: int | None = EOD, seed: int = 0
) -> Path:
    """Write documents of random ids from 8, each ended by ``eod``."""
    ids = np.random.default_rng(seed).integers(8, VOCAB, sum(lengths)).astype(np.uint16)
    if eod is not None:
        ids[np.cumsum(lengths) - 1] = eod
    prefix.parent.mkdir(parents=True, exist_ok=True)
    writer = IndexedWriter(prefix, "uint16")
    writer.add(ids, np.array(lengths))
    writer.finish()
    return prefix


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return write_text(tmp_path / "valid")


def loop(
    model: Any, ids: np.ndarray, spans: Sequence[tuple[int, int]], context: int, stride: int
) -> dict[int, float]:
    """Return token -> nats by the definition, one model call per token: the first window that
    contains the token scores it.
    """
    found = {}
    for start, stop in spans:
        for place in range(start + 1, stop):
            window = max(0, math.ceil((place - start - context) / stride))
            read = torch.from_numpy(ids[start + window * stride : place].astype(np.int64))[None]
            with torch.no_grad():
                found[place] = -float(
                    torch.log_softmax(model(input_ids=read, use_cache=False).logits[0, -1], -1)[
                        int(ids[place])
                    ]
                )
    return found


def expected(losses: dict[int, float], lengths: Sequence[int]) -> tuple[float, float]:
    """Return (mean, its standard error over documents) with numpy."""
    places, nats = np.array(list(losses)), np.array(list(losses.values()))
    documents = np.searchsorted(np.cumsum(lengths), places, side="right")
    sums = np.array([nats[documents == d].sum() for d in np.unique(documents)])
    counts = np.array([(documents == d).sum() for d in np.unique(documents)])
    residuals = sums - nats.mean() * counts
    return nats.mean(), math.sqrt(len(sums) / (len(sums) - 1) * (residuals**2).sum()) / counts.sum()


def one(prefix: Path, *context: int, **changes: Any) -> SuiteTask:
    fields = {
        "task": "valid",
        "name": "valid",
        "kind": "heldout",
        "data": str(prefix),
        "context_lengths": context,
    }
    return SuiteTask(**{**fields, "metric": "nats_per_token", "higher_is_better": False, **changes})


def measured(
    model: OpenModel, task: SuiteTask, out: Path | None = None, **options: Any
) -> dict[str, Any]:
    return heldout_result(model, task, out, "key", **options)


class Ends:
    """The part of a tokenizer that defines the ends of documents."""

    eos_token_id = EOD

    def decode(self, ids: list[int], **_: Any) -> str:
        """Return one letter per token; an EOD gives two."""
        return "".join("ab" if number == EOD else "a" for number in ids)


# --- the loss -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mixer", "context", "stride", "rel"),
    [
        # float64 on both sides. A call over many tokens rounds differently from one over few, and
        # chunked scans differ more than attention.
        *(("fem_softmax", context, stride, 1e-12) for context, stride in ((16, 5), (100, 100))),
        *(
            pytest.param("fem_softmax", 16, stride, 1e-12, marks=pytest.mark.slow)
            for stride in (16, 1)
        ),
        ("fem_gla", 24, 10, 1e-9),  # padding on the right does not change a state
        # Padding on the right does not change a convolution either.
        pytest.param("mamba2", 24, 10, 1e-9, marks=pytest.mark.slow),
    ],
)
def test_the_mean_is_that_of_a_loop_over_tokens(
    prefix: Path, mixer: str, context: int, stride: int, rel: float
) -> None:
    """Over the stream and per document; the batch size changes no number."""
    ids = np.fromfile(prefix.with_suffix(".bin"), dtype=np.uint16)
    ends = np.cumsum(LENGTHS)
    model = opened(mixer)
    alone = [
        (int(end) - length - (end > length), int(end))
        for length, end in zip(LENGTHS, ends, strict=True)
    ]  # each document, preceded by the EOD before it
    for spans in ([(0, len(ids))], alone):
        losses = loop(model.model, ids, spans, context, stride)
        assert sorted(losses) == list(range(1, len(ids))), "every token but the first, once"
        mean, stderr = expected(losses, LENGTHS)
        for size in (1, 3, 64):
            result = measured(
                replace(model, tokenizer=Ends()),
                one(prefix, context, stride=stride),
                per_document=len(spans) > 1,
                batch_size=size,
            )
            assert result["value"] == pytest.approx(mean, rel=rel)
            assert result["stderr"] == pytest.approx(stderr, rel=1e-9)
            assert (result["raw"]["tokens"], result["n"]) == (len(ids) - 1, len(LENGTHS))


@pytest.mark.parametrize("tokens", [None, 20])
def test_a_loss_mask_leaves_the_mean_to_the_tokens_that_count(
    fem: OpenModel, prefix: Path, tokens: int | None
) -> None:
    """Bits per byte are unknown then; a sample takes its part of the mask."""
    ids = np.fromfile(prefix.with_suffix(".bin"), dtype=np.uint16)
    plain = data_digest(prefix, one(prefix))
    mask = (ids % 3 == 0).astype(np.uint8)
    prefix.with_suffix(".mask").write_bytes(mask.tobytes())
    assert data_digest(prefix, one(prefix)) != plain
    text = open_text(prefix).sample(tokens)
    assert text.mask is not None and text.mask.tolist() == (text.ids % 3 == 0).tolist()
    model = replace(fem, tokenizer=Ends())
    result = measured(model, one(prefix, 16, stride=5, max_tokens=tokens))
    losses = loop(model.model, text.ids, [(0, len(text.ids))], 16, 5)
    counted = [nats for place, nats in losses.items() if text.mask[place]]
    # float64 on both sides; sums in another order.
    assert result["value"] == pytest.approx(np.mean(counted), rel=1e-12)
    assert result["raw"]["tokens"] == len(counted) < len(losses)
    assert result["raw"]["bits_per_byte"] is None
    prefix.with_suffix(".mask").write_bytes(bytes(len(mask)))
    with pytest.raises(ConfigError, match="no scored token counts"):
        measured(model, one(prefix, 16))


def test_windows_score_every_token_once_and_from_enough() -> None:
    """For all lengths, contexts and strides up to 12, every token is scored exactly once, with at
    least the promised context.
    """
    for length in range(1, 13):
        for context in range(1, 13):
            for stride in range(1, context + 1):
                found = list(windows([(3, 3 + length)], context, stride))
                scored = [
                    place for window in found for place in range(window.first, window.end + 1)
                ]
                assert scored == list(range(4, 3 + length))
                for number, window in enumerate(found):
                    assert 3 <= window.begin < window.first and len(window) <= context
                    assert not number or window.first - window.begin == context - stride + 1


def test_several_contexts_are_sub_tasks_and_the_longest_is_the_value(
    fem: OpenModel, prefix: Path, tmp_path: Path
) -> None:
    result = measured(fem, one(prefix, 32, 8), tmp_path)
    assert (
        list(result["subtasks"])
        == ["@8", "@32"]
        == [f"@{length}" for length in result["raw"]["contexts"]]
    )
    assert result["value"] == result["subtasks"]["@32"]["value"] == result["raw"]["nats_per_token"]
    assert result["subtasks"]["@8"]["value"] == measured(fem, one(prefix, 8))["value"]
    assert not list(tmp_path.glob(".*.json")), "nothing partial stays behind"


def test_documents_whose_first_tokens_are_not_scored_are_documents(
    tmp_path: Path, fem: OpenModel
) -> None:
    """Without end-of-document tokens; compared with manual counts. The bytes of first tokens are
    unknown.
    """
    # 3, 3, 0, 0 and 2 tokens of 1, 2 and 3 nats each.
    sums, starts = Sums(), np.array([0, 4, 8, 9, 9, 12])
    for first, count, nats in ((1, 3, 1.0), (5, 3, 2.0), (10, 2, 3.0)):
        sums.add(first, np.full(count, nats), starts)
    found = sums.done()
    assert (found.documents, found.tokens, found.nats, found.nats_squared) == (
        3,
        8,
        15.0,
        3.0**2 + 6.0**2 + 6.0**2,
    )
    for end, tokens in ((None, 9), (EOD, 11)):
        text = write_text(tmp_path / f"end {end}", (4, 4, 4), end)
        model = replace(fem, tokenizer=Ends())
        raw = measured(model, one(text, 8), per_document=True)["raw"]
        assert (raw["documents"], raw["tokens"], raw["unscored"]) == (3, tokens, 11 - tokens)
        assert (raw["bytes"] is None, raw["bits_per_byte"] is None) == (end is None, end is None)
        stream = measured(model, one(text, 8))["raw"]
        assert (stream["documents"], stream["tokens"], stream["unscored"]) == (3, 11, 0)
        assert stream["bytes"]


def test_bits_a_byte_count_the_bytes_of_the_text(
    tmp_path: Path, fem: OpenModel, prefix: Path
) -> None:
    """Letters of one to four bytes, without EOD, only complete characters; without a tokenizer
    data_prep's count, or no result.
    """
    texts = ["naïve – “quoted” 東京 🙂🙂 words", "a", "plain words, words and naïve 東京\n"]
    tokenizer = byte_tokenizer()
    documents = [[*tokenizer.encode(text), *tokenizer.encode(END)] for text in texts]
    writer = IndexedWriter(tmp_path / "text", "uint16")
    writer.add(np.concatenate(documents), np.array([len(ids) for ids in documents]))
    writer.finish()
    model = replace(opened(vocab_size=len(tokenizer)), tokenizer=tokenizer)
    raw = measured(model, one(tmp_path / "text", 16))["raw"]
    size = sum(len(text.encode()) for text in texts)
    assert raw["bytes"] == size
    assert raw["bits_per_byte"] == pytest.approx(raw["nats"] / math.log(2) / size, rel=1e-15)
    assert raw["nats"] == pytest.approx(raw["nats_per_token"] * raw["tokens"], rel=1e-12)
    cut = measured(model, one(tmp_path / "text", 16, max_tokens=len(documents[0]) + 2))
    assert cut["raw"]["bytes"] == len((texts[0] + texts[2][:2]).encode()), (
        "the first document, and of the last two letters"
    )
    assert measured(fem, one(prefix, 16))["raw"]["bits_per_byte"] is None
    folder = write_folder(
        tmp_path / "data", vocab_size=VOCAB, documents=[[8, 9, 10, 49], [11, 12, 49]]
    )
    assert measured(fem, one(folder / "valid", 16))["raw"]["bytes"] == 4 * 7, (
        "what the manifest records"
    )


def test_a_sample_is_spread_over_the_text(tmp_path: Path, fem: OpenModel) -> None:
    """Complete documents from everywhere, the last one truncated; one long document contributes its
    beginning.
    """
    writer = IndexedWriter(tmp_path / "text", "uint16")
    writer.add(np.repeat(np.arange(8, 48, dtype=np.uint16), 10), np.full(40, 10))
    writer.finish()
    text = open_text(tmp_path / "text")
    assert text.sample(400) is text.sample(None) is text
    for documents, gap in ((3, 21), (5, 13), (10, 5), (20, 3), (39, 2)):
        found = text.sample(10 * documents + 5)
        numbers = sorted(set(found.ids[: 10 * documents].tolist()))
        assert found.starts.tolist() == [*range(0, 10 * documents + 1, 10), 10 * documents + 5]
        assert len(found.ids) == found.starts[-1]
        assert len(numbers) == documents and max(np.diff([*numbers, numbers[0] + 40])) <= gap
    raw = measured(fem, one(tmp_path / "text", 16, max_tokens=105))["raw"]
    assert (raw["documents"], raw["tokens"]) == (11, 104)
    assert open_text(write_text(tmp_path / "one", (90,))).sample(20).starts.tolist() == [0, 20]


# --- training's own validation, and the command ---------------------------------------------------


# A validation batch covers the entire document.
WHOLE = ["train.steps=4", "train.global_batch_size=8", "train.precision=fp32"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps whose validation is one document of eight full sequences, so that its
    windows equal ours.
    """
    folder = tmp_path_factory.mktemp("trained")
    ids = np.random.default_rng(1).integers(0, 63, 8 * 32).tolist()
    data = write_folder(folder / "data", vocab_size=64, documents=[[*ids, 63]])
    words = Tokenizer(
        models.WordLevel(
            {f"w{number}": number for number in range(63)} | {"</s>": 63}, unk_token="w0"
        )
    )
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(
        data / "tokenizer"
    )
    from pretrain.__main__ import main as pretrain

    settings = [f"data.{split}.0.prefix={data / split}" for split in ("train", "valid")]
    assert (
        pretrain([DEMO, f"run_dir={folder / 'run'}", *settings, "data.test=[]", *SMALL, *WHOLE])
        == 0
    )
    return folder / "run"


def test_the_value_is_trainings_validation_loss(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the training's length without overlap, on the run's data: the same tokens with the same
    contexts. Then by the command.
    """
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    (loss,) = [line["valid_loss"] for line in lines if "valid_loss" in line]
    result = measured(open_model(trained), SuiteTask(task="valid", kind="heldout"))
    # None: the data contains only one document.
    assert (result["raw"]["tokens"], result["raw"]["context"]) == (8 * 32, 32)
    assert result["stderr"] is None
    # fp32 logits on both sides; a sum in a different order.
    assert result["value"] == pytest.approx(loss, abs=1e-6)

    words = f"--context 32 16 --stride 16 --out {tmp_path} --device cpu"
    assert main([str(trained), *words.split()]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["16", "16"], ["32", "16"]]
    found = {one.label: one for one in results.read([tmp_path])}
    assert found.keys() == {"valid @16", "valid @32"}
    assert not any(one.higher_is_better for one in found.values())
    assert f"{found['valid @32'].score.value:.4f}" == rows[1][2]


def test_the_command_refuses_in_one_line(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (
        ["nowhere"],
        [str(trained), "--data", str(tmp_path / "nothing")],
        [str(trained), "--stride", "99"],
    ):
        assert main([*arguments, "--device", "cpu"]) == 2
        report = capsys.readouterr().err
        assert report.startswith("tools.evaluate.perplexity: error: ") and report.count("\n") == 1


# --- interruptions --------------------------------------------------------------------------------


class Stops:
    """A model that is interrupted at a call."""

    def __init__(self, model: Any, at: int) -> None:
        self.model, self.left = model, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, **inputs: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return self.model(**inputs)


def test_an_interrupted_measurement_continues_to_the_same_number(
    fem: OpenModel, prefix: Path, tmp_path: Path
) -> None:
    task = one(prefix, 8, 12, stride=4)
    full = measured(fem, task, batch_size=3)
    calls = Stops(fem.model, 10**6)
    for at in (4, 1):
        with pytest.raises(KeyboardInterrupt):
            measured(replace(fem, model=Stops(fem.model, at)), task, tmp_path, batch_size=3)
    again = measured(replace(fem, model=calls), task, tmp_path, batch_size=3)
    assert (again["value"], again["stderr"], again["subtasks"]) == (
        full["value"],
        full["stderr"],
        full["subtasks"],
    )
    everything = 0
    for size in (8, 12):
        count = len(list(windows([(0, sum(LENGTHS))], size, 4)))
        everything += math.ceil(count / 3)  # batches of 3
    assert 10**6 - calls.left == everything - 4 - 1, "no call twice"


def test_an_interruption_amid_a_batch_leaves_the_batch_to_do(
    fem: OpenModel, prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = one(prefix, 8)
    add = Sums.add
    calls = list[int]()
    full = measured(fem, task, batch_size=2)

    def interrupted(sums: Sums, *arguments: Any) -> None:
        calls.append(0)
        if len(calls) == 4:  # the second batch's second window
            raise KeyboardInterrupt
        add(sums, *arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Sums, "add", interrupted)
        measured(fem, task, tmp_path, batch_size=2)
    (kept,) = Kept(tmp_path / ".valid.partial.json").sums.values()
    assert kept.position == 17, "one batch"
    assert measured(fem, task, tmp_path, batch_size=2)["value"] == full["value"]


def test_sums_on_disk_are_of_one_measurement_alone(
    fem: OpenModel, prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums are written during the measurement, and not reused for other weights, dtypes or windows.
    A damaged file only costs time.
    """
    monkeypatch.setattr(perplexity_measure, "SAVE_SECONDS", -1.0)
    text = open_text(prefix)
    file = tmp_path / "kept.json"
    seen = list[int]()

    class Looks(Stops):
        def __call__(self, **inputs: Any) -> Any:
            seen.append(sum(sums.position for sums in Kept(file).sums.values()))
            return self.model(**inputs)

    measure(
        replace(fem, model=Looks(fem.model, 0)),
        text,
        Settings(10, 10),
        Kept(file),
        "key",
        batch_size=1,
    )
    assert seen == [0, 11, 21, 31]
    never, again = replace(fem, model=Stops(fem.model, 0)), Kept(file)
    assert measure(never, text, Settings(10, 10), again, "key").tokens == sum(LENGTHS) - 1
    narrow = replace(fem, model=Stops(opened().model.bfloat16(), 0))
    others = [
        (never, Settings(10, 10), "other"),
        (never, Settings(10, 7), "key"),
        (never, Settings(9, 9), "key"),
    ]
    for model, settings, key in (
        *others,
        (never, Settings(10, 10, True), "key"),
        (narrow, Settings(10, 10), "key"),
    ):
        with pytest.raises(KeyboardInterrupt):
            measure(model, text, settings, again, key)
    file.write_text('{"format": 1, "sums": {"a": 3}}')
    assert Kept(file).sums == {}


def test_a_result_fits_the_tokens_not_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = results.Settings(None, None, None, None, "")

    def complaint(task: SuiteTask) -> str | None:
        return results.fitting(
            tmp_path, "model", "key", task, requested.of(task, data_digest(tmp_path, task))
        )

    task = one(write_text(tmp_path / "valid"), 8)
    made = {
        "format": results.FORMAT,
        "model_key": "key",
        "metric": task.metric,
        "settings": requested.of(task, data_digest(tmp_path, task)),
    }
    results.write(tmp_path, "model", task, made)
    assert json.loads(results.result_file(tmp_path, "model", task).read_text())["settings"][
        "data_digest"
    ]
    monkeypatch.chdir(tmp_path)
    assert complaint(task) == complaint(one(Path("valid"), 8)) == "", "the same file"
    assert complaint(one(write_text(tmp_path / "copy/valid"), 8)) == "", "the same tokens elsewhere"
    model = llama_folder(tmp_path / "llama")
    source = {"prefix": str(tmp_path / "copy/valid")}
    training = {"config": {"data": {"valid": [source]}}}
    (model / "training.json").write_text(json.dumps(training))
    assert data_digest(model, replace(task, data=None)) == data_digest(model, task), (
        "the run's own validation data"
    )
    write_text(tmp_path / "valid", seed=1)
    assert "was created with data_digest" in (complaint(task) or "")
    for file in tmp_path.glob("valid.*"):
        file.unlink()
    assert complaint(task) == "", "where the data is not, its name has to do"
    assert "was created with data " in (complaint(one(Path("gone"), 8)) or "")


# --- errors and notes in one line -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "data", "task"),
    [
        ({}, "vald", {}),
        ({}, "valid.bin", {}),
        ({}, None, {}),
        ({"vocab_size": 20}, "valid", {}),
        ({"mixer": "mha2nd"}, "valid", {"context_lengths": (513,)}),
        ({"causal": False}, "valid", {}),
        ({}, "valid", {"stride": 9}),
    ],
    ids=str,
)
def test_mistakes(
    prefix: Path, raised: Refused, model: dict[str, Any], data: str | None, task: dict[str, Any]
) -> None:
    requested = one(prefix, 8, **{**task, "data": data and str(prefix.with_name(data))})
    raised(measured, opened(**model), requested)


def test_data_and_models_that_are_none(
    fem: OpenModel, prefix: Path, tmp_path: Path, raised: Refused
) -> None:
    """Cases: a split without tokens, half a pair, another tokenizer of the same size, non-finite
    weights, a foreign model's context.
    """

    class Other:
        eos_token_id = 49

        def get_vocab(self) -> dict[str, int]:
            return {f"one{n}": n if n != 5 else 6 for n in range(VOCAB)}

    folder = write_folder(tmp_path / "data", vocab_size=VOCAB, documents=[[8, 9, 49]])
    raised(measured, replace(fem, tokenizer=Other()), one(folder / "valid", 8))
    broken = opened()
    torch.nn.init.constant_(broken.model.model.norm.weight, math.nan)
    raised(measured, broken, one(prefix, 8))
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    llama = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=24)).eval()
    foreign = OpenModel("llama", Path(), llama, None, None, {})
    assert measured(foreign, one(prefix))["raw"]["context"] == 24
    raised(measured, foreign, one(prefix, 25))
    IndexedWriter(tmp_path / "empty", "uint16").finish()
    raised(measured, fem, one(tmp_path / "empty", 8))
    prefix.with_suffix(".bin").write_bytes(prefix.with_suffix(".bin").read_bytes()[:-2])
    raised(measured, fem, one(prefix, 8))
    prefix.with_suffix(".idx").unlink()
    raised(measured, fem, one(prefix, 8))
