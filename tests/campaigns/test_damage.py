"""Any bit flip or truncation of any file of a run is detected, and the file or part is named."""

import random

import pytest

import nufed
from campaigns.test_kills import CONFIG
from nufed.errors import InputError, RunError
from nufed.lab.config.split_file import load_split
from nufed.lab.files import read_sealed
from nufed.lab.runs import load_run
from nufed.lab.runs.json_files import write_json
from nufed.lab.runs.part_files import load_checkpoint
from support import without_report

PART = "methods/fo/seed-0"
OF_A_RUN = ["run.json", "splits/seed-0.json"]
OF_A_PART = ["metrics.jsonl", "agents.jsonl", "model.safetensors", "done.json"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    config = {**CONFIG, "methods": {"fo": {"algorithm": "gmeta"}}, "baselines": []}
    with without_report():
        run = nufed.run(config, ["workers=1"], out=tmp_path_factory.mktemp("damage") / "run")
        yield run.path


def damaged(good, rng):
    """The content with a bit flipped, or truncated."""
    if rng.random() < 0.25:
        return good[: rng.randrange(len(good))]
    content = bytearray(good)
    place = rng.randrange(len(good) * 8)
    content[place // 8] ^= 1 << place % 8
    return bytes(content)


def checks(run):
    """For every kind of file: its path, and a check that names the damage."""
    part = run / PART
    last, before = (part / f"checkpoint-0000{round}.safetensors" for round in (12, 10))
    belongs = read_sealed(last).about["belongs_to"]

    def loaded(*named):
        def look(path):
            with pytest.raises(RunError) as caught:
                load_run(run)
            assert all(name in str(caught.value) for name in named), caught.value

        return look

    def checkpoint(path):
        """The one before is used, unless it is the metrics of both that are damaged."""
        found, problems = load_checkpoint(part, belongs)
        assert path.name in problems[0] and str(part) in problems[0]
        if path.name == "metrics.jsonl" and len(problems) == 2:
            assert found is None and path.name in problems[1]
        else:
            assert found.round == 10 and len(problems) == 1

    def split(path):
        with pytest.raises(InputError, match=path.name):
            load_split(path)

    assert before.exists()
    yield last, checkpoint
    yield part / "metrics.jsonl", checkpoint
    yield run / "splits" / "seed-0.safetensors", split
    for name in OF_A_RUN:
        yield run / name, loaded(str(run / name))
    for name in OF_A_PART:
        yield part / name, loaded(str(part), name)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("times", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_any_damage_of_any_file_is_detected_and_named(finished, tell, times):
    rng, kinds = random.Random(times), list(checks(finished))
    for number in range(times):
        path, look = kinds[number % len(kinds)]
        good = path.read_bytes()
        path.write_bytes(damaged(good, rng))
        try:
            look(path)
        finally:
            path.write_bytes(good)
    load_run(finished)
    names = sorted({path.name for path, _ in kinds})
    tell(
        f"damage: {times:,} bit flips and truncations in {len(names)} kinds of files, with "
        f"{len(kinds)} checks: {times:,} detected and named; the checkpoint before a damaged one "
        "was used"
    )


@pytest.mark.parametrize("name", ["run.json", "splits/seed-0.json", "splits/seed-0.safetensors"])
def test_a_run_with_a_damaged_file_is_not_resumed(finished, name):
    path = finished / name
    good = path.read_bytes()
    path.write_bytes(damaged(good, random.Random(1)))
    with pytest.raises(RunError, match=f"{path} is damaged"):
        nufed.resume(finished)
    path.write_bytes(good)
    if name.endswith(".safetensors"):  # as the error says, it can be removed
        path.unlink()
        nufed.resume(finished)
        assert path.read_bytes() == good


@pytest.mark.parametrize("name", OF_A_RUN)
def test_a_file_of_an_older_format_is_refused(finished, name):
    path = finished / name
    good = path.read_bytes()
    write_json(path, {"content": read_sealed(path).about, "sha256": "0" * 64})
    with pytest.raises(RunError, match=f"{path} is damaged, or another version of nufed wrote it"):
        load_run(finished)
    path.write_bytes(good)
