# Every target sets up what it needs; a second call is quick.
VENV   := .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.livescale-ready

.PHONY: help setup demo test proof long chaos chaos-hosts swarm newcomer vllm test-vllm check format clean

help:  ## what there is to do
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## a virtual environment with the command livescale

# torch goes first: where no NVIDIA GPU is found its CPU build is installed, so that nothing that
# follows draws in gigabytes of CUDA libraries.
$(STAMP): pyproject.toml scripts/install-torch
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24"
	sh scripts/install-torch $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@echo "compiling kernels for this CPU (about a minute)"
	$(BIN)/python -m livescale.engine.warm_up
	touch $@

demo: $(STAMP)  ## watch a pool scale 1 -> 3 -> 1 under a bursty trace
	$(BIN)/livescale demo

# Tests of the real stage start processes and open sockets: nothing runs beside them, and one that
# fails gets a second try, which is printed. All others are deterministic. Of --long two files of
# the real stage run at a time, since deadlines follow from how busy the machine is.
JOBS ?= 2
DETERMINISTIC = $(BIN)/python -m pytest --stage deterministic --numprocesses $(JOBS)
REAL          = $(BIN)/python -m pytest --stage real --reruns 1

test: $(STAMP)  ## the tests, in two stages (15 minutes on 2 cores): JOBS=2
	$(DETERMINISTIC)
	$(REAL)

long: $(STAMP)  ## more of the same: other families and seeds, more examples of properties: JOBS=2
	$(DETERMINISTIC) --long
	$(REAL) --long --numprocesses $(JOBS) --dist loadfile

ROUNDS ?= 50
SEED   ?= 0
chaos: $(STAMP)  ## processes die and links are cut while models move: ROUNDS=50 SEED=0
	$(BIN)/python -m pytest tests/runtime/test_chaos.py -rsP --rounds $(ROUNDS) --seed $(SEED)

chaos-hosts: $(STAMP)  ## machines are lost, cut off and started anew while they serve (root): ROUNDS=50 SEED=0
	$(BIN)/python -m pytest tests/runtime/test_chaos_hosts.py -rsP --rounds $(ROUNDS) --seed $(SEED)

SEEDS ?= 1000
FIRST ?= 0
swarm: $(STAMP)  ## faulty worlds in virtual time, every rule checked: SEEDS=1000 FIRST=0
	$(BIN)/livescale swarm --seeds $(SEEDS) --first $(FIRST)

newcomer: $(STAMP)  ## README's commands as they stand there, in a fresh clone (root; 10 minutes)
	$(BIN)/python tests/newcomer.py

# Other seeds for each commit: a range that is always tried is soon mended until it passes.
PROOF_SEED = $$(( 0x$$(git rev-parse --short=6 HEAD) ))
proof:  ## before a release: long, chaos, chaos-hosts, a swarm whose first seed follows from the commit, newcomer (80 minutes)
	$(MAKE) long
	$(MAKE) chaos ROUNDS=50
	$(MAKE) chaos-hosts ROUNDS=50
	$(MAKE) swarm SEEDS=1000 FIRST=$(PROOF_SEED)
	$(MAKE) newcomer

VLLM ?= .venv-vllm
vllm: $(VLLM)/.livescale-ready  ## an environment for workers with vLLM, its CPU build: VLLM=.venv-vllm

$(VLLM)/.livescale-ready: scripts/install-vllm scripts/install-torch
	sh scripts/install-vllm $(VLLM)
	touch $@

test-vllm: $(STAMP) $(VLLM)/.livescale-ready  ## the tests of workers with vLLM (6 minutes): VLLM=.venv-vllm
	LIVESCALE_VLLM_PYTHON=$(abspath $(VLLM)/bin/python) $(BIN)/python -m pytest tests/vllm

check: $(STAMP)  ## formatting, lint, types, words
	$(BIN)/ruff format --check src tests
	$(BIN)/ruff check src tests
	$(BIN)/mypy
	$(BIN)/python tests/words.py

format: $(STAMP)  ## format and mend what can be mended
	$(BIN)/ruff format src tests
	$(BIN)/ruff check --fix src tests

clean:  ## remove everything that was made
	rm -rf $(VENV) .venv-vllm .mypy_cache .pytest_cache .ruff_cache models runs
