"""Provenance of a run: ``config.toml``, which may be read and edited, and the sealed ``run.json``.

Both hold the configuration and must agree. A resumed run may have more rounds and other software
versions, which are recorded.
"""

from __future__ import annotations

import json
import platform
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from nufed.data import Samples, Split
from nufed.data.samples import InputRange, input_ranges, scale_warnings
from nufed.errors import InputError, NumericalWarning, ResumableError, RunError, shown
from nufed.evaluate import Measure
from nufed.lab.config.load import read_config
from nufed.lab.config.problem import Recorded
from nufed.lab.config.schema import Config
from nufed.lab.config.split_file import split_bytes
from nufed.lab.config.trust import methods_are_imported, require_trust
from nufed.lab.files import write_durably, write_sealed
from nufed.lab.runs.directory import RunDirectory
from nufed.lab.runs.json_files import check_format, checked, read_about
from nufed.lab.runs.records import RunAbout
from nufed.simulation.engine import EngineName

FORMAT = 4


class Provenance:
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
        """Record the start of a run, whose splits have been written.

        ``samples`` give the format of one sample; ``data_sha256`` is the digest of all data, empty
        if these are at the sites of a federation. Warns of inputs whose scale is far from 1.
        """
        ranges = input_ranges(samples) if data_sha256 else {}
        doubts = scale_warnings(samples, ranges)
        for text in doubts:
            warnings.warn(text, NumericalWarning, stacklevel=2)
        self._write_config(config)
        about = {
            "format": FORMAT,
            "measure": {"name": measure.name, "higher_is_better": measure.higher_is_better},
            "engines": dict(engines),
            "config": plain_settings(config),
            "data_sha256": data_sha256,
            "inputs": _describe(samples, ranges),
            **({"data_warnings": doubts} if doubts else {}),
            "software": {
                "python": platform.python_version(),
                "platform": platform.platform(),
                "threads": config.threads,
                **_versions(),
            },
        }
        write_sealed(self.path / "run.json", about)

    def about(self) -> RunAbout:
        """The content of run.json."""
        path = self.path / "run.json"
        unsealed = _format_without_seal(path)
        content = read_about(path) if unsealed is None else {"format": unsealed}
        check_format(path, content.get("format", FORMAT), FORMAT)
        return checked(RunAbout, content, path)

    def engines(self) -> dict[str, EngineName]:
        """The engine of each method of a simulation, chosen when it started."""
        engines = self.about().engines
        simulated = {name: engine for name, engine in engines.items() if engine != "flower"}
        if len(simulated) < len(engines):
            raise RunError(
                f"{self.path} is the run of a federation: resume it with `nufed federate run`"
            )
        return simulated

    def software(self) -> dict[str, str]:
        """The software that the run was started with, and the versions it was resumed with."""
        about = self.about()
        return {
            name: ", then ".join(
                dict.fromkeys([str(value), *(v[name] for v in about.resumed if name in v)])
            )
            for name, value in about.software.items()
        }

    def read(self, trust: bool = False) -> Config:
        """The run's configuration, which must equal the one in run.json except for ``workers``.

        ``trust`` allows importing the algorithms that it names, if it names any.
        """
        config, changed = self._read_both()
        if changed:
            longer = _are_more_rounds(changed)
            raise self._was_changed(
                changed, f"or train longer with `nufed run --resume {self.path}`" if longer else ""
            )
        if not methods_are_imported(config):
            require_trust(self.path, config, trust)
        config.algorithms()  # refuses unknown settings
        return config

    def read_to_resume(self, overrides: Sequence[str] = ()) -> Config:
        """The configuration with overrides: larger ``rounds``, or other ``workers``.

        A kill in :meth:`write_resumed` can leave the larger ``rounds`` in config.toml alone.
        """
        config, changed = self._read_both()
        if not _are_more_rounds(changed):
            raise self._was_changed(changed)
        longer = read_config(self.path / "config.toml", overrides)
        if not _are_more_rounds(flat_differences(plain_settings(config), plain_settings(longer))):
            now = ", ".join(f"{key} = {rounds}" for key, rounds in config.all_rounds.items())
            raise InputError(
                f"{' '.join(overrides)}: a resumed run keeps its settings; only rounds may be "
                f"increased, from {now.removeprefix('rounds = ')}"
            )
        return longer

    def curvature(self) -> float | None:
        """The curvature that the run recorded, from which its step sizes come."""
        return self._read_both()[0].measured_curvature

    def _read_both(self) -> tuple[Config, dict[str, tuple[Any, Any]]]:
        """The configuration in config.toml, and how it differs from the one in run.json."""
        self.about()  # first: a config.toml of another format may have other keys
        path = self.path / "config.toml"
        try:
            config = read_config(path)
        except InputError as error:
            raise RunError(f"{path} can't be used: {error}") from error
        return config, self._changes(config)

    def _changes(self, config: Config) -> dict[str, tuple[Any, Any]]:
        """The keys whose values differ from run.json, with the old and the new value."""
        about, path = self.about(), self.path / "run.json"
        original = recorded_config(about.config, path)
        changed = flat_differences(plain_settings(original), plain_settings(config))
        orders = list(original.methods), list(config.methods)  # baselines use the first's settings
        return changed or ({} if orders[0] == orders[1] else {"the order of methods": orders})

    def _was_changed(self, changed: Mapping[str, tuple[Any, Any]], more: str = "") -> RunError:
        return RunError(
            f"{self.path / 'config.toml'} was changed ({_in_words(changed)}): a run keeps the "
            "settings that it started with, recorded in run.json; change it back, "
            f"{more or 'or start a new run'}"
        )

    def write_resumed(self, config: Config) -> None:
        """Record the rounds and software versions of a resumed run.

        config.toml is written first: after a kill between the two files its rounds are used.
        """
        path = self.path / "run.json"
        about, content, versions = self.about(), read_about(path), _versions()
        began = {package: str(about.software.get(package)) for package in versions}
        if began != versions:
            words = (f"{p} {began[p]}, now {v}" for p, v in versions.items() if v != began[p])
            warnings.warn(
                f"{self.path} was started with other software ({'; '.join(words)}): it may not "
                "end bit-identical; the report shows both versions",
                NumericalWarning,
                stacklevel=2,
            )
        self._write_config(config)
        updated = content | {"config": plain_settings(config)}
        if versions != (about.resumed or [began])[-1]:
            updated["resumed"] = [*about.resumed, versions]
        if updated != content:
            write_sealed(path, updated)

    def recorded(self, config: Config) -> Recorded:
        """What the directory records of the problem that ``config`` describes."""
        splits = {seed: self._directory.read_split(seed).sha256 for seed in config.seeds}
        return Recorded(self.path, config, self.about().data_sha256, splits)

    def check_config(self, config: Config) -> None:
        """Refuse to resume with another configuration; only ``rounds`` may differ."""
        changed = self._changes(config)
        changed = {key: both for key, both in changed.items() if not _is_rounds(key)}
        if changed:
            raise self._was_changed(changed)

    def check_same(self, config: Config, data_sha256: str, splits: Mapping[int, str]) -> None:
        """Refuse a directory that holds another run than the one that is given.

        Args:
            config: the configuration; only ``workers`` may differ.
            data_sha256: of the samples.
            splits: the SHA-256 of every seed's split.
        """
        changed = self._changes(config)
        if not changed and self.about().data_sha256 != data_sha256:
            changed = {"the data's SHA-256": (self.about().data_sha256, data_sha256)}
        for seed, digest in splits.items() if not changed else ():
            recorded = self._directory.read_split(seed).sha256
            if recorded != digest:
                changed[f"the SHA-256 of the split of seed {seed}"] = recorded, digest
        if changed:
            raise RunError(
                f"{self.path} holds another run ({_in_words(changed)}): give the same settings and "
                "data, or another --out"
            )

    def check_split_files(self, splits: Mapping[int, Split]) -> None:
        """Refuse to resume if a split's file differs from the split; write it if missing."""
        for seed, split in splits.items():
            path = self.path / "splits" / f"seed-{seed}.safetensors"
            if not path.exists():
                write_durably(path, split_bytes(split))
            elif path.read_bytes() != split_bytes(split):
                raise ResumableError(f"{path} is damaged", "remove it", ", which writes it again")

    def _write_config(self, config: Config) -> None:
        write_durably(self.path / "config.toml", config.to_toml().encode())


def _is_rounds(key: str) -> bool:
    """Whether a key holds the rounds of the run or of a method."""
    return key == "rounds" or (key.startswith("methods.") and key.endswith(".rounds"))


def _are_more_rounds(changed: Mapping[str, tuple[Any, Any]]) -> bool:
    """Whether settings differ in nothing but larger numbers of rounds."""
    return all(
        _is_rounds(key) and isinstance(a, int) and isinstance(b, int) and b > a
        for key, (a, b) in changed.items()
    )


def _in_words(changed: Mapping[str, tuple[Any, Any]]) -> str:
    return "; ".join(f"{k} was {shown(a)} and is {shown(b)}" for k, (a, b) in changed.items())


def _format_without_seal(path: Path) -> Any:
    """The format in a run.json of formats 1 to 3, which were not sealed files; None in others."""
    try:
        content = json.loads(path.read_bytes())
        written = None if "about" in content else content.get("content", content).get("format")
        return None if written == FORMAT else written
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return None  # read_about raises the error


def _versions() -> dict[str, str]:
    """The versions of the packages that determine bits."""
    return {package: version(package) for package in ("nufed", "torch", "numpy")}


def recorded_config(settings: Mapping[str, Any], path: Path) -> Config:
    """The configuration that a file records. Imports nothing that it names."""
    try:
        return read_config(settings)
    except InputError as error:
        raise RunError(f"{path} is invalid: in its config, {error}") from None


def plain_settings(config: Config) -> dict[str, Any]:
    """A configuration as plain data, without ``workers``, which changes no bits."""
    settings: dict[str, Any] = json.loads(config.model_dump_json(exclude={"workers"}))
    return settings


def _describe(samples: Samples, ranges: Mapping[str, InputRange]) -> dict[str, Any]:
    """The format of one input and target, so that models can be used without the data."""
    kind = samples.targets.dtype
    tokens = not samples.classes and not kind.is_floating_point
    inputs = samples.inputs
    pairs = inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs)
    several = {} if isinstance(inputs, Tensor) else {str(name): _format(x) for name, x in pairs}
    return {
        **(_format(inputs) if isinstance(inputs, Tensor) else next(iter(several.values()))),
        **({"several": several} if several else {}),
        "scale": samples.scale,
        "shift": samples.shift,
        "classes": list(samples.classes),
        "outputs": samples.outputs,
        **({"targets": str(kind).removeprefix("torch.")} if tokens else {}),
        **({"range": asdict(ranges["input"])} if "input" in ranges else {}),
    }


def _format(x: Tensor) -> dict[str, Any]:
    return {"shape": list(x.shape[1:]), "dtype": str(x.dtype).removeprefix("torch.")}


def flat_differences(
    then: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """The dotted keys whose values differ, with both values."""
    differences: dict[str, tuple[Any, Any]] = {}
    for key in {**then, **now}:
        a, b = then.get(key), now.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            differences |= flat_differences(a, b, f"{prefix}{key}.")
        elif a != b:
            differences[prefix + key] = a, b
    return differences
