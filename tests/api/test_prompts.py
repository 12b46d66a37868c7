"""Where prompts are encoded: short ones on the event loop, unless their card's template proves slow."""

from __future__ import annotations

import threading

import pytest

from engine.text.chat import ChatOptions, ChatTemplate
from gateway.api.prompts import Prompts
from tests.text.toy import toy_card

# One that takes its time when it is told to: some hundred thousand rounds are tens of milliseconds.
TEMPLATE = """{%- for m in messages %}{%- if m['content'] == 'slow' -%}
{%- for i in range(300) %}{%- for j in range(100) %}{%- endfor %}{%- endfor -%}
{%- endif -%}{{ m['content'] }}{%- endfor %}"""


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each render, whether it ran on this thread."""
    here, seen, real = threading.current_thread(), [], ChatTemplate.render

    def noting(self: ChatTemplate, *arguments: object, **options: object) -> object:
        seen.append(threading.current_thread() is here)
        return real(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ChatTemplate, "render", noting)
    return seen


async def test_a_card_that_is_slow_twice_in_a_row_leaves_the_event_loop(threads: list[bool]) -> None:
    prompts, card = Prompts(), toy_card(TEMPLATE)
    for text in ("hi", "hi", "slow", "hi", "slow", "slow", "hi"):
        await prompts.chat(card, [{"role": "user", "content": text}], None, ChatOptions())
    prompts.close()
    # The first makes the tokenizer, which tries the template; one slow render is forgiven, the second in a row is not.
    assert threads[-6:] == [True, True, True, True, True, False]
    assert not any(threads[:-6])
