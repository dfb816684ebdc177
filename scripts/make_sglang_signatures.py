"""Write tests/unit/rollout/engines/sglang_signatures.json from a published SGLang wheel, without importing it.

    pip download --no-deps sglang==0.5.23
    python scripts/make_sglang_signatures.py sglang-0.5.23-*.whl

Only names are kept: of the parameters of `Engine`'s and the tokenizer manager's methods, of the fields of the records
that are sent, of the fields of `ServerArgs`, and of the HTTP routes with their verbs.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

OUT = Path(__file__).parents[1] / "tests" / "unit" / "rollout" / "engines" / "sglang_signatures.json"
SRT = "sglang/srt"
ENGINE_METHODS = ("__init__", "async_generate", "get_all_child_pids", "shutdown")
MANAGER_METHODS = (
    *("abort_request", "begin_weight_update", "continue_generation", "end_weight_update", "flush_cache"),
    *("pause_generation", "release_memory_occupation", "resume_memory_occupation"),
    *("update_weights_from_disk", "update_weights_from_tensor"),
)
RECORDS = (
    *("AbortReq", "BeginWeightUpdateReqInput", "ContinueGenerationReqInput", "EndWeightUpdateReqInput"),
    *("PauseGenerationReqInput", "ReleaseMemoryOccupationReqInput", "ResumeMemoryOccupationReqInput"),
    *("UpdateWeightFromDiskReqInput", "UpdateWeightsFromTensorReqInput", "GenerateReqInput"),
)
VERBS = {"get", "post", "put", "delete"}


class Wheel:
    """Parsed files of a wheel."""

    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path)
        self.version = path.name.split("-")[1]
        self.names = self._zip.namelist()

    def tree(self, name: str) -> ast.Module:
        return ast.parse(self._zip.read(name))

    def classes(self, name: str) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in self.tree(name).body if isinstance(node, ast.ClassDef)}

    def under(self, folder: str) -> Iterator[str]:
        return (name for name in self.names if name.startswith(folder) and name.endswith(".py"))


def fields(node: ast.ClassDef) -> list[str]:
    """Annotated names in a class's body."""
    targets = [line.target for line in node.body if isinstance(line, ast.AnnAssign)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def methods(*nodes: ast.ClassDef) -> dict[str, list[str]]:
    """Names of the parameters of each method, `self` left out."""
    found = [line for node in nodes for line in node.body if isinstance(line, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {line.name: parameters(line) for line in found}


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = node.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs) if each.arg != "self"]
    return names + ([f"**{given.kwarg.arg}"] if given.kwarg else [])


def functions(tree: ast.Module) -> dict[str, list[str]]:
    return {
        line.name: parameters(line) for line in tree.body if isinstance(line, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def routes(tree: ast.Module) -> dict[str, list[str]]:
    """Verbs of each route that a function is decorated with."""
    found: dict[str, list[str]] = {}
    for node in tree.body:
        for decorator in getattr(node, "decorator_list", ()):
            if not isinstance(decorator, ast.Call) or not ast.unparse(decorator.func).startswith("app."):
                continue
            kind = ast.unparse(decorator.func).removeprefix("app.")
            if decorator.args and isinstance(decorator.args[0], ast.Constant):
                given = {word.arg: word.value for word in decorator.keywords}
                verbs = ast.literal_eval(given["methods"]) if "methods" in given else [kind.upper()]
                found.setdefault(str(decorator.args[0].value), []).extend(verbs)
    return {path: sorted(verbs) for path, verbs in sorted(found.items())}


def inspect(wheel: Wheel) -> dict[str, object]:
    """What the test needs to know."""
    manager = wheel.classes(f"{SRT}/managers/tokenizer_manager.py")["TokenizerManager"]
    control = wheel.classes(f"{SRT}/managers/tokenizer_control_mixin.py")["TokenizerControlMixin"]
    structs = wheel.classes(f"{SRT}/managers/io_struct.py")
    base = fields(structs["BaseReq"])
    server_args = wheel.classes(f"{SRT}/server_args.py")["ServerArgs"]
    parts = [node for name in wheel.under(f"{SRT}/arg_groups/fields/") for node in wheel.classes(name).values()]
    contract = wheel.classes("sglang/api/v1/api_types.py")
    every = methods(manager, control)
    engine = methods(wheel.classes(f"{SRT}/entrypoints/engine.py")["Engine"])
    common = wheel.classes(f"{SRT}/utils/common.py")["MultiprocessingSerializer"]
    return {
        "version": wheel.version,
        "engine": {name: engine[name] for name in ENGINE_METHODS},
        "tokenizer_manager": {name: every[name] for name in MANAGER_METHODS},
        "records": {
            name: sorted({*fields(structs[name]), *(() if name == "GenerateReqInput" else base)}) for name in RECORDS
        },
        "sampling_params": fields(wheel.classes(f"{SRT}/sampling/sampling_params.py")["SamplingParams"]),
        "generate_json": fields(contract["GenerateRequest"]),
        "sampling_json": fields(contract["SamplingParams"]),
        "meta_info_json": fields(contract["GenerateMetaInfo"]),
        "server_args": sorted(fields(server_args) + [field for node in parts for field in fields(node)]),
        "routes": routes(wheel.tree(f"{SRT}/entrypoints/http_server.py")),
        "launch_server": functions(wheel.tree(f"{SRT}/entrypoints/http_server.py"))["launch_server"],
        "tensor_bucket": methods(wheel.classes(f"{SRT}/weight_sync/tensor_bucket.py")["FlattenedTensorBucket"]),
        "serializer": methods(common),
    }


def main() -> None:
    told = inspect(Wheel(Path(sys.argv[1])))
    OUT.write_text(json.dumps(told, indent=1) + "\n")
    print(f"{OUT}: SGLang {told['version']}")


if __name__ == "__main__":
    main()
