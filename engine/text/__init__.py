"""Text to token ids and back: tokenizer, sandboxed chat template, incremental detokeniser, stop strings.

Shared by gateway and engine, so it must stay light: it must not know torch, weights, sequences or the wire.
"""

from engine.text.chat import ChatOptions, ChatTemplate, TemplateError
from engine.text.detokenizer import Detokenizer
from engine.text.stops import StopScanner
from engine.text.tokenizer import Tokenizer

__all__ = ["ChatOptions", "ChatTemplate", "Detokenizer", "StopScanner", "TemplateError", "Tokenizer"]
