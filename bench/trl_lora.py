"""TRL's side of bench/lora_peers.py, which starts it, if need be with another interpreter: GRPOTrainer with
a PEFT adapter on the shipped example.

Takes one argument, the settings as JSON; appends to the file that they name a line for each batch: the time
of the update after it, and its accuracy.
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
import torch

import laminar_hpc.machine.compat.torchvision  # noqa: F401 (before transformers)
from laminar_hpc.environments.arithmetic import reward
from laminar_hpc.machine.compat.optional import left_out

with left_out("vllm"):
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer


class Course(TrainerCallback):
    """Notes each batch when its last update is made."""

    def __init__(self, settings: dict) -> None:
        self.settings = settings
        self.accuracies: list[float] = []
        self.written = 0

    def note(self, **of: object) -> None:
        with open(self.settings["log"], "a") as log:
            log.write(json.dumps({"time": time.time(), **of}) + "\n")

    def on_train_begin(self, args: object, state: object, control: object, **_: object) -> None:
        self.note(begins=True)

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        if state.global_step % self.settings["minibatches"] == 0:
            self.note(accuracy=self.accuracies[-1])


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    course = Course(settings)
    rows = [json.loads(line) for line in Path(settings["data"]).read_text().splitlines()]

    def rewards(prompts: list[str], completions: list[str], answer: list[str], **_: object) -> list[float]:
        given = zip(prompts, completions, answer, strict=True)
        found = [reward(prompt=p, response=c, row={"answer": a})["reward"] for p, c, a in given]
        course.accuracies.append(sum(found) / len(found))
        return found

    batch, parts = settings["prompts"] * settings["samples"], settings["minibatches"]
    config = GRPOConfig(
        output_dir=settings["folder"],
        per_device_train_batch_size=batch // parts,
        generation_batch_size=batch,
        num_generations=settings["samples"],
        max_completion_length=settings["max_tokens"],
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        epsilon=0.2,
        epsilon_high=0.28,
        max_steps=settings["steps"] * parts,
        seed=settings["seed"],
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    lora = LoraConfig(
        r=settings["rank"], lora_alpha=settings["alpha"], target_modules="all-linear", task_type="CAUSAL_LM"
    )
    GRPOTrainer(
        model=settings["model"],
        reward_funcs=rewards,
        args=config,
        train_dataset=Dataset.from_list(rows),
        peft_config=lora,
        callbacks=[course],
    ).train()


if __name__ == "__main__":
    main()
