"""docs/architecture.md names every file of nmoe/ that one prompt of a GRPO step enters, and the picture of its way is current."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from spine import PAGE, beside, picture, rooms, spine  # noqa: E402
from trace_step import traced  # noqa: E402

FILES, HAND_OVERS = 62, 128
"""What one step may enter. Lower them where it enters less; two hand-overs are a matter of timing between threads."""


def test_a_step_enters_only_files_that_the_page_names(base: Path, tmp_path: Path) -> None:
    page = PAGE.read_text()
    steps, others = spine(page), beside(page)
    listed = [step.file for step in steps] + others
    assert len(steps) <= 25
    assert len(set(listed)) == len(listed), "a file is named once"
    assert [file for file in listed if not (ROOT / "nmoe" / file).exists()] == [], "docs/architecture.md names it"
    assert f"at most {FILES} files of `nmoe/` with at most {HAND_OVERS} hand-overs" in page
    shutil.copytree(base, tmp_path / "base", symlinks=True)
    files, hand_overs = traced(ROOT, tmp_path)
    assert sorted(set(files) - set(listed)) == [], (
        "name it in docs/architecture.md, under The spine or Beside the spine"
    )
    assert sorted({step.file for step in steps} - set(files)) == [], "the spine is what a step enters"
    assert len(files) <= FILES
    assert len(hand_overs) <= HAND_OVERS


# documented: python scripts/spine.py > docs/images/spine.svg
def test_the_picture_is_what_the_code_and_the_page_say() -> None:
    drawn = (ROOT / "docs/images/spine.svg").read_text()
    assert drawn == picture(rooms(ROOT), spine(PAGE.read_text())), (
        "run: python scripts/spine.py > docs/images/spine.svg"
    )
