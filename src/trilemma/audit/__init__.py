"""The audit room: what an adversary can really find out, beside what is certified.

    subject       an algorithm as a configuration builds it, its declaration and its certificate
    canaries      the worst data a client can hold, and the worst a server can broadcast
    trials        many runs at once through the algorithm's own functions
    observer      what a threat model leaves to the adversary
    bounds        from right and wrong guesses to a lower bound on ε
    likelihood, one_run, sensitivity, bits      the tests
    search, catalogue, ascent, own_gradients      the directed search
    examine       all of them, on a configuration or a task
    nodes         a federation's own nodes, driven by a malicious server, on copies
    matrix        every private algorithm under every threat model
    outcomes      what was found, typed

`docs/audit.md` says what a pass means, and what it does not.
"""

from trilemma.audit.examine import Effort, examine
from trilemma.audit.nodes import examine_federation
from trilemma.audit.outcomes import Audit, AuditOutcome
from trilemma.audit.subject import Subject
from trilemma.audit.tables import audit_table

__all__ = ["Audit", "AuditOutcome", "Effort", "Subject", "audit_table", "examine", "examine_federation"]
