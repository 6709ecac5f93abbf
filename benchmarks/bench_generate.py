"""Generation with adapters on Llama shapes: time per token, memory and launches, for this package and its baselines.

    python benchmarks/bench_generate.py --shapes 1b --out results
    python benchmarks/bench_generate.py --shapes tiny --device cpu --prompt 8 --new 4 --batches 1,2      # does it run?

``generate`` (greedy, KV cache) of NEW tokens after a random prompt. A case is a method and options as in bench_train.py, and
``-merged``: adapters merged into the weights (into NVFP4 for ``nvfp4``; BF16 for ``bf16``). Two numbers per batch size:

* ``token ms``: (generate NEW tokens - generate 1) / (NEW - 1), which leaves out the prompt (``prompt ms``). In eager mode this is
  mostly the host, issuing launches; ``launches`` is their number per token.
* ``graph ms``: the step that decodes one token, with a static KV cache, captured in a CUDA graph: what the device needs.

Adapters of stock PEFT are in BF16, its faster side; this package's are FP32 masters, its default.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from pathlib import Path

import bench_train
import common
import torch
from bench_train import SHAPES
from environment import environment
from transformers import StaticCache

from peft_nvfp4.cli._run import profiling

CASES = "bf16 bf16-merged qlora nvfp4-paper nvfp4-paper-merged nvfp4 nvfp4-merged"
ATTENTION = "sdpa"


class Generator:
    """One case, ready to generate."""

    def __init__(self, name: str, shape: str, device: torch.device):
        self.name, self.device, self.vocab = name, device, SHAPES[shape][6]
        case = bench_train.Case(name.removesuffix("-merged"))
        self.model, _, self.notes = bench_train.build(case, shape, ATTENTION, device)
        self.model.eval()
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        if name.endswith("-merged"):
            self.model.merge_adapter()

    def prompt(self, batch: int, length: int) -> torch.Tensor:
        return torch.randint(1, self.vocab, (batch, length), generator=torch.Generator().manual_seed(0)).to(self.device)

    def generate(self, ids: torch.Tensor, new: int) -> torch.Tensor:
        # no end-of-sequence token: every row runs to the end, and nothing waits for the device to ask whether one has
        settings = copy.deepcopy(self.model.generation_config)
        settings.eos_token_id, settings.pad_token_id, settings.do_sample = None, 0, False
        settings.max_new_tokens = settings.min_new_tokens = new
        return self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)

    def decode_step(self, ids: torch.Tensor, new: int) -> Callable[[], object]:
        """One token after the prompt, over and over at growing positions, captured in a CUDA graph where there is a GPU."""
        model = self.model.get_base_model()
        cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + new + 32)  # every step takes a place: warm-up too
        token = ids[:, -1:].clone()

        @torch.no_grad()
        def step() -> None:
            model(input_ids=token, past_key_values=cache, position_ids=position, use_cache=True)

        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache, use_cache=True)
        position = torch.full_like(token, ids.shape[1])
        if self.device.type != "cuda":
            return step
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay


def measure(generator: Generator, batch: int, args: argparse.Namespace, before: dict[str, int]) -> dict:
    """Memory and launches; the times are taken with all cases in turn."""
    ids = generator.prompt(batch, args.prompt)
    generator.generate(ids, 2)  # compiles kernels, makes caches
    row = common.peak_memory(lambda: generator.generate(ids, args.new), args.device, before)
    few = min(8, args.new - 1)
    if args.device.type == "cuda" and few:
        launches = [profiling.breakdown(lambda n=n: generator.generate(ids, n), args.device, 1)["launches"] for n in (1, 1 + few)]
        row["launches"] = (launches[1] - launches[0]) / few
    return row


def times(generators: dict[str, Generator], batch: int, args: argparse.Namespace, rows: dict[str, dict]) -> None:
    """Fill in the times of all cases, interleaved."""
    found = {}
    for new in (1, args.new):
        ids = {name: g.prompt(batch, args.prompt) for name, g in generators.items()}
        steps = {name: (lambda g=g, x=ids[name], n=new: g.generate(x, n)) for name, g in generators.items()}
        found[new] = common.interleaved(steps, args.rounds, args.burst, args.device)
    for name in generators:
        results = [found[1][name], found[args.new][name]]
        failed = next((r for r in results if isinstance(r, Exception)), None)
        if failed is not None:
            rows[name]["error"] = f"while timing: {type(failed).__name__}: {failed}"
            continue
        prompt_ms, whole_ms = (r["step_ms"] for r in results)
        token_ms = (whole_ms - prompt_ms) / max(1, args.new - 1)
        spread = (results[0]["spread_ms"] + results[1]["spread_ms"]) / max(1, args.new - 1)
        rows[name] |= {"prompt_ms": prompt_ms, "token_ms": token_ms, "spread_ms": spread, "tokens_per_s": 1e3 * batch / token_ms}
    for name, generator in generators.items():  # one by one: a graph holds its memory

        def graph(name=name, generator=generator) -> None:
            step = generator.decode_step(generator.prompt(batch, args.prompt), args.new)
            rows[name]["graph_ms"] = common.summary([common.burst(step, min(20, args.new), args.device)])["step_ms"]

        problem: dict = {}
        common.guarded(problem, graph)
        rows[name] |= {f"graph_{key}": text for key, text in problem.items()}
        common.release(args.device)


def run_shape(shape: str, args: argparse.Namespace, rows: list[dict], save: Callable[[], None]) -> None:
    generators: dict[str, Generator] = {}
    own = {(name, batch): {"shape": shape, "case": name, "batch": batch} for name in args.cases for batch in args.batches}
    rows += [own[name, batch] for batch in args.batches for name in args.cases]
    for name in args.cases:
        before = common.memory_now(args.device)
        first = own[name, args.batches[0]]
        common.guarded(first, lambda: generators.update({name: Generator(name, shape, args.device)}))
        for batch in args.batches if name in generators else ():
            row = own[name, batch]
            common.guarded(row, lambda: row.update(measure(generators[name], batch, args, before)))
            common.release(args.device)
        print(f"  {shape} {name}: {first.get('error', 'ok')}", flush=True)
        save()
    for batch in args.batches:
        alive = {name: g for name, g in generators.items() if "error" not in own[name, batch]}
        times(alive, batch, args, {name: own[name, batch] for name in alive})
        save()


COLUMNS = {
    "case": lambda r: f"{r['shape']} {r['case']}",
    "batch": lambda r: r["batch"],
    "token ms": lambda r: r["token_ms"],
    "spread": lambda r: r["spread_ms"],
    "tokens/s": lambda r: r["tokens_per_s"],
    "graph ms": lambda r: r["graph_ms"],
    "prompt ms": lambda r: r["prompt_ms"],
    "launches": lambda r: r["launches"],
    "peak GB": lambda r: r["peak_allocated"] / common.GB,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="1b", help=f"comma-separated: {', '.join(SHAPES)}")
    parser.add_argument("--cases", default=CASES.replace(" ", ","), help="comma-separated")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--burst", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--label", help="name of the files written (default: generate-SHAPES)")
    args = parser.parse_args()
    args.label = args.label or f"generate-{args.shapes.replace(',', '-')}"
    args.shapes, args.cases = args.shapes.split(","), args.cases.split(",")
    args.batches = [int(b) for b in args.batches.split(",")]
    if args.device.type == "cuda" and args.device.index is None:
        args.device = torch.device("cuda", torch.cuda.current_device())
    return args


def main() -> None:
    args = arguments()
    head = {"environment": environment(), "settings": {k: str(v) for k, v in vars(args).items()}}
    rows: list[dict] = []
    for shape in args.shapes:
        run_shape(shape, args, rows, lambda: common.write(args.out, args.label, head, rows))
    print(common.table(rows, COLUMNS))
    for row in rows:
        for key in ("error", "graph_error"):
            if key in row:
                print(f"FAILED {row['shape']} {row['case']} batch {row['batch']}: {row[key]}")


if __name__ == "__main__":
    main()
