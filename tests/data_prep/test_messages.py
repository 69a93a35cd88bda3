"""Tests of conversations: ids and mask against transformers, equal files for every source, number
of units and workers, bad rows by reason, and damage to the mask.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from data_prep.encode.chat import Chat
from data_prep.encode.tokenizer import load_folder
from data_prep.prepared.indexed import sample_digest
from data_prep.verify.sample import WHILE_ENCODING
from fem_common.files import sha256
from tests.data_prep import conftest as base

EOD = "<|endoftext|>"
SHIPPED = base.ROOT / "configs/data/chat_template.jinja"
PROMPT = "{% if add_generation_prompt %}HEAD{% endif %}"
LOOP = "{% for m in messages %}"
# Templates without blocks of generation; BLOCK and END are replaced by such blocks.
TEMPLATES = {
    "special tokens": (
        LOOP + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}BLOCK{{ m.content }}"
        "<|im_end|>\nEND{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        + PROMPT.replace("HEAD", "<|im_start|>assistant\n")
    ),
    "text": (
        LOOP + "{% if m.role == 'assistant' %}\n:BLOCK{{ m.content }}\nEND{% else %}"
        "{{ m.role }} {{ m.content }}{% endif %}{% endfor %}" + PROMPT.replace("HEAD", "\n:")
    ),
    "EOD": (
        LOOP + "{% if m.role == 'assistant' %}<|im_start|>BLOCK{{ m.content }}"
        "{{ eos_token if loop.last }}\nEND{% else %}{{ m.content }}{% endif %}{% endfor %}"
        + PROMPT.replace("HEAD", "<|im_start|>")
    ).replace("\nEND", "END"),
}


def turns(*contents: str) -> list[dict[str, Any]]:
    """Return messages of a user and an assistant in turn."""
    return [
        {"role": ("user", "assistant")[number % 2], "content": content}
        for number, content in enumerate(contents)
    ]


TALKS = [
    turns("free energy", "the mixer 東京 🙂"),
    turns("one", "two words", "three", ""),
    [{"role": "system", "content": "gate"}, *turns("<|im_end|> a", " b\n\n c ")],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    """Tokenizer with the special tokens of ChatML and without a template."""
    out = base.copied(tokenizer, tmp_path_factory.mktemp("chat") / "tokenizer")
    full = Tokenizer.from_file(str(out / "tokenizer.json"))
    full.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    full.save(str(out / "tokenizer.json"))
    return out


def chat(folder: Path, template: str) -> Chat:
    """Return an encoder with a template, which becomes that of the folder."""
    (folder / "chat_template.jinja").write_text(template)
    return Chat(load_folder(folder))


def encoded(
    encoder: Chat, talks: Sequence[Any]
) -> tuple[list[tuple[list[int], list[int]]], dict[int, tuple[str, str]]]:
    """Return the ids and the mask, both with EOD, of each conversation, and the faults."""
    found = encoder.encode(pa.array([json.dumps(talk) for talk in talks], pa.large_string()))
    assert found.mask is not None
    documents = []
    for number in range(len(talks)):
        start, stop = (int(each) for each in found.offsets[number : number + 2])
        mask = found.mask[start + number : stop + number + 1].tolist()
        documents.append(([*found.ids[start:stop].tolist(), encoder.eod], mask))
    return documents, dict(found.faults)


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_and_mask_are_those_of_transformers(folder: Path, tmp_path: Path, name: str) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = base.copied(folder, tmp_path / "tokenizer")
    blocks = TEMPLATES[name].replace("BLOCK", "{% generation %}")
    blocks = blocks.replace("END", "{% endgeneration %}")
    documents, faults = encoded(chat(folder, blocks), TALKS)
    plain = TEMPLATES[name].replace("BLOCK", "").replace("END", "")
    assert not faults
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    for (ids, mask), talk in zip(documents, TALKS, strict=True):
        wanted = theirs.apply_chat_template(
            talk, return_dict=True, return_assistant_tokens_mask=True
        )
        ends = wanted["input_ids"][-1] == theirs.eos_token_id
        assert ends == (name == "EOD")
        assert ids == wanted["input_ids"] + [theirs.eos_token_id] * (not ends)
        assert mask == wanted["assistant_masks"] + [1] * (not ends)
    without, _ = encoded(chat(folder, plain), TALKS[:1] if name == "EOD" else TALKS)
    assert without == documents[: len(without)]


def test_a_token_across_the_border_counts_if_it_starts_in_the_text_of_the_assistant(
    folder: Path, tmp_path: Path
) -> None:
    folder = base.copied(folder, tmp_path / "tokenizer")
    for before, after, counted in ((":", " the", 1), (": ", "the", 0)):
        template = LOOP + "{% if m.role == 'user' %}u{% else %}" + before
        template += "{{ m.content }}\n{% endif %}{% endfor %}" + PROMPT.replace("HEAD", before)
        encoder = chat(folder, template)
        [(ids, mask)], _ = encoded(encoder, [turns("", after)])
        assert encoder.tokenizer.convert_ids_to_tokens(ids[:3]) == ["u", ":", "Ġthe"]
        assert mask == [0, 0, counted, 1, 1]


def test_a_bad_conversation_has_a_reason(folder: Path, tmp_path: Path) -> None:
    folder = base.copied(folder, tmp_path / "tokenizer")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'x' %}{{ raise_exception('no x') }}{% endif %}"
        "{{ m.content if loop.last or m.role == 'user' else 'short' }}{% endfor %}"
    )
    talks = {
        "not_messages: it is not a list": [],
        "not_messages: message 1 has no role": ["text"],
        "not_messages: message 2 has no content": [*turns("a"), {"role": "assistant"}],
        "not_messages: its 'prompt' is neither": {"completion": "b"},
        "nothing_counts: no message has": turns("a"),
        "nothing_counts: no token is": turns("a", ""),
        "template_failed: the first message is": turns("a", "b")[1:],
        "template_failed: TemplateError: no x": [*turns("a", "b"), {"role": "x", "content": ""}],
        "template_failed: the template writes the text before or in message 2": turns(*"abcd"),
    }
    _, faults = encoded(Chat(load_folder(folder)), [*talks.values(), turns("a", "b")])
    for number, start in enumerate(talks):
        reason, message = faults.pop(number)
        assert f"{reason}: {message}".startswith(start) and reason in WHILE_ENCODING
        assert ("{% generation %}" in message) == any(
            each in start for each in ("no token", "writes", "first")
        )
    assert not faults


# --- data folders ---------------------------------------------------------------------------------


def lines(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [
        {"id": f"{n}", "messages": [*turns(f"add {n}", f"{n + 1} naïve", "more", "the end")]}
        for n in range(60)
    ]


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, folder: Path, rows: list[dict[str, Any]]
) -> Path:
    """Data of the rows, of several units, encoded in this process."""
    top = tmp_path_factory.mktemp("made")
    source = lines(top / "rows.jsonl", rows)
    return base.prepared(top / "data", [source], folder, base.SMALL_UNITS, *options())


def options(template: Path = SHIPPED) -> list[str]:
    return ["--messages", f"--chat-template {template}"]


def test_every_token_has_a_byte_and_the_manifest_describes_them(made: Path) -> None:
    manifest = base.manifest_of(made)
    text = Tokenizer.from_file(str(made / "tokenizer/tokenizer.json"))
    assert (made / "tokenizer/chat_template.jinja").read_bytes() == SHIPPED.read_bytes()
    rendered = 0
    for name, split in manifest["splits"].items():
        mask, path = np.fromfile(made / f"{name}.mask", np.uint8), made / f"{name}.mask"
        assert split["mask"] == {
            "bytes": split["tokens"],
            "sha256": sha256(path),
            "sample": sample_digest(path),
            "counted": int(mask.sum()),
        }
        documents, start = base.read_split(made, name), 0
        for ids in documents:
            own = mask[start : start + len(ids)]
            start += len(ids)
            rendered += len(text.decode(ids[:-1]).encode())
            counted = text.decode([i for i, one in zip(ids, own, strict=True) if one])
            assert counted.endswith(" naïve\nthe end\n") and own[-1] == 1 and own[0] == 0
    assert sum(split["text_bytes"] for split in manifest["splits"].values()) == rendered
    assert "60 documents encoded again agree" in base.done("verify", made)
    for verb in ("stats", "status"):
        assert " tokens count in the loss (" in base.done(verb, made)


def _pairs(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"], "prompt": row["messages"][:3], "completion": row["messages"][3:]}


def _parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    rows = [
        {**row, "messages": [{**row["messages"][0], "name": "x"}, *row["messages"][1:]]}
        for row in rows
    ]
    pq.write_table(pa.Table.from_pylist(rows), path.with_suffix(".parquet"), row_group_size=7)
    return path.with_suffix(".parquet")


def _arrow(path: Path, rows: list[dict[str, Any]]) -> Path:
    table = pa.Table.from_pylist([_pairs(row) for row in rows])
    with pa.ipc.new_stream(path.with_suffix(".arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=9)
    return path.with_suffix(".arrow")


SOURCES: dict[str, Callable[[Path, list[dict[str, Any]]], Path]] = {
    "JSONL, pairs": lambda path, rows: lines(path, [_pairs(row) for row in rows]),
    "Parquet": _parquet,
    "Arrow, pairs": _arrow,
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_and_number_of_workers_gives_the_same_files(
    tmp_path: Path, made: Path, folder: Path, rows: list[dict[str, Any]], source: str
) -> None:
    path = SOURCES[source](tmp_path / "rows.jsonl", rows)
    command = ["run", path, f"--tokenizer {folder} --out {tmp_path}/out --workers 2", base.SHARES]
    base.done(*command, base.SMALL_UNITS, *options())
    for file in sorted(made.glob("*.[bim][idxa]*")):
        if file.name != "manifest.json":
            assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    assert "unchanged" in base.done(*command, base.SMALL_UNITS, *options())


def test_bad_rows_of_a_file_are_dropped_by_reason(tmp_path: Path, folder: Path) -> None:
    good = {"prompt": "the gate", "completion": "value"}
    big = [
        *turns(""),
        {"role": "assistant", "content": "x", "call": {"n": 12345678901234567890, "f": 0.5}},
    ]
    bad = [
        {"messages": None},
        {"messages": "text"},
        {"messages": turns("a")},
        {"messages": turns(f"a {EOD} b", "c")},
        {"prompt": "a"},
        {"messages": turns("\ud800", "a")},
    ]
    source = lines(tmp_path / "rows.jsonl", [good, *bad, {"messages": big}])
    template = tmp_path / "t.jinja"
    template.write_text(LOOP + "{{ m.content }}{{ m.call | tojson if m.call }}\n{% endfor %}")
    out = base.prepared(tmp_path / "out", [source], folder, base.ALL_TRAIN, *options(template))
    assert base.manifest_of(out)["source"]["dropped"] == dict.fromkeys(
        "null_text invalid_utf8 contains_eod not_messages nothing_counts malformed".split(), 1
    )
    assert "turns end in another token" in (out / "bad_rows.jsonl").read_text()
    text = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert (
        text.decode(base.read_split(out, "train")[1])
        == '\nx{"n": 12345678901234567890, "f": 0.5}\n'
    )
    assert "fault" not in base.done("verify", out)
    shown = base.done("inspect", source, f"--tokenizer {folder}", *options(template))
    assert "while encoding: 1 contains_eod, 1 not_messages, 1 nothing_counts" in shown


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        ("train.mask flip 3", "content differs from the manifest's hash"),
        ("train.mask cut 1", "(truncated)"),
        ("train.mask gone", "is missing"),
        ("manifest.json set splits.train.mask.counted 1", "tokens count, the manifest says 1"),
        ("manifest.json pop splits.train.mask", "splits.train.mask"),
        ("tokenizer/chat_template.jinja add x", "is not that of the plan"),
    ],
)
def test_verify_finds_damage_to_a_mask(tmp_path: Path, made: Path, damage: str, fault: str) -> None:
    out = base.copied(made, tmp_path / "data")
    base.spoil(out, damage)
    result = base.cli("verify", out)
    assert result.returncode == 1 and fault in result.stdout, result


def test_verify_encodes_the_mask_again_and_knows_its_values(tmp_path: Path, made: Path) -> None:
    for value, fault in ((1, "is not what"), (2, "1 bytes are neither 0 nor 1")):
        out = base.copied(made, tmp_path / str(value))
        path = out / "test.mask"
        raw = bytearray(path.read_bytes())
        raw[0] = value
        path.write_bytes(raw)
        record = {"sha256": sha256(path), "sample": sample_digest(path), "counted": raw.count(1)}

        def change(lines: list[dict[str, Any]], more: int = value % 2) -> None:
            unit = next(unit for unit in lines if "test" in unit["splits"])
            unit["splits"]["test"]["mask"]["counted"] += more

        base.edit_units(out, change)
        manifest = base.manifest_of(out)
        manifest["splits"]["test"]["mask"].update(record)
        (out / "manifest.json").write_text(json.dumps(manifest))
        result = base.cli("verify", out)
        assert result.returncode == 1 and fault in result.stdout, result


def test_errors_name_the_fix(tmp_path: Path, made: Path, folder: Path) -> None:
    source = lines(tmp_path / "rows.jsonl", [{"message": turns("a", "b")}])
    text = lines(tmp_path / "text.jsonl", [{"messages": "a"}])
    plan = ["plan", f"--tokenizer {folder} --out {tmp_path}/out --messages"]
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert "name one with --chat-template" in base.refused(*plan, source)
    template = f"--chat-template {SHIPPED}"
    assert "did you mean 'message'?" in base.refused(*plan, source, template)
    assert "is text, not a list of messages" in base.refused(*plan, text, template)
    assert "--chat-template goes with --messages" in base.refused(
        "plan", source, f"--tokenizer {folder} --out {tmp_path}/out", template
    )
    assert "no such file: nowhere" in base.refused(*plan, source, "--chat-template nowhere")
    (tmp_path / "a.txt").write_text("a")
    assert "not with .txt files" in base.refused(*plan, tmp_path / "a.txt", template)
    (tmp_path / "other.jinja").write_text("x" + SHIPPED.read_text())
    again = ["plan", made.parent / "rows.jsonl", f"--tokenizer {folder} --out {made}"]
    other = base.refused(*again, base.SHARES, base.SMALL_UNITS, *options(tmp_path / "other.jinja"))
    assert "another --chat-template" in other
    assert "--chat-template differs from the plan" in base.refused(
        "run", f"--out {made}", *options(tmp_path / "other.jinja")
    )


def test_the_shipped_conversations_count_the_text_of_the_assistant(folder: Path) -> None:
    source = base.ROOT / "configs/data/chat.jsonl"
    talks = [json.loads(line)["messages"] for line in source.read_text().splitlines()]
    encoder = Chat(load_folder(folder, SHIPPED))
    documents, faults = encoded(encoder, talks)
    assert not faults and len(talks) == len({json.dumps(talk) for talk in talks}) > 150
    for (ids, mask), talk in zip(documents, talks, strict=True):
        counted = [i for i, one in zip(ids[:-1], mask, strict=False) if one]
        spoken = [m["content"] + "\n" for m in talk if m["role"] == "assistant"]
        assert encoder.tokenizer.decode(counted) == "".join(spoken)


@pytest.mark.slow
def test_conversations_need_no_torch(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from data_prep.encode.chat import Chat; "
        "from data_prep.encode.tokenizer import load_folder; import pyarrow as pa; "
        "chat = Chat(load_folder(Path(sys.argv[1]), Path(sys.argv[2]))); "
        "found = chat.encode(pa.array([sys.argv[3]], pa.large_string())); "
        "sys.exit('torch' in sys.modules or not found.mask.any())"
    )
    talk = json.dumps(TALKS[0])
    command = [sys.executable, "-c", code, str(folder), str(SHIPPED), talk]
    subprocess.run(command, cwd=base.ROOT, env=base.little({}), check=True, timeout=300)
