"""A party's folder holds its own secrets and nobody else's; certificates prove what they should."""

from __future__ import annotations

import datetime as dt
import os
import re
import socket
import ssl
import stat
import threading

import pytest
from typer.testing import CliRunner

from federation_harness import PRIVATE, make, small_config
from trilemma.base.errors import UserError
from trilemma.cli.federation import federation_app
from trilemma.federation.identity import certificates, tls_keys
from trilemma.federation.identity.authority import Authority
from trilemma.federation.operations import checks
from trilemma.federation.party import provisioning, public_facts
from trilemma.federation.party.layout import Party, parties, party_folders, without_facts
from trilemma.federation.party.public_facts import Federation, Timing
from trilemma.federation.protocol import events


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layout") / "federation"
    provisioning.init(
        folder, Federation("pilot", 4, examples=12, timing=Timing(round_limit=7.5)), "# config\n"
    )
    return folder


def files(folder):
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


def test_every_party_has_its_folder(made):
    assert [party.name for party in parties(made)] == ["server", *(f"client-{i}" for i in range(4))]
    assert [party.name for party in parties(made / "client-2")] == ["client-2"]
    assert {path.name for path in made.iterdir()} == {"authority", *(party.name for party in parties(made))}


def test_a_host_may_be_longer_than_a_common_name(tmp_path):
    host = f"{'load-balancer-' * 5}1.eu-central.example.org"
    server = provisioning.init(tmp_path / "federation", Federation("pilot", 1, host=host), "# config\n")[0]
    assert len(host) > 64
    assert list(checks.certificates(server)) == []


@pytest.mark.parametrize("host", [f"{'a' * 60}.{'b' * 60}.org", "a" * 253, "2001:db8::1"])
def test_a_server_can_say_where_it_listens_whatever_the_host_is_called(host):
    """An event that cannot be written would end it as soon as it has begun."""
    address = Federation("pilot", 1, host=host, port=65000).address
    assert address in events.LISTENS(address=address, clients=1).text


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::", "0.0.0.0", "localhost", "fl_server", "a.b-c.org"])
def test_hosts_are_addresses_and_names(host):
    assert Federation("pilot", 1, host=host, listen=host).host == host


def test_an_address_of_ipv6_and_its_port_can_be_told_apart(tmp_path):
    facts = Federation("pilot", 1, host="::1", port=9092)
    assert facts.address == "[::1]:9092"
    assert list(checks.certificates(provisioning.init(tmp_path / "federation", facts, "# config\n")[0])) == []


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("[::1]", "no brackets here"),
        ("[::1]:9092", "no brackets here, as in ::1, and the port is said by itself"),
        ("127.0.0.1:9092", "the port is said by itself"),
        ("fl.example.org:9092", "the port is said by itself"),
        ("::1:9092", "no address that clients elsewhere can connect to; an IPv6 address has no brackets"),
        ("fe80::1:9092", "no address that clients elsewhere can connect to"),
        ("fe80::1%eth0", "no address that clients elsewhere can connect to"),
        ("0:0:0:0:0:0:0:1", "write it as everybody else does, '::1'"),
        ("2001:DB8::1", "write it as everybody else does, '2001:db8::1'"),
    ],
)
@pytest.mark.parametrize("fact", ["host", "listen"])
def test_a_host_is_no_host_with_a_port_nor_one_in_brackets(fact, host, why):
    with pytest.raises(UserError, match=f"{fact} = .*{re.escape(why)}"):
        Federation("pilot", 1, **{fact: host})


def test_no_secret_is_in_two_folders(made):
    """Not as a file, and not inside another file."""
    secrets = {path: path.read_bytes() for path in made.rglob("secrets/*")}
    secrets[made / "authority" / "ca.key"] = (made / "authority" / "ca.key").read_bytes()
    assert len(secrets) == 1 + 4 * 2 + 1
    assert len(set(secrets.values())) == len(secrets)
    everything = {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}
    for owner, secret in secrets.items():
        core = b"".join(line for line in secret.splitlines() if b"-----" not in line)
        for path, content in everything.items():
            assert path == owner or core not in content.replace(b"\n", b"")


def test_tls_keys_are_on_the_roster(made):
    """Numbers are places on the roster, which is signed: no file can be left out, and renumber anybody."""
    found = {tls_keys.digest_in(one.certificate_key.read_bytes()): one.client for one in parties(made)[1:]}
    assert parties(made)[0].signed_roster.tls == found
    assert sorted(found.values()) == [0, 1, 2, 3]


def test_secrets_are_for_their_owner_only(made):
    for path in [*made.rglob("secrets/*"), made / "authority" / "ca.key"]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_nobody_else_can_look_into_a_partys_folder(made):
    for folder in made.iterdir():
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder


def test_secrets_that_others_can_read_are_refused(tmp_path):
    client = provisioning.init(tmp_path / "federation", Federation("pilot", 1), "# config\n")[1]
    client.check()
    client.identity.chmod(0o640)
    with pytest.raises(UserError, match=r"identity.key can be read by others \(mode 640\)"):
        client.check()


@pytest.mark.parametrize("name", ["secrets/identity.key", "secrets/client.key", "roster.json", "tls/ca.crt"])
def test_a_folder_that_is_not_complete_is_named(tmp_path, name):
    client = provisioning.init(tmp_path / "federation", Federation("pilot", 1), "# config\n")[1]
    (client.folder / name).unlink()
    with pytest.raises(UserError, match=f"{name} is missing"):
        client.check()


def test_names_may_contain_anything(tmp_path):
    facts = Federation('a "b" \\ ü', 1, host="h")
    assert Federation.parse(facts.toml()) == facts


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("port = 65536", "allowed is 1 to 65535"),
        ("port = 0", "allowed is 1 to 65535"),
        ("clients = 0", "at least one client"),
        ("host = 5", "expected string"),
        ('listen = ""', "listen = ''"),
        ("colour = 3", "unknown colour; allowed: name, clients"),
        ("[timing]\ncolour = 3", "unknown colour; allowed: round_limit"),
        ("timing = 3", "not iterable"),
        ("[timing]\nround_limit = 0.0", "round_limit = 0.0: allowed are seconds"),
        ("[timing]\nrepeats = -1", "repeats = -1"),
        ("= 3", "Invalid"),
    ],
)
def test_facts_that_make_no_sense_are_named(line, complaint):
    text = 'name = "x"\n' + ("" if "clients" in line else "clients = 3\n") + line
    with pytest.raises(UserError, match=f"federation.toml cannot be read.*{complaint}"):
        Federation.parse(text)


def test_facts_that_were_cut_off_say_what_is_missing():
    with pytest.raises(UserError, match=r"cannot be read: name, clients missing; the same file is in every"):
        Federation.parse("")


def test_clients_differ_in_their_secrets_only(made):
    clients = parties(made)[1:]
    assert len({frozenset(files(party.folder)) for party in clients}) == 1
    for public in ("federation.toml", "config.toml", "roster.json", "tls/ca.crt"):
        assert len({(party.folder / public).read_bytes() for party in parties(made)}) == 1
    assert len({party.agreed.terms for party in parties(made)}) == 1


def test_a_folder_that_is_not_ours_to_read_hides_no_party(made, monkeypatch):
    """The lost+found of a disk, or the party of another user."""
    closed, stat_of = made / "lost+found", os.stat

    def refusing(path, *more, **kinds):
        if closed in getattr(path, "parents", ()):
            raise PermissionError(13, "Permission denied", str(path))
        return stat_of(path, *more, **kinds)

    before = [party.name for party in parties(made)]
    closed.mkdir()
    monkeypatch.setattr("os.stat", refusing)
    assert [party.name for party in parties(made)] == before
    monkeypatch.undo()
    closed.rmdir()


def test_a_folder_that_is_only_called_like_a_partys_is_no_federation(tmp_path):
    """A program has a folder `server` too: nothing is said about what it lacks, or left in it."""
    (tmp_path / "server" / "run").mkdir(parents=True)
    for asked in (parties, party_folders):
        with pytest.raises(UserError, match="there is no federation in"):
            asked(tmp_path)


@pytest.mark.parametrize("name", ["config.toml", "roster.json", "tls/ca.crt", "budget.toml"])
def test_a_file_without_an_end_is_named_and_not_waited_for(tmp_path, name):
    folder = tmp_path / "federation"
    make(folder, 2, small_config(2, *PRIVATE, tolerate=0), budget=1e6)
    path = folder / "client-1" / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    for asked in (["status", folder], ["doctor", folder], ["allow", folder / "client-1", "run"]):
        told = CliRunner().invoke(federation_app, [str(one) for one in asked])
        assert told.exception is None or isinstance(told.exception, UserError | SystemExit)
    said = f"{CliRunner().invoke(federation_app, ['doctor', str(folder)]).output} {told.exception}"
    assert "is no file: delete it" in " ".join(said.split())


def test_terms_notice_every_change(made, tmp_path):
    party = Party.open(made / "client-0")
    seen = {party.agreed.terms}
    authority = Authority.open(made)
    other = authority.sign(party.signed_roster.federation, party.signed_roster.clients)
    for path, changed in (
        (party.config, party.config.read_bytes() + b" "),
        (party.roster, other.text.encode()),
    ):
        before = path.read_bytes()
        path.write_bytes(changed)
        seen.add(party.agreed.terms)
        path.write_bytes(before)
    facts = party.folder / public_facts.PUBLIC
    before = facts.read_text()
    facts.write_text(before.replace("examples = 12", "examples = 13"))
    seen.add(party.agreed.terms)
    facts.write_text(before)
    assert len(seen) == 4
    assert party.agreed.terms in seen


def test_facts_survive_the_file(made):
    facts = Party.open(made / "client-3").federation
    assert (facts.clients, facts.examples, facts.timing.round_limit) == (4, 12, 7.5)


def test_keys_are_never_overwritten(made):
    with pytest.raises(UserError, match="not empty"):
        provisioning.init(made, Federation("pilot", 4), "")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("nowhere", "no federation"), ("client-x", "is no party"), ("alice", "is no party")],
)
def test_wrong_folders_are_named(tmp_path, name, complaint):
    folder = tmp_path / name
    folder.mkdir()
    if name != "nowhere":
        (folder / public_facts.PUBLIC).write_text(Federation("pilot", 1).toml())
    with pytest.raises(UserError, match=complaint):
        parties(folder)


def test_a_federation_has_clients(tmp_path):
    with pytest.raises(UserError, match="at least one client"):
        provisioning.init(tmp_path / "empty", Federation("pilot", 0), "")


def handshake(authority: bytes, issued: certificates.Issued, folder, host: str) -> None:
    """Connect once over TLS on loopback, as a client that trusts `authority` alone."""
    (folder / "crt").write_bytes(issued.certificate)
    (folder / "key").write_bytes(issued.key)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "crt", folder / "key")
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        connection, _ = listener.accept()
        try:
            server.wrap_socket(connection, server_side=True).close()
        except (ssl.SSLError, OSError):
            connection.close()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.load_verify_locations(cadata=authority.decode())
        with socket.create_connection(listener.getsockname(), timeout=60) as raw:
            client.wrap_socket(raw, server_hostname=host).close()
    finally:
        thread.join(timeout=60)
        listener.close()


def test_tls_accepts_the_federations_server(tmp_path):
    authority = certificates.new_authority("pilot")
    issued = certificates.issue_server(authority, ("127.0.0.1", "localhost"))
    handshake(authority.certificate, issued, tmp_path, "127.0.0.1")
    handshake(authority.certificate, issued, tmp_path, "localhost")


@pytest.mark.parametrize("fault", ["expired", "other authority", "other host"])
def test_tls_refuses_everything_else(tmp_path, fault):
    authority = certificates.new_authority("pilot")
    signer = certificates.new_authority("pilot") if fault == "other authority" else authority
    until = dt.datetime.now(dt.UTC) - dt.timedelta(days=1) if fault == "expired" else None
    host = "127.0.0.2" if fault == "other host" else "127.0.0.1"
    issued = certificates.issue_server(signer, ("127.0.0.1",), until)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(authority.certificate, issued, tmp_path, host)


def test_a_link_is_the_party_it_is_called_and_one_that_leads_nowhere_is_named(tmp_path):
    """Its disk may not be there. It was passed over without a word."""
    made = tmp_path / "federation"
    provisioning.init(made, Federation("pilot", 4), "# config\n")
    for name in ("server", "client-2"):
        elsewhere = tmp_path / f"disk of {name}"
        (made / name).rename(elsewhere)
        (made / name).symlink_to(elsewhere)
    assert [party.name for party in parties(made)] == ["server", *(f"client-{i}" for i in range(4))]
    (tmp_path / "disk of client-2").rename(tmp_path / "away")
    assert [party.client for party in parties(made)] == [None, 0, 1, 3]
    assert set(without_facts(made)) == {"client-2"}


def test_a_folder_with_two_names_is_one_party(tmp_path):
    """Whoever started or stopped it took its lock twice, and died of that."""
    made = tmp_path / "federation"
    provisioning.init(made, Federation("pilot", 4), "# config\n")
    (made / "client-9").symlink_to(made / "client-2")
    (made / "a").symlink_to(made / "client-0")
    assert [party.name for party in parties(made)] == ["server", *(f"client-{i}" for i in range(4))]
    assert [party.name for party in parties(made / "client-9")] == ["client-9"]
