"""Secrets: standard vectors, refusals, and noise that is the same at both ends."""

from __future__ import annotations

import itertools
import os
import stat
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from test_privacy_noise import check_covariance

from stacked_noise import StackedSecretNoise
from trilemma.base.errors import PrivacyError, UserError
from trilemma.privacy import NoiseLaw, SecretGraph, covariance
from trilemma.privacy.noise.grid import in_steps, step_for
from trilemma.privacy.secrets import (
    ChaChaStream,
    Handshake,
    Identity,
    Offer,
    Roster,
    SecretNoise,
    add_gaussians,
    check_signature,
    derive,
    kernels,
    pair_stream,
    run_digest,
    streams,
)
from trilemma.privacy.secrets.agreement import exchange
from trilemma.privacy.secrets.noise import PIECE

CPU = torch.device("cpu")
SCALE = 2.0**40  # steps so fine that a stream is as good as Gaussian
PINNED = "b4a9a8b68b5f92b56be3e2f1ef80dfdb4ceec6e91b067e8782ca904579e41bb4"


def federation(n: int, run: str = "run") -> tuple[list[Identity], Roster, list[Handshake]]:
    people = [Identity.generate() for _ in range(n)]
    roster = Roster(tuple(person.public for person in people))
    return people, roster, [Handshake(person, roster, run) for person in people]


def nodes_of(n: int, graph: SecretGraph | None = None, seeded: bool = True) -> list[SecretNoise]:
    _, _, shakes = federation(n)
    offers = [shake.offer for shake in shakes]
    graph = graph or SecretGraph.complete(n)
    return [
        SecretNoise(i, shake.agree(offers, graph.neighbours(i)), os.urandom(32) if seeded else None)
        for i, shake in enumerate(shakes)
    ]


class TestStandardVectors:
    @pytest.mark.parametrize(
        ("seed", "public", "message", "signature"),
        [  # RFC 8032, section 7.1, tests 1 to 3
            (
                "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
                "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
                "",
                "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46b"
                "d25bf5f0595bbe24655141438e7a100b",
            ),
            (
                "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
                "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
                "72",
                "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c"
                "387b2eaeb4302aeeb00d291612bb0c00",
            ),
            (
                "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
                "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
                "af82",
                "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc659"
                "4a7c15e9716ed28dc027beceea1ec40a",
            ),
        ],
    )
    def test_ed25519(self, seed, public, message, signature):
        identity = Identity(bytes.fromhex(seed))
        assert identity.public.hex() == public
        assert identity.sign(bytes.fromhex(message)).hex() == signature
        check_signature(identity.public, bytes.fromhex(message), bytes.fromhex(signature))

    @pytest.mark.parametrize(
        ("scalar", "point", "shared"),
        [  # RFC 7748, section 5.2
            (
                "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4",
                "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c",
                "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552",
            ),
            (
                "4b66e9d4d1b4673c5ad22691957d6af5c11b6421e0ea01d42ca4169e7918ba0d",
                "e5210f12786811d3f4b7959d0538ae2c31dbe7106fc03c3efc4cd549c715a493",
                "95cbde9476e8907d7aade45cb4b873f88b595a68799fa152e6f8f7647aac7957",
            ),
        ],
    )
    def test_x25519(self, scalar, point, shared):
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        private = X25519PrivateKey.from_private_bytes(bytes.fromhex(scalar))
        assert exchange(private, bytes.fromhex(point), "vector").hex() == shared

    def test_x25519_iterated(self):
        """RFC 7748, section 5.2: a thousand times over."""
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        k = u = bytes([9]) + bytes(31)
        for _ in range(1000):
            k, u = exchange(X25519PrivateKey.from_private_bytes(k), u, "vector"), k
        assert k.hex() == "684cf59ba83309552800ef566f2f4d3c1c3887c49360e3875f2eb94d99532c51"

    def test_chacha20(self):
        """RFC 8439, appendix A.1, vector 1, and its block 1 (vector 2)."""
        out = bytearray(128)
        ChaChaStream(bytes(32)).fill(memoryview(out))
        assert out[:64].hex() == (
            "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
            "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
        )
        assert out[64:].hex() == (
            "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
            "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
        )

    def test_hkdf(self):
        """RFC 5869, appendix A.1: the first 32 of 42 bytes."""
        okm = derive(bytes([0x0B] * 22), bytes(range(13)), bytes(range(0xF0, 0xFA)))
        assert okm.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"


class TestIdentity:
    def test_saved_for_its_owner_only_and_never_overwritten(self, tmp_path):
        identity, path = Identity.generate(), tmp_path / "identity"
        identity.save(path)
        assert Identity.load(path) == identity
        assert os.name != "posix" or stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(UserError, match="never overwritten"):
            Identity.generate().save(path)

    def test_the_seed_is_not_printed(self):
        identity = Identity(b"s" * 32)
        assert "sss" not in repr(identity)
        assert "key" not in repr(SecretNoise(0, {1: b"k" * 32}, own=b"o" * 32))

    def test_who_was_removed_keeps_its_place_and_signs_nothing(self):
        people, roster, _ = federation(3)
        without = Roster(roster.keys, removed=frozenset({1}))
        assert without.index(people[2].public) == 2
        assert without.digest != roster.digest
        with pytest.raises(PrivacyError, match="not on the roster"):
            without.index(people[1].public)
        with pytest.raises(PrivacyError, match="client 1 was removed"):
            without.key(1)
        shakes = {i: Handshake(people[i], without, "run") for i in (0, 2)}
        offers = [shake.offer for shake in shakes.values()]
        keys = {i: shake.agree(offers) for i, shake in shakes.items()}
        assert keys[0].keys() == {2}
        assert keys[0][2] == keys[2][0]

    @pytest.mark.parametrize(
        "call",
        [
            lambda path: Identity(b"short"),
            lambda path: Identity.load(path / "none"),
            lambda path: Roster((b"k" * 32,), removed=frozenset({0})),
            lambda path: Roster((b"k" * 31,)),
            lambda path: Roster((b"k" * 32, b"k" * 32)),
            lambda path: Roster(()),
            lambda path: run_digest(""),
            lambda path: SecretNoise(0, {0: bytes(32)}),
            lambda path: SecretNoise(0, {1: bytes(16)}),
        ],
    )
    def test_bad_input_is_refused(self, call, tmp_path):
        with pytest.raises(UserError):
            call(tmp_path)


class TestAgreement:
    def test_both_ends_get_the_same_key_and_no_two_pairs_do(self):
        _, _, shakes = federation(5)
        offers = [Offer.decode(shake.offer.encode()) for shake in shakes]
        keys = [shake.agree(offers) for shake in shakes]
        pairs = {}
        for i, j in itertools.combinations(range(5), 2):
            assert keys[i][j] == keys[j][i]
            pairs[i, j] = keys[i][j]
        assert len(set(pairs.values())) == 10

    def test_keys_change_with_run_and_roster(self):
        people, roster, _ = federation(2)
        wider = Roster((*roster.keys, Identity.generate().public))
        found = set()
        for run, book in (("a", roster), ("b", roster), ("a", wider)):
            shakes = [Handshake(person, book, run) for person in people]
            found.add(shakes[0].agree([shake.offer for shake in shakes], partners=[1])[1])
        assert len(found) == 3

    def test_pair_keys_depend_on_run_and_roster_even_for_equal_ephemeral_keys(self, monkeypatch):
        from cryptography.hazmat.primitives.asymmetric import x25519

        fixed = x25519.X25519PrivateKey.from_private_bytes(bytes(range(32)))
        monkeypatch.setattr(x25519.X25519PrivateKey, "generate", staticmethod(lambda: fixed))
        people, roster, _ = federation(2)
        wider = Roster((*roster.keys, Identity.generate().public))
        found = []
        for run, book in (("a", roster), ("a", roster), ("b", roster), ("a", wider)):
            shakes = [Handshake(person, book, run) for person in people]
            found.append(shakes[0].agree([shake.offer for shake in shakes], partners=[1])[1])
        assert found[0] == found[1]
        assert len(set(found)) == 3

    def refused(self, shakes, offers, reason):
        with pytest.raises(PrivacyError, match=reason):
            shakes[0].agree(offers)

    def test_wrong_signature(self):
        _, _, shakes = federation(3)
        offers = [shake.offer for shake in shakes]
        forged = bytes([offers[1].signature[0] ^ 1]) + offers[1].signature[1:]
        self.refused(shakes, [offers[0], replace(offers[1], signature=forged), offers[2]], "not signed")

    def test_another_clients_offer_under_a_new_name(self):
        _, _, shakes = federation(3)
        offers = [shake.offer for shake in shakes]
        self.refused(shakes, [offers[0], replace(offers[2], index=1), offers[2]], "not signed")

    def test_unknown_key(self):
        people, roster, shakes = federation(3)
        stranger = Identity.generate()
        with pytest.raises(PrivacyError, match="not on the roster"):
            Handshake(stranger, roster, "run")
        theirs = Handshake(stranger, Roster((people[0].public, stranger.public)), "run").offer
        self.refused(shakes, [shakes[0].offer, theirs, shakes[2].offer], "not signed")
        self.refused(shakes, [replace(theirs, index=7)], "not on the roster")

    def test_offer_of_another_run_is_not_replayed(self):
        people, roster, shakes = federation(3)
        old = Handshake(people[1], roster, "last week").offer
        self.refused(shakes, [shakes[0].offer, old, shakes[2].offer], "another run")
        self.refused(shakes, [replace(old, run=shakes[0].offer.run)], "not signed")

    def test_offer_for_another_roster(self):
        people, roster, shakes = federation(3)
        wider = Roster((*roster.keys, Identity.generate().public))
        self.refused(shakes, [Handshake(people[1], wider, "run").offer], "not signed")

    @pytest.mark.parametrize(
        "point",
        [
            "00" * 32,
            "01" + "00" * 31,
            "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
            "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
            "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
        ],
    )
    def test_low_order_point(self, point):
        people, roster, shakes = federation(2)
        bad = replace(shakes[1].offer, ephemeral=bytes.fromhex(point))
        bad = replace(bad, signature=people[1].sign(bad.signed(roster)))
        self.refused(shakes, [shakes[0].offer, bad], "low order")

    def test_two_offers_of_one_client_and_one_in_our_name(self):
        people, roster, shakes = federation(3)
        again = Handshake(people[1], roster, "run").offer
        self.refused(shakes, [shakes[1].offer, again, shakes[2].offer], "two different offers")
        ours = Handshake(people[0], roster, "run").offer
        self.refused(shakes, [ours, shakes[1].offer, shakes[2].offer], "differs from the one it made")

    def test_missing_offers_and_spent_keys(self):
        _, _, shakes = federation(3)
        offers = [shake.offer for shake in shakes]
        self.refused(shakes, offers[:2], r"no offer from clients \[2\]")
        assert list(shakes[0].agree(offers[:2], partners=[1])) == [1]
        self.refused(shakes, offers, "spent")

    @pytest.mark.parametrize("wire", [b"", b"TRo1", b"x" * 136])
    def test_garbage_is_not_an_offer(self, wire):
        with pytest.raises(PrivacyError, match="not an offer"):
            Offer.decode(wire)


class TestStreams:
    def gaussians(self, count: int, key: bytes = b"k" * 32, scale: float = SCALE) -> np.ndarray:
        total = np.zeros(count)
        add_gaussians(ChaChaStream(key).fill, total, scale)
        return total / scale

    def test_the_transform_against_numpys_functions(self):
        """The polynomials agree with log, cos and sin, word by word."""
        pairs = 5000
        raw = bytearray(16 * pairs)
        ChaChaStream(b"k" * 32).fill(memoryview(raw))
        words = np.frombuffer(bytes(raw), "<u8")
        radius = np.sqrt(-2 * np.log((words[:pairs] + 0.5) / 2**64))
        angle = (words[pairs:] >> 12) / 2**52 * np.pi / 2
        flip_y, flip_x = (1 - 2.0 * ((words[pairs:] >> bit) & 1).astype(float) for bit in (0, 1))
        slow = np.concatenate((flip_x * radius * np.cos(angle), flip_y * radius * np.sin(angle)))
        assert np.abs(self.gaussians(2 * pairs) - slow).max() < 2**-40 + 0.5 / SCALE

    def test_extreme_words(self):
        for byte in (0x00, 0xFF):
            total = np.zeros(64)
            same = lambda out, b=byte: out.__setitem__(slice(None), bytes([b]) * len(out))  # noqa: E731
            add_gaussians(same, total, SCALE)
            assert np.isfinite(total).all()
            assert np.abs(total).max() < 13.4 * SCALE

    def test_every_number_is_whole(self):
        x = self.gaussians(20_001, scale=1000.0) * 1000.0
        assert np.abs(x - np.round(x)).max() < 1e-9

    def test_a_further_word_refines_the_tail(self):
        """Where the first word is below 2⁴⁰ a third one is drawn, and decides about the lower bits."""
        third = []

        def fill(out):
            if len(out) == 16:
                out[:] = (5).to_bytes(8, "little") + bytes(8)
            else:
                assert len(out) == 8
                out[:] = third[-1].to_bytes(8, "little")

        found = []
        for word in (0, 2**63, 2**64 - 1):
            third.append(word)
            total = np.zeros(2)
            add_gaussians(fill, total, SCALE)
            found.append(total[0] / SCALE)
            u = (5 + word / 2**64) / 2**64
            assert abs(found[-1] - np.sqrt(-2 * np.log(u))) < 2**-40
        assert found == sorted(found, reverse=True)

    @pytest.mark.parametrize("count", [1, 2, 3, 16_383, 16_384, 16_385, 40_001])
    def test_any_length(self, count):
        assert np.count_nonzero(self.gaussians(count)) == count

    def test_standard_normal(self):
        """Kolmogorov-Smirnov, tails and neighbours; each rejects good numbers once in 10⁶ keys."""
        x = self.gaussians(2_000_000)
        assert stats.kstest(x, "norm").pvalue > 1e-6
        for cut in (3.0, 4.5):
            seen = int((np.abs(x) > cut).sum())
            assert stats.binomtest(seen, len(x), 2 * stats.norm.sf(cut)).pvalue > 1e-6
        for lag in (1, 8192):
            correlation = np.mean(x[:-lag] * x[lag:]) * np.sqrt(len(x) - lag)
            assert abs(correlation) < stats.norm.isf(5e-7)

    def test_bits_are_pinned(self):
        """The bits are part of the protocol: changing them needs a new version in the contexts."""
        import hashlib

        total = np.zeros(100_001)
        add_gaussians(pair_stream(bytes(range(32)), 7, len(total)).fill, total, 1024.0)
        assert hashlib.sha256(total.astype("<f8").tobytes()).hexdigest() == PINNED

    @pytest.mark.parametrize("sign", [1.0, -1.0])
    @pytest.mark.parametrize("length", [1, 2, 3, 1025, streams.BLOCK - 1, 2 * streams.BLOCK + 7])
    @pytest.mark.parametrize(("scale", "small"), [(1024.0, True), (70_000.3, False), (2.0**46, False)])
    def test_compiled_they_are_the_same_to_the_bit(self, length, sign, scale, small, monkeypatch):
        """Also where a block has words with a further one; what is there already is added to."""
        system, totals = np.random.default_rng(length), []
        words = system.integers(0, 2**64, 3 * streams.BLOCK, dtype=np.uint64)
        words[: length // 2 if small else 0 : 3] >>= np.uint64(30)
        monkeypatch.setattr(streams, "FEW", 0)
        for way in (kernels, None):
            rest = memoryview(words.tobytes())

            def fill(out):
                nonlocal rest
                out[:], rest = rest[: len(out)], rest[len(out) :]

            monkeypatch.setattr(streams, "_checked_kernels", lambda way=way: way)
            total = np.arange(length, dtype=float)
            add_gaussians(fill, total, scale, sign)
            totals.append(total)
        assert np.array_equal(*totals)
        assert length == 1 or not np.array_equal(totals[0], np.arange(length))

    def test_a_compiler_that_gives_other_bits_is_not_used(self, monkeypatch):
        class Fused:
            @staticmethod
            def add_pairs(radii, words, scale, sign, cosines, sines):
                kernels.add_pairs(radii, words, scale * (1 + 2.0**-52), sign, cosines, sines)

        assert streams._checked_kernels.__wrapped__() is kernels
        monkeypatch.setattr(streams.importlib, "import_module", lambda name: Fused)
        assert streams._checked_kernels.__wrapped__() is None

    @pytest.mark.parametrize("error", [ImportError, RuntimeError, OSError])
    def test_without_a_compiler_or_a_place_for_what_it_makes_there_is_noise(self, error, monkeypatch):
        """Numba refuses, as a RuntimeError, to compile where it may write nothing."""

        def refuse(name):
            raise error("cannot cache function 'add_pairs': no locator available")

        monkeypatch.setattr(streams.importlib, "import_module", refuse)
        assert streams._checked_kernels.__wrapped__() is None

    def test_streams_differ_by_round_dim_and_key(self):
        found = []
        for key, round_, dim in ((b"a" * 32, 1, 9), (b"b" * 32, 1, 9), (b"a" * 32, 2, 9), (b"a" * 32, 1, 10)):
            total = np.zeros(dim)
            add_gaussians(pair_stream(key, round_, dim).fill, total, SCALE)
            found.append(float(total[0]))
        assert len(set(found)) == 4


class TestSecretNoise:
    def test_pairs_cancel_bit_for_bit(self):
        law = NoiseLaw(sigma_cor=0.7)
        nodes = nodes_of(2)
        first, second = (node.draw(law, (node.index,), 50_001, 3, CPU) for node in nodes)
        assert torch.equal(first, -second)

    def test_the_sum_of_all_pairwise_noise_is_exactly_zero(self):
        nodes = nodes_of(7)
        total = np.zeros(1000)
        for node in nodes:
            for partner, key in node.pairs.items():
                sign = 1.0 if node.index < partner else -1.0
                add_gaussians(pair_stream(key, 1, 1000).fill, total, 1024.0, sign)
        assert not total.any()

    @pytest.mark.parametrize("graph", [SecretGraph.complete(8), SecretGraph.ring(8, 4)])
    def test_covariance_is_the_graphs(self, graph):
        law = NoiseLaw(0.4, 0.9)
        nodes = nodes_of(8, graph)
        noise = torch.cat([node.draw(law, (node.index,), 40_000, 1, CPU) for node in nodes])
        check_covariance(noise.double().numpy(), covariance(graph, law, senders=range(8)))

    def test_q_colluders_leave_exactly_the_predicted_residual(self):
        """The server, with the keys of clients 0 and 1, subtracts what it can; the rest has the predicted Σ.

        Clients 2 and 3 are Byzantine but keep their secrets: their messages are not looked at.
        """
        law, dim = NoiseLaw(0.3, 0.8), 40_000
        nodes = nodes_of(9)
        honest = range(4, 9)
        residual = np.empty((5, dim))
        for row, i in enumerate(honest):
            residual[row] = nodes[i].draw(law, (i,), dim, 1, CPU)[0].double().numpy()
            for colluder in (0, 1):
                stream = np.zeros(dim)
                scale = in_steps(law.sigma_cor, step_for(law))
                add_gaussians(pair_stream(nodes[colluder].pairs[i], 1, dim).fill, stream, scale)
                residual[row] += stream * step_for(law)  # the larger index had subtracted it
        check_covariance(residual, covariance(SecretGraph.complete(9), law, senders=honest, known=(0, 1)))

    def test_stacked_reproduces_every_node_bit_for_bit(self):
        law = NoiseLaw(0.5, 0.25)
        nodes = nodes_of(6)
        stacked = StackedSecretNoise.of(nodes)
        together = stacked.draw(law, (4, 0, 2), 3001, 9, CPU)
        for row, i in enumerate((4, 0, 2)):
            assert torch.equal(together[row], nodes[i].draw(law, (i,), 3001, 9, CPU)[0])

    def test_a_round_is_drawn_once(self):
        node = nodes_of(2)[0]
        node.draw(NoiseLaw(1.0, 1.0), (0,), 5, 4, CPU)
        for round_ in (4, 3):
            with pytest.raises(PrivacyError, match="once only"):
                node.draw(NoiseLaw(1.0, 1.0), (0,), 5, round_, CPU)
        node.draw(NoiseLaw(1.0, 1.0), (0,), 5, 5, CPU)

    def test_independent_noise_is_fresh_from_the_system(self):
        first, second = (
            SecretNoise(0, {}).draw(NoiseLaw(2.0), (0,), 100_000, 1, CPU)[0].double().numpy()
            for _ in range(2)
        )
        check_covariance(np.stack([first, second]), 4.0 * np.eye(2))

    def test_silence_is_exact_and_draws_nothing(self):
        node = SecretNoise(1, {0: bytes(32)})
        assert not node.draw(NoiseLaw(), (1,), 7, 0, CPU).any()
        assert not StackedSecretNoise.of([node]).draw(NoiseLaw(), (0, 1), 7, 0, CPU).any()

    @pytest.mark.parametrize(("law", "partners"), [(NoiseLaw(1.0, 2.0**40), 2), (NoiseLaw(1.0, 2.0**35), 60)])
    def test_what_doubles_do_not_hold_exactly_is_refused(self, law, partners):
        """From 2⁵¹ on the ways to round differ; from 2⁵³ on sums do not hold every integer."""
        keys = {partner: bytes(32) for partner in range(1, 1 + partners)}
        node = SecretNoise(0, keys, bytes(32))
        stacked = StackedSecretNoise({(0, partner): key for partner, key in keys.items()}, {0: bytes(32)})
        for source in (node, stacked):
            with pytest.raises(PrivacyError, match="too far apart"):
                source.draw(law, (0,), 4, round_=3, device=CPU)
        node.draw(NoiseLaw(1.0, 1.0), (0,), 4, round_=3, device=CPU)  # what was refused is not over

    def test_bad_input_says_why(self):
        node = SecretNoise(1, {})
        with pytest.raises(UserError, match="client 1 only"):
            node.draw(NoiseLaw(1.0), (0,), 7, 0, CPU)
        with pytest.raises(PrivacyError, match="agree on pair keys first"):
            node.draw(NoiseLaw(1.0, 1.0), (1,), 7, 0, CPU)
        with pytest.raises(UserError, match="cannot be reproduced"):
            StackedSecretNoise.of([node]).draw(NoiseLaw(1.0), (1,), 7, 0, CPU)
        with pytest.raises(UserError, match="different keys"):
            StackedSecretNoise.of([SecretNoise(0, {1: b"a" * 32}), SecretNoise(1, {0: b"b" * 32})])


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_noise_is_the_same_to_the_bit_for_any_number_of_threads(threads):
    """Sums of integers: whoever adds which streams. Longer than a piece, and not a multiple of a block."""
    pairs = {partner: bytes([partner] * 32) for partner in (0, 1, 3, 4, 5)}
    law, dim = NoiseLaw(0.3, 0.7), PIECE + 12_345
    one, more = (SecretNoise(2, pairs, bytes(32), threads=number) for number in (1, threads))
    asked = (law, 2.0**-12, (2,), dim, 5, torch.device("cpu"))
    assert torch.equal(one.steps(*asked), more.steps(*asked))


def test_a_round_asked_for_in_pieces_is_over_at_once():
    source = SecretNoise(0, {1: bytes(32)})
    source.pieces(NoiseLaw(sigma_cor=1.0), 2.0**-12, (0,), 4, 1)
    with pytest.raises(PrivacyError, match="is over"):
        source.pieces(NoiseLaw(sigma_cor=1.0), 2.0**-12, (0,), 4, 1)
