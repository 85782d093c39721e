"""What a hospital's site loads: its own table, as it is."""

from pathlib import Path
from tempfile import TemporaryDirectory

from write_files import HOSPITALS, write_files

from nufed.lab.readers.tables import read_table

CATEGORICAL = ("sex", "cp", "fbs", "restecg", "exang", "slope", "thal")


def load(site):
    """The file that the site names with --data; on one machine, without it, the shipped one."""
    if site.get("data"):
        return read_table(Path(site["data"]), CATEGORICAL, "disease")
    with TemporaryDirectory() as folder:
        write_files(folder)
        path = Path(folder) / f"{HOSPITALS[site['partition-id']]}.csv"
        return read_table(path, CATEGORICAL, "disease")
