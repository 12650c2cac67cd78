# What one does with this repository. `make run` and `make test` need nothing but Rust and a C compiler.

CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/hostler
ARGS ?=
SECONDS ?= 600
ROUNDS ?= 20
PROFILE ?= release
SEEDS ?= $(if $(SEED),1,500)

.PHONY: run check changed test stress build dist dist-test lint docs program contract jobs smoke e2e netns slurm hardening chaos fuzz bench bench-compare fairness simulate-gates simulation guard scale ci nightly

## Start a router, an agent and two simulated engines on this machine; ARGS adds flags: make run ARGS="--model PATH"
run:
	@cargo run --quiet --package hostler -- up $(ARGS)

## Ring 1, in three minutes after a change of one line: formatting, lints, and every test that needs no process, socket or wall clock.
check:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	cargo nextest run --profile check --workspace --lib --test structure --locked $(ARGS)

## The tests of the crates that differ from BASE and of those that depend on them, then a smoke test of the whole system.
changed:
	@cargo nextest run --locked $(ARGS) -E "$$(tests/changed.sh $(BASE))"

## Ring 2: unit, property and whole-system tests.
test:
	@if cargo nextest --version >/dev/null 2>&1; then cargo nextest run --workspace --locked $(ARGS); \
	else cargo test --workspace --locked $(ARGS); fi

## Runs TEST (part of a name, or nothing for all) ROUNDS times beside a busy loop for each core; ends with what failed.
stress:
	tests/stress.sh "$(TEST)" $(ROUNDS)

## The program as it is installed: target/release/hostler.
build:
	cargo build --release --locked --package hostler

## What users install, in target/dist: a wheel and a tarball, for x86-64 Linux with glibc 2.17 or newer. PROFILE=gates builds faster.
dist:
	dist/build.sh $(PROFILE)

## Those two installed, on this host and in a Debian 11, and a request served by each. The latter needs root and debootstrap.
dist-test:
	tests/dist/run.sh

## Formatting, lints and spelling.
lint:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	@if command -v typos >/dev/null; then typos; else echo "typos is not installed: spelling is not checked"; fi

## The generated parts of the manual, and the dashboards; a test fails when they are old.
docs:
	cargo run --quiet --package hostler -- docs config > docs/config.md
	cargo run --quiet --package hostler -- docs metrics > docs/metrics.md
	cargo run --quiet --package hostler -- docs example > deploy/config/full.toml
	cargo run --quiet --package hostler -- docs schema > deploy/config/hostler.schema.json
	python3 deploy/observability/dashboards.py

## The debug program, and the same for tests, which the suites below run; they run another one, and build none, where HOSTLER_BIN names it.
ifdef HOSTLER_BIN
export HOSTLER_BIN := $(abspath $(HOSTLER_BIN))
program: ;
else
contract jobs smoke e2e netns slurm hardening chaos: export HOSTLER_BIN := $(CURDIR)/target/debug/hostler
program:
	cargo build --quiet --locked --package hostler --package hostler-tests --bins
endif

## SDKs and libraries for Python and Node, unmodified, against simulated engines; and three tests of batch jobs.
contract: program
	tests/python/venv.sh
	cd tests/python && $(CACHE)/sdk-venv/bin/python -m pytest -n 2 --dist loadfile -m "not vllm and not slurm and (smoke or not jobs)" $(ARGS)
	cd tests/node && npm ci --silent --no-audit --no-fund && node --test

## Agents and controllers in jobs of a stand-in for PBS; about 4 minutes, most of them waiting.
jobs: program
	tests/python/venv.sh
	cd tests/python && $(CACHE)/sdk-venv/bin/python -m pytest -n 3 -m "jobs and not vllm and not slurm" $(ARGS)

## What simulated engines cannot show, through real vLLM on CPU (2.3 GB, installed into the cache once).
e2e: program
	tests/python/venv.sh
	tests/engine/install.sh
	cd tests/python && $(CACHE)/sdk-venv/bin/python -m pytest -m vllm -s $(ARGS)

## Of these the few that show that real engines start, stream, die and are placed on by what they have cached.
smoke: program
	tests/python/venv.sh
	tests/engine/install.sh
	cd tests/python && $(CACHE)/sdk-venv/bin/python -m pytest -m "smoke and vllm" $(ARGS)

## Agent and router in two network namespaces, the agent without a listening port. Needs root and iproute2.
netns: program
	tests/netns/run.sh

## Agents in jobs of real Slurm. Needs root and Debian's slurmctld, slurmd, slurm-client and munge.
slurm: program
	tests/slurm/run.sh $(ARGS)

## A running service attacked over HTTP/1.1 and HTTP/2, one table; about 5 minutes, or 40 s with ARGS=--quick. Options: ARGS=--help.
hardening: program
	python3 tests/hardening/run.py --schemathesis "$$(tests/hardening/venv.sh)" $(ARGS)

## Routers, agents and engines killed, stopped and drained at random under a load whose every answer is known; 4 minutes, or 1 with ARGS=--quick.
## The seed is printed; ARGS="--seed N" does the same again. Options: ARGS=--help.
chaos: program
	@cargo run --quiet --locked --package hostler-chaos -- $(ARGS)

## libFuzzer over what reads untrusted bytes, SECONDS for each target (or for those in TARGETS), with the stable compiler.
fuzz:
	SECONDS_EACH=$(SECONDS) fuzz/run $(TARGETS)

## CPU per request and per streamed event, beside nginx; see tests/bench/README.md.
bench: build
	python3 tests/bench/run.py --quick $(ARGS)

## The same and more, beside every peer that can be installed; writes docs/performance.md. About 25 minutes.
bench-compare: build
	python3 tests/bench/run.py --markdown docs/performance.md $(ARGS)

## What a tenant notices of another one that floods the fleet, and what the fleet does at ten times its load; exits 1 when a bar is missed.
fairness: build
	python3 tests/bench/fairness.py $(ARGS)

## The placement's cost beside other routers' policies, in the simulator; exits 1 when it is worse. About a minute.
simulate-gates:
	@cargo run --quiet --locked --profile gates --package hostler-simulate --bin simulate-gates

## The fleet under faults, simulated: SEEDS runs from SEED on, each checked; one that fails is printed. 500 take about two minutes.
simulation:
	@HOSTLER_SIMULATION_FIRST_SEED=$(or $(SEED),0) HOSTLER_SIMULATION_SEEDS=$(SEEDS) \
		cargo test --workspace --quiet --locked --lib simulation:: -- --nocapture

## Instructions and system calls per request and per event against their budget, counted by valgrind; ARGS=--accept takes new figures. 3 minutes.
guard:
	@cargo run --quiet --locked --profile gates --package hostler-guard --features valgrind -- $(ARGS)

## What a fleet of up to 1,000 replicas costs a router, and a restart of it, one table; see tests/scale/README.md. About 2 minutes.
scale: build
	@cargo run --quiet --locked --profile gates --package hostler-scale -- $(ARGS)

## What must pass before a change lands: 15 minutes when the caches are warm.
ci:
	.ci/run

## What takes longer, for machines that have the time: 45 minutes.
nightly:
	.ci/full
