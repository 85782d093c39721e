"""The server's half: rounds over sites, with the simulator's cohorts, checks and aggregation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from flwr.app import MessageType, RecordDict
from flwr.serverapp import Grid
from pydantic import Field, TypeAdapter, ValidationError

from nufed.algorithm import ClientUpdate, Cost, State
from nufed.data import ScoredOn
from nufed.errors import RunError, UpdateError, shown
from nufed.evaluate import AgentScores, Evaluation, evaluate_with_choice
from nufed.flower.account import Account
from nufed.flower.asking import LOG, Roster, ask
from nufed.flower.payload import PayloadError, content, read_scores, read_update
from nufed.flower.plan import Plan
from nufed.server import Progress, close_round, to_send, try_round


@dataclass(frozen=True)
class Outcome:
    """Every site's scores of a model; ``missing`` are those without usable ones, and why.

    ``majority`` are the scores of always answering a site's most frequent class, where it has
    classes.
    """

    evaluation: Evaluation
    missing: tuple[UpdateError, ...] = ()
    majority: tuple[AgentScores, ...] = ()

    @property
    def scores(self) -> list[AgentScores]:
        """With the step size of fine-tuning as trained."""
        return self.evaluation.as_trained


class Server:
    """Runs a plan over the sites that a Grid reaches.

    Args:
        plan: what is trained.
        grid: reaches the sites.
        run: names the run to sites, 32 hexadecimal digits; they keep their states under it.
        notes: what :attr:`notes` was when training was interrupted.
        cohort_seed: what cohorts are drawn from, if that must not be the plan's seed, which
            everyone knows.

    ``account`` is what was spent so far, where the plan has privacy.
    """

    def __init__(
        self,
        plan: Plan,
        grid: Grid,
        run: str,
        notes: Mapping[str, Any] | None = None,
        cohort_seed: int | None = None,
    ) -> None:
        self._plan, self._grid, self._run = plan, grid, run
        self._cohort_seed = plan.seed if cohort_seed is None else cohort_seed
        self._roster = Roster(grid, plan)
        ledger = None if notes is None else notes.get("ledger", "missing")
        self.account = (
            Account(plan.privacy, len(plan.seen), plan.cohort, ledger) if plan.privacy else None
        )
        # the last round of which an agent's update was taken
        self._taken = _read_taken((notes or {}).get("taken", {}))

    @property
    def notes(self) -> dict[str, Any]:
        """What must be known to go on, beside the progress, as plain JSON."""
        taken = {str(agent): round for agent, round in sorted(self._taken.items())}
        return {"taken": taken, **({"ledger": self.account.as_json()} if self.account else {})}

    def train(self, start: Progress | None = None) -> Iterator[Progress]:
        """Where training stands at the start and after every round."""
        self._roster.gather()
        progress = start or Progress(0, self._plan.start())
        yield progress
        while progress.round < self._plan.rounds:
            progress = self._round(progress)
            yield progress

    def _round(self, before: Progress) -> Progress:
        plan = self._plan
        return try_round(
            lambda cohort, number: self._attempt(before, cohort),
            before.round + 1,
            plan.seen,
            participation=plan.participation,
            seed=self._cohort_seed,
            rules=plan.rules,
        )

    def _attempt(self, before: Progress, cohort: list[int]) -> Progress:
        plan, k = self._plan, before.round + 1
        if self.account:
            self.account.check_next()
        self._roster.wait_for(cohort, plan.rules.min_updates)
        answers, dropped = self._ask(MessageType.TRAIN, before.server, k, cohort)
        expected = {name: before.server[name] for name in plan.algorithm.sends}
        updates: list[ClientUpdate] = []
        failed: list[UpdateError] = []
        cost = Cost()
        for agent, answer in answers.items():
            try:
                reply: Mapping[str, object] = _usable(answer)
                if self.account:
                    reply = self.account.charge(agent, reply)
                update, spent, began = read_update(reply, agent, expected)
                if plan.keeps_state and began != self._taken.get(agent, 0):
                    LOG.warning("round %d: agent %d lost its state and started anew", k, agent)
                updates.append(update)
                cost += spent
            except PayloadError as error:
                failed.append(UpdateError(agent, k, str(error)))
        server, rejected = close_round(
            plan.algorithm,
            before.server,
            updates,
            k,
            cohort=cohort,
            failed=failed,
            rules=plan.rules,
        )
        left_out = {error.agent for error in rejected}
        taken = [update.agent for update in updates if update.agent not in left_out]
        if self.account:
            self.account.close(len(taken))
        if plan.keeps_state:
            self._taken |= dict.fromkeys(taken, k)
        return Progress(
            round=k,
            server=server,
            cohort=tuple(cohort),
            rejected=tuple(rejected),
            dropped=tuple(dropped),
            cost=cost,
        )

    def evaluate(self, progress: Progress, choose: bool = False) -> Outcome:
        """What the sites score after personalising the server's model, each on its own data.

        With ``choose`` also with step sizes of fine-tuning that are chosen on the validation
        samples of seen agents. Nobody is asked where the plan says that sites keep their scores.
        """
        plan = self._plan
        if not plan.sends_scores:
            return Outcome(Evaluation([]))
        missing: list[UpdateError] = []
        majority: list[AgentScores] = []

        def score(scales: Sequence[float]) -> list[list[AgentScores]]:
            scores, without, nulls = self._scores(
                progress, range(plan.agents), scales, plan.scored_on, diverged=False
            )
            missing.extend(without)
            majority.extend(nulls)
            return scores

        def validate(scales: Sequence[float]) -> list[list[AgentScores]]:
            # steps that are too large are tried too
            return self._scores(progress, plan.seen, scales, "validation", diverged=True)[0]

        possible = choose and plan.validation > 0
        evaluation = evaluate_with_choice(
            score, validate if possible else None, plan.eval_steps, plan.measure
        )
        return Outcome(evaluation, tuple(missing), tuple(majority))

    def _scores(
        self,
        progress: Progress,
        agents: Iterable[int],
        scales: Sequence[float],
        part: ScoredOn,
        diverged: bool,
    ) -> tuple[list[list[AgentScores]], list[UpdateError], list[AgentScores]]:
        """The scores of these agents by scale, who has none and why, and their majority classes."""
        plan, k = self._plan, progress.round
        how: dict[str, Any] = {"scales": list(scales), "part": part}
        answers, away = self._ask(MessageType.EVALUATE, progress.server, k, agents, **how)
        missing = [UpdateError(agent, k, "its site is not there") for agent in away]
        scores: list[list[AgentScores]] = [[] for _ in scales]
        majority: list[AgentScores] = []
        for agent, answer in answers.items():
            try:
                own, null = read_scores(
                    _usable(answer),
                    agent,
                    k,
                    name=self._roster.names[agent],
                    seen=agent in plan.seen,
                    steps=plan.eval_steps,
                    scales=len(scales),
                    by_class=plan.scores_by_class,
                    diverged=diverged,
                )
            except PayloadError as reason:
                missing.append(UpdateError(agent, k, str(reason)))
                continue
            for by_scale, each in zip(scores, own, strict=True):
                by_scale.append(each)
            majority += [null] if null else []
        for error in missing:
            LOG.warning("scores left out: %s", error)
        return scores, missing, majority

    def _ask(
        self, kind: str, server: State, round: int, agents: Iterable[int], **more: Any
    ) -> tuple[dict[int, RecordDict | str], list[int]]:
        """What these agents answer, in their order, and those that have no site now."""
        self._roster.refresh()
        nodes = {agent: self._roster.nodes.get(agent) for agent in agents}
        away = [agent for agent, node in nodes.items() if node is None]
        if away:
            LOG.warning("round %d: agents %s have no site that is there", round, away)
        sent = to_send(self._plan.algorithm, server)
        there = {agent: node for agent, node in nodes.items() if node is not None}
        contents = {
            node: content(
                sent,
                run=self._run,
                agent=agent,
                round=round,
                taken=self._taken.get(agent, 0),
                released=self.account.released_by(agent) if self.account else 0,
                **more,
            )
            for agent, node in there.items()
        }
        answers = ask(self._grid, kind, contents, self._plan.deadline)
        return {agent: answers[node] for agent, node in there.items()}, away


def _usable(answer: RecordDict | str) -> RecordDict:
    if isinstance(answer, str):
        raise PayloadError(answer)
    return answer


def _read_taken(record: object) -> dict[int, int]:
    """What the notes of a checkpoint say of whose updates were taken last in which round."""
    try:
        return TypeAdapter(dict[int, Annotated[int, Field(strict=True, ge=0)]]).validate_python(
            record
        )
    except ValidationError:
        raise RunError(f"the notes of the checkpoint do not fit: taken = {shown(record)}") from None
