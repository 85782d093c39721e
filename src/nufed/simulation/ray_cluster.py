"""A cluster of Ray: actors on its nodes in place of worker processes here.

:class:`RayWorkers` is a second :class:`~nufed.simulation.worker_pool.Pool`. An actor gets the work
as a spawned process does: serialised, and rebuilt from the configuration. Nodes need not share a
file system. A task whose node is lost is performed again by another actor.
"""

from __future__ import annotations

import logging
import platform
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Any

import torch

from nufed.errors import InputError, NumericalWarning, TrainingError, in_short
from nufed.simulation.worker_pool import Notify, perform, receive

LOG = logging.getLogger("nufed")
MAX_LOSSES = 3  # of actors that one task may cost
POLL_SECONDS = 0.05  # between looks at what actors have sent
KEPT_WORKS = 2  # that an actor holds: a part may use two engines in turns


class RayCluster:
    """A connection to a running cluster, and actors on all its cores.

    Args:
        address: ``auto`` for the cluster that this machine belongs to, or ``host:port`` of a head.
        threads: torch's threads, and cores, of each actor.

    ``slots`` is the number of actors that the cluster has cores for. An actor is used as soon as it
    has started. One that is lost, with its node or alone, is replaced when there is a free core.
    """

    def __init__(self, address: str, threads: int = 1) -> None:
        ray = ray_package()
        self.threads, connected = threads, ray.is_initialized()
        try:
            if not connected:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            self.slots = int(ray.cluster_resources().get("CPU", 0)) // threads
        except Exception as error:  # Ray raises many kinds, among them RuntimeError and ValueError
            raise InputError(
                f"--ray {address}: no cluster of Ray could be reached ({in_short(error)}); start "
                "one with `ray start --head` here and `ray start --address=HOST:PORT` on other "
                "machines, and give auto or the address"
            ) from error
        if self.slots < 1:
            raise InputError(f"--ray {address}: its nodes have fewer than {threads} cores")
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        self.mailbox = ray.remote(_Mailbox).options(num_cpus=0, scheduling_strategy=here).remote()
        self.starting: dict[Any, Any] = {}  # the reply that an actor is ready with, and the actor
        self.idle: list[Any] = []
        self._known: set[tuple[str, ...]] = {_software()}
        for _ in range(self.slots):
            self.start_actor()
        actors = self.starting, self.idle, self.mailbox
        self.close = weakref.finalize(self, _end, *actors, disconnect=not connected)

    def workers(
        self, work: Callable[[Any, Notify], Any], stops: Callable[[], bool] = lambda: False
    ) -> RayWorkers:
        """The actors; what ``stops`` returns is what ``notify`` returns to ``work``."""
        return RayWorkers(self, work, stops)

    def start_actor(self) -> None:
        actor = ray_package().remote(_Actor).options(num_cpus=self.threads)
        started = actor.remote(self.threads, self.mailbox)
        self.starting[started.software.remote()] = started

    def actor_started(self, reply: Any) -> None:
        """Use an actor that has replied."""
        actor = self.starting.pop(reply)
        try:
            software = ray_package().get(reply)
        except _losses() as error:
            if getattr(error, "actor_init_failed", False):  # for example a missing package
                raise TrainingError(
                    f"an actor of Ray could not start ({in_short(error)}): every node needs the "
                    "same version of nufed"
                ) from error
            LOG.warning("a node or actor of Ray was lost while it started")
            self.start_actor()
            return
        if software not in self._known:
            self._known.add(software)
            here, there = (", ".join(found) for found in (_software(), software))
            warnings.warn(
                f"a node of the cluster has {there}, and this machine {here}: results may differ "
                "in their last bits from those of one machine",
                NumericalWarning,
                stacklevel=2,
            )
        self.idle.append(actor)


def _end(starting: dict[Any, Any], idle: list[Any], mailbox: Any, *, disconnect: bool) -> None:
    ray = ray_package()
    with suppress(Exception):  # the cluster may be gone
        for actor in (*starting.values(), *idle, mailbox):
            ray.kill(actor)
    if disconnect:
        ray.shutdown()


class RayWorkers:
    """A cluster's actors, which call ``work(task, notify)`` (a
    :class:`~nufed.simulation.worker_pool.Pool`)."""

    def __init__(
        self, cluster: RayCluster, work: Callable[[Any, Notify], Any], stops: Callable[[], bool]
    ) -> None:
        self._cluster, self._stops = cluster, stops
        try:
            self._work = ray_package().put(work)
        except Exception as error:  # objects of the user's may raise anything
            raise InputError(
                f"this run can't be sent to the nodes of a cluster ({in_short(error)}): define "
                "models, losses, metrics and methods in a module that every node can import"
            ) from error

    def close(self) -> None:
        """Forget the work; the cluster keeps its actors."""
        self._work = None

    def map(
        self,
        tasks: Sequence[Any],
        describe: Callable[[Any, Any], str],
        on_notify: Notify | None = None,
        stop: Callable[[list[Any]], bool] | None = None,
        *,
        prepare: Callable[[Any], Any] = lambda task: task,
        on_result: Callable[[Any, Any], None] = lambda task, result: None,
    ) -> list[Any]:
        """As :meth:`nufed.simulation.worker_pool.Workers.map`, but a lost actor is replaced; the
        third one that a task costs ends with an error that names the task.

        ``prepare(task)`` is what an actor gets, made when the task is sent, again after a loss;
        ``on_result(task, result)`` is called when a result arrives.
        """
        ray, cluster = ray_package(), self._cluster
        waiting = deque((number, 0) for number in range(len(tasks)))  # and the actors it has cost
        busy: dict[Any, tuple[int, int, Any]] = {}
        results: list[Any] = [None] * len(tasks)
        live, last = on_notify is not None, dict[int, Any]()
        try:
            while waiting or busy:
                if stop and stop([tasks[number] for number, _, _ in busy.values()]):
                    break
                if self._stops():
                    waiting.clear()
                while waiting and cluster.idle:
                    (number, losses), actor = waiting.popleft(), cluster.idle.pop()
                    key, sent = (number, losses), prepare(tasks[number])
                    busy[actor.run.remote(key, [self._work], sent, live)] = number, losses, actor
                ready, _ = ray.wait(
                    [*busy, *cluster.starting], timeout=POLL_SECONDS if live or stop else None
                )
                if on_notify is not None:
                    current = {(number, losses) for number, losses, _ in busy.values()}
                    for key, content in self._messages():
                        if key in current:  # not of an actor that was lost since
                            last[key[0]] = content
                            on_notify(content)
                for reply in ready:
                    if reply in cluster.starting:
                        cluster.actor_started(reply)
                        continue
                    number, losses, actor = busy.pop(reply)
                    try:
                        kind, content, messages = ray.get(reply)
                    except _losses() as error:
                        self._lost(error, describe(tasks[number], last.get(number)), losses + 1)
                        waiting.appendleft((number, losses + 1))
                        continue
                    cluster.idle.append(actor)
                    for message in messages:
                        receive(*message)
                    if kind == "error":
                        raise content
                    results[number] = content
                    on_result(tasks[number], content)
        finally:
            for _, _, actor in busy.values():  # after an error, or abandoned
                ray.kill(actor)
                cluster.start_actor()
        return results

    def _messages(self) -> Iterator[tuple[Any, Any]]:
        """Notifications that actors have sent, with their keys."""
        for key, (kind, content) in ray_package().get(
            self._cluster.mailbox.take.remote(self._stops())
        ):
            if kind == "notification":
                yield key, content
            else:
                receive(kind, content)

    def _lost(self, error: Exception, what: str, losses: int) -> None:
        if losses >= MAX_LOSSES:
            raise TrainingError(
                f"{losses} actors of Ray were lost while working on {what}: {in_short(error)}"
            ) from error
        LOG.warning("a node or actor of Ray was lost while working on %s, which starts again", what)
        self._cluster.start_actor()


class _Mailbox:
    """An actor at the driver's node: what actors send, until the driver takes it."""

    def __init__(self) -> None:
        self._messages: list[Any] = []
        self._stops = False

    def put(self, key: Any, message: tuple[str, Any]) -> bool:
        self._messages.append((key, message))
        return self._stops

    def take(self, stops: bool) -> list[Any]:
        self._stops = stops
        taken, self._messages = self._messages, []
        return taken


class _Actor:
    """A worker on a node."""

    def __init__(self, threads: int, mailbox: Any) -> None:
        torch.set_num_threads(threads)
        self._mailbox = mailbox
        self._works: dict[Any, Callable[[Any, Notify], Any]] = {}

    def software(self) -> tuple[str, ...]:
        return _software()

    def run(
        self, key: Any, work: list[Any], task: Any, live: bool
    ) -> tuple[str, Any, list[tuple[str, Any]]]:
        """Perform a task; ``live``: send messages while it runs instead of at its end."""
        (reference,) = work  # in a list, or Ray would get it for every task
        if reference not in self._works:
            while len(self._works) >= KEPT_WORKS:
                del self._works[next(iter(self._works))]
            self._works[reference] = ray_package().get(reference)
        messages: list[tuple[str, Any]] = []

        def send(message: tuple[str, Any]) -> bool:
            if live:
                return bool(ray_package().get(self._mailbox.put.remote(key, message)))
            messages.append(message)
            return False

        return (*perform(self._works[reference], task, send), messages)


def _software() -> tuple[str, ...]:
    """What bits depend on."""
    packages = (f"{package} {version(package)}" for package in ("nufed", "torch", "numpy"))
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return (*packages, cpu)


def _losses() -> tuple[type[Exception], ...]:
    """What Ray raises where an actor or its node was lost."""
    from ray import exceptions

    return (
        exceptions.RayActorError,
        exceptions.WorkerCrashedError,
        exceptions.NodeDiedError,
        exceptions.ObjectLostError,
        exceptions.OutOfMemoryError,
    )


def ray_package() -> Any:
    """Ray, imported when a cluster is used."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise InputError(
            'a cluster of Ray needs the package: install it with pip install "nufed[ray]"'
        ) from None
    return ray
