# Two commands matter: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Byte code for all of PyTorch takes minutes. Python makes it for what is imported, and keeps it unless told not to.
INSTALL := $(BIN)/pip install --quiet $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile) -c constraints.txt
COPY := $(VENV)/typed

.DEFAULT_GOAL := help
.PHONY: help install demo test examples lint imports types copy format site tables clean

help: ## list the commands
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

install: $(READY) ## create .venv and install specgraph with its tools

$(READY): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "specgraph needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip setuptools wheel
	$(INSTALL) torch
	$(INSTALL) -e '.[dev]'
	# The tests compare heads with this package; it pins an older transformers, hence without what it depends on.
	$(INSTALL) --no-deps speculators hs-connectors
	touch $(READY)

demo: install ## decode real questions with the shipped small models, with and without speculation
	$(BIN)/python examples/demo.py

test: install ## run every test this machine can run, a process per core
	$(BIN)/python -m pytest -n auto --dist worksteal

examples: install ## run the examples
	for file in quickstart batch_with_draft_model own_pass read_a_dump; do $(BIN)/python examples/$$file.py || exit 1; done

lint: imports ## check style and who imports whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install ## apply style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

imports: copy ## check who imports whom, on an installed copy
	cd $(COPY) && ../bin/lint-imports --config ../../setup.cfg

types: copy ## check types on an installed copy
	cd $(COPY) && MYPYPATH=. ../bin/mypy --config-file ../../setup.cfg --python-executable ../bin/python -p specgraph

copy: install # one folder, laid out as setup.cfg maps the folders of the sources: static tools need that
	rm -rf $(COPY) build/lib build/bdist.*
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --target $(COPY) .
	rm -rf build/lib build/bdist.*

site: install ## build the documentation into build/site; a warning is an error, and no network is used
	$(BIN)/python -m sphinx -E -a -W --keep-going -q -b html -d build/site.cache docs build/site

tables: install ## measure the acceptance tables of the model card again (about an hour on two cores)
	$(BIN)/python examples/acceptance.py

clean: ## remove what `make` made
	rm -rf $(VENV) build graphs *.egg-info .pytest_cache .mypy_cache .ruff_cache
