"""Sites refuse invalid scales and parts in evaluation requests."""

import pytest

from flower.app.in_memory import agents_data, federate, plan_of
from nufed import FirstOrder, GMeta
from nufed.flower.app.payload import PayloadError, read_part, read_scales

FEDAVG = GMeta(
    adapt_steps=0, adapt_lr=0.2, meta_lr=0.3, local_steps=2, batch_size=6, curvature=FirstOrder()
)


@pytest.mark.parametrize(
    "scales",
    [
        [],
        [-1.0],
        [float("nan")],
        [float("inf")],
        [1],
        [True],
        ["1"],
        "1.0",
        None,
        [1.0] * 65,
    ],
)
def test_scales_that_are_not_numbers_from_0_are_refused(scales):
    with pytest.raises(PayloadError, match="scales is"):
        read_scales(scales)


@pytest.mark.parametrize("part", ["train", "", None, 1, ["test"]])
def test_no_other_part_than_test_and_validation_is_scored(part):
    with pytest.raises(PayloadError, match="part is"):
        read_part(part)


def test_a_site_whose_steps_diverge_is_still_scored_with_the_others():
    """Scales that are too large give non-finite losses, which rank worst and are no error."""
    inputs, targets = zip(*agents_data(3, samples=40), strict=True)
    huge = [(x * 1e3, y) for x, y in zip(inputs, targets, strict=True)]
    plan = plan_of(
        GMeta(
            adapt_steps=0,
            adapt_lr=1e4,
            meta_lr=1e-9,
            local_steps=1,
            batch_size=6,
            curvature=FirstOrder(),
        ),
        agents=3,
        rounds=1,
        validation=0.25,
        eval_steps=3,
    )
    _, outcome, _ = federate(plan, huge, choose=True)
    assert outcome.evaluation.step_sizes is not None and len(outcome.evaluation.chosen) == 3


def test_a_site_that_replies_with_too_few_scales_is_left_out():
    def tamper(agent, message, reply):
        if agent == 1 and "scores" in (reply.content if reply.has_content() else ()):
            lists = reply.content["scores"]
            for key in ("loss", "score", "balanced", "minority"):
                lists[key] = lists[key][:3]
        return reply

    plan = plan_of(FEDAVG, agents=4, rounds=1, validation=0.25)
    _, outcome, _ = federate(plan, agents_data(4, samples=40), tamper, choose=True)
    assert [error.agent for error in outcome.missing] == [1]
    assert "is not a list of " in outcome.missing[0].reason
    assert [s.agent for s in outcome.evaluation.chosen] == [0, 2, 3]
