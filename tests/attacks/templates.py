"""Chat templates in requests, on a server that takes them: those that compute without end, or reach
for what is not theirs."""

from __future__ import annotations

from tests.attacks import replies
from tests.attacks.target import CHAT, HELLO, Target

WORST = [
    "{{ '{:>999999999}'.format(1) }}",
    "{{ messages | tojson(indent=10**8) }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% if %}",
]
ALL = [
    *WORST,
    "{{ messages[0].content }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ '%999999999d' % 1 }}",
    "{{ 10 ** 10 ** 8 }}",
    "{{ (9 ** 9 ** 7) }}",
    "{{ range(10**8) | list | length }}",
    "{{ 'a' | center(10**9) }}",
    "{{ 'a' | indent(10**9) }}",
    "{{ 'x' | wordwrap(1) }}",
    "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ lipsum(n=10**6) }}",
    "{{ (1).__class__ }}",
    "{" * 100_000,
    "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
    "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "{{ " + "+".join(["1"] * 50_000) + " }}",
    "{{ raise_exception('x' * 10**6) }}",
    "x" * 7_000_000,
    "{{ '" + "(a" * 20 + "' | urlize }}",
    "{{ strftime_now('%Y' * 10**7) }}",
    "{{ [1] * 10**9 }}",
    "{{ dict(a=1) | pprint }}",
    "{{ (['a'] * 10**5) | join('b' * 10**5) }}",
    "{{ 'a' | batch(10**9, 'x') | list }}",
    "{{ 'a' | slice(10**9) | list | length }}",
    "{{ 'a'.zfill(10**10) }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ ('a\n' * 10**6).splitlines() | length }}",
    "{{ 'a'.encode('utf-8').hex(b'x') }}",
    "{{ 1 << 10**10 }}",
    "{{ ('a,' * 10**6).split(',') | sort | unique | list | length }}",
    "{{ 2.0 ** 10**6 }}",
    "{{ 'a'.translate({97: 'b' * 10**9}) }}",
    "{{ 'a'.expandtabs(10**10) }}{{ '\t'.expandtabs(10**10) }}",
]


def send(target: Target, chosen: list[str]) -> None:
    """Each template is rendered, or it is the client's error."""
    for template in chosen:
        body = {"messages": HELLO, "max_tokens": 1, "chat_template": template}
        reply = target.post(CHAT, body)
        try:
            replies.check(reply)
        except AssertionError as error:
            raise AssertionError(f"{template[:80]!r}: {error}") from error
        text = reply.text
        assert "root:" not in text and "<class" not in text, (template[:80], text[:500])
