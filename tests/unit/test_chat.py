"""Chat templates: golden prompts, what the template sees, what is refused, and templates that want too much."""

from __future__ import annotations

import datetime
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from xinfer.chat import ChatTemplate
from xinfer.errors import ChatTemplateError, RequestError
from xinfer.template_sandbox import MAX_SOURCE

DATA = Path(__file__).parents[1] / "data"
GOLDEN = json.loads((DATA / "chat_golden.json").read_text(encoding="utf-8"))
HELLO = [{"role": "user", "content": "hello"}]


def render(source: str, messages: Any = HELLO, **kwargs: Any) -> str:
    return ChatTemplate(source, special_tokens={"bos_token": "<s>"}).render(messages, **kwargs)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["template"])
def test_golden_prompts(case: dict[str, Any]) -> None:
    source = (DATA / "templates" / f"{case['template']}.jinja").read_text(encoding="utf-8")
    template = ChatTemplate(source, special_tokens=GOLDEN["special_tokens"])
    arguments = {"tools": case["tools"], "add_generation_prompt": case["add_generation_prompt"], **case["kwargs"]}
    if "refusal" in case:
        with pytest.raises(ChatTemplateError, match="refuses these messages: ") as caught:
            template.render(case["messages"], **arguments)
        assert str(caught.value).endswith(case["refusal"])
    else:
        assert template.render(case["messages"], **arguments) == case["prompt"]


# What a template sees.


def test_special_tokens_and_further_variables() -> None:
    assert render("{{ bos_token }}{{ eos_token }}{{ depth }}", depth=3) == "<s>3"
    assert render("{{ bos_token }}", bos_token="<other>") == "<other>"


def test_the_date_is_todays() -> None:
    before = datetime.datetime.now().strftime("%d %b %Y")
    shown = render("{{ strftime_now('%d %b %Y') }}|{{ strftime_now(format='%%') }}")
    assert shown in (f"{before}|%", f"{datetime.datetime.now().strftime('%d %b %Y')}|%")


def test_a_key_with_none_is_a_key_that_is_not_there() -> None:
    call = [{"function": {"name": "f", "arguments": {"x": None}}}]
    messages = [{"role": "assistant", "content": None, "tool_calls": call}]
    assert render("{{ messages[0].content is defined }}{{ messages[0].tool_calls | tojson }}", messages) == (
        'False[{"function": {"name": "f", "arguments": {"x": null}}}]'
    )


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_several_names(name: str) -> None:
    messages = [{"role": "assistant", "content": "4", name: "2+2"}]
    assert render("{{ messages[0].reasoning_content }},{{ messages[0].thinking }}", messages) == "2+2,2+2"


def test_the_callers_messages_stay_as_they_are() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}], "thinking": "y"}]
    before = json.dumps(messages)
    render("{{ messages }}", messages)
    assert json.dumps(messages) == before


def test_objects_of_the_caller_are_out_of_reach() -> None:
    class Text(str):
        def leak(self) -> str:
            return "leaked"

    assert render("{{ messages[0].content.leak is defined }}", [{"role": "user", "content": Text("x")}]) == "False"
    with pytest.raises(RequestError, match=r"message 0 holds a PosixPath|message 0 holds a WindowsPath"):
        render("x", [{"role": "user", "content": "x", "file": Path("x")}])


# What is refused before a template runs.


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ("hello", "messages are 'hello'"),
        ([], r"messages are \[\]"),
        ({"role": "user"}, "messages are {'role': 'user'}"),
        (None, "messages are None"),
        ([["user", "x"]], "message 0 is"),
        ([*HELLO, {"content": "x"}], "message 1 has the role None"),
        ([{"role": 5, "content": "x"}], "message 0 has the role 5"),
        ([{"role": "user"}], r"message 0 \(user\) has no content"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "has no content"),
        ([{"role": "user", "content": 5}], "has the content 5"),
        ([{"role": "user", "content": ["x"]}], r"has the content \['x'\]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "its text to be a string"),
        ([{"role": "user", "content": "x", "extra": {1j: 2}}], "message 0 holds a complex"),
        ([{"role": "user", "content": b"x"}], "has the content b'x'"),
    ],
)
def test_messages_of_another_form(messages: Any, found: str) -> None:
    with pytest.raises(RequestError, match=found):
        render("{{ messages }}", messages)


def test_messages_nested_without_end() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(RequestError, match="nests more than 100 deep"):
        render("x", [{"role": "user", "content": "x", "extra": loop}])


@pytest.mark.parametrize(
    ("tools", "found"),
    [
        ({"type": "function"}, "expected a list of JSON schemas"),
        ("weather", "expected a list of JSON schemas"),
        ([render], "describe a Python function by its schema"),
        ([5], "tool 0 is 5"),
    ],
)
def test_tools_of_another_form(tools: Any, found: str) -> None:
    with pytest.raises(RequestError, match=found):
        render("x", tools=tools)


# Templates that are broken or refuse.


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("fine\n{% if %}", r"the chat template, line 2: Expected an expression"),
        ("{% for m in messages %}\n\n", r"line 1|line 3"),
        ("\n\n{{ 1 + }}", "line 3: unexpected"),
        ("{% frob %}", "line 1: Encountered unknown tag 'frob'"),
        ("{{ x | frob }}", "line 1: No filter named 'frob'"),
        ("{% break %}", "line 1|cannot be compiled"),
        (
            "\n{{ messages[0].name.first }}",
            r"line 2 cannot render these messages: 'dict object' has no attribute 'name'",
        ),
        ("{{ 1 / 0 }}", "line 1 cannot render these messages: ZeroDivisionError"),
        ("{{ 'a' + 1 }}", "line 1 cannot render these messages: TypeError"),
        ("{% include 'other' %}", "no loader"),
        ("{% macro f() %}\n{{ 1 / 0 }}{% endmacro %}\n{{ f() }}", "line 2 cannot render"),
        ("{{ raise_exception('Only one system message, please') }}", "refuses these messages: Only one system message"),
        ("{{ '\\ud800' }}", "half a character"),
    ],
)
def test_a_broken_template_says_where_and_what(source: str, found: str) -> None:
    with pytest.raises(ChatTemplateError, match=found):
        render(source)


def test_check_reports_before_use() -> None:
    template = ChatTemplate({"default": "fine", "tool_use": "{% broken %}"})
    assert template.render(HELLO) == "fine"
    with pytest.raises(ChatTemplateError, match="unknown tag 'broken'"):
        template.check()


def test_undefined_is_as_quiet_as_in_transformers() -> None:
    assert (
        render("{{ nothing }}{{ messages[0].nothing }}{% if nothing %}x{% endif %}{{ nothing | default('d') }}") == "d"
    )


# Folders.


def test_a_folder_without_a_template(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(tmp_path, special_tokens={}) is None
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert ChatTemplate.from_folder(tmp_path, special_tokens={}) is None
    (tmp_path / "chat_template.json").write_text('{"chat_template": "old {{ bos_token }}"}')
    template = ChatTemplate.from_folder(tmp_path, special_tokens={"bos_token": "B"})
    assert template is not None
    assert template.render(HELLO) == "old B"
    assert template.origin.endswith("chat_template.json")


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[" * 100_000),
        ("tokenizer_config.json", b'{"chat_template": 5}'),
        ("tokenizer_config.json", b'{"chat_template": []}'),
        ("tokenizer_config.json", b'{"chat_template": [5]}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": 5, "template": "x"}]}'),
        ("tokenizer_config.json", b"\xff"),
        ("chat_template.jinja", b"\xff\xfe"),
    ],
)
def test_broken_files_are_named(name: str, raw: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(ChatTemplateError, match=name):
        ChatTemplate.from_folder(tmp_path, special_tokens={})


# Templates that want too much: each must end in an error, soon, and without much memory.

GROW = "{% set ns = namespace(x='aaaaaaaa', l=[1], t=(1,)) %}"
HOSTILE = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops whose test refuses": "{% set r = range(99999) %}" + "{% for i in r if false %}{% endfor %}" * 1500,
    "range": "{{ range(10000000000) | list }}",
    "loop over a long string": "{% for c in 'a' * 8000000 %}{{ c }}{% endfor %}",
    "recursive loop": "{% for i in [[1]] recursive %}{{ loop([i]) }}{% endfor %}",
    "wide recursive loop": "{% for i in range(9) recursive %}{% if loop.depth < 99 %}{{ loop(range(9)) }}{% endif %}"
    "{% endfor %}",
    "macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macro tree": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "macro doubling": "{% macro f(n) %}{% if n %}{% set x = f(n - 1) %}{{ x }}{{ x }}{% else %}ab{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "block": "{% block a %}{{ self.a() }}{% endblock %}",
    "times": "{{ 'a' * 10 ** 10 }}",
    "times a list": "{{ [messages] * 10 ** 9 }}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "large integers": GROW + "{% set ns.x = 3 %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "plus": GROW + "{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "plus lists": GROW + "{% for i in range(99) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
    "tilde": GROW + "{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "set block": GROW + "{% for i in range(99) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "shared lists": GROW + "{% for i in range(99) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "shared lists, compared": GROW
    + "{% set o = namespace(l=[1]) %}{% for i in range(99) %}{% set ns.l = [ns.l, ns.l] %}{% set o.l = [o.l, o.l] %}"
    + "{% endfor %}{{ ns.l == o.l }}",
    "shared dicts": GROW
    + "{% for i in range(99) %}{% set ns.l = dict(a=ns.l, b=ns.l) %}{% endfor %}{{ ns.l | tojson }}",
    "deep tuples, hashed": GROW + "{% for i in range(99999) %}{% set ns.t = (ns.t,) %}{% endfor %}{{ {ns.t: 1} }}",
    "deep generators": GROW + "{% for i in range(99999) %}{% set ns.l = ns.l | map('string') %}{% endfor %}",
    "slices that are kept": "{% set a = 'x' * 8000000 %}" + "".join(f"{{% set b{i} = a[1:] %}}" for i in range(400)),
    "replace": "{{ ('a' * 4000000).replace('', 'b' * 1000) }}",
    "replace filter": "{{ ('a' * 4000) | replace('a', 'b' * 99999) }}",
    "join": "{{ range(99999) | map('string') | join('x' * 999999) }}",
    "join method": "{{ ('x' * 999999).join(['a'] * 99999) }}",
    "center": "{{ 'a' | center(10 ** 10) }}",
    "ljust": "{{ 'a'.ljust(10 ** 10) }}",
    "zfill": "{{ 'a'.zfill(10 ** 10) }}",
    "expandtabs": "{{ ('\t' * 9999).expandtabs(10 ** 8) }}",
    "indent": "{{ ('a\n' * 99999) | indent(99999) }}",
    "wordwrap": "{{ ('a ' * 9999) | wordwrap(1, wrapstring='b' * 99999) }}",
    "batch": "{{ [1] | batch(10 ** 9, 0) | list }}",
    "slice": "{{ [1] | slice(10 ** 9) | list }}",
    "round": "{{ 1.5 | round(10 ** 9) }}",
    "sum of lists": "{{ ([[1] * 99] * 9999) | sum(start=[]) }}",
    "tojson": "{{ messages | tojson(indent=10 ** 9) }}",
    "tojson separators": "{{ ([1] * 99999) | tojson(separators=('x' * 99999, ':')) }}",
    "percent width": "{{ '%999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (999999999, 1) }}",
    "percent many": "{{ ('%(a)s' * 9999) % {'a': 'b' * 99999} }}",
    "format filter": "{{ '%999999999d' | format(1) }}",
    "format width": "{{ '{:>999999999}'.format(1) }}",
    "format width from an argument": "{{ '{:>{w}}'.format(1, w=999999999) }}",
    "format map": "{{ '{a:>999999999}'.format_map({'a': 1}) }}",
    "format many": "{{ ('{0}' * 9999).format('b' * 99999) }}",
    "format through a name": "{% set f = '{:>999999999}'.format %}{{ f(1) }}",
    "format through a filter": "{{ (('{:>999999999}' | attr('format'))(1)) }}",
    "translate": "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}",
    "rfind": "{{ ('a' * 8000000).rfind('b' + 'a' * 4000000) }}",
    "strip": "{{ ('a' * 8000000).strip('b' * 4000000 + 'a') }}",
    "split": "{{ ('a' * 8000000).split('a') | length }}",
    "lipsum": "{{ lipsum(n=10 ** 9) }}",
    "to_bytes": "{{ (7).to_bytes(10 ** 10, 'big') }}",
    "strftime": "{{ strftime_now('%Y' * 999999) }}",
    "attributes": "{{ range(99999) | map(attribute='a' ~ '.a' * 30000, default={}) | list | length }}",
    "urlize": "{{ ('a@' * 4000000) | urlize }}",
    "striptags": "{{ ('<!--' * 2000000) | striptags }}",
    "cycler": "{% set c = cycler(*range(99999)) %}{% for i in range(99999) %}{% for j in range(99) %}{{ c.next() }}"
    "{% endfor %}{% endfor %}",
    "a long template": "{{ x }}" * (MAX_SOURCE // 7 + 1),
    "a template of many parts": "{{ [" + "1," * 15_000 + "] }}",
    "a deep template": "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "a deep template of ifs": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "a long sum": "{{ 1" + "+1" * 20_000 + " }}",
    "a number of many digits": "{{ " + "9" * 20_000 + " }}",
    "folded when compiled": "{{ 'a' | center(999999999) }}{{ [1] | batch(999999999, 0) | list }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_soon_in_an_error(name: str) -> None:
    resource = pytest.importorskip("resource")  # not on Windows
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.thread_time()
    with pytest.raises(ChatTemplateError):
        render(HOSTILE[name])
    assert time.thread_time() - start < 4.0  # bounds are 0.3 to 1.5 seconds where nothing else runs
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 * 1024


ESCAPES = {
    "class": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "init": "{{ cycler.__init__.__globals__.os }}",
    "dict": "{{ dict.__class__.__base__ }}",
    "attr": "{{ ('' | attr('__class__')).mro() }}",
    "format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "format map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "namespace": "{{ namespace(__class__=1) }}",
    "namespace set": "{% set ns = namespace() %}{% set ns['__class__'] = 1 %}",
    "append": "{{ messages.append(1) }}",
    "update": "{{ messages[0].update({'role': 'x'}) }}",
    "hidden filters": "{{ 1 | attr('count step') | frob }}",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_a_template_stays_in_its_sandbox(name: str) -> None:
    try:
        shown = render(ESCAPES[name])
    except ChatTemplateError:
        return
    assert shown == ""  # what may not be seen is undefined, and that prints as nothing


def test_honest_work_is_within_bounds() -> None:
    source = (DATA / "templates" / "tools.jinja").read_text(encoding="utf-8")
    messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 400} for i in range(3000)]
    prompt = render(source, messages)
    assert len(prompt) > 6_000_000
    quadratic = "{% for m in messages %}{% set seen = messages[:loop.index] | length %}{{ seen }} {% endfor %}"
    assert render(quadratic, messages[:500]).split() == [str(i) for i in range(1, 501)]


def test_a_template_is_shared_between_threads() -> None:
    template = ChatTemplate((DATA / "templates" / "tools.jinja").read_text(encoding="utf-8"))
    chats = [[{"role": "user", "content": f"number {i} " * 50}] * 20 for i in range(8)]
    expected = [template.render(chat) for chat in chats]
    found: list[str | None] = [None] * 8

    def run(i: int) -> None:
        for _ in range(20):
            found[i] = template.render(chats[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected
