"""The preparation of tables in a federation: sites count and sum, and one of them adds up.

Every site writes a tally of its training part (:func:`write_tally`): counts, means and squared
deviations by column, and how often each category occurs; no row of its data. Whoever writes the
configuration pools the tallies into ``[[data.prepare.columns]]`` (:func:`prepare_columns`), from
which all sites prepare their tables alike. The numbers are those that a simulation with all data in
one place learns with ``data.prepare.fill = "mean"``, to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from nufed.data import ColumnTally, Preparation, Samples, pooled, site_split, tally
from nufed.errors import InputError
from nufed.lab.config.schema import DataConfig
from nufed.lab.files import write_durably
from nufed.lab.readers.files import read_bounded

MOST_BYTES = 2**26  # of a tally


def site_tally(config: DataConfig, samples: Samples, site: int, seed: int) -> list[ColumnTally]:
    """Counts and sums over the training part that a site will train on.

    Args:
        config: ``[data]`` of the federation's configuration, which sets the sizes of parts.
        samples: all samples of the site, with raw columns.
        site: its number.
        seed: the federation's.
    """
    name, shares = str(site), {"validation": config.validation, "test": config.test}
    split = site_split(len(samples), site, seed, name=name, **shares)
    return tally(samples, split.train[site])


def write_tally(path: Path, site: int, columns: Iterable[ColumnTally]) -> None:
    """Write a site's tally as JSON that people can read before it leaves the site."""
    about = {"tally of site": site, "columns": [asdict(column) for column in columns]}
    write_durably(path, (json.dumps(about, indent=1) + "\n").encode())


def read_tally(path: Path) -> tuple[int, list[ColumnTally]]:
    """A site's number and tally; anything but what :func:`write_tally` writes is refused."""
    try:
        content = json.loads(read_bounded(path, MOST_BYTES))
        site, columns = content["tally of site"], content["columns"]
        if not isinstance(site, int) or not isinstance(columns, list):
            raise ValueError("its site or columns have another type")
        return site, [ColumnTally.read(column) for column in columns]
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise InputError(
            f"{path} is not the tally of a site ({error}): make it with `nufed data tally`"
        ) from None


def prepare_columns(paths: Iterable[Path], seen: Sequence[int]) -> Preparation:
    """The preparation from one tally of each of the sites ``seen``, which take part in training."""
    by_site: dict[int, list[ColumnTally]] = {}
    for path in paths:
        site, columns = read_tally(path)
        if site in by_site:
            raise InputError(f"{path} is a second tally of site {site}: give one of each")
        if site not in seen:
            raise InputError(
                f"{path} is the tally of site {site}, which does not take part in training: leave "
                "it out"
            )
        by_site[site] = columns
    if absent := sorted(set(seen) - by_site.keys()):
        raise InputError(
            f"the tallies of sites {', '.join(map(str, absent))} are not given: of every site that "
            "takes part in training one is needed"
        )
    return Preparation(
        tuple(each.prepared() for each in pooled(by_site[s] for s in sorted(by_site)))
    )


def as_toml(preparation: Preparation) -> str:
    """The preparation as a part of a configuration; TOML writes these values as JSON does."""
    tables = [
        "[[data.prepare.columns]]\n"
        + "".join(f"{k} = {json.dumps(v, ensure_ascii=False)}\n" for k, v in column.items())
        for column in preparation.describe()
    ]
    return "\n".join(tables)
