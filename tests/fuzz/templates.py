"""Mutations of chat templates: programs from the net, made of Jinja's grammar and of what may be done to exhaust it."""

from __future__ import annotations

import re
from random import Random

from tests.fuzz.files import Files, change_bytes, dump_json, load_json, weird
from tests.fuzz.json_files import TOKENIZER_CONFIG

# As real checkpoints write them: a default system text, tools, namespaces, loop controls, macros, dates.
SOUND = (
    """\
{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>' }}
{%- endif %}
{%- for message in messages %}{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content | trim }}{%- endfor %}""",
    """\
{%- set ns = namespace(last=-1, text='') %}
{%- for message in messages[::-1] %}
    {%- set i = (messages|length - 1) - loop.index0 %}
    {%- if ns.last < 0 and message.role == 'user' %}{%- set ns.last = i %}{%- endif %}
{%- endfor %}
{{- ns.last }}""",
    """\
{%- macro turn(role, text) %}<|im_start|>{{ role }}
{{ text }}<|im_end|>
{% endmacro %}
{%- for m in messages %}{% if loop.index > 20 %}{% break %}{% endif %}{{ turn(m.role, m.content) }}{%- endfor %}""",
    """\
{{ bos_token }}{% set date = strftime_now('%d %B %Y') %}{{ date }}{% for m in messages %}
{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('no such role: ' + m.role) }}{% endif %}
{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% endfor %}{{ eos_token }}""",
    "{%- for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}{%- endfor %}",
)

COUNTS = (
    "0",
    "1",
    "2",
    "3",
    "7",
    "40",
    "1000",
    "100000",
    "10**7",
    "10**9",
    "10**12",
    "2**63",
    "10**30",
    "-1",
    "1.5",
    "'3'",
)
FILTERS = (
    "trim", "upper", "lower", "length", "list", "string", "first", "last", "join", "join('x')", "tojson",
    "tojson(indent=2)", "safe",
    "replace('a', 'b')", "replace('', 'xx')", "default('x')", "int", "float", "abs", "round", "sort", "unique",
    "reverse", "items",
    "map('upper')", "map(attribute='role')", "selectattr('role')", "rejectattr('role', 'equalto', 'user')",
    "select('string')",
    "dictsort", "escape", "forceescape", "title", "capitalize", "wordcount", "striptags", "urlencode", "urlize",
    "xmlattr", "pprint",
    "random", "sum", "min", "max", "truncate(5)", "filesizeformat", "groupby('role')", "attr('role')",
    "attr('__class__')", "nonsense",
    "batch(2)", "slice(2)", "indent", "wordwrap(5)", "center(9)", "format(1)",
)  # fmt: skip
# One number makes each of these take all memory or all time.
GREEDY_FILTERS = (
    "center({n})", "indent({n})", "indent('x' * {n})", "wordwrap({n})", "batch({n})", "batch({n}, 'x')|list",
    "slice({n})|list",
    "tojson(indent={n})", "truncate({n})", "join('x' * {n})", "replace('a', 'x' * {n})", "format({n})", "round({n})",
    "urlize({n})",
    "default('x' * {n})", "map('center', {n})|join", "int(base={n})",
)  # fmt: skip
ATTRIBUTES = (
    "role", "content", "__class__", "__class__.__mro__[1].__subclasses__()", "__init__.__globals__", "__doc__", "mro",
    "items()",
    "keys()", "get('role')", "pop()", "append(1)", "clear()", "update({'a': 1})", "format", "format(1)",
    "format_map({})", "upper()",
    "join(messages)", "split()", "split('')", "zfill(5)", "encode()", "gi_frame", "__len__()", "_private",
    "startswith('a')", "strip()",
    "replace('a', 'b')", "splitlines()", "setdefault('a', 1)", "copy()", "real", "bit_length()", "nonsense",
    "nonsense()",
)  # fmt: skip
GREEDY = (
    "'x' * {n}", "{n} * 'x'", "[0] * {n}", "['x' * {n}] * {n}", "(messages * {n})|length", "'%{n}d' % 1",
    "'%.{n}f' % 1", "'%*d' % ({n}, 1)",
    "'{{:>{n}}}'.format(1)", "'{{0:{n}}}'.format('x')", "'{{:.{n}f}}'.format(1.5)", "'x'.ljust({n})",
    "'x'.center({n})", "'x'.zfill({n})",
    "'\\t'.expandtabs({n})", "range({n})|list|length", "range({n})|sum", "range({n})|join|length",
    "range({n})|map('string')|list",
    "9 ** 9 ** 9", "2 ** {n}", "(2 ** {n})|string", "{n} ** {n}", "10 ** 5000", "('9' * {n})|int",
    "'x' * 1000 * 1000 * 1000",
    "lipsum(n={n})", "lipsum({n}, False, 1, 2)|length", "dict(a='x' * {n})", "strftime_now('%Y' * {n})",
    "strftime_now('%{n}d')",
    "'a,' * 100000", "('a,' * 100000).split(',')|length", "('ab' * 1000).replace('', 'y' * 1000)|length",
    "'x'.join(range({n})|map('string'))",
    "messages|string * {n}", "(-1) ** 0.5", "1 // 0", "1 % 0", "1e308 * 1e308", "0.1 ** -400", "{n} // 3", "-{n} % 7",
    "'x' * -{n}",
    "('(' * {n})", "messages[{n}]", "messages[:{n}]|length", "messages[::0]", "'abc'[{n}:]", "cycler(*range({n}))",
    "joiner('x' * {n})",
    "namespace(a={n}).a * {n}", "('x' * 30000) in ('y' * {n})", "[messages, messages] * {n}", "tools * {n}",
    "range({n})|list|tojson|length",
    "range(1, {n}, 3)|random", "range({n})[-1]", "range({n})|last", "range({n})|reverse|first",
    "({n}, {n}) < ({n}, 'a')", "'%s' % (messages * {n},)",
    "'{{0.__class__}}'.format(1)", "'{{0.__class__.__init__.__globals__}}'.format(messages)",
    "('{{}}' * {n}).format(*range({n}))",
    "raise_exception('x' * {n})", "raise_exception(messages)", "raise_exception('\\x1b[2J')", "raise_exception()",
    "raise_exception({{}})",
    "('\\n' * {n})|indent(1000)", "('a ' * {n})|wordwrap(1)|length", "('x' * 100000)|urlize",
    "('<' * 100000)|striptags|length",
    "('<!--' * 50000)|striptags|length", "('a@b.c ' * 20000)|urlize|length", "('((((' * 20000)|urlize|length",
    "strftime_now({n})",
    "strftime_now('%')", "strftime_now('\\x00')", "strftime_now('\\ud800')", "'\\ud800'", "strftime_now()",
    "strftime_now('%Q%')",
)  # fmt: skip
NAMES = ("messages", "messages[0]", "messages[-1].content", "tools", "bos_token", "eos_token",
"add_generation_prompt", "loop", "loop.index",
         "self", "undefined_name", "x", "ns.a", "caller", "varargs", "kwargs", "none", "true", "range", "dict",
         "namespace", "cycler")  # fmt: skip
LITERALS = ("'x'", "'<|im_start|>'", "''", "1", "0", "-1", "1.5", "[]", "{}", "[1, 2]", "{'a': 1}", "(1, 'x')", "'🙂'",
"none", "true",
            "'\\x00'", "1_000", "0x10", "1e3", "'a' 'b'")  # fmt: skip
OPERATORS = (
    "+",
    "-",
    "*",
    "/",
    "//",
    "%",
    "~",
    "==",
    "!=",
    "<",
    ">=",
    "and",
    "or",
    "in",
    "not in",
    "is",
    "if",
    ".",
    "|",
    "**",
)
TESTS = ("defined", "none", "string", "mapping", "iterable", "number", "odd", "divisibleby(0)", "sameas(none)",
"in(messages)", "nonsense",
         "eq(1)", "filter", "callable")  # fmt: skip

# What makes a loop or a recursion that does not end in time, or grows without end.
BOMBS = (
    "{% for a in range(N) %}{% for b in range(N) %}{% for c in range(N) %}{{ a }}{% endfor %}{% endfor %}{% endfor %}",
    "{% for a in range(N) %}{% endfor %}",
    "{% for a in range(N) %}{% for b in range(N) %}{% endfor %}{% endfor %}",
    "{% for a in range(N) %}{{ 'x' * 1000 }}{% endfor %}",
    "{% set ns = namespace(a='x') %}{% for i in range(N) %}{% set ns.a %}{{ ns.a }}{{ ns.a }}{% endset %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(N) }}",
    "{% macro f(n) %}{% if n %}x{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(N) }}",
    "{% macro f() %}{{ caller() }}{% endmacro %}{% call f() %}{% call f() %}x{% endcall %}{% endcall %}",
    "{% set ns = namespace() %}{% macro f() %}{{ ns.f() }}{% endmacro %}{% set ns.f = f %}{{ f() }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{% for m in [[[]]] recursive %}{{ loop(m) }}{{ loop([m, m]) }}{% endfor %}",
    "{% block a %}{{ self.a() }}{% endblock %}",
    "{% set ns = namespace(l=[1]) %}{% for x in ns.l %}{% set ns.l = ns.l + [x] %}{% endfor %}{{ ns.l }}",
    "{% set l = [] %}{% for x in range(N) %}{{ l.append(l) }}{% endfor %}{{ l }}",
    "{% set ns = namespace(a=1) %}{% set ns.a = ns %}{{ ns }}",
    "{% set ns = namespace() %}{% set ns.a = [ns] %}{{ ns.a|tojson }}",
    "{% for a in messages|batch(1) %}{% for b in range(N) %}{{ a|pprint }}{% endfor %}{% endfor %}",
    "{% for k in 'x' * 5000 %}{% for k in 'x' * 5000 %}{% endfor %}{% endfor %}",
    "{% filter replace('x', 'y' * 10000) %}{{ 'x' * 100000 }}{% endfilter %}",
    "{% filter indent(10000) %}{{ '\\n' * 100000 }}{% endfilter %}",
    "{% set a = 'x' * 1000000 %}{% set b = a * 1000 %}{% set c = b * 1000 %}{{ c|length }}",
    "{% set a = range(100000)|list %}{% for i in range(N) %}{% set b = a|sort|list %}{% endfor %}",
    "{% set a = ['x' * 100000] * 100000 %}{{ a|join|length }}",
    "{% set a = ['x' * 100000] * 100000 %}{{ a }}",
    "{% set a = ['x' * 100000] * 100000 %}{{ a|tojson }}",
    "{{ messages|map('tojson')|map('replace', '', 'x' * 100000)|join }}",
    *(
        f"{{% set ns = namespace(a={start}) %}}{{% for i in range(N) %}}{{% set ns.a = {step} %}}{{% endfor %}}"
        f"{{{{ {end} }}}}"
        for start, step, end in (
            ("'xx'", "ns.a ~ ns.a", "ns.a|length"),
            ("[0]", "ns.a + ns.a", "ns.a|length"),
            ("[0]", "[ns.a, ns.a]", "ns.a"),
            ("[0]", "[ns.a, ns.a]", "ns.a|tojson"),
            ("[0]", "[ns.a]", "ns.a"),
            ("3", "ns.a * ns.a", "ns.a"),
            ("3", "ns.a ** ns.a", "ns.a"),
            ("'x'", "ns.a|replace('x', 'xxxx')", "ns.a|length"),
            ("'x'", "'%s%s' % (ns.a, ns.a)", "ns.a|length"),
            ("'x'", "[ns.a, ns.a]|join", "ns.a|length"),
            ("'x'", "ns.a|tojson", "ns.a|length"),
            ("'<'", "ns.a|forceescape", "ns.a|length"),
            ("{'a': 1}", "dict(ns.a, b=ns.a)", "ns.a"),
            ("messages", "ns.a|map('string')|list + ns.a", "ns.a|length"),
        )
    ),
)

_TOKENS = re.compile(r"\{[%{#]-?|-?[%}#]\}|'[^']*'|\w+|\s+|.", re.DOTALL)
PIECES = (
    "{{", "}}", "{%", "%}", "{#", "#}", "{%-", "-%}", "|", "(", ")", "[", "]", "{% endfor %}", "{% endif %}",
    "{% else %}",
    "{% for x in messages %}", "{% if x %}", "{% raw %}", "{% endraw %}", "{% set x = 1 %}", "{% break %}",
    "{% continue %}", "'", '"',
    "{% include 'x' %}", "{% import 'x' as y %}", "{% extends 'x' %}", "{% from 'x' import y %}", "{% do x %}",
    "{% debug %}", "{% autoescape true %}",
    "{% block a %}", "{% endblock %}", "{% call f() %}", "{% endcall %}", "{% trans %}", "{% with %}",
    "{% endwith %}", "\x00", "\ufeff", "\u2028",
)  # fmt: skip


class Grammar:
    """Random templates, mostly well formed."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._left = rng.choice((4, 15, 60))  # statements and expressions yet to be made

    def template(self) -> str:
        return "".join(self.statement() for _ in range(self._rng.randrange(1, 6)))

    def body(self) -> str:
        return "".join(self.statement() for _ in range(self._rng.randrange(3)))

    def statement(self) -> str:
        self._left -= 1
        if self._left < 0:
            return "x"
        rng, value = self._rng, self.value
        kinds = (
            lambda: "{{ " + value() + " }}",
            lambda: "{{ " + value() + " }}",
            lambda: "{{- " + value() + " -}}",
            lambda: "text\n",
            lambda: "{% for x in " + self.iterable() + " %}" + self.body() + "{% endfor %}",
            lambda: (
                "{% for x in " + self.iterable() + " %}" + self.body() + "{% else %}" + self.body() + "{% endfor %}"
            ),
            lambda: "{% for k, v in " + value() + " %}" + self.body() + "{% endfor %}",
            lambda: "{% if " + value() + " %}" + self.body() + "{% endif %}",
            lambda: "{% if " + value() + " %}" + self.body() + "{% elif x %}" + self.body() + "{% else %}y{% endif %}",
            lambda: "{% set x = " + value() + " %}",
            lambda: "{% set ns = namespace(a=" + value() + ") %}{% set ns.a = " + value() + " %}",
            lambda: "{% set x %}" + self.body() + "{% endset %}",
            lambda: "{% macro f(a, b=1) %}" + self.body() + "{% endmacro %}{{ f(" + value() + ") }}",
            lambda: "{% call(a) f() %}" + self.body() + "{% endcall %}",
            lambda: "{% filter " + self.filter() + " %}" + self.body() + "{% endfilter %}",
            lambda: "{% with x = " + value() + " %}" + self.body() + "{% endwith %}",
            lambda: "{% generation %}" + self.body() + "{% endgeneration %}",
            lambda: "{# " + value() + " #}",
            lambda: rng.choice(PIECES),
        )
        return rng.choice(kinds)()

    def iterable(self) -> str:
        return self._rng.choice(
            (
                "messages",
                "messages",
                "tools",
                "range(3)",
                f"range({self._rng.choice(COUNTS)})",
                "'abc'",
                "messages[0].items()",
                self.value(),
            )
        )

    def filter(self) -> str:
        if self._rng.random() < 0.15:
            return self._rng.choice(GREEDY_FILTERS).format(n=self._rng.choice(COUNTS))
        return self._rng.choice(FILTERS)

    def value(self) -> str:
        self._left -= 1
        rng = self._rng
        if self._left < 0:
            return rng.choice(LITERALS)
        kind = rng.randrange(12)
        if kind <= 2:
            return rng.choice(NAMES)
        if kind == 3:
            return rng.choice(LITERALS)
        if kind <= 5:
            return f"{self.value()} | {self.filter()}"
        if kind == 6:
            return f"({self.value()}).{rng.choice(ATTRIBUTES)}"
        if kind == 7:
            return f"({self.value()} {rng.choice(OPERATORS)} {self.value()})"
        if kind == 8:
            return f"({self.value()} is {rng.choice(('', 'not '))}{rng.choice(TESTS)})"
        if kind == 9:
            return f"({self.value()} if {self.value()} else {self.value()})"
        if kind == 10:
            return f"({self.value()})[{self.value()}]"
        return "(" + rng.choice(GREEDY).format(n=rng.choice(COUNTS)) + ")"


def _place(rng: Random, files: Files, source: str) -> None:
    """Put the template where checkpoints have it."""
    config = load_json(files, TOKENIZER_CONFIG)
    where = rng.randrange(4)
    text = source.encode("utf-8", "surrogatepass")
    if where == 0:
        files["chat_template.jinja"] = text
    elif where == 1:
        config["chat_template"] = [
            {"name": "default", "template": source},
            {"name": "tool_use", "template": rng.choice(SOUND)},
        ]
    elif where == 2:
        files["chat_template.jinja"] = rng.choice(SOUND).encode()
        files["additional_chat_templates/tool_use.jinja"] = text
    else:
        config["chat_template"] = source
    files[TOKENIZER_CONFIG] = dump_json(config)


def grammar(rng: Random, files: Files) -> str:
    source = Grammar(rng).template()
    _place(rng, files, source)
    return source[:150]


def greedy(rng: Random, files: Files) -> str:
    """One expression that asks for everything, alone or in a sound template."""
    source = "{{ " + rng.choice(GREEDY).format(n=rng.choice(COUNTS)) + " }}"
    if rng.random() < 0.3:
        source = "{{ ('text ' * 50) | " + rng.choice(GREEDY_FILTERS).format(n=rng.choice(COUNTS)) + " }}"
    if rng.random() < 0.3:
        source = rng.choice(SOUND) + source
    _place(rng, files, source)
    return source[:150]


def bomb(rng: Random, files: Files) -> str:
    source = rng.choice(BOMBS).replace("N", rng.choice(("3", "30", "90", "1000", "99999", "10**9")))
    _place(rng, files, source)
    return source[:150]


def sound(rng: Random, files: Files) -> str:
    """Templates without fault, and what older files call them."""
    source = rng.choice(SOUND)
    _place(rng, files, source)
    if rng.random() < 0.2:
        files["chat_template.json"] = dump_json({"chat_template": source})
    return source[:150]


def tokens(rng: Random, files: Files) -> str:
    """A sound template with words of its language taken out, repeated, swapped or put in."""
    pieces = _TOKENS.findall(rng.choice(SOUND))
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(pieces))
        kind = rng.randrange(5)
        if kind == 0:
            del pieces[at]
        elif kind == 1:
            pieces.insert(at, pieces[rng.randrange(len(pieces))])
        elif kind == 2:
            pieces.insert(at, rng.choice(PIECES))
        elif kind == 3:
            other = rng.randrange(len(pieces))
            pieces[at], pieces[other] = pieces[other], pieces[at]
        else:
            pieces[at] = Grammar(rng).value()
    source = "".join(pieces)
    _place(rng, files, source)
    return source[:150]


def text(rng: Random, files: Files) -> str:
    """The bytes of the template's file."""
    data, how = change_bytes(rng, rng.choice(SOUND).encode())
    files["chat_template.jinja"] = data
    return f"chat_template.jinja: {how}"


def deep(rng: Random, files: Files) -> str:
    """A template that is too deep, too long or too wide for a parser or a compiler."""
    n = rng.choice((20, 100, 1000, 30_000))
    source = rng.choice(
        (
            "{{ " + "(" * n + "1" + ")" * n + " }}",
            "{{ " + "[" * n + "]" * n + " }}",
            "{{ " + "-" * n + "1 }}",
            "{{ " + "not " * n + "1 }}",
            "{{ 1" + " + 1" * n + " }}",
            "{{ 1" + " ~ 1" * n + " }}",
            "{{ x" + ".a" * n + " }}",
            "{{ x" + "[0]" * n + " }}",
            "{{ 'x'" + "|upper" * n + " }}",
            "{{ 1" + " if 1 else 1" * n + " }}",
            "{{ 1" + " < 2" * n + " }}",
            "{{ " + "1 ** " * n + "1 }}",
            "{% if 1 %}" * n + "{% endif %}" * n,
            "{% for x in messages %}" * n + "{% endfor %}" * n,
            "{% filter upper %}" * n + "{% endfilter %}" * n,
            "{% if 0 %}" + "{% elif 0 %}" * n + "{% endif %}",
            "{% set " + "a, " * n + "b = 1 %}",
            "{{ f(" + "1, " * n + "1) }}",
            "{{ {" + "'a': 1, " * n + "} }}",
            "{{ " + "9" * n + " }}",
            "{{ '" + "x" * n + "' }}",
            "{{ " + "a" * n + " }}",
            "".join("{% macro m" + str(i) + "() %}{{ x }}{% endmacro %}" for i in range(n)),
            "{{ messages }}" * n,
            "{% raw %}" * n,
            "{" * n,
            "{#" * n,
            "x" * (n * 1000),
            "\n" * n,
        )
    )
    _place(rng, files, source)
    return f"{len(source)} characters: {source[:40]!r}"


def placed(rng: Random, files: Files) -> str:
    """Something else where a template should be."""
    config = load_json(files, TOKENIZER_CONFIG)
    default = {"name": "default", "template": SOUND[0]}
    config["chat_template"] = rng.choice(
        (
            None, "", [], {}, 5, True, [default], [default, default], [{"name": "tool_use", "template": SOUND[0]}],
            [{"name": "default"}], [{"template": SOUND[0]}], [{"name": 1, "template": 2}], [None], [SOUND[0]],
            {"default": SOUND[0]},
            [{"name": "default", "template": None}], [{**default, "x": weird(rng)}], weird(rng), [weird(rng)],
            SOUND[0] + "\ud800",
        )
    )  # fmt: skip
    files[TOKENIZER_CONFIG] = dump_json(config)
    name = rng.choice(
        ("", "", "chat_template.json", "additional_chat_templates/x.jinja", "additional_chat_templates/default.jinja")
    )
    if name:
        files[name] = rng.choice(
            (b"", b"{}", b'{"chat_template": 5}', b'{"chat_template": "x"}', b"{{", b"\xff", dump_json(weird(rng)))
        )
    return f"chat_template {config['chat_template']!r:.80} {name}"


TEMPLATES = (grammar, grammar, grammar, greedy, greedy, bomb, bomb, sound, tokens, tokens, text, deep, placed)
