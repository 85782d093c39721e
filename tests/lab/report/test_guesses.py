"""Newcomers' guesses on images, and what a larger ν gains per round and costs per gradient."""

import base64
import shutil
import struct
import zlib

import numpy as np
import pytest

import nufed
from nufed.data import omniglot14
from nufed.errors import RunError
from nufed.lab.analysis.comparison import gain_of_steps
from nufed.lab.report.charts import _png
from nufed.lab.report.headline import gains_and_costs
from nufed.lab.runs import load_run

TINY = [
    "rounds=5",
    "eval_every=1",
    "eval_agents=4",
    "seeds=[0, 1, 2]",
    "data.args.tasks=1",
    "data.args.ways=5",
    "eval_steps=3",
    "method.batch_size=25",
    "method.local_steps=1",
    "workers=1",
    'baselines=["centroid"]',
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return nufed.run("omniglot", TINY, out=tmp_path_factory.mktemp("first") / "run")


def test_the_preset_draws_guesses_of_newcomers_on_their_test_images(run):
    trained = run.methods["gmeta"][0]
    assert len(trained.guesses) == 3
    for each in trained.guesses:
        assert each.agent in run.splits[0].unseen and len(each.guessed) == 4
        assert len(set(each.labels)) == len(each.labels) == 4 and each.classes == tuple(range(5))
        assert all(len(image) == 2 * 14 * 14 for image in each.images)
    page = (run.path / "report.html").read_text()
    assert "data:image/png;base64," in page and "test drawings of 3 newcomers" in page


def test_damaged_guesses_are_refused(run, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(run.path, path)
    file = path / "methods/gmeta/seed-0/guesses.jsonl"
    file.write_text(file.read_text().replace("[", "[9, ", 1))
    with pytest.raises(RunError, match=r"guesses\.jsonl"):
        load_run(path)


def test_the_gain_per_round_and_its_cost_are_those_of_the_curves(run):
    gain = gain_of_steps(run)
    assert (gain.many, gain.one, gain.group) == ("gmeta", "per-fedavg", "unseen")
    assert (gain.rounds, gain.work, gain.equal_round) == (5, 2.5, 2)  # 10 to 4 gradients

    def score(method, round):
        lines = (seed.metrics[round] for seed in run.methods[method].values())
        return np.array([line.evaluation["unseen"].score[3] for line in lines])

    for got, at in ((gain.per_round, 5), (gain.per_gradient, 2)):
        differences = score("gmeta", at) - score("per-fedavg", 5)
        assert got.mean == pytest.approx(differences.mean())
        assert got.half_width == pytest.approx(4.303 * differences.std(ddof=1) / 3**0.5, rel=1e-3)
    first, second = gains_and_costs(run)
    assert first.startswith("Per round, with the step sizes of training, the mean ")
    assert "after 5 rounds" in first
    assert second.startswith("It costs 2.5 times the gradients: at equal gradients (2 rounds")
    assert first.split(" is ")[0] in (run.path / "report.html").read_text()


def test_an_image_is_a_png_of_its_pixels():
    pixels = np.arange(14 * 12, dtype=np.uint8).reshape(14, 12)
    address = _png(pixels.tobytes().hex(), (14, 12))
    content = base64.b64decode(address.removeprefix("data:image/png;base64,"))
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (36, 42)
    (length,) = struct.unpack(">I", content[33:37])
    rows = np.frombuffer(zlib.decompress(content[41 : 41 + length]), np.uint8).reshape(42, 37)
    assert (rows[:, 0] == 0).all() and (255 - rows[::3, 1::3] == pixels).all()


def test_newcomers_may_have_fewer_drawings():
    data = omniglot14(ways=20, tasks=1, newcomer_samples=10, scale=2.5, shift=-0.5)
    names, counts = np.unique(data.owners, return_counts=True)
    assert {n for n, c in zip(names, counts, strict=True) if c == 200} == set(data.unseen_owners)
    assert set(counts) == {200, 400}
    inputs, _ = data.take(np.arange(5))
    assert set(inputs.unique().tolist()) == {-0.5, 2.0}
