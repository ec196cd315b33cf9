"""Which file of a pack supports which requirement, and what it does not show.

A row stands only where its file lies in the pack; `verify` refuses a row whose file is missing. Nothing here
says that a requirement is met: who decides that reads the file, and the last column.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from trilemma.evidence.blocks import Block, Heading, Link, Rows, Words

MAPPING = "mapping.md"


@dataclass(frozen=True)
class Support:
    """A requirement, the file that bears on it, what it shows there and what it does not."""

    requirement: str
    file: str
    shows: str
    not_shown: str


ROWS = (
    Support(
        "EU AI Act Art. 9 (risk management)",
        "attacks.html",
        "which attacks on the final model were tried, with a measurement beside each bound",
        "a risk management system, its owner, or risks other than disclosure and manipulation by parties",
    ),
    Support(
        "EU AI Act Art. 10 (data governance)",
        "config.toml",
        "how data were divided, clipped and sampled, as configured",
        "origin, quality, representativeness or bias of records; a federation does not see them",
    ),
    Support(
        "EU AI Act Art. 11 (technical documentation)",
        "model-card.md",
        "model, training, configuration, scores and limits",
        "intended use and the rest of Annex IV, which the provider writes",
    ),
    Support(
        "EU AI Act Art. 11 (technical documentation)",
        "sbom.cdx.json",
        "every installed package with its version",
        "that these packages have no defects",
    ),
    Support(
        "EU AI Act Art. 12 (record-keeping)",
        "facts.json",
        "digests of logs and transcript, so that a later copy can be compared",
        "the logs themselves, how long they are kept, and logging while the model is in use",
    ),
    Support(
        "EU AI Act Art. 13 (information for deployers)",
        "statement.html#what-is-not-promised",
        "accuracy, limits and what is not promised, in words",
        "instructions for use in a given clinic",
    ),
    Support(
        "EU AI Act Art. 14 (human oversight)",
        "roster.json",
        "who could refuse to take part: each party's owner allows a run and approves an export",
        "oversight of decisions made with the model",
    ),
    Support(
        "EU AI Act Art. 15 (accuracy)",
        "utility.png",
        "the score over rounds, and on whose records",
        "accuracy elsewhere, or later",
    ),
    Support(
        "EU AI Act Art. 15 (robustness, cybersecurity)",
        "statement.html#what-lying-parties-can-do",
        "how many lying parties are reckoned with, κ of the rule, what they can hide, who was expelled",
        "robustness of single predictions (adversarial examples), and security of the machines",
    ),
    Support(
        "GDPR Art. 25 (protection by design)",
        "statement.html#the-questions-of-nist-sp-800-226",
        "a bound on what one record or one party can change, its unit and threat model",
        "that this bound is enough for these records, or that processing is necessary",
    ),
    Support(
        "GDPR Art. 32 (security of processing)",
        "roster.json",
        "the keys of all parties, signed by the federation's authority",
        "access control, backups and staff at a party",
    ),
    Support(
        "GDPR Art. 35 (impact assessment)",
        "attacks.html",
        "measurements of what somebody with the model learns about records",
        "the assessment itself; effects on people; attacks that nobody tried",
    ),
    Support(
        "GDPR Art. 35 (impact assessment)",
        "statement.html",
        "ε of every ledger that was vouched for, in words on page one",
        "a judgement whether the risk is acceptable",
    ),
    Support(
        "SATRE 3.1.5 (egress follows governance): what leaves?",
        "facts.json",
        "the digest of the one model that may be exported with this pack",
        "other files that left the environment",
    ),
    Support(
        "SATRE 3.1.5 (egress follows governance): who agreed?",
        "roster.json",
        "whose approvals count; the approvals lie in approvals/",
        "that those who signed were entitled to by their institutions",
    ),
    Support(
        "SATRE output management: is the output disclosive?",
        "statement.html#what-is-not-promised",
        "a worst-case bound for one record, and what it does not cover",
        "an output checker's judgement",
    ),
    Support(
        "DP Deployments Registry: unit, ε, δ, model of trust, accounting, implementation",
        "statement.html#the-questions-of-nist-sp-800-226",
        "each field under “The questions of NIST SP 800-226”",
        "that the entry was submitted or reviewed",
    ),
)


def rows(files: Collection[str]) -> tuple[Support, ...]:
    """Return the claims whose files are there."""
    return tuple(one for one in ROWS if one.file.partition("#")[0] in files)


def mapping(files: Collection[str]) -> list[Block]:
    """Return the page."""
    cells = tuple(
        (one.requirement, Link(one.file, one.file), one.shows, one.not_shown) for one in rows(files)
    )
    return [
        Heading("What in this pack bears on which requirement", 1),
        Words(
            "No row says that a requirement is met. Each names a file that helps to judge it, and what that "
            "file does not show. Requirements without a file here are not listed."
        ),
        Rows(cells, ("requirement", "file", "shows", "does not show")),
    ]
