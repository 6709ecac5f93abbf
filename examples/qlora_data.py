"""Write what the QLoRA scripts read, from the model and the data that `python examples/smollm2_reviews.py fetch` got:

python examples/qlora_data.py FOLDER      # FOLDER/model (SmolLM2-135M-Instruct in BF16) and FOLDER/train.jsonl
"""

import argparse
import json
from pathlib import Path

import smollm2_reviews as data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=1000, help="sentences (%(default)s)")
    parser.add_argument("--layers", type=int, help="keep only the first layers of the model: a quick look at the mechanics")
    args = parser.parse_args()
    model, tokenizer = data.load_smollm2(layers=args.layers)
    model.save_pretrained(args.folder / "model")
    tokenizer.save_pretrained(args.folder / "model")
    rows, _ = data.movie_reviews()
    texts = [f"{row.text}{data.PROMPT}{data.LABELS[row.label]}" for row in rows[: args.rows]]
    (args.folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


if __name__ == "__main__":
    main()
