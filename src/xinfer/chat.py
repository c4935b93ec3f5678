"""Messages to a prompt, by the checkpoint's own chat template.

A chat template is a Jinja program that came with the checkpoint. It sees what transformers shows it (`messages`,
`tools`, `documents`, `add_generation_prompt`, the special tokens, and whatever else the caller passes) and has what
transformers gives it (`raise_exception`, `strftime_now`, `tojson`, loop controls, the generation tag), in a sandbox
that bounds its time and memory.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.utils import Namespace

from xinfer.errors import ChatTemplateError, RequestError
from xinfer.files import is_folder, is_there, read_json_object, read_text
from xinfer.template_sandbox import MAX_DEPTH, MAX_SIZE, BoundedEnvironment, Budget, GenerationTag, LimitError, spending

MAX_FILE_BYTES = 4 * 2**20  # of a template, or of the JSON that holds it; published ones have some thousands

# The names under which reasoning models' clients pass a turn's reasoning; templates read the first.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_RESERVED = ("messages", "tools", "add_generation_prompt")


class ChatTemplate:
    """A checkpoint's chat template, or its several: one named "tool_use" is used where tools are given.

    Args:
        templates: The source, or sources by name.
        special_tokens: `bos_token` and so on, as templates see them.
        origin: Where the template was found, for messages.
    """

    def __init__(
        self,
        templates: str | Mapping[str, str],
        *,
        special_tokens: Mapping[str, str] | None = None,
        origin: str = "the chat template",
    ) -> None:
        self.templates = {"default": templates} if isinstance(templates, str) else dict(templates)
        self.special_tokens = dict(special_tokens or {})
        self.origin = origin
        self._environment = _environment()
        self._compiled: dict[str, jinja2.Template] = {}

    @classmethod
    def from_folder(cls, path: Path | str, *, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
        """The template in a checkpoint's folder, or None where there is none.

        The places, first to last: chat_template.jinja with additional_chat_templates/*.jinja, `chat_template` in
        tokenizer_config.json, and chat_template.json as older processors wrote it.
        """
        folder = Path(path)
        files = _template_files(folder)
        if files:
            sources = {
                name: read_text(file, error=ChatTemplateError, max_bytes=MAX_FILE_BYTES) for name, file in files.items()
            }
            return cls(sources, special_tokens=special_tokens, origin=str(next(iter(files.values()))))
        for name in ("tokenizer_config.json", "chat_template.json"):
            file = folder / name
            if is_there(file):
                found = _from_json(file)
                if found is not None:
                    return cls(found, special_tokens=special_tokens, origin=str(file))
        return None

    def check(self) -> None:
        """Compile every template, so that a broken one is reported before it is used."""
        for name in self.templates:
            self._template(name)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt for a conversation.

        Args:
            messages: Each a dict with `role` and `content`: a string, a list of parts such as
                `{"type": "text", "text": ...}`, or None beside `tool_calls`. Other keys are passed on.
            tools: JSON schemas of functions that the model may call.
            add_generation_prompt: End with the head of the assistant's answer.
            kwargs: Further variables of the template; they go before the special tokens.

        Raises:
            RequestError: The messages or tools are not of this form.
            ChatTemplateError: The template refuses them (with its own words), is broken, or runs out of bounds.
        """
        chat = _checked_messages(messages)
        schemas = _checked_tools(tools)
        reserved = [name for name in kwargs if name in _RESERVED]
        assert not reserved, reserved  # Python itself takes these names as arguments
        template = self._template("tool_use" if tools is not None and "tool_use" in self.templates else "default")
        values = {"documents": None, **self.special_tokens, **{k: _plain(v, k) for k, v in kwargs.items()}}
        values |= {"messages": chat, "tools": schemas, "add_generation_prompt": bool(add_generation_prompt)}
        return self._run(template, values)

    def _template(self, name: str) -> jinja2.Template:
        """The compiled template; two threads may both compile it the first time, which does no harm."""
        if name not in self._compiled:
            if name not in self.templates:
                raise ChatTemplateError(
                    f"{self.origin} has no template named {name!r}, only {', '.join(sorted(self.templates))!s:.200}; "
                    "name one of them so in the checkpoint's folder"
                )
            if not self.templates[name].strip():
                raise ChatTemplateError(
                    f"{self.origin} is empty, and would leave every message out; take it from the original checkpoint, "
                    "or remove it and use generate with a plain prompt"
                )
            try:
                with spending(Budget()):
                    self._compiled[name] = self._environment.from_source(self.templates[name])
            except jinja2.TemplateSyntaxError as error:
                raise ChatTemplateError(
                    f"{self.origin}, line {error.lineno}: {error.message!s:.500}; expected a Jinja template: mend it, "
                    "or take it from the original checkpoint"
                ) from error
            except Exception as error:
                raise ChatTemplateError(f"{self.origin} cannot be compiled: {_words(error)}") from error
        return self._compiled[name]

    def _run(self, template: jinja2.Template, values: dict[str, Any]) -> str:
        budget = Budget()
        try:
            with spending(budget):
                weight = budget.weigh(values)
                # Honest templates work in proportion to the conversation.
                budget.steps += 200 * weight.nodes
                budget.made += 64 * weight.size
                budget.seconds += weight.size / 2e6
                text = self._environment.concat(template.root_render_func(template.new_context(values)))
        except _RefusedError as error:
            raise ChatTemplateError(f"the chat template refuses these messages: {error.message!s:.1000}") from error
        except LimitError as error:
            raise ChatTemplateError(
                f"{self.origin}{_line(template, error)}: {error.message}; a chat template needs far less: use the "
                "original checkpoint's"
            ) from error
        except Exception as error:
            raise ChatTemplateError(
                f"{self.origin}{_line(template, error)} cannot render these messages: {_words(error)}; the messages "
                "may lack what the template expects, or the template is broken"
            ) from error
        half = _half_character(text)
        if half is not None:
            raise ChatTemplateError(
                f"{self.origin} writes half a character (the lone surrogate {half!r}), which has no UTF-8 form; mend "
                "it, or take it from the original checkpoint"
            )
        return text


class _RefusedError(jinja2.TemplateError):
    """The template called raise_exception."""


class _DictFunction:
    """`dict` as a function only: the class itself would be a door to Python's internals."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """A dict with these keys and one value."""
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace(...)`; prints without its contents, which may hold the namespace itself."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that namespace(self=...) works
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {name!r}; rename it without the underscore")


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
    environment.add_filter("tojson", _tojson)
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_DictFunction(), namespace=_Namespace
    )
    return environment


def _raise_exception(message: Any) -> NoReturn:
    raise _RefusedError(str(message))


def _strftime_now(format: str) -> str:  # noqa: A002 - templates may name the argument
    if len(format) > 1000:
        raise LimitError("it formats the time with a pattern of more than 1,000 characters")
    return datetime.datetime.now().strftime(format)


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as it is; Jinja's own filter would escape it for HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(
            f'messages are {messages!r:.80}; expected a list of one or more {{"role": "user", "content": "..."}}'
        )
    chat = []
    for index, message in enumerate(messages):
        where = f"message {index}"
        if not isinstance(message, Mapping):
            raise RequestError(f"{where} is {message!r:.80}; expected a dict with role and content")
        _check_message(message, where)
        # As in transformers: a key with None is a key that is not there, and reasoning has several names.
        plain = {key: value for key, value in _plain(message, where).items() if value is not None}
        reasoning = next((plain[name] for name in _REASONING if name in plain), None)
        if reasoning is not None:
            plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
        chat.append(plain)
    return chat


def _check_message(message: Mapping[str, Any], where: str) -> None:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise RequestError(f"{where} has the role {role!r:.80}; expected a string such as 'user' or 'assistant'")
    if content is None and not message.get("tool_calls"):
        raise RequestError(f"{where} ({role}) has no content; expected a string, or tool_calls beside it")
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list | tuple) or not all(isinstance(part, Mapping) for part in content):
        raise RequestError(
            f"{where} ({role}) has the content {content!r:.80}; expected a string or a list of parts such as "
            '{"type": "text", "text": "..."}'
        )
    for part in content:
        if part.get("type") == "text" and not isinstance(part.get("text"), str):
            raise RequestError(f"{where} ({role}) has the part {part!r:.80}; expected its text to be a string")


def _checked_tools(tools: Any) -> list[Any] | None:
    if tools is None:
        return None
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise RequestError(f"tools are {tools!r:.80}; expected a list of JSON schemas")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            do = "; describe a Python function by its schema" if callable(tool) else ""
            raise RequestError(
                f"tool {index} is {tool!r:.80}; expected a dict such as "
                f'{{"type": "function", "function": {{"name": ..., "parameters": ...}}}}{do}'
            )
    plain: list[Any] = _plain(list(tools), "tools")
    return plain


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy in plain JSON types: no method of a caller's object is within the template's reach."""
    if depth > MAX_DEPTH:
        raise RequestError(f"{where} nests more than {MAX_DEPTH} deep; expected plain JSON values")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if len(value) > MAX_SIZE:
            raise RequestError(f"{where} has a string of {len(value):,} characters; at most {MAX_SIZE:,} are allowed")
        half = _half_character(value)
        if half is not None:
            raise RequestError(
                f"{where} has half a character (the lone surrogate {half!r}), which has no UTF-8 form; read its source "
                "as UTF-8, or with errors='replace'"
            )
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key, where, depth + 1): _plain(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item, where, depth + 1) for item in value)
    raise RequestError(f"{where} holds a {type(value).__name__}; expected strings, numbers, lists and dicts")


def _half_character(text: str) -> str | None:
    try:
        str.encode(text, "utf-8")
    except UnicodeEncodeError as error:
        return str.__getitem__(text, error.start)
    return None


def _words(error: Exception) -> str:
    message = " ".join(str(error).split())[:500]
    if isinstance(error, RecursionError):
        return "it calls itself without end"
    if isinstance(error, MemoryError):
        return "it asks for too much memory"
    return message if isinstance(error, jinja2.TemplateError) and message else f"{type(error).__name__}: {message}"


def _line(template: jinja2.Template, error: Exception) -> str:
    """Where in the template an error came up: the innermost frame that runs code made from it."""
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__jinja_template__") is template or (
            trace.tb_frame.f_code is template.root_render_func.__code__
        ):
            line = template.get_corresponding_lineno(trace.tb_lineno)
        trace = trace.tb_next
    return "" if line is None else f", line {line}"


def _template_files(folder: Path) -> dict[str, Path]:
    found = {}
    if is_there(folder / "chat_template.jinja"):
        found["default"] = folder / "chat_template.jinja"
    more = folder / "additional_chat_templates"
    if is_there(more):
        if not is_folder(more):
            raise ChatTemplateError(f"{more} is a file; expected a folder of templates: download the model again")
        found.update({file.stem: file for file in sorted(more.glob("*.jinja"))})
    return found


def _from_json(file: Path) -> str | dict[str, str] | None:
    found = read_json_object(file, error=ChatTemplateError, max_bytes=MAX_FILE_BYTES).get("chat_template")
    if found is None or isinstance(found, str):
        return found
    if isinstance(found, list) and found:
        entries = [entry if isinstance(entry, dict) else {} for entry in found]
        named = {entry.get("name"): entry.get("template") for entry in entries}
        if all(isinstance(name, str) and isinstance(source, str) for name, source in named.items()):
            return {str(name): str(source) for name, source in named.items()}
    raise ChatTemplateError(
        f"{file}: chat_template is {found!r:.80}; expected a string, or a list of objects with name and template"
    )
