"""Encoder of conversations: a chat template, applied by transformers, and the mask of the loss.

transformers is imported only here, and only for data of messages.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from data_prep.aliases import Json
from data_prep.encode.encoders import Encoded
from data_prep.encode.tokenizer import CHAT_TEMPLATE, TokenizerFolder
from data_prep.sources.rows import PAIR, Drop, raise_if_memory
from fem_common.errors import UserError
from fem_common.files import sha256_json
from fem_common.text import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# The pattern with which transformers finds blocks of generation.
GENERATION = re.compile(r"\{\%-?\s*generation\s*-?\%\}")
MARK = "mark the assistant's text in the template with {% generation %} and {% endgeneration %}"


class BadConversation(ValueError):
    """Error raised for a row that cannot be encoded, with the reason."""

    def __init__(self, reason: Drop, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Chat:
    """Encoder of conversations, given as the JSON of ``rows.messages_json``.

    The ids are those of ``apply_chat_template(messages, tokenize=True)``; an EOD at the end is left
    out, because each document is followed by one. The mask is 1 for tokens that count as labels:
    those in the template's generation blocks. Without such blocks they are the tokens that start in
    the text that an assistant's message adds to the text of the messages before it and the
    generation prompt. ``template_sha256`` is the hash of the template and of the special tokens
    that it can name. If a hash is given and differs, or if the tokenizer has no template, UserError
    is raised.
    """

    def __init__(self, folder: TokenizerFolder, template_sha256: str | None = None) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        from tokenizers import processors
        from transformers import __version__, logging

        logging.set_verbosity_error()
        self.name, self.eod = f"transformers {__version__}", folder.eod_id
        self.tokenizer = _load(folder)
        template = _template(self.tokenizer, folder.path)
        self.blocks = GENERATION.search(template) is not None
        self.template_sha256 = sha256_json([template, self.tokenizer.special_tokens_map])
        if template_sha256 not in (None, self.template_sha256):
            raise UserError(
                f"the chat template or a special token in {folder.path} is not that of the plan; "
                "plan again with --overwrite"
            )
        if not self.blocks:
            # Post-processors move the offsets of tokens that begin with a space.
            self.tokenizer.backend_tokenizer.post_processor = processors.Sequence([])

    def encode(self, texts: pa.LargeStringArray) -> Encoded:
        """Return the ids and the mask of n conversations, and the faults of the others."""
        ids: list[int] = []
        mask: list[int] = []
        ends, sizes = [0], []
        faults: dict[int, tuple[Drop, str]] = {}
        for number, text in enumerate(texts.to_pylist()):
            size = 0
            try:
                more, marks, size = self._one(messages_of(text))
                ids += more
                mask += marks
            except BadConversation as error:
                faults[number] = error.reason, str(error)
                mask.append(0)
            ends.append(len(ids))
            sizes.append(size)
        return Encoded(
            np.array(ids, np.uint32),
            np.array(ends, np.int64),
            np.array(mask, np.uint8),
            np.array(sizes, np.int64),
            faults,
        )

    def _one(self, messages: list[Json]) -> tuple[list[int], list[int], int]:
        """Return (ids without EOD [n], mask with EOD [n + 1], bytes of the text)."""
        if all(message["role"] != "assistant" for message in messages):
            raise BadConversation(Drop.NOTHING_COUNTS, "no message has the role assistant")
        text: str = self._apply(messages, tokenize=False)
        encoded = self._apply(
            messages,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=self.blocks,
            tokenizer_kwargs={"return_offsets_mapping": True},
        )
        ids: list[int] = encoded["input_ids"]
        if self.blocks:
            mask: list[int] = encoded["assistant_masks"]
        else:
            starts = np.array([start for start, _ in encoded["offset_mapping"]], np.int64)
            counts = np.zeros(len(ids), np.bool_)
            for start, stop in self._spans(messages, text):
                counts |= (starts >= start) & (starts < stop)
            mask = counts.astype(int).tolist()
        if not any(mask):
            raise BadConversation(Drop.NOTHING_COUNTS, f"no token is the assistant's; {MARK}")
        if ids[-1] == self.eod:
            return ids[:-1], mask, len(text.encode())
        return ids, [*mask, 1], len(text.encode())

    def _spans(self, messages: list[Json], text: str) -> list[tuple[int, int]]:
        """Return the ranges of characters of ``text`` that the assistant's messages add."""
        spans = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                if number == 0:  # transformers renders no empty conversation
                    raise BadConversation(
                        Drop.TEMPLATE_FAILED, f"the first message is the assistant's; {MARK}"
                    )
                before = self._apply(messages[:number], tokenize=False, add_generation_prompt=True)
                after = self._apply(messages[: number + 1], tokenize=False)
                if not (text.startswith(after) and after.startswith(before)):
                    raise BadConversation(
                        Drop.TEMPLATE_FAILED,
                        f"the template writes the text before or in message {number + 1} "
                        f"differently when the conversation continues; {MARK}",
                    )
                spans.append((len(before), len(after)))
        return spans

    def _apply(self, messages: list[Json], **how: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(messages, **how)
        except ImportError as error:
            raise UserError(f"--messages needs jinja2: {one_line(error)}") from None
        except Exception as error:  # a template may raise any class
            raise_if_memory(error)
            fault = f"{type(error).__name__}: {one_line(error)}"
            raise BadConversation(Drop.TEMPLATE_FAILED, fault) from None


def messages_of(text: str) -> list[Json]:
    """Return the messages of a conversation from its JSON: a list, or an object of PAIR.

    Each has a role, and content or calls of tools. Raises BadConversation.
    """
    value = json.loads(text)
    if isinstance(value, dict):
        value = [
            message
            for key, role in zip(PAIR, ("user", "assistant"), strict=True)
            for message in _side(value.get(key), key, role)
        ]
    if not (isinstance(value, list) and value):
        raise BadConversation(Drop.NOT_MESSAGES, "it is not a list of messages")
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadConversation(Drop.NOT_MESSAGES, f"message {number} has no role")
        if not (isinstance(message.get("content"), (str, list)) or message.get("tool_calls")):
            raise BadConversation(Drop.NOT_MESSAGES, f"message {number} has no content")
    return value


def _side(value: Any, key: str, role: str) -> list[Any]:
    if isinstance(value, list):
        return value
    if not isinstance(value, str):
        raise BadConversation(
            Drop.NOT_MESSAGES, f"its {key!r} is neither text nor a list of messages"
        )
    return [{"role": role, "content": value}]


def _load(folder: TokenizerFolder) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    file = folder.path / "tokenizer.json"
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            folder.path, tokenizer_file=str(file), local_files_only=True
        )
    except Exception as error:  # the parser of the library raises bare Exceptions
        raise UserError(f"transformers cannot read {folder.path}: {one_line(error)}") from None
    if folder.template:
        tokenizer.chat_template = _text(folder.template)
    vocabulary = tokenizer.get_vocab()
    beyond = [token for token, number in vocabulary.items() if number >= folder.vocab_size]
    if beyond:
        raise UserError(
            f"{folder.path / 'tokenizer_config.json'} adds {beyond[0]!r}, which tokenizer.json "
            "lacks; save the tokenizer again with transformers' save_pretrained"
        )
    return tokenizer


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 ({one_line(error)})") from None


def _template(tokenizer: PreTrainedTokenizerFast, path: Path) -> str:
    try:
        template: str = tokenizer.get_chat_template()
    except ValueError:
        raise UserError(
            f"the tokenizer {path} has no chat template; name one with --chat-template "
            f"FILE.jinja, or save it as {CHAT_TEMPLATE}"
        ) from None
    return template
