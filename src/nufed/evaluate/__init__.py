"""Scores of global and personal models, and the step size of fine-tuning chosen for each method."""

from nufed.evaluate.examples import (
    Examples as Examples,
    Fit as Fit,
    Guesses as Guesses,
    can_be_drawn as can_be_drawn,
)
from nufed.evaluate.metrics import (
    METRICS as METRICS,
    Metric as Metric,
    accuracy as accuracy,
    auc as auc,
    balanced_accuracy as balanced_accuracy,
    f1 as f1,
)
from nufed.evaluate.scores import (
    GROUPS as GROUPS,
    RESAMPLES as RESAMPLES,
    AgentScores as AgentScores,
    Measure as Measure,
    Scoring as Scoring,
    Summary as Summary,
    evaluate_agent as evaluate_agent,
    evaluation_context as evaluation_context,
    majority_class as majority_class,
    nearest_centroid as nearest_centroid,
    score_agent as score_agent,
    summarise as summarise,
    training_loss as training_loss,
)
from nufed.evaluate.step_size import (
    ByScale as ByScale,
    EvalLr as EvalLr,
    Evaluation as Evaluation,
    ScaleChoice as ScaleChoice,
    StepSizes as StepSizes,
    choose_step_sizes as choose_step_sizes,
    chooses as chooses,
    evaluate_with_choice as evaluate_with_choice,
    preferred as preferred,
)
