"""Every algorithm with settings that make all of its parts move on small problems."""

from nufed import Exact, FirstOrder, HessianFree
from nufed.algorithms import ALGORITHMS
from nufed.algorithms.local_optimizer import SGD, AdamW

SETTINGS = {"adapt_lr": 0.2, "meta_lr": 0.1, "local_steps": 2, "batch_size": 6}
CURVATURES = {
    "exact": Exact(),
    "fo": FirstOrder(),
    "hf": HessianFree(),
    "hf-fixed": HessianFree(1e-4),
}
CASES = {
    "fedavg": ALGORITHMS["fedavg"](**SETTINGS),
    **{
        f"{name}-{how}": ALGORITHMS[name](curvature=curvature, **SETTINGS, **extra)
        for name, extra in (("per_fedavg", {}), ("gmeta", {"adapt_steps": 2}))
        for how, curvature in CURVATURES.items()
    },
    "gmeta-exact-learned": ALGORITHMS["gmeta"](adapt_steps=2, rates_lr=0.5, **SETTINGS),
    **{
        f"gmeta-{rates}": ALGORITHMS["gmeta"](
            adapt_steps=2, curvature=curvature, rates_lr=0.5, rates=rates, **SETTINGS
        )
        for rates, curvature in (("coordinate", FirstOrder()), ("step", Exact()))
    },
    "gmeta-resampled": ALGORITHMS["gmeta"](
        adapt_steps=2, outer_samples="resampled", curvature=HessianFree(), **SETTINGS
    ),
    "gmeta-disjoint": ALGORITHMS["gmeta"](
        adapt_steps=2, outer_samples="disjoint", inner_batches="one", **SETTINGS
    ),
    "scaffold": ALGORITHMS["scaffold"](**SETTINGS),
    "feddyn": ALGORITHMS["feddyn"](weight=0.5, **SETTINGS),
    "fednova": ALGORITHMS["fednova"](**SETTINGS),
    "fednova-epochs": ALGORITHMS["fednova"](**{**SETTINGS, "local_epochs": 1}),
    "moon": ALGORITHMS["moon"](weight=2.0, **SETTINGS),
    "feddbe": ALGORITHMS["feddbe"](weight=2.0, mean_momentum=0.6, **SETTINGS),
    "fedproto": ALGORITHMS["fedproto"](**SETTINGS),
    "fedproto-nearest": ALGORITHMS["fedproto"](prediction="prototypes", **SETTINGS),
    **{
        name: ALGORITHMS[name](**SETTINGS)
        for name in ("fedavgm", "fedadagrad", "fedadam", "fedyogi")
    },
    "anil": ALGORITHMS["anil"](adapt_steps=2, **SETTINGS),
    "reptile": ALGORITHMS["reptile"](server_lr=0.7, **SETTINGS),
    "fedamp": ALGORITHMS["fedamp"](weight=0.5, mixing=0.3, width=2.0, **SETTINGS),
    "fedfomo": ALGORITHMS["fedfomo"](models=2, **SETTINGS),
    "fedpac": ALGORITHMS["fedpac"](head_steps=3, **SETTINGS),
    "fedprox": ALGORITHMS["fedprox"](weight=0.5, **SETTINGS),
    "pfedme": ALGORITHMS["pfedme"](weight=4.0, inner_lr=0.1, server_lr=0.9, **SETTINGS),
    "apfl": ALGORITHMS["apfl"](mixing=0.4, mixing_lr=1.0, **SETTINGS),
    "ditto": ALGORITHMS["ditto"](weight=0.5, personal_lr=0.2, personal_steps=2, **SETTINGS),
    "fedper": ALGORITHMS["fedper"](**SETTINGS),
    "fedrep": ALGORITHMS["fedrep"](head_steps=3, **SETTINGS),
    "fedbabu": ALGORITHMS["fedbabu"](**SETTINGS),
    "lg_fedavg": ALGORITHMS["lg_fedavg"](**SETTINGS),
    "fedbn": ALGORITHMS["fedbn"](private="norm, *bias", **SETTINGS),  # modules without norm layers
    "fedsa_lora": ALGORITHMS["fedsa_lora"](private="*bias", **SETTINGS),  # without adapters
    "fedala": ALGORITHMS["fedala"](first_passes=4, **SETTINGS),
    "fedrod": ALGORITHMS["fedrod"](personal_lr=0.2, **SETTINGS),
    "knn_per": ALGORITHMS["knn_per"](knn_weight=0.4, neighbours=5, **SETTINGS),
    "fedl2p": ALGORITHMS["fedl2p"](pretrain_rounds=0, net_lr=0.1, base_lr=0.1, **SETTINGS),
    "fedl2p-both": ALGORITHMS["fedl2p"](pretrain_rounds=2, net_lr=0.1, base_lr=0.1, **SETTINGS),
    "scalefl": ALGORITHMS["scalefl"](widths="0.5, 1", depths="1, 1", shares="0.5, 0.5", **SETTINGS),
}
CASES |= {  # optimisers whose state agents keep
    "fedavg-kept": ALGORITHMS["fedavg"](optimizer=AdamW(optimizer_state="kept"), **SETTINGS),
    "ditto-kept": ALGORITHMS["ditto"](
        optimizer=SGD(momentum=0.5, optimizer_state="kept"),
        **{**SETTINGS, "personal_lr": 0.2, "personal_steps": 2},
    ),
}
CASES |= {  # an algorithm that is not listed above is run with these settings and its own defaults
    name: cls(**SETTINGS)
    for name, cls in ALGORITHMS.items()
    if name not in {case.split("-")[0] for case in CASES}
}
THOROUGH = {"gmeta-exact", "gmeta-hf", "gmeta-exact-learned", "scaffold", "ditto"}
"""Cases that are run on every kind of module; the others on the first only."""
