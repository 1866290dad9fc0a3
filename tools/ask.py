#!/usr/bin/env python3
"""Asks the model of a Hugging Face directory one question: python tools/ask.py DIR "What is the capital of France?"

Greedy, through the model's own chat template, so that equal weights give equal answers.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def ask(path: Path, question: str, length: int = 64) -> str:
    """The answer. A tensor that is missing, left over or wrongly shaped is an error: transformers only warns."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    model, info = loaded
    wrong = {kind: sorted(names) for kind, names in info.items() if names}
    if wrong:
        raise SystemExit(f"{path} does not hold this model's weights: {wrong}")
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        tokens = model.eval().generate(**prompt, max_new_tokens=length, do_sample=False)
    return tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description="ask the model of a Hugging Face directory one question")
    parser.add_argument("dir", type=Path)
    parser.add_argument("question", nargs="?", default="What is the capital of France?")
    parser.add_argument("--length", type=int, default=64, help="tokens at most")
    arguments = parser.parse_args()
    print(ask(arguments.dir, arguments.question, arguments.length))


if __name__ == "__main__":
    main()
