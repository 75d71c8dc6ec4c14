"""Writes the problems of an environment as records for trainers that read JSON lines, OpenRLHF and SkyRL among them."""

from __future__ import annotations

import json
from pathlib import Path

from nmoe.adapters.environment import SharedEnvironment, Split
from nmoe.errors import StorageError
from nmoe.runs.storage import write_atomically


def write_records(environment: str, out: Path, count: int | None, split: Split) -> int:
    """Writes the first `count` problems of a split, by default all, and returns how many there are.

        {"prompt": [{"role": "user", "content": "..."}], "label": "train/0/1f0c22d9",
         "data_source": "sort", "env_class": "nmoe", "environment": "sort",
         "reward_spec": {"method": "rule", "ground_truth": "train/0/1f0c22d9"}}

    Tools are declared in a system message. An environment with a file is named by its full path. Raises UserError as
    `SharedEnvironment.rows` does.
    """
    path = Path(environment)
    named = str(path.resolve()) if path.exists() else environment
    with SharedEnvironment(environment) as shared:
        lines = [
            {
                "prompt": shared.with_tools(row["prompt"]),
                "label": row["label"],
                "data_source": shared.name,
                "env_class": "nmoe",
                "environment": named,
                "reward_spec": {"method": "rule", "ground_truth": row["label"]},
            }
            for row in shared.rows(count, split=split)
        ]
    try:
        write_atomically(out, "".join(json.dumps(line) + "\n" for line in lines).encode())
    except OSError as error:
        raise StorageError(f"cannot write {out}: {error}") from error
    return len(lines)
