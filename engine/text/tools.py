"""Tools for models whose chat template knows none: said in words, in the form that many models were trained on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

__all__ = ["CALL_CLOSE", "CALL_OPEN", "with_tools_as_text"]

CALL_OPEN: Final = "<tool_call>"
CALL_CLOSE: Final = "</tool_call>"

_SYSTEM: Final = """\
You can call functions to help with the user's request. These are the functions, one JSON object a line:
<tools>
{tools}
</tools>
To call a function, write a JSON object with its name and arguments between these tags, and nothing after it:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


def with_tools_as_text(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """The conversation with tools, calls and results written as text of system, assistant and user messages."""
    result = [_as_text(message) for message in messages]
    if not tools:
        return result
    text = _SYSTEM.format(tools="\n".join(json.dumps(tool.get("function"), ensure_ascii=False) for tool in tools))
    if result and result[0].get("role") == "system":
        first = result[0]
        result[0] = first | {"content": f"{first['content']}\n\n{text}" if first.get("content") else text}
    else:
        result.insert(0, {"role": "system", "content": text})
    return result


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [content] if content else []
    for call in calls:
        function = call.get("function") or {}
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        name = json.dumps(function.get("name"), ensure_ascii=False)
        texts.append(f'{CALL_OPEN}\n{{"name": {name}, "arguments": {arguments or "{}"}}}\n{CALL_CLOSE}')
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": "\n".join(texts)}
