"""What the theory says about a problem: from plain numbers, or from a finished run."""

from nufed.bounds.numbers import bounds_of_numbers
from nufed.bounds.of_run import bounds_of_run

__all__ = ["bounds_of_numbers", "bounds_of_run"]
