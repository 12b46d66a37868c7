"""Prompts of the kinds a server meets: short, code, digits, other scripts, dialogue, and one of 1,500 tokens."""

SHORT = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "1 + 1 = 2\n2 + 2 = 4\n3 + 3 =",
    "Die Würde des Menschen ist",
    "日本の首都は",
    "To be, or not to be, that is",
    "SELECT name, count(*) FROM users WHERE",
    "The chemical formula of water is",
    "🦊 The fox says",
    '{"name": "Alice", "age": 30, "city":',
    "In 1969, Neil Armstrong",
    "Dear Sir or Madam,\n\nI am writing to",
    "import numpy as np\n\nx = np.",
    "Ingredients: flour, sugar, eggs,",
    "Roses are red,\nviolets are",
    "<html>\n<head>\n<title>",
    "a",
    "The quick brown fox jumps over the lazy dog. " * 4,
]
_STORY = (
    "The lighthouse keeper counted ships {n} times that night; the sea answered with silence, salt and a slow light. "
    "He wrote the number {n} into the book, turned the page, and thought of the harbour where his daughter lived. "
)
LONG = "".join(_STORY.format(n=n) for n in range(40))
