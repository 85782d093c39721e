"""The paper's bounds on plain numbers: every lemma and the theorem, corrected where they fail.

docs/theory.md states each result, proves what differs from the paper, and names its test.
Beyond the paper, docs/when_nu_pays.md says when ν > 1 pays, on quadratics.
"""

from nufed.theory.constants import (
    GREEK,
    BatchSizes,
    FalseBoundWarning,
    ProblemConstants,
    TheoryError,
)
from nufed.theory.lemmas import (
    GradientError,
    difference_bias,
    difference_noise,
    exact_error,
    first_order_error,
    hessian_free_error,
    iterate_bias,
    iterate_error,
    iterate_error_fourth,
    iterate_error_squared,
    meta_dissimilarity,
    meta_smoothness,
    product_dissimilarity,
    product_error,
)
from nufed.theory.theorem import (
    Schedule,
    TheoremTerms,
    Training,
    convergence_bound,
    largest_meta_lr,
    printed_bound,
    schedule,
)
from nufed.theory.when_nu_pays import Direction, Weighting, largest_gap, small_spread_gap

__all__ = [
    "GREEK",
    "BatchSizes",
    "Direction",
    "FalseBoundWarning",
    "GradientError",
    "ProblemConstants",
    "Schedule",
    "TheoremTerms",
    "TheoryError",
    "Training",
    "Weighting",
    "convergence_bound",
    "difference_bias",
    "difference_noise",
    "exact_error",
    "first_order_error",
    "hessian_free_error",
    "iterate_bias",
    "iterate_error",
    "iterate_error_fourth",
    "iterate_error_squared",
    "largest_gap",
    "largest_meta_lr",
    "meta_dissimilarity",
    "meta_smoothness",
    "printed_bound",
    "product_dissimilarity",
    "product_error",
    "schedule",
    "small_spread_gap",
]
