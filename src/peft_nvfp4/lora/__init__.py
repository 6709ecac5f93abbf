"""The PEFT tuner: configuration, hooks into PEFT, LoRA layers over frozen linears and experts, starts, merging and reports."""
