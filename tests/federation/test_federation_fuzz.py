"""Whatever comes from outside, or from a disk: it is read, or refused with the room's own error, and no more.

Bytes are made from what is right, by changing it: pure noise would not get past the first check.
"""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from contextlib import suppress

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from federation_harness import PRIVATE, Direct, coordinator, make, small_config
from trilemma.base.errors import PrivacyError, UserError
from trilemma.federation.client.account import read_budget
from trilemma.federation.client.journal import Journal
from trilemma.federation.client.node import Node
from trilemma.federation.client.proposals import proposed
from trilemma.federation.client.sessions import Session
from trilemma.federation.identity.rosters import SignedRoster
from trilemma.federation.identity.tls_keys import new_request, requested_key
from trilemma.federation.party.permission import Permission
from trilemma.federation.protocol import kinds, wire
from trilemma.federation.protocol.admission import Expected, admit
from trilemma.federation.protocol.confirmation import Confirmation, MemberList, Position, Sighting, Witness
from trilemma.federation.protocol.disk_backed import Memory
from trilemma.federation.protocol.reasons import LONGEST, Refused, heard
from trilemma.federation.protocol.transport import Reply
from trilemma.federation.server.commits import Commit, CommitLog
from trilemma.learning import MessageLayout, Part
from trilemma.privacy.ledger.ledger import Ledger
from trilemma.privacy.ledger.lines import LedgerError, read_entries, read_lines
from trilemma.privacy.secrets import Offer, Roster

often = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
DEEP = b"[" * 100_000
HEADERS = (
    *(
        kinds.Hello,
        kinds.Joined,
        kinds.Keys,
        kinds.Ready,
        kinds.Confirm,
        kinds.Confirmed,
        kinds.Ask,
        kinds.Answer,
    ),
    *(kinds.Inquire, kinds.Detail, kinds.Evaluate, kinds.Scored, kinds.Finished, kinds.Noted, kinds.Doubted),
)

plain_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def changed(draw, contents: st.SearchStrategy[bytes]) -> bytes:
    """Something right with a few bytes flipped, cut out, doubled or put in."""
    content = draw(contents)
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(content)))
        length = draw(st.integers(0, 12))
        piece = draw(
            st.sampled_from([b"", content[place : place + length], b"\x00" * length]) | st.binary(max_size=12)
        )
        content = content[:place] + piece + content[place + draw(st.integers(0, length)) :]
    return content


def framed(header: object, body: bytes = b"") -> bytes:
    """A block whose header is any JSON."""
    text = json.dumps(header).encode()
    return wire.MAGIC + len(text).to_bytes(8, "big") + text + body


@st.composite
def blocks(draw) -> bytes:
    """Blocks of every kind: right ones, right ones changed, and any JSON in the place of a header."""
    kind = draw(st.sampled_from(HEADERS))
    fields = {
        "run": draw(st.sampled_from(["run", "", "../x"])),
        "epoch": draw(st.integers(-1, 2)),
        "round": draw(st.integers(-1, 2**70)),
        "client": draw(st.integers(-1, 5)),
        **{
            name: draw(plain_json)
            for name in draw(st.lists(st.sampled_from([*kind.model_fields]), max_size=2))
        },
    }
    dtype = draw(st.sampled_from([*wire.DTYPES, "float16", "", 3]))
    shape = draw(st.lists(st.integers(-1, 2**41), max_size=3) | plain_json)
    tensors = draw(
        st.lists(st.sampled_from([["x", dtype, shape], ["y", dtype, shape, 0], [], 7]), max_size=3)
        | plain_json
    )
    right = {name: fields.get(name, draw(st.sampled_from(["a", 1, {}, []]))) for name in kind.model_fields}
    header = {"kind": kind.kind, "fields": right, "tensors": tensors}
    return framed(draw(st.just(header) | plain_json), draw(st.binary(max_size=16)))


@given(changed(blocks()) | st.binary(max_size=64), st.sampled_from(HEADERS))
@example(framed([])[: len(wire.MAGIC) + 8] + b"", kinds.Noted)
@example(wire.MAGIC + len(DEEP).to_bytes(8, "big") + DEEP, kinds.Noted)
@example(
    framed({"kind": "noted", "fields": {"client": 0, "run": "r"}, "tensors": [["x", "bool", [2**20] * 8]]}),
    kinds.Noted,
)
def test_a_block_is_read_or_refused(block, expected):
    for read in (wire.kind_of, wire.unsealed, lambda one: wire.loads(one, expected)):
        with suppress(wire.WireError):
            read(block)


@pytest.mark.parametrize(
    "described", [[["x", "float64", [1 << 39]]], [["x", "uint8", [8]]] * 2, [["x", "uint8", [0]]] * 9999]
)
def test_what_a_block_declares_costs_nothing_before_it_is_there(described):
    """Memory goes by the bytes that came."""
    block = framed({"kind": "noted", "fields": {"client": 0, "run": "r"}, "tensors": described}, b"12345678")
    tracemalloc.start()
    try:
        wire.loads(block, kinds.Noted)
    except wire.WireError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 60 * len(block) + 100_000


# --- a party's own disk ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parties(tmp_path_factory):
    """A federation that has run, so that every file is there."""
    config = small_config(3, *PRIVATE, rounds=2)
    parties = make(tmp_path_factory.mktemp("fuzz") / "federation", 3, config, budget=1e6)
    coordinator(parties, Direct(parties))[0].go()
    return parties


def commits(parties) -> list[bytes]:
    folder = parties[0].run_folder("run") / "commits"
    return [bytes(wire.unsealed(path.read_bytes())) for path in sorted(folder.iterdir())]


@often
@given(data=st.data())
def test_a_commit_is_read_or_refused(parties, data):
    """Behind its checksum, or bare as in older runs."""
    block = data.draw(changed(st.sampled_from(commits(parties))))
    with suppress(wire.WireError):
        Commit.from_block(block, Memory(parties[0].run_folder("run") / "memory"), thorough=True)


@often
@given(data=st.data())
def test_a_log_of_commits_is_recovered_or_refused(parties, tmp_path, data):
    """Names that are no commit's are nobody's business; a broken line of records is left out."""
    folder = tmp_path / "run"
    (folder / "commits").mkdir(parents=True, exist_ok=True)
    for path in (folder / "commits").iterdir():
        path.unlink()
    for name in data.draw(
        st.lists(st.sampled_from(["00000001-00000001", "a-b", "1-2-3", "-", "--1"]), max_size=3)
    ):
        content = data.draw(
            changed(st.sampled_from([wire.sealed(commits(parties)[-1]), commits(parties)[-1]]))
        )
        (folder / "commits" / f"{name}.commit").write_bytes(content)
    records = (parties[0].run_folder("run") / "rounds.jsonl").read_bytes()
    (folder / "rounds.jsonl").write_bytes(data.draw(changed(st.just(records))))
    log = CommitLog(folder)
    for read in (log.last, log.recover, log.records):
        with suppress(UserError):
            read()


@often
@given(data=st.data())
def test_a_client_reads_its_journal_and_its_keys_or_counts_them_as_lost(parties, tmp_path, data):
    home = parties[1].run_folder("run")
    journal = data.draw(st.sampled_from([home / "journal", home / "session"]))
    content = data.draw(
        changed(st.sampled_from([journal.read_bytes(), bytes(wire.unsealed(journal.read_bytes()))]))
    )
    (tmp_path / "journal").write_bytes(content)
    Journal(tmp_path).last()
    session = Session(parties[1], "run")
    session._file = tmp_path / "session"
    session._file.write_bytes(content)
    session.secrets  # noqa: B018  reading it is the point


@often
@given(data=st.data())
def test_a_ledger_is_read_or_refused(parties, tmp_path, data):
    """Also where whoever changed a line made its digest right again."""
    path = tmp_path / "ledger"
    lines = data.draw(changed(st.just(parties[1].ledger.read_bytes())))
    if data.draw(st.booleans()):
        lines = resealed(lines, data.draw(st.none() | st.just("missing") | plain_json))
    path.write_bytes(lines)
    for read in (
        lambda: Ledger(path, read_budget(parties[1])).close(),
        lambda: read_lines(lines),
        lambda: read_entries(path),
    ):
        path.write_bytes(lines)
        with suppress(LedgerError):
            read()


def resealed(text: bytes, said: object) -> bytes:
    """Lines whose digests are right, whatever they say."""
    found, previous = [], "0" * 64
    for line in text.split(b"\n")[:-1]:
        try:
            record = json.loads(line[65:])
        except ValueError:
            record = said
        if isinstance(record, dict):
            record = {**record, "previous": previous}
            if said is not None and found:
                record[sorted(record)[0]] = said
        body = json.dumps(record).encode()
        previous = hashlib.sha256(body).hexdigest()
        found.append(previous.encode() + b" " + body + b"\n")
    return b"".join(found)


FILES = {
    "allowed.toml": lambda party: Permission.load(party.allowed),
    "proposals/run.json": lambda party: list(proposed(party)),
    "roster.json": lambda party: SignedRoster.load(party.roster, party.authority),
    "federation.toml": lambda party: party.federation,
    "budget.toml": read_budget,
    "memory/ledgers-seen": lambda party: Witness(party.ledgers_seen).seen(),
}


@often
@given(data=st.data(), name=st.sampled_from(sorted(FILES)))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_file_that_people_write_is_read_or_refused(parties, tmp_path, data, name):
    """What its owner, or a stranger with an editor, may have put there."""
    party = type(parties[1])(tmp_path / "client-0", 0)
    source = parties[1].folder / name
    right = source.read_bytes() if source.is_file() else b'{"run": "run", "plan": ""}'
    content = data.draw(
        changed(st.just(right))
        | plain_json.map(lambda one: json.dumps(one).encode())
        | st.just(DEEP)
        | st.just(b"a = " + DEEP)
    )
    (party.folder / name).parent.mkdir(parents=True, exist_ok=True)
    (party.folder / name).write_bytes(content)
    party.authority.parent.mkdir(exist_ok=True)
    party.authority.write_bytes(parties[1].authority.read_bytes())
    with suppress(UserError):
        FILES[name](party)


# --- what clients and the server say to each other ------------------------------------------------


@given(st.text(max_size=40) | plain_json.map(json.dumps))
@example("[" * 100_000)
@example("[" + "9" * 5000 + ', "", ""]')
@example('[1, "", "\\ud800"]')
def test_a_confirmation_is_read_or_refused(text):
    roster = Roster((bytes(32),))
    with suppress(PrivacyError):
        Sighting.decode(text).later_than(Position(), 0, bytes(32).hex())
    with suppress(PrivacyError):
        Confirmation.decode(text).check(MemberList("run", 0, "terms", {0: "offer"}), roster, 0)


@given(changed(st.just(new_request("client-0")[1])))
def test_a_request_for_a_certificate_is_read_or_refused(content):
    with suppress(UserError):
        requested_key(content)


@given(st.binary(max_size=140) | changed(st.just(Offer(1, bytes(32), bytes(32), bytes(64)).encode())))
def test_an_offer_is_read_or_refused(content):
    with suppress(PrivacyError):
        Offer.decode(content)


@given(st.text(max_size=300))
def test_a_reason_is_short_and_can_be_shown(text):
    assert len(heard(text)) <= LONGEST
    assert heard(text).isprintable()


@given(st.lists(st.tuples(st.integers(10, 13), changed(blocks())), max_size=4))
def test_admission_never_fails(replies):
    layout = MessageLayout((Part("momentum", (2,)),), ("momentum",))
    expected = Expected("run", epoch=0, round=1, layout=layout, clients={11: 0, 12: 1})
    outcome = admit(expected, [Reply(node, block) for node, block in replies])
    assert all(torch.isfinite(vector).all() for vector in outcome.vectors.values())
    assert all(len(one.reason) <= LONGEST for one in outcome.rejected)


@often
@given(data=st.data())
def test_a_node_answers_or_refuses_and_pays_for_nothing(parties, data):
    """Blocks of every kind, also such as it has answered before, changed: its ledger stays as it is."""
    node, ledger = Node(parties[2]), parties[2].ledger.read_bytes()
    session = Session(parties[2], "run").secrets
    right = [
        wire.dumps(kinds.Hello(run="run", epoch=0, terms=parties[2].agreed.terms)),
        wire.dumps(kinds.Keys(run="run", epoch=0, keys={str(k): v for k, v in session.offers.items()})),
        wire.dumps(
            kinds.Ask(run="run", epoch=0, round=1, heard={"1": 0}, unused=[]), {"params": torch.zeros(69)}
        ),
    ]
    block = data.draw(changed(st.sampled_from(right)) | blocks())
    with suppress(Refused):
        node.answer(block)
    assert parties[2].ledger.read_bytes() == ledger
