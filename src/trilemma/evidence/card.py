"""The model card: Hugging Face's fields, from the facts.

Reference: Mitchell et al., "Model Cards for Model Reporting", FAccT 2019; the fields of huggingface.co's
template. What nobody knows here is said to be open, and not guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from trilemma.audit.final.found import Attacks
from trilemma.evidence.blocks import Block, Heading, Rows, Words, as_markdown
from trilemma.evidence.facts import PackFacts
from trilemma.evidence.gather import held_by
from trilemma.evidence.page_one import NOT_PROMISED, worst
from trilemma.evidence.vouched import LedgerAccount

OPEN = "Not stated here: to be filled in by who publishes the model."


def card(facts: PackFacts, accounts: Mapping[int, LedgerAccount], attacks: Attacks | None) -> str:
    """Return the card."""
    return _front(facts) + "\n" + as_markdown(_body(facts, accounts, attacks))


def _front(facts: PackFacts) -> str:
    """Return the front matter; JSON strings are YAML strings."""
    results = [
        {"type": one.name, "value": one.points[-1][1], "name": one.name} for one in facts.curves if one.points
    ]
    index = [
        {
            "name": facts.name,
            "results": [
                {
                    "task": {"type": "other"},
                    "dataset": {
                        "type": facts.data,
                        "name": facts.curves[0].of if facts.curves else facts.data,
                    },
                    "metrics": results,
                }
            ],
        }
    ]
    fields = {
        "library_name": "pytorch",
        "license": "other",
        "license_name": "not-stated",
        "tags": ["federated-learning", "differential-privacy", "byzantine-robustness", "trilemma"],
        "metrics": [one["type"] for one in results],
        **({"model-index": index} if results else {}),
    }
    lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items()]
    return "\n".join(["---", *lines, "---", ""])


def _body(facts: PackFacts, accounts: Mapping[int, LedgerAccount], attacks: Attacks | None) -> list[Block]:
    held, spent = held_by(facts), worst(facts, accounts)
    if held is None or spent is None:
        promise = "No guarantee of privacy."
    else:
        promise = f"ε = {spent[0]:.4g} at δ = {spent[1]:g}, for one {held.unit} ({held.adjacency}), "
        promise += f"under {held.threat}."
    if facts.kind == "simulation":
        promise += " A simulation: the figure is not a promise about these records."
    shapes = tuple((name, " × ".join(map(str, shape)) or "one number") for name, shape in facts.tensors[:40])
    last = [f"{one.name} {one.points[-1][1]:.4f} ({one.of}; ε: {one.cover})" for one in facts.curves]
    return [
        Heading(f"Model card: {facts.name}", 1),
        Heading("Model details"),
        Words(f"{facts.model}, {facts.dim:,} trained numbers. SHA-256 of the numbers: {facts.model_digest}."),
        Rows(shapes, ("tensor", "shape")),
        Heading("Uses"),
        Words(OPEN),
        Heading("Bias, risks and limitations"),
        Words("What follows is not promised."),
        *(Words(one) for one in NOT_PROMISED),
        Heading("How to get started"),
        Words("trilemma export FOLDER model.safetensors; then load_state_dict(load_file(...))."),
        Heading("Training details"),
        Words(
            f"{facts.algorithm} with the rule {facts.rule}, {facts.done} of {facts.rounds} rounds, "
            f"{facts.clients} parties, of whom {facts.robust.tolerated} may lie. Configuration: config.toml."
        ),
        Words(f"Privacy: {promise} statement.html explains it."),
        Heading("Evaluation"),
        Words("; ".join(last) or "No score is in this pack."),
        Words(
            "; ".join(one.sentence for one in attacks.tried)
            if attacks and attacks.tried
            else "No attack was tried."
        ),
        Heading("Environmental impact"),
        Words("Not measured."),
        Heading("Model card contact"),
        Words(OPEN),
    ]
