"""Chat templates that a request brings, rendered as the worker processes do."""

from __future__ import annotations

import json

from octavo.text import chat
from tests.fuzz.json_routes import check

chat.MAX_SECONDS = 0.5  # a template that runs on is stopped within the time that an input has
MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi <|eos|>"},
    {"role": "assistant", "content": "a\nb"},
    {"role": "user", "content": "again"},
]
SEEDS = [
    b"{{ messages[0].content }}",
    b"{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}<|end|>{% endfor %}",
    b"{%- if messages[0]['role'] == 'system' -%}{% set system = messages[0]['content'] %}{%- endif -%}{{ system | default('x') }}",
    b"{{ bos_token }}{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
    b"{% macro f(x, y=2) %}{{ x * y }}{% endmacro %}{{ f('a', 3) }}{{ f(4) }}",
    b"{{ messages | tojson(indent=2) }}{{ messages | map(attribute='role') | join(',') | upper }}",
    b"{{ '%s and %d' % ('a', 3) }}{{ '{:>5}'.format(1) }}{{ 'abc'[1:] ~ 'd' }}{{ 2 ** 5 }}",
    b"{% if add_generation_prompt and not tools is defined %}{{ raise_exception('no') }}{% else %}{{ strftime_now('%Y') }}{% endif %}",
    b"{% generation %}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{% endgeneration %}",
    b"{{ ('a,b' * 3).split(',') | sort | unique | reverse | list | batch(2, 'x') | list }}{{ 'a b' | wordwrap(1) | indent(4) }}",
]  # fmt: skip
WORDS = [
    b"{{ ", b" }}", b"{% ", b" %}", b"{%- ", b"{#", b"#}", b"if ", b"elif ", b"else", b"endif", b"for i in ", b"endfor", b"set x = ",
    b"macro f(x) ", b"endmacro", b"call ", b"endcall", b"filter upper", b"endfilter", b"block b", b"endblock", b"include 'x'", b"import 'x' as y",
    b"extends 'x'", b"break", b"continue", b"recursive", b"loop(", b"loop.index", b"messages", b"[0]", b".content", b"['role']", b"range(10**9)",
    b" * 10**9", b" ** 99", b" + x", b" ~ x", b"%", b"|", b"tojson", b"join", b"replace('a', 'bb')", b"center(99999999)", b"format(", b"xmlattr",
    b"urlize", b"truncate", b"list", b"map(", b"groupby('role')", b"sum", b"random", b"pprint", b"filesizeformat", b"striptags", b"wordcount",
    b"{:>99999999}", b"'%99999999d' % 1", b"__class__", b"__mro__", b"__globals__", b"._TemplateReference__context", b"self", b"cycler", b"joiner",
    b"namespace(x=1)", b"dict(a=1)", b"lipsum", b"raise_exception('x')", b"strftime_now('%Y')", b"bos_token", b"tools", b"is defined", b"is none",
    b"not ", b"and ", b"or ", b"in ", b"()", b"(", b")", b"[", b"]", b"{}", b"'", b'"', b"\\n", b"1e999", b"none", b"true", b"0",
    b".format_map(", b".join(", b".splitlines()", b".zfill(", b".expandtabs(", b".translate(", b".encode(", b".items()", b".update(", b".append(",
]  # fmt: skip


def one_input(data: bytes) -> object:
    template = data.decode(errors="replace")
    body = {"messages": MESSAGES, "chat_template": template}
    return check("/v1/chat/completions/render", json.dumps(body).encode())
