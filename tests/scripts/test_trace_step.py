"""What scripts/trace_step.py sees of a step: a stand-in package whose loop skips once and then publishes."""

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from trace_step import Tracer, report

FILES = {
    "rl/train.py": "def _step(rest, publishes):\n    rest['sample']()\n    if publishes:\n        rest['publish']()\n"
    "    rest['save']()",
    "pool.py": "def sample():\n    return [draw() for _ in range(2)]\ndef draw():\n    return 1",
    "learner/learner.py": "def publish():\n    receive()\ndef receive():\n    pass",
    "save.py": "def save():\n    pass",
    "setup.py": "def setup():\n    pass",
}


def test_the_first_step_that_publishes_is_seen_up_to_its_publish(tmp_path: Path) -> None:
    functions: dict[str, Callable[..., None]] = {}
    for name, source in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(source)
        exec(compile(source, str(file), "exec"), functions)
    tracer = Tracer(tmp_path)
    sys.setprofile(tracer)
    try:
        functions["setup"]()
        functions["_step"](functions, False)
        assert not tracer.done
        functions["_step"](functions, True)
        functions["setup"]()
    finally:
        sys.setprofile(None)
    assert tracer.done
    assert list(tracer.files) == ["rl/train.py", "pool.py", "learner/learner.py"]
    assert tracer.hand_overs == {
        ("rl/train.py", "pool.py"): "sample",
        ("rl/train.py", "learner/learner.py"): "publish",
    }
    assert next(report(["rl/a.py", "rl/b.py", "c.py"], [])) == (
        "3 files of nmoe/ run for one prompt of a GRPO step: 2 in rl, 1 in c.py"
    )
