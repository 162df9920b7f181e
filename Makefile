# `make demo` and `make test` need nothing but Python 3.11 or newer and make: what they use is installed into .venv here.
# What each target does: make help

PYTHON ?=
PY := .venv/bin/python
BENCHES := admission article balance calibration control control_live control_vllm core estimate ledger proxy restart retries sim tuning
# What these point to is another project's, and would shadow what is installed here.
unexport PYTHONPATH PYTHONHOME

.DEFAULT_GOAL := help
.PHONY: help demo test test-peers check fmt bench soak docs venv clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

demo: .venv/runtime.stamp ## a real model on this machine, past its capacity, three ways: about two minutes
	@$(PY) -m forebay demo $(ARGS)

test: .venv/test.stamp ## every test that needs no heavy peer (ARGS="-k quota" picks some)
	@$(PY) -m pytest -m "not peers and not soak" $(ARGS)

test-peers: .venv/test.stamp ## tests beside real peers (vLLM, Envoy …); they install their peers, which is large
	@$(PY) -m pytest -m "peers and not soak" --timeout=900 $(ARGS)

check: .venv/dev.stamp ## lint, format, types, import contracts, documentation in step with the code
	@$(PY) -m ruff check
	@$(PY) -m ruff format --check
	@$(PY) -m mypy
	@.venv/bin/lint-imports --no-logo
	@$(PY) -m pytest tests/architecture/test_docs.py tests/unit/config/test_render.py tests/unit/telemetry/test_metrics.py

fmt: .venv/dev.stamp ## format, and fix what can be fixed
	@$(PY) -m ruff check --fix-only
	@$(PY) -m ruff format

bench: .venv/runtime.stamp ## NAME=… measures one thing and writes it into docs (make bench lists the names; docs/benchmarks.md says what each does)
	@case " $(BENCHES) " in *" $(NAME) "*) ;; *) echo "make bench NAME=…, one of: $(BENCHES)" >&2; exit 2 ;; esac
	@if [ "$(NAME)" = estimate ]; then $(MAKE) --no-print-directory .venv/bench.stamp; fi
	@$(PY) -m benchmarks.$(NAME) $(ARGS)

soak: .venv/test.stamp ## the long tests
	@$(PY) -m pytest -m soak --timeout=3600 $(ARGS)

docs: .venv/runtime.stamp ## write the generated parts of the documentation anew
	@$(PY) -m forebay.config.render --docs
	@if [ -f out/demo.json ]; then $(PY) scripts/readme_table.py out/demo.json; fi

venv: .venv/dev.stamp ## only the set-up

clean: ## remove what make made, the virtual environments included
	rm -rf .venv .venv-peers-* out dist build .mypy_cache .ruff_cache .hypothesis .import_linter_cache

.venv/runtime.stamp: pyproject.toml scripts/setup
	@PYTHON="$(PYTHON)" sh scripts/setup runtime

.venv/test.stamp .venv/bench.stamp .venv/dev.stamp: .venv/%.stamp: .venv/runtime.stamp scripts/requirements.py
	@sh scripts/setup $*
