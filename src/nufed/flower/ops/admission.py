"""Keeps the keys that a SuperLink admits equal to those of the registry of sites."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from nufed.errors import InputError, RunError
from nufed.files import write_durably
from nufed.flower.app.site_registry import NODES, SiteRegistry, read_sites
from nufed.flower.ops.link import Link


class Admission:
    """The keys registered at a SuperLink, by their fingerprints.

    Args:
        link: the SuperLink.
        home: the folder that its server app reads; which key has which node id is written there.
        file: the registry of sites; a server may start without one.
        say: is told every change.
    """

    def __init__(self, link: Link, home: Path, file: Path, say: Callable[[str], None]) -> None:
        self._link, self._home, self._file, self._say = link, home, file, say
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
        from nufed.flower.ops.control_api import control_api, register, unregister  # seconds

        wanted = {key: (public, site) for key, public, site in registry.entries()}
        with control_api(self._link) as client:
            for key in self._nodes.keys() - wanted.keys():
                unregister(client, self._nodes[key])
                del self._nodes[key]
                self._say(f"unregistered the key {key}")
            for key, (public, site) in wanted.items():
                if key not in self._nodes:
                    self._nodes[key] = register(client, public)
                    self._say(f"registered {site.label(key)}")
        nodes = {node: key for key, node in self._nodes.items()}
        write_durably(self._home / NODES, json.dumps(nodes, indent=1).encode())
