"""Constraints on what a model may write: from their form on the wire to sets of token ids, and the trial of new ones.

It must not know requests, tensors or where a constraint came from; it trusts none of them.

G1: what a constraint lets pass to its end satisfies it. G2: no state it can reach forbids every token. G3: compiling
and each step are bounded in time and memory, and a constraint that is over its bounds harms nobody else.
"""

from engine.text.grammar.constraint import COMMON, JSON_OPTIONS, Constraint, ConstraintError, parse
from engine.text.grammar.trial import Trial, TrialError
from engine.text.grammar.vocabulary import Grammar, Vocabulary

__all__ = [
    "COMMON",
    "JSON_OPTIONS",
    "Constraint",
    "ConstraintError",
    "Grammar",
    "Trial",
    "TrialError",
    "Vocabulary",
    "parse",
]
