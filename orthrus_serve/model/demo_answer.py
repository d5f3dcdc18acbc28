"""Asks the demo model one question with Transformers alone, greedily: does it answer like itself?

A process of its own (`python -m orthrus_serve.model.demo_answer FOLDER`), since it imports torch and Transformers.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTION = "What is the capital of France?"
EXPECTED = "Paris"


def answer(folder: Path, question: str = QUESTION, max_new_tokens: int = 16) -> str:
    """The greedy answer to one chat message."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        output = model.generate(**prompt, max_new_tokens=max_new_tokens, do_sample=False)
    return str(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


def main(argv: Sequence[str] | None = None) -> int:
    """Prints question and answer; 1 when the answer is not the expected one."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    text = answer(Path(arguments[0]))
    sys.stderr.write(f"{QUESTION} {text}\n")
    return 0 if EXPECTED in text else 1


if __name__ == "__main__":
    sys.exit(main())
