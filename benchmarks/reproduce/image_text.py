"""The paper's Table 4 with this package's backends: questions about pictures, before and after adaptation.

    python benchmarks/reproduce/image_text.py --model Qwen/Qwen2.5-VL-3B-Instruct --out OUT      # the paper's model, ScienceQA
    python benchmarks/reproduce/image_text.py --model FOLDER --tasks digits --out OUT            # no hub for the data
    python benchmarks/reproduce/image_text.py --stand-in --out OUT                               # no hub at all
    python benchmarks/reproduce/image_text.py --stand-in --small                                 # 2 steps: does it run?

Any model of transformers' image-text-to-text class whose processor has a chat template will do (Idefics3, SmolVLM, Qwen2.5-VL).
Only the text decoder is frozen in 4 bits and adapted, for all methods; vision tower, connector and head stay dense in BF16. GPTQ
weights are calibrated through as many sequences of text, or through prompts with their pictures (training rows): that is what the
paper's table compares.

No trained vision-language model is in any package. ``--stand-in`` puts the packaged SmolLM2-135M under a small random vision
tower: what it learns, it learns of random features, so it shows that all this works and how the methods compare there, not what
the paper's model would do.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[1])]

import calibrate_vlm
import torch
import torch.nn.functional as F
from common import smollm2_reviews as data
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, AutoProcessor, Idefics3ImageProcessorPil, Idefics3Processor

from peft_nvfp4.calibration.run import CalibrationOptions, calibrate
from reproduce import scoring
from reproduce.image_tasks import LETTERS, TASKS, Pictured
from reproduce.methods import METHODS as TEXT_METHODS
from reproduce.methods import TARGETS, Method, adapt, general_texts, nvfp4
from reproduce.runner import GRID, Group, execute, parse, shared_arguments
from reproduce.tasks import Splits
from reproduce.training import Recipe, base_model, train

TABLE = "image_text"
STAND_IN = "SmolLM2-135M, random vision tower"
_ALL = (
    *(TEXT_METHODS[name] for name in ("bf16", "nf4", "paper")),
    nvfp4("paper_gptq_text", "NVFP4 + GPTQ on text (PACT)", "paper", "text"),
    nvfp4("paper_gptq_image", "NVFP4 + GPTQ on image prompts (PACT)", "paper", "image"),
    TEXT_METHODS["balanced"],
    nvfp4("balanced_gptq_image", "NVFP4 balanced + GPTQ on image prompts", "balanced", "image"),
)
METHODS = {method.name: method for method in _ALL}
MISSING = """No vision-language model: {why}
  --model FOLDER or, where a hub is reached, --model NAME (Qwen/Qwen2.5-VL-3B-Instruct is the paper's; a small one is
  HuggingFaceTB/SmolVLM-256M-Instruct); --stand-in does without a trained one, see --help."""
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for part in m['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def stand_in(folder: Path) -> Path:
    """Save the packaged language model under a random vision tower, with a processor, in the folder.

    Raises:
        FileNotFoundError: the packaged model was not fetched.
    """
    if not (folder / "processor_config.json").is_file():  # what is written last
        language, tokenizer = data.load_smollm2()
        calibrate_vlm.build(language, tokenizer).save_pretrained(folder)
        size = {"longest_edge": calibrate_vlm.TILE}
        images = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
        processor = Idefics3Processor(images, tokenizer, image_seq_len=calibrate_vlm.TOKENS, chat_template=CHAT)
        processor.save_pretrained(folder)
    return folder


def load_processor(name: str) -> Any:
    """
    Raises:
        SystemExit: it is not one of images and text; the message says what to give.
    """
    processor = AutoProcessor.from_pretrained(name)
    if not hasattr(processor, "image_processor"):
        raise SystemExit(MISSING.format(why=f"{name} reads text only"))
    processor.tokenizer.padding_side = "right"
    return processor


def load_model(name: str, device: torch.device) -> nn.Module:
    return AutoModelForImageTextToText.from_pretrained(name, dtype=torch.bfloat16).to(device).requires_grad_(False)


def decoder_and_rest(model: nn.Module) -> tuple[str, list[str]]:
    """The text decoder's name, and the largest modules that hold nothing of it: vision tower, connector, head.

    Raises:
        ValueError: the model does not say which its decoder is.
    """
    decoder = model.get_decoder()
    name = next(n for n, m in model.named_modules() if m is decoder)
    if not name:
        raise ValueError(f"{type(model).__name__} has no text decoder of its own")
    rest, parts = [], name.split(".")
    for i, part in enumerate(parts):
        parent = ".".join(parts[:i])
        rest += [f"{parent}.{n}".lstrip(".") for n, _ in model.get_submodule(parent).named_children() if n != part]
    return name, rest


def adapted_decoder(model: nn.Module, method: Method, calibration: Path | None) -> nn.Module:
    """The decoder frozen with an adapter, as the method wants it; everything else dense."""
    decoder, rest = decoder_and_rest(model)
    targets = rf"{re.escape(decoder)}\..*\.({'|'.join(TARGETS)})"
    return adapt(model, method, calibration, target_modules=targets, skip_modules=rest)


def prompt(item: Pictured, processor: Any) -> str:
    text = "\n".join(part for part in (item.context, item.question) if part)
    content = [{"type": "image"}, {"type": "text", "text": text}]
    return processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False)


def batch_of(items: Sequence[Pictured], processor: Any, device: Any) -> dict[str, Tensor]:
    """What a model takes, padded on the right. The chat's form has all special tokens."""
    texts, images = [prompt(item, processor) for item in items], [[item.image()] for item in items]
    found = processor(text=texts, images=images, padding=True, add_special_tokens=False, return_tensors="pt")
    return {key: value.to(device) for key, value in found.items()}


def letter_tokens(processor: Any) -> list[int]:
    """The token of each letter behind a prompt.

    Raises:
        ValueError: a letter is not one token there, or two letters are the same one.
    """
    head = prompt(Pictured("", "?", ""), processor)
    space = "" if head[-1:].isspace() else " "
    ids = lambda text: processor.tokenizer(text, add_special_tokens=False).input_ids
    found = [ids(head + space + letter) for letter in LETTERS]
    if any(f[:-1] != ids(head) for f in found) or len({f[-1] for f in found}) < len(LETTERS):
        raise ValueError(f"the letters {', '.join(LETTERS)} are not tokens of their own behind {head[-20:]!r}")
    return [f[-1] for f in found]


def answer_logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """(B, vocabulary) FP32 of what follows each prompt: the head runs at these positions only."""
    base = base_model(model)
    hidden = base.base_model(**inputs, use_cache=False).last_hidden_state
    last = inputs["attention_mask"].sum(1) - 1
    return base.get_output_embeddings()(hidden[torch.arange(len(last), device=last.device), last]).float()


class ImageLab:
    """A vision-language model on questions with pictures.

    Attributes:
        model: name or folder.
        work: folder of calibrations.
        samples, length: of a calibration: prompts, or texts of so many tokens.
    """

    def __init__(
        self, model: str, processor: Any, splits: dict[str, Splits], work: Path, device: torch.device, samples: int, length: int
    ):
        self.model, self.processor, self.splits, self.work = model, processor, splits, work
        self.device, self.samples, self.length = device, samples, length
        self.letters = torch.tensor(letter_tokens(processor), device=device)

    def calibration(self, group: Group) -> Path:
        """Folder of the calibration that the group's method wants; made when it is first asked for."""
        accuracy, by = group.method.config["accuracy"], group.method.calibration
        source = group.task if by == "image" else "text"
        folder = self.work / "calibrations" / f"{source}_{accuracy}_{self.samples}x{self.length}"
        if not (folder / "done").is_file():
            training = self.splits[group.task].train[: self.samples]
            rows = general_texts() if by == "text" else [batch_of([item], self.processor, "cpu") for item in training]
            shape = dict(samples=self.samples, seq_len=self.length, batch_size=8, report_tokens=0)
            model = load_model(self.model, self.device).eval()
            where = dict(output_dir=folder, device=self.device, skip_modules=decoder_and_rest(model)[1], progress=False)
            calibrate(model, rows, self.processor.tokenizer, CalibrationOptions(accuracy=accuracy, **shape), **where)
            (folder / "done").touch()
        return folder

    def adapted(self, group: Group) -> nn.Module:
        calibration = None if group.method.calibration is None else self.calibration(group)
        return adapted_decoder(load_model(self.model, self.device), group.method, calibration)

    def train(self, model: nn.Module, group: Group, recipe: Recipe) -> dict:
        """On the right letter among all tokens."""
        items = self.splits[group.task].train[: group.rows]

        def loss_of(batch: Tensor) -> Tensor:
            chosen = [items[i] for i in batch]
            right = self.letters[torch.tensor([item.gold for item in chosen], device=self.device)]
            return F.cross_entropy(answer_logits(model, batch_of(chosen, self.processor, self.device)), right)

        return train(model, len(items), recipe, loss_of)

    @torch.no_grad()
    def score(self, model: nn.Module, group: Group, split: str) -> dict:
        """nll of the right letters among all tokens; accuracy and choice_nll among a row's own letters."""
        model.eval()
        items = getattr(self.splits[group.task], split)[: group.rows]
        nll = torch.full((len(items), max(len(item.candidates) for item in items)), torch.inf)
        for start in range(0, len(items), group.batch):
            part = items[start : start + group.batch]
            logits = answer_logits(model, batch_of(part, self.processor, self.device))
            losses = -logits.log_softmax(-1)[:, self.letters].cpu()
            for row, item in enumerate(part):
                nll[start + row, : len(item.candidates)] = losses[row, : len(item.candidates)]
        return scoring.summary(nll, [item.gold for item in items], [item.subset for item in items])


def main(argv: Sequence[str] | None = None) -> None:
    parser = shared_arguments(__doc__)
    parser.add_argument("--model", help="folder of a vision-language model, or its name on a hub")
    parser.add_argument("--stand-in", action="store_true", help="the packaged SmolLM2-135M under a random vision tower")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, help="default: scienceqa; of --stand-in: digits")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--lrs", nargs="+", type=float, default=list(GRID), help="of the sweep; a single one is taken as it is")
    args = parse(parser, argv)
    if (args.model is None) is not args.stand_in:
        raise SystemExit(MISSING.format(why="give either --model or --stand-in"))
    splits = {task: TASKS[task].splits() for task in args.tasks or (["digits"] if args.stand_in else ["scienceqa"])}
    name = str(stand_in(args.work / "stand_in")) if args.stand_in else args.model
    shown = STAND_IN if args.stand_in else Path(name).resolve().name if Path(name).is_dir() else name
    plan = [Group(TABLE, t, shown, METHODS[m], tuple(args.lrs), zero_shot=True) for t in splits for m in args.methods]
    execute(plan, args, ImageLab(name, load_processor(name), splits, args.work, args.device, *args.calibration))


if __name__ == "__main__":
    main()
