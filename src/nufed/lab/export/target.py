"""The protocol of targets of ``nufed export``, and the scalars of a run that trackers log."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from nufed.errors import InputError
from nufed.evaluate import summarise
from nufed.lab.config import Config
from nufed.lab.config.sweep_grid import by_dotted_key
from nufed.lab.experiment import Event, Observer
from nufed.lab.runs import Run
from nufed.settings import settings_of, text_of


@dataclass(frozen=True)
class Chosen:
    """The exported part of a run; None: all methods, or the first seed."""

    method: str | None = None
    seed: int | None = None
    trust: bool = False


@dataclass(frozen=True)
class Target:
    """A format or tool that runs are exported to.

    Args:
        write: writes a run to a path and returns what was written, one line each, as printed.
        default: the path to write to where none is given, from the run.
        chooses: whether ``method`` and ``seed`` may be chosen; else they are refused.
    """

    write: Callable[[Run, Path, Chosen], list[str]]
    default: Callable[[Run], Path]
    chooses: bool = False


@contextmanager
def needed(what: str, extra: str) -> Iterator[None]:
    """Import the packages of an extra inside this context.

    >>> with needed("writing sounds", "sounds"):
    ...     import no_such_package
    Traceback (most recent call last):
    nufed.errors.InputError: writing sounds needs a package that is not installed (No module \
named 'no_such_package'): pip install "nufed[sounds]"
    """
    try:
        yield
    except ImportError as error:
        raise InputError(
            f'{what} needs a package that is not installed ({error}): pip install "nufed[{extra}]"'
        ) from error


def check_new(out: Path, suffix: str) -> None:
    """Refuse a file that exists, or whose name has another ending."""
    if out.suffix != suffix:
        raise InputError(f"--out {out}: its name must end in {suffix}")
    if out.exists():
        raise InputError(f"{out} exists, and is not overwritten: give another --out, or remove it")
    if not out.parent.is_dir():
        raise InputError(f"--out {out}: there is no directory {out.parent}")


def settings_of_method(config: Config, method: str) -> dict[str, str]:
    """The configuration by dotted key, and the method's own settings under ``method.``.

    >>> from nufed.lab.config import load_config
    >>> texts = settings_of_method(load_config({"methods": {"fedavg": {}}}), "fedavg")
    >>> texts["method"], texts["rounds"], texts["data.source"], texts["method.local_steps"]
    ('fedavg', '100', 'digits', '4')
    """
    algorithm = config.algorithms()[method]
    settings = {
        f"method.{field.name}": text_of(field, getattr(algorithm, field.name))
        for field in settings_of(type(algorithm))
    }
    tables = config.model_dump(exclude={"method", "methods", "workers"}, exclude_none=True)
    return {
        "method": method,
        "method.algorithm": type(algorithm).__name__,
        **{key: str(value) for key, value in by_dotted_key(tables).items()},
        **settings,
    }


def round_scalars(event: Event) -> dict[str, float]:
    """The scalars logged after every round."""
    return _known(
        {
            "training/update_norm": event.update_norm,
            "cost/gradients": event.gradients,
            "cost/hvps": event.hvps,
        }
    )


def evaluation_scalars(event: Event) -> dict[str, float]:
    """The scalars logged after every evaluation."""
    return _known(
        {
            "seen/personal": event.score,
            "seen/global": event.global_score,
            "unseen/personal": event.unseen_score,
            "unseen/global": event.unseen_global_score,
            "training/loss": event.training_loss,
            "cost/evaluation_gradients": event.evaluation_gradients,
            "cost/evaluation_hvps": event.evaluation_hvps,
        }
    )


def final_scalars(run: Run, method: str, seed: int) -> dict[str, float]:
    """The final scores that results show, with chosen step sizes where there are any."""
    scalars: dict[str, float | None] = {}
    for group in run.groups:
        scores = [s for s in run.methods[method][seed].final if s.seen == (group == "seen")]
        if scores:
            means = summarise(scores, run.config.steps_of(method)[0], run.measure)
            scalars[f"final/{group}/personal"] = means.mean
            if scores[0].global_score is not None:
                scalars[f"final/{group}/global"] = means.global_mean
    return _known(scalars)


class Tracker(Observer):
    """Logs every method and seed of a run while it trains; a subclass says where."""

    def start(self, config: Config, path: Path) -> None:
        self._config, self._path = config, path.absolute()

    def round(self, event: Event) -> None:
        self._log(event.method, event.seed, round_scalars(event), event.round)

    def evaluation(self, event: Event) -> None:
        self._log(event.method, event.seed, evaluation_scalars(event), event.round)

    def end(self, run: Run | None) -> None:
        """Log the final scores of all that was trained, also before a resume."""
        if run is None:
            self._close(None)
            return
        for method, part in run.methods.items():
            for seed, trained in part.items():
                self._log_final(method, seed, final_scalars(run, method, seed), trained.round)
        self._close({(method, seed) for method, part in run.methods.items() for seed in part})

    def _log(self, method: str, seed: int, scalars: Mapping[str, float], round: int) -> None:
        """Log the numbers of a round."""
        raise NotImplementedError

    def _log_final(self, method: str, seed: int, scalars: Mapping[str, float], round: int) -> None:
        self._log(method, seed, scalars, round)

    def _close(self, trained: Collection[tuple[str, int]] | None) -> None:
        """End the logs of all parts; None: the run was stopped."""
        raise NotImplementedError


def replay(run: Run, observer: Observer) -> None:
    """Replay to an observer the events of a finished run."""
    observer.start(run.config, run.path)
    for method, part in run.methods.items():
        for seed, trained in part.items():
            event = Event(seed, method, 0)
            observer.part(replace(event, starts=True))
            for line in trained.metrics:
                event = event.after(line, run.config.steps_of(method)[0])
                event = replace(event, last=line is trained.metrics[-1])
                if event.round:
                    observer.round(event)
                if event.evaluated:
                    observer.evaluation(event)
    observer.end(run)


def _known(values: dict[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None}
