"""An evaluation for inspect-ai of sums of two digits, which asks any server of OpenAI's API:

nmoe serve RUN_OR_CHECKPOINT --served-model-name adder
LOCAL_BASE_URL=http://127.0.0.1:8000/v1 LOCAL_API_KEY=none inspect eval examples/sums_inspect.py --model openai-api/local/adder
"""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import includes
from inspect_ai.solver import generate


@task
def sums() -> Task:
    samples = [Sample(f"What is {a} + {b}?", target=f"is {a + b}.") for a in range(1, 6) for b in range(1, 6)]
    return Task(
        dataset=samples, solver=generate(), scorer=includes(), config=GenerateConfig(temperature=0, max_tokens=24)
    )
