"""Augmentation: training batches alone, the same draws for every method, engine, worker, resume."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import nufed
from nufed import Federation, InputError, Objective, load_run
from nufed.data import as_samples, digits, make_split
from nufed.data.augmentation import CropFlip
from nufed.lab.config.trust import named_code
from nufed.models import fcnn
from nufed.seeding import stream
from nufed.simulation import GRAM, BatchedEngine, DirectEngine
from support import Killed, context, file_hashes, same, without_report


def noisy(inputs, rng):
    """One of one's own: noise on every input."""
    return inputs + torch.from_numpy(rng.normal(size=inputs.shape)).to(inputs.dtype)


def unchanged(inputs, rng):
    return inputs


def federation(augment, shift=0.0):
    """Digits as bytes at 6 agents."""
    rows = np.split(np.arange(6 * 40), 6)
    return Federation(digits(), make_split(rows, 0, validation=0.2, test=0.3), augment=augment)


@pytest.mark.parametrize("shape", [(32, 24), (3, 32, 32), (8, 8)])
def test_crop_flip_cuts_a_window_of_the_padded_image_and_flips_half(shape):
    images = torch.rand(200, *shape)
    changed = CropFlip(fill=-7.0)(images, np.random.default_rng(0))
    pad, flips, moves = max(1, shape[-2] // 8), [], set()
    for before, after in zip(images, changed, strict=True):
        padded = F.pad(before, (pad,) * 4, value=-7.0)
        found = [
            (top, left, flip)
            for top in range(2 * pad + 1)
            for left in range(2 * pad + 1)
            for flip in (False, True)
            if torch.equal(
                after.flip(-1) if flip else after,
                padded[..., top : top + shape[-2], left : left + shape[-1]],
            )
        ]
        assert len(found) == 1
        moves.add(found[0][:2])
        flips.append(found[0][2])
    assert 70 < sum(flips) < 130 and len(moves) > 8


def test_black_is_what_a_byte_of_0_becomes():
    images = torch.full((4, 8, 8), 200, dtype=torch.uint8)
    samples = nufed.Samples(images, torch.zeros(4).long(), ("a",), scale=2 / 255, shift=-1.0)
    assert CropFlip.of(samples).fill == -1.0
    assert CropFlip.of(as_samples((torch.rand(4, 8, 8), [0, 0, 0, 0]))).fill == 0.0
    with pytest.raises(
        InputError, match=r'data.augment = "crop_flip": needs images .* shape \(5,\)'
    ):
        CropFlip.of(as_samples((torch.rand(4, 5), [0, 0, 0, 0])))


def test_training_batches_are_changed_by_the_generator_of_their_seed_and_others_never():
    plain, changed = federation(None), federation(noisy)
    kept = changed.samples.inputs.clone()
    for use, seeds in (("train", 3), ("evaluate", 3), ("own", 3)):
        before, after = (each.batches(2, seeds, use, 4) for each in (plain, changed))
        pairs = [
            *zip(before.draw("a", 5, 2), after.draw("a", 5, 2), strict=True),
            *zip(before.epoch("b", 6), after.epoch("b", 6), strict=True),
            (before.take(np.arange(3), 9), after.take(np.arange(3), 9)),
        ]
        for old, new in pairs:
            assert old.seed == new.seed and torch.equal(old.targets, new.targets)
            right = noisy(old.inputs, stream(old.seed, "augment")) if use == "train" else old.inputs
            assert torch.equal(new.inputs, right)
        for old, new in ((before.whole(), after.whole()), (before.take([1]), after.take([1]))):
            assert torch.equal(old.inputs, new.inputs)  # not a training batch: without a seed
    assert torch.equal(changed.scored(1)[0], plain.scored(1)[0])
    assert torch.equal(changed.samples.inputs, kept)


ALGORITHMS = {
    "gmeta": nufed.gmeta(adapt_steps=2, adapt_lr=0.1, meta_lr=0.2, batch_size=8, local_steps=2),
    "fedavg": nufed.fedavg(meta_lr=0.2, batch_size=8, local_steps=2),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_batched_engine_has_the_same_changes(name):
    algorithm, results = ALGORITHMS[name], {}
    torch.manual_seed(0)
    objective = Objective(fcnn((8, 8), 10, hidden=(6,))).double
    received = {"model": objective.initial()}
    for kind, augment in (("direct", noisy), ("batched", noisy), ("plain", None)):
        data = federation(augment)
        engine = (
            BatchedEngine(objective, data, 5, most=3)
            if kind == "batched"
            else DirectEngine(objective, data, 5)
        )
        found = engine.agent_updates(algorithm, received, {a: {} for a in range(4)}, context(1))
        results[kind] = torch.stack([found[agent].vectors["model"] for agent in range(4)])
    torch.testing.assert_close(results["direct"], results["batched"], rtol=1e-9, atol=1e-12)
    assert (results["direct"] - results["plain"]).norm() > 1e-3


def test_no_change_is_bit_equal_to_none():
    objective = Objective(fcnn((8, 8), 10, hidden=(6,)))
    for algorithm in ALGORITHMS.values():
        vectors = [
            DirectEngine(objective, federation(augment), 5)
            .agent_updates(algorithm, {"model": objective.initial()}, {0: {}}, context(1))[0]
            .vectors
            for augment in (None, unchanged)
        ]
        assert same(*vectors)


CONFIG = {
    "rounds": 4,
    "checkpoint_every": 1,
    "eval_every": 2,
    "workers": 1,
    "baselines": ["untrained"],
    "data": {"agents": 6, "samples_per_agent": 40, "augment": "crop_flip", "dirichlet": 1.0},
    "model": {"name": "fcnn", "args": {"hidden": [6]}},
    "method": {"batch_size": 8, "meta_lr": 0.1, "local_steps": 2},
    "methods": {"fedavg": {}, "gmeta": {"adapt_steps": 2, "adapt_lr": 0.1}},
}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    path = tmp_path_factory.mktemp("augmented")
    with without_report():
        nufed.run(CONFIG, out=path / "run")
    return path / "run"


def test_workers_and_resume_change_no_bit(done, tmp_path, monkeypatch):
    right = file_hashes(done)
    with without_report():
        nufed.run({**CONFIG, "workers": 2}, out=tmp_path / "two")
        two = file_hashes(tmp_path / "two")
        models = {name for name in right if name.endswith((".nufed", "agents.jsonl"))}
        assert models and all(two[name] == right[name] for name in models)

        draws = []
        original = CropFlip.__call__

        def killed(self, images, rng):
            draws.extend([1] * (tmp_path / "killed/methods/gmeta").exists())
            if len(draws) == 40:
                raise Killed
            return original(self, images, rng)

        with monkeypatch.context() as patch:
            patch.setattr(CropFlip, "__call__", killed)
            with pytest.raises(Killed):
                nufed.run(CONFIG, out=tmp_path / "killed")
        nufed.resume(tmp_path / "killed")
    again = file_hashes(tmp_path / "killed")
    assert all(again[name] == right[name] for name in models)


def test_auto_leaves_gram_space_and_gram_is_refused(done, tmp_path):
    assert load_run(done).engines["gmeta"] not in GRAM
    with pytest.raises(InputError, match=r'engine = "gram": .* samples that data.augment does not'):
        nufed.run({**CONFIG, "engine": "gram"}, out=tmp_path / "run")


def test_code_of_ones_own_and_what_is_refused(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "def masked(inputs, rng):\n"
        "    return inputs * float(rng.random() < 0.5)\n"
        "def flat(inputs, rng):\n"
        "    return inputs.flatten(1)\n"
        "def bad(inputs, rng):\n"
        "    raise KeyError('no')\n"
    )
    monkeypatch.chdir(tmp_path)

    def named(name):
        return {**CONFIG, "rounds": 2, "data": {**CONFIG["data"], "augment": name}}

    with without_report():
        nufed.run(named("mine:masked"), out=tmp_path / "run")
        assert named_code(load_run(tmp_path / "run").config) == {"data.augment": "mine:masked"}
        for name, sentence in (
            ("mine:flat", r"data.augment must return .* given input \(2, 8, 8\) .* \(2, 64\)"),
            ("mine:bad", "data.augment fails: KeyError"),
            (
                "crop-flip",
                "data.augment = 'crop-flip': must be one of none, crop_flip, .* did you mean",
            ),
        ):
            with pytest.raises(InputError, match=sentence):
                nufed.run(named(name), out=tmp_path / "refused")
            assert not (tmp_path / "refused").exists()
