# packages: lm-eval[api]
import json
from pathlib import Path

from _features import DIRECTORY, MODEL, URL, feature
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

rows = [
    {"question": f"{a} and {b} is", "choices": [f" {a + b}", f" {a - b}", " no number"]}
    for a in (1, 2, 3)
    for b in (4, 5)
]
Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}}, "test_split": "test"}
tasks = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
    },
    "text": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "x",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12},
    },
}
Path("tasks").mkdir()
for name, task in tasks.items():
    Path(f"tasks/{name}.yaml").write_text(json.dumps({"task": name, **common, **task}))
manager = TaskManager(include_path="tasks", include_defaults=False)


def samples(task, model, arguments):
    result = simple_evaluate(
        model=model, model_args=arguments, tasks=[task], task_manager=manager, log_samples=True, batch_size=1
    )
    return [sample["resps"] for sample in sorted(result["samples"][task], key=lambda sample: sample["doc_id"])]


served = {
    "model": MODEL,
    "base_url": f"{URL}/completions",
    "tokenizer": DIRECTORY,
    "num_concurrent": 4,
    "max_length": 512,
    "tokenizer_backend": "huggingface",
}
local = {"pretrained": DIRECTORY, "dtype": "float32", "max_length": 512, "device": "cpu"}
with feature("loglikelihood equal to hf to 1e-3"):
    expected = samples("choice", "hf", local)
    actual = samples("choice", "local-completions", served)
    pairs = [
        (float(a[0][0]), float(b[0][0]))
        for x, y in zip(actual, expected, strict=True)
        for a, b in zip(x, y, strict=True)
    ]
    worst = max(abs(a - b) for a, b in pairs)
    assert worst < 1e-3, (worst, pairs[:3])
with feature("greedy text equal to hf"):
    assert samples("text", "local-completions", served) == samples("text", "hf", local)
