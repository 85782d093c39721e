"""One contestant in a process of its own: does jobs on command, and answers with what they took.

Lines of JSON: what it can do (or why it can't), then for every name of a job its times.
"""

import importlib
import json
import os
import sys
import time
import traceback

from problem import sizes_of

from measure import cpu_seconds  # isort: skip

CONTESTANTS = {
    "nufed": "in_torch:nufed",
    "PyTorch loop": "in_torch:plain_loop",
    "JAX, scan": "in_jax:jax_scan",
    "JAX, vmap": "in_jax:jax_vmap",
    "pfl-research": "in_pfl:pfl_research",
    "Flower with Ray": "in_flower:flower",
}


def main(name, folder, quick):
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to standard error

    def answer(**found):
        print(json.dumps(found), file=answers, flush=True)

    def serve(jobs):
        answer(jobs=list(jobs))
        for line in sys.stdin:
            cpu, start = cpu_seconds(), time.perf_counter()
            jobs[line.strip()]()
            answer(seconds=time.perf_counter() - start, cpu=cpu_seconds() - cpu)

    module, _, function = CONTESTANTS[name].partition(":")
    try:
        getattr(importlib.import_module(module), function)(folder, sizes_of(quick), serve)
    except Exception as error:
        traceback.print_exc()
        answer(skipped=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], "--quick" in sys.argv)
