"""A federation's training in a run directory, as in simulation: begun, or gone on with.

Where training stands is saved after every round. Flower itself forgets a run whose server app or
SuperLink was killed: started again with the same directory, it goes on from there.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from nufed.errors import NufedError, RunError, TrainingError
from nufed.evaluate import Evaluation, chooses, summarise
from nufed.flower.asking import LOG
from nufed.flower.plan import Plan
from nufed.flower.privacy import check_plan
from nufed.flower.server import Outcome, Server
from nufed.runs import Config, RunDirectory
from nufed.runs.begun import Begun
from nufed.runs.directory import PRIVACY
from nufed.runs.durable import cannot_write, locked, read_signed, signed, write_durably
from nufed.runs.lines import evaluation_line, round_line
from nufed.runs.part import PartFiles
from nufed.runs.records import FederationRecord, checked
from nufed.server import Progress
from nufed.threads import torch_threads

NAME = "federation.json"  # how sites know the run, and the seed of secret cohorts


def train_federation(plan: Plan, config: Config, grid: Grid, out: Path | None) -> Path:
    """Train and evaluate over the sites that a grid reaches; returns the run directory.

    Args:
        plan: what is trained.
        config: the configuration that it was made from.
        grid: reaches the sites.
        out: the run directory; a run that was begun there is gone on with. By default the next
            free ``runs/NAME-001``.
    """
    if plan.privacy:
        check_plan(plan.privacy, len(plan.seen), plan.cohort, plan.rounds)
    going_on = out is not None and (out / "run.json").exists()
    directory = RunDirectory(out) if going_on and out else RunDirectory.create(config.name, out)
    if going_on:
        directory.existing()
    (method,) = config.algorithms()
    with torch_threads(plan.threads), locked(directory.path), _logged(directory.path / "log.txt"):
        try:
            known = _go_on(directory, config, plan) if going_on else _begin(directory, config, plan)
            folder = directory.part("methods", method, plan.seed)
            files = PartFiles(folder, {"configuration": config.fingerprint})
            files.check_rounds(plan.rounds)
            if going_on:
                Begun(directory).write_resumed(config)
            if not files.is_done(plan.rounds):
                began = time.perf_counter()
                _train(plan, config, grid, known, directory, files)
                seconds = time.perf_counter() - began
                directory.write_timing(method=method, seed=plan.seed, seconds=seconds)
            from nufed.experiment.finish import finish  # it takes a moment to import

            finish(directory, {plan.seed: plan.objective})
        except NufedError as error:
            LOG.error("%s", error)
            if isinstance(error, TrainingError):
                directory.write_failure(method, plan.seed, str(error))
            raise
        LOG.info("done: %s", directory.path / "report.html")
    return directory.path


def _begin(directory: RunDirectory, config: Config, plan: Plan) -> dict[str, Any]:
    """Write down how the run begins; returns how sites know it, and the seed of secret cohorts."""
    known: dict[str, Any] = {"run": secrets.token_hex(16)}
    if plan.privacy:  # epsilon counts on cohorts that nobody knows, and files here name them
        known["cohort_seed"] = secrets.randbits(128)
        try:
            directory.path.chmod(0o700)
        except OSError as error:
            raise cannot_write(directory.path, error) from error
    assert plan.like is not None
    write_durably(directory.path / NAME, signed(known))
    engines = dict.fromkeys(config.algorithms(), "flower")
    Begun(directory).write(config, plan.measure, engines, plan.like, data_sha256="")
    LOG.info("%s begins: %d sites, %d rounds", config.name, plan.agents, plan.rounds)
    return known


def _go_on(directory: RunDirectory, config: Config, plan: Plan) -> dict[str, Any]:
    Begun(directory).check_same(config, "", {})
    path = directory.path / NAME
    known = checked(FederationRecord, read_signed(path), path)
    if plan.privacy and known.cohort_seed is None:
        raise RunError(f"{path} has no cohort_seed, which a private run needs: start a new one")
    return known.model_dump()


def _train(
    plan: Plan,
    config: Config,
    grid: Grid,
    known: dict[str, Any],
    directory: RunDirectory,
    files: PartFiles,
) -> None:
    """All rounds that are not done yet, each written down and saved before the next begins."""
    if plan.privacy:
        files.check_newest()
    # a private run never goes back to a round before the last, since its model may have been seen
    saved = files.begin(plan.rounds, 1 if plan.privacy else config.eval_every)
    start = Progress(saved.round, saved.server) if saved else None
    notes = saved.notes if saved else None
    cohort_seed = known["cohort_seed"] if plan.privacy else None
    (method,) = config.algorithms()
    server = Server(plan, grid, known["run"], notes, cohort_seed)
    if start:
        LOG.info("training goes on after round %d", start.round)
    last, outcome = False, None
    with closing(files):
        if saved:
            saved.check_fits(plan.start(), files.folder)
        try:
            for progress in server.train(start):
                k = progress.round
                again, last = progress is start, k == plan.rounds
                if again and not last:
                    continue
                line = round_line(plan.algorithm, progress)
                if server.account:
                    line["epsilon"] = server.account.spent()
                outcome = None
                if k % config.eval_every == 0 or last:
                    outcome = server.evaluate(progress, chooses(plan.eval_lr, last))
                    line |= _evaluation(outcome, plan)
                if not again:
                    files.add(line)
                    if config.save_every and k and k % config.save_every == 0:
                        directory.write_model(method, plan.seed, progress.server, k)
                    files.checkpoint(k, progress.server, {}, server.notes)
                _tell(plan, config, progress, outcome, line.get("epsilon"))
        finally:  # also of a training that had to stop it is told what was spent
            if server.account:
                write_durably(directory.path / PRIVACY, signed(server.account.summary()))
        if last and outcome:
            _end(plan, outcome, progress, directory, files)


def _evaluation(outcome: Outcome, plan: Plan) -> dict[str, Any]:
    """What a line of metrics says of an evaluation."""
    line = evaluation_line(outcome.evaluation, plan.eval_steps, plan.measure)
    unscored = [{"agent": m.agent, "reason": m.reason} for m in outcome.missing]
    return {
        **(line if "seen" in line["evaluation"] else {}),
        **({"unscored": unscored} if unscored else {}),
    }


def _tell(
    plan: Plan,
    config: Config,
    progress: Progress,
    outcome: Outcome | None,
    epsilon: dict[str, float] | None,
) -> None:
    """One line about a round, for those who watch."""
    asked = len(progress.cohort)
    took = asked - len(progress.dropped) - len({r.agent for r in progress.rejected})
    parts = [f"round {progress.round} of {plan.rounds}"]
    if asked:
        parts.append(f"{took} of {asked} sites")
    if outcome and outcome.scores:
        (method,) = config.algorithms()
        steps = config.steps_of(method)[0]
        final = outcome.evaluation.chosen or outcome.scores
        before, after = (summarise(final, s, plan.measure).mean for s in (0, steps))
        parts.append(f"{plan.measure.name} {before:.3f}, after {steps} steps {after:.3f}")
    if epsilon:
        parts.append(
            f"epsilon {epsilon['released']:.4g} of the released model and "
            f"{epsilon['server']:.4g} against the server"
        )
    LOG.info(", ".join(parts))


def _end(
    plan: Plan,
    outcome: Outcome,
    progress: Progress,
    directory: RunDirectory,
    files: PartFiles,
) -> None:
    """Write the last scores and state, and who the sites are."""
    if plan.sends_scores and not any(scores.seen for scores in outcome.scores):
        reasons = "; ".join(str(error) for error in outcome.missing)
        raise TrainingError(f"no site sent scores that can be used: {reasons}")
    directory.write_sites(plan.agents, plan.seen, outcome.scores, plan.seed)
    if outcome.majority and len(outcome.majority) == len(outcome.scores):
        folder = directory.part("baselines", "majority", plan.seed)
        PartFiles(folder, files.belongs_to).finish_baseline(
            plan.rounds, Evaluation(list(outcome.majority))
        )
    files.finish(plan.rounds, outcome.evaluation, progress.server)


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    """Write what happens into a file too, for those who watch and those who come later."""
    try:
        handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise cannot_write(path, error) from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before = LOG.level
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOG.setLevel(before)
        LOG.removeHandler(handler)
        handler.close()
