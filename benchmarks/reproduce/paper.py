"""What others published, as data: the only figures in the report that are typed by hand.

"PACT: NVFP4 Data-Flow LoRA Fine-Tuning on Consumer GPUs" (2026): each of its tables as a name here, the number beside it. At hand
are abstract, captions and tables, some of the tables without their last rows; of the figures only the captions (FIGURES), so
there is nothing to compare with in numbers. HYC_LORA is what HyC-LoRA says of itself; Table 10 is PACT's measurement of it.
"""

from __future__ import annotations

CARD = "RTX 5080, 16 GB"

GEMMS = {  # Table 1: Llama-3B projection -> (d_in, d_out, ms in BF16, ms in NVFP4, speedup)
    "query": (3072, 3072, 0.690, 0.113, 6.1),
    "gate/up": (3072, 8192, 1.778, 0.304, 5.8),
    "down": (8192, 3072, 1.818, 0.267, 6.8),
}

TASKS = ("SST-2", "RTE", "BoolQ", "WSC", "WiC", "COPA", "WinoG.", "ARC-E", "ARC-C")
ACCURACY = {  # Table 2: model -> method -> accuracy of TASKS, and their average as printed
    "Llama-1B": {
        "Zero-shot": ((0.589, 0.520, 0.584, 0.365, 0.500, 0.730, 0.575, 0.472, 0.313), 0.516),
        "BF16 LoRA": ((0.946, 0.816, 0.811, 0.635, 0.705, 0.777, 0.645, 0.755, 0.475), 0.729),
        "QLoRA": ((0.944, 0.786, 0.817, 0.635, 0.705, 0.767, 0.622, 0.728, 0.433), 0.715),
        "TE": ((0.932, 0.785, 0.802, 0.571, 0.657, 0.793, 0.602, 0.698, 0.372), 0.690),
        "PACT": ((0.940, 0.823, 0.790, 0.551, 0.665, 0.777, 0.612, 0.729, 0.444), 0.703),
    },
    "Llama-3B": {  # its other rows are not at hand
        "Zero-shot": ((0.589, 0.473, 0.680, 0.413, 0.500, 0.780, 0.661, 0.803, 0.667), 0.618),
    },
}

GENERATION_METRICS = ("SQuAD F1", "GSM8K EM", "SAMSum R-L")
GENERATION = {  # Table 3: model -> method -> GENERATION_METRICS
    "Llama-1B": {
        "BF16 LoRA": (0.806, 0.170, 0.418),
        "QLoRA": (0.793, 0.161, 0.413),
        "TE": (0.761, 0.131, 0.405),
        "PACT": (0.782, 0.148, 0.408),
    },
    "Llama-3B": {"BF16 LoRA": (0.837, 0.393, 0.444)},  # its other rows are not at hand
}

SCIENCE_QA = {  # Table 4: Qwen2.5-VL-3B -> accuracy before and after adaptation
    "BF16 LoRA": (0.779, 0.936),
    "PACT, text calibration": (0.754, 0.876),
    "PACT, image-prompt calibration": (0.762, 0.917),
}

LARGEST = {  # Table 5: model -> method -> (largest batch tested that fits, tokens/s there); 1,024 tokens a row
    "Llama-1B": {"BF16 LoRA": (10, 17162), "QLoRA": (12, 16800), "TE": (12, 27113), "PACT": (26, 31723)},
    "Llama-3B": {"BF16 LoRA": (2, 6217), "QLoRA": (4, 6454)},  # its other rows are not at hand
}
LARGEST_SEQ = 1024

CHECKPOINTING = {  # Table 9: Llama-1B -> (step ms, peak GB)
    "BF16 LoRA": (240, 7.06),
    "BF16 + checkpointing": (310, 3.14),
    "PACT": (125, 3.72),
    "PACT + checkpointing": (159, 2.27),
}
ASSUMED_SHAPE = (4, 1024)
"""Batch and length of Tables 9 and 11, which do not say them: the peaks measured there are near the paper's."""

HYC_LORA_MEASURED = {  # Table 10: (batch, length) -> setting -> (MiB allocated, ms a step); None: OOM, or not measured
    (4, 512): {"Own baseline": (9706, 194), "2-bit compression": (6112, 219), "4-bit compression": (6341, None)},
    (8, 512): {"Own baseline": (None, None), "2-bit compression": (9627, 425), "4-bit compression": (10088, None)},
}
QLORA = {"slower than BF16 LoRA": 0.16, "order on MMLU": "full BF16 ≥ BF16 LoRA ≈ NF4 QLoRA > INT4 QLoRA"}
"""From an article on the QLoRA paper (Dettmers et al., 2023)."""

HYC_LORA = {"memory reduction": 3.97}
"""From the README of thu-ee-acts-lab/HyC-LoRA-release ("3.97x memory reduction"), which does not say of which model or part."""

BREAKDOWN = {  # Table 11: category -> (ms in BF16 LoRA, ms in PACT) of a step of Llama-1B
    "BF16 GEMMs": (202.7, 48.9),
    "NVFP4 GEMMs": (0, 25.6),
    "Quantization / fused kernels": (0, 17.1),
    "Attention": (12.9, 12.7),
    "Elementwise / other": (21.5, 21.8),
    "Reported profile total": (239.4, 130.1),
}
PROFILED = {  # category there -> categories of peft_nvfp4.cli._run.profiling
    "BF16 GEMMs": ("BF16 GEMMs",),
    "NVFP4 GEMMs": ("NVFP4 GEMMs",),
    "Quantization / fused kernels": ("dequantise", "quantise/fused"),
    "Attention": ("attention",),
    "Elementwise / other": ("elementwise/other",),
}

FIGURES = {
    "Figure 1": "GPU memory composition during BF16 LoRA fine-tuning at batch size 4. Activations dominate memory at longer "
    "sequence lengths.",
    "Figure 4": "Training-step time and peak memory at fixed batch size and sequence length. PACT lowers both costs and fits "
    "workloads that exceed the memory budget of other methods.",
    "Figure 5": "Llama-1B accuracy versus wall-clock training time. PACT has the lowest training time for the same number of "
    "training steps.",
}
"""Captions; the curves' values are not at hand."""
