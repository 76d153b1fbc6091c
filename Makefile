# Every command of the README. A bare Debian machine is enough: each target installs what it misses.
.DEFAULT_GOAL := help
.PHONY: help venv servers generators spin servers-mysql servers-debezium browser up down demo test test-mysql check pictures recording screenshots bench faults lock

PYTHON ?= python3.11
BIN := .venv/bin
TEST_WORKERS ?= 3
# Each worker has servers of its own. A file of tests stays on one worker, because its tests share what it starts.
PARALLEL = -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --durations 60 --durations-min 5

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' Makefile | expand -t 14

venv: .venv/installed ## Python packages, by their hashes

.venv/installed: requirements.lock pyproject.toml deploy/install-venv
	@PYTHON=$(PYTHON) deploy/install-venv
	@touch $@

servers: ## MariaDB, Java and Kafka, where missing
	@deploy/install-servers

servers-mysql:
	@deploy/install-servers mysql

generators:
	@deploy/install-generators

spin:
	@deploy/install-servers spin

browser:
	@deploy/install-servers browser

servers-debezium:
	@deploy/install-servers debezium

up: venv servers ## start the embedded stack and wait until it is ready
	@$(BIN)/schemaless up

down: venv ## stop it in order; the data stays
	@$(BIN)/schemaless down

demo: venv servers ## load real data, audit it, leave the stack running
	@$(BIN)/schemaless demo

test: venv servers spin browser ## the whole default suite, on real servers that it starts itself
	$(BIN)/pytest $(PARALLEL)

test-mysql: venv servers-mysql ## what depends on the kind of server, on MySQL 9.7
	SCHEMALESS_MYSQL_FLAVOUR=mysql $(BIN)/pytest -m storage $(PARALLEL)

check: venv ## format, lint, types, import contracts, docs and sizes: no servers
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest tests/unit/test_tidy.py tests/unit/test_pictures.py tests/unit/test_pages.py

pictures: ## let Mermaid itself parse the pictures of the pages: needs node and npm
	docs/render-pictures

recording: venv servers ## run the demo, kill each of its processes, draw docs/demo.svg
	$(BIN)/python -m bench.recording

bench: venv servers servers-debezium ## the benchmark report
	$(BIN)/python -m bench

faults: venv servers generators spin ## the long run that kills and stops processes
	SCHEMALESS_FAULTS_LONG=1 $(BIN)/pytest -m faults --timeout 3600

screenshots: venv servers browser ## the pictures of docs/page.md and of the incidents, from a real browser
	$(BIN)/python docs/take-screenshots
	SCHEMALESS_TEST_PICTURES=docs $(BIN)/pytest tests/integration/ui/test_incidents.py

lock: ## requirements.lock anew from pyproject.toml
	uv pip compile pyproject.toml --extra server --group dev --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-header --exclude-newer 2026-11-14 -o requirements.lock
