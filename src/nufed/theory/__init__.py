"""The paper's bounds on plain numbers: every lemma and the theorem, corrected where they fail.

docs/theory.md states each result, proves what differs from the paper, and names its test.
Beyond the paper, docs/when_nu_pays.md says when ν > 1 pays, on quadratics.
"""

from nufed.theory.constants import (
    GREEK as GREEK,
    BatchSizes as BatchSizes,
    FalseBoundWarning as FalseBoundWarning,
    ProblemConstants as ProblemConstants,
    TheoryError as TheoryError,
)
from nufed.theory.lemmas import (
    GradientError as GradientError,
    difference_bias as difference_bias,
    difference_noise as difference_noise,
    exact_error as exact_error,
    first_order_error as first_order_error,
    hessian_free_error as hessian_free_error,
    iterate_bias as iterate_bias,
    iterate_error as iterate_error,
    iterate_error_fourth as iterate_error_fourth,
    iterate_error_squared as iterate_error_squared,
    meta_dissimilarity as meta_dissimilarity,
    meta_smoothness as meta_smoothness,
    product_dissimilarity as product_dissimilarity,
    product_error as product_error,
)
from nufed.theory.theorem import (
    Schedule as Schedule,
    TheoremTerms as TheoremTerms,
    Training as Training,
    convergence_bound as convergence_bound,
    largest_meta_lr as largest_meta_lr,
    printed_bound as printed_bound,
    schedule as schedule,
)
from nufed.theory.when_nu_pays import (
    Direction as Direction,
    Weighting as Weighting,
    largest_gap as largest_gap,
    small_spread_gap as small_spread_gap,
)
