"""The table of names equals the registries, schema and algorithms; names of packages are in it."""

import pytest

from nufed import registry
from nufed.errors import InputError
from nufed.lab.cli.catalogue import (
    catalogue,
    complete_data_set,
    complete_listed,
    listing_of,
    live_catalogue,
    values_of,
)


def test_the_table_is_what_the_code_says():
    found, now = catalogue(), live_catalogue()
    assert found == now, "run docs/describe_algorithms.py"
    assert str(found) == str(now), "run docs/describe_algorithms.py"  # the order, too
    assert [*found.values] == [*found.names["configuration keys"]]


@pytest.fixture
def plug_in(tmp_path, monkeypatch):
    """An installed distribution with an algorithm, a partition, and a package that fails."""
    about = tmp_path / "theirs-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("""
[nufed.algorithms]
softer = softer_ditto:Softer
broken = nowhere_:X
[nufed.partitions]
theirs = nufed.data:iid
""")
    (tmp_path / "softer_ditto.py").write_text('''
from dataclasses import dataclass
from typing import Literal
from nufed.algorithms import Ditto
from nufed.settings import setting

@dataclass(frozen=True)
class Softer(Ditto):
    """Ditto, but softer."""
    softness: Literal["silk", "wool"] = setting("silk", "s, the softness")
''')
    monkeypatch.syspath_prepend(tmp_path)
    registry.installed.cache_clear()
    catalogue.cache_clear()
    yield
    registry.installed.cache_clear()
    catalogue.cache_clear()


def test_names_of_installed_packages_are_listed_and_completed(plug_in):
    names = catalogue().names
    assert names["algorithms"]["softer"] == "Ditto, but softer."
    assert "broken is an entry point of nufed.algorithms" in names["algorithms"]["broken"]
    assert "theirs" in names["partitions"] and "theirs" in values_of("data.partition")
    assert "s, the softness" in names["configuration keys"]["method.softness"]
    assert listing_of("softer")["settings"]["softness"].startswith("s, the softness")
    assert complete_listed("soft") == ["softer"]
    assert values_of("methods.x.softness") == ["silk", "wool"]
    assert {"softer", "broken"} <= {*values_of("method.algorithm")}
    with pytest.raises(InputError, match=r"broken is an entry point .* can't be imported"):
        listing_of("broken")


def test_what_is_not_listed_is_one_sentence():
    with pytest.raises(InputError, match=r"'dito' is neither an algorithm \(fedavg, .*'ditto'\?"):
        listing_of("dito")
    assert listing_of("preset") == {"presets": catalogue().names["presets"]}
    assert complete_data_set("cifar") == ["cifar10", "cifar100"]
    assert values_of("nix") == values_of("methods.x.nix") == []
