"""Held-out perplexity against a loop in float64, against training's own validation, through an interruption, and with wrong input."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data_prep.store.indexed import IndexedWriter
from fem_common.errors import ConfigError
from fem_megatron.config import ModelConfig
from tests.pretrain.conftest import DEMO, SMALL
from tests.pretrain.data_folder import write_folder
from tools.evaluate import perplexity as perplexity_measure
from tools.evaluate.heldout import Kept, Settings, Sums, open_text, windows
from tools.evaluate.perplexity import heldout_result, main, measure
from tools.evaluate.suite import SuiteTask
from tools.hf.configuration_fem import FemLMConfig
from tools.hf.modeling_fem import FemLMForCausalLM
from tools.hf.open_model import OpenModel, open_model

VOCAB, EOD = 50, 7
LENGTHS = (9, 1, 15, 2, 8, 4)


def opened(mixer: str = "fem_softmax", vocab_size: int = VOCAB, **changes: Any) -> OpenModel:
    """A model with random weights large enough that the context matters, in float64, so that a loop can be exact."""
    sizes: dict[str, Any] = {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 48, "init_std": 0.3}
    config = ModelConfig(mixer=mixer, vocab_size=vocab_size, **sizes, **changes)
    torch.manual_seed(0)
    model = FemLMForCausalLM(FemLMConfig(architecture=asdict(config))).double().eval()
    return OpenModel(mixer, Path(), model, None, config, {})


@pytest.fixture(scope="module")
def fem() -> OpenModel:
    return opened()


def write_text(prefix: Path, lengths: Sequence[int] = LENGTHS, vocab_size: int = VOCAB) -> np.ndarray:
    """Documents of random ids, each ended by EOD; returns all ids."""
    ids = np.random.default_rng(0).integers(8, vocab_size, sum(lengths)).astype(np.uint16)
    ids[np.cumsum(lengths) - 1] = EOD
    writer = IndexedWriter(prefix, "uint16")
    writer.add(ids, np.array(lengths))
    writer.finish()
    return ids


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_text(tmp_path / "valid")
    return tmp_path / "valid"


def loop(model: Any, ids: np.ndarray, spans: Sequence[tuple[int, int]], context: int, stride: int) -> dict[int, float]:
    """Token -> nats, one call of the model a token, by the definition: the window that scores it is the first that reaches it."""
    found = {}
    for start, stop in spans:
        for place in range(start + 1, stop):
            window = max(0, math.ceil((place - start - context) / stride))
            read = torch.from_numpy(ids[start + window * stride : place].astype(np.int64))[None]
            with torch.no_grad():
                found[place] = -float(torch.log_softmax(model(input_ids=read, use_cache=False).logits[0, -1], -1)[int(ids[place])])
    return found


def expected(losses: dict[int, float], lengths: Sequence[int]) -> tuple[float, float]:
    """(mean, its standard error over documents) with numpy."""
    ends = np.cumsum(lengths)
    places, nats = np.array(list(losses)), np.array(list(losses.values()))
    documents = np.searchsorted(ends, places, side="right")
    sums = np.array([nats[documents == d].sum() for d in np.unique(documents)])
    counts = np.array([(documents == d).sum() for d in np.unique(documents)])
    residuals = sums - nats.mean() * counts
    return nats.mean(), math.sqrt(len(sums) / (len(sums) - 1) * (residuals**2).sum()) / counts.sum()


def one(prefix: Path, **changes: Any) -> SuiteTask:
    return SuiteTask(**{"task": "valid", "kind": "heldout", "data": str(prefix), "higher_is_better": False, **changes})


# --- the number ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("context", "stride"), [(16, 16), (16, 5), (16, 1), (100, 100)])
@pytest.mark.parametrize("per_document", [False, True])
def test_the_mean_is_that_of_a_loop_over_tokens(fem: OpenModel, prefix: Path, context: int, stride: int, per_document: bool) -> None:
    ids, ends = np.fromfile(prefix.with_suffix(".bin"), dtype=np.uint16), np.cumsum(LENGTHS)
    spans = [(0, len(ids))]
    if per_document:  # a document and the EOD before it
        spans = [(int(end) - length - (end > length), int(end)) for length, end in zip(LENGTHS, ends, strict=True)]
    losses = loop(fem.model, ids, spans, context, stride)
    assert sorted(losses) == list(range(1, len(ids))), "every token but the first, once"
    task = one(prefix, context_lengths=(context,), stride=stride)
    eod = replace(fem, tokenizer=_Ends())
    result = heldout_result(eod, task, None, "key", per_document=per_document, batch_size=3)
    mean, stderr = expected(losses, LENGTHS)
    # float64 on both sides; a call over many tokens rounds otherwise than one over few.
    assert result["value"] == pytest.approx(mean, rel=1e-12)
    assert result["stderr"] == pytest.approx(stderr, rel=1e-9)
    assert (result["raw"]["tokens"], result["n"]) == (len(ids) - 1, len(LENGTHS))


class _Ends:
    """Of a tokenizer, what tells where documents end."""

    eos_token_id = EOD

    def decode(self, ids: list[int], **_: Any) -> str:
        """A letter a token; an EOD would be two."""
        return "".join("ab" if number == EOD else "a" for number in ids)


@pytest.mark.parametrize("mixer", ["fem_gla", "mamba2"])
def test_other_kinds_of_mixers(prefix: Path, mixer: str) -> None:
    """A state, a convolution: filling up windows on the right touches none."""
    model = opened(mixer)
    ids = np.fromfile(prefix.with_suffix(".bin"), dtype=np.uint16)
    result = heldout_result(model, one(prefix, context_lengths=(24,), stride=10), None, "key", batch_size=4)
    mean, _ = expected(loop(model.model, ids, [(0, len(ids))], 24, 10), LENGTHS)
    assert result["value"] == pytest.approx(mean, rel=1e-9)  # chunked scans round more than attention


def test_windows_score_every_token_once_and_from_enough() -> None:
    """All lengths, contexts and strides up to 12: no token twice, none left out, none from less context than promised."""
    for length in range(1, 13):
        for context in range(1, 13):
            for stride in range(1, context + 1):
                found = list(windows([(3, 3 + length)], context, stride))
                scored = [place for window in found for place in range(window.first, window.end + 1)]
                assert scored == list(range(4, 3 + length))
                for number, window in enumerate(found):
                    assert 3 <= window.begin < window.first and len(window) <= context
                    assert not number or window.first - window.begin == context - stride + 1


def test_the_batch_size_changes_no_number(fem: OpenModel, prefix: Path) -> None:
    values = [
        heldout_result(fem, one(prefix, context_lengths=(8,), stride=3), None, "key", batch_size=size, per_document=True)["value"]
        for size in (1, 2, 7, 64)
    ]
    assert values == pytest.approx([values[0]] * 4, rel=1e-13)


def test_several_contexts_are_sub_tasks_and_the_longest_is_the_value(fem: OpenModel, prefix: Path, tmp_path: Path) -> None:
    result = heldout_result(fem, one(prefix, context_lengths=(32, 8)), tmp_path, "key")
    assert list(result["subtasks"]) == ["@8", "@32"] == [f"@{length}" for length in result["raw"]["contexts"]]
    assert result["value"] == result["subtasks"]["@32"]["value"] == result["raw"]["nats_per_token"]
    assert result["subtasks"]["@8"]["value"] == heldout_result(fem, one(prefix, context_lengths=(8,)), None, "key")["value"]
    assert not list(tmp_path.glob(".*.json")), "nothing partial stays behind"


# --- bytes -----------------------------------------------------------------------------------------------------------------------


def test_bits_a_byte_count_the_bytes_of_the_text(tmp_path: Path, fem: OpenModel) -> None:
    """Byte-level BPE over letters of one to four bytes; decoding counts the same bytes as the text has, EOD apart."""
    texts = ["naïve – “quoted” 東京 🙂🙂 words", "a", "plain words, words and naïve 東京\n"]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=280, special_tokens=["</s>"], initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")
    documents = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts]
    writer = IndexedWriter(tmp_path / "valid", "uint16")
    writer.add(np.concatenate(documents), np.array([len(ids) for ids in documents]))
    writer.finish()
    model = replace(opened(vocab_size=len(tokenizer)), tokenizer=tokenizer)
    result = heldout_result(model, one(tmp_path / "valid", context_lengths=(16,)), None, "key")
    size = sum(len(text.encode()) for text in texts)
    assert result["raw"]["bytes"] == size
    assert result["raw"]["bits_per_byte"] == pytest.approx(result["raw"]["nats"] / math.log(2) / size, rel=1e-15)
    assert result["raw"]["nats"] == pytest.approx(result["value"] * result["raw"]["tokens"], rel=1e-12)
    cut = heldout_result(model, one(tmp_path / "valid", context_lengths=(16,), max_tokens=len(documents[0]) + 2), None, "key")
    assert cut["raw"]["bytes"] == len((texts[0] + texts[1]).encode()), "the first two documents"


def test_without_a_tokenizer_bytes_are_data_preps_or_unknown(fem: OpenModel, prefix: Path, tmp_path: Path) -> None:
    assert heldout_result(fem, one(prefix, context_lengths=(16,)), None, "key")["raw"]["bits_per_byte"] is None
    folder = write_folder(tmp_path / "data", vocab_size=VOCAB, documents=[[8, 9, 10, 49], [11, 12, 49]])
    raw = heldout_result(fem, one(folder / "valid", context_lengths=(16,)), None, "key")["raw"]
    assert raw["bytes"] == 4 * 7, "what the manifest records"


# --- training's own validation ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps whose validation is one document of eight whole sequences, so that its windows are ours."""
    folder = tmp_path_factory.mktemp("trained")
    ids = np.random.default_rng(1).integers(0, 63, 8 * 32).tolist()
    data = write_folder(folder / "data", vocab_size=64, documents=[[*ids, 63]])
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(63)} | {"</s>": 63}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(data / "tokenizer")
    from pretrain.__main__ import main as pretrain

    settings = [f"data.{split}.0.prefix={data / split}" for split in ("train", "valid")]
    assert pretrain([DEMO, f"run_dir={folder / 'run'}", *settings, "data.test=[]", *SMALL, "train.steps=4", "train.precision=fp32"]) == 0
    return folder / "run"


def test_the_value_is_trainings_validation_loss(trained: Path) -> None:
    """At the training's length without overlap, on the run's own data: the same tokens from the same contexts."""
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    (loss,) = [line["valid_loss"] for line in lines if "valid_loss" in line]
    result = heldout_result(open_model(trained), SuiteTask(task="valid", kind="heldout"), None, "key")
    assert result["raw"]["tokens"] == 8 * 32 and result["raw"]["context"] == 32
    assert result["value"] == pytest.approx(loss, abs=1e-6)  # fp32 logits on both sides; another order of sums
    assert result["stderr"] is None, "one document"


# --- interruptions ---------------------------------------------------------------------------------------------------------------


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


def test_an_interrupted_measurement_goes_on_to_the_same_number(fem: OpenModel, prefix: Path, tmp_path: Path) -> None:
    task = one(prefix, context_lengths=(8, 12), stride=4)
    whole = heldout_result(fem, task, None, "key", batch_size=3)
    calls = Stops(fem.model, 10**6)
    for at in (4, 1):
        with pytest.raises(KeyboardInterrupt):
            heldout_result(replace(fem, model=Stops(fem.model, at)), task, tmp_path, "key", batch_size=3)
    again = heldout_result(replace(fem, model=calls), task, tmp_path, "key", batch_size=3)
    assert (again["value"], again["stderr"], again["subtasks"]) == (whole["value"], whole["stderr"], whole["subtasks"])
    everything = sum(math.ceil(len(list(windows([(0, sum(LENGTHS))], size, 4))) / 3) for size in (8, 12))
    assert 10**6 - calls.left == everything - 4 - 1, "no call twice"


def test_an_interruption_amid_a_batch_leaves_the_batch_to_do(
    fem: OpenModel, prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = one(prefix, context_lengths=(8,))
    whole = heldout_result(fem, task, None, "key", batch_size=2)
    add, calls = Sums.add, list[int]()

    def interrupted(sums: Sums, *arguments: Any) -> None:
        calls.append(0)
        if len(calls) == 4:  # the second batch's second window
            raise KeyboardInterrupt
        add(sums, *arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Sums, "add", interrupted)
        heldout_result(fem, task, tmp_path, "key", batch_size=2)
    (kept,) = Kept(tmp_path / ".valid.partial.json").sums.values()
    assert kept.position == 17, "one batch"
    assert heldout_result(fem, task, tmp_path, "key", batch_size=2)["value"] == whole["value"]


def test_sums_on_disk_are_of_one_measurement_alone(fem: OpenModel, prefix: Path, tmp_path: Path) -> None:
    """Other weights, another cut: nothing is taken over. A damaged file costs time alone."""
    text, kept = open_text(prefix), Kept(tmp_path / "kept.json")
    measure(fem, text, Settings(8, 8), kept, "key")
    never = replace(fem, model=Stops(fem.model, 0))
    again = Kept(tmp_path / "kept.json")
    assert measure(never, text, Settings(8, 8), again, "key").tokens == sum(LENGTHS) - 1
    for settings, key in ((Settings(8, 8), "other"), (Settings(8, 7), "key"), (Settings(9, 8), "key"), (Settings(8, 8, True), "key")):
        with pytest.raises(KeyboardInterrupt):
            measure(never, text, settings, again, key)
    (tmp_path / "kept.json").write_text('{"format": 1, "sums": {"a": 3}}')
    assert Kept(tmp_path / "kept.json").sums == {}


def test_sums_are_written_while_it_goes(fem: OpenModel, prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perplexity_measure, "SAVE_SECONDS", -1.0)
    seen: list[int] = []

    class Looks(Stops):
        def __call__(self, **inputs: Any) -> Any:
            seen.append(sum(sums.position for sums in Kept(tmp_path / "kept.json").sums.values()))
            return self.model(**inputs)

    measure(replace(fem, model=Looks(fem.model, 0)), open_text(prefix), Settings(10, 10), Kept(tmp_path / "kept.json"), "key", batch_size=1)
    assert seen == [0, 11, 21, 31]


# --- what is told in one line ----------------------------------------------------------------------------------------------------


def llama(vocab_size: int = VOCAB) -> OpenModel:
    """A model that only transformers knows."""
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=24
    )
    return OpenModel("llama", Path(), LlamaForCausalLM(config).eval(), None, None, {})


def test_a_foreign_model_is_measured_up_to_its_longest_context(prefix: Path) -> None:
    assert heldout_result(llama(), one(prefix), None, "key")["raw"]["context"] == 24
    with pytest.raises(ConfigError, match="--context 25 is more than llama takes: 24 tokens"):
        heldout_result(llama(), one(prefix, context_lengths=(25,)), None, "key")


@pytest.mark.parametrize(
    ("model", "task", "told"),
    [
        ({}, {"data": "{}/vald"}, "vald.bin not found; did you mean {}/valid"),
        ({}, {"data": "{}/valid.bin"}, "without its ending"),
        ({}, {"data": None}, "nothing tells its held-out data"),
        ({"vocab_size": 20}, {}, "but the model knows 20: name data of its own tokenizer"),
        ({"mixer": "mha2nd"}, {"context_lengths": (513,)}, "--context 513 is more than mha2nd takes: 512"),
        ({"causal": False}, {}, "predicts no next token"),
        ({}, {"stride": 9}, "--stride 9: must be from 1 to the context length 8"),
    ],
)
def test_mistakes(prefix: Path, model: dict[str, Any], task: dict[str, Any], told: str) -> None:
    told = told.format(prefix.parent)
    if task.get("data"):
        task = {**task, "data": task["data"].format(prefix.parent)}
    with pytest.raises(ConfigError) as error:
        heldout_result(opened(**model), replace(one(prefix), **{"context_lengths": (8,), **task}), None, "key")
    assert told in str(error.value) and "\n" not in str(error.value)


def test_an_empty_split_and_half_a_pair(fem: OpenModel, prefix: Path, tmp_path: Path) -> None:
    empty = IndexedWriter(tmp_path / "empty", "uint16")
    empty.finish()
    for path, told in ((tmp_path / "empty", "has fewer than two tokens"), (prefix, "truncated, or not of one pair")):
        if path == prefix:
            prefix.with_suffix(".bin").write_bytes(prefix.with_suffix(".bin").read_bytes()[:-2])
        with pytest.raises(ConfigError, match=told):
            heldout_result(fem, one(path, context_lengths=(8,)), None, "key")
    prefix.with_suffix(".idx").unlink()
    with pytest.raises(ConfigError, match="valid.idx not found"):
        heldout_result(fem, one(prefix, context_lengths=(8,)), None, "key")


def test_another_tokenizer_of_the_same_size(fem: OpenModel, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "data", vocab_size=VOCAB, documents=[[8, 9, 49]])

    class Other:
        eos_token_id = 49

        def get_vocab(self) -> dict[str, int]:
            return {f"one{n}": n if n != 5 else 6 for n in range(VOCAB)}

    with pytest.raises(ConfigError, match=r"another tokenizer, .*: its token 'one5' \(id 5\) has the id 6"):
        heldout_result(replace(fem, tokenizer=Other()), one(folder / "valid", context_lengths=(8,)), None, "key")


def test_weights_that_are_not_finite(prefix: Path) -> None:
    model = opened()
    with torch.no_grad():
        model.model.model.norm.weight[0] = math.nan
    with pytest.raises(ConfigError, match=r"loss of token 1 of .* is not finite"):
        heldout_result(model, one(prefix, context_lengths=(8,)), None, "key")


# --- the command -----------------------------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_and_writes_results(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(trained), "--context", "32", "16", "--stride", "16", "--out", str(tmp_path), "--device", "cpu"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["16", "16"], ["32", "16"]]
    (folder,) = tmp_path.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["valid_16.json", "valid_32.json"]
    result = json.loads((folder / "valid_32.json").read_text())
    assert (result["label"], result["higher_is_better"], result["metric"]) == ("valid @32", False, "nats_per_token")
    assert f"{result['value']:.4f}" == rows[1][2]
    from tools.evaluate.results import read

    assert {one.label for one in read([tmp_path])} == {"valid @16", "valid @32"}


def test_the_command_refuses_in_one_line(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["nowhere"], [str(trained), "--data", str(tmp_path / "nothing")], [str(trained), "--stride", "99"]):
        assert main([*arguments, "--device", "cpu"]) == 2
        told = capsys.readouterr().err
        assert told.startswith("tools.evaluate.perplexity: error: ") and told.count("\n") == 1
