"""What the authority sends is installed whole: through crashes, and never backwards."""

from __future__ import annotations

import datetime as dt
import errno
import io
import itertools
import json
import os
import shutil
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import pytest
from cryptography.hazmat.primitives.asymmetric import utils
from typer.testing import CliRunner

from federation_harness import Direct, command, coordinator, make, small_config
from trilemma.base.errors import ConfigError, UserError
from trilemma.cli.federation import federation_app
from trilemma.federation.client.node import Node
from trilemma.federation.identity import certificates
from trilemma.federation.identity.authority import Authority
from trilemma.federation.identity.rosters import SignedRoster
from trilemma.federation.operations import checks, doctor, membership
from trilemma.federation.operations.bootstrap import installed, is_new
from trilemma.federation.party import bundles
from trilemma.federation.party.bundles import Bundle
from trilemma.federation.party.facts import Facts
from trilemma.federation.party.layout import Party, parties
from trilemma.federation.party.requests import Request, make_request
from trilemma.federation.protocol import kinds, wire
from trilemma.federation.protocol.reasons import Refused
from trilemma.privacy.secrets import Identity

YEAR = dt.timedelta(days=365)
P256 = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""How many points the curve of the authority's key has."""


# --- crashes ----------------------------------------------------------------------------------------------


class Dies(BaseException):
    """The process is no more."""


@contextmanager
def dying_at(nth: int, within: Path) -> Iterator[Callable[[], bool]]:
    """Die just before the `nth` change of a file in `within`; a file written in place is then cut short.

    What has no other name than that of a file to be is nobody's business until it gets its own.
    """
    left = [nth]

    def change(path: object, to: object = "") -> bool:
        seen = not str(path).endswith((".tmp", "lock")) or to
        if str(path).startswith(str(within)) and seen:
            left[0] -= 1
        return left[0] < 0

    def before(real):
        def act(path, *rest, **more):
            if change(path, *rest[: real in renaming]):
                raise Dies
            return real(path, *rest, **more)

        return act

    def writing(path, mode="r", *rest, **more):
        if mode[0] in "wa" and change(path):
            real_file(path, mode).close()
            raise Dies
        return real_file(path, mode, *rest, **more)

    real_file, renaming = io.open, (os.replace, os.rename)
    acts = {name: before(getattr(os, name)) for name in ("replace", "rename", "unlink", "rmdir", "mkdir")}
    with patch.multiple(os, **acts), patch.object(io, "open", writing):
        yield lambda: left[0] < 0


def whole(folder: Path) -> None:
    """Everybody's keys, certificate and roster fit together, here and at the authority."""
    newest = Authority.open(folder).roster
    for party in parties(folder):
        assert party.signed_roster == newest or party.client is not None
        assert list(checks.keys(party)) == list(checks.certificates(party)) == []
        assert not party.installing.exists()


@pytest.fixture(scope="module")
def pilot(tmp_path_factory):
    return make(tmp_path_factory.mktemp("pilot") / "fed", 2, small_config(2, tolerate=0, rounds=2))[
        0
    ].folder.parent


@pytest.mark.slow
def test_a_rotation_that_dies_anywhere_is_finished_by_the_same_command(pilot, tmp_path):
    """Before every change of a file, the authority's, the server's or the client's."""
    for nth in itertools.count():
        here = tmp_path / f"{nth}"
        shutil.copytree(pilot, here)
        before = Identity.load(here / "client-1" / "secrets" / "identity.key")
        try:
            with dying_at(nth, here) as died:
                membership.rotate(here, "1", None)
        except Dies:
            membership.rotate(here, "1", None)
        whole(here)
        assert Identity.load(here / "client-1" / "secrets" / "identity.key") != before
        assert not (here / "client-1" / "secrets" / "next").exists()
        if not died():
            break
        shutil.rmtree(here)
    assert nth > 20
    assert coordinator(parties(here), Direct(parties(here)))[0].go().rounds == 2


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """An authority and its server in one place, three clients in others, who made their own keys."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "config.toml").write_text(small_config(3, rounds=2))
    asked = [make_request(folder / name, name) for name in ("alice", "bob", "carol")]
    command("init", folder / "fed", "--join", *asked, "--config", folder / "config.toml")
    return folder


def bundle_of(folder: Path, client: int) -> Bundle:
    return Bundle.load(folder / "fed" / "authority" / "bundles" / f"client-{client}.json")


def test_a_first_installation_that_dies_anywhere_is_begun_again(elsewhere, tmp_path):
    for nth in itertools.count():
        here = tmp_path / f"{nth}" / "alice"
        shutil.copytree(elsewhere / "alice", here)
        try:
            with dying_at(nth, here) as died:
                installed(here, bundle_of(elsewhere, 0))
        except Dies:
            if not is_new(here):  # the very last step
                break
            if (here / "federation.toml").is_file() and (here / "roster.json").is_file():
                with pytest.raises(UserError, match="install the bundle once more"):
                    Party.open(here).check()
            installed(here, bundle_of(elsewhere, 0))
        party = Party.open(here)
        party.check()
        assert list(checks.keys(party)) == list(checks.certificates(party)) == []
        if not died():
            break
    assert nth > 10


def asked(party: Party) -> None:
    """A server says hello to a node: of terms that are not the client's, which is refused."""
    with pytest.raises(Refused):
        Node(party).answer(wire.dumps(kinds.Hello(run="run", epoch=0, terms="others")))


def test_new_keys_that_were_installed_in_part_are_whole_at_the_next_start(elsewhere, tmp_path):
    """Whoever comes next finishes: a node that is asked, `up`, or `install` once more."""
    shutil.copytree(elsewhere, tmp_path / "all")
    folder = tmp_path / "all"
    client, _ = installed(folder / "bob", bundle_of(folder, 1))
    command("rotate", client.folder)
    first = (client.folder / "secrets" / "next" / "identity.key").read_bytes()
    command("rotate", client.folder)
    assert (client.folder / "secrets" / "next" / "identity.key").read_bytes() == first, "granted or not"
    command("rotate", folder / "fed", "bob", "--request", client.folder / "request.json")
    granted = bundle_of(folder, 1)
    finishers = [
        asked,
        doctor.check_start,
        lambda party: command("rotate", party.folder),
        lambda party: bundles.install(party.folder, granted),
    ]
    for nth in itertools.count():
        here = tmp_path / f"{nth}" / "bob"
        shutil.copytree(client.folder, here)
        with suppress(Dies), dying_at(nth, here) as died:
            bundles.install(here, granted)
        if (here / "installing.json").is_file():
            finishers[nth % len(finishers)](Party.open(here))
            assert not (here / "installing.json").exists()
            party = Party.open(here)
            assert Identity.load(party.identity).public.hex() == granted.identity
            assert list(checks.keys(party)) == list(checks.certificates(party)) == []
        if not died():
            break
    assert nth > 10


def test_a_request_that_was_granted_is_granted_alike_when_it_comes_again(elsewhere, tmp_path):
    shutil.copytree(elsewhere, tmp_path / "all")
    folder, fed = tmp_path / "all", tmp_path / "all" / "fed"
    client, _ = installed(folder / "bob", bundle_of(folder, 1))
    command("rotate", client.folder)
    asked = client.folder / "request.json"
    for _ in range(2):
        assert "roster 2: client 1 has new keys" in command("rotate", fed, "bob", "--request", asked)
    mallory = make_request(tmp_path / "mallory", "bob")
    with pytest.raises(UserError, match="present identity has not signed"):
        command("rotate", fed, "bob", "--request", mallory)
    command("install", client.folder, fed / "authority" / "bundles" / "client-1.json")
    assert Request.load(asked).identity == Identity.load(client.identity).public.hex()


# --- nothing goes backwards, and bytes do not matter ------------------------------------------------------


def test_a_bundle_that_a_disk_broke_while_it_was_installed_names_the_cure(pilot, tmp_path):
    shutil.copytree(pilot, tmp_path / "pilot")
    client = parties(tmp_path / "pilot")[1]
    path = bundles.write_bundle(Authority.open(tmp_path / "pilot"), 0, tmp_path)
    client.installing.write_text(path.read_text()[:500])
    with pytest.raises(UserError, match=r"installing.json is no bundle: .*; delete installing.json, and"):
        bundles.install(client.folder, Bundle.load(path))
    client.installing.unlink()
    assert bundles.install(client.folder, Bundle.load(path)) == client


@pytest.mark.parametrize("part", ["authority", "certificate"])
def test_a_bundle_with_one_character_changed_is_no_bundle(pilot, tmp_path, part):
    """Wherever it is: some make a certificate with a key that lies on no curve."""
    shutil.copytree(pilot, tmp_path / "pilot")
    path = bundles.write_bundle(Authority.open(tmp_path / "pilot"), 0, tmp_path)
    file = json.loads(path.read_text())
    whole = file["bundle"][part]
    for place in range(30, len(whole) - 30, 3):
        changed = "A" if whole[place] != "A" else "B"
        file["bundle"][part] = whole[:place] + changed + whole[place + 1 :]
        with pytest.raises(UserError):
            Bundle.read(json.dumps(file))


def otherwise_signed(text: str) -> str:
    """Return a signed file with another signature that holds as well: s becomes n − s."""
    file = json.loads(text)
    r, s = utils.decode_dss_signature(bytes.fromhex(file["signature"]))
    file["signature"] = utils.encode_dss_signature(r, P256 - s).hex()
    return json.dumps(file)


def test_terms_are_what_the_roster_says_and_not_its_bytes(pilot, tmp_path):
    """Whoever carries a roster cannot part those who hold it: another signature, another way to write it."""
    shutil.copytree(pilot, tmp_path / "fed")
    everyone = parties(tmp_path / "fed")
    server, client = everyone[:2]
    roster, terms, facts = client.signed_roster, client.agreed.terms, Facts.of(client)
    text = otherwise_signed(client.roster.read_text())
    assert text != client.roster.read_text()
    client.roster.write_text(text)
    assert SignedRoster.read(text, client.authority.read_bytes()) == roster
    assert client.agreed.terms == terms == server.agreed.terms
    assert Facts.of(client) == facts
    runner, said = coordinator(everyone, Direct(everyone))
    server.roster.write_text(otherwise_signed(server.roster.read_text()))
    assert runner.go().rounds == 2
    assert not [line for line in said if line.startswith("roster")], "nothing new is in force"


def test_an_older_bundle_does_not_bring_an_older_certificate_back(elsewhere, tmp_path):
    shutil.copytree(elsewhere, tmp_path / "all")
    folder, fed = tmp_path / "all", tmp_path / "all" / "fed"
    file = fed / "authority" / "bundles" / "client-0.json"
    old = shutil.copy(file, tmp_path / "old.json")
    client, _ = installed(folder / "alice", bundle_of(folder, 0))
    command("renew", fed)
    assert bundle_of(folder, 0).roster.serial == Bundle.load(Path(old)).roster.serial
    command("install", client.folder, file)
    newest = client.certificate.read_bytes()
    with pytest.raises(UserError, match="number 1: number 4 was installed here since"):
        command("install", client.folder, old)
    assert client.certificate.read_bytes() == newest
    again = tmp_path / "again.json"
    again.write_text(otherwise_signed(file.read_text()))
    command("install", client.folder, again)  # the same once more, whatever its bytes
    authority = Authority.open(fed)
    with patch.object(Authority, "next_number", lambda _self: 4):
        authority.keep("client-0", certificates.renewed(authority.issued, newest))
        bundles.write_bundle(authority, 0, file.parent)
    with pytest.raises(UserError, match="two bundles with the number 4"):
        command("install", client.folder, file)


# --- the authority's own certificate ----------------------------------------------------------------------


def shakes_hands(server: Party, client: Party) -> bool:
    """Tell whether server and client take each other's certificates: TLS, without a network."""
    sides = []
    for party, purpose in ((server, ssl.PROTOCOL_TLS_SERVER), (client, ssl.PROTOCOL_TLS_CLIENT)):
        context = ssl.SSLContext(purpose)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(party.authority)
        context.load_cert_chain(party.certificate, party.certificate_key)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        host = None if party is server else "localhost"
        wrapped = context.wrap_bio(incoming, outgoing, server_side=party is server, server_hostname=host)
        sides.append((wrapped, incoming, outgoing))
    done = 0
    for _ in range(6):
        for (side, _, outgoing), (_, incoming, _) in (sides, sides[::-1]):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
                done += 1
            incoming.write(outgoing.read())
    return done >= 2


def test_the_authoritys_certificate_is_renewed_and_both_hold_meanwhile(elsewhere, tmp_path, monkeypatch):
    shutil.copytree(elsewhere, tmp_path / "all")
    folder, fed = tmp_path / "all", tmp_path / "all" / "fed"
    clients = [installed(folder / name, bundle_of(folder, i))[0] for i, name in enumerate(["alice", "bob"])]
    old = clients[0].authority.read_bytes()
    now = dt.datetime.now(dt.UTC)
    assert list(checks.certificates(clients[0])) == []
    late = now + 10 * YEAR - dt.timedelta(days=300)
    assert "renew --authority" in list(checks.certificates(clients[0], late))[-1].cure

    monkeypatch.setattr(certificates, "_now", lambda: now + 9 * YEAR)
    said = command("renew", fed, "--authority")
    assert f"authority: certificate until {now + 19 * YEAR:%Y-%m-%d}" in said
    command("install", clients[0].folder, fed / "authority" / "bundles" / "client-0.json")
    server = Party.open(fed / "server")
    new = clients[0].authority.read_bytes()
    assert new == server.authority.read_bytes() != old
    assert list(checks.certificates(clients[0], late)) == [
        one for one in checks.certificates(clients[0], late) if "client.crt" in one.what
    ]
    later = Authority.open(fed)
    signed = later.enact(later.sign(later.roster.federation, later.roster.clients))
    assert SignedRoster.read(signed.text, clients[1].authority.read_bytes()) == signed, "Bob has the old one"

    foreign = certificates.new_authority("federation")
    assert not certificates.same_authority(certificates.renewed_authority(foreign), old)


def test_a_party_with_the_old_certificate_and_one_with_the_new_meet_in_tls(pilot, tmp_path):
    shutil.copytree(pilot, tmp_path / "fed")
    server, *clients = parties(tmp_path / "fed")
    old = server.authority.read_bytes()
    command("renew", tmp_path / "fed", "--authority")
    assert server.authority.read_bytes() == clients[0].authority.read_bytes() != old
    clients[0].authority.write_bytes(old)
    shutil.copy(pilot / "client-0" / "tls" / "client.crt", clients[0].certificate)
    assert all(shakes_hands(server, client) for client in clients)
    server.authority.write_bytes(certificates.new_authority("test").certificate)
    with pytest.raises(ssl.SSLError):
        shakes_hands(server, clients[1])


# --- plugins ----------------------------------------------------------------------------------------------

RULE = '''
"""A rule of one's own."""
import numpy as np
from trilemma.aggregation import Geometric, Weighing, rules

@rules.register("everybodys")
class Mine(Geometric):
    """The mean, again."""

    def weigh(self, geometry, f):
        return Weighing(np.full(geometry.n, 1 / geometry.n))

    def kappa(self, n):
        return None
'''


@pytest.mark.parametrize("ends", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize(
    "where",
    ["identity.authority.Authority.enact", "operations.supervision.write", "party.bundles.write_bundle"],
)
def test_an_init_that_ends_in_its_middle_leaves_nothing_behind(tmp_path, where, ends):
    """Half a federation's keys would be in the way of the same command, and in everybody's sight."""
    joins = where.startswith("party")
    asked = ["--join", make_request(tmp_path / "alice", "alice")] if joins else ["--clients", 1]
    with patch(f"trilemma.federation.{where}", side_effect=ends):
        outcome = CliRunner().invoke(federation_app, ["init", str(tmp_path / "fed"), *map(str, asked)])
    assert outcome.exit_code != 0
    assert not (tmp_path / "fed").exists()
    command("init", tmp_path / "fed", *asked)


def test_a_folder_that_holds_something_stays_as_it_is(tmp_path):
    here, request = tmp_path / "here", make_request(tmp_path / "alice", "alice")
    here.mkdir()
    (here / "mine").write_text("my own")
    for asked in (["--clients", 1], ["--join", request]):
        with pytest.raises(UserError, match="is not empty"):
            command("init", here, *asked)
    assert [path.name for path in here.iterdir()] == ["mine"]


@pytest.mark.parametrize("linked", [False, True])
def test_an_empty_folder_of_the_users_is_there_after_a_failed_init(tmp_path, linked):
    real, named = tmp_path / "real", tmp_path / "named"
    real.mkdir()
    named.symlink_to(real) if linked else real.rename(named)
    with patch("trilemma.federation.operations.supervision.write", side_effect=OSError(errno.ENOSPC, "full")):
        assert CliRunner().invoke(federation_app, ["init", str(named), "--clients", "1"]).exit_code != 0
    assert named.is_dir()
    assert not any(named.iterdir())
    command("init", named, "--clients", 1)


@pytest.mark.usefixtures("plugins_forgotten")
def test_a_client_that_joins_brings_the_plugins_that_were_agreed_on(tmp_path):
    """Bundles carry no code: its owner gets it, looks at it, and the configuration has its digest."""
    (tmp_path / "my_rules.py").write_text(RULE)
    (tmp_path / "config.toml").write_text(
        'plugins = ["my_rules.py"]\n[aggregation]\nrule = "everybodys"\n[federation]\nclients = 1\n'
        "[run]\nrounds = 2\n"
    )
    asked = make_request(tmp_path / "alice", "alice")
    command("init", tmp_path / "fed", "--join", asked, "--config", tmp_path / "config.toml")
    assert (tmp_path / "fed" / "server" / "my_rules.py").is_file()
    bundle = tmp_path / "fed" / "authority" / "bundles" / "client-0.json"
    changed = tmp_path / "changed" / "my_rules.py"
    changed.parent.mkdir()
    changed.write_text(RULE + "\n# and more\n")
    for complaint, given in {
        "give it with --plugin": [],
        "no plugin 'config.toml'; allowed: my_rules.py": ["--plugin", tmp_path / "config.toml"],
        "has changed since it was recorded": ["--plugin", changed],
        "there is no": ["--plugin", tmp_path / "nowhere" / "my_rules.py"],
    }.items():
        with pytest.raises((UserError, ConfigError), match=complaint):
            command("install", tmp_path / "alice", bundle, *given)
        assert {path.name for path in (tmp_path / "alice").iterdir()} == {"request.json", "secrets"}
    command("install", tmp_path / "alice", bundle, "--plugin", tmp_path / "my_rules.py")
    command("allow", tmp_path / "alice", "run")
    everyone = [Party.open(tmp_path / "fed" / "server"), Party.open(tmp_path / "alice")]
    assert coordinator(everyone, Direct(everyone))[0].go().rounds == 2
