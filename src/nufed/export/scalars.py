"""The numbers that are tracked, by name, and the replay of a finished run for an observer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nufed.evaluate import summarise
from nufed.experiment import Event, Observer
from nufed.runs import Run


def round_scalars(event: Event) -> dict[str, float]:
    """What is tracked after every round."""
    return _known(
        {
            "training/update_norm": event.update_norm,
            "cost/gradients": event.gradients,
            "cost/hvps": event.hvps,
        }
    )


def evaluation_scalars(event: Event) -> dict[str, float]:
    """What is tracked after every evaluation."""
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


def trained_parts(run: Run | None) -> Iterator[tuple[str, int]]:
    """Every method and seed of a finished run that was trained; none of one that was stopped."""
    for method, part in run.methods.items() if run else ():
        yield from ((method, seed) for seed in part)


def final_scalars(run: Run, method: str, seed: int) -> dict[str, float]:
    """The final scores that results show, with chosen step sizes where there are any."""
    found: dict[str, float | None] = {}
    for group in run.groups:
        own = [s for s in run.methods[method][seed].final if s.seen == (group == "seen")]
        if own:
            means = summarise(own, run.config.steps_of(method)[0], run.measure)
            found[f"final/{group}/personal"] = means.mean
            if own[0].global_score is not None:
                found[f"final/{group}/global"] = means.global_mean
    return _known(found)


def replay(run: Run, observer: Observer) -> None:
    """Tell an observer about a finished run what it would have been told while it trained."""
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
