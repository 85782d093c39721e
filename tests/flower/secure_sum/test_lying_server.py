"""What a lying server can learn from secure aggregation, over all its sequences of messages.

The server chooses every message to every site. Sites are the real ones: :mod:`secure_site` with its
files, keys and signatures answers or refuses a message, and its replies are what the server knows.
Of the n sites, all in the cohort, c collude: they sign whatever the server likes, and hand over
their keys and shares.

Within one attempt a site answers each phase once, so a sequence of messages is, but for its order,
a *story* for every honest site: the sites whose keys it was sent, those whose shares it was sent,
and those whose updates are said to have arrived. Every story is offered to a site, and all that it
accepts are tried, of all honest sites together, with these reductions:

* Every site is led as far as it goes: an answer never makes the server know less. Only what a site
  unmasked matters to later attempts.
* Whoever releases shares is in a group of sites that signed the same message. To the others any
  list may have been named: nobody counts their signatures.
* Sites are interchangeable: one honest site stands for all, and groups are tried up to renumbering.
* Colluding sites are in every story: that makes more sites, and the server knows their masks.

The server subtracts what it can recompute: own masks and masking keys with t shares, and masks that
are shared with colluding sites. It knows a sum if all masks left in it cancel: over the connected
components of sites by unknown pairwise masks, if every such mask is in both updates.

Two attempts at one round, in any order and in runs of their own (in the same run, sites discard the
secrets of the first), meet at a site in its list of unmasked sums only. So all pairs of outcomes
are compared, with the site's own answer to the second after the first.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, permutations, product
from types import SimpleNamespace

import pytest
import torch
from flwr.app import RecordDict
from flwr.common.secure_aggregation.crypto.shamir import combine_shares

from nufed.flower.app.payload import ARRAYS
from nufed.flower.app.registry import SECURE_SUM, SiteKeys
from nufed.flower.app.signatures import sign
from nufed.flower.ops.keys import make_site_key
from nufed.flower.secure_sum import masking, site as secure_site
from nufed.flower.secure_sum.masking import Advert, Unmasking, pairwise_mask
from nufed.flower.secure_sum.messages import (
    SECURE,
    Adverts,
    Confirmation,
    Confirmations,
    SealedShares,
    Survivors,
    read_secure,
    read_words,
    secure_record,
)
from nufed.flower.secure_sum.site import SecureRecord, _load
from nufed.flower.secure_sum.terms import SecureSumError, SumTerms, threshold
from nufed.flower.secure_sum.words import add, encode, mask, shape_of, subtract
from nufed.lab.files import canonical

BEFORE = {"model": torch.zeros(3)}
VECTORS = [{"model": torch.tensor([1.0, 0.1, -2.0]) * 3.0**site} for site in range(6)]
Sites = frozenset  # of numbers


@dataclass(frozen=True)
class Rules:
    """Whether sites behave as in version 1.

    Args:
        old_attempts: an attempt may be begun again, and confirmations are of terms and list only.
        old_sums: sums are listed by the bytes of the model, which -0.0 in place of 0.0 changes.
    """

    old_attempts: bool = False
    old_sums: bool = False


def old_message(own):
    return canonical("survivors", own.terms.digest.hex(), own.survivors)


@dataclass(frozen=True)
class Story:
    """The honest sites whose keys, shares and updates a site is told of; itself is in all."""

    keys: Sites
    shares: Sites
    updates: Sites = frozenset()

    def renumbered(self, new) -> "Story":
        return Story(*(frozenset(map(new, sites)) for sites in vars(self).values()))


@dataclass(frozen=True)
class Answer:
    """A site's reply, and its files after it."""

    files: dict[str, bytes]
    reply: RecordDict


def subsets(sites, within=()) -> Iterator[Sites]:
    """All sets of these sites that contain those of ``within``, smallest first."""
    rest = sorted(set(sites) - set(within))
    for number in range(len(rest) + 1):
        for chosen in combinations(rest, number):
            yield frozenset(chosen).union(within)


class Attempt:
    """Real sites in one attempt at the sum of round 1; :class:`SecureSumError` if one refuses.

    Args:
        folder: for the files of the sites.
        keys: where their private keys are.
        sites: their number n.
        colluding: the number c of those that collude, which are the first.
        rules: of the sites.
        number: of the attempt; every one is of a run of its own.
    """

    def __init__(self, folder, keys, sites, colluding=0, rules=Rules(), number=0):  # noqa: B008
        self.folder, self.keys, self.rules = folder, keys, rules
        self.everyone, self.colluders = Sites(range(sites)), Sites(range(colluding))
        self.honest = self.everyone - self.colluders
        self.threshold = threshold(sites)
        lines = tuple((keys / f"{i}.pub").read_text().strip() for i in range(sites))
        self.plan = SimpleNamespace(
            site_keys=SiteKeys(lines),
            cohort=sites,
            seen=range(sites),
            rounds=1,
            # sums are listed by seed and round; by the bytes of the model: every attempt has others
            seed=number if rules.old_sums else 0,
            deadline=60.0,
            algorithm=SimpleNamespace(sent_in=lambda round: ("model",)),
        )
        self.terms = SumTerms(f"{number:032x}", 1, "a" * 32, tuple(range(sites)))
        self.messages, self._answers = 0, {}
        self.first: dict[int, Answer] = {}
        self.banked: dict[tuple[int, Sites], bytes] = {}
        self._begin()
        with suppress(SecureSumError):  # as many passes before the last as sites allow
            for told in subsets(self.honest):
                if len(told) + colluding >= self.threshold:
                    story = Story(self.honest, self.honest, told)
                    signed = {(site, told): self._signature(site, story) for site in told}
                    self._begin()
                    self.banked |= signed

    def _begin(self):
        """Phase 1 at every site."""
        files = {site: self.first[site].files if self.first else {} for site in self.everyone}
        if self.rules.old_attempts:  # secrets were overwritten, and ids not kept
            files = {site: {} for site in files}
        ask = secure_site.advertise_keys
        self.first = {site: self._ask(site, files[site], ask, self.terms) for site in files}
        self._answers.clear()

    def _ask(self, site, files, answer, value) -> Answer:
        """Send a message to a site with these files."""
        self.messages += 1
        own = SimpleNamespace(
            folder=self.folder / f"{site}", agent=site, plan=self.plan, key=self.keys / f"{site}"
        )
        names = [f"{self.terms.run}/secure-agent-{site}", f"secure-sums-{site}"]
        for path in map(own.folder.joinpath, names):
            path.unlink(missing_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (own.folder / name).write_bytes(content)
        reply = answer(own, RecordDict({SECURE: secure_record(value)}))
        kept = [name for name in names if (own.folder / name).exists()]
        return Answer({name: (own.folder / name).read_bytes() for name in kept}, reply)

    def _once(self, key, make):
        if key not in self._answers:
            try:
                self._answers[key] = make()
            except SecureSumError as error:
                self._answers[key] = error
        if isinstance(self._answers[key], SecureSumError):
            raise self._answers[key]
        return self._answers[key]

    def _value(self, kind, content):
        return kind(self.terms.run, self.terms.attempt, content)

    def shared(self, site, keys) -> Answer:
        """Phase 2."""

        def make():
            sent = sorted(keys | self.colluders)
            adverts = {other: read_secure(self.first[other].reply, Advert) for other in sent}
            value = self._value(Adverts, adverts)
            return self._ask(site, self.first[site].files, secure_site.share_secrets, value)

        return self._once((site, keys), make)

    def masked(self, site, story) -> Answer:
        """Phase 3."""

        def answer(own, request):
            words = secure_site.mask_update(own, request, 1, VECTORS[site], BEFORE)
            return RecordDict({ARRAYS: words})

        def make():
            before, sealed = self.shared(site, story.keys).files, {}
            for other in sorted((story.shares | self.colluders) - {site}):
                reply = self.shared(other, self.honest | {other}).reply
                sealed[other] = read_secure(reply, SealedShares).sealed[site]
            return self._ask(site, before, answer, self._value(SealedShares, sealed))

        return self._once((site, story.keys, story.shares), make)

    def confirmed(self, site, story) -> Answer:
        """Phase 4."""

        def make():
            value = self._value(Survivors, tuple(sorted(story.updates | self.colluders)))
            return self._ask(site, self.masked(site, story).files, secure_site.confirm_sum, value)

        return self._once((site, story), make)

    def _signature(self, site, story):
        return read_secure(self.confirmed(site, story).reply, Confirmation).signature

    def released(self, site, story, signers, sums=None) -> Answer:
        """Phase 5, with the signatures of ``signers``, which were told the same.

        Colluding sites sign what this site did; of others, signatures of earlier passes are sent.
        ``sums`` are the site's files from another attempt.
        """

        def make():
            before = self.confirmed(site, story)
            message = masking.confirmed_message(self.secrets(site, before))
            same = replace(story, shares=story.keys)
            signed = {
                other: self._signature(other, same)
                if other in signers
                else self.banked.get((other, story.updates), b"")
                for other in story.updates
            }
            for other in self.colluders:
                signed[other] = sign(self.keys / f"{other}", SECURE_SUM, message)
            value = self._value(Confirmations, signed)
            files = {**before.files, **(sums or {})}
            return self._ask(site, files, secure_site.unmask_sum, value)

        return make() if sums else self._once((site, story, signers), make)

    def secrets(self, site, answer):
        """The secrets in a site's file."""
        path = self.folder / "read"
        path.write_bytes(answer.files[f"{self.terms.run}/secure-agent-{site}"])
        return _load(path, SecureRecord()).secrets


@dataclass(frozen=True)
class Outcome:
    """Honest sites by the list for which they released shares, and those of a sum thus known."""

    released: Sites  # of pairs: site, list
    known: Sites


class Explorer:
    """All that a server can make of one attempt.

    Args:
        attempt: with real sites.
        whole: sites are told that all sent keys and shares, and lie about updates only.
    """

    def __init__(self, attempt, whole=False):
        self.attempt, self.whole, self.tried = attempt, whole, 0
        self.honest, self.stands = sorted(attempt.honest), min(attempt.honest)
        self._views = dict(self._accepted())
        self.lists, self.shares_of = cache(self.lists), cache(self.shares_of)

    def _accepted(self):
        """What one honest site accepts: (keys, shares) with the lists that it signs."""
        ask, site = self.attempt, self.stands
        views = [self.attempt.honest] if self.whole else list(subsets(self.honest))
        for keys, shares in product(views, views):
            with suppress(SecureSumError):
                ask.masked(site, Story(keys | {site}, shares | {site}))
                lists = []
                for told in subsets(self.honest):
                    with suppress(SecureSumError):
                        ask.confirmed(site, Story(keys | {site}, shares | {site}, told))
                        lists.append(told)
                yield (keys | {site}, shares | {site}), lists

    def _as(self, site):
        """Exchanges the numbers of a site and of the one that stands for all."""
        pair = {site: self.stands, self.stands: site}
        return lambda number: pair.get(number, number)

    def lists(self, site, keys, shares):
        """The lists that a site signs after being told these keys and shares; None: it refuses."""
        new = self._as(site)
        view = Story(keys, shares).renumbered(new)
        found = self._views.get((view.keys, view.shares))
        return None if found is None else [frozenset(map(new, told)) for told in found]

    def shares_of(self, site, story, signers):
        """The sites of which a site releases a share: of their own mask, of their masking key."""
        new = self._as(site)
        with suppress(SecureSumError):
            told = story.renumbered(new), frozenset(map(new, signers))
            reply = self.attempt.released(self.stands, *told).reply
            parts = vars(read_secure(reply, Unmasking)).values()
            return tuple(frozenset(map(new, part)) & self.attempt.honest for part in parts)
        return None

    def groups(self) -> Iterator[list[Sites]]:
        """Disjoint groups of sites that release shares, up to renumbering; few groups first."""
        everyone = self.attempt.honest
        story = Story(everyone, everyone, everyone)
        sizes = range(1, len(everyone) + 1)
        least = next(
            (k for k in sizes if self.shares_of(self.stands, story, Sites(self.honest[:k]))), 0
        )

        def parts(left, most):
            yield ()
            for size in range(min(left, most), least - 1, -1):
                yield from ((size, *more) for more in parts(left - size, size))

        for found in sorted(parts(len(everyone), len(everyone)), key=len):
            numbers = iter(self.honest)
            if found and least:  # else nobody releases anything
                yield [Sites(next(numbers) for _ in range(size)) for size in found]

    def outcomes(self) -> Iterator[tuple[dict[int, Story], Outcome]]:
        """Every outcome in which a sum is known, with the stories told."""
        for groups in self.groups():
            rest = sorted(self.attempt.honest.difference(*groups))
            views = [list(self._group_views(group)) for group in groups]
            others = [{keys for keys, _ in self._told(site)} for site in rest]
            for chosen in product(*views, *others):
                told = dict(zip(rest, chosen[len(groups) :], strict=True))
                lists = {}
                for group, (keys, updates) in zip(groups, chosen, strict=False):
                    told |= dict.fromkeys(group, keys)
                    lists |= dict.fromkeys(group, updates)
                yield from self._played(groups, told, lists)

    def _told(self, site):
        new = self._as(site)
        for keys, shares in self._views:
            yield frozenset(map(new, keys)), frozenset(map(new, shares))

    def _group_views(self, group):
        """The keys and lists that all sites of a group can be told."""
        found = {
            (keys, updates)
            for keys, shares in self._told(min(group))
            for updates in self.lists(min(group), keys, shares)
        }
        return sorted((pair for pair in found if group <= pair[0] & pair[1]), key=_by_size)

    def _played(self, groups, keys, lists):
        """The outcomes with these keys and lists, for all ways to pass shares on."""
        sent = {site: {other for other in keys if site in keys[other]} for site in keys}
        ways = {site: [] for site in keys}
        for site, told in keys.items():
            for shares in subsets(sent[site] & told, {site}):
                signs = self.lists(site, told, shares)
                if signs is not None and (site not in lists or lists[site] in signs):
                    ways[site].append(shares)
        masking_sites = [site for site in keys if ways[site]]
        if any(site not in masking_sites for site in lists):
            return
        for chosen in product(*(ways[site] for site in masking_sites)):
            shares = dict(zip(masking_sites, chosen, strict=True))
            stories = {s: Story(keys[s], shares[s], lists.get(s, Sites())) for s in shares}
            found = [self.shares_of(s, stories[s], group) for group in groups for s in group]
            if not all(found):
                continue  # a site refuses: this is the same as without its group
            self.tried += 1
            for known in self._known(shares, found):
                yield stories, Outcome(Sites(lists.items()), known)

    def _known(self, shares, found) -> list[Sites]:
        """The sets of honest sites whose sums the server can compute."""
        enough = self.attempt.threshold - len(self.attempt.colluders)
        own, keys = (
            {site for site in self.honest if sum(site in part[kind] for part in found) >= enough}
            for kind in (0, 1)
        )
        masks = {s: () if s in keys else shares[s] - keys - {s} for s in shares if s in own}
        while True:  # leave out updates with a mask that nothing cancels
            open_ = {s for s, to in masks.items() if any(s not in masks.get(o, ()) for o in to)}
            if not open_:
                break
            masks = {site: to for site, to in masks.items() if site not in open_}
        sums = []
        while masks:
            reached = {next(iter(masks))}
            while more := {other for site in reached for other in masks[site]} - reached:
                reached |= more
            sums.append(Sites(reached))
            masks = {site: to for site, to in masks.items() if site not in reached}
        return sums


def _by_size(sets):
    return [(len(each), sorted(each)) for each in reversed(sets)]


class Guard:
    """Whether a site that unmasked a sum over a list unmasks one of the same round over another."""

    def __init__(self, first, second):
        self._first, self._second, self._known = first, second, {}

    def __call__(self, one, other):
        key = len(one), len(other), len(one & other)
        if key not in self._known:
            self._known[key] = self._ask(*key)
        return self._known[key]

    def _ask(self, one, other, both):
        site, *_ = numbers = sorted(self._first.honest)
        first, second = Sites(numbers[:one]), Sites(numbers[:both] + numbers[one:][: other - both])
        stories = [Story(Sites(numbers), Sites(numbers), told) for told in (first, second)]
        self._second.released(site, stories[1], second)
        files = self._first.released(site, stories[0], first).files
        sums = {name: content for name, content in files.items() if "secure-sums" in name}
        assert sums
        with suppress(SecureSumError):
            return bool(self._second.released(site, stories[1], second, sums))
        return False


def two_sums(explorer, found, allowed, sites=None) -> Iterator[tuple[Sites, Sites]]:
    """Sums over different sites that two attempts can yield, of cohorts of these sites.

    To the server's advantage, any ``least`` of the sites that release shares are enough.
    """
    colluding, honest = len(explorer.attempt.colluders), explorer.honest
    least = explorer.attempt.threshold - colluding
    numbers = range(colluding, sites or len(explorer.attempt.everyone))
    for one, other in product(found, repeat=2):
        first = dict(one.released)
        for chosen in permutations(numbers, len(honest)):
            new = dict(zip(honest, chosen, strict=True))
            known = Sites(new[site] for site in other.known)
            second = {new[s]: Sites(new[each] for each in told) for s, told in other.released}
            both = first.keys() & second.keys()
            refused = sum(not allowed(first[site], second[site]) for site in both)
            if known != one.known and len(first) + len(second) - refused >= 2 * least:
                yield one.known, known


def computed(attempt, stories, known):
    """The sum over sites as the server computes it, from replies alone."""
    terms, needed = attempt.terms, attempt.threshold
    like = encode(VECTORS[0], BEFORE, len(terms.sites))
    adverts = {s: read_secure(attempt.first[s].reply, Advert) for s in terms.sites}
    released = []
    for site, story in stories.items():
        same = Sites(s for s in stories if stories[s].updates == story.updates)
        with suppress(SecureSumError):
            released.append(read_secure(attempt.released(site, story, same).reply, Unmasking))
    total = like - like
    for site in known:
        reply = attempt.masked(site, stories[site]).reply
        total = add(total, read_words(reply, shape_of(BEFORE, len(terms.sites))))
        shares = [each.own[site] for each in released if site in each.own]
        total = subtract(total, mask(combine_shares(shares[:needed]), like.shape))
        for other in stories[site].shares - known:
            shares = [each.masking[other] for each in released if other in each.masking]
            private = combine_shares(shares[:needed])
            pair = pairwise_mask(terms, other, private, site, adverts[site].masking, like)
            total = subtract(total, pair) if site < other else add(total, pair)
    return total


def true_sum(known, sites):
    total = encode(VECTORS[0], BEFORE, sites) * 0
    for site in known:
        total = add(total, encode(VECTORS[site], BEFORE, sites))
    return total


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Private key files of six sites."""
    folder = tmp_path_factory.mktemp("keys")
    for site in range(6):
        make_site_key(folder / f"{site}")
    return folder


@pytest.fixture
def begin(keys, tmp_path, monkeypatch):
    """Begins an attempt; signatures are verified once."""
    monkeypatch.setattr(SiteKeys, "verify", cache(SiteKeys.verify))

    def attempt(sites, colluding=0, rules=Rules(), number=0):  # noqa: B008
        if rules.old_attempts:
            monkeypatch.setattr(masking, "confirmed_message", old_message)
        return Attempt(tmp_path, keys, sites, colluding, rules, number)

    return attempt


BOUNDS = [(n, c) for n in (4, 5, 6) for c in range(2 * threshold(n) - n)]
FULL = [pytest.param(n, c, marks=[pytest.mark.slow] * (n == 6)) for n, c in BOUNDS]


@pytest.mark.parametrize(("sites", "colluding"), FULL)
def test_no_sequence_of_messages_yields_a_small_sum_or_two_of_a_round(sites, colluding, begin):
    explorer = Explorer(begin(sites, colluding))
    found = {outcome: stories for stories, outcome in explorer.outcomes()}
    second = begin(sites, colluding, number=1)
    print(
        f"n = {sites}, c = {colluding}: {explorer.tried:,} sets of stories, "
        f"{explorer.attempt.messages + second.messages:,} messages, {len(found)} outcomes"
    )
    assert not explorer.attempt.banked  # no attempt is begun twice
    assert min(len(outcome.known) for outcome in found) == threshold(sites) - colluding
    assert max(len(outcome.known) for outcome in found) == sites - colluding
    for outcome in found:  # the list that sites confirmed is what is summed
        assert {told for _, told in outcome.released} == {outcome.known}
    assert not list(two_sums(explorer, found, Guard(explorer.attempt, second)))


@pytest.mark.parametrize(("sites", "colluding"), [(6, 0), (6, 1)])
def test_lies_about_updates_alone_yield_nothing_of_six_sites(sites, colluding, begin):
    explorer = Explorer(begin(sites, colluding), whole=True)
    found = {outcome for _, outcome in explorer.outcomes()}
    assert min(len(outcome.known) for outcome in found) == threshold(sites) - colluding
    guard = Guard(explorer.attempt, begin(sites, colluding, number=1))
    assert not list(two_sums(explorer, found, guard))


def test_what_the_explorer_calls_known_is_what_the_server_can_compute(begin):
    explorer = Explorer(begin(5), whole=True)
    for stories, outcome in explorer.outcomes():
        total = computed(explorer.attempt, stories, outcome.known)
        assert (total == true_sum(outcome.known, 5)).all()


@pytest.mark.slow
def test_with_the_old_rule_for_attempts_the_sum_over_three_of_six_sites_is_found(begin):
    """Attempts that are begun again yield confirmations of several lists, which are replayed."""
    explorer = Explorer(begin(6, rules=Rules(old_attempts=True)), whole=True)
    assert explorer.attempt.banked
    found = ((s, outcome) for s, outcome in explorer.outcomes() if len(outcome.known) < 4)
    stories, outcome = next(found)
    assert len(outcome.known) == 3
    total = computed(explorer.attempt, stories, outcome.known)
    assert (total == true_sum(outcome.known, 6)).all()


def test_with_the_old_rule_for_sums_the_update_of_one_site_is_found(begin):
    """-0.0 in place of 0.0 makes it another model: sums over six sites, then over five."""
    rules = Rules(old_sums=True)
    explorer = Explorer(begin(6, rules=rules), whole=True)
    found = {outcome for _, outcome in explorer.outcomes()}
    guard = Guard(explorer.attempt, begin(6, rules=rules, number=1))
    assert any(
        len(one - other) == 1 > len(other - one) for one, other in two_sums(explorer, found, guard)
    )


@pytest.mark.parametrize(
    ("check", "sites", "colluding", "whole"),
    [("sent their shares", 4, 0, False), ("confirmed the same sum", 6, 1, True)],
)
def test_without_one_of_the_checks_a_smaller_sum_is_found(
    check, sites, colluding, whole, begin, monkeypatch
):
    right = SumTerms.check_enough
    monkeypatch.setattr(
        SumTerms, "check_enough", lambda self, n, what: what == check or right(self, n, what)
    )
    explorer = Explorer(begin(sites, colluding), whole)
    least = threshold(sites) - colluding
    assert any(len(outcome.known) < least for _, outcome in explorer.outcomes())


def test_the_bound_on_colluding_sites_is_tight(begin):
    """With c = 2t - n, sites that are told different lists reveal the update of one."""
    explorer = Explorer(begin(6, 2))
    assert any(len(outcome.known) == 1 for _, outcome in explorer.outcomes())


@pytest.mark.parametrize(("sites", "colluding", "all_sites", "least"), [(4, 0, 6, 4), (6, 1, 7, 2)])
def test_sums_over_two_cohorts_of_a_round_never_contain_one_another(
    sites, colluding, all_sites, least, begin
):
    """If cohorts are smaller than all sites a lying server can name two: docs/privacy.md."""
    explorer = Explorer(begin(sites, colluding), whole=True)
    found = {outcome for _, outcome in explorer.outcomes()}
    pairs = list(two_sums(explorer, found, lambda one, other: one == other, all_sites))
    assert not any(one <= other or other <= one for one, other in pairs)
    assert min(len(one ^ other) for one, other in pairs) == least
