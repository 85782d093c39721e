"""Ray's API in this process: what is sent is serialised, and actors can be lost."""

import logging
from types import SimpleNamespace

import cloudpickle

LOG = logging.getLogger("nufed")


class ActorLostError(Exception):
    """Instead of Ray's errors."""


class Lost(BaseException):
    """Raised inside an actor to lose it."""


class Reference:
    def __init__(self, content):
        self._content = cloudpickle.dumps(content)

    def get(self):
        content = cloudpickle.loads(self._content)
        if isinstance(content, ActorLostError):
            raise content
        return content

    def __reduce__(self):
        return held, (id(self),)

    def __hash__(self):
        return id(self)


REFERENCES = {}


def held(number):
    return REFERENCES[number]


class Actor:
    """An actor, whose methods are called immediately; ``failing`` decides whether it starts."""

    failing = staticmethod(lambda kind: False)

    def __init__(self, kind, arguments):
        self.dead = Actor.failing(kind.__name__)
        self.here = None if self.dead else kind(*arguments)

    def __getattr__(self, name):
        def remote(*arguments):
            if self.dead:
                return put(ActorLostError("it was lost before"))
            # as Ray does, arguments are copied, and handles are not
            arguments = [a if isinstance(a, Actor) else put(a).get() for a in arguments]
            before = LOG.handlers, LOG.propagate  # a real actor has a process of its own
            try:
                return put(getattr(self.here, name)(*arguments))
            except Lost:
                self.dead = True
                return put(ActorLostError("its node was lost"))
            finally:
                LOG.handlers, LOG.propagate = before

        return SimpleNamespace(remote=remote)


def put(content):
    reference = Reference(content)
    REFERENCES[id(reference)] = reference
    return reference


def get(reference):
    return reference.get()


def remote(kind):
    def make(*arguments):
        return Actor(kind, arguments)

    return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=make), remote=make)


def wait(references, timeout=None):
    return references[:1], references[1:]


def kill(actor):
    actor.dead = True


def is_initialized():
    return True


def cluster_resources():
    return {"CPU": 3.0}


NODES = {"here": True, "there": True}  # and whether they are alive


def nodes():
    return [{"NodeID": name, "Alive": alive} for name, alive in NODES.items()]


def get_runtime_context():
    return SimpleNamespace(get_node_id=lambda: "here")


def exit_actor():
    raise Lost


actor = SimpleNamespace(exit_actor=exit_actor)
util = SimpleNamespace(
    scheduling_strategies=SimpleNamespace(NodeAffinitySchedulingStrategy=lambda *_, **__: None)
)
