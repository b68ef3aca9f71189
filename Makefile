# Everything from a bare machine: `make compare` and `make test` make what they need first.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && exit; done; echo python3)
BIN := .venv/bin
# Once, or each command and each rank does it where Python is told to write no bytecode, as in many containers.
COMPILE := $(BIN)/python -m compileall -q hvdkit

.PHONY: help bootstrap runtimes driver compare bench bench-all bench-start bench-tools bench-resnet50 validate bench-hosts bench-batch-sizes \
	bench-simulator check-simulator bench-network bench-memory bench-sharding horovod-matrix gpu-check programs check checked test test-all cluster-check docs release lint image-check clean

help: ## Show this list
	@grep -E '^[a-z0-9-]+:.*## ' Makefile | sed -E 's/^([a-z0-9-]+):.*## /\1|/' | while IFS='|' read -r name text; do \
		printf '  make %-15s %s\n' "$$name" "$$text"; done

bootstrap: ## Make the environment of the command line, .venv, with the tools of tests and linters
	@$(PYTHON) scripts/bootstrap.py
	@$(COMPILE)

runtimes: bootstrap ## Build an environment with framework and Horovod for each framework, .runtimes
	@$(BIN)/hvdkit runtime build

# Without the tools of tests and linters, which `make bootstrap` brings: who compares need not wait for them.
NEXT = next: $(BIN)/hvdkit runtime build pytorch, or tensorflow, or mxnet; without a name it builds all three
driver:
	@$(PYTHON) scripts/bootstrap.py --driver
	@$(COMPILE)
	@$(if $(filter driver,$(MAKECMDGOALS)),echo "$(NEXT)")

compare: driver ## Train the digits with all four frameworks at 1 and 2 ranks; table in runs/compare
	@$(BIN)/hvdkit runtime build
	@$(BIN)/hvdkit compare recipes/resnet20-digits.yaml --framework pytorch --framework tensorflow \
		--framework keras --framework mxnet -np 1 -np 2 --out runs/compare --overwrite

bench: runtimes ## Speed and memory beside loops by hand, Horovod by hand, DDP and processes apart; two hours, quiet, resumable
	@$(BIN)/python -m benchmarks.cost

# The results that pages quote, in the order of their measurement, and what makes those that are not benchmarks.NAME.
BENCHMARKS := parity cost start shared_memory accuracy tools elastic parallel sharding gpt_loss memory peaks ways gpt_network bench-network data
RUN_parity := benchmarks.parities
RUN_shared_memory := benchmarks.shared_memory --framework pytorch
RUN_elastic := tests.cluster.elastic_chaos
RUN_parallel := benchmarks.parallel --central --ranks 2 --model 0.8M
RUN_bench-network := benchmarks.network

bench-all: runtimes ## All figures of README and docs/ anew, in one go: a day, quiet, resumable; make -n bench-all says what is left
	@$(MAKE) --no-print-directory -k -j1 $(BENCHMARKS:%=runs/bench-all/%.done)
	@$(BIN)/python -m scripts.figures && $(BIN)/python -m scripts.draw_front

# Status 1 beside a new result: a limit was missed.
$(BENCHMARKS:%=runs/bench-all/%.done): runs/bench-all/%.done:
	@mkdir -p $(@D) && touch $@.begun
	$(BIN)/python -m $(or $(RUN_$*),benchmarks.$*) $(if $(filter start tools ways,$*),,--keep runs/bench-all/$*) || \
		test benchmarks/$*.json -nt $@.begun
	@mv $@.begun $@

bench-sharding: runtimes ## Memory and speed of each stage of sharding, and docs/images/sharding.png; 15 minutes, resumable
	@$(BIN)/python -m benchmarks.sharding

bench-start: runtimes ## From a command to the first step, beside two bare processes; about 8 minutes
	@$(BIN)/python -m benchmarks.start

bench-tools: runtimes ## Seconds of hvdkit --help, predict, report and doctor, ten times each; two minutes, quiet
	@$(BIN)/python -m benchmarks.tools

# 64 pixels and 16 images per rank: a run takes 20 s. The parity check needs only small batches.
RESNET50 := resnet50-synthetic data.height=64 data.width=64 data.train_images=640 data.val_images=32 steps=20 \
	warmup_steps=3
RIVALS := --rival plain --rival ddp --rival multiworker --rival kvstore
ROUNDS ?= 5

bench-resnet50: runtimes ## ResNet-50, four frameworks and all baselines at 2 ranks: runs/bench-resnet50/report.html; 35 minutes
	@test -e runs/bench-resnet50-parity/parity.json || $(BIN)/hvdkit parity $(RESNET50) batch_size=4 $(RIVALS) \
		--steps 2 --out runs/bench-resnet50-parity --overwrite
	@$(BIN)/hvdkit compare $(RESNET50) -np 2 $(RIVALS) --rival independent --rounds $(ROUNDS) \
		--parity runs/bench-resnet50-parity/parity.json --out runs/bench-resnet50 --resume
	@$(BIN)/hvdkit report runs/bench-resnet50

bench-memory: runtimes ## Whether training leaks: memory over 2,000 steps, each framework; 20 minutes, resumable
	@$(BIN)/python -m benchmarks.memory

validate: bootstrap ## Compare the simulator with closed forms and published measurements; docs/validation.md
	@$(BIN)/python -m benchmarks.validate

bench-hosts: runtimes ## Steps on four hosts with slow links, for make validate; about 25 minutes, quiet, resumable
	@$(BIN)/python -m benchmarks.own_hosts

bench-batch-sizes: runtimes ## Profiles at three batch sizes, for make validate; about 5 minutes, quiet, resumable
	@$(BIN)/python -m benchmarks.batch_sizes

bench-simulator: bootstrap ## How many what-ifs a second the simulator answers, on one core
	@$(BIN)/python -m benchmarks.simulator

check-simulator: bootstrap ## Try what every prediction must obey on 4,000 random examples each, and as many damaged files; half an hour
	@HVDKIT_TEST_EXAMPLES=4000 $(BIN)/python -m pytest -q tests/test_simulator_properties.py tests/test_simulator_damaged.py

gpu-check: bootstrap ## Compile Horovod for GPUs and check what can be checked without one; needs nvcc, 10 GB; resumable
	@$(BIN)/python scripts/gpu_check.py

horovod-matrix: bootstrap ## Horovod's wheel for nine environments, each tested: benchmarks/horovod-matrix.md; resumable
	@$(BIN)/python -m benchmarks.horovod_matrix

bench-network: runtimes ## Training over a slow network: rates, methods, accuracy; an hour, needs a quiet machine
	@$(BIN)/python -m benchmarks.network

# Debian's packages of what tests start besides Python. Where they cannot be installed, the tests name what they lack.
APT = test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null || { apt-get -qq update && \
	DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends --no-upgrade $(1) >/dev/null; } || true

programs: # Chromium, for tests of pages, where root may install it
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit; done; \
		$(call APT,chromium fonts-dejavu-core)

PYTEST = $(BIN)/python -m pytest -n auto

check: ## Check style and types, and run the tests that start no ranks: under 3 minutes, needs no runtime
	@$(MAKE) --no-print-directory -j2 lint checked

checked: bootstrap # beside mypy, which knows one core only
	@$(PYTEST) -m 'check and not ranks' --dist worksteal

test: runtimes programs ## Run the tests, over real processes
	@$(PYTEST) -m 'not thorough' --dist loadfile --no-loadscope-reorder

test-all: runtimes programs ## As make test, also what it tries in one framework less: 40 minutes on two cores
	@$(PYTEST) --dist loadfile --no-loadscope-reorder

cluster-check: runtimes ## Install Slurm, two MPIs, sshd (root, Debian) and Ray, and test all launchers; with Docker, over containers
	@$(call APT,openmpi-bin mpich slurm-wlm munge openssh-server openssh-client chromium fonts-dejavu-core)
	@$(BIN)/python -m pip install --quiet -e '.[ray]' 'ray[default]'
	@$(PYTEST) --dist loadfile tests/test_slurm.py tests/test_launch_clusters.py tests/test_submit.py tests/test_launch_horovod.py \
		tests/test_ray.py tests/test_mpi.py tests/test_host_doctor.py tests/test_kubernetes_pods.py
	@docker/check.sh --compose mxnet

docs: bootstrap ## Make the site of README and docs/: build/site/index.html, with search
	@$(BIN)/python -m scripts.site

release: bootstrap ## Build and check what is published: sdist, wheel and SHA256SUMS in dist
	@$(BIN)/python -m scripts.release

lint: bootstrap ## Check style and types
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

image-check: ## Build the Dockerfile's CPU targets with Docker, train in each and over two containers
	@docker/check.sh $(TARGETS)

clean: ## Remove .venv, .runtimes, runs and caches in this folder; compiled wheels stay in the user's cache
	rm -rf .venv .runtimes runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "kept: Horovod's wheels in $${XDG_CACHE_HOME:-$$HOME/.cache}/hvdkit, so that the next build is quick"
