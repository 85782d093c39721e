"""Run directories that somebody changed and sealed again: read, or refused by the file's name.

One value of one file is replaced by something else, and every digest that depends on it is made
anew, so that only the schema and the other files can tell. Reading and reporting must work, or
end in one sentence that names a file.
"""

import json
import random
import shutil
import warnings
from collections import Counter

import pytest

import nufed
from nufed.errors import NufedError, RunError
from nufed.lab.files import SEALED_TEXT, ZERO_DIGEST, read_sealed, sha256, unseal, write_sealed
from nufed.lab.report import run_page
from nufed.lab.runs import load_run
from nufed.lab.runs.part_files import load_checkpoint
from support import with_figures, without_report

CONFIG = {
    "rounds": 4,
    "eval_every": 2,
    "checkpoint_every": 2,
    "participation": 0.5,
    "seeds": [0, 1],
    "eval_agents": 3,
    "workers": 1,
    "data": {"agents": 6, "samples_per_agent": 24, "dirichlet": 0.5, "unseen_agents": 2},
    "model": {"args": {"hidden": [4]}},
    "method": {"adapt_steps": 1, "adapt_lr": 0.1, "meta_lr": 0.1, "batch_size": 6},
    "methods": {
        "fo": {"algorithm": "gmeta", "curvature": "first_order"},
        "exact": {"algorithm": "gmeta"},
    },
    "faults": {"dropout": 0.2},
}
BOUNDS = {
    "constants": {
        "gradient": {"value": 1.5, "samples": 4, "spread": 0.1},
        "hessian_lipschitz": None,
    },
    "smooth": True,
    "seed": 0,
    "uniform": True,
    "by_steps_of": "fo",
    "by_steps": [
        {
            "steps": 1,
            "smoothness": 2.0,
            "largest_meta_lr": 0.1,
            "dissimilarity": 0.3,
            "errors": {
                kind: {"bias": 0.1, "error": 0.2}
                for kind in ("first_order", "hessian_free", "exact")
            },
        }
    ],
    "methods": [
        {
            "method": "fo",
            "steps": 1,
            "promised": {
                "smoothness": 2.0,
                "meta_lr": 0.2,
                "largest_meta_lr": 0.1,
                "admissible": False,
                "bias": 0.1,
                "error": 0.2,
                "dissimilarity": 0.3,
                "trivial": 4.0,
                "terms": {
                    "initial_gap": 1.0,
                    "bias": 0.1,
                    "drift_dissimilarity": 0.1,
                    "drift_noise": 0.1,
                    "agent_sampling": 0.1,
                    "gradient_noise": None,
                },
                "total": 1.4,
            },
            "measured": {"bias": 0.1, "error": 0.1, "dissimilarity": 0.1},
        },
        {
            "method": "exact",
            "steps": 1,
            "measured": {"bias": 0.1, "error": 0.1, "dissimilarity": 0.1},
        },
    ],
    "stationarity": [
        {"method": "fo", "round": 0, "value": 1.0},
        {"method": "fo", "round": 4, "value": None},
    ],
}
PRIVACY = {
    "clip": 1.0,
    "noise": 2.0,
    "delta": 1e-5,
    "epsilon": {"released": 1.25, "server": 3.5},
    "budget": {"released": 2.0, "server": None},
    "holds_for": {"released": "all who see the models", "server": "the server"},
    "agents": 4,
    "cohort": 2,
    "rounds": 4,
    "scores_sent": True,
}
UNUSED = ["results.json", "advice.json"]  # written for users, never read back
LENIENT = [*UNUSED, "timing.jsonl"]  # invalid lines are skipped


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with every file that a report reads."""
    with without_report():
        run = nufed.run(CONFIG, out=tmp_path_factory.mktemp("mutated") / "run").path
    write_sealed(run / "bounds.json", BOUNDS)
    write_sealed(run / "privacy.json", PRIVACY)
    (run / "advice.json").write_text('{"recommended": {"method": "fo"}}')
    failed = run / "methods" / "exact" / "seed-1"
    write_sealed(failed / "failure.json", {"reason": "it diverged"})
    return run


def places(value, path=()):
    """The paths of all values inside a value."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value[:4]):
            yield from places(inner, (*path, index))


def nested(depth):
    value = 0
    for _ in range(depth):
        value = [value]
    return value


def other(rng, value):
    """A wrong value: another type, too large, negative, non-finite, nested, or of wrong length."""
    odd = [None, True, False, "", "x", "../x", "\ud800", "a\nb", 0, -1, 1, 7, 2**63, -(2**70)]
    odd += [10**400, 0.5, -0.5, 1e308, -1e308, 1e-320, float("nan"), float("inf"), [], {}, [[]]]
    odd += [[None], {"x": 1}, nested(50), "9" * 5000]
    if isinstance(value, list):
        odd += [value[:-1], value + value, value[::-1], [*value, None]] * 3
    if isinstance(value, dict):
        without = dict(value)
        if without:
            without.pop(rng.choice(list(without)))
        odd += [without, {**value, "extra": 1}, dict.fromkeys(value)] * 4
    if isinstance(value, str):
        odd += [value[:-1], value + "x", value.upper()] * 2
    if isinstance(value, int | float) and not isinstance(value, bool):
        odd += [-value, value + 1, value * 10, float(value), str(value), [value]] * 2
    return rng.choice(odd)


def mutated(rng, content):
    """A copy of JSON content with one value replaced, and its path."""
    content = json.loads(json.dumps(content))
    path = rng.choice([p for p in places(content) if p] or [()])
    if not path:
        return other(rng, content)
    at = content
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = other(rng, at[path[-1]])
    return content


def dumped(value):
    return json.dumps(value).encode()


def seal(folder):
    """Recompute the digests of a part, in its checkpoints and done.json."""
    metrics = folder / "metrics.jsonl"
    for path in folder.glob("checkpoint-*"):
        found = read_sealed(path)
        length = found.about["metrics_bytes"] = len(metrics.read_bytes())
        found.about["metrics_sha256"] = sha256(metrics.read_bytes()[:length])
        write_sealed(path, found.about, found.tensors)
    done = read_sealed(folder / "done.json").about
    done["files"] = {name: sha256((folder / name).read_bytes()) for name in done["files"]}
    write_sealed(folder / "done.json", done)


def mutate(rng, path):
    """Change one value of a file, and reseal the files that depend on it."""
    content = path.read_bytes()
    if path.suffix == ".jsonl":
        lines = content.splitlines()
        number = rng.randrange(len(lines))
        if rng.random() < 0.1:  # whole lines
            lines = rng.choice([lines[:-1], [*lines, lines[0]], [*lines, b"[" * 100_000], []])
        else:
            lines[number] = dumped(mutated(rng, json.loads(lines[number])))
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        if path.name != "timing.jsonl":
            seal(path.parent)
    elif path.name in UNUSED:
        path.write_bytes(dumped(mutated(rng, json.loads(content))))
    elif rng.random() < 0.05:
        deep = b"[" * 100_000 + b"]" * 100_000
        blank = SEALED_TEXT + ZERO_DIGEST + b'", "about": ' + deep + b"}"
        inside = blank.replace(ZERO_DIGEST, sha256(blank).encode())
        path.write_bytes(rng.choice([deep, inside, b"", b"{"]))
    elif path.suffix == ".safetensors":
        found = unseal(content)
        write_sealed(path, mutated(rng, found.about), found.tensors)
    else:
        write_sealed(path, mutated(rng, unseal(content).about))


def files_of(run):
    """Every kind of file with JSON that is in the run; of checkpoints the newest, which is used."""
    found = [*run.glob("*.json"), *run.glob("*.jsonl"), *run.glob("splits/*.json")]
    for part in (*run.glob("methods/*/seed-*"), *run.glob("baselines/*/seed-*")):
        found += [*part.glob("*.json"), *part.glob("*.jsonl"), *part.glob("checkpoint-*4.*")]
    return sorted(found)


def look(run, path, out, how="tables"):
    """Read a run and make its page: with tables alone, with charts too, or with figures drawn.

    A checkpoint is no part of a report: it is read as when a run is resumed.
    """
    if path.name.startswith("checkpoint-"):
        found, problems = load_checkpoint(path.parent, {})
        assert found is not None  # the other one
        if problems:
            raise RunError(problems[0])
        return
    out.mkdir(exist_ok=True)
    with with_figures(), pytest.MonkeyPatch.context() as patch:
        if how == "tables":
            patch.setattr(run_page, "all_charts", lambda runs: ())
            patch.setattr(run_page, "bounds_charts", lambda bounds: ())
        run_page.build_report([load_run(run)], out, figures=how == "figures")


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("times", "charts", "figures"),
    [(60, 10, 60), pytest.param(2000, 10, 100, marks=pytest.mark.slow)],
)
def test_a_run_that_was_changed_and_sealed_again_is_read_or_refused(
    finished, tmp_path, tell, times, charts, figures
):
    rng, out = random.Random(times), tmp_path / "out"
    run = shutil.copytree(finished, tmp_path / "run")
    files = files_of(run)
    names = {path.name for path in files}
    assert len(names) == 14
    look(run, run, out, "figures")  # unchanged it is read
    read, refused, others = Counter(), Counter(), []
    for number in range(times):
        path = files[number % len(files)] if times > len(files) else rng.choice(files)
        how = "figures" if number % figures == 1 else "charts" if number % charts == 1 else "tables"
        before = {each: each.read_bytes() for each in path.parent.glob("*.*") if each.is_file()}
        mutate(rng, path)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # of numpy, about huge numbers
                look(run, path, out, how)
            read[how] += 1
        except NufedError as error:
            said = str(error)
            refused[path.name] += 1
            if "\n" in said or path.name not in said or str(run) not in said:
                others.append((path, how, said))
        except Exception as error:
            others.append((path, how, repr(error)))
        finally:
            for each, content in before.items():
                each.write_bytes(content)
    assert not others, others
    look(run, run, out)
    if times > 1000:  # the short one need not meet every kind
        assert refused.keys() == names - set(LENIENT)
    tell(
        f"mutated runs: {times:,} values of {len(files)} files of {len(names)} kinds changed and "
        f"sealed again: {refused.total():,} refused by the name of the file, {read.total():,} read "
        f"({read['charts'] + read['figures']} with charts, {read['figures']} of them drawn)"
    )
