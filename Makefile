# make up ARGS="--detach --port 9000"    the whole product on this machine
# make test ARGS="tests/gateway -x"      the tests, with what they need
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
DATA_DIR ?= var
# Two processes, each with servers of its own; PARALLEL= for one. A file's tests share what is expensive to start.
PARALLEL ?= -n 2 --dist loadfile
ARGS ?=

.PHONY: help up down status venv test lint model tools clean

help:
	@echo "make up     start everything (ARGS=--detach returns when ready)"
	@echo "make down   stop it"
	@echo "make test   run the tests (ARGS goes to pytest)"
	@echo "make lint   ruff, mypy, import contracts, migrations, deployment check"
	@echo "make venv   the Python environment in $(VENV)"

up: venv
	@exec $(BIN)/sluice up --data-dir $(DATA_DIR) $(ARGS)

down: venv
	@exec $(BIN)/sluice down --data-dir $(DATA_DIR) $(ARGS)

status: venv
	@exec $(BIN)/sluice status --data-dir $(DATA_DIR) $(ARGS)

venv:
	@sh .ci/venv $(VENV)

model: venv
	@$(BIN)/sluice models pull smollm2-135m --data-dir $(DATA_DIR)

tools:
	@sh .ci/tools

test: tools venv model
	@SLUICE_TEST_DATA_DIR="$(abspath $(DATA_DIR))" $(BIN)/python -m pytest $(PARALLEL) $(ARGS)

lint: venv
	@sh .ci/lint $(BIN)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
