"""Our prompts against transformers' `apply_chat_template`, with templates of our own that use what real ones use.

Run as a program, this file writes tests/data/chat_golden.json, which `make test` checks without transformers.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from xinfer.chat import ChatTemplate
from xinfer.errors import ChatTemplateError, XinferError

pytestmark = pytest.mark.transformers

DATA = Path(__file__).parents[1] / "data"
GOLDEN = DATA / "chat_golden.json"
TEMPLATES = {file.stem: file.read_text(encoding="utf-8") for file in sorted((DATA / "templates").glob("*.jinja"))}
SPECIAL_TOKENS = {"bos_token": "<|begin|>", "eos_token": "<|end_of_text|>", "pad_token": "<|pad|>"}

TEXTS = [
    "What is the capital of Switzerland?", "Bern.", "  leading and trailing  \n", "", "two\n\nparagraphs\r\nand more",
    "<|im_end|> spelled out", "déjà vu — 你好 👩‍👩‍👧",
    'quotes " and \' and \\ and </think> in text', "{{ 7 * 7 }}{% raw %}",
    "<think>\nFirst I add.\n</think>\n\nThe sum is 4.", "<b>bold</b> & <i>thin</i>", "a\tb\u00a0c\u2028d",
    "<tool_response>\n{}\n</tool_response>", "1234567890 " * 5,
]  # fmt: skip
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a place, in °C",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer", "default": 1}},
            "required": ["place"],
        },
    },
}
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {}, "y": {}}, "required": []}},
}


def _call(rng: random.Random) -> dict[str, Any]:
    function = {"name": "weather", "arguments": {"place": rng.choice(["Bern", "Zürich", 'a "b"']), "days": 2}}
    if rng.random() < 0.3:
        function["arguments"] = '{"place": "Genf"}'
    return rng.choice([{"type": "function", "function": function, "id": "call_0"}, function])


def _plain_turns(rng: random.Random) -> list[dict[str, Any]]:
    turns = [{"role": "system", "content": rng.choice(TEXTS)}] if rng.random() < 0.5 else []
    roles = ["user", "assistant", "user", "assistant", "user"][: rng.randint(1, 5)]
    return turns + [{"role": role, "content": rng.choice(TEXTS)} for role in roles]


def _tool_turns(rng: random.Random) -> list[dict[str, Any]]:
    turns = _plain_turns(rng)
    for _ in range(rng.randint(1, 2)):
        calls = [_call(rng) for _ in range(rng.randint(1, 3))]
        turns.append({"role": "assistant", "content": rng.choice([None, "", "Let me see."]), "tool_calls": calls})
        turns += [{"role": "tool", "content": rng.choice(['{"t": 21}', "sunny", "é"])} for _ in calls]
    return [*turns, *([{"role": "user", "content": "And tomorrow?"}] if rng.random() < 0.5 else [])]


def _reasoning_turns(rng: random.Random) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for _ in range(rng.randint(1, 3)):
        turns.append({"role": "user", "content": rng.choice(TEXTS)})
        answer: dict[str, Any] = {"role": "assistant", "content": rng.choice(TEXTS)}
        key = rng.choice(["", "reasoning_content", "reasoning", "thinking"])
        turns.append(answer | ({key: "\nI wonder.\n"} if key else {}))
    return turns[: rng.randint(1, len(turns))]


def _parts(rng: random.Random) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": rng.choice(TEXTS)} for _ in range(rng.randint(1, 3))]
    return [*parts, *([{"type": "image", "image": "cat.png"}] if rng.random() < 0.3 else [])]


def _part_turns(rng: random.Random, depth: int = 0) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for index in range(rng.randint(1, 4)):
        content = _parts(rng) if rng.random() < 0.6 else rng.choice(TEXTS)
        turn: dict[str, Any] = {"role": ("user", "assistant")[index % 2], "content": content}
        if rng.random() < 0.3:
            turn["name"] = "ada lovelace"
        if depth < 2 and rng.random() < 0.3:
            turn["replies"] = _part_turns(rng, depth + 1)
        turns.append(turn)
    return turns


MAKERS = {
    "turns": _plain_turns,
    "tools": _tool_turns,
    "reasoning": _reasoning_turns,
    "begins_itself": _reasoning_turns,
    "parts": _part_turns,
    "dated": _plain_turns,
    "odd_corners": _plain_turns,
}


def conversations() -> list[dict[str, Any]]:
    """Ten for each template, some of them with tools, further variables, or turns that the template refuses."""
    cases = []
    for name, make in MAKERS.items():
        for seed in range(10):
            rng = random.Random(f"{name} {seed}")
            case: dict[str, Any] = {"template": name, "messages": make(rng), "kwargs": {}}
            case["tools"] = rng.choice([None, [], [WEATHER], [WEATHER, ADD]])
            case["add_generation_prompt"] = rng.random() < 0.7
            if name == "reasoning":
                case["kwargs"] = rng.choice([{}, {"enable_thinking": False}, {"enable_thinking": True}])
            if name == "dated":
                case["kwargs"] = {"date_string": "1 Aug 2026"} if seed else {}
                case["kwargs"] |= rng.choice([{}, {"custom_tools": [ADD, WEATHER]}])
            if name == "odd_corners":
                case["kwargs"] = rng.choice(
                    [{}, {"documents": [{"title": "T", "text": "long " * 9}], "pad_token": "P"}]
                )
            cases.append(case)
    wrong: dict[str, Any] = {"template": "turns", "kwargs": {}, "tools": None, "add_generation_prompt": True}
    cases.append(wrong | {"messages": [{"role": "tool", "content": "x"}]})
    cases.append(wrong | {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]})
    cases.append(
        wrong | {"messages": [{"role": "user", "content": [{"type": "audio", "url": "x"}]}], "template": "parts"}
    )
    return cases


def ours(case: dict[str, Any]) -> str:
    template = ChatTemplate(TEMPLATES[case["template"]], special_tokens=SPECIAL_TOKENS)
    return template.render(
        case["messages"], tools=case["tools"], add_generation_prompt=case["add_generation_prompt"], **case["kwargs"]
    )


def theirs(case: dict[str, Any], chat_template: Any = None) -> str:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL_TOKENS)
    tokenizer.chat_template = chat_template or TEMPLATES[case["template"]]
    text: str = tokenizer.apply_chat_template(
        case["messages"],
        tools=case["tools"],
        add_generation_prompt=case["add_generation_prompt"],
        tokenize=False,
        **case["kwargs"],
    )
    return text


CASES = conversations()


def prompt_or_refusal(case: dict[str, Any]) -> dict[str, str]:
    jinja2 = pytest.importorskip("jinja2")
    try:
        return {"prompt": theirs(case)}
    except jinja2.TemplateError as error:
        return {"refusal": str(error)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["template"])
def test_prompts_are_transformers(case: dict[str, Any]) -> None:
    expected = prompt_or_refusal(case)
    if "refusal" in expected:
        with pytest.raises(ChatTemplateError) as caught:
            ours(case)
        assert expected["refusal"] in str(caught.value)
    else:
        assert ours(case) == expected["prompt"]


def test_the_cases_are_many_and_few_are_refused() -> None:
    prompts = []
    for case in CASES:
        try:
            prompts.append(ours(case))
        except XinferError:
            continue
    assert len(set(prompts)) >= 60


@pytest.mark.parametrize("tools", [None, [], [WEATHER]])
def test_the_template_for_tools_is_chosen_as_transformers_chooses_it(tools: Any) -> None:
    named = {"default": "plain {{ messages[0].content }}", "tool_use": "tools {{ tools | length }}"}
    case = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "add_generation_prompt": True, "kwargs": {}}
    assert ChatTemplate(named).render(case["messages"], tools=tools) == theirs(case, named)


@pytest.mark.parametrize("layout", ["jinja", "config", "list", "jinja over config", "several files", "only tool_use"])
def test_templates_in_a_folder_are_found_where_transformers_finds_them(layout: str, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    if layout in ("config", "jinja over config"):
        config["chat_template"] = "from the config {{ messages | length }}"
    if layout == "list":
        config["chat_template"] = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    if "jinja" in layout or layout == "several files":
        (tmp_path / "chat_template.jinja").write_text("from the file {{ messages | length }}\n")
    if layout in ("several files", "only tool_use"):
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    template = ChatTemplate.from_folder(tmp_path, special_tokens={})
    assert template is not None
    messages = [{"role": "user", "content": "x"}]
    for tools in (None, [WEATHER]):
        if layout == "only tool_use" and tools is None:
            with pytest.raises(ValueError, match="no default"):
                tokenizer.apply_chat_template(messages, tokenize=False)
            with pytest.raises(ChatTemplateError, match="no template named 'default'"):
                template.render(messages)
            continue
        expected = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        assert template.render(messages, tools=tools) == expected


def golden() -> dict[str, Any]:
    """The cases that do not depend on the date, with transformers' prompts, or the words of a refusal."""
    dated = [case for case in CASES if case["template"] == "dated" and "date_string" not in case["kwargs"]]
    cases = [case | prompt_or_refusal(case) for case in CASES if case not in dated]
    about = "Prompts by transformers' apply_chat_template; see test_chat_parity.py"
    return {"about": about, "special_tokens": SPECIAL_TOKENS, "cases": cases}


def test_the_golden_file_is_what_transformers_says() -> None:
    assert json.loads(GOLDEN.read_text(encoding="utf-8")) == golden()


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden(), indent=1) + "\n", encoding="utf-8")
