"""Write docs/works-with.md: what was tried together with this package, by which test, and how close it came.

    python docs/make_works_with.py               # the page, from the rows below and benchmarks/results/works_with.json
    python docs/make_works_with.py --measure     # that file too: a minute of training tiny models (needs TRL)

A row names the test that does it; `tests/project/test_works_with.py` holds the page to the rows and the rows to the tests.
"""

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "works-with.md"
RESULTS = ROOT / "benchmarks" / "results" / "works_with.json"
PACKAGES = ("torch", "transformers", "peft", "trl", "accelerate", "bitsandbytes", "datasets")

TRL = "tests/integration/test_trl.py::test_"
TRAINERS = {
    "DPO": ("TRL `DPOTrainer`", "[dpo.py](../examples/dpo.py)"),
    "ORPO": ("TRL `ORPOTrainer` (experimental)", "[dpo.py](../examples/dpo.py) `--method orpo`"),
    "KTO": ("TRL `KTOTrainer`", "[kto.py](../examples/kto.py)"),
    "Reward": ("TRL `RewardTrainer`", "[reward_model.py](../examples/reward_model.py)"),
    "GRPO": ("TRL `GRPOTrainer`, transformers' generation", "[grpo.py](../examples/grpo.py)"),
    "RLOO": ("TRL `RLOOTrainer`, transformers' generation", "[grpo.py](../examples/grpo.py) `--method rloo`"),
}
ROWS = (  # with what, what was done, how close, the test
    (
        "DPO, KTO",
        "`ref_model=None`: adapters disabled against the frozen base alone",
        "the same bits",
        TRL + "the_reference_is_the_frozen_base",
    ),
    (
        "DPO, GRPO",
        "200 steps: tensors alive at step 200 and at step 20",
        "no growth",
        TRL + "nothing_grows",
    ),
    (
        "GRPO, RLOO",
        "log-probabilities of sampled tokens: `generate` and the training forward",
        "rounding (5e-5)",
        "tests/integration/test_rollouts.py::test_the_training_forward_gives_the_log_probabilities_of_generate",
    ),
    (
        "transformers `Trainer`",
        "loss at supervised positions, accumulation, evaluation with metrics",
        "1e-5 of a logged number",
        "tests/fusion/test_loss_training.py::test_trainer",
    ),
    (
        "TRL `SFTTrainer`",
        "prompts masked out; loss, accuracy, entropy",
        "1e-5 of a logged number",
        "tests/fusion/test_loss_training.py::test_sft_trainer",
    ),
    (
        "TRL `SFTTrainer` with `packing=True`, with `padding_free=True`",
        "samples in one row, without flash attention, beside a padded batch",
        "1e-5 of a logged number",
        "tests/integration/test_sft_packed.py::test_packed_samples_are_trained_as_each_by_itself",
    ),
    (
        "collators that pack (`position_ids`, `cu_seq_lens_q`)",
        "one recording serves every packing",
        "the same loss",
        "tests/training/test_packing.py::test_one_recording_serves_every_packing",
    ),
    (
        "`Trainer` with CUDA graphs",
        "gradient accumulation",
        "the same losses",
        "tests/training/test_graphs.py::test_trainer_with_accumulation_gives_the_same_losses",
    ),
    (
        "accelerate, a loop of one's own",
        "`Accelerator.prepare`, `accumulate`, `backward`",
        "the same losses",
        "tests/integration/test_accelerate.py::test_a_loop_of_accelerate_is_the_loop_without",
    ),
    (
        "accelerate, FSDP2",
        "NF4 weights sharded over two processes",
        "as one process",
        "tests/training/test_distributed_trainer.py::test_nf4_is_sharded_through_accelerate",
    ),
    (
        "accelerate's `device_map`",
        "hooks that only move tensors",
        "the same bits",
        "tests/lora/test_plain.py::test_hooks_of_accelerate_that_only_move_tensors_cost_nothing",
    ),
    (
        "PEFT rsLoRA",
        "forward and scaling, every backend",
        "rounding",
        "tests/lora/test_lora.py::test_forward_and_scaling",
    ),
    (
        "PEFT DoRA",
        "forward, beside plain LoRA",
        "rounding",
        "tests/lora/test_lora_adapters.py::test_dora_forward",
    ),
    (
        "PEFT PiSSA",
        "the leading singular part goes to the adapter",
        "requantised base",
        "tests/lora/test_inits.py::test_pissa_takes_the_leading_singular_part",
    ),
    (
        "PEFT EVA",
        "`initialize_lora_eva_weights`, with and without moving ranks between layers",
        "leading directions of the inputs",
        "tests/lora/test_eva.py::test_eva_takes_the_leading_directions_of_the_inputs",
    ),
    (
        "PEFT trainable tokens",
        "new tokens train beside the adapter",
        "as stock PEFT",
        "tests/lora/test_peft_modules.py::test_trainable_tokens",
    ),
    (
        "bitsandbytes' 8-bit and paged optimizers",
        "state saved and resumed",
        "the same bits",
        "tests/training/test_paging.py::test_the_state_resumes",
    ),
    (
        "`torch.compile`",
        "the whole model, Inductor",
        "rounding",
        "tests/integration/test_compile.py::test_inductor",
    ),
)
LLAMA = "tests/llama_cpp/test_llama_cpp.py::test_"
ROWS += (
    (
        "llama.cpp (llama-cpp-python 0.3.36, `make test-llama`)",
        "GGUF files of eight families, FP32, BF16 and Q8_0: logits",
        "1e-6 of their norm in FP32 (Gemma 1e-4)",
        LLAMA + "logits",
    ),
    (
        "llama.cpp",
        "an adapter as GGUF on a GGUF base, against the merged model",
        "3e-6 of the logits' norm (Gemma 1e-4)",
        LLAMA + "an_adapter_on_a_base_and_the_merged_model_agree",
    ),
    (
        "llama.cpp",
        "tokens of byte-level and of SentencePiece BPE",
        "the same",
        LLAMA + "tokens",
    ),
)
NOT_RUN = (
    "Ollama: it takes the GGUF files above, and a Modelfile whose template was compared with the Jinja template.",
    "Generation by a serving engine inside GRPO or RLOO (`use_vllm=True`): vLLM is not installed where the tests run.",
    "The trainers above on a GPU, in BF16, or with several processes: these rows are of a CPU, one process, FP32.",
    "sentence-transformers and Unsloth's trainers.",
)


def measure() -> dict:
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "integration"), str(ROOT / "examples")]
    import test_trl

    found = {}
    for kind in TRAINERS:
        with tempfile.TemporaryDirectory() as folder:
            difference = max(test_trl.against_stock(kind, folder).values())
            found[kind] = {"difference": difference, "learned": test_trl.learned(kind, folder)}
        print(kind, found[kind], flush=True)
    return {"versions": {name: version(name) for name in PACKAGES}, "trainers": found}


def page(results: dict) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    lines = [
        "# Works with",
        "",
        "<!-- made by docs/make_works_with.py -->",
        "",
        f"Tiny models on a CPU: {versions}.",
        "",
        "Trainers that get an `NVFP4LoraConfig` as their `peft_config` and nothing else. The third column is the largest",
        "difference of any logged number (loss, gradient norm, rewards, log-probabilities) over 5 steps between stock PEFT and",
        f'`backend="bf16"`, same seeds, FP32; its bound is 2e-4 (`{TRL}bf16_trains_what_stock_peft_trains`). The last is what',
        f'`backend="nvfp4"` learns in 30 steps (`{TRL}nvfp4_learns`): the loss, or with GRPO and RLOO the reward, first and',
        "last.",
        "",
        "| trainer | script | `bf16` against stock PEFT | `nvfp4` |",
        "|---|---|---|---|",
    ]
    for kind, (name, script) in TRAINERS.items():
        row = results["trainers"][kind]
        first, last = row["learned"]
        how_close = f"{row['difference']:.0e}" if row["difference"] else "equal"
        lines.append(f"| {name} | {script} | {how_close} | {first:.3f} to {last:.3f} |")
    lines += ["", "| with | what | how close | test |", "|---|---|---|---|"]
    lines += [f"| {name} | {what} | {bound} | `{test.removeprefix('tests/')}` |" for name, what, bound, test in ROWS]
    return "\n".join([*lines, "", "Not run:", "", *(f"* {reason}" for reason in NOT_RUN), ""])


def main() -> None:
    if "--measure" in sys.argv[1:]:
        RESULTS.write_text(json.dumps(measure(), indent=2) + "\n", encoding="utf-8")
    PAGE.write_text(page(json.loads(RESULTS.read_text("utf-8"))), encoding="utf-8")
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
