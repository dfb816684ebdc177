"""A stand-in for SGLang: its protocol, as 0.5.23 publishes it, over a tiny model that really decodes.

It keeps to what SGLang does where that matters: log-probs are those of the whole vocabulary under the temperature with
penalties and grammars in them, the repetition penalty sees the answer only, an end of the model's own ends an answer
unless `ignore_eos`, requests are dropped by the beginning of their name, and weights under names that it doesn't know
are passed over. Names of arguments, records and fields that SGLang doesn't have are refused.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import multiprocessing
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer

from quintet.policies.model_loading import load_tokenizer
from quintet.rollout.engines.grammars import GrammarCompiler, allowed_tokens
from quintet.sampling import StructuredOutput

HERE = Path(__file__).parent
PUBLISHED = json.loads((HERE / "sglang_signatures.json").read_text())
SECRETS = ("api_key", "admin_api_key")


class No(ValueError):
    """A request that SGLang rejects."""


@dataclass
class GenerateRequest:
    """A running request."""

    rid: str
    prompt: list[int]
    sampling: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    rows: list[list[Any]] = field(default_factory=list)
    events: list[tuple[str, int]] = field(default_factory=list)
    dropped: bool = False
    vision: dict[str, Any] = field(default_factory=dict)
    """Arguments of the model for the images of the prompt."""


class Brain:
    """The model and the scheduler's state."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        if unknown := arguments.keys() - set(PUBLISHED["server_args"]):
            raise TypeError(f"ServerArgs has no {sorted(unknown)}")
        from transformers import AutoConfig
        from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLForConditionalGeneration

        self.arguments = dict(arguments)
        config = AutoConfig.from_pretrained(arguments["model_path"])
        self.reads_images = hasattr(config, "vision_config")
        kind = Qwen2_5_VLForConditionalGeneration if self.reads_images else Qwen2ForCausalLM
        self.model = kind.from_pretrained(arguments["model_path"], dtype=torch.float32).eval()
        self.vocab_size = config.get_text_config().vocab_size
        self.tokenizer = Tokenizer.from_file(str(Path(arguments["model_path"], "tokenizer.json")))
        self.grammars = GrammarCompiler(load_tokenizer(Path(arguments["model_path"])), self.vocab_size)
        self.length = int(arguments["context_length"])
        self.version = str(arguments.get("weight_version", "default"))
        self.turn = threading.Condition()
        self.running: dict[str, GenerateRequest] = {}
        self.paused = False
        self.asleep: list[str] = []
        self.session = False
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.seconds = 0.0
        self.spans = True

    @property
    def texts(self) -> bool:
        return not self.arguments.get("skip_tokenizer_init", False)

    @property
    def end_token(self) -> int:
        return self.model.config.get_text_config().eos_token_id

    def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if unknown := set(body) - set(PUBLISHED["generate_json"]):
            raise No(f"unknown {sorted(unknown)}")
        if unknown := set(body["sampling_params"]) - set(PUBLISHED["sampling_json"]):
            raise No(f"unknown {sorted(unknown)}")
        prompt, vision = self._expanded(body)
        asked = GenerateRequest(body["rid"], prompt, self._checked({**body, "input_ids": prompt}), vision=vision)
        if "logprob_start_len" in body:
            return self._scored(asked, body["logprob_start_len"])
        with self.turn:
            if asked.rid in self.running:
                raise No("duplicate request id")
            self.running[asked.rid] = asked
        try:
            finish = None
            while finish is None:
                with self.turn:
                    self.turn.wait_for(lambda: not self.paused or asked.dropped)
                    finish = {"type": "abort", "message": "Aborted"} if asked.dropped else self._step(asked)
                time.sleep(self.seconds)
        finally:
            with self.turn:
                del self.running[asked.rid]
        return self._response(asked, finish)

    def _checked(self, body: Mapping[str, Any]) -> dict[str, Any]:
        sampling_params, prompt = dict(body["sampling_params"]), len(body["input_ids"])
        if sampling_params.get("temperature", 1.0) < 1e-6:
            sampling_params |= {"temperature": 1.0, "top_k": 1}
        if not 0 <= sampling_params.get("min_new_tokens", 0) <= sampling_params["max_new_tokens"]:
            raise No("min_new_tokens must be in [0, max_new_tokens]")
        constrained = sampling_params.get("json_schema") or sampling_params.get("regex")
        if (sampling_params.get("stop") or sampling_params.get("min_new_tokens") or constrained) and not self.texts:
            raise No("unavailable when skip_tokenizer_init=True")
        if prompt >= self.length - 6:
            raise No(f"The input ({prompt} tokens) is longer than the model's context length")
        if prompt + sampling_params["max_new_tokens"] > self.length:
            raise No("Requested token count exceeds the model's maximum context length")
        if any(not 0 <= token < self.vocab_size for token in body["input_ids"]):
            raise No("token id out of the vocabulary")
        sampling_params["max_new_tokens"] = min(sampling_params["max_new_tokens"], self.length - 1 - prompt - 1)
        return sampling_params

    def _expanded(self, body: Mapping[str, Any]) -> tuple[list[int], dict[str, Any]]:
        """The prompt with a placeholder per token of its images, as SGLang expands it, and the images."""
        tokens = list(body["input_ids"])
        if not body.get("image_data"):
            return tokens, {}
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        processor = Qwen2VLImageProcessorPil.from_pretrained(self.arguments["model_path"])
        files = [base64.b64decode(url.removeprefix("data:image/png;base64,")) for url in body["image_data"]]
        vision = dict(processor([Image.open(io.BytesIO(file)) for file in files], return_tensors="pt"))
        sizes = [int(grid.prod()) // processor.merge_size**2 for grid in vision["image_grid_thw"]]
        placeholder = self.model.config.image_token_id
        if tokens.count(placeholder) != len(sizes):
            raise No("prompt has another number of image placeholder token(s)")
        remaining = iter(sizes)
        return [each for token in tokens for each in [token] * (next(remaining) if token == placeholder else 1)], vision

    @torch.no_grad()
    def _logits(self, asked: GenerateRequest) -> torch.Tensor:
        ids = torch.tensor([asked.prompt + asked.tokens])
        if not self.reads_images:
            return self.model(ids).logits[0]
        kinds = (ids == self.model.config.image_token_id).int()
        return self.model(ids, mm_token_type_ids=kinds, use_cache=False, **asked.vision).logits[0]

    def _step(self, asked: GenerateRequest) -> dict[str, Any] | None:
        """Generate one token; return the finish reason, if any."""
        sampling_params = asked.sampling
        if len(asked.tokens) >= sampling_params["max_new_tokens"]:
            return {"type": "length", "length": sampling_params["max_new_tokens"]}
        logits = self._logits(asked)[-1].clone()
        if logits.isnan().any():
            asked.tokens.append(0)
            asked.rows.append([None, 0, None])
            return {"type": "stop", "matched": "NaN happened"}
        seen = torch.tensor(sorted(set(asked.tokens)), dtype=torch.long)
        penalty = sampling_params.get("repetition_penalty", 1.0)
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        ends = {self.end_token, *sampling_params.get("stop_token_ids", ())}
        if len(asked.tokens) < sampling_params.get("min_new_tokens", 0):
            logits[sorted(ends)] = -torch.inf
        if sampling_params.get("json_schema") or sampling_params.get("regex"):
            logits[~self._allowed(asked)] = -torch.inf
        logprobs = (logits / sampling_params["temperature"]).log_softmax(-1)
        token = self._drawn(logprobs, sampling_params, len(asked.prompt) + len(asked.tokens))
        asked.tokens.append(token)
        asked.rows.append([logprobs[token].item(), token, None])
        if token in ends and not sampling_params.get("ignore_eos"):
            return {"type": "stop", "matched": token}
        text = self.tokenizer.decode(asked.tokens, skip_special_tokens=False) if sampling_params.get("stop") else ""
        return next(({"type": "stop", "matched": one} for one in sampling_params.get("stop", ()) if one in text), None)

    def _allowed(self, asked: GenerateRequest) -> torch.Tensor:
        """The tokens that the grammar allows next; only the model's own end ends it."""
        sampling_params = asked.sampling
        kind, spec = (
            ("regex", sampling_params["regex"])
            if "regex" in sampling_params
            else ("json_schema", sampling_params["json_schema"])
        )
        matcher = self.grammars.matcher(StructuredOutput(kind, spec), (self.end_token,))
        for token in asked.tokens:
            matcher.accept_token(token)
        return torch.from_numpy(allowed_tokens([matcher], self.vocab_size)[0])

    def _drawn(self, logprobs: torch.Tensor, text: Mapping[str, Any], place: int) -> int:
        """Random numbers from seed and position with deterministic inference."""
        values, order = logprobs.exp().sort(descending=True)
        keep = (values.cumsum(0) - values) <= text.get("top_p", 1.0)
        keep &= values >= values[0] * text.get("min_p", 0.0)
        if text.get("top_k", -1) > 0:
            keep &= torch.arange(len(values)) < text["top_k"]
        seeded = self.arguments.get("enable_deterministic_inference", False)
        source = torch.Generator().manual_seed(text["sampling_seed"] * 7919 + place) if seeded else None
        return int(order[torch.multinomial(values * keep, 1, generator=source)])

    def _scored(self, asked: GenerateRequest, start: int) -> dict[str, Any]:
        rows = self._logits(asked).log_softmax(-1)
        sampling_params = [rows[place - 1, token].item() for place, token in enumerate(asked.prompt) if place > start]
        results = [
            [value, token, None] for value, token in zip([None, *sampling_params], asked.prompt[start:], strict=True)
        ]
        meta = {"finish_reason": {"type": "length", "length": 0}, "input_token_logprobs": results}
        return {"output_ids": [], "meta_info": meta | {"output_token_logprobs": []}}

    def _response(self, asked: GenerateRequest, finish: dict[str, Any]) -> dict[str, Any]:
        meta = {"id": asked.rid, "finish_reason": finish, "output_token_logprobs": asked.rows}
        meta |= {"weight_version": self.version, "prompt_tokens": len(asked.prompt)}
        if self.spans:
            meta["weight_versions"] = self._spans(asked)
        return {"text": "", "output_ids": asked.tokens, "meta_info": meta}

    def _spans(self, asked: GenerateRequest) -> list[dict[str, Any]]:
        results, start = [], 0
        for version, end in [*asked.events, (self.version, len(asked.tokens))]:
            if end > start:
                results.append({"version": version, "start": start, "end": end})
                start = end
        return results

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        with self.turn:
            for asked in self.running.values():
                asked.dropped |= abort_all or asked.rid.startswith(rid)
            self.turn.notify_all()

    def pause_generation(self, mode: str) -> None:
        assert mode in ("abort", "retract", "in_place")
        with self.turn:
            self.paused = True

    def continue_generation(self) -> None:
        with self.turn:
            self.paused = False
            self.turn.notify_all()

    def flush_cache(self) -> None:
        with self.turn:
            if self.running and not self.paused:
                raise No("Flush cache failed.")

    def release_memory_occupation(self, tags: list[str]) -> None:
        if not self.arguments.get("enable_memory_saver"):
            raise No("no memory saver")
        self.asleep = [*self.asleep, *tags]

    def resume_memory_occupation(self, tags: list[str]) -> None:
        for tag in tags:
            self.asleep.remove(tag)

    def begin_weight_update(self) -> None:
        self.session = True

    def end_weight_update(self) -> None:
        self.session = False

    def update_weights_from_disk(
        self, model_path: str, load_format: str, weight_version: str, flush_cache: bool
    ) -> None:
        files = sorted(Path(model_path).glob("*.safetensors"))
        if not files or load_format not in ("auto", "safetensors"):
            raise No("Failed to get weights iterator")
        self.take({name: tensor for file in files for name, tensor in load_file(file).items()}, weight_version)
        if flush_cache:
            self.flush_cache()

    def take(self, weights: Mapping[str, torch.Tensor], version: str) -> None:
        """Copy weights; running requests must have been retracted."""
        with self.turn:
            # names of the published files of Qwen2.5-VL
            files = {"model.language_model.": "model.", "model.visual.": "visual."}
            own = {}
            for name, parameter in self.model.named_parameters():
                prefix = next((prefix for prefix in files if name.startswith(prefix)), "")
                own[files.get(prefix, "") + name.removeprefix(prefix)] = parameter
            for name, tensor in weights.items():
                if name in own:
                    own[name].data.copy_(tensor)
            for asked in self.running.values():
                if asked.tokens and version != self.version:
                    asked.events.append((self.version, len(asked.tokens)))
            self.version = version


class Handler(BaseHTTPRequestHandler):
    """The routes."""

    brain: Brain

    def log_message(self, *_: object) -> None:
        return

    def do_GET(self) -> None:
        self._route("GET")

    def do_POST(self) -> None:
        self._route("POST")

    def _route(self, verb: str) -> None:
        path = self.path.partition("?")[0]
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size)) if size else {}
        if verb not in PUBLISHED["routes"].get(path, ()):
            self._send_json(404, {"error": {"message": f"no {verb} {path}"}})
        elif not self._allowed(path):
            self._send_json(401, {"error": "Unauthorized"})
        else:
            try:
                self._send_json(200, self._answer(path.removeprefix("/"), body))
            except No as error:
                self._send_json(400, {"error": {"message": str(error)}})

    def _allowed(self, path: str) -> bool:
        key, admin = (self.brain.arguments.get(name) for name in SECRETS)
        expected = (admin or key) if path not in ("/generate", "/model_info", "/server_info") else key
        return path == "/health" or not expected or self.headers.get("Authorization") == f"Bearer {expected}"

    def _answer(self, name: str, body: dict[str, Any]) -> Any:
        brain = self.brain
        if name in ("health", "model_info"):
            return {"model_path": brain.arguments["model_path"], "weight_version": brain.version}
        if name == "server_info":
            whole = dict.fromkeys(PUBLISHED["server_args"]) | brain.arguments
            return whole | {"max_req_input_len": brain.length - 6, "version": PUBLISHED["version"]}
        brain.calls.append((name, body))
        if name == "generate":
            return brain.generate(body)
        getattr(brain, name)(**body)
        return {"success": True, "message": "Success"}

    def _send_json(self, status: int, told: Any) -> None:
        text = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


class Server:
    """The HTTP server, in a thread of the test."""

    def __init__(self, **arguments: Any) -> None:
        self.brain = Brain(arguments)
        handler = type("Here", (Handler,), {"brain": self.brain})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


def launch_server(value: SimpleNamespace) -> None:
    """As SGLang's: serves until the process ends."""
    handler = type("Here", (Handler,), {"brain": Brain(vars(value))})
    ThreadingHTTPServer((value.host, value.port), handler).serve_forever()


class Manager:
    """The tokenizer manager's part of `Engine`; weights come by `Serializer`."""

    def __init__(self, brain: Brain) -> None:
        self.brain = brain

    def __getattr__(self, name: str) -> Any:
        if name not in PUBLISHED["tokenizer_manager"]:
            raise AttributeError(name)

        async def call(record: Any = None) -> Any:
            fields = vars(record) if record is not None else {}
            self.brain.calls.append((name, fields))
            try:
                getattr(self.brain, name)(**fields)
            except No as error:
                return False, str(error)
            return True, "Success"

        return call

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        self.brain.abort_request(rid, abort_all)

    async def update_weights_from_tensor(self, record: Any) -> tuple[bool, str]:
        self.brain.calls.append(("update_weights_from_tensor", {}))
        if not self.brain.session:
            return False, "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
        if record.load_format != "flattened_bucket":
            return False, "unknown format"
        payload = Serializer.kept[record.serialized_named_tensors[0]]
        weights = {
            name: payload["flattened_tensor"][a:b].view(dtype).view(shape)
            for name, shape, dtype, a, b in payload["metadata"]
        }
        self.brain.take(weights, record.weight_version)
        return True, "Success"


class Engine:
    """As SGLang's `Engine`, with one process beneath it that does nothing."""

    def __init__(self, *, custom_sigquit_handler: Any = None, **arguments: Any) -> None:
        import signal

        if custom_sigquit_handler is not None:
            signal.signal(signal.SIGQUIT, custom_sigquit_handler)
        self.brain = Brain(arguments)
        self.tokenizer_manager = Manager(self.brain)
        self.loop = asyncio.new_event_loop()
        self.process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,), daemon=True)
        self.process.start()

    def get_all_child_pids(self) -> list[int | None]:
        return [self.process.pid]

    async def async_generate(self, **body: Any) -> dict[str, Any]:
        if unknown := set(body) - set(PUBLISHED["engine"]["async_generate"]):
            raise TypeError(f"async_generate has no {sorted(unknown)}")
        return await asyncio.to_thread(self.brain.generate, body)

    def shutdown(self) -> None:
        raise AssertionError("this would end every child of the run")


class FlattenedTensorBucket:
    """Tensors one after another, in bytes."""

    def __init__(self, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
        self._flat = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in named_tensors])
        self._metadata, end = [], 0
        for name, tensor in named_tensors:
            start, end = end, end + tensor.nbytes
            self._metadata.append((name, tensor.shape, tensor.dtype, start, end))

    def get_flattened_tensor(self) -> torch.Tensor:
        return self._flat

    def get_metadata(self) -> list[Any]:
        return self._metadata


class Serializer:
    """Passes objects within one process."""

    kept: ClassVar[dict[bytes, Any]] = {}

    @classmethod
    def serialize(cls, obj: Any, output_str: bool = False) -> bytes:
        name = str(len(cls.kept)).encode()
        cls.kept[name] = obj
        return name


def record(name: str) -> type:
    """A record that takes the fields which it was published with."""

    def init(self: Any, **value: Any) -> None:
        if unknown := value.keys() - set(PUBLISHED["records"][name]):
            raise TypeError(f"{name} has no {sorted(unknown)}")
        self.__dict__.update(value)

    return type(name, (), {"__init__": init})


MUTE = """
import http.server, sys, time

class Mute(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self):
        time.sleep(600)

def launch_server(given):
    print("CUDA error: an illegal memory access was encountered", flush=True)
    http.server.ThreadingHTTPServer((given.host, given.port), Mute).serve_forever()
"""
"""A server that starts at once and never responds."""


def install(folder: Path, *, mute: bool = False) -> Path:
    """A package `sglang` under `folder` that is all of this, with the names of its arguments where SGLang has them."""
    package = folder / "sglang" / "srt"
    arguments = "\n".join(f"    {name}: object = None" for name in PUBLISHED["server_args"])
    files = {
        "arg_groups/fields/all.py": f"class All:\n{arguments}\n",
        "server_args.py": "from types import SimpleNamespace as ServerArgs\nclass Unrelated:\n    other: int = 0\n",
        "entrypoints/http_server.py": MUTE if mute else "from sglang_stand_in import launch_server\n",
        "entrypoints/engine.py": "from sglang_stand_in import Engine\n",
        "managers/io_struct.py": "from sglang_stand_in import PUBLISHED, record\n"
        "globals().update({name: record(name) for name in PUBLISHED['records']})\n",
        "weight_sync/tensor_bucket.py": "from sglang_stand_in import FlattenedTensorBucket\n",
        "utils/__init__.py": "from sglang_stand_in import Serializer as MultiprocessingSerializer\n",
    }
    about = f"Metadata-Version: 2.1\nName: sglang\nVersion: {PUBLISHED['version']}\n"
    files[f"../../sglang-{PUBLISHED['version']}.dist-info/METADATA"] = about
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
