"""The protocol in memory: equal bits, dropouts, refusals, and what the server sees."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from nufed.algorithms.fixed_point import fixed_point_mean
from nufed.flower.secure_sum import words
from nufed.flower.secure_sum.masking import (
    Advert,
    advertise,
    confirm,
    masked,
    share,
    signed_message,
    unmask,
)
from nufed.flower.secure_sum.server import routed, unmasked_sum
from nufed.flower.secure_sum.terms import SecureSumError, SumTerms

KEYS = [Ed25519PrivateKey.generate() for _ in range(12)]


def verify(site, message, signature):
    try:
        KEYS[site].public_key().verify(signature, message)
    except Exception:
        return False
    return True


def terms_of(sites, attempt="a" * 32):
    return SumTerms("0" * 32, 1, attempt, tuple(sites))


def run_sum(inputs, before, lost=((), (), (), (), ()), attempt="a" * 32):
    """The means and the server's view; ``lost`` are the sites that drop out in each phase."""
    terms = terms_of(sorted(inputs), attempt)
    alive = [s for s in terms.sites if s not in lost[0]]
    states, adverts = {}, {}
    for site in alive:
        states[site], adverts[site] = advertise(terms, site, KEYS[site].sign)
    alive = [s for s in alive if s not in lost[1]]
    sealed = {}
    for site in alive:
        states[site], sealed[site] = share(states[site], adverts, verify)
    boxes, shared = routed(sealed), frozenset(sealed)
    alive = [s for s in alive if s not in lost[2]]
    sent = {}
    for site in alive:
        numbers = words.encode(inputs[site], before, len(terms.sites))
        states[site], sent[site] = masked(states[site], boxes[site], numbers)
    alive = [s for s in alive if s not in lost[3]]
    signed = {}
    for site in alive:
        states[site], signed[site] = confirm(states[site], frozenset(sent), KEYS[site].sign)
    alive = [s for s in alive if s not in lost[4]]
    released = {}
    for site in alive:
        states[site], released[site] = unmask(states[site], signed, verify)
    total = unmasked_sum(terms, adverts, shared, sent, released)
    return words.decode_means(total, before, len(sent)), sent, released


def inputs_of(sites, dtype=torch.float32, seed=0, numbers=40):
    rng = torch.Generator().manual_seed(seed)

    def vector(scale):
        return scale * torch.randn(numbers, generator=rng, dtype=torch.float64).to(dtype)

    return {site: {"model": vector(1.0), "control": vector(1e-3)} for site in sites}


def zeros(dtype=torch.float32, numbers=40):
    return {name: torch.zeros(numbers, dtype=dtype) for name in ("model", "control")}


def plain(inputs, before, sites):
    return {
        name: fixed_point_mean((inputs[site][name] for site in sites), before[name])
        for name in before
    }


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("sites", [range(3), (1, 4, 7, 9, 11)])
def test_the_mean_has_the_bits_of_the_mean_without_masks(dtype, sites):
    inputs, before = inputs_of(sites, dtype), zeros(dtype)
    found, _, _ = run_sum(inputs, before)
    assert equal(found, plain(inputs, before, sites))
    assert all(mean.dtype == dtype for mean in found.values())


@pytest.mark.parametrize("phase", range(5))
@pytest.mark.parametrize("count", [4, 9])
def test_a_third_may_drop_out_in_any_phase(phase, count):
    inputs, before = inputs_of(range(count)), zeros()
    gone = set(random.Random(phase).sample(range(count), count // 3))
    lost = [gone if p == phase else () for p in range(5)]
    found, sent, _ = run_sum(inputs, before, lost)
    assert set(sent) == set(range(count)) - (gone if phase < 3 else set())
    assert equal(found, plain(inputs, before, sent))


def test_dropouts_may_spread_over_the_phases():
    inputs, before = inputs_of(range(9)), zeros()
    found, sent, _ = run_sum(inputs, before, [(0,), (4,), (8,), (), ()])
    assert set(sent) == {1, 2, 3, 5, 6, 7}
    assert equal(found, plain(inputs, before, sent))


@pytest.mark.parametrize("phase", range(5))
def test_with_fewer_than_two_thirds_nothing_is_revealed(phase):
    inputs, before = inputs_of(range(9)), zeros()
    lost = [(1, 2, 3, 4) if p == phase else () for p in range(5)]
    with pytest.raises(SecureSumError, match=r"only 5 of 9 sites .*a secure sum needs 6"):
        run_sum(inputs, before, lost)


def test_sums_over_fewer_than_three_sites_are_refused():
    with pytest.raises(SecureSumError, match="over 2 sites is refused: it needs 3"):
        terms_of(range(2))
    inputs = inputs_of(range(3))
    with pytest.raises(SecureSumError, match="needs 3"):
        run_sum(inputs, zeros(), [(), (), (1,), (), ()])


def at_phase_three(sites=range(4)):
    """States after masked updates were sent."""
    terms, inputs, before = terms_of(sites), inputs_of(sites), zeros()
    made = {site: advertise(terms, site, KEYS[site].sign) for site in sites}
    adverts = {site: advert for site, (_, advert) in made.items()}
    shared = {site: share(made[site][0], adverts, verify) for site in sites}
    boxes = routed({site: sealed for site, (_, sealed) in shared.items()})
    numbers = {site: words.encode(inputs[site], before, len(sites)) for site in sites}
    return {site: masked(shared[site][0], boxes[site], numbers[site])[0] for site in sites}


def confirmed(states, stories):
    """States after phase 4, and the signatures; ``stories`` are the survivors told to each site."""
    made = {site: confirm(states[site], stories[site], KEYS[site].sign) for site in stories}
    return {s: state for s, (state, _) in made.items()}, {s: sig for s, (_, sig) in made.items()}


def test_a_site_never_releases_both_shares_of_another():
    survivors = frozenset({0, 1, 2})
    first = at_phase_three()
    states, signed = confirmed(first, dict.fromkeys((0, 1, 2), survivors))
    after, released = unmask(states[0], signed, verify)
    assert released.own.keys() == {0, 1, 2} and released.masking.keys() == {3}
    with pytest.raises(SecureSumError, match=r"phase 5 .* after phase 5"):
        unmask(after, signed, verify)
    for again in ({0, 1, 3}, {0, 1, 2, 3}):  # another story, before and after the release
        for state in (states[0], after):
            with pytest.raises(SecureSumError, match="phase 4 of this attempt was requested after"):
                confirm(state, frozenset(again), KEYS[0].sign)
    assert not after.shares and not after.own and not after.masking
    for wrong in ({1, 2, 3}, {0, 1, 2, 9}):
        with pytest.raises(SecureSumError, match="sent no shares"):
            confirm(first[0], frozenset(wrong), KEYS[0].sign)


def test_stories_that_differ_between_sites_release_nothing():
    """The server names different survivors to different sites, each list long enough."""
    everyone = frozenset(range(6))
    stories = {site: everyone - {(site + 1) % 6, (site + 2) % 6} for site in range(6)}
    states, signed = confirmed(at_phase_three(range(6)), stories)
    for state in states.values():
        with pytest.raises(SecureSumError, match="only 1 of 6 sites confirmed the same sum"):
            unmask(state, signed, verify)
    # half of them hear that site 3 dropped out
    halves = {site: everyone - {3} if site < 3 else everyone for site in range(6)}
    states, signed = confirmed(at_phase_three(range(6)), halves)
    for state in states.values():
        with pytest.raises(SecureSumError, match="only 3 of 6 sites confirmed the same sum"):
            unmask(state, signed, verify)


def test_confirmations_must_be_signed_by_the_sites_themselves():
    survivors = frozenset(range(4))
    states, signed = confirmed(at_phase_three(), dict.fromkeys(range(4), survivors))
    forged = {0: signed[0], 1: signed[0], 2: signed[0], 3: KEYS[8].sign(b"no")}
    for wrong in (forged, {0: signed[0], 5: signed[1]}, {}):
        with pytest.raises(SecureSumError, match="confirmed the same sum"):
            unmask(states[0], wrong, verify)


def test_confirmations_hold_for_the_keys_that_a_site_was_sent():
    """Of one attempt, the same survivors: signatures of other keys do not count."""
    everyone = frozenset(range(4))
    first, second = (
        confirmed(at_phase_three(), dict.fromkeys(range(4), everyone)) for _ in range(2)
    )
    for mixed in (first[1], {**first[1], 0: second[1][0]}, {**first[1], 0: second[1][0], 1: b""}):
        with pytest.raises(SecureSumError, match=r"only [01] of 4 sites confirmed the same sum"):
            unmask(second[0][0], mixed, verify)
    unmask(second[0][0], second[1], verify)


def test_what_is_signed_has_one_reading():
    """The borders between keys, sites and lists are part of it."""
    terms = terms_of(range(4))
    keys = [Advert(b"ab", b"c", b"d", b""), Advert(b"a", b"bc", b"d", b"")]
    assert len({signed_message(terms, 1, advert) for advert in keys}) == 2
    with pytest.raises(SecureSumError, match="32 hexadecimal digits"):
        terms_of(range(4), "a" * 31 + "\n")


def test_no_phase_is_answered_twice():
    terms, sites = terms_of(range(3)), range(3)
    made = {site: advertise(terms, site, KEYS[site].sign) for site in sites}
    adverts = {site: advert for site, (_, advert) in made.items()}
    after, _ = share(made[0][0], adverts, verify)
    with pytest.raises(SecureSumError, match=r"phase 2 .* after phase 2"):
        share(after, adverts, verify)
    states = at_phase_three(range(3))
    with pytest.raises(SecureSumError, match=r"phase 3 .* after phase 3"):
        masked(states[0], {}, np.zeros((1, 4), np.uint64))


def test_a_retry_has_fresh_masks():
    """Also with the same attempt id: two masked updates never differ by the updates alone."""
    inputs, before = inputs_of(range(3)), zeros()
    (first, one, _), (second, two, _) = (run_sum(inputs, before) for _ in range(2))
    assert equal(first, second)
    for site in range(3):
        assert not (one[site] == two[site]).any()


def test_keys_that_a_site_did_not_sign_are_refused():
    terms, sites = terms_of(range(4)), range(4)
    made = {site: advertise(terms, site, KEYS[site].sign) for site in sites}
    adverts = {site: advert for site, (_, advert) in made.items()}
    _, forged = advertise(terms, 2, KEYS[5].sign)  # the server's own keys in place of a site's
    _, other = advertise(terms_of(range(4), "b" * 32), 2, KEYS[2].sign)  # of another attempt
    swapped = adverts[3]  # another site's
    for wrong in (forged, other, swapped, replace(adverts[2], masking=forged.masking)):
        with pytest.raises(SecureSumError, match="the keys of site 2 are not signed by"):
            share(made[0][0], {**adverts, 2: wrong}, verify)
    with pytest.raises(SecureSumError, match="other keys of this site than its own"):
        share(made[0][0], {**adverts, 0: advertise(terms, 0, KEYS[0].sign)[1]}, verify)


def test_damaged_or_redirected_shares_are_refused():
    terms, sites = terms_of(range(3)), range(3)
    made = {site: advertise(terms, site, KEYS[site].sign) for site in sites}
    adverts = {site: advert for site, (_, advert) in made.items()}
    shared = {site: share(made[site][0], adverts, verify) for site in sites}
    boxes = routed({site: sealed for site, (_, sealed) in shared.items()})
    numbers = np.zeros((1, 4), np.uint64)
    text = boxes[0][1]
    for wrong in (text[:-1], text[:-1] + bytes([text[-1] ^ 1]), b"", boxes[0][2], boxes[2][1]):
        with pytest.raises(
            SecureSumError, match="share of site 1 is damaged or from another attempt"
        ):
            masked(shared[0][0], {**boxes[0], 1: wrong}, numbers)


def test_wrong_shares_are_noticed_and_named():
    states = at_phase_three(range(4))
    terms = states[0].terms
    survivors = frozenset(range(4))
    states, signed = confirmed(states, dict.fromkeys(range(4), survivors))
    released = {site: unmask(state, signed, verify)[1] for site, state in states.items()}
    adverts = states[0].adverts
    sent = dict.fromkeys(range(4), np.zeros((1, 4), np.uint64))
    share_of_2 = released[0].own[2]
    wrong = replace(
        released[0], own={**released[0].own, 2: share_of_2[:-1] + bytes([share_of_2[-1] ^ 1])}
    )
    with pytest.raises(SecureSumError, match="site 2"):
        unmasked_sum(terms, adverts, survivors, sent, {**released, 0: wrong})


def test_an_update_beyond_the_grid_is_refused_at_the_site():
    before = {"model": torch.zeros(3)}
    for bad in (2.0**16 * 1.01, float("nan"), float("-inf")):
        with pytest.raises(SecureSumError, match=r"beyond 6.6e\+04, the bound of this round"):
            words.encode({"model": torch.tensor([0.0, bad, 1.0])}, before, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_at_the_bound_do_not_overflow(dtype):
    sites, before = 127, {"model": torch.zeros(4, dtype=dtype)}
    bound = 2.0**16
    vectors = [torch.tensor([bound, -bound, 1e-9, -1.5], dtype=dtype)] * sites
    for count in (sites, 1000):  # one word, two words
        total = words.encode({"model": vectors[0]}, before, count)
        for vector in vectors[1:]:
            total = words.add(total, words.encode({"model": vector}, before, count))
        (mean,) = words.decode_means(total, before, sites).values()
        assert torch.equal(mean, fixed_point_mean(vectors, before["model"]))
    assert words.words_per_number({"model": torch.zeros(1)}, 127) == 1
    assert words.words_per_number({"model": torch.zeros(1)}, 128) == 2


@pytest.mark.parametrize("rows", [1, 2])
def test_words_are_integers_modulo_a_power_of_two(rows):
    rng, modulus = np.random.default_rng(0), 1 << (64 * rows)
    a, b = (rng.integers(0, 2**64, (rows, 50), dtype=np.uint64) for _ in range(2))
    a[:, 0] = b[:, 1] = 2**64 - 1
    a[:, 1] = b[:, 0] = 1

    def whole(x):
        return [sum(int(word) << (64 * i) for i, word in enumerate(column)) for column in x.T]

    pairs = list(zip(whole(a), whole(b), strict=True))
    assert whole(words.add(a, b)) == [(x + y) % modulus for x, y in pairs]
    assert whole(words.subtract(a, b)) == [(x - y) % modulus for x, y in pairs]


def test_the_server_sees_uniform_words(monkeypatch):
    """Bytes of masked updates by a χ² test, and no correlation with the update, with fixed keys.

    The update itself fails the same test.
    """
    rng = np.random.default_rng(1)
    monkeypatch.setattr(
        "nufed.flower.secure_sum.masking.secrets.token_bytes", lambda n: rng.bytes(n)
    )
    monkeypatch.setattr("nufed.flower.secure_sum.masking.new_private", lambda: rng.bytes(32))
    inputs = inputs_of(range(3), numbers=8000)
    before = zeros(numbers=8000)
    _, sent, _ = run_sum(inputs, before)

    def chi_square(array):
        counts = np.bincount(np.ascontiguousarray(array).view(np.uint8).ravel(), minlength=256)
        return float(((counts - counts.mean()) ** 2 / counts.mean()).sum())

    limit = 255 + 5 * (2 * 255) ** 0.5  # five standard deviations
    for site, array in sent.items():
        bare = words.encode(inputs[site], before, 3)
        assert chi_square(array) < limit < chi_square(bare)
        for other in sent.keys() - {site}:  # nor does the difference of two show anything
            assert chi_square(words.subtract(array, sent[other])) < limit
        seen, true = (x.view(np.int64).ravel().astype(float) for x in (array, bare))
        assert abs(np.corrcoef(seen, true)[0, 1]) < 5 / len(true) ** 0.5
