"""How an epoch begins: everybody is called, keys are passed around, and members confirm each other.

    hello → offer        who is there, with a signed key for this epoch
    keys → signature     everybody gets all offers, checks them and signs the list of members
    confirm → confirmed  everybody gets all signatures and checks that all are on the one list

Clients believe none of it to the server, which only carries; what the server checks here spares the others an
epoch that one bad key or signature would spoil. Who joined and then did not sign is left out of the next try.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from trilemma.base.errors import PrivacyError
from trilemma.federation.client.sessions import check_offer
from trilemma.federation.party.agreed import Agreed
from trilemma.federation.party.layout import Party
from trilemma.federation.protocol import events, kinds, wire
from trilemma.federation.protocol.confirmation import Confirmation, MemberList, Sighting, Witness
from trilemma.federation.protocol.epochs import Epoch, EpochsStopped, Policy, open_epoch
from trilemma.federation.protocol.events import without_quotes
from trilemma.federation.protocol.expulsions import AnnouncedExpulsion
from trilemma.federation.protocol.transport import Reply
from trilemma.federation.server.exchange import Clock, Correspondence, Patience

SMALL = 1 << 16
"""Bytes that a reply in this phase may have."""


@dataclass(frozen=True)
class Joining:
    """Opens the epochs of the run `run`, among those on the roster that is `agreed` on and not `expelled`."""

    run: str
    party: Party
    agreed: Agreed
    policy: Policy
    exchange: Correspondence
    clock: Clock
    say: events.Say
    expelled: tuple[AnnouncedExpulsion, ...] = ()
    reasons: dict[int, str] = field(default_factory=dict)

    def call(
        self, number: int, left_out: frozenset[int] = frozenset()
    ) -> tuple[dict[int, int], dict[int, str]]:
        """Say hello to every node until everybody answered or time is up; `left_out` are not called.

        It looks again and again who is there, so that one that is gone does not keep the server from calling
        those that appear meanwhile. A hello stays open all the time. Return who sits at which node, and their
        offers.
        """
        timing = self.party.federation.timing
        self.tell_expelled()
        hello = wire.dumps(
            kinds.Hello(
                run=self.run,
                epoch=number,
                terms=self.agreed.terms,
                roster=self.agreed.roster.text,
                expelled=list(self.expelled),
            )
        )
        deadline = self.clock.now() + timing.join_limit
        joined: dict[int, int] = {}
        keys: dict[int, str] = {}
        refused: set[int] = set()
        wanted = set(self.policy.everyone) - left_out
        while len(joined) + len(refused) < len(wanted) and (left := deadline - self.clock.now()) > 0:
            known = {node: one for node, one in self.exchange.nodes().items() if one in wanted}
            called = {node: hello for node in known if node not in joined and node not in refused}
            patience = Patience(min(left, 10 * timing.poll), welcome=left)
            replies = self.exchange.ask(called, patience) if called else []
            answers = [reply for reply in replies if reply.block is not None or reply.refused]
            if not answers:  # nobody is there, or the carrier did not reach them: perhaps they just start
                self.clock.sleep(timing.poll)
            for reply in answers:
                if reply.node in joined:
                    continue  # it was asked twice
                try:
                    client = known[reply.node]
                    keys[client] = self._offer(reply, client, number)
                    joined[reply.node] = client
                except wire.WireError as error:
                    refused.add(reply.node)
                    self._reject(number, known.get(reply.node), str(error))
        return joined, keys

    def tell_expelled(self) -> None:
        """Tell those who are expelled, and there, why; nobody waits for their answer."""
        blocks = {
            one.client: wire.dumps(kinds.Expelled(run=self.run, expulsion=one)) for one in self.expelled
        }
        present = self.exchange.nodes().items()
        told = {node: blocks[client] for node, client in present if client in blocks}
        if told:
            welcome = self.party.federation.timing.join_limit
            self.exchange.ask(told, Patience(welcome, dict.fromkeys(told, 0.0), welcome=welcome))

    def _offer(self, reply: Reply, client: int, number: int) -> str:
        if reply.block is None:
            raise wire.WireError(reply.why)
        header, _ = wire.loads(reply.block, kinds.Joined, limit=SMALL)
        if (header.run, header.epoch, header.client) != (self.run, number, client):
            raise wire.WireError(f"the node of client {client} joined as {header!r}")
        check_offer(self.agreed.roster.keys, self.run, number, client, header.key)
        return header.key

    def open(self, number: int, joined: Mapping[int, int], keys: Mapping[int, str]) -> Epoch | frozenset[int]:
        """Let those who joined agree on epoch `number`; or return who is in the way.

        They did not sign; or somebody shows that their ledgers are older than what they signed before.
        """
        epoch = self.opened(number, joined.values())
        signed = self._relay(epoch, joined, keys)
        if missing := frozenset(epoch.members) - signed.keys():
            return missing
        confirmed, older = self._confirm(epoch, joined, signed)
        if older:
            return older
        self.opened(number, confirmed)  # stops the run where too many refuse
        return epoch

    def opened(self, number: int, joined: Iterable[int]) -> Epoch:
        """Return epoch `number` with those who joined; where they are too few, say why each other did not."""
        members = set(joined)
        try:
            return open_epoch(self.policy, number, members, self.agreed.terms)
        except EpochsStopped as error:
            here, why = set(self.exchange.nodes().values()), defaultdict[str, list[int]](list)
            for client in sorted(set(self.policy.everyone) - members):
                silent = "did not answer" if client in here else "not connected"
                why[self.reasons.get(client, silent)].append(client)
            said = [f"client{'s' * (len(who) > 1)} {events.listed(who)}: {one}" for one, who in why.items()]
            raise EpochsStopped("; ".join([str(error), *said])) from None

    def _relay(
        self, epoch: Epoch, joined: Mapping[int, int], keys: Mapping[int, str]
    ) -> dict[int, Confirmation]:
        """Pass everybody's signed keys to everybody; return who signed the list, and what."""
        roster, witness = self.agreed.roster.keys, Witness(self.party.ledgers_seen)
        offers = {client: keys[client] for client in epoch.members}
        members = MemberList(self.run, epoch.number, self.agreed.terms, offers, self.expelled)
        relayed = {str(client): offer for client, offer in offers.items()}
        block = wire.dumps(kinds.Keys(run=self.run, epoch=epoch.number, keys=relayed))
        signed: dict[int, Confirmation] = {}
        shown: dict[int, Sighting] = {}
        for reply in self._ask(block, joined):
            try:
                if reply.block is None:
                    raise wire.WireError(reply.why)
                header, _ = wire.loads(reply.block, kinds.Ready, limit=SMALL)
                client, confirmation = joined[reply.node], Confirmation.decode(header.confirmation)
                shown[client] = confirmation.check(members, roster, client)
                witness.check(client, confirmation.ledger)
                signed[client] = confirmation
            except (wire.WireError, PrivacyError) as error:
                self._reject(epoch.number, joined.get(reply.node), f"keys refused: {error}")
        witness.see({client: confirmation.ledger for client, confirmation in signed.items()}, shown)
        return signed

    def _confirm(
        self, epoch: Epoch, joined: Mapping[int, int], signed: Mapping[int, Confirmation]
    ) -> tuple[set[int], frozenset[int]]:
        """Pass everybody's signature to everybody; return who accepted all, and whose ledger is older."""
        texts = {str(client): one.encode() for client, one in sorted(signed.items())}
        block = wire.dumps(kinds.Confirm(run=self.run, epoch=epoch.number, confirmations=texts))
        confirmed: set[int] = set()
        older: set[int] = set()
        for reply in self._ask(block, joined):
            try:
                if reply.block is None:
                    raise wire.WireError(reply.why)
                if wire.kind_of(reply.block) == kinds.Doubted.kind:
                    doubted, _ = wire.loads(reply.block, kinds.Doubted, limit=SMALL)
                    older |= self._shown_older(doubted, signed)
                    continue
                wire.loads(reply.block, kinds.Confirmed, limit=SMALL)
                confirmed.add(joined[reply.node])
            except (wire.WireError, PrivacyError) as error:
                self._reject(epoch.number, joined.get(reply.node), f"not confirmed: {error}")
        for client in sorted(older):
            self._reject(epoch.number, client, "not confirmed: its ledger is older than one it signed before")
        return confirmed, frozenset(older)

    def _shown_older(self, doubted: kinds.Doubted, signed: Mapping[int, Confirmation]) -> set[int]:
        """Return whose ledger is older than one they signed before, as somebody shows; remember that one."""
        members = {str(client): client for client in signed}
        older: set[int] = set()
        for name, text in doubted.shown.items():
            if name not in members:
                raise PrivacyError("what it shows is about nobody here")
            client, before = members[name], Sighting.decode(text)
            member = self.agreed.roster.clients[client]
            former = [one.identity for one in member.former]
            ledger = before.later_than(signed[client].ledger, client, member.identity, former)
            Witness(self.party.ledgers_seen).recall(client, ledger, before)
            older.add(client)
        return older

    def _ask(self, block: bytes, joined: Mapping[int, int]) -> list[Reply]:
        patience = Patience(self.party.federation.timing.join_limit)
        return self.exchange.ask(dict.fromkeys(joined, block), patience)

    def _reject(self, epoch: int, client: int | None, reason: str) -> None:
        said = without_quotes(reason)
        if client is not None:
            self.reasons[client] = said
        self.say(events.CLIENT_REFUSED(epoch=epoch, client=client, reason=said))
