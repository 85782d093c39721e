"""Starts or resumes the training of a federation in a run directory, as in simulation.

A checkpoint is written after every round. Flower itself loses a run whose ServerApp or SuperLink
was killed: started again with the same directory, it resumes from the last checkpoint.
"""

from __future__ import annotations

import secrets
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, TypeAlias

from flwr.serverapp import Grid

from nufed.errors import NufedError, NumericalWarning, RunError, TrainingError
from nufed.evaluate import Evaluation, chooses, summarise
from nufed.flower.app.events import EventLog, MethodStarted, RoundRecorded
from nufed.flower.app.payload import VERSION
from nufed.flower.app.plan import Plan
from nufed.flower.app.privacy import Ledger, check_plan
from nufed.flower.app.registry import registry_file
from nufed.flower.app.roster import Exclusions, TooFewSitesError
from nufed.flower.app.scoring import Outcome
from nufed.flower.app.server_app import Cohorts, Server
from nufed.flower.logs import LOG, event, log_to
from nufed.lab.config import Config
from nufed.lab.config.devices import torch_threads
from nufed.lab.files import cannot_write, locked, read_sealed, sha256, sha256_of, write_sealed
from nufed.lab.runs import RunDirectory
from nufed.lab.runs.audit_log import AUDIT, AuditLog
from nufed.lab.runs.directory import PRIVACY
from nufed.lab.runs.federation_records import FederationRecord
from nufed.lab.runs.json_files import checked
from nufed.lab.runs.part_files import FAILURE, PartFiles, Recorder
from nufed.lab.runs.provenance import Provenance
from nufed.lab.runs.records import evaluation_line
from nufed.server import Progress
from nufed.server.rounds import warn_of_memory

Measured: TypeAlias = Callable[[float | None], tuple[Mapping[str, Plan], Config]]
"""Makes the plans and the configuration from a curvature; None: it is not known."""

FEDERATION = "federation.json"  # the run's id, its configuration's digest, a secret seed


def train_federation(
    plans: Mapping[str, Plan],
    config: Config,
    grid: Grid,
    out: Path | None,
    log_format: str = "text",
    measured: Measured | None = None,
) -> Path:
    """Train and evaluate over the sites that a grid reaches; returns the run directory.

    After a method that fails the others are trained, and then it is raised. Not without sites; nor
    with privacy, whose account relies on the order of requests: of a failed round, sites only keep
    the update that was requested last.

    Args:
        plans: what is trained, by method, one after the other.
        config: the configuration that the plans were made from.
        grid: reaches the sites.
        out: the run directory; a run that exists there is resumed. By default the next free
            ``runs/NAME-001``.
        log_format: of the log in it: "text" or "json".
        measured: makes plans and configuration anew from a curvature, which sites are asked for
            before the first round; None: nothing depends on it.
    """
    resuming = out is not None and (out / "run.json").exists()
    if measured and resuming and out:
        plans, config = measured(Provenance(RunDirectory(out)).curvature())
        measured = None
    with _opened(plans, config, grid, out, log_format, measured) as run:
        left, failures = run.left(), list[TrainingError]()
        try:
            with run.events.running() if left else nullcontext():
                for number, method in enumerate(left, 1):
                    try:
                        run.train(method, later=len(left) - number)
                    except TrainingError as error:
                        run.directory.write_failure(method, plans[method].seed, str(error))
                        if plans[method].privacy or isinstance(error, TooFewSitesError):
                            raise
                        failures.append(error)
                        if number < len(left):
                            LOG.error("%s failed, and %s follows: %s", method, left[number], error)
                if failures:
                    raise failures[0]
        except TrainingError:
            run.report()
            raise
        run.report()
    return run.directory.path


@contextmanager
def _opened(
    plans: Mapping[str, Plan],
    config: Config,
    grid: Grid,
    out: Path | None,
    log_format: str,
    measured: Measured | None,
) -> Iterator[_Run]:
    """A new run, or one that is resumed; logs and audits how it ends."""
    plan = next(iter(plans.values()))  # all have the same sites, rounds and privacy
    if plan.privacy:
        check_plan(plan.privacy, len(plan.seen), plan.cohort, len(plans) * plan.rounds)
    resuming = out is not None and (out / "run.json").exists()
    asking = out is not None and (out / AUDIT).exists()  # it was killed while it queried sites
    known = out if resuming or asking else None
    directory = RunDirectory(known) if known else RunDirectory.create(config.name, out)
    if resuming:
        directory.existing()
    with torch_threads(plan.threads), locked(directory.path), log_to(directory.path, log_format):
        audit = _open_audit_log(directory, config, plan, resuming)
        try:
            events = EventLog(plan, config.name, directory.path, audit.write)
            if measured:
                plans, config = measured(_look(plan, grid, directory, events))
                plan = next(iter(plans.values()))
                about = {"measured_curvature": config.measured_curvature}
                audit.write("step sizes", configuration=config.fingerprint, **about)
            identity = (_resume if resuming else _begin)(directory, config, plan)
            # as recorded: the same configuration may have other keys in another version of nufed
            belongs_to = {"configuration": identity.configuration or config.fingerprint}
            parts = {
                method: PartFiles(directory.part("methods", method, plan.seed), belongs_to)
                for method in plans
            }
            for files in parts.values():
                files.check_rounds(plan.rounds)
            if resuming:
                _record_resumed(directory, config)
            yield _Run(plans, config, grid, directory, identity, parts, events)
        except NufedError as error:
            LOG.error("%s", error)
            audit.write("failed", reason=str(error))
            _log_head(audit)
            raise
        audit.write("finished", released_sha256=_released(directory.path))
        _log_head(audit)
        LOG.info("done: %s", directory.path / "report.html")


def _look(plan: Plan, grid: Grid, directory: RunDirectory, events: EventLog) -> float | None:
    """The curvature of first gradients at the first round's sites, unless they may not tell it."""
    most, why = None, "no site of the first round could measure the curvature"
    if plan.hides_single_numbers:
        why = "sites send no numbers but in sums (secure aggregation, [privacy])"
    else:
        run, exclusions = secrets.token_hex(16), Exclusions(directory.path)
        server = Server(
            plan, grid, run, sites=registry_file(), exclusions=exclusions, events=events
        )
        with events.running(then="waiting for sites"):
            most = server.look()
    if most is None:
        LOG.warning(
            "meta_lr or adapt_lr is not given, and %s: the default of the class is used, which may "
            "be far too small or too large; give both",
            why,
        )
    else:
        LOG.info("step sizes that are not given come from the curvature %.3g at the sites", most)
    return most


def _open_audit_log(
    directory: RunDirectory, config: Config, plan: Plan, resuming: bool
) -> AuditLog:
    audit = AuditLog(directory.path / AUDIT)
    audit.write(
        "resumed" if resuming else "started",
        name=config.name,
        configuration=config.fingerprint,
        nufed=VERSION,
        sites=plan.agents,
        rounds=plan.rounds,
    )
    return audit


def _log_head(audit: AuditLog) -> None:
    LOG.info("the head of the audit log is %s", audit.head)


def _released(run: Path) -> dict[str, str]:
    """The SHA-256 of the files with models that a run has written."""
    files = [*run.glob("methods/*/seed-*/model.safetensors"), *run.glob("bundles/*.nufed")]
    return {str(path.relative_to(run)): sha256_of(path) for path in sorted(files)}


def _begin(directory: RunDirectory, config: Config, plan: Plan) -> FederationRecord:
    """Write the run's initial records; returns the content of federation.json."""
    run, seed = secrets.token_hex(16), secrets.randbits(128) if plan.privacy else None
    identity = FederationRecord(run=run, configuration=config.fingerprint, cohort_seed=seed)
    if plan.privacy:  # epsilon assumes secret cohorts, and files here name them
        try:
            directory.path.chmod(0o700)
        except OSError as error:
            raise cannot_write(directory.path, error) from error
    assert plan.like is not None
    write_sealed(directory.path / FEDERATION, identity.model_dump(exclude_none=True))
    engines = dict.fromkeys(config.algorithms(), "flower")
    Provenance(directory).write(config, plan.measure, engines, plan.like, data_sha256="")
    LOG.info("%s starts: %d sites, %d rounds", config.name, plan.agents, plan.rounds)
    return identity


def _resume(directory: RunDirectory, config: Config, plan: Plan) -> FederationRecord:
    Provenance(directory).check_config(config)
    path = directory.path / FEDERATION
    identity = checked(FederationRecord, read_sealed(path).about, path)
    if plan.privacy and identity.cohort_seed is None:
        raise RunError(f"{path} has no cohort_seed, which a private run needs: start a new one")
    return identity


def _record_resumed(directory: RunDirectory, config: Config) -> None:
    """Record the software that a run is resumed with, and log how it differs."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", NumericalWarning)
        Provenance(directory).write_resumed(config)
    for warning in told:
        LOG.warning("%s", warning.message)


@dataclass(frozen=True)
class _Run:
    """A federation's run: ``identity`` is federation.json, ``parts`` are by method."""

    plans: Mapping[str, Plan]
    config: Config
    grid: Grid
    directory: RunDirectory
    identity: FederationRecord
    parts: Mapping[str, PartFiles]
    events: EventLog

    def left(self) -> list[str]:
        """The methods that are not trained yet."""
        return [m for m, plan in self.plans.items() if not self.parts[m].is_done(plan.rounds)]

    def train(self, method: str, later: int) -> None:
        """Train the remaining rounds, each recorded and checkpointed before the next starts.

        ``later`` methods follow.
        """
        plan, files, directory = self.plans[method], self.parts[method], self.directory
        began = time.perf_counter()
        self.events.record(MethodStarted(plan, later))
        ledger = _ledger(self.parts.values()) if plan.privacy else None
        last, outcome = False, None
        with Recorder(directory, files, self.config, method, plan.algorithm, plan.seed) as recorder:
            warn_of_memory(method, plan.algorithm, plan.start(), plan.context(1))
            # a private run resumes from its last round only, since its model may have been seen
            start = recorder.resume(plan.start, 1 if plan.privacy else None)
            notes = recorder.notes
            if ledger is not None:
                notes = {**(notes or {}), "ledger": ledger}
            server = Server(
                plan,
                self.grid,
                self.identity.run,
                notes,
                self._cohorts(method),
                registry_file(),
                Exclusions(directory.path),
                self.events,
            )
            if start:
                LOG.info("training resumes after round %d", start.round)
            try:
                for progress in server.train(start):
                    for warning in server.new_warnings():
                        files.warn(*warning)
                    if recorder.is_done(progress):
                        continue
                    line, last = dict[str, Any](), recorder.is_last(progress)
                    if server.account:
                        line["epsilon"] = server.account.spent()
                    outcome = None
                    if recorder.is_evaluated(progress):
                        outcome = server.scoring.evaluate(progress, chooses(plan.eval_lr, last))
                        line |= _evaluation(outcome, plan)
                    recorder.record(progress, line, checkpoint=True, notes=server.notes)
                    self.events.record(RoundRecorded(progress.round, line.get("epsilon", {})))
                    steps = self.config.steps_of(method)[0]
                    _log_round(plan, steps, progress, outcome, line.get("epsilon"))
            finally:  # also record what a training that failed has spent
                if server.account:
                    write_sealed(directory.path / PRIVACY, server.account.summary())
            if last and outcome:
                _finish(plan, server, outcome, progress, directory, recorder)
        seconds = time.perf_counter() - began
        directory.write_timing(method=method, seed=plan.seed, seconds=seconds)

    def _cohorts(self, method: str) -> Cohorts:
        plan = self.plans[method]
        seed = self.identity.cohort_seed if plan.privacy else None
        if seed is not None and plan.method:  # epsilon assumes that no two share cohorts
            seed = int(sha256(f"{seed} {method}".encode())[:32], 16)
        others = [files for name, files in self.parts.items() if name != method]
        return Cohorts(seed, _sums(others) if plan.site_keys else {})

    def report(self) -> None:
        """Write results and the report once every method is trained or has failed."""
        rounds = {method: plan.rounds for method, plan in self.plans.items()}
        done = [files.is_done(rounds[method]) for method, files in self.parts.items()]
        failed = [(files.folder / FAILURE).exists() for files in self.parts.values()]
        if any(done) and all(map(max, done, failed)):
            from nufed.lab.experiment.runner import finish  # it takes a moment to import

            plan = next(iter(self.plans.values()))
            algorithms = {method: each.algorithm for method, each in self.plans.items()}
            finish(self.directory, {plan.seed: plan.objective}, algorithms)


def _ledger(parts: Iterable[PartFiles]) -> dict[str, Any] | None:
    """The privacy spent so far by all methods of a private run; None before the first."""
    notes = [saved.about.notes for files in parts if (saved := files.newest())]
    ledgers = [Ledger.from_json(each.get("ledger", "missing")) for each in notes]
    return reduce(Ledger.joined, ledgers).as_json() if ledgers else None


def _sums(others: Iterable[PartFiles]) -> dict[int, tuple[list[int], list[int]]]:
    """The cohorts of the rounds that other methods have trained, and the sites in their sums."""
    lines = [line for files in others for line in files.all_lines() if line.cohort]
    return {line.round: (line.cohort, line.participants) for line in lines}


def _evaluation(outcome: Outcome, plan: Plan) -> dict[str, Any]:
    """The fields of a metrics line for an evaluation."""
    line = evaluation_line(outcome.evaluation, plan.eval_steps, plan.measure)
    unscored = [{"agent": m.agent, "reason": m.reason} for m in outcome.missing]
    return {
        **(line if "seen" in line["evaluation"] else {}),
        **({"unscored": unscored} if unscored else {}),
    }


def _log_round(
    plan: Plan,
    steps: int,
    progress: Progress,
    outcome: Outcome | None,
    epsilon: dict[str, float] | None,
) -> None:
    """Log one line about a round."""
    size = len(progress.cohort)
    accepted = size - len(progress.dropped) - len({r.agent for r in progress.rejected})
    of = f"{plan.method}, " if plan.method else ""
    parts = [f"{of}round {progress.round} of {plan.rounds}"]
    fields: dict[str, Any] = {"round": progress.round, "rounds": plan.rounds}
    fields |= {"method": plan.method} if plan.method else {}
    if size:
        fields |= {"accepted": accepted, "asked": size}
        parts.append(f"{accepted} of {size} sites")
    if outcome and outcome.scores:
        final = outcome.evaluation.chosen or outcome.scores
        summary = summarise(final, steps, plan.measure)
        fields |= {"measure": plan.measure.name, "score": summary.mean, "scored": summary.agents}
        shared = "" if final[0].global_score is None else f"global {summary.global_mean:.3f}, "
        parts.append(f"{plan.measure.name} {shared}personal {summary.mean:.3f} after {steps} steps")
        parts.append(f"mean over {summary.agents} of {plan.agents} sites")
    if epsilon:
        parts.append(
            f"epsilon {epsilon['released']:.4g} of the released model and "
            f"{epsilon['server']:.4g} against the server"
        )
        fields["epsilon"] = epsilon
    event("%s", ", ".join(parts), event="round", **fields)


def _finish(
    plan: Plan,
    server: Server,
    outcome: Outcome,
    progress: Progress,
    directory: RunDirectory,
    recorder: Recorder,
) -> None:
    """Have sites keep their personal models; write final scores and state, and the sites."""
    if plan.sends_scores and not any(scores.seen for scores in outcome.scores):
        reasons = "; ".join(str(error) for error in outcome.missing)
        raise TrainingError(f"no site sent usable scores: {reasons}")
    server.scoring.keep_personal_models(progress, outcome.evaluation.scale(plan.personal_steps))
    directory.write_sites(plan.agents, plan.seen, outcome.scores, plan.seed, server.names)
    baselines = server.scoring.baselines(progress, [scores.agent for scores in outcome.scores])
    if "majority" in plan.baselines and len(outcome.majority) == len(outcome.scores):
        baselines["majority"] = Evaluation(list(outcome.majority))
    for name, evaluation in baselines.items():
        folder = directory.part("baselines", name, plan.seed)
        files = PartFiles(folder, recorder.files.belongs_to)
        files.finish_baseline(plan.rounds, evaluation)
    recorder.finish(outcome.evaluation, progress)
