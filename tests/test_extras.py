"""Packages of extras are optional: without them nufed trains and reports, and a use of one names
the command that installs it."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import nufed
from lab.experiment.test_resume import CONFIG

ROOT = Path(__file__).parent.parent
MODULES = {  # of packages whose modules have another name
    "dp-accounting": "dp_accounting",
    "flwr-datasets": "flwr_datasets",
    "huggingface-hub": "huggingface_hub",
    "mlflow-skinny": "mlflow",
    "pillow": "PIL",
    "prometheus-client": "prometheus_client",
    "tensorboardx": "tensorboardX",
}
BLOCKED = "import sys; sys.modules.update(dict.fromkeys({names!r}))\n"
CORE = f"import runpy; runpy.run_path({str(ROOT / 'examples/core.py')!r})\n"
RUN = f"""
import nufed
run = nufed.run({CONFIG | {"rounds": 2, "workers": 1}!r}, out="run", figures=False)
assert (run.path / "report.html").exists() and run.rows()
"""
ASKED = """
import json
from pathlib import Path
import nufed
from nufed.lab.export import Chosen, export
from nufed.lab.readers.sources import SOURCES

Path("photos/a").mkdir(parents=True)
Path("photos/a/1.png").touch()
Path("table.parquet").touch()
Path("texts").mkdir()
Path("texts/ann.txt").write_text("to be or not to be " * 50)
small = {"rounds": 1, "workers": 1, "data": {"agents": 4, "samples_per_agent": 100}}
tuned = small | {"data": small["data"] | {"validation": 0.2}, "tune": {"sampler": "tpe"}}
uses = {
    "hf": lambda: SOURCES["hf"](path="somewhere"),
    "hf ": lambda: SOURCES["text"](path="texts", tokenizer="somewhere"),
    "hf  ": lambda: nufed.run(small | {"model": {"name": "hf:somewhere"}}),
    "peft": lambda: nufed.run(small | {"model": {"train": "lora"}}),
    "frames": lambda: SOURCES["table"](path="table.parquet"),
    "frames ": lambda: run.frame(),
    "images": lambda: SOURCES["file"](path="photos"),
    "ray": lambda: nufed.run(small, ray="auto"),
    "tune": lambda: nufed.tune(tuned, out="tuned"),
    "tensorboard": lambda: export(run, "tensorboard"),
    "mlflow": lambda: export(run, "mlflow"),
    "wandb": lambda: export(run, "wandb"),
    "onnx": lambda: export(run, "onnx", chosen=Chosen("fo", 0)),
}
said = {}
for extra, use in uses.items():
    try:
        use()
    except Exception as error:
        said[extra] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""


def optional():
    """The modules of all extras that nufed itself does not depend on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

    def modules(lines):
        names = {line.partition("[")[0].split(">")[0].split("=")[0].strip() for line in lines}
        return {MODULES.get(name.lower(), name) for name in names}

    extras = {n: modules(x) for n, x in project["optional-dependencies"].items() if n != "dev"}
    return set().union(*extras.values()) - modules(project["dependencies"]) - {"nufed"}


def without(code, folder):
    """Runs code in a process that has none of them."""
    path = os.pathsep.join([str(Path(nufed.__file__).parents[1]), *sys.path])
    return subprocess.run(
        [sys.executable, "-c", BLOCKED.format(names=sorted(optional())) + code],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def test_extras_are_those_of_pyproject():
    assert {"transformers", "peft", "datasets", "flwr", "flwr_datasets", "PIL", "ray"} <= optional()
    assert not optional() & {"torch", "numpy", "altair", "typer", "pydantic"}


def test_without_them_nufed_trains_and_reports_and_each_use_names_the_command(tmp_path):
    done = without(CORE + RUN + ASKED, tmp_path)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert len(said) == 13, said
    for extra, sentence in said.items():
        assert f'pip install "nufed[{extra.strip()}]"' in sentence, (extra, sentence)
        assert "\n" not in sentence


def test_a_package_that_is_needed_would_be_seen(tmp_path):
    done = without("import transformers", tmp_path)
    assert done.returncode and "ModuleNotFoundError" in done.stderr
