# `make` lists the targets. scripts/ do all the work; each script has -h.

.DEFAULT_GOAL := help
.PHONY: $(shell sed -nE 's/^([a-z0-9-]+):.*/\1/p' $(firstword $(MAKEFILE_LIST)))
MAKEFLAGS += --no-print-directory
# torch is compiled once, not by each of the hundreds of processes that import it.
unexport PYTHONDONTWRITEBYTECODE

PYTHON_ENV := build/venv/bin/python
PYTHON_RAY := build/venv-ray/bin/python
PYTHON_HF := build/venv-hf/bin/python
PYTHON_S3 := build/venv-s3/bin/python
PYTHON_RL := build/venv-rl/bin/python
PYTHON_FRAMEWORKS := build/venv-frameworks/bin/python
LAYOUTS ?=
SET ?= quick
ONLY ?=
MARKDOWN ?=
MEGATRON ?=
CHART ?=
TESTS ?=
PYTEST_ARGS ?=

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 18
	@echo
	@echo 'make train: STEPS=200 WORKERS=2 SERVERS=1 COMPARE=1 (train with all-reduce too) OPTIMIZER=servers (which keep it) MODE=ray (under Ray) HF=1 (SmolLM2, or HF=FOLDER) LORA=1 (adapters alone) ARGS="--seed 1" (any flag of scripts/train.py)'
	@echo 'make rl: ALGORITHM=ppo (default: grpo) STEPS=20 WORKERS=2 COMPARE=1 (through all-reduce too) ARGS="--seed 2" (any flag of scripts/rl.py)'
	@echo 'make parity: LAYOUTS="dp2 tp2-dp2-overlap" (only these) MARKDOWN=docs/results/correctness.md (write it anew)'
	@echo 'make bench: SET=full (default: quick) ONLY="4+4-500mbit" MARKDOWN=docs/results/figures.md (write the results) CHART=docs/images/speed.png (one picture of them) ARGS=... (any flag of bench/pushpull/suite.py)'
	@echo 'make functional: MEGATRON=checkout (all tests of a Megatron-LM; else the rows that are kept here) LAYOUTS="gpt3_mcore_tp1_pp2" MARKDOWN=docs/results/recipes.md'
	@echo 'make simulate, make chaos: SEEDS=100 FROM=1 (which)   make fuzz: TARGET=meta RUNS=1000000 (of each)'
	@echo 'make soak: MINUTES=60 FROM=2 (the seed)'
	@echo 'make test:  TESTS="tests/patches" (only these) PYTEST_ARGS="-k name -x"'

setup: ## system packages, Python environment, upstreams fetched, patched and built
	@scripts/setup.sh

setup-ray:
	@scripts/setup.sh --ray

setup-hf:
	@scripts/setup.sh --hf

setup-rl:
	@scripts/setup.sh --rl

setup-s3:
	@scripts/setup.sh --s3

setup-frameworks:
	@scripts/setup.sh --frameworks

# HF=1, or a folder, trains a Hugging Face model; LORA=1 trains adapters on it. That environment also has Ray.
WITH_HF := $(filter-out 0,$(HF))
TRAINED_BY := $(if $(WITH_HF),$(PYTHON_HF),$(if $(filter ray,$(MODE)),$(PYTHON_RAY),$(PYTHON_ENV)))

train: $(if $(WITH_HF),setup-hf,$(if $(filter ray,$(MODE)),setup-ray,setup)) ## train a GPT on real text, gradients summed by BytePS
	@$(TRAINED_BY) -W ignore scripts/train.py \
		$(if $(WITH_HF),--hf-model $(if $(filter 1,$(HF)),smollm2,$(HF))) \
		$(if $(filter-out 0,$(LORA)),--lora) \
		$(if $(MODE),--mode $(MODE)) $(if $(OPTIMIZER),--optimizer $(OPTIMIZER)) $(if $(filter-out 0,$(COMPARE)),--compare) \
		$(if $(STEPS),--steps $(STEPS)) $(if $(WORKERS),--workers $(WORKERS)) \
		$(if $(SERVERS),--servers $(SERVERS)) $(ARGS)

rl: setup-rl ## teach a tiny model to add: verl's trainer and vLLM, by GRPO or PPO, through BytePS
	@$(PYTHON_RL) -W ignore scripts/rl.py \
		$(if $(ALGORITHM),--algorithm $(ALGORITHM)) $(if $(filter-out 0,$(COMPARE)),--compare) \
		$(if $(STEPS),--steps $(STEPS)) $(if $(WORKERS),--workers $(WORKERS)) \
		$(if $(SERVERS),--servers $(SERVERS)) $(ARGS)

# Number of tests run in parallel: one more than cores, since many tests wait. 0 gives tests a terminal, for --pdb.
JOBS ?= $(shell cores=$$(nproc); echo $$(( cores < 8 ? cores + 1 : 8 )))

# Three tiers of tests (CONTRIBUTING.md): check, test, and the thorough targets after it. Tests build the programs that
# they run. If all are run, building comes first, so that no time limit of a test includes it.
check: setup lint ## before each commit: lint and the fast tests of one process (or TESTS), in a minute
	$(if $(TESTS),,@$(PYTHON_ENV) tests/native.py unit_test simulate connection_test tls_test >/dev/null)
	@$(PYTHON_ENV) -m pytest -n $(JOBS) --dist worksteal -m "not slow and not thorough" \
		$(PYTEST_ARGS) $(or $(TESTS),tests/unit tests/house)

test: setup lint ## lint, then every test (or TESTS) but those of the thorough targets below
	$(if $(TESTS),,@$(PYTHON_ENV) tests/native.py >/dev/null)
	@$(PYTHON_ENV) -m pytest -n $(JOBS) --dist worksteal -m "not thorough and not on_rdma" \
		$(PYTEST_ARGS) $(TESTS)

THOROUGH := tests/unit tests/bench tests/build tests/chaos tests/megatron tests/multiproc tests/patches -k "not slurm"

test-thorough: setup ## longer runs, and more settings, of what make test tries
	$(if $(TESTS),,@$(PYTHON_ENV) tests/native.py >/dev/null)
	@$(PYTHON_ENV) -m pytest -n $(JOBS) --dist worksteal -m "thorough and not on_rdma" \
		$(PYTEST_ARGS) $(or $(TESTS),$(THOROUGH))

# Leaves out tests that measure a worker's CPU time or bound memory.
WATCHED := tests/multiproc -k "not idle and not memory and not flood"
SANITIZERS ?= address thread

test-sanitizers: setup ## fuzz corpora, units, jobs, chaos, servers of tests/multiproc (or TESTS), under SANITIZERS
	@scripts/tools.sh clang >/dev/null
	@for kind in $(SANITIZERS); do \
		programs=$$($(PYTHON_ENV) tests/native.py --sanitize $$kind) && \
		$(PYTHON_ENV) -m pytest -m "sanitized_by_$$kind" tests/sanitizers && \
		$(PYTHON_ENV) tests/chaos/chaos.py --sanitize $$kind --seeds $(or $(SEEDS),20) && \
		MEGATRON_BYTEPS_TEST_SERVER="$$programs/byteps-server" $(PYTHON_ENV) -m pytest \
			-n $(JOBS) --dist worksteal $(PYTEST_ARGS) $(or $(TESTS),$(WATCHED)) || exit 1; \
	done

simulate: setup ## whole jobs in threads and time that a seed decides
	@$(PYTHON_ENV) tests/native.py simulate >/dev/null
	@mkdir -p build/logs && $(PYTHON_ENV) scripts/progress.py --name simulate --show-end 1 \
		--log build/logs/simulate.log -- build/cmake-tests/simulate --progress \
		--seeds $(or $(SEEDS),100000) --from $(or $(FROM),1) $(ARGS)

fuzz: setup ## the parsers of what comes from a network
	@$(PYTHON_ENV) scripts/fuzz.py $(TARGET) $(if $(RUNS),--runs $(RUNS)) $(ARGS)

chaos: setup ## break real jobs on emulated hosts, at random
	@$(PYTHON_ENV) tests/chaos/chaos.py --seeds $(or $(SEEDS),20) --from $(or $(FROM),1) $(ARGS)

soak: setup ## train for an hour with faults and workers that rejoin, and watch for leaks
	@$(PYTHON_ENV) -W ignore tests/chaos/chaos.py --minutes $(or $(MINUTES),60) --from $(or $(FROM),1) $(ARGS)

replicas: setup ## learning curves of replicas that meet at servers, and of one job, as a table and a picture
	@$(PYTHON_ENV) -W ignore bench/replicas/run.py --plot $(or $(PICTURE),build/replicas/replicas.png) $(ARGS)

test-gpu: setup ## sums of tensors on GPUs, where there are any
	@$(PYTHON_ENV) -m pytest $(PYTEST_ARGS) tests/gpu

test-ray: setup-ray ## jobs under Ray that lose processes and go on
	@$(PYTHON_RAY) -m pytest $(PYTEST_ARGS) $(or $(TESTS),tests/under_ray)

ray-failures: setup-ray ## each failure that a job under Ray survives, with times, as a table
	@$(PYTHON_RAY) -W ignore bench/ray_failures/run.py $(if $(MARKDOWN),--markdown $(MARKDOWN)) $(ARGS)

ray-layouts: setup-hf ## each layout under torchrun and under Ray, a GPT and adapters, as a table
	@$(PYTHON_HF) -W ignore tests/layouts/ray_layouts.py $(if $(LAYOUTS),--layout $(LAYOUTS)) \
		$(if $(MARKDOWN),--markdown $(MARKDOWN)) $(ARGS)

test-hf: setup-hf ## Hugging Face models, whole and by adapters, in layouts of up to eight ranks
	@$(PYTHON_HF) -m pytest $(PYTEST_ARGS) $(or $(TESTS),tests/hugging_face)

hf-layouts: setup-hf ## each layout of a Hugging Face model, whole and by adapters, as a table
	@$(PYTHON_HF) -W ignore tests/layouts/hf_layouts.py $(if $(LAYOUTS),--layout $(LAYOUTS)) \
		$(if $(MARKDOWN),--markdown $(MARKDOWN)) $(ARGS)

recipes: $(if $(BRIDGE),setup-hf,setup) ## recipes that work with the flags: MEGATRON=checkout, BRIDGE=1, MARKDOWN=page
	@HF_HUB_OFFLINE=1 $(if $(BRIDGE),$(PYTHON_HF),$(PYTHON_ENV)) -W ignore scripts/recipes.py \
		$(if $(MEGATRON),--megatron $(MEGATRON)) $(if $(BRIDGE),--bridge) \
		$(if $(MARKDOWN),--markdown $(MARKDOWN)) $(ARGS)

test-rl: setup-rl ## reinforcement learning through verl: a user's command line, failures
	@$(PYTHON_RL) -m pytest $(PYTEST_ARGS) $(if $(MARKDOWN),--markdown $(MARKDOWN)) $(or $(TESTS),tests/reinforcement)

test-frameworks: setup-frameworks ## torchtitan, Lightning, transformers, DeepSpeed: scripts that know nothing of byteps
	@$(PYTHON_FRAMEWORKS) -m pytest $(PYTEST_ARGS) $(or $(TESTS),tests/frameworks)

# The oldest torch that the wheel supports, one in between, and the newest ones.
TORCHES ?= 2.9 2.11 2.14 2.15
WITH_TORCH := $(addprefix tests/multiproc/test_,c10d.py c10d_torch.py push_pull.py)

test-torch: setup ## the wheel with TORCHES: the backend of torch.distributed, hooks, push-pulls, optimizers
	@for version in $(TORCHES); do \
		python=$$(scripts/tools.sh torch $$version) && \
		PATH="$(CURDIR)/build/python/bin:$$PATH" PYTHONPATH="$(CURDIR):$(CURDIR)/build/python" $$python -m pytest -n $(JOBS) -m "not thorough" $(PYTEST_ARGS) \
			$(or $(TESTS),$(WITH_TORCH)) || exit 1; \
	done

border: setup ## results of users' programs through each interface, compared with gloo, as a table
	@$(PYTHON_ENV) -W ignore -m tests.border.run $(if $(MARKDOWN),--markdown $(MARKDOWN)) $(ARGS)

pytorch-tests: setup ## PyTorch's own tests of torch.distributed, through servers and over gloo
	@$(PYTHON_ENV) -W ignore -m tests.pytorch.run $(if $(MARKDOWN),--markdown $(MARKDOWN)) $(ARGS)

rl-layouts: setup-rl ## verl's trainer and vLLM in each layout, by GRPO and PPO, as a table
	@$(PYTHON_RL) -W ignore tests/layouts/rl_layouts.py $(if $(LAYOUTS),--layout $(LAYOUTS)) \
		$(if $(MARKDOWN),--markdown $(MARKDOWN)) $(ARGS)

test-object-store: setup-s3 ## jobs under Ray whose checkpoints are in S3 and in Google Cloud Storage
	@$(PYTHON_S3) -m pytest $(PYTEST_ARGS) tests/object_store

test-rdma: setup ## the transports' tests in a virtual machine, with every setting, and between two machines
	@$(PYTHON_ENV) -m pytest $(PYTEST_ARGS) $(or $(TESTS),tests/rdma)

test-images: setup ## build the images, train from the compose file, wheels on other machines
	@bash -c 'source scripts/lib/system.sh; setup_images'
	@$(PYTHON_ENV) -m pytest -o faulthandler_timeout=3900 $(PYTEST_ARGS) tests/images

test-slurm: setup ## the Slurm example, in a Slurm whose nodes are emulated hosts
	@bash -c 'source scripts/lib/system.sh; setup_slurm'
	@$(PYTHON_ENV) -m pytest $(PYTEST_ARGS) tests/multiproc/test_slurm.py

wheel: setup ## wheels for other machines, x86-64 and arm64, archives with the server alone
	@scripts/wheel.sh $(ARGS)

images: wheel ## container images: the server for x86-64 and arm64, the worker
	@scripts/images.sh $(ARGS)

release: setup ## wheels, archives, images, checksums, bill of materials in build/release (ARGS="--images none")
	@$(PYTHON_ENV) scripts/release.py $(ARGS)

audit: setup ## compare all packages of locks/ with a list of known vulnerabilities
	@$(PYTHON_ENV) scripts/audit.py $(ARGS)

site: setup ## the documentation as a site, in build/site, its links checked
	@scripts/tools.sh site

parity: setup ## compare gradients with all-reduce and exact sums, in every parallel layout
	@$(PYTHON_ENV) -W ignore tests/layouts/parity.py $(if $(LAYOUTS),--layout $(LAYOUTS)) \
		$(if $(MARKDOWN),--markdown $(MARKDOWN))

functional: setup ## the arguments of Megatron's functional tests, of a checkout MEGATRON, through both backends
	@$(PYTHON_ENV) -W ignore tests/layouts/functional_tests.py $(if $(LAYOUTS),--layout $(LAYOUTS)) \
		$(if $(MEGATRON),--megatron $(MEGATRON)) $(if $(MARKDOWN),--markdown $(MARKDOWN)) $(ARGS)

bench: setup ## push-pull and all-reduce on emulated links, idle costs, additions: checks the thresholds
	@status=0; $(PYTHON_ENV) -W ignore bench/pushpull/suite.py --set $(SET) --json build/bench/$(SET).json \
		--chart $(or $(CHART),build/bench/$(SET).png) \
		$(if $(ONLY),--only $(ONLY)) $(if $(MARKDOWN),--markdown $(MARKDOWN)) $(ARGS) || status=1; \
	$(if $(ONLY),,$(MAKE) -k bench-sharded bench-idle bench-reducer ARGS= || status=1;) exit $$status

SHARDED := --workers 4 --servers 4 --emulate 8@100mbit --route auto --steps 12 --warmup 3 --launches 3

bench-sharded: setup ## whole steps with the distributed optimizer, compared with torch.distributed alone
	@status=0; $(PYTHON_ENV) -W ignore bench/train_bench.py $(SHARDED) --min-ratio 1.25 \
		--ways byteps-sharded-wire-bf16,sharded --json build/bench/sharded-bf16.json $(ARGS) || status=1; \
	$(PYTHON_ENV) -W ignore bench/train_bench.py $(SHARDED) --min-ratio 0.98 \
		--ways byteps-sharded,sharded --json build/bench/sharded.json $(ARGS) || status=1; exit $$status

bench-idle: setup ## CPU time and memory of a job that reduces nothing
	@$(PYTHON_ENV) -W ignore bench/idle/run.py --max-core 0.01 --max-worker-memory 64MiB $(ARGS)

bench-reducer: setup ## the servers' additions, compared with plain loops over the same memory
	@$(PYTHON_ENV) -W ignore bench/reducer/run.py --min-of-limit 0.7 $(ARGS)

FRAMEWORKS := --launches $(or $(LAUNCHES),3) $(if $(MARKDOWN),--markdown $(MARKDOWN))

bench-frameworks: setup ## steps of DDP and HSDP compared with gloo alone, and what a call costs in Python
	@status=0; $(PYTHON_ENV) -W ignore bench/frameworks/run.py $(FRAMEWORKS) --at-least 1.36 \
		--json build/bench/frameworks.json $(ARGS) || status=1; \
	$(PYTHON_ENV) -W ignore bench/frameworks/run.py $(FRAMEWORKS) --at-least 2.4 --wire-dtype bf16 \
		--ways ddp,ddp-backend,ddp-hook --json build/bench/frameworks-bf16.json $(ARGS) || status=1; \
	$(PYTHON_ENV) -W ignore bench/frameworks/calls.py --max-us 60 || status=1; exit $$status

bench-rdma: setup ## RDMA compared with plain writes, one plane with two, in a virtual machine
	@$(PYTHON_ENV) -W ignore bench/rdma/run.py --json build/bench/rdma.json \
		$(if $(MARKDOWN),--markdown $(MARKDOWN)) $(ARGS)

bundle: setup $(if $(filter rl,$(WITH)),setup-rl,$(if $(filter hf,$(WITH)),setup-hf,$(if $(filter ray,$(WITH)),setup-ray))) ## build/bundle: what a machine without network access needs, for benchmarks, or WITH="ray hf rl"
	@scripts/bundle.sh $(if $(WITH),--with "$(WITH)")

lint: setup ## ruff, mypy, shellcheck, clang-format and the patch check
	@scripts/lint.sh

check-patches: setup ## patches apply with no fuzz and export unchanged
	@scripts/apply_patches.sh --check

clean: ## remove build/ (refuses while it holds work that is not exported)
	@scripts/tools.sh clean

distclean: ## clean, and the downloads and built wheels in the cache
	@scripts/tools.sh clean --cache
