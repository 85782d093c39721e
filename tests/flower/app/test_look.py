"""Step sizes that a federation's configuration leaves open: measured at the first round's sites."""

import tomllib

import pytest
from flwr.app import ConfigRecord, RecordDict

from flower.app.in_memory import RUN, federation_of, sites_of
from flower.app.test_apps import AGENTS, DATA, TEXT, app_of, start
from flower.app.test_secure_rounds import keys, secure_app  # noqa: F401
from flower.ops.small_app import files_of
from nufed.errors import InputError
from nufed.flower.app.payload import LOOK, PayloadError, read_curvature
from nufed.flower.app.server_app import Server
from nufed.lab.config.problem import first_curvature
from nufed.server import choose_cohort
from support import Killed, json_lines

OPEN = TEXT.replace("adapt_lr = 0.2\nmeta_lr = 0.3\n", "")
KIND = f"evaluate.{LOOK}"
pytestmark = pytest.mark.usefixtures("no_report")


def recorded(out):
    return tomllib.loads((out / "config.toml").read_text())


def measured_at(app, agents):
    """The curvature of first gradients of these agents, from all data in one place."""
    plan = app.plan()
    data = federation_of(DATA, plan.seed, 1)
    return {
        agent: first_curvature(plan.objective, data, agent, (plan.seed, plan.algorithm.batch_size))
        for agent in agents
    }


def test_numbers_come_from_the_first_rounds_sites_and_are_recorded(tmp_path):
    app, out = app_of(tmp_path, OPEN), tmp_path / "run"
    plan = app.plan()
    cohort = choose_cohort(plan.seen, plan.participation, plan.seed, 1)
    grid = start(app, tmp_path, out)
    assert len(cohort) == 2
    assert [each for each in grid.requested if each[0] == KIND] == [(KIND, a) for a in cohort]
    kappa = recorded(out)["measured_curvature"]
    assert kappa == pytest.approx(max(measured_at(app, cohort).values()), rel=5e-3)
    used = recorded(out)["method"]
    assert used["meta_lr"] == used["adapt_lr"] == float(f"{0.5 / kappa:.2g}") != 0.001
    audit = [line["event"] for line in json_lines(out / "audit.jsonl")]
    first = audit.index("step sizes")
    assert "asked" in audit[:first] and "aggregated" in audit[first:]
    # the same as with these numbers given
    steps = f"adapt_lr = {used['adapt_lr']}\nmeta_lr = {used['meta_lr']}\n"
    given = TEXT.replace("adapt_lr = 0.2\nmeta_lr = 0.3\n", steps)
    other = start(app_of(tmp_path, given), tmp_path, tmp_path / "given")
    assert files_of(out) == files_of(tmp_path / "given")
    assert KIND not in dict(other.requested)


def test_a_number_that_is_given_wins_and_methods_may_differ(tmp_path):
    text = OPEN + "[methods.gmeta]\nmeta_lr = 0.07\n[methods.ditto]\nweight = 0.5\n"
    start(app_of(tmp_path, text), tmp_path, out := tmp_path / "run")
    tables, found = recorded(out), 0.5 / recorded(out)["measured_curvature"]
    assert tables["methods"]["gmeta"]["meta_lr"] == 0.07
    ditto = {**tables["method"], **tables["methods"]["ditto"]}
    assert ditto["meta_lr"] == ditto["personal_lr"] == pytest.approx(found, rel=0.06)


@pytest.mark.parametrize("at", [KIND, "train"])
def test_a_killed_run_resumes_with_the_same_numbers(at, tmp_path):
    start(app_of(tmp_path, OPEN), tmp_path, tmp_path / "right")
    left = [2]

    def kill(agent, message, reply):
        left[0] -= message.metadata.message_type == at
        if not left[0]:
            left[0] = -1
            raise Killed
        return reply

    out = tmp_path / "run"
    with pytest.raises(Killed):
        start(app_of(tmp_path, OPEN), tmp_path, out, kill)
    again = start(app_of(tmp_path, OPEN), tmp_path, out)
    assert (KIND in dict(again.requested)) == (at == KIND)
    assert files_of(out) == files_of(tmp_path / "right")
    assert recorded(out)["measured_curvature"] == recorded(tmp_path / "right")["measured_curvature"]


def changed(value, agents=range(AGENTS)):
    """Replies to a look with another curvature."""

    def tamper(agent, message, reply):
        if message.metadata.message_type == KIND and agent in agents:
            reply.content["about"]["curvature"] = value
        return reply

    return tamper


@pytest.mark.parametrize("value", [[float("nan")], [0.0], [-1.0], [1.0, 2.0], "high", 3])
def test_without_a_usable_reply_the_classes_defaults_are_used(value, tmp_path, caplog):
    start(app_of(tmp_path, OPEN), tmp_path, out := tmp_path / "run", changed(value))
    assert recorded(out)["method"]["meta_lr"] == 0.001
    assert "measured_curvature" not in recorded(out)
    assert "no site of the first round could measure the curvature" in caplog.text
    assert "measured no curvature: its curvature is" in caplog.text
    start(app_of(tmp_path, OPEN), tmp_path, out)  # resumes as recorded


def test_one_bad_reply_is_left_out(tmp_path):
    app, out = app_of(tmp_path, OPEN), tmp_path / "run"
    first, other = choose_cohort(app.plan().seen, 0.75, 0, 1)
    start(app, tmp_path, out, changed([float("inf")], {first}))
    kappa = measured_at(app, [other])[other]
    assert recorded(out)["measured_curvature"] == pytest.approx(kappa, rel=5e-3)


def test_sites_that_send_sums_only_are_not_asked_and_refuse(keys, tmp_path, caplog):  # noqa: F811
    secure = secure_app(keys, tmp_path)
    start(app_of(tmp_path, PRIVATE), tmp_path, out := tmp_path / "private")
    assert recorded(out)["method"]["meta_lr"] == 0.001 and "give both" in caplog.text
    for plan in (app_of(tmp_path, PRIVATE).plan(), secure.plan()):
        caplog.clear()
        grid = sites_of(plan, DATA, tmp_path / "sites")
        assert Server(plan, grid, RUN).look() is None
        assert "its numbers are sent in sums only" in caplog.text


PRIVATE = OPEN + "[privacy]\nclip = 0.5\nnoise = 3.0\n"


def test_bounds_of_an_approval_hold_for_measured_numbers(tmp_path):
    text = OPEN + "[approval]\nmeta_lr = [0.0005, 0.002]\n"
    with pytest.raises(InputError, match=r"meta_lr = 0\.\d+: must be in 0.0005 … 0.002"):
        start(app_of(tmp_path, text), tmp_path, tmp_path / "run")
    app = app_of(tmp_path, text)  # a site, whatever its server says
    app.plan(curvature=500.0)
    with pytest.raises(InputError, match=r"meta_lr = 0.05: must be in"):
        app.plan(curvature=10.0)


def test_a_request_with_a_curvature_that_is_none_is_refused():
    for wrong in (0.0, -1.0, float("inf"), float("nan"), "high", 1):
        with pytest.raises(PayloadError, match="must be a finite number above 0"):
            read_curvature(RecordDict({"curvature": ConfigRecord({"largest": wrong})}))
    assert read_curvature(RecordDict({})) is None
