"""All attacks on one final model: of a simulated run, of a client's own folder, or of a federation's server.

Records stay where they are. A simulation has all of them. A client has its own, and its owner alone sees what
it finds: nothing is sent. The server has no party's records, and tries what needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from trilemma import experiment as configuration
from trilemma.audit.final.found import Attacks, Tried
from trilemma.audit.final.membership import lira, loss_threshold, shadow
from trilemma.audit.final.others import attributes, inversion, marked
from trilemma.audit.final.target import AskedRecords, FinalModel
from trilemma.audit.one_run import from_one_run
from trilemma.audit.subject import Subject
from trilemma.base.errors import PrivacyError, UserError
from trilemma.base.keys import Key
from trilemma.data import FederatedData
from trilemma.data.types import each
from trilemma.experiment import Config
from trilemma.federation.party.layout import Party
from trilemma.privacy import Guarantee, Verdict
from trilemma.simulate import RunDirectory
from trilemma.simulate.experiment import Experiment, assemble
from trilemma.task import Task

RISK = 0.01
AT_PARTIES = "the records are the parties': no count is paid for, so nothing is measured on them here"


def on_run(
    folder: Path, digest: Callable[..., str], seed: int | None, shadows: int, canaries: int
) -> Attacks:
    """Attack the model of a simulated run."""
    directory = RunDirectory.open(folder)
    config, task = directory.config, directory.task() if directory.has_task else None
    chosen = config.run.seeds[0] if seed is None else seed
    if chosen not in config.run.seeds:
        raise UserError(f"there is no seed {chosen}; allowed: {', '.join(map(str, config.run.seeds))}")
    ready = assemble(config.with_("run.device='cpu'"), chosen, task)
    params = directory.seed(chosen).model()
    if params.dim() != 1:
        raise UserError("clients keep models of their own: there is no common one to attack")
    held, examples = ready.clients.data, ready.clients.data.poorest(ready.honest)
    rows = np.unique(np.concatenate([held.holdings.train[i] for i in ready.honest]))
    target = FinalModel(
        *(ready.clients.model, params, digest(params), _of(held, rows), _tests(held)),
        *_promised(ready.resolved.verdict(config.run.rounds, config.privacy.delta), config),
        classes=held.dataset.classes,
        buffers=directory.seed(chosen).statistics() or {},
    )
    key = Key(chosen).fold("attack on the final model")
    tried: list[tuple[str, Callable[[], Tried]]] = [*_with_records(target, key)]
    if shadows:
        tried.insert(1, ("membership, LiRA", partial(_lira, target, ready, rows, shadows, key)))
    subject = partial(Subject.of, config, examples, "grid")
    tried += _without_records(target, subject, canaries, key)
    return _all(target, tried, () if shadows else (("membership, LiRA", "give --shadows 8"),))


def on_file(path: Path, file: Path, digest: Callable[..., str]) -> Attacks:
    """Attack a model that was exported, with all records of its task; nothing is known of a certificate."""
    task = Task.from_file(file)
    config = configuration.load(None, (), configuration.Own(task.clients_known))
    ready = assemble(config.with_("run.device='cpu'"), config.run.seeds[0], task)
    model, held = ready.clients.model, ready.clients.data
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is no model (safetensors): {error}") from None
    for name, shape in model.shapes:
        if name not in tensors or tuple(tensors[name].shape) != tuple(shape):
            raise UserError(f"{path} is no model of {file}: it has no tensor {name} of shape {tuple(shape)}")
    params = torch.cat([tensors[name].flatten().float() for name, _ in model.shapes])
    rows = np.unique(np.concatenate([held.holdings.train[i] for i in ready.honest]))
    target = FinalModel(
        *(model, params, digest(params), _of(held, rows), _tests(held), None, config.privacy.delta),
        promise="none is known of a file: attack the run's folder, which has it",
        classes=held.dataset.classes,
    )
    key = Key(config.run.seeds[0]).fold("attack on the final model")
    return _all(target, _with_records(target, key), (("membership, LiRA", "needs the run's folder"),))


def on_client(folder: Path, run: str | None, digest: Callable[..., str], canaries: int) -> Attacks:
    """Attack a federation's model with one client's own records; for its owner alone."""
    from trilemma.federation.client.account import own_statement
    from trilemma.federation.client.at_home import received

    party = Party.open(folder)
    has = received(party, run)
    task, statement = has.task, own_statement(party)
    held = task.data
    assert held is not None
    place = 0 if held.clients == 1 else party.client
    assert place is not None
    verdict = task.resolved.verdict(task.config.run.rounds, task.config.privacy.delta)
    epsilon, delta, promise = _promised(verdict, task.config)
    if epsilon is not None and statement.entries:
        epsilon = max(epsilon, statement.spent[1])
        promise += f"; this client's ledger says ε = {statement.spent[1]:.4g}"
    target = FinalModel(
        *(task.model, has.params, digest(has.params), _of(held, held.holdings.train[place])),
        _not_used(party, held, place),
        *(epsilon, delta, promise),
        classes=held.dataset.classes,
    )
    key = Key(task.config.run.seeds[0]).fold("attack on the final model")
    return _all(target, _with_records(target, key), (("membership, LiRA", "needs everybody's records"),))


def on_server(folder: Path, run: str | None, digest: Callable[..., str], canaries: int) -> Attacks:
    """Attack a federation's model with what its server has: no party's records."""
    from trilemma.federation.party.layout import server_in
    from trilemma.federation.party.task import load_task
    from trilemma.report.loading import load

    task, params = load_task(server_in(folder)), load(folder, run).params()
    tests = task.assembled.tests
    others = None if tests is None else AskedRecords(tests.x_test, tests.y_test)
    verdict = task.resolved.verdict(task.config.run.rounds, task.config.privacy.delta)
    target = FinalModel(
        *(task.model, params, digest(params), None, others),
        *_promised(verdict, task.config),
        classes=None if tests is None else tests.classes,
    )
    key = Key(task.config.run.seeds[0]).fold("attack on the final model")
    held = task.data
    examples = server_in(folder).federation.examples or (1 if held is None else int(held.sizes.min()))
    skipped = tuple((name, AT_PARTIES) for name in ("membership", "attribute inference", "model inversion"))
    subject = partial(Subject.resolved, task.config, task.resolved, examples)
    return _all(target, _without_records(target, subject, canaries, key), skipped)


def _not_used(party: Party, held: FederatedData, place: int) -> AskedRecords | None:
    """Return what a client did not train on: set aside, or the task's test examples if it can read them."""
    if held.holdings.valid and len(held.holdings.valid[place]):
        return _of(held, held.holdings.valid[place])
    if len(held.dataset.y_test):
        return _tests(held)
    try:
        tests = None if party.task is None else Task.from_file(party.task).test_dataset
    except UserError:  # they may lie elsewhere
        tests = None
    return None if tests is None else AskedRecords(tests.x_test, tests.y_test)


def _of(held: FederatedData, rows: np.ndarray) -> AskedRecords:
    data = held.dataset
    return AskedRecords(each(data.x_train, lambda column: column[rows]), data.y_train[rows])


def _tests(held: FederatedData) -> AskedRecords | None:
    data = held.dataset
    return AskedRecords(data.x_test, data.y_test) if len(data.y_test) else None


def _promised(verdict: Verdict, config: Config) -> tuple[float | None, float, str]:
    """Return ε, δ and the promise in words."""
    if isinstance(verdict, Guarantee):
        said = f"ε = {verdict.epsilon:.4g} at δ = {verdict.delta:g} for one {verdict.unit}, "
        said += f"under {verdict.threat}"
        return verdict.epsilon, verdict.delta, said
    return None, config.privacy.delta, f"none ({verdict.reason})"


Attack = tuple[str, Callable[[], Tried]]


def _with_records(target: FinalModel, key: Key) -> list[Attack]:
    """Return the attacks that need records which were used, and others."""
    if target.others is None or target.members is None:
        return []
    return [
        ("membership, by loss", partial(loss_threshold, target, key)),
        ("attribute inference", partial(attributes, target, key)),
        ("model inversion", partial(inversion, target, key)),
        ("backdoor", partial(marked, target)),
    ]


def _without_records(
    target: FinalModel, subject: Callable[[], Subject | None], canaries: int, key: Key
) -> list[Attack]:
    """Return the attacks that need no party's records."""
    found: list[Attack] = [("canaries", partial(_canaries, subject, canaries, key))]
    if target.members is None:
        found.append(("backdoor", partial(marked, target)))
    return found


def _lira(target: FinalModel, ready: Experiment, rows: np.ndarray, shadows: int, key: Key) -> Tried:
    trained = [shadow(ready, number, key) for number in range(shadows)]
    return lira(target, trained, rows, key)


def _canaries(subject: Callable[[], Subject | None], canaries: int, key: Key) -> Tried:
    """Play one run of the same algorithm with canaries (`audit.one_run`)."""
    played = subject()
    if played is None:
        raise UserError("nothing is noised, so there is nothing to find out")
    found = from_one_run(played, canaries, RISK, key)
    many = found.facts["canaries"]
    return Tried(
        attack="canaries in one run",
        how=f"plays the algorithm once with {many} made-up records, and guesses which are in",
        measure="ε at least",
        found=found.found,
        low=found.found,
        allowed=found.certified,
        why="the certified ε. It is about the algorithm with canaries, and not about this model",
    )


def _all(target: FinalModel, attacks: list[Attack], skipped: tuple[tuple[str, str], ...]) -> Attacks:
    tried, left = [], list(skipped)
    if target.members is not None and target.others is None:
        left.append(("membership and others", "there are no records that were not used (test examples)"))
    for name, attack in attacks:
        try:
            tried.append(attack())
        except (UserError, PrivacyError) as error:
            left.append((name, str(error)))
    done = Attacks(
        model_digest=target.digest,
        promise=target.promise,
        certified=target.epsilon,
        delta=target.delta,
        tried=tuple(tried),
    )
    return done.model_copy(update={"skipped": tuple(left)})
