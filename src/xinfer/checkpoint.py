"""A model folder without its weights: configuration, tokenizer, chat template, and the settings of a request."""

from __future__ import annotations

import dataclasses
import operator
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

from xinfer import hub
from xinfer.chat import ChatTemplate
from xinfer.errors import ChatTemplateError, RequestError
from xinfer.model.config import GenerationConfig, Qwen2Config
from xinfer.sampling import SamplingParams
from xinfer.settings import Settings, resolve_settings
from xinfer.tokenizer import Tokenizer

AT_ONCE_S = 0.02  # a tokenizer that is missing has been missed by then

Message = Mapping[str, Any]


class Checkpoint:
    """What a model folder says about text. Opening one reads no weights.

    Args:
        model: a folder in Hugging Face form, a hub name, or None for the bundled demo model.
        meanwhile: called with the folder and its configuration while a thread reads the tokenizer, which takes a good
            part of a second where there are 150,000 tokens. What is wrong with a file is told behind it, but for what
            shows at once.
    """

    def __init__(
        self, model: str | Path | None = None, *, meanwhile: Callable[[Path, Qwen2Config], None] | None = None
    ) -> None:
        self.folder = hub.resolve(model)
        self.config = Qwen2Config.from_json(self.folder / "config.json")
        self.generation_config = GenerationConfig.from_folder(self.folder)
        if meanwhile is None:
            self._read_texts()
            return
        with ThreadPoolExecutor(1, "xinfer-tokenizer") as threads:
            texts = threads.submit(self._read_texts)
            wait([texts], timeout=AT_ONCE_S)
            if texts.done():
                texts.result()
            meanwhile(self.folder, self.config)
            texts.result()

    def _read_texts(self) -> None:
        self.tokenizer = Tokenizer.from_folder(self.folder)
        self.tokenizer.check_vocab_size(self.config.vocab_size)
        self.chat_template = ChatTemplate.from_folder(self.folder, special_tokens=self.tokenizer.special_tokens)

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """The ids of a prompt: text with the tokenizer's own special tokens, or ids, checked and used as they are."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, bytes | bytearray | memoryview | Mapping):
            raise RequestError(f"a prompt of type {type(prompt).__name__}; expected text, or a list of token ids")
        try:
            ids = [_token_id(token) for token in prompt]
        except TypeError:
            raise RequestError(
                f"a prompt of type {type(prompt).__name__} that holds more than whole numbers; expected text, "
                "or a list of token ids"
            ) from None
        bad = next((token for token in ids if not 0 <= token < self.config.vocab_size), None)
        if bad is not None:
            raise RequestError(f"token id {bad} in the prompt; expected 0 to {self.config.vocab_size - 1}")
        return ids

    def encode_chat(self, messages: str | Sequence[Message], *, tools: Sequence[Message] | None = None) -> list[int]:
        """The ids of a rendered conversation, up to where the assistant is to answer."""
        text = self.render_chat(messages, tools=tools)
        return self.tokenizer.encode(text, add_special_tokens=False)  # the template has written them

    def render_chat(self, messages: str | Sequence[Message], *, tools: Sequence[Message] | None = None) -> str:
        """A conversation as the checkpoint's own template writes it; a string is one user message."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.require_chat_template().render(messages, tools=tools, add_generation_prompt=True)

    def require_chat_template(self) -> ChatTemplate:
        """The chat template, or an error that says what to do without one."""
        if self.chat_template is None:
            raise ChatTemplateError(
                f"{self.folder} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); "
                "use generate with a plain prompt, or a checkpoint made for chat"
            )
        return self.chat_template

    def settings(self, params: SamplingParams | None = None, **overrides: Any) -> Settings:
        """What a request with these values runs with, and where each comes from; draws a seed where none is given."""
        if not isinstance(params, SamplingParams | None):
            raise RequestError(f"params of type {type(params).__name__}; expected SamplingParams(...)")
        known = [field.name for field in dataclasses.fields(SamplingParams)]
        unknown = sorted(set(overrides) - set(known))
        if unknown:
            raise RequestError(f"unknown sampling values {', '.join(unknown)}; expected some of: {', '.join(known)}")
        params = dataclasses.replace(params or SamplingParams(), **overrides)
        settings = resolve_settings(params, self.generation_config, self.config)
        # A stop string that is a special token never shows up as text: stop at its id.
        special = {token for text in params.stop if (token := self.tokenizer.special_id(text)) is not None}
        seed = secrets.randbits(32) if params.seed is None else params.seed
        return dataclasses.replace(
            settings,
            params=dataclasses.replace(settings.params, seed=seed),
            stop_ids=settings.stop_ids | special,
        )


def _token_id(token: Any) -> int:
    if isinstance(token, bool | np.bool_):
        raise TypeError
    return operator.index(token)


def check_context(context: int | None, config: Qwen2Config) -> int:
    """The context to use, in tokens: as asked for, or all that the model was trained for."""
    limit = config.max_context
    if context is None:
        return limit
    if not isinstance(context, int) or isinstance(context, bool):
        raise RequestError(f"a context of {context!r}; expected a whole number of tokens")
    if not 2 <= context <= limit:
        raise RequestError(f"a context of {context:,} tokens; expected 2 to {limit:,}, what this model was trained for")
    return context
