"""An agent's personal model as a file: the same model that evaluation scored."""

from dataclasses import dataclass, replace
from itertools import combinations

import pytest
import torch

import nufed
from nufed import GMeta, InputError, load_adapted
from nufed.algorithms import Ditto
from nufed.errors import RunError
from nufed.lab.bundle.from_run import make_personal
from nufed.lab.config.problem import Problem
from nufed.lab.files import read_sealed, unseal, write_sealed
from nufed.lab.runs import load_run

NAMES = ("gmeta", "ditto", "scaffold", "fedrod", "knn_per", "feddbe", "fedpac", "fedfomo")
METHODS = {name: {"algorithm": name} for name in NAMES}
METHODS["fedproto"] = {"algorithm": "fedproto", "prediction": "prototypes"}
CONFIG = {
    "rounds": 3,
    "seeds": [3, 4],
    "participation": 0.4,
    "workers": 1,
    "engine": "direct",
    "baselines": [],
    "eval_steps": 2,
    "data": {
        "agents": 8,
        "samples_per_agent": 60,
        "dirichlet": 0.5,
        "unseen_agents": 2,
        "validation": 0.2,
    },
    "model": {"args": {"hidden": [8]}},
    "method": {"adapt_lr": 0.05, "meta_lr": 0.2, "batch_size": 6},
    "methods": METHODS,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return nufed.run(CONFIG, out=tmp_path_factory.mktemp("run") / "run", figures=False)


def rows_of(run, seed, agent):
    """The agent's test part, as raw inputs."""
    federation = Problem.make(run.config, seeds=[seed]).federations[seed]
    rows = federation.scored_rows(agent)
    return federation.samples.inputs[rows], federation.samples.targets[rows]


@pytest.mark.parametrize("method", METHODS)
def test_predictions_of_the_file_give_exactly_the_recorded_scores(run, tmp_path, method):
    for seed in CONFIG["seeds"] if method in ("gmeta", "ditto", "scaffold") else [3]:
        trained = run.methods[method][seed]
        assert trained.step_sizes is not None  # the chosen scale matters here
        for scores in trained.final:
            inputs, targets = rows_of(run, seed, scores.agent)
            for steps in (None, 0, 1):
                made = make_personal(
                    run, method, scores.agent, seed, steps=steps, with_training_data=True
                )
                loaded = load_adapted(made.save(tmp_path / "mine.safetensors"))
                answers = [int(p.answer) for p in loaded.predict(inputs)]
                right = (torch.tensor(answers) == targets).sum().item() / len(targets)
                shown = run.config.steps_of(method)[0] if steps is None else steps
                assert right == scores.score[shown]
                (group,) = made.about.measured["groups"].values()
                assert group["personal"] == scores.score[shown]
                assert group["global"] == scores.global_score


@pytest.mark.parametrize("method", ["ditto", "scaffold", "fedrod", "fedpac", "fedfomo"])
def test_files_of_personal_models_are_what_results_show(run, method):
    """Of every agent with a state, with the step size that evaluation chose."""
    for seed in CONFIG["seeds"]:
        trained = run.methods[method][seed]
        folder = run.path / "methods" / method / f"seed-{seed}"
        files = {int(path.stem): path for path in folder.glob("personal/*")}
        assert files.keys() == {agent for m in trained.metrics for agent in m.cohort}
        steps = run.config.steps_of(method)[0]
        for agent, path in files.items():
            found = read_sealed(path)
            made = make_personal(run, method, agent, seed).module.model
            # a module with further tensors holds the plain one
            parameters = [p for name, p in made.named_parameters() if "further" not in name]
            assert torch.equal(found.tensors["model"], torch.cat([p.flatten() for p in parameters]))
            assert found.about["fine_tuning_steps"] == steps
            assert found.about["lr_scale"] == trained.step_sizes.scale(steps)
    if method == "scaffold":
        assert trained.step_sizes.scale(steps) != 1  # or the test shows nothing


def test_agents_that_are_not_evaluated_have_files_of_personal_models_too(tmp_path):
    config = {**CONFIG, "seeds": [0], "eval_agents": 1, "methods": {"ditto": METHODS["ditto"]}}
    run = nufed.run(config, out=tmp_path / "run", figures=False)
    cohorts = {agent for m in run.methods["ditto"][0].metrics for agent in m.cohort}
    files = {int(path.stem) for path in run.path.glob("methods/ditto/seed-0/personal/*")}
    assert files == cohorts and len(files) > len(run.methods["ditto"][0].scores)


def test_dittos_personal_model_is_the_agents_own(run):
    """Its v, which fine-tuning of the global model would not give."""
    took_part = {a for m in run.methods["ditto"][3].metrics for a in m.cohort}
    agent = min(took_part)
    own, other = (make_personal(run, "ditto", a, 3, steps=0) for a in (agent, 7))
    bundle = nufed.make_bundle(run, "ditto", 3)
    weights = [
        torch.cat([p.flatten() for p in module.parameters()])
        for module in (own.module, other.module, bundle.module)
    ]
    assert not any(torch.equal(a, b) for a, b in combinations(weights, 2))


def test_impossible_requests_are_refused_in_one_sentence(run):
    with pytest.raises(InputError, match="agent = 8: must lie in 0 … 7"):
        make_personal(run, "gmeta", 8)
    with pytest.raises(InputError, match="must be one of gmeta, ditto, scaffold, fedrod, knn_per"):
        make_personal(run, "x", 0)
    federated = replace(run, engines={"gmeta": "flower"})
    with pytest.raises(InputError, match="personal models are at their sites"):
        make_personal(federated, "gmeta", 0)
    with pytest.raises(RunError, match="the data is not that of"):
        make_personal(replace(run, data_sha256="0" * 64), "gmeta", 0)
    made = make_personal(run, "gmeta", 0)
    assert "The personal model of agent 0" in nufed.lab.bundle.about.card_of(made.about)


def test_training_data_leaves_an_agent_only_where_that_is_said(run):
    """A method says what its personal model holds; the file and its card say so too."""
    with pytest.raises(
        InputError, match=r"knn_per holds features and labels of the .*--with-train"
    ):
        make_personal(run, "knn_per", 1)
    made = make_personal(run, "knn_per", 1, with_training_data=True)
    card = nufed.lab.bundle.about.card_of(made.about)
    assert "**This file holds features and labels of the agent's training samples**" in card
    assert make_personal(run, "fedrod", 1).about.personal.training_data is None
    assert not list(run.path.glob("methods/knn_per/*/personal"))  # nor does a simulation write it


@pytest.mark.parametrize("method", ["fedrod", "knn_per"])
def test_a_file_of_a_personal_model_holds_all_that_predicting_needs(run, tmp_path, method):
    """To the bit what the algorithm predicts, with its settings; a module that can be used."""
    made = make_personal(run, method, 1, with_training_data=True)
    loaded = load_adapted(made.save(tmp_path / "mine.safetensors"))
    inputs, _ = rows_of(run, 3, 1)
    assert torch.equal(made.module(inputs), loaded.module(inputs))
    assert loaded.about.personal.algorithm == method
    problem = Problem.make(run.config, seeds=[3])
    objective, algorithm = problem.objectives[3], problem.algorithms[method]
    tensors = unseal((tmp_path / "mine.safetensors").read_bytes()).tensors
    further = {n[8:-1]: t for n, t in tensors.items() if n.startswith("further.")}
    names = objective.module(objective.initial()).state_dict()
    w = torch.cat([tensors[f"module.{name}"].flatten() for name in names])
    assert (
        further.keys() == {"fedrod": {"personal_head"}, "knn_per": {"features", "labels"}}[method]
    )
    rows = problem.samples.take(problem.federations[3].scored_rows(1))[0]
    right = algorithm.predict(objective, {"model": w, **further}, rows)
    assert torch.equal(loaded.module(inputs), right)


def test_crafted_files_of_personal_models_are_refused(run, tmp_path):
    path = tmp_path / "mine.safetensors"
    make_personal(run, "knn_per", 1, with_training_data=True).save(path)
    good = unseal(path.read_bytes())

    def refused(words, about=None, trust=False, **tensors):
        content = {**good.about, "adapted": {**good.about["adapted"], **(about or {})}}
        kept = {k: v for k, v in {**good.tensors, **tensors}.items() if v is not None}
        write_sealed(path, content, kept)
        with pytest.raises(InputError, match=words):
            load_adapted(path, trust=trust)

    labels, features = (good.tensors[f"further.{name}_"] for name in ("labels", "features"))
    own = good.about["adapted"]["personal"]
    refused("can't be used", **{"further.labels_": labels + 10})
    refused("can't be used", **{"further.labels_": labels[:-1].float()})
    refused("can't be used", **{"further.features_": features[:, 1:].contiguous()})
    refused("non-finite", **{"further.features_": features * float("nan")})
    refused("can't be used", **{"further.labels_": None})
    refused("do not match the module", **{"module.more": features})
    refused("must be one of", {"personal": {**own, "algorithm": "nearest"}})
    refused("neighbours = 0", {"personal": {**own, "settings": {"neighbours": 0}}})
    refused("unknown key", {"personal": {**own, "settings": {"neighbors": 3}}})
    refused("trust=True", {"personal": {**own, "algorithm": "os:abort"}})
    refused("trust=True", {"personal": {**own, "settings": {"aggregation": "os:abort"}}})
    refused("is no algorithm", {"personal": {**own, "algorithm": "os:PathLike"}}, trust=True)


@dataclass(frozen=True)
class NoWholeModel(Ditto):
    """Ditto whose server holds no complete model."""

    def global_model(self, objective, received):
        return None


def test_a_method_of_ones_own_without_a_global_model(tmp_path):
    """It has no bundle and says why, but has agents' personal models."""
    own = {"heads": NoWholeModel(batch_size=6)}
    config = {**CONFIG, "seeds": [0], "methods": {"gmeta": {}}}
    run = nufed.run(config, methods=own, out=tmp_path / "run", figures=False)
    assert [p.name for p in (run.path / "bundles").iterdir()] == ["gmeta.nufed"]
    made = make_personal(run, "heads", 1, methods=own)
    assert made.about.measured["groups"]["seen"]["global"] is None
    with pytest.raises(InputError, match="pass it again, methods="):
        make_personal(load_run(run.path), "heads", 1)
    with pytest.raises(InputError, match=r"heads can't be bundled: .* --agent N"):
        nufed.make_bundle(run, "heads", methods=own)
    with pytest.raises(InputError, match="pass it again, methods="):
        nufed.make_bundle(run, "heads")
    weight = {"heads": NoWholeModel(batch_size=6, weight=9.0)}
    for other, sentence in (
        (weight, r"methods.heads.weight was 1.0 and is 9.0: pass the same object as to the run of"),
        ({"gmeta": GMeta()}, r"methods.gmeta.algorithm was 'gmeta' and is 'given in Python'"),
        ({"nix": GMeta()}, r"methods\['nix'\]: must be one of gmeta, heads, those of"),
    ):
        with pytest.raises(InputError, match=sentence):
            nufed.make_bundle(run, "heads", methods={**own, **other})
        with pytest.raises(InputError, match=sentence):
            make_personal(run, "heads", 1, methods={**own, **other})
    rows = {r["name"]: r for r in run.to_json()["rows"] if r["group"] == "seen"}
    heads = rows["heads after 0 steps"]
    assert heads["global"]["mean"] is None and heads["harmed"] is None
    page = (run.path / "report.html").read_text()
    assert "Of heads, global and harmed are not defined (–)" in page
