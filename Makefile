# Every target but help and clean first sees to it that .venv is there and up to date.
.DEFAULT_GOAL := help
.PHONY: help setup train test check lint bench demo-smollm2 clean

BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  make \1|/' | awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'

setup: ## build .venv alone
	@sh scripts/setup.sh

train: setup ## train the default model on the Python standard library's source (ARGS="train.steps=100" changes it)
	@$(BIN)/telamon train default $(ARGS)

test: setup ## run all tests
	$(PYTEST) $(ARGS)

check: lint ## lint, types, import rules and the fast tests, in under 3 minutes
	$(PYTEST) -m "not slow" $(ARGS)

lint: setup ## lint, types and import rules alone
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

bench: setup ## run one benchmark: make bench ID=P1
	@test -n "$(ID)" || { echo "say which: make bench ID=P1" >&2; exit 2; }
	@$(BIN)/python -m benchmarks $(ID)

demo-smollm2: setup ## a real model from end to end: download, import, chat, perplexity, export
	@$(BIN)/python scripts/demo_smollm2.py $(ARGS)

clean: ## remove .venv, caches and build outputs; runs/ stays
	rm -rf .venv .venvs .cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
