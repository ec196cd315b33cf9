"""Clients come and go, keys and certificates change: each by a command, and nothing else is believed."""

from __future__ import annotations

import datetime as dt
import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from federation_harness import PRIVATE, Direct, command, coordinator, during, make, small_config
from trilemma.base.errors import UserError
from trilemma.base.records import Record
from trilemma.cli.export import export_command
from trilemma.federation.client.account import check_remembered, read_budget
from trilemma.federation.client.node import Node
from trilemma.federation.identity import certificates
from trilemma.federation.identity.authority import Authority
from trilemma.federation.identity.rosters import RosterError
from trilemma.federation.operations import checks, membership
from trilemma.federation.operations.bootstrap import installed
from trilemma.federation.party import public_facts, requests
from trilemma.federation.party.adoption import adopt, strangers
from trilemma.federation.party.bundles import Bundle
from trilemma.federation.party.layout import Party, parties
from trilemma.federation.party.requests import Request, RequestKeys, make_request
from trilemma.federation.protocol.reasons import Refused
from trilemma.privacy.ledger.lines import read_entries
from trilemma.privacy.ledger.statement import read_statement
from trilemma.privacy.secrets import Identity

CLIENTS = 4


@pytest.fixture
def pilot(tmp_path):
    config = small_config(CLIENTS, *PRIVATE, rounds=4)
    return make(tmp_path / "pilot", CLIENTS, config, budget=1e6)[0].folder.parent


def contents(folder: Path) -> dict[Path, bytes]:
    return {
        path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"
    }


def refused(folder: Path, complaint: str, *arguments: object) -> None:
    """A command that is refused changes nothing."""
    before = contents(folder)
    with pytest.raises(UserError, match=complaint):
        command(*arguments)
    after = contents(folder)
    assert {path.name for path in before.keys() ^ after.keys()} <= {"lock"}
    assert all(after[path] == content for path, content in before.items())


# --- in a run ---------------------------------------------------------------------------------------------


class Growing(Direct):
    """Nodes in this process; whoever's folder appears is there, and who gets new keys has a new node."""

    def __init__(self, folder, tamper):
        super().__init__(parties(folder), tamper)
        self.folder = folder

    def nodes(self):
        for party in parties(self.folder):
            if party.client is not None and party.client not in self.clients:
                self.clients[party.client] = Node(party)
        return super().nodes()


@pytest.mark.slow
def test_add_rotate_and_remove_while_a_run_goes_on(pilot):
    """One run, four epochs: as it began, with a fifth client, with client 1's new keys, without client 0."""
    said = []
    acts = {
        0: lambda: said.append(command("add-client", pilot)),
        1: lambda: said.append(command("rotate", pilot, "client-1")),
        2: lambda: said.append(command("remove-client", pilot, 0)),
    }
    old = Identity.load(parties(pilot)[2].identity)
    everyone = parties(pilot)
    runner, events = coordinator(everyone, Growing(pilot, during(acts)))
    assert runner.go().rounds == 4
    assert [line for line in events if line.startswith("roster ")] == [
        "roster 2: clients 0 to 4",
        "roster 3: clients 0 to 4",
        "roster 4: clients 1 to 4",
    ]
    records = runner.log.records()
    assert [sorted(map(int, record["weights"])) for record in records] == [
        [0, 1, 2, 3],
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4],
        [1, 2, 3, 4],
    ]
    unheard = [sorted(Record.read(record).unheard) for record in records]
    assert unheard == [[], [1], [], []], "its keys changed within round 1"
    epochs = [record["epoch"] for record in records]
    assert epochs == sorted(set(epochs)), "each roster has an epoch, and secrets, of its own"
    assert Identity.load(parties(pilot)[2].identity) != old
    for place, party in enumerate(parties(pilot)[1:]):
        assert strangers(party) == [], "who has all folders vouches for what it does"
        assert len(read_entries(party.ledger)) == {0: 3, 1: 3, 4: 3}.get(place, 4)
    export_command(pilot / "server", pilot / "model.pt")
    assert sum(tensor.numel() for tensor in torch.load(pilot / "model.pt").values()) == 69
    assert "client 4 (client-4) is on it" in said[0]
    assert read_budget(parties(pilot)[5]) == read_budget(parties(pilot)[1])
    assert "nobody else's number changes" in said[2]


@pytest.mark.slow
def test_a_run_can_be_finished_by_a_client_with_new_keys(pilot):
    """Its ledger goes on under the new identity, and the others do not take it for one that was set back."""
    runner, _ = coordinator(parties(pilot), Direct(parties(pilot)))
    runner.go()
    command("rotate", pilot, 2)
    again, said = coordinator(parties(pilot), Direct(parties(pilot)), "again")
    assert again.go().rounds == 4
    assert "epoch 0: clients 0 to 3 of 4" in said
    assert [entry.run for entry in read_entries(parties(pilot)[3].ledger)] == ["run/0"] * 4 + ["again/0"] * 4


@pytest.mark.slow
def test_an_invented_client_is_priced_as_a_colluder(pilot):
    """Client 0 was never told that the fifth is real: to its ledger the epoch is one of four."""
    coordinator(parties(pilot), Direct(parties(pilot)), "four")[0].go()
    command("add-client", pilot)
    invented = parties(pilot)[0].signed_roster.clients[4].identity
    doubting, trusting = parties(pilot)[1:3]
    known = json.loads(doubting.known.read_text())
    doubting.known.write_text(json.dumps([key for key in known if key != invented]))
    coordinator(parties(pilot), Direct(parties(pilot)), "five")[0].go()
    paid = {
        (party.name, entry.run): entry.mechanism.z
        for party in (doubting, trusting)
        for entry in read_entries(party.ledger)
    }
    assert paid["client-0", "five/0"] == pytest.approx(paid["client-0", "four/0"])
    assert paid["client-1", "five/0"] > 1.01 * paid["client-1", "four/0"]


def test_what_cannot_be_done_is_refused_and_changes_nothing(pilot):
    refused(pilot, r"there is no client '9'; allowed: 0 \(client-0\)", "remove-client", pilot, 9)
    refused(pilot, "there is no client '../server'", "rotate", pilot, "../server")
    refused(pilot, "no authority", "add-client", pilot / "server")
    refused(pilot, "say which client", "rotate", pilot)
    command("remove-client", pilot, 3)
    refused(pilot, "at least 3 are needed", "remove-client", pilot, 2)
    refused(pilot, "was removed from the roster before", "remove-client", pilot, 3)
    refused(pilot, "was removed from the roster before", "rotate", pilot, 3)
    (pilot / "client-4").mkdir()
    refused(pilot, "client-4 exists", "add-client", pilot)


def test_an_authority_whose_time_is_over_does_nothing(pilot):
    old = certificates.new_authority("test", until=dt.datetime.now(dt.UTC) - dt.timedelta(days=2))
    authority = Authority.open(pilot)
    roster = authority.roster
    authority._certificate.write_bytes(old.certificate)
    authority._key.write_bytes(old.key)
    with pytest.raises(UserError, match="no roster at"):
        membership.leave(pilot, "3")
    with pytest.raises(UserError, match="the authority's own certificate ended on"):
        certificates.issue_client(authority.issued, "client-9")
    assert parties(pilot)[0].signed_roster == roster


# --- requests ---------------------------------------------------------------------------------------------


@pytest.fixture
def asking(tmp_path):
    """Three clients who made their own keys, each in a place of its own."""
    return [make_request(tmp_path / f"machine-{name}" / "mine", name) for name in ("alice", "bob", "carol")]


def changed(path: Path, change) -> Path:
    file = json.loads(path.read_text())
    change(file)
    target = path.with_name("changed.json")
    target.write_text(json.dumps(file))
    return target


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda file, other: file["request"].update(name="mallory"), "not signed by the keys it names"),
        (lambda file, other: file["request"].update(identity=other["request"]["identity"]), "not signed by"),
        (
            lambda file, other: file["request"].update(certificate=other["request"]["certificate"]),
            "not signed",
        ),
        (lambda file, other: file.update(tls=other["tls"]), "not signed by the keys it names"),
        (lambda file, other: file["request"].update(name="../../authority"), "request.name: String should"),
        (lambda file, other: file["request"].update(name="x\n\x1b[31m"), "request.name: String should"),
        (lambda file, other: file["request"].update(name="a" * 65), "request.name: String should"),
        (
            lambda file, other: file["request"].update(certificate="-----BEGIN"),
            "no request for a certificate",
        ),
        (lambda file, other: file["request"].update(extra=1), "extra: Extra inputs"),
        (lambda file, other: file.pop("identity"), "identity: Field required"),
        (lambda file, other: file["request"].update(name="a", version=2), "version"),
    ],
)
def test_a_forged_request_is_refused(pilot, asking, change, complaint):
    other = json.loads(asking[1].read_text())
    forged = changed(asking[0], lambda file: change(file, other))
    refused(pilot, complaint, "add-client", pilot, forged)


@pytest.mark.parametrize("content", [b"", b"null", b"\xff\xfe", b"[" * 9000, b"x" * 20000])
def test_gibberish_is_no_request(pilot, tmp_path, content):
    (tmp_path / "request.json").write_bytes(content)
    refused(pilot, "request.json", "add-client", pilot, tmp_path / "request.json")


@given(data=st.data())
def test_whatever_a_file_says_it_is_refused_as_what_it_is(handed, data):
    """Requests and bundles with bytes changed, cut out or put in: a `UserError`, and no other."""
    path, load = data.draw(st.sampled_from(handed))
    content = path.read_bytes()
    place, length = data.draw(st.integers(0, len(content))), data.draw(st.integers(0, 40))
    piece = data.draw(st.binary(max_size=12) | st.sampled_from([b"null", b"[]", b'"', b"\\u0000", b"}"]))
    bent = path.with_name("bent.json")
    bent.write_bytes(content[:place] + piece + content[place + length :])
    try:
        taken = load(bent)
    except UserError:
        return
    assert taken == load(path), "only what means the same is taken"


@pytest.fixture(scope="module")
def handed(tmp_path_factory):
    """A request and a bundle, and what reads them."""
    folder = tmp_path_factory.mktemp("handed")
    asked = make_request(folder / "mine", "alice")
    config = folder / "config.toml"
    config.write_text(small_config(1, tolerate=0))
    command("init", folder / "fed", "--join", asked, "--config", config)
    return [(asked, Request.load), (folder / "fed" / "authority" / "bundles" / "client-0.json", Bundle.load)]


def test_keys_and_names_of_others_are_refused(pilot, asking, tmp_path):
    """Every way to come in under somebody else's key or name, with proofs that are right in themselves."""
    member = parties(pilot)[2]
    theirs = requests.request_for(RequestKeys(member.identity.parent), "twin")
    (tmp_path / "twin.json").write_text(theirs)
    refused(pilot, "is, or was, client 1's", "add-client", pilot, tmp_path / "twin.json")
    assert "client 4 (alice) is on it" in command("add-client", pilot, asking[0])
    refused(pilot, "client 4 is called 'alice' already", "add-client", pilot, asking[0])
    (tmp_path / "again.json").write_text(
        requests.request_for(RequestKeys(asking[0].parent / "secrets"), "again")
    )
    refused(pilot, "is, or was, client 4's", "add-client", pilot, tmp_path / "again.json")
    for name in ("client-2", "7", "Server", "authority"):
        (tmp_path / "named.json").write_text(
            requests.request_for(RequestKeys(asking[1].parent / "secrets"), name)
        )
        refused(pilot, "would be taken for", "add-client", pilot, tmp_path / "named.json")
    refused(
        pilot, "is no request that can be granted", "add-client", pilot, pilot / "client-0" / "roster.json"
    )
    command("remove-client", pilot, "alice")
    refused(pilot, "called 'alice' already", "add-client", pilot, asking[0])


def test_a_request_leaves_nothing_behind_where_it_is_refused(tmp_path):
    for name in ("../bob", "client-1", ""):
        with pytest.raises(UserError, match="is no name for a client"):
            command("request", tmp_path / "new", "--name", name)
    assert not (tmp_path / "new").exists()
    command("request", tmp_path / "new", "--name", "bob")
    refused(tmp_path, "is not empty", "request", tmp_path / "new", "--name", "bob")
    assert (tmp_path / "new" / "secrets").stat().st_mode & 0o077 == 0


# --- without a dealer -------------------------------------------------------------------------------------


def founded(tmp_path, asking):
    config = tmp_path / "config.toml"
    config.write_text(small_config(3, *PRIVATE, rounds=2))
    said = command("init", tmp_path / "fed", "--join", *asking, "--config", config)
    return tmp_path / "fed", said


def test_nobody_ever_sees_all_secrets_and_the_federation_runs(tmp_path, asking):
    folder, said = founded(tmp_path, asking)
    assert "No client's secret was here" in said
    assert [party.name for party in parties(folder)] == ["server"]
    secrets = [path.read_bytes() for one in asking for path in (one.parent / "secrets").iterdir()]
    assert len(secrets) == 6
    for content in contents(folder).values():
        assert not any(secret.strip() in content for secret in secrets)
    clients = []
    for place, one in enumerate(asking):
        bundle = folder / "authority" / "bundles" / f"client-{place}.json"
        said = command("install", one.parent, bundle, "--budget", 1e6)
        assert f"client-{place}: certificate until" in said
        assert "takes part in nothing yet" in said
        command("allow", one.parent, "--epsilon", 1e6)
        client = Party.open(one.parent)
        client.check()
        clients.append(client)
    assert [client.client for client in clients] == [0, 1, 2]
    everyone = [Party.open(folder / "server"), *clients]
    quick = everyone[0].folder / public_facts.PUBLIC
    quick.write_text(quick.read_text().replace("join_limit = 60.0", "join_limit = 0.3"))
    assert coordinator(everyone, Direct(everyone))[0].go().rounds == 2
    said = command("roster", clients[0].folder)
    assert "client 2 (carol)" in said


def test_init_with_requests_that_are_wrong_leaves_nothing_behind(tmp_path, asking):
    config = tmp_path / "config.toml"
    config.write_text(small_config(3))
    for complaint, arguments in {
        "--join goes with": [*asking],
        "3 requests for a federation of 4": ["--join", *asking, "--clients", 4],
        "the same name": ["--join", *asking[:2], asking[0]],
        "cannot be read": ["--join", *asking[:2], tmp_path / "nowhere.json"],
    }.items():
        with pytest.raises(UserError, match=complaint):
            command("init", tmp_path / "fed", *arguments, "--config", config)
        assert not (tmp_path / "fed").exists()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda file: file["bundle"].update(config="# less noise\n"), "not signed by the authority it names"),
        (lambda file: file["bundle"].update(client=1), "not signed by"),
        (lambda file: file.update(signature="00" * 70), "not signed by"),
        (lambda file: file["bundle"].update(roster="{}"), "not signed by"),
        (lambda file: file.pop("bundle"), "bundle: Field required"),
    ],
)
def test_a_bundle_that_was_changed_on_the_way_is_refused(tmp_path, asking, change, complaint):
    folder, _ = founded(tmp_path, asking)
    forged = changed(folder / "authority" / "bundles" / "client-0.json", change)
    refused(asking[0].parent, complaint, "install", asking[0].parent, forged)


def test_a_bundle_is_for_one_client_and_its_own_keys(tmp_path, asking):
    folder, _ = founded(tmp_path, asking)
    others = folder / "authority" / "bundles" / "client-1.json"
    refused(asking[0].parent, "another identity for client-1", "install", asking[0].parent, others)
    refused(tmp_path, "no request was made in it", "install", tmp_path / "nowhere", others)
    mine = Bundle.load(folder / "authority" / "bundles" / "client-0.json")
    with pytest.raises(UserError, match="there is no"):
        installed(asking[0].parent, mine, task=tmp_path / "task.py")
    assert {path.name for path in asking[0].parent.iterdir()} == {"request.json", "secrets"}
    party, _ = installed(asking[0].parent, mine, budget=5.0)
    refused(party.folder, "and this is client-0's folder", "install", party.folder, others)


# --- keys that change, elsewhere --------------------------------------------------------------------------


def test_a_client_elsewhere_changes_its_keys_itself(tmp_path, asking):
    """It makes them, its old identity signs, the authority answers; the authority sees public halves only."""
    folder, _ = founded(tmp_path, asking)
    bundles = folder / "authority" / "bundles"
    clients = [
        installed(one.parent, Bundle.load(bundles / f"client-{i}.json"), budget=1e6)[0]
        for i, one in enumerate(asking)
    ]
    first = bundles / "client-1.json"
    old_bundle = shutil.copy(first, tmp_path / "old.json")
    before = Identity.load(clients[1].identity).public.hex()
    assert "send this file to the authority" in command("rotate", clients[1].folder)
    asked = clients[1].folder / "request.json"
    assert Identity.load(clients[1].identity).public.hex() == before, "the present keys serve until then"

    stolen = changed(asked, lambda file: file["request"].update(former=None))
    refused(folder, "not signed by the keys it names", "rotate", folder, "bob", "--request", stolen)
    refused(
        folder, "the request is by 'bob', and client 2 is 'carol'", "rotate", folder, 2, "--request", asked
    )
    fresh = make_request(tmp_path / "mallory", "bob")
    refused(folder, "present identity has not signed", "rotate", folder, 1, "--request", fresh)

    said = command("rotate", folder, "bob", "--request", asked)
    assert "roster 2: client 1 has new keys" in said
    command("install", clients[1].folder, first)
    after = Identity.load(clients[1].identity).public.hex()
    assert after != before
    assert clients[1].signed_roster.clients[1].identity == after
    assert clients[1].keys.index(bytes.fromhex(after)) == 1
    with pytest.raises(RosterError, match="roster 1 is older than roster 2"):
        command("install", clients[1].folder, old_bundle)
    server = Party.open(folder / "server")
    assert server.signed_roster.serial == 2
    adopt(clients[0], server.roster.read_text())
    assert strangers(clients[0]) == [], "the old identity signed the new one"


def test_who_lost_its_identity_is_vouched_for_again(tmp_path, asking):
    folder, _ = founded(tmp_path, asking)
    bundles = folder / "authority" / "bundles"
    alice, _ = installed(asking[0].parent, Bundle.load(bundles / "client-0.json"), budget=1e6)
    fresh = make_request(tmp_path / "new machine", "bob")
    command("rotate", folder, "bob", "--request", fresh, "--lost")
    adopt(alice, (folder / "server" / "roster.json").read_text())
    assert strangers(alice) == [1]
    assert "client 1 (bob, not vouched for)" in command("roster", alice.folder)
    command("vouch", alice.folder, "bob")
    assert strangers(alice) == []


# --- certificates and budgets -----------------------------------------------------------------------------


def test_certificates_are_renewed_in_time(pilot):
    year = dt.timedelta(days=365)
    party = parties(pilot)[2]
    now = dt.datetime.now(dt.UTC)
    assert list(checks.certificates(party)) == []
    (soon,) = checks.certificates(party, now + year - dt.timedelta(days=12))
    assert soon.what.startswith("client.crt expires in 1")
    (late,) = checks.certificates(party, now + year + dt.timedelta(days=12))
    assert late.what.startswith("client.crt has expired")
    assert "make a new federation" in list(checks.certificates(party, now + 11 * year))[-1].cure

    soon_over = certificates.renewed(
        Authority.open(pilot).issued, party.certificate.read_bytes(), until=now + dt.timedelta(days=3)
    )
    party.certificate.write_bytes(soon_over)
    key, roster = party.certificate_key.read_bytes(), party.roster.read_bytes()
    said = command("renew", pilot)
    assert "client-1: certificate until" in said
    assert list(checks.certificates(party)) == []
    assert certificates.belongs(party.certificate.read_bytes(), party.certificate_key.read_bytes())
    assert (party.certificate_key.read_bytes(), party.roster.read_bytes()) == (key, roster)
    command("renew", pilot, "--fresh")
    assert party.certificate_key.read_bytes() != key
    for one in parties(pilot):
        assert certificates.belongs(one.certificate.read_bytes(), one.certificate_key.read_bytes())
        assert list(checks.keys(one)) == [], "the roster has the keys that are there"
        one.check()


def test_a_client_elsewhere_gets_its_new_certificate_in_a_bundle(tmp_path, asking):
    folder, _ = founded(tmp_path, asking)
    bundle = folder / "authority" / "bundles" / "client-0.json"
    client, _ = installed(asking[0].parent, Bundle.load(bundle), budget=5.0)
    before = client.certificate.read_bytes()
    assert f"send {bundle}" in command("renew", folder).replace("\n", "")
    command("install", client.folder, bundle)
    assert client.certificate.read_bytes() != before
    assert certificates.belongs(client.certificate.read_bytes(), client.certificate_key.read_bytes())


def test_a_client_without_a_budget_is_told_why_there_is_none(tmp_path):
    folder = make(tmp_path / "federation", 2, small_config(2, tolerate=0))[1].folder
    for change in ([], ["--epsilon", 5]):
        with pytest.raises(UserError, match=r"client-0 has no budget\.toml: where a configuration adds no"):
            command("budget", folder, *change)


@pytest.mark.slow
def test_an_owner_changes_its_own_budget(pilot):
    coordinator(parties(pilot), Direct(parties(pilot)))[0].go()
    client = parties(pilot)[1]
    _, spent = read_statement(client.ledger).spent
    refused(pilot, "is spent .* and cannot be taken back", "budget", pilot, 0, "--epsilon", spent / 2)
    refused(pilot, "positive and finite", "budget", client.folder, "--epsilon", -1)
    refused(pilot, "does not say which client", "budget", pilot, "--epsilon", 5)
    said = command("budget", client.folder, "--epsilon", 1.001 * spent)
    assert "before: 1e+06" in said
    assert read_budget(client).epsilon == 1.001 * spent
    assert read_statement(client.ledger).budget == read_budget(client)
    assert client.budget.read_text().startswith("# This client's own limit")
    coordinator(parties(pilot), Direct(parties(pilot)), "more")[0].go()
    assert len(read_entries(client.ledger)) == 4, "it said no, and the others went on"
    command("budget", pilot, "client-0", "--epsilon", 1e6)
    coordinator(parties(pilot), Direct(parties(pilot)), "later")[0].go()
    assert [entry.run for entry in read_entries(client.ledger)] == ["run/0"] * 4 + ["later/0"] * 4


def test_a_ledger_goes_on_in_a_new_federation(tmp_path):
    """An authority's key is lost: what was released stays released, and counts against the same budget."""
    config = small_config(3, *PRIVATE, rounds=2)
    old, new = (make(tmp_path / name, 3, config, budget=1e6) for name in ("old", "new"))
    coordinator(old, Direct(old))[0].go()
    for before, after in zip(old[1:], new[1:], strict=True):
        for one in ("ledger", "ledger_head"):
            target = getattr(after, one)
            target.parent.mkdir(exist_ok=True)
            shutil.copy2(getattr(before, one), target)
    spent = read_statement(old[1].ledger).spent[1]
    coordinator(new, Direct(new))[0].go()
    assert read_statement(new[1].ledger).spent[1] > spent
    assert len(read_entries(new[1].ledger)) == 2 * len(read_entries(old[1].ledger))
    alone = make(tmp_path / "alone", 3, config, budget=1e6)
    coordinator(alone, Direct(alone))[0].go()
    assert read_statement(alone[1].ledger).spent[1] == pytest.approx(spent)
    new[1].ledger.unlink()
    with pytest.raises(Refused, match="rollback"):  # it is as guarded as before
        check_remembered(new[1])
