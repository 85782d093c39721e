"""How a run began: ``config.toml`` to read and edit, and ``run.json``, which is sealed.

Both hold the configuration and must agree. A resumed run may have more rounds and other software:
that is written down, too.
"""

from __future__ import annotations

import json
import platform
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch
from pydantic import ValidationError

from nufed.data import Samples, Split
from nufed.errors import InputError, NumericalWarning, RunError, shown
from nufed.evaluate import Measure
from nufed.runs.config import known_fields, load_config
from nufed.runs.directory import RunDirectory
from nufed.runs.durable import signed, write_durably
from nufed.runs.files import read_about
from nufed.runs.messages import sentence
from nufed.runs.records import About, Engine, checked
from nufed.runs.schema import Config

FORMAT = 3
FULL_METHODS = 2  # the format before, where run.json lists also what a method does not set


class Begun:
    """``config.toml`` and ``run.json`` of a run directory."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory, self.path = directory, directory.path

    def write(
        self,
        config: Config,
        measure: Measure,
        engines: Mapping[str, str],
        samples: Samples,
        data_sha256: str,
    ) -> None:
        """Write down how the run begins; its splits are there already.

        ``samples`` tell what one of them is; ``data_sha256`` is that of all the data.
        """
        self._write_config(config)
        about = {
            "format": FORMAT,
            "measure": {"name": measure.name, "higher_is_better": measure.higher_is_better},
            "engines": dict(engines),
            "config": _settings(config),
            "data_sha256": data_sha256,
            "inputs": _describe(samples),
            "software": {
                "python": platform.python_version(),
                "platform": platform.platform(),
                "threads": config.threads,
                **_versions(),
            },
        }
        write_durably(self.path / "run.json", signed(about))

    def about(self) -> About:
        """What run.json says."""
        path = self.path / "run.json"
        content = read_about(path)
        written = content.get("format", FORMAT) if isinstance(content, dict) else FORMAT
        if written not in (FORMAT, FULL_METHODS):
            raise RunError(
                f"{path} has format {shown(written)} and this nufed reads {FORMAT}: use the "
                f"version that wrote it"
            )
        return checked(About, content, path)

    def engines(self) -> dict[str, Engine]:
        """The engines that a simulation began with."""
        engines = self.about().engines
        found = {name: engine for name, engine in engines.items() if engine != "flower"}
        if len(found) < len(engines):
            raise RunError(
                f"{self.path} is the run of a federation: resume it with `nufed federate run`"
            )
        return found

    def software(self) -> dict[str, str]:
        """The software that the run began with, and the versions that it was resumed with."""
        about = self.about()
        return {
            name: ", then ".join(
                dict.fromkeys([str(value), *(v[name] for v in about.resumed if name in v)])
            )
            for name, value in about.software.items()
        }

    def read(self) -> Config:
        """The run's configuration, which must be the one in run.json, but for ``workers``."""
        config, changed = self._read_both()
        if changed:
            longer = changed.keys() == {"rounds"} and changed["rounds"][1] > changed["rounds"][0]
            raise self._was_changed(
                changed, f"or train longer with `nufed run --resume {self.path}`" if longer else ""
            )
        return config

    def read_to_resume(self, overrides: Sequence[str] = ()) -> Config:
        """The same with overrides; only ``rounds`` may have grown, and ``workers`` differ.

        More rounds in config.toml alone are also what a kill in :meth:`write_resumed` leaves.
        """
        config, changed = self._read_both()
        then, now = changed.pop("rounds", (0, 0))
        if changed or now < then:
            raise self._was_changed(changed or {"rounds": (then, now)})
        longer = load_config(self.path / "config.toml", overrides)
        different = _flat_differences(_settings(config), _settings(longer))
        if different.keys() - {"rounds"} or longer.rounds < config.rounds:
            raise InputError(
                f"{' '.join(overrides)}: a resumed run keeps its settings; only rounds may grow, "
                f"and it is {config.rounds}"
            )
        return longer

    def _read_both(self) -> tuple[Config, dict[str, tuple[Any, Any]]]:
        """What config.toml says, and by which keys and values it differs from run.json."""
        path = self.path / "config.toml"
        try:
            config = load_config(path)
        except InputError as error:
            raise RunError(f"{path} can't be used: {error}") from error
        return config, self._changes(config)

    def _changes(self, config: Config) -> dict[str, tuple[Any, Any]]:
        """The keys by which a configuration differs from that in run.json, with both values."""
        about, path = self.about(), self.path / "run.json"
        try:
            begun = Config.model_validate(about.config)
        except ValidationError as error:
            reason = sentence(error, (), dict(known_fields()))
            raise RunError(f"{path} does not fit: in its config, {reason}") from None
        full = about.format == FULL_METHODS
        changed = _flat_differences(_settings(begun, full), _settings(config, full))
        orders = list(begun.methods), list(config.methods)  # baselines are those of the first
        return changed or ({} if orders[0] == orders[1] else {"the order of methods": orders})

    def _was_changed(self, changed: Mapping[str, tuple[Any, Any]], more: str = "") -> RunError:
        words = "; ".join(f"{k} was {shown(a)} and is {shown(b)}" for k, (a, b) in changed.items())
        return RunError(
            f"{self.path / 'config.toml'} was changed ({words}): a run keeps the settings that it "
            f"began with, which run.json holds; change it back, {more or 'or start a new run'}"
        )

    def write_resumed(self, config: Config) -> None:
        """Write down what is new in a resumed run: its rounds, and versions of software.

        config.toml comes first: after a kill between the two its rounds are taken up again.
        """
        path = self.path / "run.json"
        about, content, versions = self.about(), read_about(path), _versions()
        began = {package: str(about.software.get(package)) for package in versions}
        if began != versions:
            words = (f"{p} {began[p]}, now {v}" for p, v in versions.items() if v != began[p])
            warnings.warn(
                f"{self.path} began with other software ({'; '.join(words)}): it may not end with "
                "the same bits; the report shows both",
                NumericalWarning,
                stacklevel=2,
            )
        self._write_config(config)
        updated = content | {"config": _settings(config, about.format == FULL_METHODS)}
        if versions != (about.resumed or [began])[-1]:
            updated["resumed"] = [*about.resumed, versions]
        if updated != content:
            write_durably(path, signed(updated))

    def check_same(self, config: Config, data_sha256: str, splits: Mapping[int, Split]) -> None:
        """Refuse to go on if the configuration, the data or a split is not that of the start.

        A split's file must have the very bytes that the split would be written as.
        """
        changed = self._changes(config)
        changed.pop("rounds", None)
        if changed:
            raise self._was_changed(changed)
        then = self.about().data_sha256
        if then != data_sha256:
            raise RunError(
                f"the data is not that of {self.path} (SHA-256 {data_sha256[:12]} instead of "
                f"{then[:12]}): give the same data, or start a new run"
            )
        for seed, split in splits.items():
            then, fingerprint = self._directory.read_split(seed).sha256, split.fingerprint
            if then != fingerprint:
                raise RunError(
                    f"the split of seed {seed} is not that of {self.path} (SHA-256 "
                    f"{fingerprint[:12]} instead of {then[:12]}): start a new run"
                )
            path = self.path / "splits" / f"seed-{seed}.safetensors"
            if not path.exists():
                write_durably(path, split.to_bytes())
            elif path.read_bytes() != split.to_bytes():
                raise RunError(
                    f"{path} is damaged: remove it and continue with `nufed run --resume`, which "
                    "writes it again"
                )

    def _write_config(self, config: Config) -> None:
        write_durably(self.path / "config.toml", config.to_toml().encode())


def _versions() -> dict[str, str]:
    """The versions of what computes."""
    return {package: version(package) for package in ("nufed", "torch", "numpy")}


def _settings(config: Config, full: bool = False) -> dict[str, Any]:
    """A configuration as plain data, but for the number of workers, which changes no bits.

    Of every method what it sets itself, since the rest is that of ``[method]``; ``full`` adds the
    defaults of what it does not set.
    """
    settings: dict[str, Any] = json.loads(config.model_dump_json(exclude={"workers"}))
    if not full:
        own = {n: m.model_dump_json(exclude_unset=True) for n, m in config.methods.items()}
        settings["methods"] = {name: json.loads(text) for name, text in own.items()}
    return settings


def _describe(samples: Samples) -> dict[str, Any]:
    """What one input and one target are, so that models can be used without the data."""
    if not isinstance(samples.inputs, torch.Tensor):
        return {}
    return {
        "shape": list(samples.input_shape),
        "dtype": str(samples.inputs.dtype).removeprefix("torch."),
        "scale": samples.scale,
        "shift": samples.shift,
        "classes": list(samples.classes),
        "outputs": samples.outputs,
    }


def _flat_differences(
    then: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """The keys whose values differ, dotted, with both values."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in {**then, **now}:
        a, b = then.get(key), now.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found |= _flat_differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found[prefix + key] = a, b
    return found
