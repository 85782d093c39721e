import itertools

import numpy as np

from nufed.seeding import stream, torch_seed


def test_a_stream_depends_on_all_its_arguments_and_nothing_else():
    places = list(itertools.product((0, 1), ("a", "b"), (0, 1), (0, 1), (0, 1)))
    np.random.seed(0)  # noqa: NPY002 - global state must not matter
    first = {place: stream(*place).integers(2**62) for place in places}
    np.random.seed(1)  # noqa: NPY002
    again = {place: stream(*place).integers(2**62) for place in reversed(places)}
    assert first == again
    assert len(set(first.values())) == len(places)


def test_neighbouring_streams_are_uncorrelated():
    draws = np.stack([stream(0, "x", agent=a).normal(size=400) for a in range(50)])
    correlation = np.corrcoef(draws) - np.eye(50)
    assert np.abs(correlation).max() < 5 / np.sqrt(400)


def test_torch_seeds_fit_torch():
    seeds = {torch_seed(stream(s, "model")) for s in range(100)}
    assert len(seeds) == 100 and all(0 <= s < 2**63 for s in seeds)
