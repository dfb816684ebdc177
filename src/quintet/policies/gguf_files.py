"""Conversion of GGUF files to Hugging Face directories.

transformers reads the tensors, dequantizes them and builds the tokenizer; the configuration is our own
(`quintet.config.model_locations.gguf_config`), so that a file is converted to the model it describes or refused.

`python -m quintet.policies.gguf_files FILE DIRECTORY` converts one. Conversions have a process of their own: importing
`gguf` may import OpenCV, which changes `LD_LIBRARY_PATH`, and a process with another value cannot use the warm fork
server.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.config.model_locations.gguf_config import UnsupportedGGUFError, gguf_architectures, read_gguf_config
from quintet.config.model_locations.gguf_header import UnreadableGGUFError
from quintet.errors import MachineError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPLIT_TEXT = "It's 1234 x_1=5,6;\n\n  CAN'T go\t«Été» 日本\r\n"
"""Text that the families of byte-level tokenizers split in different ways."""


def convert_in_process(file: Path, directory: Path) -> None:
    """Convert a GGUF file as `convert` does, in another process.

    Raises:
        MachineError: it cannot be converted.
    """
    check_gguf_file(file)
    command = [sys.executable, "-m", __name__, str(file.absolute()), str(directory.absolute())]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)  # noqa: S603
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        message = last if str(file.absolute()) in last else f"cannot convert {file}: {last}"
        raise MachineError(message, "use a Hugging Face directory of the model")


def check_gguf_file(file: Path) -> dict[str, Any]:
    """Return the `config.json` of the model in a GGUF file.

    Raises:
        MachineError: it is missing, damaged, or not converted.
    """
    try:
        return read_gguf_config(file)
    except OSError as error:
        raise MachineError(f"cannot read {file}: {error.strerror or error}", "name a .gguf file") from error
    except UnreadableGGUFError as error:
        raise MachineError(f"{file} is not a complete GGUF file: {error}", "copy or download it again") from error
    except UnsupportedGGUFError as error:
        names = ", ".join(gguf_architectures())
        hint = f"use a Hugging Face directory of the model; GGUF files of {names} are converted"
        raise MachineError(f"cannot convert {file}: {error}", hint) from error


def convert(file: Path, directory: Path) -> None:
    """Write the model and the tokenizer of a GGUF file to a Hugging Face directory, in float32.

    Raises:
        MachineError: the file is damaged or not converted, or lacks tensors.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    from quintet.policies.model_loading import load_tokenizer

    config = check_gguf_file(file)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config, dtype=torch.float32))
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    is_tied = config["tie_word_embeddings"]
    missing = set(model.load_state_dict(tensors, strict=False, assign=True).missing_keys)
    if missing := missing - ({"lm_head.weight"} if is_tied else set()):
        raise MachineError(f"{file} is incomplete: it has no {', '.join(sorted(missing)[:3])}")
    model.tie_weights()
    model.save_pretrained(directory)
    tokenizer = _tokenizer(file, config["max_position_embeddings"])
    tokenizer.save_pretrained(directory)
    if _splits(load_tokenizer(directory)) != _splits(tokenizer):
        message = f"cannot convert {file}: the tokenizer of its architecture splits texts in another way than it says"
        raise MachineError(message, "use a Hugging Face directory of the model")


def _tokenizer(file: Path, context: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a GGUF file as one of no family: the class of a family, such as Qwen2's, would split
    texts in its own way when it is loaded again."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    stored = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=stored.backend_tokenizer,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        **stored.special_tokens_map,
    )
    tokenizer.chat_template = stored.chat_template
    return tokenizer


def _splits(tokenizer: PreTrainedTokenizerFast) -> object:
    """Return the parts of a text within which a tokenizer merges characters; None if it does not split."""
    pre_tokenizer = tokenizer.backend_tokenizer.pre_tokenizer
    return None if pre_tokenizer is None else pre_tokenizer.pre_tokenize_str(SPLIT_TEXT)


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except MachineError as error:
        sys.exit(error.message)
