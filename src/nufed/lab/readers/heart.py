"""UCI heart disease (Janosi et al. 1988): patients of four hospitals, shipped with nufed.

A table with missing values: some columns are missing for whole hospitals.
"""

from __future__ import annotations

from importlib.resources import as_file, files

import numpy as np
import torch

from nufed.data.samples import Samples
from nufed.data.tables import as_table
from nufed.lab.readers.tables import read_columns

CATEGORICAL = ("sex", "cp", "fbs", "restecg", "exang", "slope", "thal")
NEVER_ZERO = ("trestbps", "chol")  # 0 was written for a missing value


def heart() -> Samples:
    """UCI heart disease: 920 patients of 4 hospitals, 13 columns with missing values, 2 classes.

    An agent is a hospital: cleveland, hungary, switzerland, long-beach.

    >>> samples = heart()
    >>> len(samples), samples.classes, len(samples.columns)
    (920, ('healthy', 'disease'), 13)
    """
    with as_file(files("nufed.data") / "heart.csv") as path:
        data = read_columns(path, "num", owner="hospital")
    assert data.labels is not None and data.owners is not None
    columns = {
        name: ["" if cell == "0" and name in NEVER_ZERO else cell for cell in cells]
        for name, cells in data.columns.items()
    }
    table = as_table(columns, CATEGORICAL)
    diseased = np.array([number != "0" for number in data.labels])
    return Samples(
        table.values,
        torch.from_numpy(diseased).long(),
        ("healthy", "disease"),
        np.array(data.owners),
        columns=table.columns,
    )
