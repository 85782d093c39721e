"""Models by name: parameter counts, shapes, and the exact meta-gradient through each."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from nufed import Batch, Exact, InputError, MetaBatch, Objective, meta_gradient
from nufed.models import MODELS, cnn, cnn_groupnorm, fcnn, gru, lenet5, logistic, lstm, resnet8
from support import relative_error

GREY, COLOUR = (1, 28, 28), (3, 32, 32)


@pytest.mark.parametrize(
    ("model", "shape", "parameters"),
    [
        (logistic, GREY, 784 * 10 + 10),
        (fcnn, COLOUR, 3072 * 80 + 80 + 80 * 60 + 60 + 610),
        (cnn, GREY, 1_663_370),  # McMahan et al. 2017
        (cnn, COLOUR, 32 * 76 + 64 * 801 + 512 * 4097 + 5130),
        (lenet5, GREY, 61_706),
        (lenet5, COLOUR, 62_006),
        (resnet8, GREY, 78_042 - 2 * 9 * 16),
        (resnet8, COLOUR, 78_042),
        (cnn_groupnorm, GREY, 20_586),
    ],
)
def test_parameters_and_shapes(model, shape, parameters):
    module = model(shape, 10)
    assert sum(p.numel() for p in module.parameters()) == parameters
    assert module(torch.rand(3, *shape)).shape == (3, 10)
    if shape is GREY:  # images without channels
        torch.manual_seed(0)
        assert model((28, 28), 10)(torch.rand(3, 28, 28)).shape == (3, 10)


def test_the_parameters_of_resnet8_layer_by_layer():
    norms = 2 * (16 + 2 * 16 + 2 * 32 + 32 + 2 * 64 + 64)
    blocks = 9 * (2 * 16 * 16 + 16 * 32 + 32 * 32 + 32 * 64 + 64 * 64)
    assert 9 * 3 * 16 + blocks + 16 * 32 + 32 * 64 + norms + 64 * 10 + 10 == 78_042


def tiny(name):
    """A small, smooth version of a model in float64, with an input of its."""
    torch.manual_seed(3)
    x = torch.rand(5, 1, 8, 8, dtype=torch.float64)
    if name == "lstm tokens":
        return lstm((6,), 3, hidden=(4, 3), vocabulary=7, embedding=2).double(), torch.randint(
            7, (5, 6)
        )
    if name == "lenet5":
        module = lenet5((12, 12), 3, activation="tanh", pooling="mean")
        return module.double(), torch.rand(5, 12, 12, dtype=torch.float64)
    arguments = {
        "fcnn": {"hidden": (6,), "activation": "tanh"},
        "cnn": {"channels": (3, 4), "hidden": 6, "activation": "tanh"},
        "cnn_groupnorm": {"channels": (4, 4), "groups": 2},
        "resnet8": {"channels": (2, 4, 4), "groups": 2, "activation": "softplus"},
        "lstm": {"hidden": (5,)},
        "gru": {"hidden": (4, 3)},
        "multi_exit": {"hidden": (6, 4), "activation": "tanh"},
    }.get(name, {})
    x = x[:, 0] if name in ("lstm", "gru") else x
    return MODELS[name](x.shape[1:], 3, **arguments).double(), x


def unrolled(module, batch, lr):
    """The meta-gradient by autograd through the unrolled loop."""
    names = [name for name, _ in module.named_parameters()]
    start = [p.detach().requires_grad_() for p in module.parameters()]

    def loss(parameters, batch):
        outputs = functional_call(module, dict(zip(names, parameters, strict=True)), batch.inputs)
        return F.cross_entropy(outputs, batch.targets)

    current, zeros = start, {"materialize_grads": True}  # early exits are not used
    for step in batch.adapt:
        gradients = torch.autograd.grad(loss(current, step), current, create_graph=True, **zeros)
        current = [p - lr * g for p, g in zip(current, gradients, strict=True)]
    gradients = torch.autograd.grad(loss(current, batch.outer), start, **zeros)
    return torch.cat([g.reshape(-1) for g in gradients])


@pytest.mark.parametrize("name", [*MODELS, "lstm tokens"])
def test_the_exact_meta_gradient_equals_autograd_through_the_unrolled_loop(name):
    module, x = tiny(name)
    objective = Objective(module)
    own = [Batch(x.roll(i, 0), torch.tensor([0, 1, 2, 0, 1])) for i in range(3)]
    batch = MetaBatch(own[:-1], own[-1], curvature=own[:-1])
    w = objective.initial()
    right = unrolled(module, batch, 0.5)
    assert (
        relative_error(meta_gradient(objective, w, batch, lr=0.5, curvature=Exact()), right) < 1e-9
    )
    # agents in a stack, as the batched engine computes them
    stacked = Batch(torch.stack([x, x]), torch.stack([own[0].targets] * 2))
    each = objective.grad(w, Batch(x, own[0].targets))
    both = objective.grad(torch.stack([w, w]), stacked)
    assert relative_error(both[1], each) < 1e-9
    products = objective.hvp(torch.stack([w, w]), stacked, torch.stack([w, each]))
    assert relative_error(products[1], objective.hvp(w, Batch(x, own[0].targets), each)) < 1e-9


@pytest.mark.parametrize("name", MODELS)
def test_the_head_is_the_last_linear_layer(name):
    module, _ = tiny(name)
    objective = Objective(module)
    *_, head = objective.layers.values()
    assert isinstance(head, nn.Linear) and head.out_features == 3


def test_the_lstm_equals_that_of_torch():
    module = lstm((7, 3), 2, hidden=(4, 5)).double()
    x = torch.rand(6, 7, 3, dtype=torch.float64)
    hidden = x
    for layer in module.layers:
        assert (layer.input.bias[layer.units : 2 * layer.units] == 1).all()  # forget gate
        theirs = nn.LSTM(hidden.shape[2], layer.units, batch_first=True).double()
        with torch.no_grad():
            theirs.weight_ih_l0.copy_(layer.input.weight)
            theirs.weight_hh_l0.copy_(layer.state.weight)
            theirs.bias_ih_l0.copy_(layer.input.bias)
            theirs.bias_hh_l0.zero_()
        hidden = theirs(hidden)[0]
    torch.testing.assert_close(module(x), module.head(hidden[:, -1]))


def test_the_gru_equals_that_of_torch():
    module = gru((7, 3), 2, hidden=(4, 5)).double()
    x = torch.rand(6, 7, 3, dtype=torch.float64)
    hidden = x
    for layer in module.layers:
        theirs = nn.GRU(hidden.shape[2], layer.units, batch_first=True).double()
        with torch.no_grad():
            theirs.weight_ih_l0.copy_(layer.input.weight)
            theirs.weight_hh_l0.copy_(layer.state.weight)
            theirs.bias_ih_l0.copy_(layer.input.bias)
            theirs.bias_hh_l0.copy_(layer.state.bias)
        hidden = theirs(hidden)[0]
    torch.testing.assert_close(module(x), module.head(hidden[:, -1]))


@pytest.mark.parametrize("make", [gru, lstm])
def test_a_next_token_depends_on_the_tokens_before_it_alone(make):
    module = make((6,), 6, hidden=(5,), vocabulary=9, next_token=True)
    tokens = torch.randint(0, 9, (2, 6))
    outputs, later = module(tokens), tokens.clone()
    assert outputs.shape == (2, 6, 9)
    later[:, 4] = (later[:, 4] + 1) % 9
    same = (module(later) == outputs).all(dim=2)
    assert same[:, :4].all() and not same[:, 4:].any()


def test_the_parameters_of_the_lstm():
    characters = lstm((80,), 90, vocabulary=90)
    layers = 4 * 256 * (8 + 256 + 1) + 4 * 256 * (256 + 256 + 1)
    expected = 8 * 90 + layers + 257 * 90
    assert sum(p.numel() for p in characters.parameters()) == expected
    assert lstm((12,), 2, hidden=(3,))(torch.rand(4, 12)).shape == (4, 2)  # one number a step


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: cnn((64,), 10), r"cnn needs images .*shape \(64,\): use fcnn"),
        (lambda: cnn((3, 3), 10), "cnn needs images of at least 4×4 pixels"),
        (lambda: lenet5((8, 8), 10), "lenet5 needs images of at least 12×12 pixels"),
        (lambda: lenet5((28, 28), 10, pooling="sum"), "pooling = 'sum': must be one of max, mean"),
        (lambda: resnet8((8, 8), 10, groups=3), "groups = 3: must divide the channels"),
        (lambda: resnet8((8, 8), 10, activation="no"), "activation = 'no': must be one of relu"),
        (lambda: lstm((3, 8, 8), 10), r"lstm needs sequences, and the data has shape \(3, 8, 8\)"),
        (lambda: lstm((8, 8), 10, vocabulary=5), "lstm needs sequences"),
        (lambda: lstm((8,), 10, vocabulary=0), "vocabulary = 0: must be a whole number"),
        (lambda: lstm((8,), 10, hidden=()), "must list the units"),
        (lambda: gru((8,), 10, next_token=True), "gru with next_token needs the number of tokens"),
        (
            lambda: gru((2,), 10, vocabulary=5)(torch.tensor([[0, 5]])),
            r"outside of the vocabulary, 0 … 4: set model.args.vocabulary",
        ),
        (
            lambda: lstm((8,), 10, vocabulary=5)(torch.rand(2, 8)),
            "needs token identifiers .* inputs are torch.float32",
        ),
    ],
)
def test_bad_arguments_are_one_clear_sentence(make, sentence):
    with pytest.raises(InputError, match=sentence):
        make()


@pytest.mark.parametrize("make", [cnn, cnn_groupnorm, lenet5, resnet8])
def test_convolutional_models_are_known_to_draw_no_random_numbers(make):
    assert Objective(make(COLOUR, 10))._draws_nothing()  # so that passes set no random state
