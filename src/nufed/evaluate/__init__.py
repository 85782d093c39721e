"""Scores of global and personal models, and the step size of fine-tuning chosen for each method."""

from nufed.evaluate.fits import Fit, can_be_drawn, fits
from nufed.evaluate.metrics import METRICS, Metric, accuracy, auc, balanced_accuracy, f1
from nufed.evaluate.scores import (
    GROUPS,
    AgentScores,
    Measure,
    Summary,
    evaluate_agent,
    evaluation_context,
    majority_class,
    score_agent,
    summarise,
    training_loss,
)
from nufed.evaluate.step_size import (
    ByScale,
    EvalLr,
    Evaluation,
    ScaleChoice,
    StepSizes,
    choose_step_sizes,
    chooses,
    evaluate_with_choice,
    preferred,
)

__all__ = [
    "GROUPS",
    "METRICS",
    "AgentScores",
    "ByScale",
    "EvalLr",
    "Evaluation",
    "Fit",
    "Measure",
    "Metric",
    "ScaleChoice",
    "StepSizes",
    "Summary",
    "accuracy",
    "auc",
    "balanced_accuracy",
    "can_be_drawn",
    "choose_step_sizes",
    "chooses",
    "evaluate_agent",
    "evaluate_with_choice",
    "evaluation_context",
    "f1",
    "fits",
    "majority_class",
    "preferred",
    "score_agent",
    "summarise",
    "training_loss",
]
