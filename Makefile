# Two commands matter: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One environment is made in two parts, and a file records that a part is there: PyTorch and specgraph, which is all that
# the demo and the examples need, and what tests, checks and pages need in addition.
READY := $(VENV)/.ready
TOOLS := $(VENV)/.tools
LOG := $(VENV)/install.log
# Byte code for all of PyTorch takes minutes. Python makes it for what is imported, and keeps it.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/pip install --no-compile -c constraints.txt
COPY := $(VENV)/typed

# $(call step,what is done,command) says what is done and how long it took. The output of the command goes to $(LOG), whose
# end is shown if the command fails.
step = @printf '%s ... ' '$(1)'; begin=$$(date +%s); { $(2); } >> $(LOG) 2>&1 || { printf 'failed\n'; tail -n 25 $(LOG); \
	echo 'The whole log is $(LOG).'; exit 1; }; printf '%s s\n' $$(($$(date +%s) - begin))

.DEFAULT_GOAL := help
.PHONY: help install package demo test examples lint imports types copy format site tables clean

help: ## list the commands
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

install: $(TOOLS) ## create .venv with specgraph and all that tests, checks and pages need

package: $(READY) ## create .venv with PyTorch and specgraph alone, which is what the demo needs

$(READY): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "specgraph needs Python 3.11 or newer")'
	@echo 'Installing PyTorch, transformers and specgraph into $(VENV), which takes a minute and what downloads take.'
	@mkdir -p $(VENV)
	$(call step,1 of 3: an environment,$(PYTHON) -m venv $(VENV))
	$(call step,2 of 3: PyTorch,$(PIP) torch)
	$(call step,3 of 3: specgraph and what it imports,$(PIP) -e .)
	@touch $(READY)

$(TOOLS): $(READY)
	@echo 'Installing what tests, checks and pages need into $(VENV) in addition, which takes some minutes.'
	$(call step,1 of 3: what builds packages,$(PIP) --upgrade pip setuptools wheel)
	$(call step,2 of 3: the tools and every optional package,$(PIP) -e '.[dev]')
# The tests compare heads with this package; it pins an older transformers, hence without what it depends on.
	$(call step,3 of 3: speculators,$(PIP) --no-deps speculators hs-connectors)
	@touch $(TOOLS)

demo: package ## decode real questions with the shipped small models, with and without speculation
	@$(BIN)/python examples/demo.py

test: install ## run every test that this machine can run, a process per core; others are skipped by name
	$(BIN)/python -m pytest -n auto --dist worksteal

examples: package ## run the examples
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
	$(call step,an installed copy in $(COPY),$(BIN)/pip install --no-deps --no-build-isolation --target $(COPY) .)
	rm -rf build/lib build/bdist.*

site: install ## build the documentation into build/site; a warning is an error, and no network is used
	$(BIN)/python -m sphinx -E -a -W --keep-going -q -b html -d build/site.cache docs build/site

tables: package ## measure the acceptance tables of the model card again (about an hour on two cores)
	$(BIN)/python examples/acceptance.py

clean: ## remove what `make` made
	rm -rf $(VENV) build graphs *.egg-info .hypothesis .pytest_cache .mypy_cache .ruff_cache
