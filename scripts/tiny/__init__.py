"""How the bundled base model is made: skills -> corpus -> tokenizer -> pretrain -> probes."""
