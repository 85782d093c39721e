"""A cluster of Ray: actors on its nodes in place of worker processes here.

:class:`RayWorkers` is a second :class:`~nufed.simulation.worker_pool.Pool`. An actor gets the work
as a spawned process does: serialised, and rebuilt from the configuration. Nodes need not share a
file system. A task whose node is lost is performed again by another actor. To and from the worker
engine vectors go through Ray's object store.
"""

from __future__ import annotations

import logging
import platform
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import version
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch

from nufed.algorithms.protocol import State
from nufed.errors import InputError, NumericalWarning, TrainingError, in_short
from nufed.simulation.engine import Engine
from nufed.simulation.worker_engine import WorkerEngine
from nufed.simulation.worker_pool import Notify, perform, receive

LOG = logging.getLogger("nufed")
MAX_LOSSES = 3  # of actors that one task may cost
AGAIN_SECONDS = (1.0, 20.0)  # before a failed start is tried again; Ray sees a death after about 15
POLL_SECONDS = 0.05  # between polls of the mailbox
KEPT_WORKS = 2  # that an actor holds: a part may use two engines in turns


class _Start(NamedTuple):
    """An actor that starts."""

    actor: Any
    failures: int  # before it, on nodes that all stayed alive
    nodes: frozenset[str]  # that were alive when it was placed


class RayCluster:
    """A connection to a running cluster, and actors on all its cores.

    Args:
        address: ``auto`` for the cluster that this machine belongs to, or ``host:port`` of a head.
        threads: torch's threads, and cores, of each actor.

    ``slots`` is the number of actors that the cluster has cores for. An actor is used as soon as it
    has started. One that is lost, with its node or alone, is replaced when there is a free core.
    Ray may place an actor on a node that has just died: a start that fails is tried again, and is
    an error only if it keeps failing while all nodes stay alive.
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
        self.starting: dict[Any, _Start] = {}  # by the reply of an actor that is ready
        self.later: list[tuple[float, int]] = []  # when to start an actor, and its failures
        self.idle: list[Any] = []
        self._known: set[tuple[str, ...]] = {_software()}
        self._mailbox: list[Any] = []  # one, when it is used
        for _ in range(self.slots):
            self.start_actor()
        actors = self.starting, self.idle, self._mailbox
        self.close = weakref.finalize(self, _end, *actors, disconnect=not connected)

    def workers(
        self, work: Callable[[Any, Notify], Any], stops: Callable[[], bool] = lambda: False
    ) -> RayWorkers:
        """The actors; what ``stops`` returns is what ``notify`` returns to ``work``."""
        return RayWorkers(self, work, stops)

    def mailbox(self) -> Any:
        """The mailbox, which has answered before."""
        if not self._mailbox:
            self._mailbox.append(self._new_mailbox())
        return self._mailbox[0]

    def forget_mailbox(self) -> None:
        """It is lost: the next one is new."""
        self._mailbox.clear()

    def _new_mailbox(self) -> Any:
        ray, failures = ray_package(), 0
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=True
        )
        while True:
            nodes = _living_nodes()
            actor = ray.remote(_Mailbox).options(num_cpus=0, scheduling_strategy=here).remote()
            try:
                ray.get(actor.take.remote(False))
                return actor
            except _losses() as error:
                failures = _failures(_Start(actor, failures, nodes), error)
            if failures:
                time.sleep(AGAIN_SECONDS[failures - 1])

    def start_actor(self, failures: int = 0) -> None:
        nodes = _living_nodes()
        actor = ray_package().remote(_Actor).options(num_cpus=self.threads).remote(self.threads)
        self.starting[actor.software.remote()] = _Start(actor, failures, nodes)

    def start_due(self) -> float | None:
        """Start the actors whose time has come; the seconds until the next one."""
        due = [entry for entry in self.later if entry[0] <= time.monotonic()]
        for entry in due:
            self.later.remove(entry)
            self.start_actor(entry[1])
        return max(min(self.later)[0] - time.monotonic(), 0.0) if self.later else None

    def check_idle(self) -> None:
        """Ask the idle actors whether they are there: a lost node may have had several."""
        nodes = _living_nodes()
        while self.idle:
            actor = self.idle.pop()
            self.starting[actor.software.remote()] = _Start(actor, 0, nodes)

    def actor_started(self, reply: Any) -> None:
        """Use an actor that has replied."""
        start = self.starting.pop(reply)
        try:
            software = ray_package().get(reply)
        except _losses() as error:
            failures = _failures(start, error)
            if failures:
                self.later.append((time.monotonic() + AGAIN_SECONDS[failures - 1], failures))
            else:
                self.start_actor()
            return
        if software not in self._known:
            self._known.add(software)
            here, there = (", ".join(versions) for versions in (_software(), software))
            warnings.warn(
                f"a node of the cluster has {there}, and this machine {here}: results may differ "
                "in their last bits from those of one machine",
                NumericalWarning,
                stacklevel=2,
            )
        self.idle.append(start.actor)


def _failures(start: _Start, error: Exception) -> int:
    """How often a start has now failed on nodes that all stayed alive; too often is an error."""
    healthy = start.nodes <= _living_nodes()
    failures = start.failures + 1 if healthy else 0
    if failures > len(AGAIN_SECONDS):
        raise TrainingError(
            f"an actor of Ray could not start in {failures} attempts ({_reason(error)}): every "
            "node needs the same version of nufed"
        ) from error
    LOG.warning(
        "a node or actor of Ray was lost while it started, which is tried again (%s)",
        _reason(error),
    )
    return failures


def _reason(error: Exception) -> str:
    """What Ray says at the end of its text, for example a ModuleNotFoundError."""
    lines = [line for line in str(error).splitlines() if "never ran" not in line]
    return lines[-1].strip() if lines else type(error).__name__


def _living_nodes() -> frozenset[str]:
    return frozenset(node["NodeID"] for node in ray_package().nodes() if node["Alive"])


def _end(
    starting: dict[Any, _Start], idle: list[Any], mailbox: list[Any], *, disconnect: bool
) -> None:
    ray = ray_package()
    with suppress(Exception):  # the cluster may be gone
        for actor in (*(start.actor for start in starting.values()), *idle, *mailbox):
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
        third one that a task costs ends with an error that names the task. Tasks start again, too,
        if the mailbox is lost, with what they had sent.

        ``prepare(task)`` is what an actor gets, made when the task is sent, again after a loss;
        ``on_result(task, result)`` is called when a result arrives.
        """
        todo, live = _Tasks(tasks, describe), on_notify is not None
        try:
            while todo.waiting or todo.busy:
                if stop and stop([tasks[number] for number, _, _ in todo.busy.values()]):
                    break
                if self._stops():
                    todo.waiting.clear()
                mailbox: Any = self._cluster.mailbox() if live else None
                self._send(todo, prepare, mailbox)
                ready = self._ready(todo.busy, polls=live or stop is not None)
                if on_notify is not None and not self._pass_on(todo, mailbox, on_notify):
                    continue
                for reply in ready:
                    self._take(todo, reply, on_result)
        finally:
            for _, _, actor in todo.busy.values():  # after an error, or abandoned
                ray_package().kill(actor)
                self._cluster.start_actor()
        return todo.results

    def _send(self, todo: _Tasks, prepare: Callable[[Any], Any], mailbox: Any) -> None:
        """Give waiting tasks to idle actors."""
        idle = self._cluster.idle
        while todo.waiting and idle:
            (number, losses), actor = todo.waiting.popleft(), idle.pop()
            sent = prepare(todo.tasks[number])
            reply = actor.run.remote((number, losses), [self._work], sent, mailbox)
            todo.busy[reply] = number, losses, actor

    def _pass_on(self, todo: _Tasks, mailbox: Any, on_notify: Notify) -> bool:
        """Pass on what actors have sent; False if the mailbox is lost, and with it all tasks."""
        ray = ray_package()
        current = {(number, losses) for number, losses, _ in todo.busy.values()}
        try:
            taken = ray.get(mailbox.take.remote(self._stops()))
        except _losses() as error:
            self._cluster.forget_mailbox()
            for reply in list(todo.busy):
                ray.kill(todo.busy[reply][2])
                self._lost(todo, reply, error)
            return False
        for key, (kind, content) in taken:
            if kind != "notification":
                receive(kind, content)
            elif key in current:  # not of an actor that was lost since
                todo.last[key[0]] = content
                on_notify(content)
        return True

    def _take(self, todo: _Tasks, reply: Any, on_result: Callable[[Any, Any], None]) -> None:
        """Take the reply of an actor that has started, ended its task or was lost."""
        if reply in self._cluster.starting:
            self._cluster.actor_started(reply)
            return
        try:
            kind, content, messages = ray_package().get(reply)
        except _losses() as error:
            self._lost(todo, reply, error)
            return
        number, _, actor = todo.busy.pop(reply)
        self._cluster.idle.append(actor)
        for message in messages:
            receive(*message)
        if kind == "error":
            raise content
        todo.results[number] = content
        on_result(todo.tasks[number], content)

    def _ready(self, busy: Iterable[Any], *, polls: bool) -> list[Any]:
        """Replies that have come: waits for one, or until there is something else to do."""
        next_start = self._cluster.start_due()
        replies, seconds = [*busy, *self._cluster.starting], POLL_SECONDS if polls else next_start
        if not replies:  # Ray would refuse to wait
            time.sleep(seconds or 0.0)
            return []
        return list(ray_package().wait(replies, timeout=seconds)[0])

    def _lost(self, todo: _Tasks, reply: Any, error: Exception) -> None:
        """Let the task of a lost actor wait again, unless it has cost too many."""
        number, losses, _ = todo.busy.pop(reply)
        what, losses = todo.describe(todo.tasks[number], todo.last.get(number)), losses + 1
        if losses >= MAX_LOSSES:
            raise TrainingError(
                f"{losses} actors of Ray were lost while working on {what}: {in_short(error)}"
            ) from error
        LOG.warning("a node or actor of Ray was lost while working on %s, which starts again", what)
        self._cluster.start_actor()
        self._cluster.check_idle()
        todo.waiting.appendleft((number, losses))


class _Tasks:
    """Tasks by number: waiting, with the actors they have cost, or busy, by an actor's reply."""

    def __init__(self, tasks: Sequence[Any], describe: Callable[[Any, Any], str]) -> None:
        self.tasks, self.describe = tasks, describe
        self.waiting = deque((number, 0) for number in range(len(tasks)))
        self.busy: dict[Any, tuple[int, int, Any]] = {}
        self.last: dict[int, Any] = {}  # what an actor last sent of a task
        self.results: list[Any] = [None] * len(tasks)


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

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._works: dict[Any, Callable[[Any, Notify], Any]] = {}

    def software(self) -> tuple[str, ...]:
        return _software()

    def run(
        self, key: Any, work: list[Any], task: Any, mailbox: Any
    ) -> tuple[str, Any, list[tuple[str, Any]]]:
        """Perform a task; a mailbox gets messages while it runs, None at its end."""
        (reference,) = work  # in a list, or Ray would get it for every task
        if reference not in self._works:
            while len(self._works) >= KEPT_WORKS:
                del self._works[next(iter(self._works))]
            self._works[reference] = ray_package().get(reference)
        messages: list[tuple[str, Any]] = []

        def send(message: tuple[str, Any]) -> bool:
            if mailbox is None:
                messages.append(message)
                return False
            try:
                return bool(ray_package().get(mailbox.put.remote(key, message)))
            except _losses():  # no error of the task: it starts again
                ray_package().actor.exit_actor()
                raise

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


class RayEngine(WorkerEngine):
    """A worker engine whose processes are actors of a cluster.

    Algorithms and measures are sent when they are first used, so that no actor is restarted.
    """

    def __init__(self, cluster: RayCluster, engine: Engine, rebuild: Callable[[], Engine]) -> None:
        super().__init__(engine, cluster.slots, rebuild)
        self._cluster: RayCluster | None = cluster
        self._buffer = ObjectStore()
        self._sent: list[tuple[object, Any]] = []  # objects, and their references
        self._got: dict[Any, Any] = {}  # in an actor

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_cluster": None, "_sent": [], "_objects": []}

    def _prepare(self, objects: list[object], sizes: list[int]) -> Iterator[range]:
        if self._workers is None:
            assert self._cluster is not None
            self._workers = self._cluster.workers(self._work)
        return repeat(range(0))

    def _index(self, thing: object) -> Any:
        for known, reference in self._sent:
            if known is thing:
                return reference
        self._sent.append((thing, ray_package().put(thing)))
        return self._sent[-1][1]

    def _object(self, index: Any) -> Any:
        if index not in self._got:
            self._got[index] = ray_package().get(index)
        return self._got[index]


class ObjectStore:
    """Ray's object store as a :class:`~nufed.simulation.worker_pool.Buffer`.

    The driver puts a state there once, however many actors read it; an actor returns a state with
    its result, which Ray puts there.
    """

    def __init__(self) -> None:
        self.size, self._at_driver = 0, True

    def __getstate__(self) -> dict[str, Any]:
        return {"size": 0, "_at_driver": False}

    def write(self, state: State, span: range) -> Any:
        packed = [(name, v.dtype, tuple(v.shape), _bytes_of(v)) for name, v in state.items()]
        return ray_package().put(packed) if self._at_driver and packed else packed

    def read(self, layout: Any) -> State:
        packed = layout if isinstance(layout, list) else ray_package().get(layout)
        return {
            name: torch.from_numpy(content.copy()).view(dtype).view(shape)
            for name, dtype, shape, content in packed
        }


def _bytes_of(vector: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The memory of a vector; Ray moves numpy's arrays without a copy."""
    return vector.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
