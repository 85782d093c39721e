"""Keeps the keys that a SuperLink admits equal to those of the registry of sites."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from nufed.errors import InputError, RunError
from nufed.files import write_durably
from nufed.flower.app.site_registry import NODES, SiteRegistry, read_sites
from nufed.flower.ops.flower_processes import Flower
from nufed.flower.ops.link import NAME, flwr_json, register


class Admission:
    """The keys registered at the connected SuperLink, by their fingerprints.

    Args:
        commands: Flower's commands, connected to the SuperLink.
        file: the registry of sites; a server may start without one.
        say: is told every change.
    """

    def __init__(self, commands: Flower, file: Path, say: Callable[[str], None]) -> None:
        self._commands, self._file, self._say = commands, file, say
        self._nodes: dict[str, str] = {}  # fingerprint -> Flower's node id
        self._applied = SiteRegistry()
        self._complaint = ""

    def apply(self) -> None:
        """Register new keys and unregister removed ones, if the registry has changed."""
        registry = read_sites(self._file) if self._file.exists() else SiteRegistry()
        if registry != self._applied:
            self._apply(registry)
            self._applied = registry

    def keep_applied(self) -> None:
        """The same while the server runs: a failure is said once, and tried again."""
        try:
            self.apply()
            self._complaint = ""
        except (InputError, RunError) as error:
            if str(error) != self._complaint:
                self._say(f"the registry of sites is not applied: {error}")
            self._complaint = str(error)

    def _apply(self, registry: SiteRegistry) -> None:
        wanted = {key: (public, site) for key, public, site in registry.entries()}
        for key in self._nodes.keys() - wanted.keys():
            flwr_json(self._commands, "supernode", "unregister", self._nodes[key], NAME)
            del self._nodes[key]
            self._say(f"unregistered the key {key}")
        for key, (public, site) in wanted.items():
            if key not in self._nodes:
                file = self._commands.home / "site.pub"
                write_durably(file, public.encode())
                self._nodes[key] = register(self._commands, file)
                self._say(f"registered {site.label(key)}")
        nodes = {node: key for key, node in self._nodes.items()}
        write_durably(self._commands.home / NODES, json.dumps(nodes, indent=1).encode())
