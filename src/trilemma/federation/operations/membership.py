"""Who comes, goes, and changes keys: what the authority does about it, and what is done at once on a pilot.

Each change is a new roster with the next number. Where the parties' folders lie beside the authority's, as on
a pilot, the change is put into force there: the server has the roster, clients learn of it from the server,
with the next epoch. Everybody else is handed a bundle (`bundles/` in the authority's folder) to install.
"""

from __future__ import annotations

import shutil
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from trilemma.base import files
from trilemma.base.errors import UserError
from trilemma.experiment import load
from trilemma.federation.client.account import read_budget
from trilemma.federation.client.spending import write_budgets
from trilemma.federation.identity import certificates
from trilemma.federation.identity.authority import Authority
from trilemma.federation.identity.rosters import Former, Member, SignedRoster
from trilemma.federation.party import adoption, bundles, layout, provisioning, public_facts
from trilemma.federation.party.layout import Party
from trilemma.federation.party.permission import Permission
from trilemma.federation.party.public_facts import Federation
from trilemma.federation.party.requests import Request, check_fresh, check_new, request_rotation
from trilemma.federation.party.task import load_task

BUNDLES = "bundles"


@dataclass(frozen=True)
class MembershipChange:
    """What was done: the roster now in force, parties changed here at once, bundles for those elsewhere."""

    roster: SignedRoster
    here: tuple[Party, ...] = ()
    bundles: tuple[Path, ...] = ()
    client: int | None = None


# --- the authority's part ---------------------------------------------------------------------------------


def admit(authority: Authority, request: Request) -> tuple[SignedRoster, int]:
    """Sign a roster with one more client, and its certificate; return the roster and the client's place."""
    before = authority.roster
    check_new(request, before)
    return _certified(authority, request, (*before.clients, request.member()), len(before.clients))


def remove(authority: Authority, place: int) -> SignedRoster:
    """Sign a roster without a client; its place stays its own."""
    before = authority.roster
    clients = list(before.clients)
    clients[place] = clients[place].model_copy(update={"removed": True})
    _check_enough(authority, sum(not one.removed for one in clients))
    return authority.enact(authority.sign(before.federation, tuple(clients)))


def replace_keys(
    authority: Authority, place: int, request: Request, lost: bool = False
) -> tuple[SignedRoster, int]:
    """Sign a roster with a client's new keys, and a certificate for them.

    The client's present identity has to have signed the new one. Where it is `lost`, the authority decides
    alone, and the others do not count on the client until their owners vouch for it.
    """
    before = authority.roster
    member = before.clients[place]
    check_fresh(request, before)
    former = request.former
    if former is None and not lost:
        raise UserError(
            f"client {place}'s present identity has not signed this request; is it lost? Then say --lost: "
            "the others will not count on the new one until their owners vouch for it"
        )
    if request.name != member.name:
        raise UserError(f"the request is by {request.name!r}, and client {place} is {member.name!r}")
    signed = Former(identity=member.identity, signature=None if former is None else former.signature)
    after = Member(
        name=member.name, identity=request.identity, tls=request.tls, former=(*member.former, signed)
    )
    if former is not None and after.identity not in after.successors({member.identity}):
        raise UserError(f"the request is not signed by client {place}'s present identity")
    clients = (*before.clients[:place], after, *before.clients[place + 1 :])
    return _certified(authority, request, clients, place)


def _certified(
    authority: Authority, request: Request, clients: tuple[Member, ...], place: int
) -> tuple[SignedRoster, int]:
    name = f"client-{place}"
    certificate = certificates.certify_client(authority.issued, name, request.certificate)
    roster = authority.sign(authority.roster.federation, clients)
    authority.keep(name, certificate)  # first: who is on the newest roster can be handed a bundle
    return authority.enact(roster), place


def _check_enough(authority: Authority, clients: int) -> None:
    """Refuse a federation that could not go on: too few for the liars it tolerates."""
    said = tomllib.loads(authority.config).get("federation", {})
    tolerated = said.get("tolerate", said.get("byzantine", 0))
    needed = max(2 * tolerated + 1, said.get("sampled", 1))
    if clients < needed:
        raise UserError(
            f"{clients} clients would be left; with up to {tolerated} liars ([federation] tolerate), and as "
            f"many as are asked in a round, at least {needed} are needed"
        )


# --- in force at once, or by bundle -----------------------------------------------------------------------


def parties_beside(authority: Authority) -> list[Party]:
    """Return the parties whose folders lie beside the authority's."""
    beside = authority.folder.resolve().parent
    return layout.parties(beside) if any(beside.glob(f"*/{public_facts.PUBLIC}")) else []


def spread(authority: Authority, roster: SignedRoster, client: int | None = None) -> MembershipChange:
    """Let everybody have a new roster who needs it now: the server, and the client it is about."""
    beside = {party.name: party for party in parties_beside(authority)}
    wanted = ["server", *([] if client is None else [f"client-{client}"])]
    here, written = [], []
    for name in wanted:
        place = None if name == "server" else client
        path = bundles.write_bundle(authority, place, authority.folder / BUNDLES)
        if name in beside:
            here.append(bundles.install(beside[name].folder, bundles.Bundle.load(path)))
            path.unlink()
        else:
            written.append(path)
    if client is not None:
        # Whoever has all these folders vouches for what it does itself.
        for party in beside.values():
            if party.client is not None:
                adoption.know(party, [roster.clients[client].identity])
    return MembershipChange(roster, tuple(here), tuple(written), client)


def add(folder: Path, request: Request | None) -> MembershipChange:
    """Let a client in: one that sent a request, or one whose folder is made here, keys and all."""
    authority = Authority.open(folder)
    if request is not None:
        return spread(authority, *admit(authority, request))
    beside = parties_beside(authority)
    if not beside:
        raise UserError(
            "there is no party beside the authority: let the new client make its own keys (`trilemma "
            "federation request`) and send its request"
        )
    return _add_here(authority, beside)


def _add_here(authority: Authority, beside: list[Party]) -> MembershipChange:
    """Make a client's folder beside the others, as `init` does: whoever does it sees its keys."""
    before, model = authority.roster, beside[-1]
    client = Party(authority.folder.resolve().parent / f"client-{len(before.clients)}", len(before.clients))
    if client.folder.exists():
        raise UserError(f"{client.folder} exists; keys are never overwritten, move it away")
    federation = Federation.parse(authority.facts)
    try:
        provisioning.begin_folder(
            client.folder, federation, authority.config, model.task, load(model.config).plugins
        )
        for link in (path for path in model.folder.iterdir() if path.is_symlink()):
            (client.folder / link.name).symlink_to(link.readlink())  # a rehearsal's data
        issued = certificates.issue_client(authority.issued, client.name)
        provisioning.install_certificate(client, issued)
        roster = authority.sign(before.federation, (*before.clients, provisioning.new_member(client)))
        provisioning.complete_folder(client, authority.certificate, roster)
        if federation.on_one_machine:
            Permission().with_plan(client.agreed.plan).save(client.allowed)
        epsilon = read_budget(model).epsilon if model.budget.is_file() else None  # as much as the others
        write_budgets([client], load_task(client), epsilon)
        authority.enact(roster)
    except UserError:
        shutil.rmtree(client.folder)
        raise
    authority.keep(client.name, issued.certificate)
    return spread(authority, roster, client.client)


def leave(folder: Path, name: str) -> MembershipChange:
    """Remove a client."""
    authority = Authority.open(folder)
    place = authority.roster.place(name)
    change = spread(authority, remove(authority, place))
    for party in parties_beside(authority):
        if party.client == place:  # nobody else will tell it
            with files.locked(party.lock):
                adoption.adopt(party, change.roster.text)
    return replace(change, client=place)


def rotate(folder: Path, name: str, request: Request | None, lost: bool = False) -> MembershipChange:
    """Give a client new keys: those of its request, or ones that are made here in its folder."""
    authority = Authority.open(folder)
    place = authority.roster.place(name)
    if request is None:
        own = next((party for party in parties_beside(authority) if party.client == place), None)
        if own is None:
            raise UserError(
                f"client {place}'s folder is not here: it makes its own keys (`trilemma federation rotate` "
                "on its own folder) and sends its request"
            )
        request = Request.load(ask_for_keys(own))
    if _granted(authority, place, request):
        return spread(authority, authority.roster, place)
    return spread(authority, *replace_keys(authority, place, request, lost))


def ask_for_keys(client: Party) -> Path:
    """Make a client's next keys, or find those that wait; return the request for them."""
    with files.locked(client.lock):
        bundles.finish(client)
        return request_rotation(client)


def _granted(authority: Authority, place: int, request: Request) -> bool:
    """Tell whether a client has the keys of its request already: it came twice, or a crash in between."""
    member = authority.roster.clients[place]
    certificate = authority.given(f"client-{place}")
    return (
        (request.name, request.identity) == (member.name, member.identity)
        and certificate is not None
        and certificates.is_for(certificate, request.certificate)
    )
