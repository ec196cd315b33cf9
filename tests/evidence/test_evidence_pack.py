"""The evidence pack: it says what is known, `verify` finds every change, a reader learns no more."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import pytest

from federation_harness import PRIVATE, Direct, coordinator, make, small_config
from trilemma.audit.final.found import Attacks, Tried
from trilemma.base.errors import PrivacyError, UserError
from trilemma.cli.export import export_command
from trilemma.evidence.approvals import approvals, approve
from trilemma.evidence.gather import digest_of, gather
from trilemma.evidence.mapping import ROWS, mapping, rows
from trilemma.evidence.pack import ByServer, Contents, PackFile, digests, write
from trilemma.evidence.page_one import guess, worst
from trilemma.evidence.statement import statement
from trilemma.evidence.verify import refused, verify
from trilemma.evidence.vouched import Vouched, vouch
from trilemma.federation.identity import certificates, signed_files
from trilemma.federation.identity.authority import Authority
from trilemma.privacy.accounting.gaussian import gaussian_delta
from trilemma.report.loading import load

CLIENTS = 4
RUN = "default"


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """The folder of a federation that has run two private rounds, with a transcript and an export rule."""
    config = small_config(
        CLIENTS, *PRIVATE, "federation.export={needs = 2}", "run.evaluate_every=1", rounds=2
    )
    folder = tmp_path_factory.mktemp("evidence") / "federation"
    parties = make(folder, CLIENTS, config, transcript=True)
    coordinator(parties, Direct(parties), run=RUN)[0].go()
    return folder


@pytest.fixture(scope="module")
def parties(federation):
    from trilemma.federation.party.layout import parties

    return parties(federation)


def ledgers(parties):
    return {party.client: vouch(party, RUN) for party in parties[1:]}


@pytest.fixture(scope="module")
def made(federation, parties, tmp_path_factory):
    """A pack as it was made; copy it to change it."""
    out = tmp_path_factory.mktemp("made") / "pack"
    write(gather(federation), out, ledgers(parties))
    return out


@pytest.fixture
def pack(made, tmp_path):
    return shutil.copytree(made, tmp_path / "pack")


def resigned(pack, server):
    """Let the server sign whatever the folder holds now: a server may lie."""
    before = PackFile.load(pack).pack
    content = Contents(name=before.name, run=before.run, files=digests(pack))
    issued = certificates.Issued(server.certificate.read_bytes(), server.certificate_key.read_bytes())
    by = ByServer(certificate=issued.certificate.decode(), signature=issued.sign(content.message).hex())
    (pack / "pack.json").write_text(signed_files.text_of(PackFile(pack=content, by=by)))


def test_a_pack_holds_and_a_replay_gives_its_model(pack, federation, parties):
    found = verify(pack, parties[0].authority.read_bytes(), federation)
    assert not refused(found)
    held = {one.what for one in found if one.holds}
    assert {
        "contents",
        "signature",
        "roster",
        "guarantee",
        "configuration",
        "robustness",
        "transcript",
    } <= held
    assert {f"ledgers/client-{i}.json" for i in range(CLIENTS)} <= held
    assert {"statement.html", "model-card.md", "mapping.md"} <= held


def test_one_changed_byte_anywhere_is_refused_with_the_files_name(pack):
    for path in sorted(path for path in pack.rglob("*") if path.is_file()):
        kept = path.read_bytes()
        path.write_bytes(kept[:-2] + bytes([kept[-2] ^ 1]) + kept[-1:])
        name = path.relative_to(pack).as_posix()
        try:
            said = refused(verify(pack))
        except UserError as error:  # pack.json itself
            said = [str(error)]
        assert said, name
        assert name in said[0] or name == "pack.json"
        path.write_bytes(kept)
    assert not refused(verify(pack))


def test_a_file_that_was_added_or_taken_away_or_is_a_link_is_refused(pack):
    (pack / "more.txt").write_text("trust me")
    assert refused(verify(pack)) == ["more.txt: it was added: the list of contents does not have it"]
    (pack / "more.txt").unlink()
    (pack / "roster.json").rename(pack.parent / "elsewhere")
    assert "roster.json: it is missing" in refused(verify(pack))
    (pack / "roster.json").symlink_to(pack.parent / "elsewhere")
    assert refused(verify(pack)) == ["contents: roster.json is no plain file"]


@pytest.mark.parametrize(
    ("file", "old", "new", "what"),
    [
        ("statement.html", "may send anything", "may send nothing bad", "statement.html"),
        ("model-card.md", "Not measured", "Carbon neutral", "model-card.md"),
        ("mapping.md", "(roster.json)", "(certificate.json)", "mapping.md"),
        ("facts.json", '"rounds": 2', '"rounds": 1', "guarantee"),
        ("facts.json", '"heard": 4', '"heard": 5', "robustness"),
        ("config.toml", "delta = ", "delta = 0.1 # ", "configuration"),
    ],
)
def test_a_server_that_signs_something_else_than_follows_is_refused(pack, parties, file, old, new, what):
    text = (pack / file).read_text()
    assert old in text
    (pack / file).write_text(text.replace(old, new))
    resigned(pack, parties[0])
    assert what in {one.partition(":")[0] for one in refused(verify(pack))}


def test_a_ledger_that_says_less_or_is_another_runs_is_refused(pack, parties):
    path = pack / "ledgers" / "client-1.json"
    kept = path.read_text()
    less = json.loads(kept)
    less["account"]["epsilon"] /= 2
    path.write_text(json.dumps(less))
    resigned(pack, parties[0])
    assert "does not belong" in " ".join(refused(verify(pack)))
    path.write_text(vouch(parties[2], "another").text)
    resigned(pack, parties[0])
    assert "it is about client 1 in run 'another'" in " ".join(refused(verify(pack)))


def test_an_owner_cannot_sign_less_than_its_releases_cost(parties):
    """The figure is computed again from the releases: a signature alone does not make it true."""
    from trilemma.privacy.secrets import Identity

    honest = vouch(parties[1], RUN).account
    lie = honest.model_copy(update={"epsilon": honest.epsilon / 2})
    signed = Vouched(account=lie, signature=Identity.load(parties[1].identity).sign(lie.message).hex())
    with pytest.raises(UserError, match="its releases cost"):
        signed.check(parties[0].signed_roster)


def test_a_pack_of_another_authority_is_refused(pack):
    other = certificates.new_authority("test").certificate
    assert "another authority" in refused(verify(pack, other))[0]


def test_another_runs_transcript_is_refused(pack, federation, tmp_path):
    copy = shutil.copytree(federation, tmp_path / "federation")
    transcript = copy / "server" / "state" / "runs" / RUN / "transcript"
    path = sorted(transcript.iterdir())[0]
    path.write_bytes(path.read_bytes()[:-1])
    assert "another transcript" in " ".join(refused(verify(pack, server=copy)))


def test_attacks_on_another_model_are_not_taken(federation, parties, tmp_path):
    other = Attacks(model_digest="0" * 64, promise="", certified=None, delta=1e-5)
    with pytest.raises(UserError, match="another model"):
        write(gather(federation), tmp_path / "pack", ledgers(parties), other)
    assert not (tmp_path / "pack").exists()


# --- what a reader of the pack learns ---------------------------------------------------------------------


def numbers(value):
    """Every number of JSON values."""
    if isinstance(value, dict):
        return [one for inner in value.values() for one in numbers(inner)]
    if isinstance(value, list):
        return [one for inner in value for one in numbers(inner)]
    return [value] if isinstance(value, float) else []


def test_nothing_that_is_not_paid_for_is_in_the_pack_without_a_label(pack, federation):
    """No file has times, shares in the aggregate or training losses; scores on test examples are labelled."""
    facts = json.loads((pack / "facts.json").read_text())
    text = "".join(path.read_text(errors="ignore") for path in pack.rglob("*") if path.is_file())
    records = load(federation).records
    private = {
        f"{number:.6g}"
        for record in records
        for number in (*record.weights.values(), *record.times.values(), *record.seconds.values())
        if number not in (0.0, 1.0)
    }
    assert private
    shown = {f"{one:.6g}" for one in numbers(facts)}
    assert not private & shown
    assert "train_loss" not in text
    assert facts["curves"]
    assert {one["cover"] for one in facts["curves"]} == {"not covered"}
    assert "no ε covers this figure" in (pack / "statement.html").read_text()


def test_scores_that_no_epsilon_pays_for_can_be_left_out(federation, parties, tmp_path):
    write(gather(federation, scores=False), tmp_path / "pack", ledgers(parties))
    assert not (tmp_path / "pack" / "utility.png").exists()
    assert "No score is in this pack" in (tmp_path / "pack" / "statement.html").read_text()
    assert not refused(verify(tmp_path / "pack"))


def test_a_digest_of_messages_that_are_not_noised_is_not_told(tmp_path):
    """Whoever knows all records but one could compute both transcripts and compare."""
    config = small_config(CLIENTS, "run.evaluate_every=1", rounds=1)
    parties = make(tmp_path / "plain", CLIENTS, config, transcript=True)
    coordinator(parties, Direct(parties), run=RUN)[0].go()
    facts = gather(tmp_path / "plain").facts
    assert facts.transcript is None
    assert "confirm a guess" in facts.transcript_why
    assert facts.robust.cover == "not covered"


# --- approvals --------------------------------------------------------------------------------------------


def export(source, target, pack=None):
    export_command(source, target, None, None, None, None, pack, None)


def test_an_export_waits_for_as_many_approvals_as_were_agreed_on(pack, federation, parties, tmp_path):
    target = tmp_path / "model.safetensors"
    with pytest.raises(UserError, match="--pack"):
        export(federation, target)
    with pytest.raises(UserError, match="0 of 2"):
        export(federation, target, pack)
    approve(parties[1], pack)
    approve(parties[1], pack)  # twice the same owner is one
    with pytest.raises(UserError, match="1 of 2"):
        export(federation, target, pack)
    assert not target.exists()
    approve(parties[3], pack)
    export(federation, target, pack)
    assert target.exists()


def test_the_approval_of_a_removed_site_does_not_count(pack, parties, tmp_path):
    approve(parties[1], pack)
    approve(parties[2], pack)
    roster = parties[0].signed_roster
    gone = tuple(one.model_copy(update={"removed": place == 0}) for place, one in enumerate(roster.clients))
    after = Authority.open(parties[0].folder.parent).sign(roster.federation, gone)
    who, why = approvals(pack, after)
    assert who == {1}
    assert "was removed from the roster" in why[0]


def test_an_approval_is_of_one_pack_and_an_export_of_its_model(pack, federation, parties, tmp_path):
    approve(parties[1], pack)
    approve(parties[2], pack)
    other = tmp_path / "other"
    write(gather(federation, scores=False), other, ledgers(parties))
    shutil.copytree(pack / "approvals", other / "approvals")
    who, why = approvals(other, parties[0].signed_roster)
    assert not who
    assert "another pack" in why[0]
    facts = json.loads((pack / "facts.json").read_text())
    facts["model_digest"] = "0" * 64
    (pack / "facts.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match="was changed"):
        export(federation, tmp_path / "model.safetensors", pack)


def test_an_owner_does_not_approve_a_pack_that_does_not_hold(pack, parties):
    (pack / "statement.html").write_text("all is well")
    with pytest.raises(UserError, match="it was changed"):
        approve(parties[1], pack)
    assert not (pack / "approvals").exists()


# --- pages ------------------------------------------------------------------------------------------------


def test_no_row_of_the_mapping_stands_without_its_file():
    everything = {one.file.partition("#")[0] for one in ROWS}
    assert rows(everything) == ROWS
    for missing in everything:
        assert missing not in {one.file.partition("#")[0] for one in rows(everything - {missing})}
    assert all(one.not_shown for one in ROWS)
    assert len(mapping(everything)) == 3


def test_links_of_the_mapping_lead_to_files(pack):
    links = re.findall(r"\]\(([^)]*)\)", (pack / "mapping.md").read_text())
    assert links
    for file, _, place in (link.partition("#") for link in links):
        assert (pack / file).is_file()
        assert not place or f'id="{place}"' in (pack / file).read_text()


def test_page_one_is_about_the_worst_ledger_and_escapes_what_strangers_wrote(pack, parties):
    text = (pack / "statement.html").read_text()
    spent = max(one.account.epsilon for one in ledgers(parties).values())
    assert f"ε = {spent:.3g}" in text
    assert "What is not promised" in text
    from trilemma.evidence.blocks import Link, Rows, Words, as_html, as_markdown

    nasty = "<script>alert(1)</script>](x)"
    for render in (lambda blocks: as_html(nasty, blocks), as_markdown):
        said = render([Words(nasty), Rows(((nasty, Link(nasty, "a.html")),))])
        assert "<script" not in said
        assert "](x)" not in said.replace("\\](x)", "") or render is not as_markdown


def test_the_guess_in_words_is_the_bound_of_a_gaussian_mechanisms_best_test():
    """Of a Gaussian mechanism with μ the best test is right in Φ(μ/2) of cases; (ε, δ) allows no less."""
    from scipy.special import ndtr

    for mu in (0.5, 1.0, 3.0):
        for epsilon in (0.1, 1.0, 4.0):
            assert guess(epsilon, gaussian_delta(mu, epsilon)) >= ndtr(mu / 2) - 1e-9


def test_a_pdf_is_the_same_for_the_same_facts(made, tmp_path):
    pytest.importorskip("fpdf", reason="fpdf2 is not installed")
    assert (made / "statement.pdf").read_bytes().startswith(b"%PDF")


def test_a_bill_of_materials_is_valid(made):
    pytest.importorskip("cyclonedx", reason="cyclonedx-python-lib is not installed")
    found = json.loads((made / "sbom.cdx.json").read_text())
    assert found["bomFormat"] == "CycloneDX"
    assert {"torch", "numpy"} <= {one["name"] for one in found["components"]}


# --- simulations ------------------------------------------------------------------------------------------


def test_the_pack_of_a_simulation_says_that_nothing_is_protected(tmp_path):
    from trilemma.simulate import run

    run(_private(), tmp_path / "run")
    gathered = gather(tmp_path / "run")
    write(gathered, tmp_path / "pack", {}, key=tmp_path / "key")
    said = (tmp_path / "pack" / "statement.html").read_text()
    assert "NOT protected" in said
    assert {one.cover for one in gathered.facts.curves} == {"not covered"}
    found = verify(tmp_path / "pack")
    assert not refused(found)
    assert "nobody here vouches" in " ".join(one.words for one in found)
    write(gathered, tmp_path / "unsigned", {})
    assert "nobody signed" in refused(verify(tmp_path / "unsigned"))[0]


def _private():
    from trilemma import config as configurations

    return configurations.parse(
        {},
        [
            *("federation.clients=4", "federation.tolerate=1", "run.rounds=2", "algorithm.name=cafcor"),
            *(
                "aggregation.rule=caf",
                "privacy.threat=secldp",
                "privacy.sigma_ind=0.1",
                "privacy.sigma_cor=0.5",
            ),
        ],
    )


def test_the_digest_of_a_model_tells_shape_and_type_apart():
    import torch

    same = torch.arange(6.0)
    assert len({digest_of(one) for one in (same, same.reshape(2, 3), same.double())}) == 3


def test_a_signature_needs_the_authoritys_certificate(made):
    by = PackFile.load(made).by
    message = PackFile.load(made).pack.message
    with pytest.raises(UserError, match="not one of this authority's"):
        by.check(message, certificates.new_authority("test").certificate)
    with pytest.raises(PrivacyError, match="has not signed"):
        by.check(message + b" ", (made / "ca.crt").read_bytes())


def test_a_client_cannot_sign_as_the_server():
    """Its certificate is the authority's as well, and its key of the same kind."""
    authority = certificates.new_authority("demo")
    issued = certificates.issue_client(authority, "client-0")
    by = ByServer(certificate=issued.certificate.decode(), signature=issued.sign(b"said").hex())
    with pytest.raises(UserError, match="not a server's"):
        by.check(b"said", authority.certificate)


def test_a_ledger_signed_before_the_run_ended_does_not_speak_for_all_of_it(federation, parties, tmp_path):
    """A server may keep what an owner signed early: page one then says what was planned, not less."""
    owners = ledgers(parties)
    half = owners[1].account.model_copy(
        update={"rounds": 1, "epsilon": 0.0, "releases": (), "accountant": "nothing released"}
    )
    facts = gather(federation).facts
    planned = worst(facts, {})
    early = dict.fromkeys(owners, half)
    assert worst(facts, early) == planned
    assert worst(facts, {0: owners[1].account, 1: half, 2: half, 3: half})[0] >= planned[0]
    text = str(statement(facts, {0: half}, None))
    assert "signed with 1 of 2 rounds in it" in text
    assert "and of the plan for 4 without a ledger of all rounds" in text
    whole = {place: one.account for place, one in owners.items()}
    assert "the plan for" not in str(statement(facts, whole, None))


def test_an_attack_that_exceeds_its_bound_is_said_on_page_one(federation, parties, tmp_path):
    digest = gather(federation).facts.model_digest
    found = Tried(
        attack="membership", how="", measure="advantage", found=0.9, low=0.8, chance=0.0, allowed=0.5, why=""
    )
    attacks = Attacks(model_digest=digest, promise="ε = 1", certified=1.0, delta=1e-5, tried=(found,))
    write(gather(federation), tmp_path / "pack", ledgers(parties), attacks)
    assert "EXCEEDED" in (tmp_path / "pack" / "statement.html").read_text()
    assert not refused(verify(tmp_path / "pack"))


def test_public_weights_are_in_the_pack_and_its_kappa_is_theirs(tmp_path):
    weights = ("federation.weights=[0.3, 0.2, 0.2, 0.3]", "algorithm.name=dsgd", "aggregation.rule=caf")
    noise = ("privacy.threat=ldp", "privacy.sigma_ind=1.0", "privacy.clip=0.1")
    parties = make(tmp_path / "federation", 4, small_config(4, *weights, *noise, rounds=1), budget=1000.0)
    coordinator(parties, Direct(parties), run=RUN)[0].go()
    gathered = gather(tmp_path / "federation")
    write(gathered, tmp_path / "pack", ledgers(parties))
    assert gathered.facts.robust.kappa > 0
    assert not refused(verify(tmp_path / "pack"))
    assert "Public weights" in (tmp_path / "pack" / "statement.html").read_text()
    config = tmp_path / "pack" / "config.toml"
    config.write_text(config.read_text().replace("0.3", "0.25").replace("0.2,", "0.25,"))
    resigned(tmp_path / "pack", parties[0])
    assert "other weights" in " ".join(refused(verify(tmp_path / "pack")))


def test_a_machine_that_rounds_otherwise_refuses_nothing_and_a_better_figure_is_refused(pack, parties):
    """The last digits of ε may differ elsewhere; pages are made from the figure that stands in the facts."""
    path = pack / "facts.json"
    kept = path.read_text()
    epsilon = json.loads(kept)["noise"]["verdict"]["guarantee"]["epsilon"]
    path.write_text(kept.replace(repr(epsilon), repr(epsilon * (1 + 1e-12))))
    resigned(pack, parties[0])
    assert not refused(verify(pack))
    path.write_text(kept.replace(repr(epsilon), repr(epsilon * 0.9)))
    resigned(pack, parties[0])
    assert "guarantee" in refused(verify(pack))[0]


@pytest.mark.parametrize(
    ("change", "why"), [({"removed": True}, "was removed"), ({"identity": "0" * 64}, "another key")]
)
def test_a_ledger_signed_by_a_removed_or_a_former_key_does_not_count(parties, change, why):
    roster = parties[0].signed_roster
    changed = tuple(
        one.model_copy(update=change) if place == 0 else one for place, one in enumerate(roster.clients)
    )
    after = replace(roster, clients=changed)
    with pytest.raises(UserError, match=why):
        vouch(parties[1], RUN).check(after)
    assert vouch(parties[2], RUN).check(after).client == 1
