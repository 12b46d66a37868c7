"""`sluice up --embeddings`: both models are there when it says ready, and each is billed by its own price."""

from __future__ import annotations

import shutil
from decimal import Decimal
from pathlib import Path

import pytest

from tests.e2e.stack import Stack, until


@pytest.mark.slow
def test_embeddings_beside_a_language_model(data_dir: Path, embedding_model: Path) -> None:
    shutil.copytree(embedding_model, data_dir / "models" / embedding_model.name)
    stack = Stack(data_dir, backend="simulated", options=("--embeddings",))
    line = stack.up()
    assert (line["model"], line["embedding_model"]) == ("simulated", "all-minilm-l6-v2")
    with stack.client() as ai:
        assert [m.id for m in ai.models.list() if m.available] == ["all-minilm-l6-v2", "simulated"]  # type: ignore[attr-defined]
        answer = ai.embeddings.create(model=line["embedding_model"], input=["one", "two words"])
        assert len(answer.data[1].embedding) == 384
        chat = ai.chat.completions.create(
            model=line["model"], messages=[{"role": "user", "content": "Hi"}], max_tokens=4
        )
        assert chat.choices[0].message.content
    query = "SELECT prompt_tokens, completion_tokens, money FROM billing_usagerecord WHERE pool = 'all-minilm-l6-v2'"
    (row,) = until(lambda: stack.rows(query), 15, "the usage row")
    assert row == (7, 0, 7 * Decimal("0.02") / 1_000_000)
    (outcome,) = until(
        lambda: stack.rows("SELECT status, good FROM metering_requestoutcome WHERE kind = 'embedding'"),
        15,
        "the outcome",
    )
    assert outcome[0] == 200
    assert {engine["pool"] for engine in stack.status()["engines"]} == {"simulated", "all-minilm-l6-v2"}
    stack.down()
    assert not stack.processes()
