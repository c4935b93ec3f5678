"""Messages to a prompt, by the checkpoint's own chat template (first version)."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from xinfer.errors import ChatTemplateError


class ChatTemplate:
    """A checkpoint's chat template."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols], autoescape=False
        )
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise_exception
        env.globals["strftime_now"] = _strftime_now
        try:
            self._template = env.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template cannot be read: {error}") from error

    @classmethod
    def from_folder(cls, path: Path | str, *, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
        """The template in a checkpoint's folder, or None where there is none."""
        folder = Path(path)
        if (folder / "chat_template.jinja").is_file():
            return cls((folder / "chat_template.jinja").read_text("utf-8"), special_tokens=special_tokens)
        config_file = folder / "tokenizer_config.json"
        if config_file.is_file():
            source = json.loads(config_file.read_text("utf-8")).get("chat_template")
            if isinstance(source, str):
                return cls(source, special_tokens=special_tokens)
        return None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt for these messages."""
        values = {**self.special_tokens, **kwargs}
        try:
            return self._template.render(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **values
            )
        except Exception as error:
            raise ChatTemplateError(f"the chat template cannot render these messages: {error}") from error


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
