# Everything runs in .venv, created from constraints.txt on first use.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: run federation docs test test-slow test-lowest test-cluster test-federation test-deployment test-offline soak bench peers attacks external paper board board-advice package format clean

run: $(READY)-run        ## train four methods on handwritten characters and print the path of the report
	$(BIN)/nufed run omniglot

federation: $(READY)-flower ## a server and four sites on this machine, with TLS and keys, on Flower
	$(BIN)/nufed federate local examples/federation

docs: $(READY)           ## the site in docs/_build/html, with warnings as errors and without a network
	rm -rf docs/_build
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --jobs 2 docs docs/_build/html
	@echo docs/_build/html/index.html

# processes that tests start import nufed from bytecode
test: export PYTHONDONTWRITEBYTECODE =
test: $(READY)           ## all checks: format, lint, types, import rules, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy & $(BIN)/pytest -q -n 2 --dist loadscope --no-loadscope-reorder; \
	  tests=$$?; wait $$! && exit $$tests

test-slow: test-federation ## slow tests too, with more hypothesis examples, and those of federations
	NUFED_HYPOTHESIS=search $(BIN)/pytest -q -m "slow or not slow" --timeout 3600 \
	  --ignore tests/flower

# with the loopback interface as the only network (Linux); root needs no user namespace, in which
# tests could not become other users
OFFLINE := unshare $(if $(filter 0,$(shell id -u)),,--map-root-user) --net sh -c 'ip link set lo up && exec "$$@"' --

test-cluster: $(READY)   ## runs on three nodes of Ray on this machine, with kills: installs Ray, some minutes
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,ray]"
	$(OFFLINE) $(BIN)/pytest -q -m "slow or not slow" tests/simulation/test_ray_nodes.py tests/simulation/test_ray_cluster.py

test-federation: $(READY) ## real federations with crashes, intruders, late and corrupt sites: about an hour
	$(OFFLINE) $(BIN)/pytest -q -m "slow or not slow" tests/flower

test-deployment: $(READY) ## the image and the units in a clean Debian: as root, about ten minutes
	NUFED_DEPLOYMENT=1 $(BIN)/pytest -q -m slow tests/flower/ops/test_clean_machine.py

test-offline: $(READY)   ## the tests without a network other than loopback (Linux)
	$(OFFLINE) $(BIN)/pytest -q

soak: $(READY)           ## a federation of 20 sites under random kills, for two hours
	$(OFFLINE) $(BIN)/python benchmarks/soak.py --minutes 120 --sites 20

bench: $(READY)          ## benchmarks of rounds against a plain loop and a lower bound
	$(BIN)/python benchmarks/bench.py

PEERS := .venv-peers
peers:                   ## nufed beside JAX, Flower with Ray and pfl-research, in an environment of their own
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	for peer in $$(grep -v '^#' benchmarks/peers/requirements.txt); do \
	  $(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $$peer \
	    || echo "$$peer can't be installed: its contestants are skipped"; \
	done
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  -r benchmarks/peers/requirements-no-deps.txt || echo "pfl-research can't be installed: it is skipped"
	$(PEERS)/bin/python benchmarks/peers/compare.py

attacks: $(READY)        ## every attack against every aggregation rule: about half an hour
	$(BIN)/python benchmarks/attacks.py

external: $(READY)       ## published numbers of NIID-Bench and MAML, and ours in their settings: about five hours of a core
	$(BIN)/python benchmarks/external.py
	$(BIN)/python benchmarks/external_maml.py

paper: $(READY)          ## the paper's experiments and extensions, in stages: about nine hours of two cores
	$(BIN)/python -m paper

paper-%: $(READY)        ## one stage of it: make paper-fig1
	$(BIN)/python -m paper $*

board: $(READY)          ## every method, tuned, on every problem: up to 16 hours of a core, resumable
	$(BIN)/python -m board

board-advice: $(READY)   ## checks `nufed advise CONFIG` against the board: two minutes per problem without a pilot
	$(BIN)/python -m board --advice

board-%: $(READY)        ## one problem of it: make board-sensors
	$(BIN)/python -m board $*

LOWEST := .venv-lowest
CORE_TESTS := tests/meta tests/objective tests/algorithms tests/data tests/server
NEEDS_EXTRA := ^from (nufed[.])?flower|^(from|import) (flwr|peft|transformers|pandas)
test-lowest:             ## the core at the lower ends of pyproject.toml's ranges, in an environment of its own
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(PYTHON) tools/lowest.py > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check -c $(LOWEST)/constraints.txt -e . \
	  pytest pytest-timeout hypothesis scipy
	$(LOWEST)/bin/python examples/core.py
	rm -rf $(LOWEST)/run
	$(LOWEST)/bin/nufed run sinusoid rounds=3 --out $(LOWEST)/run
	$(LOWEST)/bin/pytest -q $(CORE_TESTS) $(addprefix --ignore=,$(shell grep -lrE '$(NEEDS_EXTRA)' $(CORE_TESTS)))

PACKAGE := .venv-package
package:                 ## sdist and wheel in dist/, checked, and the wheel installed in an environment of its own
	test -x $(PACKAGE)/bin/python || $(PYTHON) -m venv $(PACKAGE)
	$(PACKAGE)/bin/python -m pip install --quiet --disable-pip-version-check build twine check-wheel-contents
	rm -rf dist
	$(PACKAGE)/bin/python -m build --outdir dist .
	$(PACKAGE)/bin/twine check --strict dist/*
	$(PACKAGE)/bin/check-wheel-contents dist/*.whl
	$(PACKAGE)/bin/python -m venv --clear $(PACKAGE)/wheel
	$(PACKAGE)/wheel/bin/python -m pip install --quiet --disable-pip-version-check "torch==2.13.0" dist/*.whl
	cd $(PACKAGE) && wheel/bin/python -m nufed --version

format: $(READY)         ## format, and apply automatic fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:                   ## remove the environment and caches; runs are kept
	rm -rf $(VENV) $(PEERS) $(LOWEST) $(PACKAGE) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist docs/_build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `run` needs the package alone, `federation` Flower too, everything else all of it
$(READY)-run: EXTRAS :=
$(READY)-flower: EXTRAS := [flower]
$(READY): EXTRAS := [dev]
$(READY) $(READY)-run $(READY)-flower: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("nufed needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".$(EXTRAS)"
	touch $@ $(if $(filter [dev],$(EXTRAS)),$(READY)-run $(READY)-flower)
