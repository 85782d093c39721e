"""The paper's bounds on plain numbers: every lemma and the theorem, corrected where they fail.

docs/theory.md states each result, proves what differs from the paper, and names its test.
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

__all__ = [
    "GREEK",
    "BatchSizes",
    "FalseBoundWarning",
    "GradientError",
    "ProblemConstants",
    "Schedule",
    "TheoremTerms",
    "TheoryError",
    "Training",
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
    "largest_meta_lr",
    "meta_dissimilarity",
    "meta_smoothness",
    "printed_bound",
    "product_dissimilarity",
    "product_error",
    "schedule",
]
