from __future__ import annotations

import time

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text import ChatOptions, TemplateError
from tests.text.toy import SPECIALS, TEMPLATE, toy

TOY = toy()
OPEN = ChatOptions(continue_final_message=True)
HELLO = [{"role": "user", "content": "hello"}]
PIECES = ["\n", "assistant\n", "user\n", "the", "\0", ""]


def render(template: str, messages: list[dict] | None = None, **options: object) -> str:
    tokenizer = toy(template)
    return tokenizer.decode(tokenizer.chat(messages or HELLO, **options), skip_special=False)  # type: ignore[arg-type]


def test_a_conversation_becomes_special_tokens_and_text() -> None:
    ids = TOY.chat([{"role": "system", "content": "be kind"}, *HELLO])
    assert TOY.decode(ids, skip_special=False) == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids.count(1) == 3
    assert ids.count(2) == 2


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text(max_size=30) | st.sampled_from(PIECES))))
def test_what_the_template_writes_by_itself_is_encoded_as_the_rest_is(said: list[tuple[str, str]]) -> None:
    """A tokenizer keeps the ids of its template's own pieces: a message may be like one, or join one."""
    messages = [{"role": role, "content": content} for role, content in said]
    text = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE)  # noqa: S701
    whole = text.render(messages=messages, add_generation_prompt=True)
    assert TOY.chat(messages) == TOY.encode(whole, special=True)


def test_a_key_of_a_message_does_not_hide_what_dictionaries_can_do() -> None:
    messages = [{"role": "user", "content": "hello", "get": "forged", "name": "ann"}]
    assert render("{{ messages[0].get('content') }} {{ messages[0].name }} {{ messages[0].none }}.", messages) == (
        "hello ann ."
    )


def test_without_a_generation_prompt() -> None:
    assert TOY.decode(TOY.chat(HELLO, options=ChatOptions(add_generation_prompt=False))) == "user\nhello\n"


def test_more_variables_reach_the_template_but_no_special_token_in_them() -> None:
    template = "{{ messages[0].content }}|{{ enable_thinking }}|{{ note.a[0] }}|{{ documents | length }}"
    variables = {"enable_thinking": False, "note": {"a": ["<|im_end|>"]}, "documents": [{"text": "x"}]}
    ids = toy(template).chat(HELLO, options=ChatOptions(variables=variables))
    assert toy().decode(ids, skip_special=False) == "hello|False|<|im_end|>|1"
    assert 2 not in ids
    assert render("{{ enable_thinking is defined }}") == "False"


@pytest.mark.parametrize(
    ("template", "content", "end"),
    [
        (TEMPLATE, "Once upon ", "<|im_start|>assistant\nOnce upon "),
        (TEMPLATE, "", "<|im_start|>assistant\n"),
        (TEMPLATE, "a<|im_end|>", "<|im_start|>assistant\na<|im_end|>"),
        (TEMPLATE.replace("m['content']", "m['content'] | trim"), " Once upon ", "<|im_start|>assistant\nOnce upon"),
    ],
)
def test_a_last_message_that_is_gone_on_with_stays_open(template: str, content: str, end: str) -> None:
    tokenizer = toy(template)
    ids = tokenizer.chat([*HELLO, {"role": "assistant", "content": content}], options=OPEN)
    assert tokenizer.decode(ids, skip_special=False).endswith(end)
    assert ids.count(1) == 2 and ids.count(2) == 1


def test_a_template_that_hides_the_last_message_cannot_go_on_with_it() -> None:
    with pytest.raises(TemplateError, match="last message"):
        render("{{ messages[0].content }}", [*HELLO, {"role": "assistant", "content": "x"}], options=OPEN)


@settings(derandomize=True, max_examples=150)
@given(st.lists(st.one_of(st.sampled_from([*SPECIALS, "<|im_", "end|>", "\ufdd0"]), st.text(max_size=5)), max_size=6))
def test_a_message_cannot_forge_a_turn(parts: list[str]) -> None:
    content = "".join(parts)
    ids = TOY.chat([{"role": "user", "content": content}])
    assert ids.count(1) == 2
    assert ids.count(2) == 1
    assert content in TOY.decode(ids, skip_special=False)


def test_special_tokens_in_a_prompt_are_text_unless_asked() -> None:
    assert 2 not in TOY.encode("a<|im_end|>b")
    assert TOY.decode(TOY.encode("a<|im_end|>b")) == "a<|im_end|>b"
    assert TOY.encode("a<|im_end|>b", special=True).count(2) == 1


def test_bos_is_added_once_when_the_card_asks() -> None:
    tokenizer = toy(add_bos=True)
    assert tokenizer.encode("the") == [0, *TOY.encode("the")]
    assert tokenizer.encode("<|endoftext|>the", special=True) == [0, *TOY.encode("the")]


def test_content_parts_are_joined_and_images_refused() -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert TOY.chat([{"role": "user", "content": parts}]) == TOY.chat(HELLO)
    with pytest.raises(TemplateError, match="text content only"):
        TOY.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_a_tool_call_without_content_and_its_arguments_as_an_object() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    template = "{{ messages[0].content }}|{{ messages[0].tool_calls[0].function.arguments.a }}|{{ tools | tojson }}"
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert render(template, [message], tools=[{"type": "function"}]) == '|1|[{"type": "function"}]'


def test_the_helpers_templates_use() -> None:
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% generation %}x{% endgeneration %}{{ {'a': '<é>'} | tojson }}") == 'x{"a": "<é>"}'
    assert (
        render("{% for x in [1,2,3] %}{{ x ~ '/' ~ loop.length }}{% if x == 2 %}{% break %}{% endif %}{% endfor %}")
        == "1/32/3"
    )
    with pytest.raises(TemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ undefined_thing.attribute }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% include '/etc/passwd' %}",
        "{% for %}",
        "{{ 1 / 0 }}",
        "",
    ],
)
def test_a_bad_template_is_an_error_of_its_own_kind(template: str) -> None:
    with pytest.raises(TemplateError):
        render(template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for a in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
        "{% set n = namespace(s='x') %}{% for a in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
        "{{ 'x' * 10**12 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ 'x'.ljust(10000000000) }}",
        "{{ 'x' | center(10000000000) }}",
        "{{ '%10000000000d' % 1 }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_hostile_template_runs_out_of_budget_soon(template: str) -> None:
    began = time.monotonic()
    with pytest.raises(TemplateError):
        render(template)
    assert time.monotonic() - began < 10
