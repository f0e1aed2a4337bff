.PHONY: env quickstart test test-unit lint format docs requirements clean

env:  ## create .venv with everything pinned
	bash scripts/setup_env.sh --test

quickstart:  ## train SmolLM2-135M on one-digit addition
	bash scripts/quickstart.sh

test:  ## what CI runs
	bash scripts/test.sh

test-unit:  ## the fast tier only
	bash scripts/test.sh --tier unit

lint:  ## style and types
	.venv/bin/ruff check .
	.venv/bin/mypy

format:
	.venv/bin/ruff check --fix . && .venv/bin/ruff format .

docs:  ## the tables of docs/algorithms.md, moving.md and models.md, from the code and its JSON
	.venv/bin/python scripts/algorithm_tables.py
	.venv/bin/python scripts/release_keys.py
	.venv/bin/python scripts/model_families.py --page

COMPILE = uv pip compile --quiet --universal --python-version 3.10 --no-header --no-annotate
# torch pins its own CUDA libraries exactly; leaving them out keeps the file right for CPU and CUDA builds alike.
requirements:  ## compile the pins (needs uv)
	$(COMPILE) requirements.in | grep -vE '^(nvidia-|cuda-|triton)' | sed '1i # Compiled from requirements.in by "make requirements"; do not edit. Python 3.10 to 3.12.' > requirements.new
	mv requirements.new requirements.txt
	$(COMPILE) requirements-test.in | grep -vE '^(nvidia-|cuda-|triton)' | sed '1i # Compiled from requirements-test.in by "make requirements"; do not edit.' > requirements.new
	mv requirements.new requirements-test.txt

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
