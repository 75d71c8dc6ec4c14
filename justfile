# Shortcuts; `just` lists them. Each is one documented command.

_list:
    @just --list --unsorted

# style, types and tests; arguments go to pytest
test *arguments:
    ./test.sh {{ arguments }}

# style and formatting, fixed in place
fix:
    .venv/bin/ruff check --fix .
    .venv/bin/ruff format .

# from nothing to a trained small model; arguments go to `nmoe speedrun`
speedrun *arguments:
    ./speedrun.sh {{ arguments }}

# what continuous integration runs
ci:
    .ci/run

# the longer proofs, or one part of them
long part="":
    .ci/long {{ part }}

# the documentation, served at localhost:8000
docs:
    .venv/bin/pip install --quiet -c constraints.txt -e ".[docs]"
    .venv/bin/mkdocs serve

# the pages that are generated from the code, and the README's table of seeds
reference:
    .venv/bin/python scripts/reference_pages.py
    .venv/bin/python scripts/seeds_table.py --write
