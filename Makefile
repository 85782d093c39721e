# Everything runs in .venv, made from constraints.txt on first use.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: run federation test test-slow test-federation test-offline bench attacks paper format clean

run: $(READY)            ## train the quickstart and print the path of its report
	$(BIN)/nufed run quickstart

federation: $(READY)     ## a server and four sites on this machine, with TLS and keys, on Flower
	$(BIN)/nufed federate local examples/federation

test: $(READY)           ## everything that must hold: format, lint, types, import rules, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q -n 2 --dist loadscope

test-slow: test-federation ## the longer campaigns, with hypothesis searching, and those of federations
	NUFED_HYPOTHESIS=search $(BIN)/pytest -q -m "slow or not slow" --timeout 3600 \
	  --ignore tests/federate --ignore tests/flower

# where no network is but this machine itself (Linux)
OFFLINE := unshare --map-root-user --net sh -c 'ip link set lo up && exec "$$@"' --

test-federation: $(READY) ## real federations that are killed, intruded, late and lied to: about an hour
	$(OFFLINE) $(BIN)/pytest -q -m "slow or not slow" tests/federate tests/flower

test-offline: $(READY)   ## the tests where no network is but this machine itself (Linux)
	$(OFFLINE) $(BIN)/pytest -q

bench: $(READY)          ## cost of rounds, side by side with a plain loop and a floor
	$(BIN)/python benchmarks/bench.py

attacks: $(READY)        ## every attack against every rule of aggregation: about half an hour
	$(BIN)/python benchmarks/attacks.py

paper: $(READY)          ## the paper's experiments and beyond, in stages: about three hours
	$(BIN)/python -m paper

paper-%: $(READY)        ## one stage of it: make paper-fig1
	$(BIN)/python -m paper $*

format: $(READY)         ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:                   ## remove the environment and caches; runs are kept
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("nufed needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@
