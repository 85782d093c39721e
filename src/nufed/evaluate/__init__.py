"""How good models are for agents, and the step size of fine-tuning that suits each method."""

from nufed.evaluate.scores import (
    AgentScores,
    Measure,
    Metric,
    Summary,
    accuracy,
    evaluate_agent,
    majority_class,
    score_agent,
    summarise,
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
)

__all__ = [
    "AgentScores",
    "ByScale",
    "EvalLr",
    "Evaluation",
    "Measure",
    "Metric",
    "ScaleChoice",
    "StepSizes",
    "Summary",
    "accuracy",
    "choose_step_sizes",
    "chooses",
    "evaluate_agent",
    "evaluate_with_choice",
    "majority_class",
    "score_agent",
    "summarise",
]
