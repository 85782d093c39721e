"""The ServerApp and the ClientApp of a federation, from one configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import nn

from nufed.data import Samples
from nufed.errors import InputError, require, shown
from nufed.evaluate import Metric
from nufed.flower.app.plan import Plan
from nufed.flower.app.privacy import Privacy
from nufed.flower.app.registry import SiteKeys
from nufed.flower.app.site import Load
from nufed.flower.app.site_app import client_app
from nufed.flower.app.training import Measured, train_federation
from nufed.lab.config import Config, load_config
from nufed.lab.config.problem import (
    build_augmentation,
    build_loss,
    build_measure,
    build_module,
    build_objective,
)
from nufed.lab.config.schema import (
    AT_SITES,
    FEDERATION_NORM,
    OWN,
    FaultsConfig,
    FederationConfig,
    PrivacyConfig,
    within,
)
from nufed.objective import Loss
from nufed.server import Rules


@dataclass(frozen=True)
class App:
    """A federation: ``server`` and ``site`` are what Flower runs.

    Args:
        config: a TOML file as ``nufed run`` takes it, with ``[federation]``.
        load: reads a site's own data, at the site: ``load(site)`` gets the config of the site's
            node (``site["data"]``, ``site["partition-id"]``) and returns anything that
            ``nufed.run(data=...)`` takes.
        model: a factory of a custom module, instead of ``[model]``.
        loss, metric: custom functions, as for :func:`nufed.run`.
        curvature: that step sizes come from that the configuration leaves open, if it is known; the
            server asks the sites of the first round for it.
    """

    config: str | Path
    load: Load
    model: Callable[[], nn.Module] | None = None
    loss: Loss | None = None
    metric: Metric | None = None
    curvature: float | None = None

    @cached_property
    def server(self) -> ServerApp:
        """Trains, and writes the run directory ``out`` of Flower's run config."""
        return self.serving(None)

    def serving(self, out: Path | None) -> ServerApp:
        """This app with a given run directory."""
        app = ServerApp()

        def main(grid: Grid, context: Context) -> None:
            configured = str(context.run_config.get("out", ""))
            place = out or (Path(configured) if configured else None)
            form = str(context.run_config.get("log-format", "text"))
            train_federation(self.plans(), self.checked, grid, place, form, self.measured)

        app.main()(main)
        return app

    @cached_property
    def measured(self) -> Measured | None:
        """Makes plans and configuration by a curvature; None: no setting is open."""
        if not load_config(self.config).looks:
            return None

        def by(curvature: float | None) -> tuple[dict[str, Plan], Config]:
            app = replace(self, curvature=curvature)
            return app.plans(), app.checked

        return by

    @cached_property
    def site(self) -> ClientApp:
        """Trains and tests on a site's own data."""
        return client_app(self.plan, self.load)

    @cached_property
    def checked(self) -> Config:
        """The configuration, validated for a federation."""
        config = load_config(self.config)
        config = config.with_curvature(self.curvature) if config.looks else config
        _check(config)
        functions = {"loss": self.loss, "metric": self.metric}
        data = config.data.model_copy(update={"source": AT_SITES, "args": {}, "partition": "given"})
        update = {key: OWN for key, value in functions.items() if value is not None}
        model = {"name": OWN, "args": {}} if self.model else {}
        return config.model_copy(
            update={
                **update,
                "data": data,
                "model": config.model.model_copy(update=model),
                "baselines": _baselines(config),
            }
        )

    def plans(self) -> dict[str, Plan]:
        """The plans of all methods, in the order in which they are trained."""
        return {method: self.plan(method) for method in self.checked.algorithms()}

    def plan(self, method: str | None = None, curvature: float | None = None) -> Plan:
        """The plan of a method, by default of the first, that server and sites share.

        ``curvature``: if it is known from elsewhere.
        """
        if curvature != self.curvature and curvature is not None:
            return replace(self, curvature=curvature).plan(method)
        config = self.checked
        like, seed, algorithms = _like(config), config.seeds[0], config.algorithms()
        first = next(iter(algorithms))
        method = method or first
        if method not in algorithms:
            names = ", ".join(algorithms)
            raise InputError(f"the request is for method {shown(method)}, but this app has {names}")
        module = build_module(config, like, seed, self.model)
        loss = self.loss or build_loss(config, like)
        measure = build_measure(config, like, self.metric)
        return Plan(
            algorithms[method],
            build_objective(config, module, loss),
            agents=config.data.agents,
            rounds=config.rounds,
            participation=config.participation,
            seed=seed,
            unseen_agents=config.data.held_out,
            validation=config.data.validation,
            test=config.data.test,
            scored_on=config.eval_on,
            small_agents=config.data.small_agents,
            eval_steps=config.steps_evaluated,
            personal_steps=config.steps_of(method)[0],
            eval_lr=config.eval_lr,
            measure=measure,
            rules=_rules(config),
            threads=config.threads,
            deadline=config.federation.deadline,
            wait=config.federation.wait,
            like=like,
            preparation=config.data.prepare.given,
            privacy=_privacy(config.privacy),
            baselines=tuple(config.baselines) if method == first else (),
            tune_local=config.tune_local,
            site_keys=_site_keys(config.federation),
            method=method if len(algorithms) > 1 else "",
            augment=partial(build_augmentation, config.data),
            curvature=config.measured_curvature,
        )


def _check(config: Config) -> None:
    """Refuse settings that a federation can't use."""
    require(
        _input_shape(config) is not None,
        "federation.input_shape",
        None,
        "must be the shape of one sample's input, the same at all sites, for example [64]",
    )
    if len(config.seeds) != 1:
        raise InputError(
            f"seeds has {len(config.seeds)} entries: a federation trains one seed per run; start "
            "one run for each and compare them with `nufed report RUN RUN`"
        )
    _check_bounds(config)
    private, secure = config.privacy.clip is not None, config.federation.secure_aggregation
    if len(config.algorithms()) > 1 and private and secure and config.participation < 1:
        raise InputError(
            f"participation = {config.participation:g}: with [privacy] and secure_aggregation "
            "several methods need 1.0, since sums of one round are over the same sites, and "
            "epsilon assumes a cohort of its own for each method; or train one method per run"
        )
    given = config.model_dump(exclude_none=True)
    simulated = {key: key in given for key in ("stop_when", "keep")}
    for key, wrong in {**simulated, "[faults]": config.faults != FaultsConfig()}.items():
        if wrong:
            raise InputError(
                f"{key} is for simulation: remove it from a federation's configuration"
            )
    for key in config.all_rounds.keys() - {"rounds"}:
        raise InputError(
            f"{key} is for simulation: remove it, all methods of a federation take the same rounds"
        )
    if config.data.shift != "none":
        raise InputError(
            f'data.shift = "{config.data.shift}" is for simulation: remove it, sites hold their '
            "own data"
        )
    if config.data.stratify:
        raise InputError("data.stratify is for simulation: remove it, sites split their own data")
    if config.eval_agents is not None:
        raise InputError(
            "eval_agents is for simulation: remove it, a federation evaluates all sites"
        )
    if config.eval_on == "validation" and not config.data.validation:
        raise InputError(
            'eval_on = "validation": sites have no validation part; set data.validation, for '
            "example to 0.1"
        )
    if config.privacy.clip is None and config.privacy != PrivacyConfig():
        raise InputError(
            "privacy.clip is not set, so there would be no privacy: set it to the clipping norm of "
            "updates, or remove [privacy]"
        )


def _check_bounds(config: Config) -> None:
    """Refuse settings outside of ``[approval]``, and bounds of what is no setting."""
    tables = {"method": config.method, **{f"methods.{n}": t for n, t in config.methods.items()}}
    settings: list[tuple[str, str, Any]] = [("rounds", "rounds", config.rounds)]
    for place, table in tables.items():
        settings += [(f"{place}.{name}", name, value) for name, value in table.settings.items()]
    for bounded, bounds in config.approval.items():
        values = {key: value for key, name, value in settings if name == bounded}
        if not values or not bounds[0] <= bounds[1]:
            raise InputError(
                f"approval.{bounded} = {bounds}: must be [least, most] of rounds or of a setting "
                "of the methods"
            )
        for key, value in values.items():
            allowed = f"must be in {bounds[0]:g} … {bounds[1]:g}, as approval.{bounded} says"
            require(within(value, bounds), key, value, allowed)


def _like(config: Config) -> Samples:
    """An example sample, for which the model is built."""
    federation = config.federation
    shape = _input_shape(config)
    assert shape is not None
    texts = federation.vocabulary
    if texts:  # the largest identifier that sites may have
        one = torch.full((1, *shape), texts - 1)
    else:
        one = torch.zeros(1, *shape, dtype=getattr(torch, config.dtype))
    if federation.classes:
        targets = torch.zeros(1).long()
    else:  # the next token at every place, or numbers
        targets = one if texts else torch.zeros(1, federation.outputs)
    inputs = dict.fromkeys(federation.inputs, one) if federation.inputs else one
    return Samples(inputs, targets, tuple(federation.classes))


def _input_shape(config: Config) -> list[int] | None:
    """The shape of one input: as configured, of tables as their preparation makes it."""
    shape, preparation = config.federation.input_shape, config.data.prepare.given
    if preparation is None:
        return shape
    if shape not in (None, [preparation.width]):
        raise InputError(
            f"= {shape}: data.prepare.columns make {preparation.width} inputs; remove this key",
            "federation.input_shape",
        )
    return [preparation.width]


def _rules(config: Config) -> Rules:
    """With a norm bound by default; with privacy :mod:`.plausibility` bounds updates instead, and
    with secure aggregation single updates are not known."""
    unbounded = config.privacy.clip is not None or config.federation.secure_aggregation
    default = None if unbounded else FEDERATION_NORM
    return Rules(
        config.min_updates,
        max_update_norm=config.norm_bound(default),
        codec=config.compression.make(),
    )


def _privacy(config: PrivacyConfig) -> Privacy | None:
    return None if config.clip is None else Privacy(**dict(config))


def _baselines(config: Config) -> list[str]:
    """The null baselines that sites can score."""
    if config.privacy.clip is not None and not config.privacy.scores:
        return []
    known = [name for name in config.baselines if name != "centroid"]  # sites don't score it
    return [name for name in known if name != "majority" or config.federation.classes]


def _site_keys(config: FederationConfig) -> SiteKeys | None:
    if config.site_keys and not config.secure_aggregation:
        raise InputError("federation.site_keys is for federation.secure_aggregation, which is off")
    return SiteKeys(tuple(config.site_keys)) if config.secure_aggregation else None
