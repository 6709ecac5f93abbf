"""What the command line imports: PyTorch, transformers and PEFT take seconds, and neither help nor an estimate needs them.

Processes of their own, since this one has imported everything. The command's entry point is ``peft_nvfp4_cli``.
"""

import json
import re
import subprocess
import sys

import pytest

pytest.importorskip("typer")
SLOW = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "trl", "datasets", "matplotlib", "numpy")
SAYS = f"print('slow:', [name for name in {SLOW} if name in sys.modules], len(sys.modules), 'modules', file=sys.stderr)"
MOST = 700
"""Modules that help or an estimate may import; PyTorch alone has a thousand. There are 480 of all commands' help, 370 of an
estimate: 0.4 and 0.3 s of a core that others use, too. They are counted since times depend on what else runs."""


def python(code: str) -> subprocess.CompletedProcess:
    run = subprocess.run([sys.executable, "-c", f"import sys\n{code}"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run


def modules(said: str) -> int:
    return int(re.search(r"(\d+) modules$", said.strip())[1])


def test_help_of_every_command_imports_no_pytorch():
    code = f"""
from peft_nvfp4_cli import main
from typer.testing import CliRunner
from peft_nvfp4 import cli
app = cli.application()
for words in [["--help"], *([name, "--help"] for name, _, _ in cli.COMMANDS)]:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0 and "Usage" in result.output, words
{SAYS}"""
    said = python(code).stderr
    assert "slow: []" in said and modules(said) < MOST


def test_completion_imports_no_pytorch():
    code = f"""
import atexit, os
os.environ |= {{"_PEFT_NVFP4_COMPLETE": "complete_bash", "COMP_WORDS": "peft-nvfp4 es", "COMP_CWORD": "1"}}
sys.argv = ["peft-nvfp4"]
from peft_nvfp4_cli import main
atexit.register(lambda: {SAYS})
main()"""
    run = python(code)
    assert run.stdout.split() == ["estimate"] and "slow: []" in run.stderr


def test_an_estimate_imports_no_pytorch(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    code = f"""
import atexit
atexit.register(lambda: {SAYS})
from peft_nvfp4_cli import main
sys.argv = ["peft-nvfp4", "estimate", {str(tmp_path)!r}, "--card", "RTX 5080", "--batch", "2"]
main()"""
    run = python(code)
    assert "it fits" in run.stdout and "slow: []" in run.stderr and modules(run.stderr) < MOST


def test_an_error_of_an_estimate_imports_no_pytorch():
    code = f"""
import atexit, os
os.environ["HF_HUB_OFFLINE"] = "1"
atexit.register(lambda: {SAYS})
from peft_nvfp4_cli import main
sys.argv = ["peft-nvfp4", "estimate", "nothing"]
try:
    main()
except SystemExit as stop:
    assert stop.code == 1"""
    run = python(code)
    assert "Error: nothing is neither one of llama-1b" in run.stderr and "slow: []" in run.stderr


def test_a_public_name_brings_the_hooks_there():
    code = """
import peft_nvfp4_cli, peft_nvfp4
assert "peft" not in sys.modules
assert not hasattr(peft_nvfp4, "__wrapped__") and "peft" not in sys.modules
assert peft_nvfp4.NVFP4LoraConfig(r=4).backend == "nvfp4"
from peft_nvfp4.lora.hooks import WRAPPED
print("installed:", len(WRAPPED))"""
    assert int(python(code).stdout.rpartition("installed:")[2]) > 5


def test_the_package_has_the_names_of_api():
    import peft_nvfp4
    from peft_nvfp4 import api

    assert set(peft_nvfp4.__all__) == {"__version__", *api.__all__}
    assert all(getattr(peft_nvfp4, name) is getattr(api, name) for name in api.__all__)
