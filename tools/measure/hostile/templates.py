"""Hostile chat templates, and chats for servers that use them."""

from __future__ import annotations

import random

from hostile.attack import Attack, format_request, random_size
from hostile.bodies import TOOL


def make_chat(rng: random.Random) -> Attack:
    """Return a chat for a server with a hostile template."""
    path = rng.choice(("/v1/chat/completions", "/apply-template", "/v1/messages", "/api/chat", "/v1/responses"))
    messages = [{"role": "user", "content": rng.choice(["a", "b" * 1000])}] * rng.choice([1, 3, 99])
    tools = [{"type": "function", "function": TOOL}] if rng.random() < 0.3 and "messages" not in path else []
    return Attack((format_request(path, {"messages": messages, "input": messages, "max_tokens": 4, "tools": tools}),))


def make_template(rng: random.Random) -> str:
    """Return a chat template that is expensive, wrong or reaches for more than its variables."""
    loop = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    many = random_size(rng, 10, 10**6)
    kinds = (
        "{% for a in range(100000) %}{% for b in range(100000) %}{{ a }}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ 9**9**9 }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{% set x = namespace(a='ab') %}{% for i in range(60) %}{% set x.a = x.a + x.a %}{% endfor %}{{ x.a }}",
        "{% set x = namespace(a=[1]) %}{% for i in range(60) %}{% set x.a = x.a + x.a %}{% endfor %}{{ x.a|length }}",
        "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}{{ self.__dict__ }}{{ cycler.__init__.__globals__.os }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{{ raise_exception('x' * 10000000) }}",
        "{{ raise_exception(messages) }}{{ raise_exception() }}",
        "{{ strftime_now('%Y' * 1000000) }}{{ strftime_now('%') }}{{ strftime_now(1) }}",
        "{{ messages|tojson(indent=100000000) }}",
        "{{ lipsum(n=1000000) }}{{ joiner() }}",
        "{{ messages|map(attribute='content')|join('x' * 100000000) }}",
        "{{ (messages * 10000000)|tojson }}",
        "{{ undefined.attribute.of.nothing }}{{ 1 / 0 }}{{ [] [5] }}",
        "{{ range(10**9)|list }}",
        "{{ ('a' * 50000)|wordwrap(1)|title|urlize|center(10**9) }}",
        "{{ messages|sort|unique|batch(10**9, 'x')|list }}",
        "{% if true %}" * many,
        "{% for a in b %}{% endif %}",
        "{{ " + "(" * many + "1" + ")" * many + " }}",
        "{{ " + "-" * many + "1 }}",
        "{{ " + "1 + " * many + "1 }}",
        "{{ [" + "[], " * many + "] }}",
        "{% set a = 1 %}" * many,
        "x" * many * 10,
        "{% raw %}" * many + "{#" * many,
        "<|im_start|>" * many,
        "{% break %}{% generation %}{{ caller() }}{% endgeneration %}",
        "{% for m in messages %}{% set m.content = 'x' %}{{ messages.append(m) }}{% endfor %}",
        "".join(
            rng.choice(("{{ ", " }}", "{% if x %}", "{% endif %}", "m", "|e", "(", "'", "{# ", "-%}"))
            for _ in range(40)
        ),
    )
    return rng.choice((loop, "")) + rng.choice(kinds) + rng.choice((loop, ""))
